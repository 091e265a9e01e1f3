"""CompilerKV's tables 1 and 2, figure 2 and what stands behind them, drawn from the findings of small traces."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex
from support import compilerkv, drawing
from support.compilerkv import BUDGETS, HEADS, LAYERS, PROMPT, SHARE, SHARES, TRACES, tables

from kvlab import papers
from kvlab.analyses.compilerkv import ablation, printed, quality, theorem, thresholds
from kvlab.render import theme
from kvlab.render.figures import compilerkv as draw
from kvlab.render.figures import plots

pytestmark = pytest.mark.usefixtures("headless")

BLUE, ORANGE = plots.COLOURS[:2]


@pytest.fixture
def found():
    return compilerkv.analyses()


def paper(values):
    """What the paper prints of the methods that are drawn, in their order."""
    return [values[quality.LABELS[name]] for name in ("compilerkv", *quality.RIVALS) if quality.LABELS[name] in values]


def test_table_1_has_the_paper_beside_every_method(found):
    figure = draw.table_1(found["table_1"])
    left, middle, right = figure.axes
    scores = papers.figure("compilerkv", "table1")
    assert drawing.bars(left, plots.PAPER) == pytest.approx(paper(printed.retained(scores)))
    retained = found["table_1"].frame(quality.RETAINED)
    assert drawing.bars(left, BLUE) == pytest.approx(retained["value"].tolist()) and len(retained) == 9
    assert drawing.ticks(left)[:3] == ["gated", "filled\nup", "Dynamic-\nKV"]
    for ax, measure in ((middle, "kept"), (right, "recall")):
        gains = {
            kind: [100 * found["table_1"].metrics[f"{kind}/{measure}/{rival}"] for rival in quality.RIVALS]
            for kind in ("gain", "gain_filled", "gain_twin")
        }
        assert drawing.bars(ax, plots.PAPER) == pytest.approx([100 * gain for gain in paper(printed.gains(scores))])
        assert drawing.bars(ax, BLUE) == pytest.approx(gains["gain_filled"])
        for marker, kind in (("D", "gain"), ("s", "gain_twin")):
            (marks,) = [line for line in ax.lines if line.get_marker() == marker]
            assert list(marks.get_ydata()) == pytest.approx(gains[kind])
        assert drawing.legend(ax) == ["paper: LongBench", "here, filled up", "gated", "SnapKV's twin"]


def test_figure_2_has_a_curve_for_each_method_and_the_papers_averages_at_its_share(found):
    figure = draw.figure_2(found["figure_2"], SHARE * PROMPT)
    left, middle, right = figure.axes
    for ax, measure in ((left, "kept"), (middle, "recall")):
        curves = drawing.curves(ax)
        assert set(curves) == {"CompilerKV, gated", *(quality.LABELS[name] for name in ("filled", *quality.RIVALS))}
        expected = [found["figure_2"].metrics[f"{measure}/h2o/{budget}"] for budget in BUDGETS]
        assert curves["H2O"] == (list(BUDGETS), pytest.approx(expected))
        assert drawing.ticks(ax) == [str(budget) for budget in BUDGETS]
    dashed = next(line for line in left.lines if line.get_linestyle() == "--")
    assert dashed.get_label() == "CompilerKV, gated" and dashed.get_color() == theme.look("compilerkv").colour
    diamonds = left.collections[-1].get_offsets()
    assert np.allclose(diamonds[:, 0], 72)
    assert diamonds[:, 1].tolist() == pytest.approx(paper(printed.retained(papers.figure("compilerkv", "table1"))))
    stored = [found["figure_2"].metrics[f"stored/compilerkv/{budget}"] for budget in BUDGETS]
    assert list(right.lines[0].get_ydata()) == pytest.approx(stored)
    assert {"CompilerKV, filled up", "paper, table 1: LongBench over FullKV's"} <= set(drawing.legend(figure))


def test_table_2_has_the_papers_losses_and_what_each_setting_stores(found):
    figure = draw.table_2(found["table_2"], 300)
    left, middle, right = figure.axes
    lost = printed.parts(papers.figure("compilerkv", "table2"))
    parts = ["no_head_table", "static_threshold", "raw_attention"]
    for ax, measure in ((left, "kept"), (middle, "recall")):
        assert drawing.bars(ax, plots.PAPER) == pytest.approx([100 * lost[part] for part in parts])
        ours = [100 * found["table_2"].metrics[f"ablation/{measure}/{part}"] for part in [*parts, "no_gate"]]
        assert drawing.bars(ax, BLUE) == pytest.approx(ours)
    stored = [found["table_2"].metrics[f"ablation/stored/{part}"] for part in ["full", *parts, "no_gate"]]
    assert drawing.bars(right) == pytest.approx(stored)
    assert drawing.ticks(right)[0] == "Compiler-\nKV" and [300, 300] in [list(line.get_ydata()) for line in right.lines]


def test_without_tables_what_is_there_is_drawn():
    traces = TRACES[:1]
    left, middle, _ = draw.table_1(quality.table_1(traces, None, SHARE)).axes
    assert len(drawing.bars(left, BLUE)) == 9
    assert drawing.legend(middle) == ["paper: LongBench", "here, filled up", "gated", "SnapKV's twin"]
    left, _, right = draw.table_2(ablation.table_2(traces, None, SHARE), 72).axes
    assert drawing.ticks(left) == ["raw\nattention"] and len(drawing.bars(right)) == 2


def test_thresholds_are_drawn_by_layer():
    admitted = thresholds.admitted(TRACES, tables(), SHARE)
    (ax,) = draw.thresholds(admitted).axes
    median = admitted.groupby("layer")["needed"].median()
    assert list(ax.lines[0].get_ydata()) == pytest.approx(median.tolist())
    assert len(ax.collections[-1].get_offsets()) == (admitted["threshold"] > 0).sum() == 3 * LAYERS


def test_the_steps_to_snapkv_by_share_by_layer_and_by_head(found):
    figure = draw.steps_to_snapkv(found["steps"], SHARES)
    left, middle, right, _ = figure.axes
    metrics = found["steps"].metrics
    for tint, percent in ((plots.COLOURS[0], 7), (plots.COLOURS[2], 12)):
        lengths = [bar.get_width() for bar in left.patches if to_hex(bar.get_facecolor()) == tint.lower()]
        assert lengths == pytest.approx([metrics[f"steps/{step}/{percent}"] for step in range(7)])
    assert drawing.legend(left) == ["7 % of the prompt", "12 % of the prompt"]
    curves = drawing.curves(middle)
    assert list(curves) == ["x value norms (CompilerKV)", "a set for each KV head", "pooling of 7 (SnapKV)"]
    assert np.mean(curves["pooling of 7 (SnapKV)"].y) == pytest.approx(metrics["steps/6/7"])
    assert right.collections[0].get_array().shape == (LAYERS, HEADS)


def test_a_point_for_each_head_on_both_sides_of_a2():
    found = theorem.theorem_4_1(TRACES[:1], SHARES, tables())
    (ax,) = draw.theorem_4_1(found).axes
    assert drawing.legend(ax) == ["7 % of the prompt", "12 % of the prompt"]
    for points, share in zip(ax.collections, SHARES, strict=True):
        rows = found.table[found.table["budget"] == share]
        assert points.get_offsets().tolist() == pytest.approx(rows[["bound", "lost"]].to_numpy())
    above = sum(lost > bound for points in ax.collections for bound, lost in points.get_offsets())
    assert above / (2 * LAYERS * HEADS) == pytest.approx(found.metrics["theorem41/a2_violated"])
