"""Claims are data, and verdicts follow the numbers."""

from __future__ import annotations

import itertools
import math
import re
from typing import get_args

import pytest
import yaml
from support.paths import ROOT
from support.refusals import one_sentence
from support.toy_claims import claim

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.papers import Claim, judge

CLAIMS = papers.claims()


def condition(test: dict, metrics: dict[str, float], paper_value: float | None = 0.6) -> bool:
    """Whether a test passes, seen through a verdict: the direction is the test, the size cannot fail."""
    tested = claim(direction=test, size={"kind": "at_least", "metric": "sure", "value": 0}, paper_value=paper_value)
    return judge(tested, {**metrics, "sure": 1}).verdict == "holds"


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (0.65, "holds"),
        (0.7, "holds"),
        (0.75, "holds in direction only"),
        (0.05, "holds in direction only"),
        (0.0, "fails"),
        (-0.6, "fails"),
        (None, "not measured"),
        (math.nan, "not measured"),
    ],
)
def test_verdict_follows_the_number(value, verdict):
    assert judge(claim(), {} if value is None else {"m": value}).verdict == verdict


def test_a_missing_reference_is_not_measured_and_named():
    verdict = judge(claim(direction={"kind": "greater", "than": "other"}), {"m": 0.6})
    assert verdict.verdict == "not measured" and "other" in verdict.why and verdict.value == 0.6


def test_what_only_the_full_profile_measures_says_so_until_it_is_measured():
    waiting = claim(profile="full")
    unmeasured = judge(waiting, {"other": 1.0})
    assert unmeasured.verdict == "not measured" and unmeasured.why.startswith("full profile only: ")
    assert judge(waiting, {"m": 0.6}).verdict == "holds"
    assert papers.FULL_ONLY not in judge(claim(), {}).why


def test_intervals_come_along_and_doubt_is_said():
    sure = judge(claim(), {"m": 0.6, "m/low": 0.5, "m/high": 0.7})
    assert (sure.low, sure.high) == (0.5, 0.7) and "interval" not in sure.why
    unsure = judge(claim(), {"m": 0.6}, {"m": (-0.1, 1.3)})
    assert unsure.verdict == "undecided" and "[-0.1, 1.3] of m contains 0" in unsure.why
    against = judge(claim(direction={"kind": "greater", "than": "other"}), {"m": 0.6, "other": 0.55}, {"m": (0.5, 0.7)})
    assert "contains 0.55" in against.why


@pytest.mark.parametrize(
    ("test", "passes", "misses"),
    [
        ({"kind": "within", "of": "relative", "tolerance": 0.5}, 0.85, 0.95),
        ({"kind": "within", "of": "factor", "tolerance": 2}, 1.15, 0.29),
        ({"kind": "within", "of": "absolute", "tolerance": 0.1, "to": "x"}, 1.05, 0.6),
        ({"kind": "greater", "than": "x", "margin": 0.5}, 1.51, 1.5),
        ({"kind": "greater", "than": "x", "factor": 2}, 2.01, 1.99),
        ({"kind": "less", "than": "x", "factor": 0.9}, 0.89, 0.91),
        ({"kind": "less", "than": "x", "margin": 0.2}, 0.79, 0.81),
        ({"kind": "at_most", "value": 0}, 0, 1e-9),
        ({"kind": "at_least", "value": 2}, 2, 1.999),
        ({"kind": "all_of", "tests": [{"kind": "at_least", "value": 1}, {"kind": "at_most", "value": 2}]}, 1.5, 2.5),
    ],
)
def test_each_kind_of_test_turns_where_it_says(test, passes, misses):
    assert condition(test, {"m": passes, "x": 1.0})
    assert not condition(test, {"m": misses, "x": 1.0})


