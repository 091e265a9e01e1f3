"""The command as a user meets it: a mistake is one sentence on stderr, never a traceback."""

from __future__ import annotations

import json
import re
import warnings

import pytest
from support.commands import call, complaint, shell
from support.projects import EXPERIMENT, cell, experiment, notebook
from support.runs import job

from kvlab import cli, papers
from kvlab.commands import options, stock
from kvlab.errors import KvlabError
from kvlab.methods._base.policy import KINDS
from kvlab.workbench.experiments import Job
from kvlab.workbench.jobs import launch
from kvlab.workbench.report import page

MISTAKES = [
    (["reprodce"], 2, "did you mean 'reproduce'"),
    (["run"], 2, "Missing argument"),
    (["run", EXPERIMENT, "--profil", "quick"], 2, "No such option"),
    (["run", EXPERIMENT, "--jobs", "many"], 2, "valid integer"),
    (["run", EXPERIMENT, "--jobs", "0"], 2, "greater than or equal to 1"),
    (["run", EXPERIMENT, "-p", "seed"], 2, "key=value"),
    (["run", "zsmerge_error_curve"], 1, "did you mean 'zsmerge_error_curves'"),
    (["run", EXPERIMENT, "--profile", "quik"], 1, "did you mean 'quick'"),
    (["run", EXPERIMENT, "-p", "sede=1"], 1, "did you mean 'seed'"),
    (["run", EXPERIMENT, "-p", "seed=one"], 1, "must be a whole number"),
    (["list", "claim"], 1, "did you mean 'claims'"),
    (["list"], 2, "Missing argument 'WHAT'; see kvlab list --help"),
    (["run", "--nope"], 2, "see kvlab run --help"),
    (["eval", "needle", "--budgets", "many"], 2, "see kvlab eval --help"),
    (["--nope"], 2, "see kvlab --help"),
    (["pull", "smollm"], 1, "smollm2-135m"),
    (["pull", "qwen2.5-coder-05b"], 1, "did you mean 'qwen2.5-coder-0.5b' or 'qwen2.5-coder-1.5b'"),
    (["pull", "smollm2-135m", "--from", "hug"], 1, "did you mean 'hub'"),
    (["remove", "smolm2-135m"], 1, "did you mean 'smollm2-135m'"),
    (["remove"], 2, "Missing argument 'MODEL'; see kvlab remove --help"),
    (["report", "--out", "notebooks/toy.ipynb"], 1, "it is a file"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "match"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else None
)
def test_a_mistake_is_one_sentence(project, capsys, arguments, code, match):
    assert match in complaint(capsys, *arguments, code=code)


def test_our_warnings_are_sentences_and_those_of_others_keep_their_place():
    before = warnings.formatwarning
    with cli._plain_warnings():
        assert warnings.formatwarning("so it is", UserWarning, cli.__file__, 3) == "kvlab: so it is\n"
        assert "other.py:3" in warnings.formatwarning("so it is", UserWarning, "other.py", 3)
        assert "cli.py:3" in warnings.formatwarning("so it was", DeprecationWarning, cli.__file__, 3)
    assert warnings.formatwarning is before


def test_a_warning_of_a_command_is_told_so(project, monkeypatch):
    said = []
    monkeypatch.setattr(warnings, "showwarning", lambda *given: said.append(warnings.formatwarning(*given[:4])))
    own = cli.__file__
    monkeypatch.setattr(cli, "app", lambda *_, **__: warnings.warn_explicit("so it is", UserWarning, own, 3))
    with pytest.raises(SystemExit):
        cli.main([])
    assert said == ["kvlab: so it is\n"]


def test_a_real_process_too(project):
    wrong = shell("run", EXPERIMENT, "-p", "sede=1")
    assert wrong.returncode == 1 and wrong.stdout == "" and wrong.stderr.count("\n") == 1
    unreachable = shell("run", EXPERIMENT, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert unreachable.returncode == 1 and "cannot be reached" in unreachable.stderr
    assert "Traceback" not in unreachable.stderr and unreachable.stderr.count("\n") == 1
    assert not (project / "mlruns" / "work").exists()
    seen = shell("list", "nonsense", KVLAB_DEBUG="1")
    assert "Traceback" in seen.stderr and seen.returncode == 1


def test_outside_of_a_project(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("KVLAB_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["reproduce"],
        ["run", "anything"],
        ["list", "experiments"],
        ["list", "experiments", "--json"],
        ["report"],
        ["report", "--profile", "full"],
    ):
        code, out, err = call(capsys, *arguments)
        assert code == 1 and "there are no experiments in" in err and "KVLAB_ROOT" in err and out == "", arguments
        assert err.count("\n") == 1 and list(tmp_path.iterdir()) == []
    monkeypatch.setenv("KVLAB_ROOT", str(tmp_path / "nowhere"))
    code, _, err = call(capsys, "run", "anything")
    assert code == 1 and f"no experiments in {tmp_path / 'nowhere'}" in err


def test_an_unforeseen_error_is_a_sentence_as_well(project, capsys, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(launch, "run", broken)
    code, _, err = call(capsys, "run", EXPERIMENT)
    assert code == 1 and err == "kvlab: RuntimeError: first line (KVLAB_DEBUG=1 shows where)\n"


@pytest.mark.parametrize("what", stock.LISTS)
def test_lists_are_objects_with_name_and_summary(capsys, what):
    code, out, _ = call(capsys, "list", what, "--json")
    found = json.loads(out)
    assert code == 0 and isinstance(found, list) and found
    for entry in found:
        assert entry["name"] and entry["summary"] and "\n" not in entry["summary"]


def test_policies_are_listed_by_what_they_decide(capsys):
    _, out, _ = call(capsys, "list", "policies", "--json")
    groups = [entry["group"] for entry in json.loads(out)]
    assert list(dict.fromkeys(groups)) == [kind for kind in KINDS if kind != "other"]
    assert groups == sorted(groups, key=KINDS.index)
    _, out, _ = call(capsys, "list", "policies")
    headings = [line.strip() for line in out.splitlines() if line.strip() in KINDS]
    assert headings == list(dict.fromkeys(groups))


def test_storages_are_listed_with_the_forms_that_take_more_than_a_name(capsys):
    _, out, _ = call(capsys, "list", "storages")
    _, as_json, _ = call(capsys, "list", "storages", "--json")
    printed = [line.split()[0] for line in out.splitlines()]
    single = [entry["name"] for entry in json.loads(as_json)]
    assert printed == [*single, "KEYS/VALUES", "kvtc-2:FILE"]


def test_listed_claims_and_plain_lists(capsys):
    _, out, _ = call(capsys, "list", "claims", "--json")
    found = {entry["id"]: entry for entry in json.loads(out)}
    assert set(found) == {claim.id for claim in papers.claims()}
    entry = found["zsmerge.theorem1"]
    assert papers.Claim.model_fields.keys() <= entry.keys() and found["rocketkv.figure4.consistently"]["note"]
    assert entry["paper"] == "zsmerge" and entry["metric"] == "theorem1/violations" and entry["measured"] is True
    assert found["morphkv.table6.accuracy"]["measured"] is False
    code, out, _ = call(capsys, "list", "claims")
    assert code == 0 and "zsmerge.theorem1" in out and "[theorem 1 and appendix A]" in out


def test_claims_are_listed_by_paper_with_what_measures_them(capsys):
    code, out, _ = call(capsys, "list", "claims", "--paper", "rocketkv")
    flat = " ".join(out.split())
    assert code == 0 and "zsmerge." not in out and "(by `rocketkv_budgets`)" in flat
    _, out, _ = call(capsys, "list", "claims", "--paper", "rocketkv", "--json")
    assert [entry["id"] for entry in json.loads(out)] == [claim.id for claim in papers.claims(paper="rocketkv")]
    code, _, err = call(capsys, "list", "claims", "--paper", "rocketkb")
    assert code == 1 and "did you mean 'rocketkv'" in err
    code, _, err = call(capsys, "list", "models", "--paper", "rocketkv")
    assert code == 1 and "--paper" in err


def findings(claims) -> set[str]:
    """The names of the findings that claims are counted as."""
    return {claim.finding or claim.id for claim in claims if claim.kind == "finding"}


def test_reproduce_prints_the_ledger_and_says_what_failed(project, capsys, monkeypatch):
    """The jobs themselves are the round trip's matter; here they are taken as done."""
    job = launch.experiments.jobs(EXPERIMENT)[0]
    monkeypatch.setattr(launch, "run", lambda *_, **__: [launch.Result(job, "failed", "abc", error="it broke")])
    code, out, err = call(capsys, "reproduce")
    assert code == 1 and "it broke" in err and EXPERIMENT in err
    assert "not measured" in out and "60.5 %" in out.replace("\n", " ") and f"{project}/report/report.html" in out
    counts = out[out.index("Counted apart") :].splitlines()
    rows = [line.split() for line in counts if line.split()[:1] in (["ZSMerge"], ["all"])]
    mine = [claim for claim in papers.claims(paper="zsmerge") if not claim.untested]
    assert rows[0][1:6] == ["·", "·", "·", "·", str(len(findings(mine)))]
    assert rows[0][7:] == ["·", "·"], "what was not measured is neither met nor missed"
    counted = sum(int(cell) for cell in rows[1][1:7] if cell != "·")
    assert len(rows) == 2 and counted == len(findings(papers.claims()))
    assert f"sqlite:///{project}/mlruns/mlflow.db" in out
    assert (project / "report" / "claims.csv").exists()


def two_experiments(project, monkeypatch) -> list[Job]:
    """One whose notebook takes a model, and one whose takes none. Their jobs are put into the list, and not run."""
    notebook(project / "notebooks" / "toy.ipynb", cell("model = 'small'\nseed = 0", "parameters"))
    notebook(project / "notebooks" / "none.ipynb", cell("seed = 0", "parameters"))
    experiment(project, "without", notebook="notebooks/none.ipynb")
    queued: list[Job] = []
    monkeypatch.setattr(launch.inputs, "prepare", lambda parameters: None)
    monkeypatch.setattr(launch.Sweep, "go", lambda sweep: queued.extend(sweep.queue) or [])
    return queued


def test_reproduce_runs_every_experiment_on_every_model(project, capsys, monkeypatch):
    """Once where a notebook takes no model; the ledger then shows the models side by side."""
    queued = two_experiments(project, monkeypatch)
    job(0.3, model="small", parameters=135_000_000)
    job(0.6, model="large", parameters=8_000_000_000)
    (project / "folder").mkdir()
    code, out, _ = call(capsys, "reproduce", "--model", "small,large", "--model", "small", "--model", "./folder")
    assert code == 0
    told = [(each.experiment, each.parameters.get("model"), each.name) for each in queued]
    assert told == [
        ("without", None, "quick"),
        (EXPERIMENT, "small", "quick"),
        (EXPERIMENT, "large", "model=large"),
        (EXPERIMENT, str(project / "folder"), f"model={project / 'folder'}"),
    ]
    assert "◐ 0.300" in out and "◐ 0.600" in out and "Findings on large 8B" in out
    assert {path.name for path in (project / "report").iterdir()} >= {"model-small.html", "model-large.html"}


def test_run_takes_models_as_reproduce_does(project, capsys, monkeypatch):
    queued = two_experiments(project, monkeypatch)
    code, _, _ = call(capsys, "run", EXPERIMENT, "--model", "small,large", "-p", "seed=3")
    assert code == 0
    assert [each.parameters for each in queued] == [{"model": "small", "seed": 3}, {"model": "large", "seed": 3}]
    code, _, err = call(capsys, "run", EXPERIMENT, "--model", "small", "-p", "model=large")
    assert code == 1 and err == "kvlab: the model is named twice: with --model and with -p model=...\n"
    code, _, err = call(capsys, "run", "without", "--model", "small")
    assert (
        code == 1 and err == "kvlab: the notebook of 'without' has no parameter 'model', so that --model says nothing\n"
    )
    assert len(queued) == 2


@pytest.mark.parametrize("command", ["reproduce", "report"])
def test_no_model_at_all_is_one_sentence(project, capsys, command):
    code, _, err = call(capsys, command, "--model", " , ")
    assert code == 1 and err == "kvlab: --model names no model; `kvlab list models` says which there are\n"


def test_files_and_folders_named_from_the_shell_are_found_from_the_notebook(project, monkeypatch):
    (project / "mine.txt").write_text("a text")
    (project / "benchmarks" / "long").mkdir(parents=True)
    found = options.overrides(
        [
            "names=mine.txt",
            "seed=3",
            "reduction=a=b",
            "longbench=benchmarks/long",
            "method=benchmarks",
            "model=meta-llama/Llama-3.1-8B",
        ]
    )
    assert found == {
        "names": str(project / "mine.txt"),
        "seed": "3",
        "reduction": "a=b",
        "longbench": str(project / "benchmarks" / "long"),
        "method": "benchmarks",
        "model": "meta-llama/Llama-3.1-8B",
    }


def test_report_command_names_its_files(project, capsys):
    job(0.6)
    code, out, _ = call(capsys, "report", "--out", str(project / "here"))
    assert code == 0 and "holds" in out, "the counts come first"
    assert out.splitlines()[-2:] == [str(project / "here" / name) for name in ("report.html", "claims.csv")]


@pytest.mark.parametrize("columns", [80, 110, 200])
def test_the_counts_fit_the_terminal_and_lose_no_word(columns, project, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    job(0.6)
    out = re.sub(r"\x1b\[[\d;]*m", "", call(capsys, "report", "--out", "here")[1])
    table = "\n".join(line for line in out.splitlines() if str(project) not in line)
    assert all(len(line.rstrip()) <= columns for line in table.splitlines()) and "…" not in table
    assert {"direction", "undecided", "measured", "tested", "recomputed,", "profile"} <= set(table.split())


def test_a_ledger_may_be_kept_and_reported_at_once(project, capsys):
    job(0.6)
    code, out, _ = call(capsys, "report", "--keep", "shared", "--out", "here")
    assert code == 0 and (project / "here" / "report.html").exists() and (project / "shared" / "toy.csv").exists()
    assert "here/report.html" in out


def test_a_report_of_nothing_is_refused_and_leaves_nothing(project, capsys):
    assert call(capsys, "report")[::2] == (
        1,
        "kvlab: no experiment has finished yet, so there is nothing to report; "
        "run one of `kvlab list experiments`, or all by `kvlab reproduce`\n",
    )
    (project / "mlruns" / "mlflow.db").unlink()
    code, _, err = call(capsys, "report", "--out", "here/there")
    assert code == 1 and "nothing to report" in err
    left = [path.name for path in (project / "mlruns").iterdir() if path.suffix != ".lock"]
    assert not left and not (project / "report").exists() and not (project / "here").exists()


def test_a_model_at_a_path_is_reported_by_what_its_page_calls_it(project, capsys):
    job(0.6, model="/models/mine@1")
    assert call(capsys, "report", "--model", "mine")[0] == 0
    code, _, said = call(capsys, "report", "--model", "other")
    assert code == 1 and "no run of the model 'other' has finished" in said


def test_a_report_of_an_unknown_profile_or_model_names_what_there_is(project, capsys):
    job(0.6, profile="quick")
    job(0.6, profile="full", model="big@1")
    for arguments, found in (
        (["--profile", "quik"], "profile 'quik' has finished; there are runs of: full, quick"),
        (["--model", "biig@1"], "model 'biig' has finished; there are runs of: big, toy"),
        (["--model", "big", "--profile", "quick"], "none of these runs has measured a claim"),
    ):
        assert found in complaint(capsys, "report", *arguments)
    assert not (project / "report").exists()
    assert call(capsys, "report", "--model", "big", "--profile", "full")[0] == 0


def test_report_errors_pass_through(project, capsys, monkeypatch):
    def refuse(*_):
        raise KvlabError("the disk is full")

    monkeypatch.setattr(page, "measured", refuse)
    assert call(capsys, "report")[::2] == (1, "kvlab: the disk is full\n")


def test_version(capsys):
    code, out, _ = call(capsys, "--version")
    assert code == 0 and out.startswith("kvlab ")


def test_the_command_alone_shows_help(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    said = capsys.readouterr()
    assert ended.value.code == 0 and said.err == ""
    places = [said.out.index(panel) for panel in cli.PANELS]
    assert places == sorted(places) and " pull " in said.out[places[0] : places[1]]


def test_examples_stand_one_a_line(capsys):
    with pytest.raises(SystemExit):
        cli.main(["report", "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    after = lines[lines.index("Examples:") + 1 :]
    assert after[0] == "kvlab report" and all(line.startswith("kvlab report") for line in after if line)
