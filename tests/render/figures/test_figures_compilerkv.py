"""CompilerKV's tables 1 and 2, figure 2 and what stands behind them, drawn from the findings of small traces."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex
from support import compilerkv, drawing
from support.compilerkv import BUDGETS, HEADS, LAYERS, PROMPT, SHARE, SHARES, TRACES, tables

from kvlab import papers
from kvlab.analyses.compilerkv import printed, quality, theorem
from kvlab.render import theme
from kvlab.render.figures import compilerkv as draw
from kvlab.render.figures import plots

pytestmark = pytest.mark.usefixtures("headless")

BLUE = plots.COLOURS[0]


@pytest.fixture
def found():
    return compilerkv.analyses()


def paper(values):
    """What the paper prints of the methods that are drawn, in their order."""
    return [values[quality.LABELS[name]] for name in ("filled", *quality.RIVALS) if quality.LABELS[name] in values]


def test_table_1_has_the_paper_beside_every_method(found):
    figure = draw.table_1(found["table_1"])
    rivals = list(quality.RIVALS)
    scores = printed.gains(papers.figure("compilerkv", "table1"))
    marks = {"P": "gain_filled", "s": "gain_twin", "^": "gain_published"}
    left, right = figure.axes
    for ax, measure in ((left, "kept"), (right, "recall")):
        assert [x for x, _ in drawing.diamonds(ax)] == pytest.approx([100 * gain for gain in paper(scores)])
        for marker, kind in marks.items():
            (line,) = [line for line in ax.lines if line.get_marker() == marker]
            gains = [100 * found["table_1"].metrics[f"{kind}/{measure}/{rival}"] for rival in rivals]
            assert list(line.get_xdata()) == pytest.approx(gains)
            rows = [round(y) for y in line.get_ydata()]
            assert rows == list(range(len(rivals))), "each mark lies in its rival's row"
    assert drawing.ticks(left, "y") == [quality.LABELS[rival] for rival in rivals]
    assert [label.get_color() for label in left.get_yticklabels()] == [theme.look(rival).colour for rival in rivals]
    said = ["here", "here, with SnapKV's pooling and window", "here, the authors' code"]
    assert sorted(drawing.legend(figure)) == sorted(["paper: LongBench's score", *said])
    assert "n = 3 documents; bars: 95 % intervals" in figure.get_supxlabel()
    assert "attention kept (%)" in left.get_xlabel() and "recall (%)" in right.get_xlabel()


def test_figure_2_has_a_curve_for_each_method_and_the_papers_averages_at_its_share(found):
    figure = draw.figure_2(found["figure_2"], SHARE * PROMPT)
    left, right = figure.axes
    for ax, measure in ((left, "kept"), (right, "recall")):
        curves = drawing.curves(ax)
        assert set(curves) == {quality.LABELS[name] for name in ("filled", *quality.RIVALS)}
        expected = [found["figure_2"].metrics[f"{measure}/h2o/{budget}"] for budget in BUDGETS]
        assert curves["H2O"] == (list(BUDGETS), pytest.approx(expected))
        assert drawing.ticks(ax) == [str(budget) for budget in BUDGETS]
    diamonds = left.collections[-1].get_offsets()
    assert np.allclose(diamonds[:, 0], 72)
    assert diamonds[:, 1].tolist() == pytest.approx(paper(printed.retained(papers.figure("compilerkv", "table1"))))
    assert {"CompilerKV", "paper, table 1: LongBench over FullKV's"} <= set(drawing.legend(figure))


def test_table_2_has_the_papers_loss_beside_each_measure(found):
    (ax,) = draw.table_2(found["table_2"]).axes
    lost = 100 * printed.parts(papers.figure("compilerkv", "table2"))["raw_attention"]
    assert drawing.bars(ax, plots.PAPER) == pytest.approx([lost] * 3)
    measures = ("kept", "recall", "error")
    ours = [100 * found["table_2"].metrics[f"ablation/{measure}/raw_attention"] for measure in measures]
    assert drawing.bars(ax, BLUE) == pytest.approx(ours)
    assert drawing.ticks(ax) == ["attention kept", "recall", "output error"]


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