@pytest.mark.parametrize(
    ("test", "passes", "misses"),
    [
        ({"kind": "clearly_greater", "than": 0.0}, (0.01, 0.9), (0.0, 0.9)),
        ({"kind": "clearly_greater", "than": "x"}, (1.01, 1.2), (0.9, 1.2)),
        ({"kind": "clearly_less", "than": 0.0}, (-0.9, -0.01), (-0.9, 0.0)),
        ({"kind": "clearly_less", "than": "x"}, (0.2, 0.99), (0.9, 1.01)),
        ({"kind": "covers"}, (0.6, 0.9), (0.61, 0.9)),
        ({"kind": "covers", "to": 0.0}, (-0.1, 0.0), (0.1, 0.2)),
        ({"kind": "covers"}, (0.1, 0.9), (-0.1, 0.9)),
        ({"kind": "covers", "to": "x"}, (0.5, 1.5), (1.1, 1.5)),
        (
            {"kind": "any_of", "tests": [{"kind": "covers"}, {"kind": "within", "of": "factor", "tolerance": 2}]},
            (0.65, 0.75),
            (0.0, 0.2),
        ),
        (
            {
                "kind": "any_of",
                "tests": [
                    {"kind": "covers", "to": 5},
                    {"kind": "at_least", "metric": "x", "value": 2},
                    {"kind": "clearly_less", "than": 0},
                ],
            },
            (4, 6),
            (0, 1),
        ),
    ],
)
def test_tests_of_intervals_turn_at_their_ends_however_the_interval_comes(test, passes, misses):
    """The middle of an interval is its value; it comes as two metrics, or apart."""
    for (low, high), expected in ((passes, True), (misses, False)):
        value = (low + high) / 2
        assert condition(test, {"m": value, "m/low": low, "m/high": high, "x": 1.0}) is expected
        apart = claim(direction=test, size={"kind": "at_least", "metric": "x", "value": 0})
        assert (judge(apart, {"m": value, "x": 1.0}, {"m": (low, high)}).verdict == "holds") is expected


@pytest.mark.parametrize(
    "test", [{"kind": "clearly_greater", "than": 0.0}, {"kind": "clearly_less", "than": 9}, {"kind": "covers"}]
)
def test_a_test_of_an_interval_needs_both_ends(test):
    tested = claim(direction=test)
    assert tested.metrics == {"m", "m/low", "m/high"}
    for known in ({}, {"m/low": 0.5}, {"m/high": 0.7}, {"m/low": 0.5, "m/high": math.nan}):
        verdict = judge(tested, {"m": 0.6, **known})
        assert (verdict.verdict == "not measured" and "m/high" in verdict.why) or "m/low" in verdict.why
    assert judge(tested, {"m": 0.6, "m/low": 0.5, "m/high": 0.7}).verdict == "holds"


def test_the_metrics_of_tests_within_tests_are_needed_too():
    parts = [
        {"kind": "clearly_less", "metric": "d", "than": "e"},
        {
            "kind": "all_of",
            "metric": "f",
            "tests": [{"kind": "covers"}, {"kind": "monotone", "metrics": ["g", "h"], "trend": "increasing"}],
        },
    ]
    tested = claim(size={"kind": "any_of", "tests": parts})
    assert tested.metrics == {"m", "d", "d/low", "d/high", "e", "f", "f/low", "f/high", "g", "h"}


@pytest.mark.parametrize(
    ("test", "interval", "why"),
    [
        (
            {"kind": "clearly_greater", "than": 0.0},
            (0.5, 0.7),
            "the interval of m, 0.5 to 0.7, asked to lie above 0 as a whole",
        ),
        (
            {"kind": "clearly_less", "than": 0.0},
            (0.5, 0.7),
            "the interval of m, 0.5 to 0.7, asked to lie below 0 as a whole",
        ),
        ({"kind": "covers"}, (0.5, 0.7), "the interval of m, 0.5 to 0.7, asked to contain the paper's 0.6"),
        (
            {"kind": "any_of", "tests": [{"kind": "at_most", "value": 0}, {"kind": "at_least", "value": 0.5}]},
            (0.5, 0.7),
            "Direction met: m = 0.6, asked to be at least 0.5.",
        ),
        (
            {"kind": "any_of", "tests": [{"kind": "at_most", "value": 0}, {"kind": "at_least", "value": 1}]},
            (0.5, 0.7),
            "none of these: m = 0.6, asked to be at most 0; m = 0.6, asked to be at least 1",
        ),
    ],
    ids=["above", "below", "contains", "one of", "none of"],
)
def test_the_comparison_is_said(test, interval, why):
    told = judge(claim(direction=test, size={"kind": "at_most", "value": 9}), {"m": 0.6}, {"m": interval}).why
    assert why in told and told.count("interval") == why.count("interval")


