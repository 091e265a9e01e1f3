"""A new ledger beside a kept one: what counts as a difference, how it is told, and with which exit code."""

from __future__ import annotations

import pandas
import pytest
from support.commands import call, complaint
from support.projects import blank_store
from support.report_pages import CLAIM
from support.runs import job
from support.toy_claims import claim

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.workbench.jobs import launch
from kvlab.workbench.report import ledger_diff, snapshots
from kvlab.workbench.report.ledger import Entry
from kvlab.workbench.report.provenance import Origin


def entry(value, low=None, high=None, verdict="holds", model="toy@0", profile="quick", signature="s", **changes):
    """A kept entry of one claim."""
    judged = papers.Verdict(value=value, low=low, high=high, verdict=verdict, why="")
    return Entry(claim(**changes), judged, None, model, Origin(profile, signature))


@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        (entry(0.5, 0.4, 0.6), entry(0.6, 0.1, 0.9), []),
        (entry(0.5, 0.4, 0.6), entry(0.61, 0.1, 0.9), ["value"]),
        (entry(0.5, 0.4, 0.6), entry(0.39), ["value"]),
        (entry(0.5, 0.4, 0.6), entry(0.5, 0.4, 0.6, "fails"), ["verdict"]),
        (entry(0.5), entry(0.5002), []),
        (entry(0.5), entry(0.502), ["value"]),
        (entry(0.5, 0.5, 0.5), entry(0.5002), []),
        (entry(0.0), entry(1e-12), []),
        (entry(None), entry(0.5), ["value"]),
        (entry(None), entry(None), []),
        (entry(0.5, kind="recomputed"), entry(0.502, kind="recomputed"), ["value"]),
    ],
)
def test_what_differs(old, new, differs):
    found = ledger_diff.compare([old], [new])
    assert [one.differs for one in found.differences] == differs and (found.compared, found.missing) == (1, 0)


def test_timings_and_what_only_one_of_them_measured_are_no_difference():
    unmeasured = Entry(claim(id="gone"), papers.judge(claim(), {}), None, "toy@0")
    timing = entry(1.0, kind="timing", id="clock"), entry(9.0, kind="timing", id="clock")
    found = ledger_diff.compare(
        [entry(0.5), entry(0.5, id="gone"), timing[0]], [entry(0.5), unmeasured, entry(0.5, id="new"), timing[1]]
    )
    assert (found.differences, found.compared, found.missing) == ([], 1, 1)
    with pytest.raises(KvlabError, match="nothing to compare: kept are toy, and measured here other"):
        ledger_diff.compare([entry(0.5)], [entry(0.5, model="other@0")])


def test_flipped_verdicts_come_first_and_what_else_is_not_the_same_is_said():
    old = [entry(0.5, 0.4, 0.6), entry(0.5, 0.4, 0.6, id="flips"), entry(0.5, id="same setting")]
    new = [
        entry(0.7, 0.6, 0.8, model="toy@1", profile="full", signature="longer"),
        entry(-0.5, -0.6, -0.4, "fails", id="flips", signature="others"),
        entry(0.6, id="same setting"),
    ]
    first, second, third = ledger_diff.compare(old, new).differences
    assert "flips on toy@0: was holds, is fails; value −0.500 [−0.600, −0.400], kept 0.500 [0.400, 0.600]" in str(first)
    assert first.note.startswith("other signature") and third.note == ""
    assert second.note == "other weights: toy@1, kept toy@0; other profile: full, kept quick"


def test_the_commands_say_it_with_an_exit_code(project, tmp_path, capsys, monkeypatch):
    folder = str(tmp_path / "ledger")
    monkeypatch.setattr(launch, "run", lambda *_, **__: [])
    assert "holds no kept ledger" in complaint(capsys, "reproduce", "--compare", folder)
    job(0.6)
    snapshots.keep(tmp_path / "ledger")
    assert "keeps nothing of that model" in complaint(
        capsys, "reproduce", "--compare", folder, "--model", "qwen2.5-coder-0.5b"
    )
    code, out, _ = call(capsys, "report", "--compare", folder)
    assert code == 0 and "Of 1 kept verdicts that were measured again, 0 flipped" in out
    table = project / "report" / "differences.csv"
    assert list(pandas.read_csv(table).columns) == ledger_diff.COLUMNS and pandas.read_csv(table).empty
    (project / "mlruns" / "mlflow.db").write_bytes(blank_store())
    job(-0.6)
    code, out, _ = call(capsys, "reproduce", "--compare", folder)
    assert (
        code == 3
        and f"{CLAIM} on toy@0: was holds in direction only, is fails" in out
        and out.rstrip().endswith("differences.csv")
    )
    (row,) = pandas.read_csv(table).to_dict("records")
    assert (row["differs"], row["kept_value"], row["value"], row["kept_low"]) == ("verdict", 0.6, -0.6, 0.5)
    assert call(capsys, "report", "--from", folder, "--compare", folder)[0] == 0
