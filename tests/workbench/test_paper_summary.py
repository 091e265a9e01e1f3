"""A paper's ledger in a few sentences: they say what the verdicts say, and name what they count."""

from __future__ import annotations

from support.paths import ROOT
from support.toy_claims import claim

from kvlab import papers
from kvlab.workbench.report import snapshots
from kvlab.workbench.report.ledger import Entry, by_paper
from kvlab.workbench.report.ledger_models import Subject, subjects
from kvlab.workbench.report.paper_summary import digest, quoted
from kvlab.workbench.report.provenance import Origin

SMALL, MIDDLE, LARGE = Subject("small", 10**8), Subject("middle", 3 * 10**8), Subject("large", 10**9)


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
        "It claims to be small.",
    )
    assert told == [
        "It claims to be small.",
        "Of its 6 findings, on small 3 hold, 1 holds in direction only, 1 fails and 1 is undecided.",
        "These hold, at least in direction: one; two; table 2 (2 findings); these fail: three.",
        "These stay undecided: four.",
        "On small none of 6 printed numbers that ours can be compared with lies inside our interval.",
    ]


def test_a_finding_of_several_claims_stands_as_its_weakest():
    first, second = finding("one", "holds"), entry("fails", id="toy.other", finding="one")
    told = digest([first, second, finding("two", "holds")], [SMALL])
    assert told[:2] == [
        "Of its 2 findings, on small 1 holds and 1 fails.",
        "These hold, at least in direction: two; these fail: one.",
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
    assert told[1] == "These hold on both models, at least in direction: same."
    assert "These hold on some models and fail on others: grows." in told
    assert not any("once" in sentence for sentence in told), "one model is not every model"
    assert told[-1].startswith(
        "On large 1 of 2 printed numbers that ours can be compared with lies inside our interval"
    )
    assert told[-1].endswith(
        "of 2 findings with such a number, as models grow, 1 comes nearer to it and 1 does not change clearly."
    )


def test_what_one_model_leaves_open_does_not_turn():
    both = [
        finding("half told", "undecided", model=SMALL, value=0.1),
        finding("half told", "holds", model=LARGE, value=0.5),
    ]
    told = digest(both, [SMALL, LARGE])
    assert "None clearly holds on one model and fails on another. Undecided on one at least: half told." in told


def test_a_change_in_no_order_of_size_is_not_left_out():
    three = [SMALL, MIDDLE, LARGE]
    values = zip(three, (0.1, 0.5, 0.1), strict=True)
    told = digest([finding("comes and goes", "holds", model=model, value=value) for model, value in values], three)
    assert told[-1].endswith("of 1 finding with such a number, as models grow, 1 changes in no order of size.")


def test_what_fewer_models_measured_is_said_with_their_names():
    three = [SMALL, MIDDLE, LARGE]
    found = [
        *(finding("everywhere", "fails", model=model) for model in three),
        *(finding("on two", "holds", model=model) for model in (SMALL, LARGE)),
        finding("nowhere else", "holds", model=LARGE),
    ]
    (told,) = [sentence for sentence in digest(found, three) if sentence.startswith("These hold")]
    assert told == (
        "These hold on each of the fewer models that measured them, at least in direction: on two (on small and "
        "large); these fail on all three models: everywhere."
    )


def test_a_quoted_finding_speaks_by_its_weakest_claim_on_the_model_that_is_asked_for():
    words = {"missed": "It loses.", "undecided": "It is open."}
    found = [
        finding("one", "holds", phrases=words | {"met": "One gains."}),
        finding("one", "fails", model=LARGE, value=-0.5, phrases=words | {"met": "One gains."}),
        entry("undecided", id="toy.other", finding="one", phrases=words | {"met": "Other gains."}),
        finding("not quoted", "holds", phrases=words | {"met": "Nobody asks."}),
        finding("asked", "holds", kind="question", phrases=words | {"met": "Two gains."}),
    ]
    names = ["asked", "one", "nowhere"]
    assert quoted(found, SMALL.name, names) == [
        "Two gains: 0.500 (0.450 to 0.550); the paper prints 0.6.",
        "It is open: 0.500 (0.450 to 0.550); the paper prints 0.6.",
    ]
    assert quoted(found, LARGE.name, names) == ["It loses: −0.500 (−0.550 to −0.450); the paper prints 0.6."]


def test_where_nothing_was_measured_it_says_only_that():
    unmeasured = [Entry(claim(), papers.judge(claim(), {}))]
    assert digest(unmeasured, []) == ["Its only finding has not been measured yet."]
    assert digest([], [], "It claims.") == ["It claims.", "It has no findings."]


def test_a_paper_with_questions_alone_says_how_they_stand():
    found = [
        entry("holds", id="toy.one", finding="one", kind="question"),
        entry("holds", id="toy.two", finding="two", kind="question"),
        entry("fails", id="toy.three", finding="three", kind="question"),
    ]
    assert digest(found, [SMALL]) == [
        "It has no findings.",
        "Of 3 questions of ours on small, 2 hold and 1 fails.",
    ]


def test_of_this_projects_ledger_every_measured_paper_has_five_sentences_the_first_on_what_it_claims():
    of_papers = {paper.label: paper.says for paper in papers.papers()}
    for judged in (
        snapshots.read(ROOT / "docs" / "ledger" / "smollm2-135m.csv"),
        snapshots.kept(ROOT / "docs" / "ledger"),
    ):
        for label, mine in by_paper(judged).items():
            told = digest(mine, subjects(judged), of_papers[label])
            measured = any(entry.measured for entry in mine)
            assert len(told) == (5 if measured else 2) and told[0] == of_papers[label], label
            assert all(sentence.endswith(".") and len(sentence) < 640 for sentence in told)