def test_doubt_follows_the_metric_that_the_direction_is_tested_on():
    tested = claim(direction={"kind": "greater", "metric": "d", "than": 0.0})
    assert "contains 0" in judge(tested, {"m": 0.6, "d": 0.1}, {"m": (0.5, 0.7), "d": (-0.1, 0.3)}).why
    assert "interval" not in judge(tested, {"m": 0.6, "d": 0.2}, {"m": (-0.5, 0.7), "d": (0.1, 0.3)}).why


def test_a_factor_does_not_pass_with_the_wrong_sign():
    assert not condition({"kind": "within", "of": "factor", "tolerance": 2}, {"m": -0.6})


@pytest.mark.parametrize(
    ("values", "slack", "passes"),
    [
        ([1, 2, 3], 0, True),
        ([1, 3, 2], 0, False),
        ([1, 3, 2.9], 0.2, True),
        ([3, 2, 1], 0, False),
        ([1, 1, 1], 0, True),
    ],
)
def test_monotone(values, slack, passes):
    metrics = dict(zip("abc", values, strict=True)) | {"m": 0}
    test = {"kind": "monotone", "metrics": list("abc"), "trend": "increasing", "slack": slack}
    assert condition(test, metrics) is passes


def test_the_number_of_claims_and_their_papers():
    assert {entry.paper for entry in CLAIMS} == {path.stem for path in (ROOT / "kvlab" / "papers").glob("*.yaml")}
    assert len({entry.id for entry in CLAIMS}) == len(CLAIMS)
    assert all(entry.id.startswith(f"{entry.paper}.") for entry in CLAIMS)
    findings = [entry for entry in CLAIMS if entry.kind == "finding"]
    assert len(findings) >= 60 and sum(entry.experiment is not None for entry in findings) >= 40


@pytest.mark.parametrize(
    "entry", [entry for entry in CLAIMS if entry.paper_value is not None], ids=lambda entry: entry.id
)
def test_the_papers_own_figure_passes_its_test_of_size(entry):
    """Where a claim is judged on nothing but its own metric, the paper's figure, had we measured it, must hold."""
    measured = {
        entry.metric: entry.paper_value,
        f"{entry.metric}/low": entry.paper_value - 1e-9 * abs(entry.paper_value),
        f"{entry.metric}/high": entry.paper_value + 1e-9 * abs(entry.paper_value),
    }
    if entry.metrics <= measured.keys():
        best = "holds" if entry.comparable else "holds in direction only"
        assert judge(entry, measured).verdict == best, judge(entry, measured).why


def _met(entry: Claim) -> dict[str, float]:
    """Numbers with which what a claim is `provided` with is given."""
    needed = sorted(entry.provided.needs(entry.metric) - {entry.metric})
    tried = (dict(zip(needed, numbers)) for numbers in itertools.product((0.0, 0.2, 2.0, 100.0), repeat=len(needed)))
    return next(met for met in tried if entry.provided.check(entry.metric, met.__getitem__, None)[0])


@pytest.mark.parametrize("entry", CLAIMS, ids=lambda entry: entry.id)
def test_every_claim_can_fail_and_says_so(entry):
    """Numbers that suit the paper and numbers far from it give different verdicts: no claim holds whatever comes."""
    numbers = (-1e6, -1.0, 0.0, 0.5, 1.0, 1e6)
    # Series that a trend is asked of: level, rising and falling in the order in which the claim names them.
    named = [name for test in (entry.direction, entry.size) for name in getattr(test, "metrics", [])]
    slopes = [{n: slope * i for i, n in enumerate(named)} for slope in (0.0, 1.0, -1.0)] if named else [{}]
    verdicts = set()
    for value, others, slope in itertools.product(numbers, numbers, slopes):
        found = dict.fromkeys(entry.metrics, others) | {entry.metric: value} | slope
        ends = {f"{entry.metric}/{end}": value for end in ("low", "high")}
        found |= {name: end for name, end in ends.items() if name in entry.metrics}
        if entry.kind == "timing":
            found |= {
                f"{name}/{end}": found[name] + by for name in [*found] for end, by in (("low", -0.1), ("high", 0.1))
            }
        if entry.provided:
            found |= _met(entry)
        verdicts.add(judge(entry, found).verdict)
    assert "fails" in verdicts and "not measured" not in verdicts
    unmeasured = judge(entry, {})
    assert unmeasured.verdict == "not measured" and unmeasured.why == (entry.untested or unmeasured.why)
    assert entry.direction and entry.size and len(entry.summary) > 20


