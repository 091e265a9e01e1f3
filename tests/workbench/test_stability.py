"""How steady verdicts are: experiments once for each seed and set of documents, each judged by itself."""

from __future__ import annotations

import io
import json

import pandas
import pytest
from rich.console import Console
from support.commands import call, complaint
from support.desks import Desk
from support.projects import CHECK, EXPERIMENT, cell, experiment, notebook
from support.report_pages import CLAIM
from support.runs import job, runs
from support.steadiness import FINDING, TIGHT

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.workbench import experiments
from kvlab.workbench.jobs import executors, launch, stability_cells
from kvlab.workbench.jobs.stability_cells import ANY, Cell
from kvlab.workbench.report import ledger, stability
from kvlab.workbench.report import page as report
from kvlab.workbench.report import stability_jobs as judging
from kvlab.workbench.store import database, run_index, tracking

DECLARED = 'seed = 0\ndocuments = ["mixed/8"]\nboom = False\n'
VALUES = {(0, "mixed/8"): 0.6, (0, "mixed/8b"): -0.2, (1, "mixed/8"): 0.61, (1, "mixed/8b"): -0.6}
"""The reduction that a job measures: on one set of texts in the direction of the claim, on the other against it."""


def drawn(project, uses: str = "print(seed, documents)"):
    notebook(project / "notebooks" / "toy.ipynb", cell(DECLARED, "parameters"), cell(uses), cell(CHECK))


@pytest.fixture
def toy(project, monkeypatch):
    """A project whose experiment has a seed and documents, and in which one of its claims is quoted."""
    drawn(project)
    for name in ("mixed/8", "mixed/8b"):
        (project / f"{name[6:]}.txt").write_text(f"A text for {name}.", encoding="utf-8")
        monkeypatch.setitem(corpus.SETS, name, (str(project / f"{name[6:]}.txt"),))
    claims = [claim for claim in papers.claims() if claim.id == CLAIM]
    monkeypatch.setattr(papers, "quoted", lambda: claims)
    return project


@pytest.fixture
def place(monkeypatch):
    """Jobs that log the value of their seed and documents; what is in `broken` fails instead."""
    broken: set[tuple[int, str]] = set()

    def work(parameters, folder):
        here = parameters["seed"], parameters["documents"][0]
        if here in broken:
            raise KvlabError("out of order")
        run = tracking.Run(database.client(), folder.name, EXPERIMENT, attached=True)
        value = VALUES.get(here, 0.6)
        run.log({"reduction/0.20": value}, {"reduction/0.20": (value - 0.05, value + 0.05)})
        run.tag("model", "toy@0")
        run.tag("hardware", "an abacus")

    class Mended(Desk):
        def start(self, spec, folder, environment):
            try:
                return super().start(spec, folder, environment)
            except KvlabError as error:
                said = {"ok": False, "error": str(error), "html": None, "died": False}
                (folder / executors.RESULT).write_text(json.dumps(said))
                return self

    monkeypatch.setattr(launch, "Here", lambda workers: Mended(work, 1))
    return broken


def measured(seeds=(0, 1), documents=("mixed/8", "mixed/8b"), **options):
    quiet = Console(file=io.StringIO())
    return stability_cells.run([EXPERIMENT], seeds=seeds, documents=documents, console=quiet, **options)


def ordinary(**overrides):
    return launch.run(EXPERIMENT, overrides=overrides, console=Console(file=io.StringIO()))


def states(found):
    return {(one.seed, one.documents): [result.state for result in results] for one, results in found.items()}


# ------------------------------------------------------------------------------------------------ which runs


@pytest.mark.parametrize(
    ("uses", "wanted"),
    [
        ("print(seed, documents)", [("0", "a"), ("0", "b"), ("1", "a"), ("1", "b")]),
        ("print(documents); f(seed=0)", [(ANY, "a"), (ANY, "b")]),
        ("print(seed)\ndocuments = 3", [("0", ANY), ("1", ANY)]),
        ("1 + 1", [(ANY, ANY)]),
        ("%time f(seed)", [("0", ANY), ("1", ANY)]),
    ],
)
def test_only_what_a_notebook_reads_is_varied(project, uses, wanted):
    drawn(project, uses)
    planned = list(stability_cells.plan(experiments.load(EXPERIMENT), "quick", [], [0, 1, 1], ["a", "b"]))
    assert [(one.seed, one.documents) for one, _ in planned] == wanted


