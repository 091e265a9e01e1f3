"""What is told of DapQ's figures follows the numbers, in both directions."""

from __future__ import annotations

import pandas
import pytest
from support.stories import findings_of, told

from kvlab.analyses.dapq import control, position, printed, pseudo, recall
from kvlab.analyses.findings import Findings
from kvlab.render.stories import dapq as story


def made(effects: dict, table: pandas.DataFrame | None = None) -> Findings:
    return findings_of(effects, pandas.DataFrame() if table is None else table)


@pytest.mark.parametrize(
    ("gap", "words"),
    [(0.4, "position outweighs content"), (-0.3, "content outweighs position"), (0.0, "neither outweighs the other")],
)
def test_table_1(gap, words):
    findings = made(
        {
            position.CONTRAST: [(gap, {"rope": "post", "contrast": "position_less_content"})],
            position.SIMILARITY: [(0.75, {"rope": "pre", "condition": "dc_dp"})],
        }
    )
    text = told(story.table_1(findings))
    assert words in text and "0.750 (0.730 to 0.770)" in text and "the paper's 0.3971" in text


@pytest.mark.parametrize(("gap", "words"), [(0.3, "as figure 2a draws it"), (-0.3, "the reverse"), (0.0, "undecided")])
def test_figure_2a(gap, words):
    keys = {"rope": "post", "left": "dc_sp", "right": "sc_dp_m"}
    far = {"rope": "post", "left": "dc_dp_m", "right": "dc_dp_100"}
    assert words in told(story.figure_2a(made({position.GAP_RANDOM: [(gap, keys), (0.1, far)]})))


@pytest.mark.parametrize(
    ("at_window", "words"),
    [(0.1, "loses more by its position"), (-0.1, "what it lacks is not the position"), (0.0, "cost about the same")],
)
def test_figure_2b_and_offsets(at_window, words):
    figure = made({position.CLAIMED_DECAY: [(-0.9, {})], position.LONGER_DECAYS_MORE: [(0.1, {})]})
    text = told(story.figure_2b(figure))
    assert "larger, as the paper says" in text and "where figure 2b falls throughout (-1)" in text
    (text,) = story.offsets(made({control.EQUAL_AT: [(300.0, {})], control.AT_WINDOW: [(at_window, {})]}))
    assert words in text and "an offset of 300" in text


@pytest.mark.parametrize(
    ("gap", "over", "words"),
    [
        (0.2, 0.1, ["still comes closer", "add something of their own"]),
        (-0.2, -0.1, ["the order of table 1 is reversed", "a constant would approximate the true queries better"]),
        (0.0, 0.0, ["come equally close", "a constant would do as well"]),
    ],
)
def test_the_control(gap, over, words):
    findings = made(
        {
            control.POSITION_LESS_CONTENT: [(gap, {"measure": "similarity"})],
            control.MEAN_QUERY: [(0.74, {})],
            control.OVER_MEAN: [(over, {})],
            control.EQUAL_AT: [(90.0, {})],
            control.AT_WINDOW: [(gap, {})],
        }
    )
    text = told([*story.offsets(findings), *story.control_cells(findings)])
    assert all(word in text for word in words)


@pytest.mark.parametrize(("share", "words"), [(0.8, "most of them"), (0.2, "a minority"), (0.5, "about half")])
def test_the_map(share, words):
    cells = [("random", "right"), ("random", "back"), ("true", "back")]
    table = pandas.DataFrame(
        [
            {"layer": layer, "head": 0, "content": c, "place": p, "post": post}
            for layer, posts in ((0, (0.9, 0.2, 0.3)), (5, (0.3, 0.2, 0.9)))
            for (c, p), post in zip(cells, posts, strict=True)
        ]
    )
    text = told(story.head_map(made({control.SHARE_OF_HEADS: [(share, {})]}, table)))
    assert words in text and "in layer 0, and least in layer 5" in text


@pytest.mark.parametrize(
    ("before", "words"), [(0.2, "not position's alone"), (0.0, "what makes them similar is the position")]
)
def test_the_premise(before, words):
    findings = made(
        {
            control.ADJACENT: [(0.9, {"rope": "post", "distance": 1})],
            control.NEAR_LESS_FAR: [(0.2, {"rope": "post"}), (before, {"rope": "centred"})],
        }
    )
    text = told(story.adjacent(findings))
    assert words in text and "more than distant ones" in text


