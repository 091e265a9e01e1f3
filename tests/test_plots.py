"""The shared figures draw the numbers that they are given."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas
import pytest

from kvlab.workbench import plots


@pytest.fixture(autouse=True)
def headless():
    with plt.rc_context():
        plt.switch_backend("agg")
        plots.style()
        yield
        plt.close("all")


def test_paper_beside_ours_draws_both_and_leaves_a_gap():
    ax = plots.paper_beside_ours({"a": 0.7, "b": None}, {"a": 0.6, "b": -0.2}, {"a": (0.5, 0.65)}, ylabel="cosine",
                                 labels={"a": "first"})
    assert sorted(round(bar.get_height(), 6) for bar in ax.patches) == [-0.2, 0.6, 0.7]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["first", "b"]
    assert [text.get_text() for text in ax.texts] == ["0.70", "0.60", "-0.20"] and ax.get_ylabel() == "cosine"
    (segment,) = ax.collections[0].get_segments()
    assert sorted(point[1] for point in segment) == pytest.approx([0.5, 0.65])


def test_lines_sort_their_points_and_bands_span_the_interval():
    frame = pandas.DataFrame({"x": [2, 1], "y": [0.2, 0.1], "lo": [0.15, 0.05], "hi": [0.3, 0.2], "who": ["a", "a"]})
    ax = plots.lines(frame, x="x", y="y", hue="who", low="lo", high="hi", log=True, xlabel="step", ylabel="error")
    assert list(ax.lines[0].get_xdata()) == [1, 2] and list(ax.lines[0].get_ydata()) == [0.1, 0.2]
    heights = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.05, 0.3) and ax.get_yscale() == "log"
    plots.paper_points(ax, [1], [0.5])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "paper"]


def test_boxes_keep_the_order_and_heatmaps_name_the_unit():
    frame = pandas.DataFrame({"condition": ["b"] * 4 + ["a"] * 4, "value": [1, 2, 3, 4, 5, 6, 7, 8]})
    ax = plots.boxes(frame, x="condition", y="value", ylabel="v", order=["a", "b"], labels={"a": "A"})
    assert [text.get_text() for text in ax.get_xticklabels()] == ["A", "b"]
    level = [line.get_ydata()[0] for line in ax.lines if len(set(line.get_ydata())) == 1]
    assert [height for height in level if height in (2.5, 6.5)] == [6.5, 2.5]
    ax = plots.heatmap(pandas.DataFrame([[0.0, 1.0]], index=[3], columns=[0.2, 0.5]), xlabel="ratio", ylabel="layer",
                       unit="fraction")
    assert ax.figure.axes[-1].get_ylabel() == "fraction" and list(ax.collections[0].get_array().ravel()) == [0.0, 1.0]


def test_the_palette_is_distinct_from_the_papers_grey():
    assert len(set(plots.COLOURS)) == len(plots.COLOURS) and plots.PAPER not in plots.COLOURS