def test_a_notebook_without_these_parameters_runs_once_for_each_model(project):
    notebook(project / "notebooks" / "toy.ipynb", cell("model = 'random:a'", "parameters"), cell("seed = model"))
    experiment(project)
    planned = list(
        stability_cells.plan(experiments.load(EXPERIMENT), "quick", ["random:b", "random:c"], [0, 1], ["a", "b"])
    )
    assert [one for one, _ in planned] == [Cell(EXPERIMENT, name, ANY, ANY) for name in ("random:b", "random:c")]
    assert [job.kind for _, job in planned] == [experiments.ORDINARY] * 2


def test_the_experiments_are_those_that_measure_a_quoted_finding_in_the_profile(monkeypatch):
    by_id = {claim.id: claim for claim in papers.claims()}
    full = next(claim for claim in by_id.values() if claim.profile == "full" and claim.experiment != EXPERIMENT)
    monkeypatch.setattr(papers, "quoted", lambda: [by_id[CLAIM], by_id[TIGHT], full])
    assert stability_cells.wanted("quick") == [EXPERIMENT] and stability_cells.wanted("full") == sorted(
        {EXPERIMENT, full.experiment}
    )
    monkeypatch.setattr(papers, "quoted", list)
    with pytest.raises(KvlabError, match="no finding is quoted"):
        stability_cells.wanted()


def test_the_cell_of_the_ordinary_parameters_is_the_ordinary_run(toy, place):
    (before,) = ordinary()
    found = measured()
    assert states(found) == {
        ("0", "mixed/8"): ["done earlier"],
        ("0", "mixed/8b"): ["finished"],
        ("1", "mixed/8"): ["finished"],
        ("1", "mixed/8b"): ["finished"],
    }
    assert found[Cell(EXPERIMENT, "", "0", "mixed/8")][0].run_id == before.run_id
    assert len(runs("job")) == 1 and len(runs("cell")) == 3
    assert set(map(tuple, states(measured()).values())) == {("done earlier",)}
    assert list(states(measured(seeds=(0, 1, 2))).values())[4:] == [["finished"]] * 2


def test_the_ordinary_run_is_shared_the_other_way_round_too(toy, place):
    measured()
    assert [result.state for result in ordinary()] == ["done earlier"]


def test_a_cell_does_not_stand_for_a_run_that_somebody_asks_for(toy, place):
    """The profile's run is made anew, since the report reads no cell; made, it stands for the cell."""
    measured(seeds=(1,), documents=("mixed/8",))
    assert [result.state for result in ordinary(seed=1)] == ["finished"], "a trial is no cell either"
    ordinary()
    assert states(measured(seeds=(0,), documents=("mixed/8",))) == {("0", "mixed/8"): ["done earlier"]}
    measured(seeds=(1,), documents=("mixed/8",), fresh=True)
    assert len(runs("cell")) == 2


def test_many_cells_are_looked_up_at_once_with_the_same_answer(toy, place, monkeypatch):
    ordinary()
    measured(seeds=(0,))
    monkeypatch.setattr("kvlab.workbench.jobs.sweep.FEW", 1)
    again = measured(seeds=(0, 1))
    assert [state for (state,) in states(again).values()] == ["done earlier"] * 2 + ["finished"] * 2
    assert [result.state for result in ordinary(seed=1)] == ["finished"], "a cell of that key does not count"


# ------------------------------------------------------------------------------------------------ the judging


def test_the_ledger_reads_the_ordinary_run_although_cells_are_newer(toy, place):
    ordinary()
    before = report.ledger()
    measured()
    assert max(runs("cell"), key=lambda run: run.info.end_time).info.end_time >= runs("job")[0].info.end_time
    pandas.testing.assert_frame_equal(report.ledger(), before)
    assert before.set_index("id").loc[CLAIM, "value"] == 0.6