def test_printed_numbers_judged_on_themselves():
    """DapQ's table 1 as if we had measured it: every claim on the table must hold, or the claim is badly put."""
    table = papers.figure("dapq", "table1").set_index("condition")
    measured = {
        f"similarity/{column}/{row}": table.loc[row, column] for row in table.index for column in ("post", "pre")
    }
    measured |= {name.replace("similarity", "distance"): 1 - value for name, value in measured.items()}
    measured["ratio/post/dc_sp_over_sc_dp"] = table.loc["dc_sp", "post"] / table.loc["sc_dp", "post"]
    without = table.loc["dc_dp", "post"]
    measured["ratio/post/content_over_position"] = (table.loc["sc_dp", "post"] - without) / (
        table.loc["dc_sp", "post"] - without
    )
    for rope in ("post", "pre"):
        differences = {
            "position_less_content": ("dc_sp", "sc_dp"),
            "position/different_content": ("dc_sp", "dc_dp"),
            "content/different_position": ("sc_dp", "dc_dp"),
        }
        for name, (left, right) in differences.items():
            effect = f"effect/{rope}/{name}"
            measured[effect] = table.loc[left, rope] - table.loc[right, rope]
            measured |= {f"{effect}/low": measured[effect] - 1e-9, f"{effect}/high": measured[effect] + 1e-9}
    claims = [claim for claim in papers.claims(paper="dapq") if claim.metrics <= measured.keys()]
    judged = {claim.id: judge(claim, measured).verdict for claim in claims}
    assert len(judged) >= 9
    assert judged == {claim.id: "holds" if claim.comparable else "holds in direction only" for claim in claims}


def test_zsmerge_on_its_own_numbers():
    """The printed reductions have section 4.3's direction, of another comparison; the caption fails on them."""
    printed = papers.figure("zsmerge", "figure4")
    measured = {f"reduction/{row.ratio:.2f}": row.reduction for row in printed.itertuples()}
    last = printed.iloc[-1]
    measured |= {"error/merge/0.50": last.error_merge, "saved/0.50": last.error_evict - last.error_merge}
    measured |= {f"growth/{a}_to_0.50": last.reduction - measured[f"reduction/{a}"] for a in ("0.05", "0.20")}
    judged = {entry.id: judge(entry, measured).verdict for entry in papers.claims(paper="zsmerge")}
    for name in ("reduction_20", "reduction_10", "reduction_05", "reduction_50", "error_50"):
        assert judged[f"zsmerge.figure4.{name}"] == "holds in direction only"
    assert judged["zsmerge.figure4.tight_budgets"] == "fails"
    assert 1 - last.error_merge / last.error_evict == pytest.approx(last.reduction, abs=1e-3)


def test_zsmerge_on_its_authors_published_errors():
    """Figure 4 as published, had we measured it: its reductions and all eight of its levels hold."""
    cells = papers.figure("zsmerge", "figure4_published")
    measured = {f"published/reduction/{row.entries}": row.reduction for row in cells.itertuples()}
    for alpha in (0, 1):
        measured |= {
            f"published/error/alpha{alpha}/{row.entries}": getattr(row, f"alpha{alpha}") for row in cells.itertuples()
        }
    claims = [entry for entry in CLAIMS if entry.id.startswith("zsmerge.figure4.as_published")]
    assert len(claims) == 6
    assert {judge(entry, measured).verdict for entry in claims} == {"holds"}
    too_large = measured | {"published/error/alpha1/100": 6e-4}
    (levels,) = [entry for entry in claims if entry.id.endswith("error_with")]
    assert judge(levels, too_large).verdict == "holds in direction only"


def test_theorem_is_marked_as_an_identity():
    theorem = next(entry for entry in CLAIMS if entry.id == "zsmerge.theorem1")
    assert theorem.kind == "identity" and "identity" in theorem.summary
    assert judge(theorem, {"theorem1/violations": 1}).verdict == "fails"


