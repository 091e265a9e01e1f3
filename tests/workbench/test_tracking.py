"""Logging into a store: what is kept, what is refused, and stores that are no stores."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pandas
import psutil
import pytest
import requests
from matplotlib.figure import Figure
from support.projects import EXPERIMENT, experiment
from support.refusals import one_sentence

from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.workbench.store import database, findings_table, run_index, showing, signatures, tracking


@pytest.fixture
def run(project):
    return tracking.start(EXPERIMENT, {"seed": 3, "model": "toy", "windows": [1, 2]}, signature="toy@0|seed 3")


def fetched(run):
    """The run as the store has it."""
    return run.client.get_run(run.id)


def test_the_store_lies_in_the_project_whatever_the_working_directory(project, monkeypatch):
    expected = f"sqlite:///{project}/mlruns/mlflow.db"
    assert database.store_uri() == expected
    monkeypatch.chdir(project / "notebooks")
    assert database.store_uri() == expected
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlruns/mlflow.db")
    assert database.store_uri() == expected
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:1")
    assert database.store_uri() == "http://localhost:1"


def test_metrics_with_intervals_tags_and_parameters(run):
    run.log({"a": 1, "b/0.20": 0.5}, {"b/0.20": (0.4, 0.7)})
    run.tag("model_sha256", "abc")
    kept = fetched(run).data
    numbers = {"a": 1.0, "b/0.20": 0.5, "b/0.20/low": 0.4, "b/0.20/high": 0.7}
    assert findings_table.numbers(fetched(run)) == numbers
    assert kept.params == {"seed": "3", "model": "toy", "windows": "[1, 2]"}
    assert kept.tags["signature"] == "toy@0|seed 3" and kept.tags["model_sha256"] == "abc"
    assert kept.tags["kvlab.kind"] == "interactive" and kept.tags["kvlab.version"]


def test_what_a_figure_shows_is_kept_in_sentences(run):
    shown = run.tell("figure 3", ["It rises.", "", " How far is open. "])
    assert shown.data == "It rises. How far is open."
    (kept,) = run.client.list_artifacts(run.id, "story")
    path = Path(run.client.download_artifacts(run.id, kept.path))
    assert path.name == "figure_3.md" and path.read_text() == "It rises. How far is open.\n"


def test_a_figure_without_a_sentence_is_told(run):
    with pytest.raises(KvlabError, match="no sentence to tell about the figure 'figure 3'"):
        run.tell("figure 3", ["  "])


def test_a_signature_names_every_document_of_a_set_with_its_hash(monkeypatch, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("A text.")
    monkeypatch.setitem(corpus.SETS, "mixed/2", (str(path), "squad/None such"))
    named = signatures.signature("mine", {"documents": ["mixed/2"]}).split("|")[1]
    assert named == f"{corpus.document(path).signature} squad/None such"


def test_a_run_says_which_model_it_is_about(run, tiny):
    """Its size as transformers counts it: embeddings that the output shares are counted once."""
    lm = tiny("tiny-gemma")
    run.about(lm, tables="mine", heads=None)
    tags = fetched(run).data.tags
    own = sum(weight.numel() for weight in lm.model.parameters())
    assert lm.model.lm_head.weight is lm.model.model.embed_tokens.weight and int(tags["parameters"]) == own
    assert (tags["model_sha256"], tags["dtype"]) == (lm.sha256, "float32")
    assert tags["shape"] == "2 layers, 4 query heads, 2 KV heads"
    assert re.search(r"\S, \d+ threads?$", tags["hardware"])
    assert (tags["tables"], tags["heads"]) == ("mine", "none")


def test_more_metrics_than_a_batch_holds(run):
    run.log({f"m/{n}": n for n in range(2300)})
    stored = fetched(run)
    assert findings_table.numbers(stored) == {f"m/{n}": n for n in range(2300)}
    assert len(stored.data.metrics) <= showing.MOST


@pytest.mark.parametrize(
    ("metrics", "intervals", "match"),
    [
        ({"good": 1, "a": float("nan")}, None, "'a' is nan"),
        ({"good": 1, "a": float("inf")}, None, "'a' is inf"),
        ({"good": 1, "a": "high"}, None, "must be one number"),
        ({"good": 1, "a": [1, 2]}, None, "must be one number"),
        ({"good": 1, "a&b": 1}, None, "no metric name"),
        ({"good": 1}, {"goood": (0, 1)}, "no metric of that name"),
        ({"good": 1}, {"good": (2, 1)}, "wrong way round"),
        ({"good": 1}, {"good": (0, float("nan"))}, "good/high"),
    ],
)
def test_bad_metrics_are_refused_before_anything_is_logged(run, metrics, intervals, match):
    with pytest.raises(KvlabError, match=match):
        run.log(metrics, intervals)
    assert fetched(run).data.metrics == {} and run.metrics == {} and not findings_table.numbers(fetched(run))


def test_tables_and_figures_are_artifacts_in_the_project(run, project):
    frame = pandas.DataFrame({"layer": [0, 1], "error": [0.1, 0.2]})
    run.table("errors by layer", frame)
    figure = Figure(figsize=(2, 2))
    figure.subplots().plot([1, 2])
    run.figure("figure 4", figure)
    folder = project / "mlruns" / "artifacts" / EXPERIMENT / run.id / "artifacts"
    pandas.testing.assert_frame_equal(pandas.read_parquet(folder / "tables" / "errors_by_layer.parquet"), frame)
    assert (folder / "figures" / "figure_4.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (folder / "figures" / "figure_4.svg").read_bytes()


def test_a_table_is_shown_by_the_ui_too_and_a_long_one_in_part(run, project):
    run.table("errors", pandas.DataFrame({"layer": [0, 1], "error": [0.1, float("nan")]}))
    long = pandas.DataFrame({"n": range(tracking.SHOWN + 5)})
    for _ in range(2):  # as a cell that is run again
        run.table("long", long)
    folder = project / "mlruns" / "artifacts" / EXPERIMENT / run.id / "artifacts" / "tables"
    assert json.loads((folder / "errors.json").read_text()) == {
        "columns": ["layer", "error"],
        "data": [[0, 0.1], [1, None]],
    }
    first = json.loads((folder / "long_first_1000_rows.json").read_text())["data"]
    assert first == [[n] for n in range(1000)]
    assert len(pandas.read_parquet(folder / "long.parquet")) == len(long)
    assert {path.name for path in folder.iterdir()} == {
        "errors.json",
        "errors.parquet",
        "long.parquet",
        "long_first_1000_rows.json",
    }
    assert json.loads(fetched(run).data.tags["mlflow.loggedArtifacts"]) == [
        {"path": f"tables/{name}.json", "type": "table"} for name in ("errors", "long_first_1000_rows")
    ]


def test_an_experiment_is_one_of_training_runs_and_says_what_it_is_about(project):
    experiment(project, description="A toy,\n to be looked at.")
    client = database.client()
    old = client.create_experiment(EXPERIMENT)  # as kvlab made them before
    assert database.experiment_id(client, EXPERIMENT) == old
    tags = client.get_experiment(old).tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    assert tags["mlflow.note.content"] == "A toy, to be looked at."
    client.set_experiment_tag(old, "mlflow.note.content", "my own words")
    database.experiment_id(client, EXPERIMENT)
    assert client.get_experiment(old).tags["mlflow.note.content"] == "my own words"
    for name, about in (("eval", "Results of `kvlab eval`"), ("mine", "")):
        made = client.get_experiment(database.experiment_id(client, name)).tags
        assert made["mlflow.experimentKind"] == "custom_model_development"
        assert made.get("mlflow.note.content", "").startswith(about)


def test_a_run_by_hand_is_named_by_what_is_not_as_usual(project):
    usual = {"seed": 0, "reduction": 0.6, "boom": False, "names": ["a", "b"], "scale": 0.5}
    names = [
        fetched(tracking.start(where, {**usual, **changes})).info.run_name
        for where, changes in (
            (EXPERIMENT, {}),
            (EXPERIMENT, {"scale": 1.0, "names": ["c", "d"]}),
            ("unknown", {"scale": 1.0}),
        )
    ]
    assert names == ["interactive", "interactive names=c,d scale=1.0", "interactive"]


SENDERS = ("DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY", "CI", "PYTEST_CURRENT_TEST")


def test_telemetry_is_off_after_the_first_lines_of_commands_and_jobs():
    code = (
        "from kvlab.lib import environment\nenvironment.configure()\n"
        "from mlflow.telemetry.utils import is_telemetry_disabled\nassert is_telemetry_disabled()"
    )
    _python(code, {key: value for key, value in _environment().items() if key not in SENDERS})


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("from kvlab.workbench.store import tracking", "tracking.client()"),
        ("from kvlab.workbench.jobs import executors", "executors.database.client()"),
        ("from kvlab.workbench.jobs import launch", "launch.database.client()"),
    ],
    ids=["a notebook", "a cluster's worker", "the driver"],
)
def test_telemetry_is_off_when_mlflow_is_imported(first, then, project, tmp_path):
    """A package in MLflow's place looks at the variables in the moment in which it is imported."""
    (tmp_path / "instead" / "mlflow").mkdir(parents=True)
    (tmp_path / "instead" / "mlflow" / "__init__.py").write_text(
        "import os\nprint(os.environ['DO_NOT_TRACK'], os.environ['MLFLOW_DISABLE_TELEMETRY'], flush=True)\nos._exit(0)"
    )
    around = {key: value for key, value in _environment().items() if key not in SENDERS}
    around["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "instead"), *sys.path])
    code = f"import sys\n{first}\nassert 'mlflow' not in sys.modules\nprint('first')\n{then}\nsys.exit('no import')"
    assert _python(code, around).split() == ["first", "true", "true"]


def _python(code: str, around: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=around)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_outside_the_workbench_imports_mlflow():
    package = Path(tracking.__file__).parents[2]
    importing = [
        path
        for path in package.rglob("*.py")
        if "import mlflow" in path.read_text(encoding="utf-8") or "from mlflow" in path.read_text(encoding="utf-8")
    ]
    assert importing and {path.relative_to(package).parts[0] for path in importing} == {"workbench"}


def test_claims_are_judged_on_the_runs_metrics_and_kept(run):
    published = {"published/reduction/40": 0.6, "published/reduction/20": 0.1, "published/reduction/10": -0.1}
    run.log(published, {"published/reduction/40": (0.5, 0.7)})
    styler = run.claims()
    verdicts = dict(zip(styler.data["where"], styler.data["verdict"], strict=True))
    assert verdicts["zsmerge, figure 4 as published, 40 entries (20 %)"] == "holds"
    assert verdicts["zsmerge, figure 4 as published, 20 entries (10 %)"] == "holds in direction only"
    assert verdicts["zsmerge, figure 4 as published, 10 entries (5 %)"] == "fails"
    assert verdicts["zsmerge, theorem 1 and appendix A"] == "not measured"
    assert "0.605" in styler.to_html()
    kept = json.loads(Path(run.client.download_artifacts(run.id, "claims.json")).read_text())
    assert [verdict["verdict"] for verdict in kept] == list(styler.data["verdict"])
    assert {verdict["low"] for verdict in kept if verdict["id"] == "zsmerge.figure4.as_published"} == {0.5}


def test_a_driven_run_is_attached_to_and_left_open(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", run.id)
    attached = tracking.start(EXPERIMENT, {}, signature="new")
    attached.log({"a": 1})
    attached.finish()
    assert attached.id == run.id and fetched(run).info.status == "RUNNING"
    assert fetched(run).data.tags["signature"] == "new"
    run.finish()
    assert fetched(run).info.status == "FINISHED"


def test_a_block_that_raises_leaves_a_failed_run(run):
    with pytest.raises(ZeroDivisionError), run:
        1 / 0  # noqa: B018
    assert fetched(run).info.status == "FAILED"


def test_runs_of_a_dead_driver_are_killed_and_others_left(project):
    client = database.client()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone = tracking.create_run(client, EXPERIMENT, {}, {"kvlab.kind": "job", "kvlab.pid": dead.pid}, "gone")
    elsewhere = tracking.create_run(
        client, EXPERIMENT, {}, {"kvlab.kind": "job", "kvlab.pid": dead.pid, "kvlab.host": "another"}, "elsewhere"
    )
    other = psutil.Process(os.getppid())
    alive = tracking.create_run(
        client,
        EXPERIMENT,
        {},
        {"kvlab.kind": "job", "kvlab.pid": other.pid, "kvlab.pid_started": other.create_time()},
        "alive",
    )
    left_over = tracking.create_run(client, EXPERIMENT, {}, {"kvlab.kind": "job"}, "left over")
    by_hand = tracking.create_run(client, EXPERIMENT, {}, {"kvlab.kind": "interactive"}, "by hand")
    run_index.tidy(client, {EXPERIMENT: database.experiment_id(client, EXPERIMENT)})
    assert [fetched(run).info.status for run in (gone, elsewhere, alive, left_over, by_hand)] == [
        "KILLED",
        "RUNNING",
        "RUNNING",
        "KILLED",
        "RUNNING",
    ]


def test_many_processes_may_make_the_store_at_once(tmp_path):
    """The first use of a fresh database: two processes, one schema, no run lost."""
    (tmp_path / "experiments").mkdir()
    # What is imported before the two part is imported once; nothing of the store is touched before.
    code = (
        "import os, sys\nfrom kvlab.workbench.store import tracking\nfirst = os.fork()\n"
        "run = tracking.start('e', {'seed': 0}); run.log({'a': 1}); run.finish()\n"
        "sys.exit(first and os.waitpid(first, 0)[1])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=_environment()
    )
    assert ended.returncode == 0, ended.stderr
    assert "alembic" not in ended.stderr and "INFO" not in ended.stderr
    with sqlite3.connect(tmp_path / "mlruns" / "mlflow.db") as connection:
        assert connection.execute("select count(*) from runs where status = 'FINISHED'").fetchone() == (2,)
    assert [path.name for path in (tmp_path / "mlruns").glob(".mlflow.db-*")] == []


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "KVLAB_ROOT"))}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"this is text and no database at all, whatever its name says", "cannot be used"),
        (None, "not MLflow's"),
    ],
)
def test_what_is_no_store_is_refused(tmp_path, monkeypatch, content, match):
    path = tmp_path / "other.db"
    if content:
        path.write_bytes(content)
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("create table mine (a)")
    before = path.read_bytes()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{path}")
    with one_sentence(match):
        tracking.start("e", {})
    assert path.read_bytes() == before


