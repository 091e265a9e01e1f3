"""Figures and sentences of finished runs, made again from saved findings and metrics."""

from __future__ import annotations

import numpy
import pandas
import pytest
from support.commands import call
from support.projects import EXPERIMENT, PARAMETERS, cell, notebook

from kvlab.analyses.dapq.contexts import Contexts
from kvlab.analyses.findings import Findings
from kvlab.errors import KvlabError
from kvlab.workbench import rendering
from kvlab.workbench.experiments import content_key
from kvlab.workbench.store import artifacts, findings_files, findings_table, tracking

GAIN = "gain/{policy}/{budget}"
MEASURED = """import kvlab
from matplotlib.figure import Figure
from kvlab.analyses.findings import Findings
lm = kvlab.load("random:nobody")
found = measure(lm)
def drawn(rows, colour):
    figure = Figure(figsize=(2, 1)); figure.subplots().plot(rows, color=colour)
    return figure
best = found.frame("gain/{policy}/{budget}")["value"].max()"""
SHOWN = """losses = list(found.table.loss)
run.record("gains", found, figure=drawn(losses, "COLOUR"), text=[f"seed {seed}: WORD {best:.3f}"])
run.record("model", text=[lm.name])
run.record("broken", text=[1 / 0])
run.record("told", losses)
run.tell("told", [lm.name])"""


def findings() -> Findings:
    found = Findings(pandas.DataFrame({"loss": [0.1, 0.4]}, index=pd_index()))
    for policy, value in (("snapkv", 0.25), ("h2o", 0.5)):
        found.set(GAIN, value, (value - 0.1, value + 0.1), policy=policy, budget=numpy.int64(64))
    return found


def pd_index() -> pandas.Index:
    return pandas.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["document", "length"])


def write(project, colour, word):
    show = SHOWN.replace("COLOUR", colour).replace("WORD", word)
    notebook(project / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), cell(MEASURED), cell(show))


@pytest.fixture
def run(project):
    """A finished job whose figure is red and whose sentence says `gain`."""
    write(project, "red", "gain")
    made = tracking.start(EXPERIMENT, {"seed": 5}, model="toy", **{"kvlab.kind": "job", "kvlab.profile": "quick"})
    made.record("gains", findings(), text=["seed 5: gain 0.500"])
    made.record("model", text=["toy"])
    made.tell("told", ["toy"])
    made.finish()
    return made


def stored(run, folder, tmp_path):
    found = run.client.get_run(run.id)
    into = tmp_path / "fetched" / folder
    into.mkdir(parents=True, exist_ok=True)
    return {name: (into / name).read_bytes() for name in artifacts.fetch(run.client, found, folder, into)}


def test_findings_come_back_as_they_were(tmp_path):
    found = findings()
    findings_files.write(found, tmp_path, "one")
    again = findings_files.read(tmp_path, "one")
    assert isinstance(again, Findings) and again.rows == found.rows and again.intervals == found.intervals
    pandas.testing.assert_frame_equal(again.table, found.table)
    assert again.row(GAIN, policy="h2o", budget=64).value == 0.5


def test_a_subclass_keeps_its_own_tables_and_a_table_its_index(tmp_path):
    found = Contexts(pandas.DataFrame({"x": [1]}), pandas.DataFrame({"y": [2.5]}), {"longest": "8k"})
    findings_files.write(found, tmp_path, "two")
    again = findings_files.read(tmp_path, "two")
    assert isinstance(again, Contexts) and again.ends == {"longest": "8k"} and again.cells.equals(found.cells)
    frame = pandas.DataFrame({"z": [1, 2]}, index=pd_index())
    findings_files.write(frame, tmp_path, "three")
    pandas.testing.assert_frame_equal(findings_files.read(tmp_path, "three"), frame)


def test_damaged_findings_are_one_sentence(tmp_path):
    findings_files.write(findings(), tmp_path, "one")
    (tmp_path / "one.json").write_text("{")
    with pytest.raises(KvlabError, match="findings 'one' cannot be read"):
        findings_files.read(tmp_path, "one")