@pytest.mark.parametrize(("lead", "words"), [(0.1, "is ahead, as"), (-0.1, "is behind"), (0.0, "neither ahead")])
def test_leads_of_windows_and_of_retained_sets(lead, words):
    at = {"window": 32, "budget": 256}
    leads = [
        (value, {"measure": measure, "policy": policy} | at)
        for measure, policy, value in (
            ("window_recall", "snapkv", lead),
            ("window_recall", "streamingllm", 0.3),
            ("recall", "snapkv", lead),
        )
    ]
    findings = made({recall.LEAD: leads, recall.SMALL_BUDGET_LEAD: [(lead, {})]})
    text = told(story.figure_3(findings))
    assert words in text and ("it grows, as the abstract says" in text) is (lead > 0)
    kept = told(story.retained_sets(findings))
    assert {0.1: "ahead, as section 3.3 says", -0.1: "behind, where", 0.0: "not told apart, where"}[lead] in kept


@pytest.mark.parametrize(
    ("moved", "content", "words"),
    [
        (0.1, 0.02, ["find more", "less than the position is"]),
        (0.1, 0.13, ["find more", "about as much as the position is"]),
        (-0.1, 0.2, ["find less", "better guesses of the response"]),
        (0.0, 0.2, ["find as much"]),
    ],
)
def test_the_control_in_recall(moved, content, words):
    findings = made(
        {
            control.POSITION: [(moved, {"measure": "recall", "content": "last"})],
            control.CONTENT: [(content, {"measure": "recall", "place": "right"})],
        }
    )
    text = told(story.control_recall(findings))
    assert all(word in text for word in words)


def test_the_same_pooling():
    at = {"measure": "recall", "window": 32, "budget": 256}
    leads = [(0.1, at | {"policy": "snapkv_raw"}), (-0.1, at | {"policy": "snapkv_pooled"})]
    text = told(story.same_pooling(made({recall.LEAD: leads})))
    assert "DapQ is ahead (0.100" in text and "it is behind (-0.100" in text


def test_the_papers_own_tables():
    findings = made({printed.BEHIND: [(0.72, {"benchmark": "needle", "method": "H2O", "cell": "Qwen3-8B/64"})]})
    for benchmark in printed.BENCHMARKS:
        findings.set(printed.NOT_BEHIND, 0.9, benchmark=benchmark)
    text = told(story.printed(findings))
    assert (
        "90 % on needles" in text
        and "Ahead of it are H2O by 0.72 points in Qwen3-8B with 64 entries (needles)." in text
    )
    for cell in ("Qwen3-8B/128", "Llama3-8B/64"):
        findings.set(printed.BEHIND, 0.1, benchmark="helmet", method="SnapKV", cell=cell)
    assert "and SnapKV by 0.10 points in Llama3-8B with 64 entries (HELMET)." in told(story.printed(findings))


@pytest.mark.parametrize(
    ("worth", "words"), [(0.2, "content is secondary"), (-0.2, "counts for more than where"), (0.0, "about as much")]
)
def test_figure_6a(worth, words):
    at = {"measure": "recall", "budget": 128}
    effects = {pseudo.SPREAD: 0.05, pseudo.POSITION_LESS_SPREAD: worth, pseudo.VARIATION: 0.03}
    findings = made({effect: [(value, at)] for effect, value in effects.items()})
    text = told(story.figure_6a(findings))
    assert words in text and "3.0 %" in text and "figure 6a has about 1 %" in text


@pytest.mark.parametrize(("fall", "words"), [(0.1, "falls again, as in figure 6b"), (0.0, "does not clearly fall")])
def test_figure_6b(fall, words):
    at = {"measure": "recall"}
    text = told(story.figure_6b(made({pseudo.RISE: [(0.2, at)], pseudo.FALL: [(fall, at)]})))
    assert words in text and "recall rises" in text


@pytest.mark.parametrize(
    ("grows", "words"), [(0.1, "agrees with"), (-0.1, "against"), (0.0, "dilution by mutual attention is not shown")]
)
def test_mutual_attention(grows, words):
    effects = {
        pseudo.MUTUAL: [(0.1, {"measure": "recall", "length": 128})],
        pseudo.MUTUAL_GROWS: [(grows, {"measure": "recall"})],
    }
    text = told(story.mutual(made(effects, pandas.DataFrame({"length": [4, 128]}))))
    assert words in text and "With 128 pseudo-queries" in text and "recall falls by 0.100 (0.0800" in text