def test_stores_that_cannot_be_reached(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/file/mlflow.db")
    with pytest.raises(KvlabError, match="cannot be reached"):
        database.client()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(KvlabError, match=r"127\.0\.0\.1:9 cannot be reached"):
        database.client()


def test_a_server_that_answers_is_taken(monkeypatch):
    asked = []

    class Answer:
        status_code = 200

    monkeypatch.setattr(requests, "get", lambda url, timeout: asked.append(url) or Answer())
    database._ready_server("http://server/")
    assert asked == ["http://server/health"]


def test_what_probes_saw_is_a_table_and_its_means(run, tmp_path):
    import torch

    import kvlab

    queries, keys, values = (torch.randn(2, 2, 40, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    trace = kvlab.Trace.from_tensors(queries, keys, values, 36)
    records = kvlab.replay(trace, kvlab.policy("streamingllm", budget=12), probes=["mass_lost", "bytes"]).records
    run.probes("streaming", records)
    kept = findings_table.numbers(fetched(run))
    assert kept == pytest.approx({f"streaming/{measure}": mean for measure, mean in records.means.items()})
    assert set(records.means) == {"mass_lost", "read_bytes", "stored_bytes"}
    folder = run.client.download_artifacts(run.id, "tables", str(tmp_path))
    pandas.testing.assert_frame_equal(pandas.read_parquet(Path(folder) / "streaming.parquet"), records.table)
