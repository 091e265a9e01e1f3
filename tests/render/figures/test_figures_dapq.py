"""DapQ's figures show the findings that they are given, and what the paper prints."""

from __future__ import annotations

import itertools

import pandas
import pytest
from support.drawing import bars, curves, legend, ticks, title
from support.made_up import made_up, values

from kvlab import papers
from kvlab.analyses.dapq import control, drafted, position, pseudo, recall
from kvlab.analyses.findings import Findings
from kvlab.render.figures import dapq as draw

CONTENTS = ["F2L30", "F4L28", "RS_C", "RC_C", "Fix_C", "F4L28 at 0"]


pytestmark = pytest.mark.usefixtures("headless")


def test_table_1_stands_beside_the_papers_before_and_after_rope():
    findings = made_up({position.SIMILARITY: {"rope": ["post", "pre"], "condition": position.CONDITIONS}})
    printed = papers.figure("dapq", "table1").set_index("condition")
    figure = draw.table_1(findings, "tiny")
    for ax, rope in zip(figure.axes, ("post", "pre"), strict=True):
        expected = [
            value
            for condition in position.CONDITIONS
            for value in (printed.loc[condition, rope], findings.metrics[f"similarity/{rope}/{condition}"])
        ]
        assert bars(ax) == pytest.approx(expected)
        assert ticks(ax) == ["SC & SP", "DC & SP", "SC & DP", "DC & DP"]
        assert legend(ax) == ["paper (Llama-3-8B)", "tiny"]
    assert [title(ax) for ax in figure.axes] == ["Table 1, after RoPE", "Table 1, before RoPE"]


def test_figure_2a_has_a_box_for_each_condition_and_counts_its_trials():
    rows = [
        {"document": d, "condition": c, "rope": rope, "trial": t, "similarity": (rope == "pre") + i / 10 + t / 100}
        for rope, d, (i, c), t in itertools.product(
            ("post", "pre"), "ab", enumerate(("sc_dp_100", "dc_dp_100", "dc_sp", "sc_dp_m", "dc_dp_m")), range(3)
        )
    ]
    (ax,) = draw.figure_2a(Findings(pandas.DataFrame(rows))).axes
    assert title(ax) == "Figure 2a: 6 trials for each condition, 2 documents"
    assert ticks(ax)[:2] == ["DC & SP", "SC & DP\n[0, m]"]
    levels = [line.get_ydata()[0] for line in ax.lines if len({round(y, 9) for y in line.get_ydata()}) == 1]
    medians = [level for level in levels if round(100 * level) % 10 == 1]
    assert medians == pytest.approx([0.21, 0.31, 0.41, 0.01, 0.11]), "in the order of the paper"


def test_figure_2b_has_a_curve_for_each_context_and_says_where_it_is_one_document():
    rows = [
        {"document": d, "context": c, "start": 10 - i, "offset": i, "similarity": s}
        for (d, c), values in {("a", "2k"): (1.0, 0.6), ("b", "2k"): (0.8, 0.2), ("a", "4k"): (0.9, 0.1)}.items()
        for i, s in enumerate(values)
    ]
    (ax,) = draw.figure_2b(Findings(pandas.DataFrame(rows))).axes
    assert legend(ax) == ["2k tokens", "4k tokens, one document"]
    assert curves(ax)["2k tokens"].points() == pytest.approx({9: 0.4, 10: 0.9})
    assert curves(ax)["4k tokens, one document"].points() == pytest.approx({9: 0.1, 10: 0.9})


def test_figure_2b_rings_what_stands_as_far_off_as_snapkvs_window():
    rows = [
        {"document": d, "context": c, "start": length - offset, "offset": offset, "similarity": 1 - offset / length}
        for d, (c, length), offset in itertools.product("ab", (("2k", 2000), ("4k", 4000)), (0, 4, 32, 64))
    ]
    (ax,) = draw.figure_2b(Findings(pandas.DataFrame(rows))).axes
    assert legend(ax) == ["2k tokens", "4k tokens", "32 tokens off, as SnapKV's window"]
    ((x, y), (also_x, also_y)) = ax.collections[-1].get_offsets()
    assert (x, also_x) == (1968, 3968) and (y, also_y) == pytest.approx((1 - 32 / 2000, 1 - 32 / 4000))


@pytest.fixture
def figure_3():
    keys = {"measure": recall.MEASURES, "policy": ["dapq", *recall.OTHERS], "window": [8, 32], "budget": [64, 256]}
    return made_up({recall.RECALL: keys, recall.LEAD: {**keys, "policy": recall.OTHERS}})


def test_figure_3_runs_along_the_window_and_along_the_budget(figure_3):
    left, right = draw.figure_3(figure_3, 32, 256).axes
    at = {"measure": "window_recall", "policy": "snapkv"}
    assert curves(left)["SnapKV (and PyramidKV)"].points() == values(
        figure_3, recall.RECALL, "window", budget=256, **at
    )
    assert curves(right)["SnapKV (and PyramidKV)"].points() == values(
        figure_3, recall.RECALL, "budget", window=32, **at
    )
    assert ticks(left) == ["8", "32"] and ticks(right) == ["64", "256"] and left.get_xscale() == "log"
    assert set(curves(left)) == set(legend(right)) and len(curves(left)) == 4, "PyramidKV ranks as SnapKV does"
    assert "256 entries" in title(left) and title(right).endswith("a window of 32") and left.get_legend() is None


