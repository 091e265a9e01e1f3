"""RocketKV's figures on its design show the findings that they are given, and what the paper prints."""

from __future__ import annotations

import itertools

import pandas
import pytest
from support.drawing import bars, curves, legend, ticks, title
from support.made_up import made_up, values

from kvlab import papers
from kvlab.analyses.rocketkv import budgets, common, design
from kvlab.render.figures import rocketkv_design as draw

QUALITY = list(budgets.QUALITY)


pytestmark = pytest.mark.usefixtures("headless")


def test_figure_6_has_a_bar_for_each_change_and_the_redundancy_beside_it():
    compressions = {"compression": [6, 12]}
    findings = made_up(
        {
            budgets.VALUE: {"measure": QUALITY, "method": list(design.LADDER), **compressions},
            design.REDUNDANCY: compressions,
            design.OVER_CHANCE: compressions,
        },
        table=pandas.DataFrame(compressions),
    )
    figure = draw.figure_6(findings)
    for ax, measure in zip(figure.axes, ("output_error", "mass_lost"), strict=False):
        expected = [findings.metrics[f"{measure}/{method}/c{c}"] for c in (6, 12) for method in design.LADDER]
        assert bars(ax) == expected and ticks(ax) == ["c = 6", "c = 12"]
        low, high = ax.collections[1].get_segments()[1][:, 1]
        assert (low, high) == pytest.approx(findings.intervals[f"{measure}/snapkv_gqa/c12"])
    again, over = (
        [findings.metrics[f"{name}/c{c}"] for c in (6, 12)] for name in ("redundancy", "redundancy/over_chance")
    )
    assert bars(figure.axes[2]) == pytest.approx([again[0], again[0] - over[0], again[1], again[1] - over[1]])
    assert legend(figure) == list(design.LADDER.values()) and legend(figure.axes[2]) == ["measured", "by chance"]


def test_the_first_stage_alone_is_drawn_by_the_tokens_that_it_leaves():
    effect = design.FIRST_STAGE + budgets.VALUE
    keys = {"measure": QUALITY, "method": list(design.FIRST_STAGES), "compression": [16, 32]}
    findings = made_up({effect: keys})
    left, right = draw.first_stage(findings).axes
    for ax, measure in ((left, "output_error"), (right, "mass_lost")):
        expected = [
            findings.metrics[f"first_stage/{measure}/{method}/c{c}"] for c in (16, 32) for method in design.FIRST_STAGES
        ]
        assert bars(ax) == expected and ticks(ax) == ["S / 4.0", "S / 5.7"]
    assert legend(left) == list(design.FIRST_STAGES.values())


def test_figure_7_sets_the_papers_best_kernels_beside_ours():
    best = {("a", 500): 7, ("b", 500): 63, ("a", 1900): 63, ("b", 1900): 63}
    rows = [
        {"document": d, "length": n, "kernel": k, "output_error": float(k != best[d, n])}
        for d, n, k in itertools.product("ab", (500, 1900), (7, 63))
    ]
    findings = made_up(
        {design.KERNEL: {"measure": QUALITY, "kernel": [7, 63], "length": [500, 1900]}}, table=pandas.DataFrame(rows)
    )
    left, middle, right = draw.figure_7(findings).axes
    for ax, measure in ((left, "output_error"), (middle, "mass_lost")):
        ours = values(findings, design.KERNEL, "kernel", measure=measure, length=1900)
        assert curves(ax)["1900 tokens"].points() == ours and ticks(ax) == ["7", "63"]
    assert legend(left) == ["500 tokens", "1900 tokens"] and middle.get_legend() is None
    printed, ours = (points.get_offsets().tolist() for points in right.collections)
    table = papers.figure("rocketkv", "figure7")
    assert printed == table[["length", "kernel"]].to_numpy().tolist()
    assert sorted(ours) == [[500, 7], [500, 63], [1900, 63], [1900, 63]]
    assert curves(right)["here, geometric mean"].points() == pytest.approx({500: (7 * 63) ** 0.5, 1900: 63})
    assert legend(right) == ["paper, three models", "here, each document", "here, geometric mean"]


def test_table_1_stands_beside_its_formula():
    rows = [
        {
            "method": method,
            "c": c + 0.1,
            "compression": c,
            "storage_paper": common.storage_by_paper(method, c),
            "storage_measured": i + 1 / c,
            "traffic_measured": 1.1 / c,
        }
        for (i, method), c in itertools.product(enumerate(common.METHODS), (4, 16, 64))
    ]
    left, right = draw.table_1(made_up({}, table=pandas.DataFrame(rows))).axes
    pairs = [(common.storage_by_paper(m, 16), i + 1 / 16) for i, m in enumerate(common.METHODS)]
    assert bars(left) == pytest.approx(list(itertools.chain(*pairs)))
    assert ticks(left) == ["SnapKV", "Quest", "SparQ", "RocketKV"] and "compression of 16" in title(left)
    assert curves(right)["stored, measured"].points() == pytest.approx({c + 0.1: 3 + 1 / c for c in (4, 16, 64)})
    formula = curves(right)["table 1: 1/√c + 2/c^(3/4)"].points()
    assert min(formula) == pytest.approx(4.1) and max(formula) == pytest.approx(64.1)
    assert formula[max(formula)] == pytest.approx(64.1**-0.5 + 2 * 64.1**-0.75)
    assert len(curves(right)) == 5 and ticks(right) == ["4", "16", "64"]


def test_splits_have_a_curve_for_each_compression_and_a_star_for_the_published_one():
    methods = {"split0": 0.0, "split0.5": 0.5, design.PUBLISHED: float("nan")}
    measures = ["output_error", "mass_lost", "survived"]
    findings = made_up(
        {budgets.VALUE: {"measure": measures, "method": list(methods), "compression": [16, 32]}},
        table=pandas.DataFrame({"method": list(methods), "exponent": list(methods.values())}),
    )
    for ax, measure in zip(draw.splits(findings).axes, measures, strict=True):
        assert legend(ax) == ["c = 16", "c = 32", "paper: even split", "published code"]
        expected = {e: findings.metrics[f"{measure}/split{e:g}/c32"] for e in (0, 0.5)}
        assert curves(ax)["c = 32"].points() == expected
        stars = [line for line in ax.lines if line.get_marker() == "*" and len(line.get_xdata())]
        assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in stars] == [
            (design.published_exponent(c), findings.metrics[f"{measure}/splitpublished/c{c}"]) for c in (16, 32)
        ]
        assert [line.get_color() for line in stars] == [line.get_color() for line in ax.lines[:2]]


def test_pages_run_from_tokens_to_pages():
    exponents = {f"pages{e:g}": e for e in (0.0, 0.5, 1.0)}
    findings = made_up(
        {budgets.VALUE: {"measure": QUALITY, "method": list(exponents), "compression": [16]}},
        table=pandas.DataFrame({"method": list(exponents), "exponent": list(exponents.values())}),
    )
    axes = draw.pages(findings).axes
    for ax, measure in zip(axes, ("output_error", "mass_lost", "step_recall"), strict=True):
        expected = {e: findings.metrics[f"{measure}/{method}/c16"] for method, e in exponents.items()}
        assert curves(ax)["c = 16"].points() == expected and legend(ax)[-1] == "paper: even split"
    assert title(axes[2]) == "Share of the step's top t read"