def test_unknown_names_teach():
    with pytest.raises(KvlabError, match="did you mean 'zsmerge'"):
        papers.claims(paper="zsmerg")
    with pytest.raises(KvlabError, match="zsmerge/figure4"):
        papers.figure("zsmerge", "figure_4")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("name: x\nlabel: X\ntitle: T\nclaims: [{id: a}]", "claims.0.where"),
        ("name: x\nlabel: X\ntitle: T\nsurprise: 1", "surprise"),
        ("name: [", "not valid YAML"),
        (
            "name: x\nlabel: X\ntitle: T\nclaims: [{id: a, where: w, summary: s, metric: m, paper_value: null, "
            "direction: {kind: at_least, value: 0}, size: {kind: within, of: absolute, tolerance: 1}}]",
            "paper_value is null",
        ),
        (
            "name: x\nlabel: X\ntitle: T\nclaims: [{id: a, where: w, summary: s, metric: m, paper_value: 1, "
            "direction: {kind: at_least, value: 0}, size: {kind: at_least, value: 0}}]",
            "no experiment measures a: say in `untested` why not",
        ),
        (
            "name: x\nlabel: X\ntitle: T\nexperiment: e\nclaims: [{id: a, where: w, summary: s, "
            "metric: m, paper_value: 1, "
            "untested: too large, direction: {kind: at_least, value: 0}, size: {kind: at_least, value: 0}}]",
            "although e measures it",
        ),
        (
            "name: x\nlabel: X\ntitle: T\nexperiment: e\nclaims: [{id: a, where: w, summary: s, "
            "metric: m, paper_value: 1, profile: gpu, "
            "direction: {kind: at_least, value: 0}, size: {kind: at_least, value: 0}}]",
            "claims.0.profile: Input should be 'quick' or 'full'",
        ),
        (
            "name: x\nlabel: X\ntitle: T\nclaims: [{id: a, where: w, summary: s, metric: m, paper_value: 1, "
            "untested: too large, profile: full, "
            "direction: {kind: at_least, value: 0}, size: {kind: at_least, value: 0}}]",
            "a names a profile, although no experiment measures it",
        ),
        (
            "name: x\nlabel: X\ntitle: T\nexperiment: e\nclaims: [{id: a, where: w, summary: s, "
            "metric: m, paper_value: null, "
            "direction: {kind: at_least, value: 0}, size: {kind: any_of, tests: [{kind: covers}]}}]",
            "paper_value is null",
        ),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, text, match):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with one_sentence(match):
        papers.load_file(path)


def test_the_page_on_claims_is_true(capsys):
    """Its example is a real claim as it stands, its tables name every key, kind and test, and its code runs."""
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    (example,) = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.S)[1])
    real = next(entry for entry in CLAIMS if entry.id == example["id"])
    of_file = {name: getattr(real, name) for name in ("paper", "experiment", "lacking", "model")}
    assert Claim.model_validate({**example, **of_file}) == real

    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in page.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in row}
    kinds = {get_args(test.model_fields["kind"].annotation)[0] for test in get_args(get_args(papers.Condition)[0])}
    assert kinds | Claim.model_fields.keys() - {"paper"} <= named
    assert all(f"**{kind}**" in page for kind in get_args(Claim.model_fields["kind"].annotation))
    assert all(f"| {verdict} |" in page for verdict in papers.VERDICTS)

    exec(re.search(r"```python\n(.*?)```", page, re.S)[1], {})
    assert capsys.readouterr().out.startswith("Direction missed: ")


@pytest.mark.parametrize("kind", ["clearly_greater", "clearly_less"])
def test_one_repetition_is_clear_of_nothing(kind):
    """Its interval is the value itself, which lies wholly on one side of everything."""
    value = 5.0 if kind == "clearly_greater" else -5.0
    single = claim(direction={"kind": "at_least", "value": -9}, size={"kind": kind, "than": 0.0})
    found = papers.judge(single, {"m": value}, {"m": (value, value)})
    assert found.verdict == "holds in direction only" and "single repetition" in found.why
    assert papers.judge(single, {"m": value}, {"m": (value - 0.1, value + 0.1)}).verdict == "holds"
