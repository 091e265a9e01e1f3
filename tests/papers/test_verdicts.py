"""The rules by which numbers are judged, each with the numbers at which it turns."""

from __future__ import annotations

from difflib import SequenceMatcher

import pytest
from pydantic import ValidationError
from support.toy_claims import claim

from kvlab import papers
from kvlab.papers import judge
from kvlab.workbench import experiments

PAIRED = {"kind": "greater", "than": 0.0}
CLAIMS = papers.claims()


# ---------------------------------------------------------------- 1: undecided


@pytest.mark.parametrize(
    ("direction", "value", "interval", "verdict"),
    [
        (PAIRED, 0.6, (-0.1, 1.3), "undecided"),
        (PAIRED, -0.2, (-0.5, 0.1), "undecided"),
        (PAIRED, 0.2, (0.0, 0.4), "undecided"),
        (PAIRED, -0.2, (-0.4, 0.0), "undecided"),
        (PAIRED, 0.6, (0.5, 0.7), "holds"),
        (PAIRED, 0.2, (0.1, 0.3), "holds in direction only"),
        (PAIRED, -0.2, (-0.3, -0.1), "fails"),
        ({"kind": "greater", "than": 1.0}, 1.1, (0.9, 1.3), "undecided"),
        ({"kind": "less", "than": 1.0}, 0.9, (0.7, 1.1), "undecided"),
        ({"kind": "greater", "than": 0.0, "margin": 0.3}, 0.4, (0.2, 0.6), "undecided"),
        ({"kind": "at_least", "value": 0.5}, 0.55, (0.4, 0.7), "undecided"),
        ({"kind": "at_least", "value": 0.5}, 0.6, (0.5, 0.7), "holds"),
        ({"kind": "at_most", "value": 0.5}, 0.6, (0.5, 0.7), "undecided"),
        ({"kind": "within", "of": "absolute", "tolerance": 0.2}, 0.6, (0.5, 0.7), "holds"),
        ({"kind": "within", "of": "absolute", "tolerance": 0.2}, 0.6, (0.3, 0.9), "undecided"),
        ({"kind": "within", "of": "relative", "tolerance": 0.5}, 0.6, (0.2, 1.0), "undecided"),
        ({"kind": "within", "of": "factor", "tolerance": 2}, 2.0, (1.5, 2.5), "fails"),
        ({"kind": "clearly_greater", "than": 0.0}, 0.6, (-0.1, 1.3), "undecided"),
        ({"kind": "clearly_greater", "than": 0.0}, -0.6, (-0.9, -0.3), "fails"),
        ({"kind": "clearly_less", "than": 1.0}, 0.6, (0.5, 0.7), "holds"),
        ({"kind": "covers"}, 0.6, (-0.1, 1.3), "undecided"),
        ({"kind": "covers"}, 0.8, (0.7, 0.9), "fails"),
    ],
)
def test_where_the_interval_contains_the_turn_nothing_is_decided(direction, value, interval, verdict):
    assert judge(claim(direction=direction), {"m": value}, {"m": interval}).verdict == verdict


def test_the_size_is_no_part_of_an_undecided_direction():
    """It is undecided whether the value by itself would have met the size or not."""
    for value in (0.6, 0.05):
        verdict = judge(claim(), {"m": value}, {"m": (-0.1, 1.3)})
        assert verdict.verdict == "undecided" and "[-0.1, 1.3]" in verdict.why and "contains 0" in verdict.why


@pytest.mark.parametrize(
    ("direction", "genres", "told"),
    [
        (PAIRED, {"sotu": 1.0, "squad": 0.2}, True),
        (PAIRED, {"sotu": 0.7, "squad": 0.5}, False),
        ({"kind": "greater", "than": 0.5}, {"sotu": 0.7, "squad": 0.5}, True),
        ({"kind": "all_of", "tests": [PAIRED, {"kind": "less", "than": 5.0}]}, {"sotu": 1.0, "squad": 0.2}, True),
        # Beside another measured number, the genres of one side say nothing about the effect.
        ({"kind": "greater", "than": "other"}, {"sotu": 1.0, "squad": 0.2}, False),
        (PAIRED, {}, False),
    ],
)
def test_kinds_of_text_that_differ_by_more_than_the_effect_are_told(direction, genres, told):
    metrics = {"m": 0.6, "other": 0.1, **{f"m/genre/{genre}": mean for genre, mean in genres.items()}}
    for interval in ((0.55, 0.65), (-0.1, 1.3)):
        why = judge(claim(direction=direction), metrics, {"m": interval}).why
        assert ("Kinds of text differ in m by" in why) == told
        assert not told or all(f"{genre} {mean:.4g}" in why for genre, mean in genres.items())


