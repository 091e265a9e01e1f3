"""Counts are of findings: claims that share a comparison count once, and timings not at all."""

from __future__ import annotations

import pytest
from support.runs import job
from support.toy_claims import claim

from kvlab.papers import judge
from kvlab.workbench.report import ledger, model_trends
from kvlab.workbench.report import page as report

HOLDS, DIRECTION, OPEN, FAILS = (0.6, 0.7), (0.1, 0.3), (-0.1, 0.3), (-0.3, -0.1)


def entries(*intervals, **changes) -> list[ledger.Entry]:
    """Claims of one finding, judged on the middles of these intervals; None for one that nobody measured."""
    claims = [claim(id=f"zsmerge.{number}", paper="zsmerge", **changes) for number in range(len(intervals))]
    return [
        ledger.Entry(each, judge(each, {"m": sum(pair) / 2} if pair else {}, {"m": pair} if pair else None))
        for each, pair in zip(claims, intervals, strict=True)
    ]


@pytest.mark.parametrize(
    ("intervals", "state"),
    [
        ((HOLDS, HOLDS), "holds"),
        ((HOLDS, DIRECTION), "holds in direction only"),
        ((DIRECTION, OPEN), "undecided"),
        ((HOLDS, OPEN, FAILS), "fails"),
        ((HOLDS, None), "holds"),
        ((None, None), "not measured"),
    ],
)
def test_a_finding_stands_as_its_weakest_claim(intervals, state):
    tally = ledger.Tally.of(entries(*intervals, finding="one fact"))
    assert tally.findings == {state: 1}


def test_claims_without_a_finding_count_for_themselves():
    assert ledger.Tally.of(entries(HOLDS, HOLDS, FAILS)).findings == {"holds": 2, "fails": 1}


@pytest.mark.parametrize(
    ("intervals", "waiting"),
    [((None, None), 1), ((HOLDS, None), 0)],
    ids=["nothing is measured", "another claim of the finding is"],
)
def test_a_finding_that_is_not_measured_may_wait_for_the_full_profile(intervals, waiting):
    mine = [*entries(*intervals, finding="one fact", profile="full"), *entries(None)]
    assert [entry.full_only for entry in mine] == [pair is None for pair in intervals] + [False]
    tally = ledger.Tally.of(mine)
    assert tally.findings["not measured"] == 1 + waiting and tally.full_only == waiting
    assert tally.waiting("not measured") == ("1 needs the full profile" if waiting else "")
    assert tally.waiting("holds") == ""


def test_the_page_says_who_waits_for_the_full_profile(project):
    job(0.6)
    judged = ledger.entries()
    waiting = [entry for entry in judged if entry.full_only]
    assert {entry.claim.profile for entry in waiting} == {"full"}
    text = report.render(judged)[report.MAIN]
    assert text.count("<small>full profile only</small>") == len(waiting), "beside each verdict"
    findings = {entry.claim.fact for entry in waiting if entry.group == "findings"}
    assert f"<small>{len(findings)} need the full profile</small>" in text, "beside the count of all findings"


def test_what_was_measured_and_rests_on_nothing_does_not_wait():
    """A full run gave its number; what it is provided with was not there."""
    resting = claim(profile="full", provided={"kind": "less", "metric": "p", "than": 0.05})
    entry = ledger.Entry(resting, judge(resting, {"m": 0.6, "p": 0.5}))
    assert entry.state == "not measured" and not entry.full_only


def test_one_name_in_two_papers_is_two_findings():
    mine = entries(HOLDS, finding="one fact")
    other = claim(id="dapq.0", paper="dapq", finding="one fact")
    assert ledger.Tally.of([*mine, ledger.Entry(other, judge(other, {"m": -1.0}))]).findings == {"holds": 1, "fails": 1}


def test_timings_are_no_findings():
    tally = ledger.Tally.of([*entries(HOLDS, FAILS, kind="timing"), *entries(HOLDS)])
    assert tally.findings == {"holds": 1} and tally.timings == {"holds": 1, "fails": 1}


def test_a_check_that_is_undecided_is_not_met():
    tally = ledger.Tally.of(entries(HOLDS, OPEN, kind="control"))
    assert tally.met("checks") == "1 of 2" and tally.checks_missed == 1


def test_a_check_that_was_not_measured_is_not_missed():
    tally = ledger.Tally.of(entries(HOLDS, None, kind="control"))
    assert tally.met("checks") == "1 of 1" and tally.checks_missed == 0
    assert ledger.Tally.of(entries(None, kind="control")).met("checks") == ""


def test_the_ledger_names_finding_kind_power_and_machine(project):
    job(0.05, metric="published/reduction/40", hardware="a machine")
    row = report.ledger().set_index("id").loc["zsmerge.figure4.as_published"]
    assert (row.verdict, row.power, row.kind) == ("undecided", "seen", "finding")
    assert row.machine == "a machine" and row.finding and "contains 0" in row.why
    assert list(report.ledger().columns[:12]) == ledger.COLUMNS[:12]


def test_undecided_has_a_mark_of_its_own_that_reads_without_colour():
    marks = [mark for _, mark in report.MARKS.values()]
    assert set(report.MARKS) == set(ledger.STATES) and len(set(marks)) == len(marks)


@pytest.mark.parametrize(("comparable", "drawn"), [(True, True), (False, False)])
def test_a_number_of_another_unit_is_on_no_axis_with_ours(comparable, drawn):
    size = {} if comparable else {"size": {"kind": "not_compared", "because": "units"}}
    (entry,) = entries(HOLDS, **size)
    assert (report.scale(entry)["paper"] is not None) is drawn
    row = model_trends.Row(entry.claim, [entry])
    assert (model_trends.paper_value(row.claim) is not None) is drawn
