"""Claims are data, and verdicts follow the numbers."""

from __future__ import annotations

import math

import pytest

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.papers import Claim, judge

CLAIMS = papers.claims()


def claim(**changes) -> Claim:
    """A claim that a metric of about 0.6 exceeds zero."""
    content = {"id": "toy", "paper": "p", "where": "table 1", "summary": "s", "metric": "m", "paper_value": 0.6,
               "direction": {"kind": "greater", "than": 0.0},
               "size": {"kind": "within", "of": "absolute", "tolerance": 0.1}, **changes}
    return Claim.model_validate(content)


def condition(test: dict, metrics: dict[str, float], paper_value: float | None = 0.6) -> bool:
    """Whether a test passes, seen through a verdict: the direction is the test, the size cannot fail."""
    tested = claim(direction=test, size={"kind": "at_least", "metric": "sure", "value": 0}, paper_value=paper_value)
    return judge(tested, {**metrics, "sure": 1}).verdict == "holds"


@pytest.mark.parametrize(("value", "verdict"), [
    (0.65, "holds"), (0.7, "holds"), (0.75, "holds in direction only"), (0.05, "holds in direction only"),
    (0.0, "fails"), (-0.6, "fails"), (None, "not measured"), (math.nan, "not measured")])
def test_verdict_follows_the_number(value, verdict):
    assert judge(claim(), {} if value is None else {"m": value}).verdict == verdict


def test_a_missing_reference_is_not_measured_and_named():
    verdict = judge(claim(direction={"kind": "greater", "than": "other"}), {"m": 0.6})
    assert verdict.verdict == "not measured" and "other" in verdict.why and verdict.value == 0.6


def test_intervals_come_along_and_doubt_is_said():
    sure = judge(claim(), {"m": 0.6, "m/low": 0.5, "m/high": 0.7})
    assert (sure.low, sure.high) == (0.5, 0.7) and "interval" not in sure.why
    unsure = judge(claim(), {"m": 0.6}, {"m": (-0.1, 1.3)})
    assert unsure.verdict == "holds" and "[-0.1, 1.3] contains 0" in unsure.why
    against = judge(claim(direction={"kind": "greater", "than": "other"}), {"m": 0.6, "other": 0.55}, {"m": (0.5, 0.7)})
    assert "contains 0.55" in against.why


@pytest.mark.parametrize(("test", "passes", "misses"), [
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
])
def test_each_kind_of_test_turns_where_it_says(test, passes, misses):
    assert condition(test, {"m": passes, "x": 1.0})
    assert not condition(test, {"m": misses, "x": 1.0})


def test_a_factor_does_not_pass_with_the_wrong_sign():
    assert not condition({"kind": "within", "of": "factor", "tolerance": 2}, {"m": -0.6})


@pytest.mark.parametrize(("values", "slack", "passes"), [
    ([1, 2, 3], 0, True), ([1, 3, 2], 0, False), ([1, 3, 2.9], 0.2, True), ([3, 2, 1], 0, False), ([1, 1, 1], 0, True)])
def test_monotone(values, slack, passes):
    metrics = dict(zip("abc", values, strict=True)) | {"m": 0}
    test = {"kind": "monotone", "metrics": list("abc"), "trend": "increasing", "slack": slack}
    assert condition(test, metrics) is passes


def test_the_number_of_claims_and_their_papers():
    assert {each.paper for each in CLAIMS} == {"dapq", "zsmerge", "morphkv"}
    assert len(CLAIMS) >= 20 and len({each.id for each in CLAIMS}) == len(CLAIMS)


@pytest.mark.parametrize("each", CLAIMS, ids=lambda each: each.id)
def test_every_claim_can_fail_and_says_so(each):
    """Numbers that suit the paper and numbers far from it give different verdicts: no claim holds whatever comes."""
    numbers = (-1e6, -1.0, 0.0, 0.5, 1.0, 1e6)
    verdicts = set()
    for value in numbers:
        for others in numbers:
            verdicts.add(judge(each, dict.fromkeys(each.metrics, others) | {each.metric: value}).verdict)
    assert "fails" in verdicts and "not measured" not in verdicts
    assert judge(each, {}).verdict == "not measured"
    assert each.direction and each.size and len(each.summary) > 20


def test_printed_numbers_judged_on_themselves():
    """DapQ's table 1 as if we had measured it: every claim on the table must hold, or the claim is badly put."""
    table = papers.figure("dapq", "table1").set_index("condition")
    measured = {f"similarity/{column}/{row}": table.loc[row, column]
                for row in table.index for column in ("post", "pre")}
    measured["ratio/post/dc_sp_over_sc_dp"] = table.loc["dc_sp", "post"] / table.loc["sc_dp", "post"]
    judged = {each.id: judge(each, measured).verdict for each in papers.claims(paper="dapq") if "figure" not in each.id}
    assert len(judged) == 8 and set(judged.values()) == {"holds"}


def test_zsmerge_on_its_own_numbers():
    """The printed reductions hold, and the caption that they contradict fails on them."""
    printed = papers.figure("zsmerge", "figure4")
    measured = {f"reduction/{row.ratio:.2f}": row.reduction for row in printed.itertuples()}
    last = printed.iloc[-1]
    measured |= {"error/merge/0.50": last.error_merge, "error/evict/0.50": last.error_evict}
    judged = {each.id: judge(each, measured).verdict for each in papers.claims(paper="zsmerge")}
    for name in ("reduction_20", "reduction_10", "reduction_05", "reduction_50", "error_50"):
        assert judged[f"zsmerge.figure4.{name}"] == "holds"
    assert judged["zsmerge.figure4.tight_budgets"] == "fails"
    assert 1 - last.error_merge / last.error_evict == pytest.approx(last.reduction, abs=1e-3)


def test_theorem_is_marked_as_an_identity():
    theorem = next(each for each in CLAIMS if each.id == "zsmerge.theorem1")
    assert theorem.kind == "identity" and "identity" in theorem.summary
    assert judge(theorem, {"theorem1/violations": 1}).verdict == "fails"


def test_unknown_names_teach():
    with pytest.raises(KvlabError, match="did you mean 'zsmerge'"):
        papers.claims(paper="zsmerg")
    with pytest.raises(KvlabError, match="zsmerge/figure4"):
        papers.figure("zsmerge", "figure5")


@pytest.mark.parametrize(("text", "match"), [
    ("name: x\nlabel: X\ntitle: T\nclaims: [{id: a}]", "claims.0.where"),
    ("name: x\nlabel: X\ntitle: T\nsurprise: 1", "surprise"),
    ("name: [", "not valid YAML"),
    ("name: x\nlabel: X\ntitle: T\nclaims: [{id: a, where: w, summary: s, metric: m, paper_value: null, "
     "direction: {kind: at_least, value: 0}, size: {kind: within, of: absolute, tolerance: 1}}]",
     "paper_value is null"),
])
def test_a_bad_file_is_one_sentence(tmp_path, text, match):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(KvlabError, match=match) as caught:
        papers.load_file(path)
    assert "\n" not in str(caught.value)
