"""MorphKV's figures show what was found, and what the paper prints beside it."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from support import drawing
from support.live_runs import prompt

from kvlab import papers
from kvlab.analyses.morphkv import printed, rescored, responses, sizes, windows
from kvlab.core.geometry import Geometry
from kvlab.render.figures import morphkv, plots

pytestmark = pytest.mark.usefixtures("headless")


@pytest.fixture(scope="module")
def along(random_traces):
    cuts = [windows.continuation(trace, 30, 90, accumulate=True) for trace in random_traces]
    return responses.along_a_response(cuts, 24, 4)


@pytest.fixture(scope="module")
def ablation(random_traces):
    return windows.window_ablation(random_traces, windows=(2, 8, 32), capacities=(32, 48))


def whiskers(ax, *, upright: bool) -> list[tuple[float, float]]:
    """Where intervals begin and end, in the order in which they were drawn."""
    return [
        tuple(sorted(segment[:, 1 if upright else 0].tolist()))
        for container in ax.containers
        if isinstance(container, ErrorbarContainer)
        for group in container.lines[2]
        for segment in group.get_segments()
    ]


def test_figures_10_and_11_compare_every_method_and_tell_how_far_snapkv_lies_behind(random_traces):
    small = responses.small_budgets(random_traces, (0.1, 0.3), window=4)
    figure = morphkv.figures_10_and_11(small)
    *measures, behind = figure.axes
    for ax, measure in zip(measures, windows.MEASURES, strict=True):
        curves = drawing.curves(ax)
        assert list(curves) == [
            "MorphKV",
            "SnapKV",
            "SnapKV, free to choose",
            "SnapKV, a set for each KV head",
            "H2O",
            "StreamingLLM",
        ]
        assert curves["H2O"].y == [small.metrics[f"{measure}/h2o/0.10"], small.metrics[f"{measure}/h2o/0.30"]]
        assert ax.lines[0].get_xdata().tolist() == [10, 30]
    assert len(drawing.legend(figure)) == 6
    drops = [100 * small.metrics[f"drop/step_recall/snapkv/{share}"] for share in ("0.10", "0.30")]
    assert drawing.our_bars(behind) == pytest.approx(drops)
    assert drawing.bars(behind, plots.PAPER) == [50], "the paper's average, at the smallest budget only"
    assert drawing.ticks(behind) == ["10%", "30%"] and drawing.legend(behind) == ["score, paper", "recall, here"]
    figure.canvas.draw()


def test_figure_2a_shows_what_was_measured_and_the_formula(along):
    stored = sizes.against_formula(along.table, Geometry(2, 4, 2, 16), 24, 4)
    figure = morphkv.figure_2a(stored, "tiny")
    measured, predicted = figure.axes
    assert drawing.title(measured) == "tiny: measured, and by formula (dashed)"
    curves = drawing.curves(measured)
    assert list(curves) == ["full cache", "SnapKV", "H2O", "MorphKV"]
    last = stored.table[stored.table["step"] == 90].set_index("policy")["measured"] / 2**20
    assert curves["SnapKV"].y[-1] == pytest.approx(last["snapkv"].iloc[0])
    dashed = [line for line in measured.lines if line.get_linestyle() == "--"]
    assert len(dashed) == 4 and dashed[0].get_ydata()[-1] == pytest.approx(last["full"].iloc[0])
    by_formula = sizes.over_lengths("Qwen", 32, [16000]).set_index("method")["gigabytes"]
    assert {name: curve.y[-1] for name, curve in drawing.curves(predicted).items()} == pytest.approx(
        {morphkv.NAMES[method]: size for method, size in by_formula.items()}
    )
    assert drawing.texts(predicted) == ["all memory of an H100 (80 GB)"]


def test_figures_6_8_and_9_stand_beside_print():
    predicted = sizes.printed_sizes()
    figure = morphkv.figures_6_8_and_9(predicted)
    *benchmarks, saved = figure.axes
    assert [drawing.title(ax) for ax in benchmarks] == [
        "figure 6: 2,400 tokens",
        "figure 8: 7,273 tokens",
        "figure 9: 13,333 tokens",
    ]
    names = ["snapkv", "h2o", "morphkv"]
    for ax, benchmark, methods in zip(
        benchmarks, ("longwriter", "longgenbench", "longbench"), (names, names, ["snapkv", "morphkv"]), strict=True
    ):
        assert drawing.ticks(ax) == [morphkv.NAMES[method] for method in methods]
        ours = [predicted.metrics[f"relative_size/{benchmark}/{method}"] for method in methods]
        assert drawing.our_bars(ax) == ours
        table = papers.figure("morphkv", "sizes").query("benchmark == @benchmark").set_index("method")["ratio"]
        assert drawing.bars(ax, plots.PAPER) == table[methods].tolist()
    assert drawing.bars(saved, plots.PAPER) == pytest.approx([88.1, 52.9])
    assert drawing.our_bars(saved) == pytest.approx(
        [100 * predicted.metrics[f"saving/longgenbench/{method}"] for method in ("snapkv", "h2o")]
    )


def test_figure_7_sets_slopes_beside_the_judges(along, tiny):
    policies = {name: method for name, method in responses.writing(16, 4).items() if name != "full"}
    inside = responses.teacher_forced(tiny(), prompt(71, 5, rows=2), 40, policies)
    figure = morphkv.figure_7(along, inside)
    lost, drift, paper, slopes = figure.axes
    assert list(drawing.curves(lost)) == list(drawing.curves(drift)) == ["SnapKV", "H2O", "MorphKV"]
    assert drift.get_ylabel() == "KL from the full cache (nats)"
    assert (
        drawing.curves(drift)["H2O"].y
        == responses.binned(inside.table, "kl").query("policy == 'h2o'")["value"].tolist()
    )
    order = ["MorphKV", "H2O", "SnapKV"]
    assert drawing.ticks(paper) == drawing.ticks(slopes) == order
    assert drawing.bars(paper, plots.PAPER) == pytest.approx([10, 16.5, 16.5])
    assert whiskers(paper, upright=True) == [pytest.approx((15, 18))] * 2, "MorphKV's is one number"
    ends = [
        findings.intervals[f"slope/{measure}/{name}"]
        for findings, measure in ((along, "mass_lost"), (inside, "kl"))
        for name in ("morphkv", "h2o", "snapkv")
    ]
    assert whiskers(slopes, upright=True) == [pytest.approx(pair) for pair in ends]
    assert drawing.legend(slopes) == ["mass lost", "KL (nats)"]
    figure.canvas.draw()


def test_tables_2_and_3_show_what_is_stated_and_what_is_left_out():
    on_responses = printed.long_responses()
    stated, tasks = morphkv.tables_2_and_3(on_responses, rescored.table_3()).axes
    assert drawing.ticks(stated) == ["over SnapKV", "over H2O"]
    assert drawing.bars(stated, plots.PAPER) == pytest.approx([9.4, 18.2])
    assert drawing.our_bars(stated) == pytest.approx(
        [100 * on_responses.metrics[f"table2/gain_over_{method}"] for method in ("snapkv", "h2o")]
    )
    assert drawing.legend(tasks) == ["Llama", "Mistral", "Phi4"]
    labels = drawing.ticks(tasks)
    assert len(labels) == 21 and labels[:2] == ["trec *", "lsht *"]
    assert {label for label in labels if label.endswith("*")} == {
        f"{task} *" for task in ("trec", "lsht", "gov_report", "lcc", "repobench-p", "passage_retrieval_zh")
    }


def test_table_6_has_a_row_for_each_capacity(ablation):
    figure = morphkv.table_6(ablation)
    assert len(figure.axes) == 2 * 4
    for row, capacity in zip((figure.axes[:4], figure.axes[4:]), (32, 48), strict=True):
        *measures, paper = row
        fitting = [window for window in (2, 8, 32) if window < capacity]
        for ax, measure in zip(measures, windows.MEASURES, strict=True):
            assert {name: curve.y for name, curve in drawing.curves(ax).items()} == {
                fusion: [ablation.metrics[f"{measure}/{fusion}/w{w}/c{capacity}"] for w in fitting]
                for fusion in ("sum", "max")
            }
            assert drawing.ticks(ax) == ["2", "8", "32"]
        assert drawing.title(measures[1]) == f"C + R = {capacity}: higher is better"
        printed_scores = {name: curve.y for name, curve in drawing.curves(paper).items()}
        assert printed_scores == {"Llama": [42, 45], "Mistral": [50, 52], "Qwen": [40, 47]}
        assert {to_hex(line.get_color()) for line in paper.lines} == {plots.PAPER}
    figure.canvas.draw()


def test_along_the_response_there_is_a_curve_for_each_window(ablation):
    figure = morphkv.along_the_response(ablation, "max", 48)
    for ax, measure in zip(figure.axes, windows.MEASURES, strict=True):
        curves = drawing.curves(ax)
        assert list(curves) == ["R = 2", "R = 8", "R = 32"] and drawing.title(ax) == "max fusion, C + R = 48"
        steps = windows.along(ablation, measure, "max", 48)
        assert curves["R = 8"].y == steps[steps["window"] == 8]["value"].tolist()


def test_tables_4_and_5_show_gains_by_window_and_regime_and_in_print(random_traces, ablation):
    regimes = windows.fusion_gains(random_traces, 4, 24, "writing")
    figure = morphkv.tables_4_and_5(ablation, regimes, printed.fusions(), 32)
    *measures, paper = figure.axes
    assert drawing.ticks(measures[0], "y") == ["window 2 of 32", "window 8 of 32", "long response, 4 of 24"]
    for ax, measure in zip(measures, windows.MEASURES, strict=True):
        ends = [ablation.intervals[f"gain/{measure}/w{window}/c32/max_to_sum"] for window in (2, 8)]
        ends.append(regimes.intervals[f"gain/{measure}/writing/max_to_sum"])
        assert whiskers(ax, upright=False) == [pytest.approx((100 * low, 100 * high)) for low, high in ends]
    assert drawing.ticks(measures[1], "y") == [""] * 3
    scores = printed.fusions()
    (low, high), (fewest, most) = scores.intervals["table5/sum_over_max"], scores.intervals["table4/max_over_sum"]
    assert whiskers(paper, upright=False) == [
        pytest.approx((100 * low, 100 * high)),
        pytest.approx((-100 * most, -100 * fewest)),
    ]
    assert drawing.ticks(paper, "y") == ["table 5, LongWriter", "table 4, LongBench"]
    figure.canvas.draw()