def test_retained_sets_show_every_policy_and_both_leads(figure_3):
    left, right = draw.retained_sets(figure_3, 32).axes
    assert len(curves(left)) == 7
    kept = values(figure_3, recall.RECALL, "budget", measure="recall", policy="pyramidkv", window=32)
    assert curves(left)["PyramidKV"].points() == kept
    assert legend(right) == ["raw window scores", "retained sets"]
    for name, measure in (("raw window scores", "window_recall"), ("retained sets", "recall")):
        lead = values(figure_3, recall.LEAD, "budget", measure=measure, policy="snapkv", window=32)
        assert curves(right)[name].points() == lead


def test_figure_6a_shows_each_content_and_the_papers_variation_beside_ours():
    at = {"measure": pseudo.MEASURES, "budget": [64, 128]}
    findings = made_up({pseudo.CONTENT: {"content": CONTENTS, **at}, pseudo.VARIATION: at})
    left, right = draw.figure_6a(findings).axes
    assert ticks(left) == [*CONTENTS[:-1], "F4L28\nat 0-31"] and legend(left) == ["64 entries", "128 entries"]
    for whiskers, budget in zip(left.containers, (64, 128), strict=True):
        recalls = values(findings, pseudo.CONTENT, "content", measure="recall", budget=budget)
        assert list(whiskers[0].get_ydata()) == list(recalls.values())
        low, high = whiskers[2][0].get_segments()[2][:, 1]
        assert (low, high) == pytest.approx(findings.intervals[f"content/recall/RS_C/b{budget}"])
    printed = papers.figure("dapq", "section6_1").set_index("quantity")["value"]["coefficient_of_variation"]
    ours = [100 * findings.metrics[f"content/cv/recall/b{budget}"] for budget in (64, 128)]
    assert bars(right) == pytest.approx([100 * printed, ours[0], 100 * printed, ours[1]])


def test_figure_6b_has_a_curve_for_each_response_and_aligns_the_mass_lost():
    rows = [
        {"document": d, "response": r, "length": n, "measure": m, "value": (r + n) / 100 + (d == "b") * 0.2}
        for d, n, (m, r) in itertools.product("ab", (1, 8, 32), (("recall", 8), ("recall", 32), ("mass_lost", 32)))
    ]
    left, right = draw.figure_6b(Findings(pandas.DataFrame(rows)), 128).axes
    assert legend(left) == ["response of 32 tokens", "response of 8 tokens"] and "128 entries" in title(left)
    assert curves(left)["response of 8 tokens"].points() == pytest.approx({1: 0.19, 8: 0.26, 32: 0.5})
    (lost,) = right.lines
    assert list(lost.get_ydata()) == pytest.approx([0.43, 0.5, 0.74])
    assert ticks(left) == ticks(right) == ["1", "8", "32"]
    band = right.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.43, 0.74)), "aligned documents differ by their lengths alone"


@pytest.mark.parametrize("measure", ["similarity", "recall"])
def test_the_control_shows_both_places_and_what_the_position_is_worth(measure):
    contents = ["true", "last", "random"]
    findings = made_up(
        {
            control.VALUE: {"measure": [measure], "content": contents, "place": ["right", "back"]},
            control.POSITION: {"measure": [measure], "content": contents},
            control.CONTENT: {"measure": [measure], "place": ["right"]},
        }
    )
    left, right = draw.control_cells(findings, measure).axes
    expected = [
        values(findings, control.VALUE, "content", measure=measure, place=place)[content]
        for place in ("right", "back")
        for content in contents
    ]
    assert sorted(bars(left)) == pytest.approx(sorted(expected))
    assert ticks(left) == ticks(right) == ["the response", "the prompt's end", "random"]
    level = findings.metrics[f"control/{measure}/content/right"]
    assert any(set(line.get_ydata()) == {level} for line in right.lines)


def test_the_map_has_a_cell_for_each_head_and_one_scale():
    rows = [
        {"layer": layer, "head": h, "position": layer / 10, "content": -h / 5} for layer in range(4) for h in range(3)
    ]
    figure = draw.head_map(pandas.DataFrame(rows))
    left, right = figure.axes[:2]
    grid = left.collections[0].get_array().reshape(4, 3)
    assert grid[3].tolist() == pytest.approx([0.3] * 3)
    assert {ax.collections[0].get_clim() for ax in (left, right)} == {(-0.4, 0.4)}
    assert title(right) == "content: true less random"


def test_leads_with_the_same_pooling_have_a_curve_for_each_pair():
    keys = {"measure": ["recall"], "policy": [*recall.SAME, "snapkv"], "window": [32], "budget": [64, 256]}
    findings = made_up({recall.LEAD: keys})
    (ax,) = draw.same_pooling(findings, 32).axes
    raw = curves(ax)["raw against raw"].points()
    assert raw == values(findings, recall.LEAD, "budget", policy="snapkv_raw") and len(curves(ax)) == 2


def test_pseudo_queries_and_a_drafted_answer_have_a_curve_each():
    keys = {"measure": ["recall", "mass_lost"], "policy": list(drafted.POLICIES), "budget": [64, 128]}
    findings = made_up({drafted.KEPT: keys})
    for ax, measure in zip(draw.against_drafts(findings).axes, keys["measure"], strict=True):
        found = curves(ax)
        assert set(found) == {"DapQ", "LAQ++", "its draft alone", "SnapKV"}
        assert found["LAQ++"].points() == values(findings, drafted.KEPT, "budget", measure=measure, policy="laq")


def test_what_mutual_attention_costs_by_the_window():
    findings = made_up({pseudo.MUTUAL: {"measure": ["recall", "mass_lost"], "length": [4, 32, 128]}})
    (ax,) = draw.mutual(findings).axes
    assert curves(ax)["recall"].points() == values(findings, pseudo.MUTUAL, "length", measure="recall")
    assert ticks(ax) == ["4", "32", "128"]