@pytest.mark.parametrize(
    ("direction", "documents", "genres", "verdict", "marked"),
    [
        (PAIRED, (0.5, 0.7), (-0.2, 1.4), "holds", True),
        (PAIRED, (0.5, 0.7), (0.1, 1.1), "holds", False),
        (PAIRED, (-0.1, 1.3), (-0.2, 1.4), "undecided", False),
        # Narrower over genres than over documents: the verdict is still that of the documents.
        (PAIRED, (-0.1, 1.3), (0.1, 1.1), "undecided", False),
        # Against another measured number, both intervals over genres count.
        ({"kind": "greater", "than": "other"}, (0.5, 0.7), (-0.2, 1.4), "holds", True),
        ({"kind": "all_of", "tests": [PAIRED, {"kind": "less", "than": 5.0}]}, (0.5, 0.7), (-0.2, 1.4), "holds", True),
        (PAIRED, (0.5, 0.7), None, "holds", False),
    ],
)
def test_a_verdict_that_is_open_by_genre_is_marked_and_stays(direction, documents, genres, verdict, marked):
    metrics = {"m": 0.6, "other": 0.1} | (
        {} if genres is None else {"m/genre_low": genres[0], "m/genre_high": genres[1]}
    )
    judged = judge(claim(direction=direction, size=PAIRED), metrics, {"m": documents})
    assert judged.verdict == verdict and judged.open_by_genre is marked
    assert ("Undecided when clustered by genre: the interval" in judged.why) is marked
    assert (judged.genre_low, judged.genre_high) == (genres or (None, None))


@pytest.mark.parametrize(
    ("direction", "paper_value", "interval", "power"),
    [
        # The half width is 0.2: what lies further than that from the turn would have been seen.
        (PAIRED, 0.6, (-0.1, 0.3), "seen"),
        (PAIRED, 0.15, (-0.1, 0.3), "not seen"),
        (PAIRED, -0.6, (-0.1, 0.3), "seen"),
        ({"kind": "greater", "than": 1.0}, 1.1, (0.9, 1.3), "not seen"),
        ({"kind": "greater", "than": 1.0}, 2.2, (0.9, 1.3), "seen"),
        ({"kind": "at_least", "value": 0.5}, 0.6, (0.4, 0.8), "not seen"),
    ],
)
def test_power_asks_whether_the_papers_effect_would_have_been_seen(direction, paper_value, interval, power):
    verdict = judge(claim(direction=direction, paper_value=paper_value), {"m": sum(interval) / 2}, {"m": interval})
    assert (verdict.verdict, verdict.power) == ("undecided", power)
    told = {"seen": "would have been seen", "not seen": "would not have been seen"}[power]
    assert f"An effect as large as the paper's {told}" in verdict.why and "0.2" in verdict.why


def test_without_a_number_of_the_paper_the_smallest_visible_effect_is_said():
    """The same where the test is of another metric than the paper's number, or that number has another unit."""
    silent = claim(paper_value=None, size={"kind": "clearly_greater", "than": 0.0})
    elsewhere = claim(direction={"kind": "greater", "metric": "d", "than": 0.0})
    unit = claim(size={"kind": "not_compared", "because": "points against shares"})
    for tested in (silent, elsewhere, unit):
        name = tested.direction.metric or "m"
        verdict = judge(tested, {"m": 0.6, "d": 0.6}, {"m": (0.5, 0.7), name: (-0.1, 0.3)})
        assert (verdict.verdict, verdict.power) == ("undecided", "")
        assert "effects of more than 0.2 would have been seen" in verdict.why


def test_decided_verdicts_say_nothing_of_power():
    for value, interval in ((0.6, (0.5, 0.7)), (-0.6, (-0.7, -0.5))):
        verdict = judge(claim(), {"m": value}, {"m": interval})
        assert verdict.power == "" and "seen" not in verdict.why


@pytest.mark.parametrize(
    ("value", "interval", "told"),
    [(0.6, None, "has no interval"), (0.6, (0.6, 0.6), "has no width"), (-0.6, (-0.6, -0.6), "has no width")],
)
def test_too_few_documents_for_an_interval_are_said(value, interval, told):
    """The verdict is that of the value, and says that nothing tells how sure it is."""
    verdict = judge(claim(), {"m": value}, {"m": interval} if interval else None)
    assert verdict.verdict == ("holds" if value > 0 else "fails")
    assert told in verdict.why and "rests on the value alone" in verdict.why


