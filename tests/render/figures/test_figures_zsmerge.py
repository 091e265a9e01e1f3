"""ZSMerge's figures show what was found, and what the paper prints beside it."""

from __future__ import annotations

import pytest
from support import drawing

from kvlab import papers
from kvlab.analyses.zsmerge import as_published, merging, sensitivity
from kvlab.render.figures import plots, zsmerge

pytestmark = pytest.mark.usefixtures("headless")


@pytest.fixture(scope="module")
def errors(random_traces):
    return merging.figure_4(random_traces, (0.15, 0.3, 0.5), without_bias=(0.3, 0.5))


@pytest.fixture(scope="module")
def swept(random_traces):
    return sensitivity.figure_5(random_traces, 0.3, sensitivity.SWEEPS | {"window": (4, 16)})


def test_figure_4_has_a_curve_for_each_variant_and_the_papers_points(errors):
    figure = zsmerge.figure_4(errors)
    left, right = figure.axes
    curves = drawing.curves(left)
    assert list(curves) == ["eviction (no residual slots)", "residual merging", "residual merging, alpha = 0"]
    assert curves["residual merging"].y == [
        errors.metrics[f"error/merge/{ratio}"] for ratio in ("0.15", "0.30", "0.50")
    ]
    assert len(curves["residual merging, alpha = 0"].y) == 2 and left.get_yscale() == "log"
    assert drawing.legend(left) == [*curves, "paper at 50 %"]
    assert drawing.texts(left) == ["eviction", "merging"], "which of the paper's two points is which"
    assert drawing.diamonds(left) == [(0.5, 2.5e-3), (0.5, 2.72e-4)]
    assert drawing.curves(right)["of the error"].y == [
        errors.metrics[f"reduction/{r}"] for r in ("0.15", "0.30", "0.50")
    ]
    assert drawing.curves(right)["of the squared error"].y[-1] == errors.metrics["reduction_squared/0.50"]
    assert "n = 2 documents; bands and bars: 95 % intervals" in figure.get_supxlabel()
    assert [gain for _, gain in drawing.diamonds(right)] == papers.figure("zsmerge", "figure4")["reduction"].tolist()
    figure.canvas.draw()


def test_a_choice_at_one_budget_has_a_mark_beside_the_curve_and_none_among_the_errors(random_traces):
    found = merging.figure_4(random_traces, (0.3, 0.5), without_bias=(0.3,), choices=(0.3,))
    left, right = zsmerge.figure_4(found).axes
    assert "scores by eq. 2" not in drawing.legend(left) and "of the error: scores by eq. 2" in drawing.legend(right)


def test_figure_4_as_published_has_both_alphas_and_the_published_points(tiny, random_traces):
    found = as_published.figure_4(random_traces, as_published.projections(tiny()), (160, 100, 40))
    left, right = zsmerge.as_published(found).axes
    curves = drawing.curves(left)
    assert list(curves) == ["alpha = 0 (called eviction)", "alpha = 1 (residual merging)"]
    errors = [found.metrics[f"published/error/alpha1/{entries}"] for entries in (40, 100)]
    assert sorted(curves["alpha = 1 (residual merging)"].y, reverse=True) == errors, "what fits has no error to draw"
    printed = papers.figure("zsmerge", "figure4_published")
    assert {y for _, y in drawing.diamonds(left)} == {*printed["alpha0"], *printed["alpha1"]}
    assert drawing.diamonds(right) == [*zip(printed["entries"], printed["reduction"], strict=True)]


def test_by_layer_what_is_worse_than_eviction_lies_above_zero(errors):
    (ax, bar) = zsmerge.by_layer(errors).axes
    cells = ax.collections[0].get_array()
    rows = errors.table.groupby(["layer", "ratio", "variant"])["error"].mean().unstack()
    change = rows["merge"] / rows["evict"] - 1
    assert cells.shape == (2, 3) and cells.ravel().tolist() == pytest.approx(change.tolist())
    assert bar.get_ylabel() == "change of the error against eviction" and cells.min() < 0


def test_figure_5_has_a_panel_for_each_parameter_with_what_the_paper_prints_of_it(swept):
    figure = zsmerge.figure_5(swept)
    *panels, flat = figure.axes
    assert [drawing.title(ax) for ax in panels] == ["proximity", "residual", "alpha", "decay", "window"]
    changes = sensitivity.changes(swept).set_index(["parameter", "measure"])["mean"]
    for ax in panels:
        parameter = drawing.title(ax)
        curves = drawing.curves(ax)
        assert curves["error of the output"].y == pytest.approx((100 * changes.loc[parameter, "error"]).tolist())
        assert curves["attention mass lost"].y == pytest.approx((100 * changes.loc[parameter, "mass_lost"]).tolist())
    assert drawing.ticks(panels[-1]) == ["4", "8", "16"], "the recommended window is measured unasked"
    printed = [band for band in panels[1].collections if band.get_label() == "paper, ROUGE lost"]
    heights = [band.get_paths()[0].vertices[:, 1] for band in printed]
    without_slots, too_many = [(height.min(), height.max()) for height in heights]
    assert without_slots == pytest.approx((6, 11)) and too_many == pytest.approx((7, 18))
    assert drawing.legend(figure) == ["error of the output", "attention mass lost", "paper, ROUGE lost"]
    assert drawing.ticks(flat) == ["proximity", "residual", "decay", "window"]
    yardstick = sensitivity.paper_yardstick(papers.figure("zsmerge", "figure5"))
    assert drawing.bars(flat, plots.PAPER) == [yardstick["decay"], yardstick["window"]]
    assert drawing.our_bars(flat) == [
        swept.metrics[f"spread_over_merging/{name}"] for name in ("proximity", "residual", "decay", "window")
    ]
    figure.canvas.draw()


def test_figure_5_of_two_parameters_leaves_the_other_panels_out(random_traces):
    sweeps = {"residual": (0, 0.02, 0.03), "decay": (0.5, 1.0)}
    figure = zsmerge.figure_5(sensitivity.figure_5(random_traces, 0.3, sweeps))
    *panels, flat = figure.axes
    assert [ax.get_visible() for ax in panels] == [True, True, False, False, False]
    assert drawing.ticks(flat) == ["residual", "decay"]
    figure.canvas.draw()
