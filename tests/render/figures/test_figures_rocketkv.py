"""RocketKV's figures on token budgets show the findings that they are given, and what the paper prints."""

from __future__ import annotations

import itertools

import pandas
import pytest
from support.drawing import curves, legend, ticks, title
from support.made_up import made_up, values

from kvlab import papers
from kvlab.analyses.rocketkv import budgets, design, printed
from kvlab.render.figures import rocketkv as draw

COMPRESSIONS = [4, 16, 64]
METHODS = [name for name in budgets.NAMES if name != "snapkv"]
MEASURES = [*budgets.QUALITY, "stored", "read"]


pytestmark = pytest.mark.usefixtures("headless")


@pytest.fixture
def findings():
    """SnapKV has room at the smallest compression only."""
    rows = [
        {"document": d, "method": m, "compression": c}
        | {measure: (1 + i) / (c + 4) for i, measure in enumerate(MEASURES)}
        for d, m, c in itertools.product("ab", budgets.NAMES, COMPRESSIONS)
        if m != "snapkv" or c == 4
    ]
    values = {"measure": MEASURES, "method": METHODS, "compression": COMPRESSIONS}
    gains = {"measure": list(budgets.QUALITY), "better": ["rocketkv", "exact_topk"], "other": METHODS}
    found = made_up(
        {budgets.VALUE: values, budgets.GAIN: gains | {"compression": COMPRESSIONS}}, table=pandas.DataFrame(rows)
    )
    snapkv = {**values, "method": ["snapkv"], "compression": [4]}
    return found | made_up({budgets.VALUE: snapkv})


def curve_of(ax, colour):
    """The points of the curve in a method's colour."""
    (line,) = [line for line in ax.lines if line.get_color() == colour]
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_figure_1_sets_the_papers_f1_beside_the_attention_kept(findings):
    figure = draw.figure_1(findings)
    left, right = figure.axes
    printed = papers.figure("rocketkv", "figure1").query("method == 'quest'").set_index("budget")["qasper"]
    assert curve_of(left, draw.COLOURS["quest"]) == printed.to_dict() and ticks(left)[0] == "256"
    full = papers.figure("rocketkv", "figure1").query("method == 'full'")["qasper"].item()
    assert [line.get_ydata()[0] for line in left.lines if len(set(line.get_ydata())) == 1] == [full]
    lost = values(findings, budgets.VALUE, "compression", measure="mass_lost", method="quest")
    assert curve_of(right, draw.COLOURS["quest"]) == pytest.approx({c: 1 - value for c, value in lost.items()})
    assert curve_of(right, draw.COLOURS["snapkv"]).keys() == {4}
    assert right.xaxis_inverted() and ticks(right) == ["4", "16", "64"]
    assert legend(figure) == ["Exact-TopK", "DuoAttention", "SnapKV", "Quest", "SparQ", "as the paper prints it"]


def test_figure_4_has_the_papers_tables_above_and_our_measures_below(findings):
    axes = draw.figure_4(findings).axes
    longbench = papers.figure("rocketkv", "longbench").query("model == 'Llama3.1-8B' and method == 'rocketkv'")
    blue = draw.COLOURS["rocketkv"]
    for ax, column in zip(axes[:2], ("average", "needle"), strict=True):
        assert curve_of(ax, blue) == dict(zip(longbench["budget"], longbench[column], strict=True))
    ruler = papers.figure("rocketkv", "ruler")
    ruler = ruler.query("model == 'Mistral-7B-v0.2' and length == 16000 and method == 'rocketkv'")
    assert list(curve_of(axes[2], blue)) == sorted((16000 / ruler["budget"]).round(1)) and axes[2].xaxis_inverted()
    assert sorted(curve_of(axes[2], blue).values()) == sorted(ruler["average"])
    for ax, measure in zip(axes[4:], ("output_error", "step_recall"), strict=True):
        ours = values(findings, budgets.VALUE, "compression", measure=measure, method="rocketkv")
        assert curve_of(ax, blue) == ours and len(ax.lines) == 7
    assert [title(ax) for ax in axes[3:]] == ["Here: attention kept", "Here: output error", "Here: recall"]


def test_gains_are_rocketkvs_over_each_of_the_others(findings):
    figure = draw.gains(findings)
    for ax, measure in zip(figure.axes, ("mass_lost", "output_error", "step_recall"), strict=True):
        keys = {"measure": measure, "better": "rocketkv", "other": "hybrid"}
        assert curve_of(ax, draw.OTHERS["hybrid"]) == values(findings, budgets.GAIN, "compression", **keys)
        assert ax.get_legend() is None and ax.xaxis_inverted()
    assert legend(figure) == ["DuoAttention", "Quest", "SparQ", "Hybrid", "RocketKV, published split"]


def test_figure_8_shows_hybrid_attention_and_its_halves(findings):
    figure = draw.figure_8(findings)
    assert [len(ax.lines) for ax in figure.axes] == [4, 4, 3, 3], "the paper's panels have a line for the full cache"
    errors = values(findings, budgets.VALUE, "compression", measure="output_error", method="sparq")
    assert curve_of(figure.axes[3], draw.COLOURS["sparq"]) == errors


def test_costs_lie_where_they_are_stored_and_read(findings):
    means = budgets.costs(findings)
    (ax,) = draw.costs(means).axes
    of = means[means["method"] == "quest"]
    assert curve_of(ax, draw.COLOURS["quest"]) == dict(zip(of["read"], of["stored"], strict=True))
    assert legend(ax)[-1] == "stored = read" and len(ax.lines) == 8
    assert ticks(ax) == ["2 %", "5 %", "10 %", "25 %", "100 %"]


def test_tables_for_a_reader_name_the_methods(findings):
    best = pandas.DataFrame(
        [{"measure": "mass_lost", "compression": 4, "next_best": "sparq", "value": 0.25, "low": -0.1, "high": 0.5}]
    )
    shown = draw.next_best_table(best).to_html()
    assert all(f">{text}</td>" in shown for text in ("SparQ", "+0.250", "-0.100", "4"))
    shown = draw.costs_table(budgets.costs(findings)).to_html()
    assert ">RocketKV, published split</td>" in shown and ">0.500</td>" in shown and "snapkv" not in shown


def test_leads_by_length_stand_beside_the_papers():
    table = pandas.DataFrame({"end": ["shorter", "longer"] * 2, "length": [290, 1150, 292, 1152]})
    found = made_up({design.LONGER_LEAD: {"measure": ["output_error"], "end": ["shorter", "longer"]}}, table=table)
    left, right = draw.longer(found).axes
    assert curves(left)["256 tokens"].points() == pytest.approx({16000: 74.2, 32000: 71.7, 64000: 65.5, 96000: 47.3})
    lead = values(found, design.LONGER_LEAD, "end", measure="output_error")
    assert curves(right)["output error"].points() == {291: lead["shorter"], 1151: lead["longer"]}


def test_printed_cells_show_where_another_method_is_ahead():
    (ax,) = draw.printed(printed.findings()).axes
    assert ticks(ax) == ["LongBench", "needles", "RULER"]
    table = printed.findings().table.query("method == 'rocketkv' and benchmark == 'ruler'")
    drawn = ax.collections[2].get_offsets()[:, 1]
    assert sorted(drawn) == sorted(table["gap"]) and min(drawn) == -2.3