@pytest.mark.parametrize(
    ("direction", "numbers", "state"),
    [
        ({"kind": "greater", "than": 0.0}, {"m": (0.0, 0.0)}, "undecided"),
        ({"kind": "less", "than": 0.0}, {"m": (0.0, 0.0)}, "undecided"),
        ({"kind": "greater", "than": "n"}, {"m": (1.0, 1.0), "n": (1.0, 1.0)}, "undecided"),
        ({"kind": "at_least", "value": 0.0}, {"m": (0.0, 0.0)}, "holds"),
        ({"kind": "greater", "than": 0.0}, {"m": (-0.1, -0.1)}, "fails"),
        ({"kind": "greater", "than": 7.0}, {"m": (7.0, 7.0)}, "fails"),  # no comparison of two sides
        ({"kind": "greater", "than": 0.0}, {"m": None}, "fails"),  # one number, no repetitions
    ],
)
def test_where_all_examples_are_alike_neither_side_could_be_ahead(direction, numbers, state):
    """As where every policy finds every needle: that one finds no more than another says nothing against it."""
    values = {name: ends[0] if ends else 0.0 for name, ends in numbers.items()}
    intervals = {name: ends for name, ends in numbers.items() if ends}
    verdict = judge(claim(direction=direction, size=direction, paper_value=None), values, intervals)
    assert verdict.verdict == state
    if state == "undecided":
        assert "in every repetition" in verdict.why and "no room for a difference" in verdict.why
        assert "would have been seen" not in verdict.why and not verdict.power


@pytest.mark.parametrize(
    ("kind", "first", "second", "verdict"),
    [
        ("all_of", (0.5, 0.7), (0.1, 0.3), "holds"),
        ("all_of", (0.5, 0.7), (-0.1, 0.3), "undecided"),
        ("all_of", (-0.1, 0.3), (-0.3, -0.1), "fails"),
        ("any_of", (0.5, 0.7), (-0.1, 0.3), "holds"),
        ("any_of", (-0.1, 0.3), (-0.3, -0.1), "undecided"),
        ("any_of", (-0.7, -0.5), (-0.3, -0.1), "fails"),
    ],
)
def test_of_several_tests_one_that_is_clearly_missed_decides(kind, first, second, verdict):
    both = {"kind": kind, "tests": [{**PAIRED, "metric": "a"}, {**PAIRED, "metric": "b"}]}
    tested = claim(direction=both, size={"kind": "at_least", "metric": "m", "value": 0})
    means = {"m": 1.0, "a": sum(first) / 2, "b": sum(second) / 2}
    assert judge(tested, means, {"a": first, "b": second}).verdict == verdict


@pytest.mark.parametrize(
    ("other", "verdict"), [((0.45, 0.55), "holds"), ((0.3, 0.7), "undecided"), ((0.9, 1.1), "fails")]
)
def test_against_another_metric_both_intervals_count(other, verdict):
    """The interval of the difference has the ends 0.1 +- sqrt(0.05^2 + h^2), where the other's half width is h."""
    tested = claim(direction={"kind": "greater", "than": "other"})
    centre = sum(other) / 2
    found = judge(tested, {"m": 0.6, "other": centre}, {"m": (0.55, 0.65), "other": other})
    assert found.verdict == verdict


def test_a_trend_is_undecided_where_a_step_may_go_either_way():
    tested = claim(
        direction={"kind": "monotone", "metrics": ["a", "b", "c"], "trend": "increasing"},
        size={"kind": "at_least", "value": 0},
    )
    means = {"m": 1, "a": 0.1, "b": 0.5, "c": 0.9}
    narrow = {name: (value - 0.05, value + 0.05) for name, value in means.items() if name != "m"}
    assert judge(tested, means, narrow).verdict == "holds"
    assert judge(tested, means, narrow | {"b": (0.0, 1.0)}).verdict == "undecided"
    assert judge(tested, means | {"c": 0.1}, narrow | {"c": (0.05, 0.15)}).verdict == "fails"


@pytest.mark.parametrize("kind", ["identity", "example", "recomputed"])
def test_arithmetic_is_never_undecided(kind):
    """What has no chance in it is judged on the value, whatever interval over documents came along."""
    tested = claim(kind=kind, size={"kind": "at_least", "value": 0})
    assert judge(tested, {"m": 0.2}, {"m": (-0.1, 0.5)}).verdict == "holds"
    assert judge(tested, {"m": -0.2}, {"m": (-0.5, 0.1)}).verdict == "fails"


# ---------------------------------------------------------------- 3: what is recomputed