def test_cells_alone_are_no_ledger(toy, place):
    measured(seeds=(1,))
    assert not any(entry.measured for entry in ledger.entries())


def test_each_cell_is_judged_on_its_own_run(toy, place):
    found = judging.judged(measured(), "quick")
    assert {(line["seed"], line["documents"]): (line["verdict"], float(line["value"])) for line in found} == {
        ("0", "mixed/8"): ("holds in direction only", 0.6),
        ("0", "mixed/8b"): ("fails", -0.2),
        ("1", "mixed/8"): ("holds in direction only", 0.61),
        ("1", "mixed/8b"): ("fails", -0.6),
    }
    assert {(line["model"], line["machine"], line["profile"]) for line in found} == {("toy@0", "an abacus", "quick")}
    (one,) = stability.measured(found)
    assert (one.count, len(one.turns)) == ("2 of 3", 2)


def test_a_cell_whose_job_failed_is_left_out(toy, place):
    place.add((1, "mixed/8b"))
    found = measured()
    assert states(found)["1", "mixed/8b"] == ["failed"]
    assert len(judging.judged(found, "quick")) == 3


def test_a_cell_during_which_the_code_was_edited_is_left_out(toy, place):
    found = measured()
    edited = found[Cell(EXPERIMENT, "", "0", "mixed/8b")][0].run_id
    database.client().set_tag(edited, "kvlab.key", run_index.EDITED)
    assert ("0", "mixed/8b") not in {(line["seed"], line["documents"]) for line in judging.judged(found, "quick")}


def test_of_the_jobs_of_a_grid_the_one_that_measured_the_claim_is_judged(toy, place):
    """A later job of the cell that lacks the number does not take it away."""
    ids = [job(0.6), job(0.1, metric="another")]
    results = [launch.Result(None, "finished", run_id) for run_id in ids]  # type: ignore[arg-type]
    (line,) = judging.judged({Cell(EXPERIMENT, "", "0", ANY): results}, "quick")
    assert line["verdict"] == "holds in direction only" and line["documents"] == ANY


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_runs_prints_and_keeps_and_the_report_marks(toy, place, capsys):
    ordinary()
    code, out, _ = call(capsys, "stability", "--seeds", "0,1")
    assert code == 0 and FINDING in out and "2 of 3" in out
    assert "of 1 quoted finding 1 flips at least once" in out
    assert (toy / "report" / "stability" / "toy.csv").is_file()
    assert call(capsys, "report")[0] == 0
    assert ">finding flips 2 of 3</em>" in (toy / "report" / "report.html").read_text(encoding="utf-8")
    call(capsys, "report", "--keep", "ledger")
    code, out, err = call(capsys, "stability", "--seeds", "0,1", "--documents", "mixed/8", "--keep", "ledger")
    assert code == 0 and "0 of 1" in out and "holds" in out and "finished" not in err
    call(capsys, "report", "--from", "ledger", "--out", "again")
    assert "stays in the other run" in (toy / "again" / "report.html").read_text(encoding="utf-8")


def test_a_failed_job_is_named_after_what_was_measured_is_kept(toy, place, capsys):
    place.add((1, "mixed/8b"))
    code, out, err = call(capsys, "stability", "--seeds", "0,1")
    assert code == 1 and "1 of 4 jobs failed" in err and "out of order" in err
    assert "1 of 2" in out and len(pandas.read_csv(toy / "report" / "stability" / "toy.csv")) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "match"),
    [
        (["--seeds", "one"], 2, "--seeds takes numbers"),
        (["--seeds", ""], 1, "at least one of each"),
        (["--documents", "mixed/9"], 1, "there is no document or text file mixed/9"),
        (["--profile", "quik"], 1, "did you mean 'quick'"),
    ],
)
def test_a_mistake_is_one_sentence(toy, place, capsys, arguments, code, match):
    assert match in complaint(capsys, "stability", *arguments, code=code)
    assert runs("cell") == [] if database.client().get_experiment_by_name(EXPERIMENT) else True