def test_changed_colour_and_word_are_rendered_without_the_model(run, project, tmp_path):
    write(project, "blue", "best gain")
    found = run.client.get_run(run.id)
    assert not rendering.is_current(found)
    rendered = rendering.render(run.client, found)
    assert rendered.made == ["gains"] and rendered.left.keys() == {"model", "broken"}
    assert "kvlab.load" in rendered.left["model"] and "ZeroDivisionError" in rendered.left["broken"]
    assert stored(run, "story", tmp_path) == {
        "gains.md": b"seed 5: best gain 0.500\n",
        "model.md": b"toy\n",  # nothing is lost
        "told.md": b"toy\n",
    }
    blue = stored(run, "figures", tmp_path)["gains.svg"]
    assert b"#0000ff" in blue and b"#ff0000" not in blue
    again = run.client.get_run(run.id)
    assert rendering.is_current(again) and again.data.metrics == found.data.metrics
    assert findings_table.numbers(again) == findings_table.numbers(found)


def test_a_branch_that_the_run_did_not_take_is_no_picture_that_failed(run, project):
    skipped = """over = None
if seed > 100:
    over = measure(lm)
    run.record("over", over, figure=drawn(over.table, "red"))"""
    notebook(project / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), cell(MEASURED), cell(skipped))
    rendered = rendering.render(run.client, run.client.get_run(run.id))
    assert (rendered.made, rendered.left) == ([], {})


def test_the_same_code_renders_the_same_bytes(run, project, tmp_path):
    rendering.render(run.client, run.client.get_run(run.id))
    first = stored(run, "figures", tmp_path)
    rendering.render(run.client, run.client.get_run(run.id))
    assert stored(run, "figures", tmp_path) == first and first


def test_a_command_renders_what_is_stale(run, project, capsys):
    assert call(capsys, "render")[1].strip() == "all figures are of today's code"
    write(project, "green", "gain")
    code, out, err = call(capsys, "render", EXPERIMENT)
    assert code == 0 and out.strip().endswith("1 run rendered") and "model stays as it was" in err
    assert call(capsys, "render")[1].strip() == "all figures are of today's code"
    code, _, err = call(capsys, "render", "zsmerge_eror_curves")
    assert code == 1 and "did you mean" in err


PAPER = """name: mine
label: Mine
title: A paper of my own
experiment: zsmerge_error_curves
claims:
  - id: mine.gain
    where: table 1
    summary: H2O gains.
    metric: gain/h2o/64
    paper_value: 0.5
    unit: share
    figure: gains
    direction: {kind: greater, than: 0}
    size: {kind: within, of: factor, tolerance: 2}
    phrases:
      met: H2O gains WORD.
      missed: H2O gains nothing.
      undecided: Whether H2O gains is open.
"""
PAPER += PAPER[PAPER.index("  - id") :].replace("mine.gain", "mine.other").replace("figure: gains", "figure: told")


def test_a_changed_phrase_is_rendered_from_the_saved_metrics_and_moves_no_content_key(run, project, tmp_path):
    (project / "pyproject.toml").write_text("[tool.kvlab]\nworkspace = true\n")
    paper, path = project / "papers" / "mine.yaml", project / "notebooks" / "toy.ipynb"
    paper.parent.mkdir()
    paper.write_text(PAPER.replace("WORD", "much"))
    rendering.render(run.client, run.client.get_run(run.id))
    before = content_key.key(path, {"seed": 5})
    assert rendering.is_current(run.client.get_run(run.id))
    paper.write_text(PAPER.replace("WORD", "a lot"))
    assert content_key.key(path, {"seed": 5}) == before and not rendering.is_current(run.client.get_run(run.id))
    rendering.render(run.client, run.client.get_run(run.id))
    found = stored(run, "story", tmp_path)
    assert found["told.md"] == b"toy\n", "sentences of your own that cannot be made again stay"
    assert found["gains.md"].decode() == (
        "seed 5: gain 0.500\n\n- H2O gains a lot: 0.500 (0.400 to 0.600), share; the paper prints 0.5.\n"
    )


def test_a_run_without_findings_is_left_and_says_so(project):
    made = tracking.start(EXPERIMENT, {"seed": 0}, model="toy")
    made.log({"a": 1})
    made.finish()
    with pytest.raises(KvlabError, match="saved no findings"):
        rendering.render(made.client, made.client.get_run(made.id))