@pytest.mark.parametrize(
    ("value", "verdict"), [(0.6, "holds"), (0.604, "holds"), (0.6049, "holds"), (0.6051, "fails"), (0.594, "fails")]
)
def test_recomputed_claims_must_print_as_the_paper_does(value, verdict):
    tested = claim(kind="recomputed", size={"kind": "prints_as", "decimals": 2})
    found = judge(tested, {"m": value})
    assert found.verdict == verdict and f"prints as {value:.2f}" in found.why and "0.60" in found.why


def test_rounding_of_the_inputs_is_allowed_for_and_said():
    """In table 2 a score of 44 may be 43.5 to 44.5: what follows from it is known no better than that."""
    for inputs in (0.02, "m/inputs"):
        tested = claim(kind="recomputed", size={"kind": "prints_as", "decimals": 2, "inputs": inputs})
        near, far = (judge(tested, {"m": value, "m/inputs": 0.02}) for value in (0.624, 0.626))
        assert (near.verdict, far.verdict) == ("holds", "fails") and "0.02" in near.why


def test_what_is_recomputed_holds_or_fails():
    """The right sign with the wrong number is wrong arithmetic."""
    tested = claim(kind="recomputed", size={"kind": "prints_as", "decimals": 1})
    assert judge(tested, {"m": 0.3}).verdict == "fails"
    with pytest.raises(ValidationError, match="no test of arithmetic"):
        claim(kind="recomputed", size={"kind": "within", "of": "factor", "tolerance": 2})
    with pytest.raises(ValidationError, match="no test of arithmetic"):
        several = [{"kind": "covers"}, {"kind": "within", "of": "factor", "tolerance": 2}]
        claim(kind="recomputed", size={"kind": "any_of", "tests": several})


def test_no_recomputed_claim_of_the_papers_leans_on_an_interval():
    for entry in (entry for entry in CLAIMS if entry.kind == "recomputed"):
        assert not {name for name in entry.metrics if name.endswith(("/low", "/high"))}, entry.id


# ---------------------------------------------------------------- 5: units


def test_another_unit_is_compared_by_direction_alone_and_that_is_said():
    tested = claim(size={"kind": "not_compared", "because": "points of a judge against shares of attention"})
    found = judge(tested, {"m": 0.6}, {"m": (0.5, 0.7)})
    assert found.verdict == "holds in direction only" and not tested.comparable
    assert "Size not compared: points of a judge against shares of attention" in found.why
    assert judge(tested, {"m": -0.6}, {"m": (-0.7, -0.5)}).verdict == "fails"
    assert claim().comparable


def test_a_direction_cannot_be_left_out():
    with pytest.raises(ValidationError, match="only the size"):
        claim(direction={"kind": "not_compared", "because": "units"})
    with pytest.raises(ValidationError, match="only the size"):
        claim(size={"kind": "all_of", "tests": [{"kind": "not_compared", "because": "units"}]})


def test_scores_and_attention_are_not_compared_by_size():
    """Where another measure stands in for a printed score, no claim asks for a share of the paper's number."""
    scores = ("score", "accuracy", "LongBench", "ROUGE", "qasper", "average")
    attention = ("kept", "mass_lost", "recall", "output_error", "spread_over_merging")
    for entry in (entry for entry in CLAIMS if entry.paper_value is not None and entry.kind == "finding"):
        if any(word in entry.stands_in for word in scores) and any(word in entry.metric for word in attention):
            assert not entry.comparable, entry.id


def test_where_another_measure_stands_in_the_direction_alone_is_tested():
    """That the error of the attention output moves as scores do in the paper says nothing of how far scores move."""
    where = {"metric": "m", "paper_value": None, "size": {"kind": "clearly_greater", "than": 0.0}}
    numbers = {"m": 0.6}, {"m": (0.5, 0.7)}
    found = judge(claim(**where, stands_in="output error, for scores on RULER"), *numbers)
    assert found.verdict == "holds in direction only"
    assert "Size not compared: output error, for scores on RULER" in found.why
    assert judge(claim(**where), *numbers).verdict == "holds"
    own = claim(stands_in="the smallest error, for the best score")
    assert judge(own, *numbers).verdict == "holds", "a printed number of the same unit is compared"
    check = claim(**where, kind="identity", stands_in="output error, for scores on RULER")
    assert judge(check, *numbers).verdict == "holds"
    assert judge(claim(**where, stands_in="output error"), {"m": -0.6}, {"m": (-0.7, -0.5)}).verdict == "fails"


