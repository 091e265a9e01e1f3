"""A paper's ledger in a few sentences: they say what the verdicts say, and name what they count."""

from __future__ import annotations

from support.paths import ROOT
from support.toy_claims import claim

from kvlab import papers
from kvlab.workbench.report import kept
from kvlab.workbench.report.digest import digest
from kvlab.workbench.report.ledger import Entry, by_paper
from kvlab.workbench.report.origins import Origin
from kvlab.workbench.report.subjects import Subject, subjects

SMALL, LARGE = Subject("small", 10**8), Subject("large", 10**9)


def entry(verdict: str, model: Subject = SMALL, value: float = 0.5, half: float = 0.05, **changes) -> Entry:
    judged = papers.Verdict(value=value, low=value - half, high=value + half, verdict=verdict, why="")
    return Entry(claim(**changes), judged, None, model.name, Origin())


def finding(name: str, verdict: str, **changes) -> Entry:
    return entry(verdict, id=f"toy.{name}", finding=name, **changes)


def test_on_one_model_it_says_what_holds_what_fails_and_what_is_open():
    told = digest(
        [
            finding("one", "holds"),
            finding("two", "holds in direction only"),
            finding("three", "fails"),
            finding("four", "undecided"),
            entry("holds", id="toy.a", where="table 2"),
            entry("holds", id="toy.b", where="table 2"),
            entry("fails", id="toy.check", kind="control"),
            entry("holds", id="toy.sum", kind="recomputed"),
        ],
        [SMALL],
    )
    assert told == [
        "Of its 6 findings, on small 3 hold, 1 holds in direction only, 1 fails and 1 is undecided.",
        "What holds, at least in direction: one; two; table 2 (2 findings).",
        "What fails: three.",
        "What stays undecided: four.",
        "On small none of 6 printed numbers that ours can be compared with lies inside our interval; the closest is "
        "0.600 (table 1), 0.500 here.",
        "Counted apart: 0 of 1 checks are met and 1 of 1 recomputed claims agree.",
    ]


def test_a_finding_of_several_claims_stands_as_its_weakest():
    first, second = finding("one", "holds"), entry("fails", id="toy.other", finding="one")
    told = digest([first, second, finding("two", "holds")], [SMALL])
    assert told[:3] == [
        "Of its 2 findings, on small 1 holds and 1 fails.",
        "What holds, at least in direction: two.",
        "What fails: one.",
    ]


def test_on_several_models_it_says_where_they_differ_and_where_size_leads():
    both = [
        *(
            finding("same", "holds", model=model, value=0.55 + shift, half=0.1)
            for model, shift in ((SMALL, 0), (LARGE, 0))
        ),
        finding("grows", "fails", model=SMALL, value=0.1),
        finding("grows", "holds", model=LARGE, value=0.5),
        finding("once", "fails", model=SMALL, value=0.1),
    ]
    told = digest(both, [SMALL, LARGE])
    assert told[0].endswith("on small 1 holds and 2 fail; on large 2 hold.")
    assert "What holds on every model that measured it, at least in direction: same." in told
    assert "What fails on every model that measured it: once." in told
    assert "What holds on some models and not on others: grows." in told
    assert told[-1].startswith(
        "On large 1 of 2 printed numbers that ours can be compared with lies inside our interval"
    )
    assert told[-1].endswith("with the model's size 1 come nearer and 0 move away.")


def test_where_nothing_was_measured_it_says_only_that():
    unmeasured = [Entry(claim(), papers.judge(claim(), {}))]
    assert digest(unmeasured, []) == ["Its only finding has not been measured yet."]
    assert digest([], []) == ["It has no findings."]


def test_of_this_projects_ledger_every_paper_has_about_five_sentences():
    judged = kept.read(ROOT / "docs" / "ledger" / "smollm2-135m.csv")
    for label, mine in by_paper(judged).items():
        told = digest(mine, subjects(judged))
        assert 4 <= len(told) <= 6, label
        assert all(sentence.endswith(".") and len(sentence) < 420 for sentence in told)
