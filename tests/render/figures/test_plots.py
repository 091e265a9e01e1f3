"""The shared figures draw the numbers that they are given."""

from __future__ import annotations

import numpy
import pandas
import pytest
from support import drawing

from kvlab.errors import KvlabError
from kvlab.render.figures import plots

pytestmark = pytest.mark.usefixtures("headless")


def test_paper_beside_ours_draws_both_and_leaves_a_gap():
    ax = plots.paper_beside_ours(
        {"a": 0.7, "b": None}, {"a": 0.6, "b": -0.2}, {"a": (0.5, 0.65)}, ylabel="cosine", labels={"a": "first"}
    )
    assert drawing.bars(ax) == [0.7, 0.6, -0.2] and drawing.bars(ax, plots.PAPER) == [0.7]
    assert drawing.ticks(ax) == ["first", "b"]
    assert drawing.texts(ax) == ["0.70", "0.60", "-0.20"] and ax.get_ylabel() == "cosine"
    (segment,) = ax.collections[0].get_segments()
    assert sorted(point[1] for point in segment) == pytest.approx([0.5, 0.65])


def test_lines_sort_their_points_and_bands_span_the_interval():
    frame = pandas.DataFrame({"x": [2, 1], "y": [0.2, 0.1], "lo": [0.15, 0.05], "hi": [0.3, 0.2], "who": ["a", "a"]})
    ax = plots.lines(frame, x="x", y="y", hue="who", low="lo", high="hi", log=True, xlabel="step", ylabel="error")
    assert drawing.curves(ax) == {"a": ([1, 2], [0.1, 0.2])}
    heights = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.05, 0.3) and ax.get_yscale() == "log"
    plots.paper_points(ax, [1], [0.5])
    assert drawing.legend(ax) == ["a", "paper"]


def test_boxes_keep_the_order_and_heatmaps_name_the_unit():
    frame = pandas.DataFrame({"condition": ["b"] * 4 + ["a"] * 4, "value": [1, 2, 3, 4, 5, 6, 7, 8]})
    ax = plots.boxes(frame, x="condition", y="value", ylabel="v", order=["a", "b"], labels={"a": "A"})
    assert drawing.ticks(ax) == ["A", "b"]
    level = [line.get_ydata()[0] for line in ax.lines if len(set(line.get_ydata())) == 1]
    assert [height for height in level if height in (2.5, 6.5)] == [6.5, 2.5]
    ax = plots.heatmap(
        pandas.DataFrame([[0.0, 1.0]], index=[3], columns=[0.2, 0.5]), xlabel="ratio", ylabel="layer", unit="fraction"
    )
    assert ax.figure.axes[-1].get_ylabel() == "fraction" and list(ax.collections[0].get_array().ravel()) == [0.0, 1.0]


def test_the_palette_is_distinct_from_the_papers_grey():
    assert len(set(plots.COLOURS)) == len(plots.COLOURS) and plots.PAPER not in plots.COLOURS


def needles():
    return pandas.DataFrame(
        [
            {"policy": policy, "budget": budget, "length": length, "depth": depth, "score": score}
            for policy, budget, best in (("full", None, 1.0), ("snapkv", 64, 0.5), ("snapkv", 128, 0.75))
            for length in (1024, 256)
            for depth in (1.0, 0.0, 0.5)
            for score in (best, best / 2)
        ]
    )


def test_needle_heatmaps_have_a_panel_for_each_policy_and_budget_and_average_a_cell():
    panels = plots.needle_heatmap(needles(), names={"full": "full cache"}, columns=2, title="needles")
    assert [drawing.title(ax) for ax in panels] == ["full cache: 0.75", "snapkv, 64: 0.38", "snapkv, 128: 0.56"]
    for ax, value in zip(panels, (0.75, 0.375, 0.5625), strict=True):
        cells = ax.images[0].get_array()
        assert cells.shape == (3, 2) and (cells == value).all()
        assert ax.images[0].get_clim() == (0, 1) and ax.images[0].get_cmap().name == "cividis"
    assert drawing.ticks(panels[2]) == ["256", "1,024"]
    assert drawing.ticks(panels[0], "y") == ["0", "50", "100"]
    assert panels[2].get_xlabel() == "prompt (tokens)" and "%" in panels[0].get_ylabel()
    panels[0].figure.canvas.draw()


def test_needle_heatmaps_leave_gaps_and_refuse_other_tables():
    table = needles()
    few = table[(table["length"] == 256) | (table["depth"] == 0)]
    (ax,) = plots.needle_heatmap(few, policies=["full"])
    assert numpy.isnan(ax.images[0].get_array().filled(numpy.nan)).sum() == 2
    with pytest.raises(KvlabError, match="needs the columns depth, score"):
        plots.needle_heatmap(table[["policy", "budget", "length"]])
    with pytest.raises(KvlabError, match="no scores"):
        plots.needle_heatmap(table, policies=["quest"])


def test_bars_stand_in_groups_with_whiskers():
    frame = pandas.DataFrame({"c": [8, 4, 8, 4], "who": ["b", "b", "a", "a"], "value": [0.4, 0.3, 0.2, 0.1]}).assign(
        low=lambda rows: rows["value"] - 0.05, high=lambda rows: rows["value"] + 0.1
    )
    ax = plots.bars(
        frame,
        x="c",
        hue="who",
        names={"a": "A", "b": "B"},
        labels={4: "four", 8: "eight"},
        xlabel="x",
        ylabel="y",
    )
    assert drawing.bars(ax) == [0.1, 0.3, 0.2, 0.4]
    centres = [bar.get_x() + bar.get_width() / 2 for bar in ax.patches]
    assert centres == pytest.approx([-0.2, 0.8, 0.2, 1.2]) and max(bar.get_width() for bar in ax.patches) < 0.4
    assert drawing.ticks(ax) == ["four", "eight"]
    assert [line.get_segments()[1][:, 1].tolist() for line in ax.collections] == [
        pytest.approx([0.15, 0.3]),
        pytest.approx([0.35, 0.5]),
    ]


@pytest.mark.parametrize(
    "places, named", [([0.5, 4, 128], ["0.5", "4", "128"]), ([64, 1024], ["64", "1,024"])], ids=["few", "thousands"]
)
def test_doublings_are_equally_wide_and_plain_numbers(places, named):
    ax = plots.doublings(plots.axes(), places)
    assert ax.get_xscale() == "log" and ax.get_xaxis().get_transform().base == 2
    assert list(ax.get_xticks()) == places and drawing.ticks(ax) == named


def test_the_former_name_of_the_figures_works_and_warns():
    from kvlab.render.figures import plots

    with pytest.warns(FutureWarning, match=r"from kvlab\.render\.figures import plots"):
        from kvlab.workbench.figures import plots as former
    assert former is plots