@pytest.mark.parametrize(
    "changes",
    [
        {"size": {"kind": "not_compared", "because": "Scores and errors have no common unit."}},
        {"stands_in": "An error, for a score.", "paper_value": None, "size": {"kind": "clearly_greater", "than": 0.0}},
    ],
    ids=["not compared", "stands in"],
)
def test_a_reason_that_is_a_sentence_ends_with_one_full_stop(changes):
    why = judge(claim(**changes), {"m": 0.6}, {"m": (0.5, 0.7)}).why
    assert "Size not compared" in why and why.endswith(".") and ".." not in why


# ---------------------------------------------------------------- 7: timings


def test_timings_need_clear_intervals():
    tested = claim(kind="timing")
    assert judge(tested, {"m": 0.6}, {"m": (0.5, 0.7)}).verdict == "holds"
    assert judge(tested, {"m": 0.6}, {"m": (-0.1, 1.3)}).verdict == "undecided"
    for interval in (None, {"m": (0.6, 0.6)}):
        found = judge(tested, {"m": 0.6}, interval)
        assert found.verdict == "undecided" and "one round" in found.why


def test_what_a_clock_or_a_peak_decides_is_a_timing():
    clocks = ("gain/", "gain_growth/", "batch_gain/", "gain_over_h2o/", "slowdown/", "first_token/", "answer_saved/")
    clocks += ("pseudo_over_generated/", "peak_over_snapkv/")
    measured = [entry for entry in CLAIMS if entry.experiment == "speed_and_memory"]
    assert {entry.id for entry in measured if entry.metric.startswith(clocks)} == {
        entry.id for entry in CLAIMS if entry.kind == "timing"
    }


def test_who_waits_for_the_full_profile_has_an_experiment_with_one():
    for entry in CLAIMS:
        if entry.profile == "full":
            assert "full" in experiments.load(entry.experiment).profiles, entry.id


# ---------------------------------------------------------------- 4: which claims are one finding


def test_findings_are_named_by_claims_that_share_a_comparison():
    """Every finding has a name, of one paper; one that stands alone is no slip of the pen for another of its paper."""
    named: dict[str, list] = {}
    for entry in CLAIMS:
        if entry.finding or entry.kind in papers.SAMPLED:
            named.setdefault(entry.finding, []).append(entry)
    assert len(named) >= 20 and "" not in named
    for name, members in named.items():
        assert {entry.kind for entry in members} in ({"finding"}, {"question"}), name
        (paper,) = {entry.paper for entry in members}
        if len(members) == 1:
            beside = [other for other, theirs in named.items() if other != name and theirs[0].paper == paper]
            assert all(SequenceMatcher(None, name, other).ratio() < 0.95 for other in beside), name
    assert claim().fact == ("p", "toy") and claim(finding="a b").fact == ("p", "a b")
    with pytest.raises(ValidationError, match="only findings"):
        claim(kind="control", finding="a b")


# ---------------------------------------------------------------- what a claim is provided with


@pytest.mark.parametrize(("p", "verdict"), [(0.01, "fails"), (0.05, "not measured"), (0.4, "not measured")])
def test_without_what_a_claim_rests_on_it_is_not_measured(p, verdict):
    tested = claim(provided={"kind": "less", "metric": "signal/p", "than": 0.05})
    assert tested.metrics == {"m", "signal/p"}
    found = judge(tested, {"m": -0.6, "signal/p": p}, {"m": (-0.7, -0.5)})
    assert found.verdict == verdict and found.value == -0.6
    if verdict == "not measured":
        assert found.why.startswith("A required condition is not met: signal/p = ")
    assert judge(tested, {"m": 0.6}).why == "no run has measured signal/p"


def test_a_run_that_leaves_a_metric_out_has_the_reason_that_the_claim_knows():
    why = "prompts as short as these leave no room"
    tested = claim(
        direction={"kind": "greater", "metric": "lost/few", "than": "lost/many"}, lacking={"lost/few": why, "x": "y"}
    )
    assert judge(tested, {"lost/many": 0.1}).why == f"{why} (no lost/few, m)"
    assert judge(tested, {}).why == "no run has measured lost/few, lost/many, m"
    assert judge(tested, {"lost/few": 0.2, "m": 1.0}).why == "no run has measured lost/many"


@pytest.mark.parametrize("paper", ["rocketkv"])
def test_what_the_papers_files_say_of_lacking_metrics_is_about_metrics_that_claims_read(paper):
    own = [entry for entry in CLAIMS if entry.paper == paper]
    read = set().union(*(entry.metrics for entry in own))
    assert own[0].lacking
    for start in own[0].lacking:
        assert any(name.startswith(start) for name in read), start
