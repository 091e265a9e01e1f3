"""`kvlab eval`: a table on stdout, answers in a file, a run in MLflow; mistakes are one sentence."""

from __future__ import annotations

import pandas
import pytest
from support.commands import call, complaint

from kvlab import evaluation
from kvlab.workbench.report import task_scores
from kvlab.workbench.store import findings_table, showing, tracking

NEEDLE = ["eval", "needle", "-p", "lengths=[144]", "-p", "depths=[0.0, 0.5, 1.0]", "--limit", "2"]


@pytest.fixture
def loaded(lm, monkeypatch):
    monkeypatch.setattr("kvlab.inputs.models.load", lambda *_: lm)


def test_needles_from_the_command_line(loaded, project, capsys, tmp_path):
    code, out, err = call(capsys, *NEEDLE, "--policies", "streamingllm,snapkv", "--budgets", "48,0.5")
    assert code == 0, err
    assert [line.count("needle") for line in out.splitlines() if "needle" in line] == [1] * 5
    assert sum("streamingllm" in line for line in out.splitlines()) == 2
    path = project / "eval" / "needle.jsonl"
    assert str(path) in err and path.with_suffix(".png").stat().st_size > 10_000
    found = evaluation.read(path)
    assert len(found) == 2 * 5 and {answer.policy for answer in found} == {"full", "streamingllm", "snapkv"}

    store = tracking.client()
    (run,) = store.search_runs([experiment.experiment_id for experiment in store.search_experiments()])
    rows = evaluation.summary(found).set_index(["policy", "budget"])
    assert findings_table.numbers(run)["needle/snapkv/0.5/score"] == pytest.approx(rows.loc[("snapkv", 0.5), "score"])
    assert findings_table.numbers(run)["needle/full/kv_bytes"] == pytest.approx(rows.loc["full"].kv_bytes.iloc[0])
    assert set(run.data.metrics) == {name for name in findings_table.numbers(run) if name.endswith("/score")}
    assert 5 <= len(run.data.metrics) <= showing.MOST
    folder = store.download_artifacts(run.info.run_id, "tables", str(tmp_path))
    assert len(pandas.read_parquet(f"{folder}/answers.parquet")) == 10
    assert {file.path for file in store.list_artifacts(run.info.run_id, "figures")} >= {"figures/needle_heatmap.png"}

    before = path.read_bytes()
    code, again, _ = call(capsys, *NEEDLE, "--policies", "streamingllm,snapkv", "--budgets", "48,0.5", "--no-log")
    assert code == 0 and path.read_bytes() == before, "what is done is not done again"
    assert again == out


def test_the_figure_is_named_after_the_answers_whatever_dots_their_name_has(loaded, project, capsys, tmp_path):
    place = tmp_path / "qwen2.5.first.jsonl"
    code, _, err = call(capsys, *NEEDLE, "--policies", "snapkv", "--budgets", "48", "--no-log", "--out", str(place))
    assert code == 0, err
    assert sorted(path.name for path in tmp_path.glob("qwen*")) == ["qwen2.5.first-needle.png", place.name]


def test_what_was_measured_for_the_model_is_used(loaded, project, capsys):
    """No policy competes without the tables that its paper asks for, where they come with kvlab."""
    policies = ["--policies", "compilerkv,duoattention,snapkv", "--budgets", "64"]
    code, _, err = call(capsys, "eval", "needle", "-p", "lengths=[144]", "--limit", "1", "--no-log", *policies)
    assert code == 0 and "neutral tables" not in err, err
    told = {answer.policy: answer.signature for answer in evaluation.read(project / "eval" / "needle.jsonl")}
    assert "tables='smollm2-135m'" in told["compilerkv"] and "heads='smollm2-135m'" in told["duoattention"]


@pytest.mark.parametrize(
    "arguments, code, match",
    [
        (["needl"], 1, "did you mean 'needle'"),
        (["needle", "-p", "length=[256]"], 1, "did you mean 'lengths'"),
        (["needle", "-p", "lengths=[-5]"], 1, "needle: lengths"),
        (["needle", "-p", "lengths"], 2, "key=value"),
        (["needle", "--policies", "snapk"], 1, "did you mean 'snapkv'"),
        (["needle", "--policies", "snapkv(window=8)"], 1, "kvlab.policy('snapkv', window=8)"),
        (["needle", "--budgets", "many"], 2, "--budgets takes numbers"),
        (["needle", "--policies", "snapkv", "--budgets", "8"], 1, "budget 8 is below"),
        (["needle", "--compress-at", "question"], 1, "neither 'prompt' nor 'context'"),
        (["needle", "--limit", "0"], 2, "greater than or equal to 1"),
        (["longbench"], 1, "folder"),
    ],
)
def test_a_mistake_is_one_sentence(loaded, project, capsys, arguments, code, match):
    assert match in complaint(capsys, "eval", *arguments, code=code)


def test_scores_are_kept_beside_a_ledger(loaded, project, capsys, tmp_path):
    """In pieces: another budget adds its lines, the same one replaces its own; a ledger's readers see no ledger."""
    folder = tmp_path / "ledger"
    some = [*NEEDLE, "--policies", "streamingllm", "--no-log", "--keep", str(folder)]
    code, _, err = call(capsys, *some, "--budgets", "48", "--compress-at", "context")
    assert code == 0, err
    (path,) = (folder / "tasks").glob("*.csv")
    assert str(path) in err and not list(folder.glob("*.csv"))
    first = path.read_bytes()
    assert call(capsys, *some, "--budgets", "48", "--compress-at", "context")[0] == 0 and path.read_bytes() == first
    assert call(capsys, *some, "--budgets", "48,64")[0] == 0
    rows = pandas.read_csv(path)
    assert rows.groupby("compress_at").size().to_dict() == {"context": 2, "prompt": 3}
    assert (rows.n == 2).all() and rows.model.nunique() == 1 and rows.machine.notna().all()
    given = evaluation.summary(evaluation.read(project / "eval" / "needle.jsonl"))
    wanted = given[(given.budget == 64) & (given.compress_at == "prompt")].iloc[0]
    (line,) = rows[rows.budget == 64].to_dict("records")
    assert line["difference"] == pytest.approx(wanted.difference) and line["score"] == pytest.approx(wanted.score)
    before, after = task_scores.boards(folder)
    assert (before.compress_at, after.budgets, after.full.score) == ("context", ["48", "64"], 100 * given.score[0])
    assert [(name, len(cells)) for name, cells in after.rows] == [("streamingllm", 2)]
    assert after.rows[0][1][1].score == pytest.approx(100 * wanted.score)
    path.write_text(path.read_text().replace(line["model"], "other@0 float32"))
    code, _, err = call(capsys, *some, "--budgets", "48")
    assert code == 1 and "is of the model 'other@0 float32'" in err
