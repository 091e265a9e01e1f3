"""Figures of speed and memory, drawn from clocks that are made up, beside what the papers print."""

from __future__ import annotations

import pandas as pd
import pytest
from support import drawing

from kvlab import papers
from kvlab.analyses.speed import footprint, ratios
from kvlab.render import theme
from kvlab.render.figures import plots
from kvlab.render.figures import speed as draw

pytestmark = pytest.mark.usefixtures("headless")

POLICIES = ["h2o", "zsmerge", "compilerkv"]


@pytest.fixture(scope="module")
def decoded():
    """Two rounds, in which every policy is twice as fast as the full cache, and four times at the longest prompt."""
    rows = [
        {
            "length": length,
            "batch": batch,
            "policy": policy,
            "round": turn,
            "seconds_per_step": 0.1 * (1 if policy == "full" else 0.5 if length == 250 else 0.25) * (turn + 1),
            "kv_bytes": 2**20 * (length if policy == "full" else 125) * batch,
            "aux_bytes": 0,
        }
        for policy in ("full", *POLICIES)
        for length, batch in ((250, 1), (1600, 1), (250, 4))
        for turn in range(2)
        if batch == 1 or policy in ("full", "zsmerge")
    ]
    return pd.DataFrame(rows)


def table_a1(column):
    rows = footprint.compilerkv_table_a1(papers.figure("compilerkv", "tableA1")).table
    return rows["input_tokens"].tolist(), rows[column].tolist()


def test_speed_by_length_beside_the_papers_ratios(decoded):
    left, right = draw.speed(ratios.speed_findings(decoded), POLICIES).axes
    steps = drawing.curves(left)
    assert list(steps) == ["full cache (transformers)", *POLICIES]
    assert steps["full cache (transformers)"] == ([250, 1600], pytest.approx([150, 150]))
    assert steps["h2o"].y == pytest.approx([75, 37.5])
    speedups = drawing.curves(right)
    assert speedups["compilerkv"] == ([250, 1600], pytest.approx([2, 4]))
    assert speedups["paper, compilerkv"] == table_a1("speedup")
    figure_3 = footprint.zsmerge_speedups(papers.figure("zsmerge", "figure3"))
    assert speedups["paper, zsmerge"].y == figure_3["speedup"].tolist()
    best = papers.figure("rocketkv", "figure5")["speedup"].max()
    assert set(speedups["paper, rocketkv's best"].y) == {best}
    tints = [left.lines[0].get_color(), left.lines[1].get_color()]
    assert tints == [theme.INK, theme.look(POLICIES[0]).colour]


def test_batches_beside_zsmerges_table_4(decoded):
    (ax,) = draw.batches(ratios.speed_findings(decoded), POLICIES).axes
    curves = drawing.curves(ax)
    assert curves["zsmerge"] == ([1, 4], pytest.approx([2, 2])) and "h2o" not in curves
    assert ax.lines[0].get_color() == theme.look("zsmerge").colour, "the colour that it has in the other figures"
    printed = footprint.zsmerge_batches(papers.figure("zsmerge", "table4"))
    grey = [line for line in ax.lines if line.get_color() == plots.PAPER]
    assert len(grey) == printed.groupby(["method", "prompt"]).ngroups
    drawn = sorted(value for line in grey for value in line.get_ydata())
    assert drawn == pytest.approx(sorted(printed["speedup"]))
    assert {f"{prompt:,}" for prompt in printed["prompt"]} <= set(drawing.texts(ax))
    assert {"paper, h2o, prompts as marked", "paper, zsmerge, prompts as marked"} <= set(drawing.legend(ax))


def test_first_tokens_and_answers_beside_table_a1(decoded):
    times = {"full": [1.0, 1.0], "compilerkv": [1.1, 1.2]}
    first = pd.DataFrame(
        [
            {"length": 250, "policy": policy, "round": turn, "seconds": seconds}
            for policy, values in times.items()
            for turn, seconds in enumerate(values)
        ]
    )
    overhead, answers = ratios.first_token_findings(first), ratios.answer_findings(first, decoded)
    left, right = draw.first_token(overhead, answers, POLICIES).axes
    for ax, column, findings, effect in (
        (left, "overhead", overhead, "first_token/compilerkv"),
        (right, "latency_saved", answers, "answer_saved/compilerkv"),
    ):
        assert drawing.bars(ax, plots.PAPER) == pytest.approx(table_a1(column)[1])
        assert drawing.bars(ax, theme.look("compilerkv").colour) == pytest.approx([findings.metrics[effect]])
        assert drawing.ticks(ax) == ["compilerkv,\n8k", "compilerkv,\n16k", "compilerkv,\n32k", "compilerkv,\n250"]
    assert drawing.texts(left)[-1] == "15.0%"
    assert drawing.titles(left.figure) == ["Additional time to the first token", "Time saved over a whole answer"]


def test_memory_by_length_beside_the_papers_savings(decoded):
    left, right = draw.memory(ratios.memory_findings(decoded, weight_bytes=100 * 2**20), POLICIES).axes
    rows = [label.get_text() for label in left.get_yticklabels()]
    assert rows == ["full cache", *POLICIES], "the largest first"
    bars = {rows[int(line.get_ydata()[0])]: list(line.get_xdata()) for line in left.lines if len(line.get_xdata()) == 2}
    assert bars["full cache"] == [250, 1600] and bars["h2o"] == [125, 125]
    assert drawing.texts(left) == ["1600.0", "125.0", "125.0", "125.0"]
    saved = drawing.curves(right)
    alike = saved["h2o, zsmerge, compilerkv"]
    assert alike.y == pytest.approx([100 * (1 - 225 / 350), 100 * (1 - 225 / 1700)])
    assert saved["compilerkv's paper"].y == pytest.approx([100 * share for share in table_a1("memory_saved")[1]])
    best = papers.figure("rocketkv", "figure5")["memory_saving"].max()
    assert saved["rocketkv's paper, best"].y == pytest.approx([100 * best] * 2)


def test_what_is_printed_stands_against_arithmetic():
    memory = footprint.zsmerge_memory(papers.figure("zsmerge", "memory"))
    saving = footprint.rocketkv_saving(papers.figure("rocketkv", "figure5"))
    workloads = footprint.zsmerge_workloads(papers.figure("zsmerge", "table4"))
    left, middle, right = draw.printed(memory, saving, workloads).axes
    rows = memory.table.query("quantity != 'token_mb'")
    assert drawing.bars(left, plots.PAPER) == rows["printed"].tolist()
    assert drawing.bars(left, plots.COLOURS[0]) == rows["float32"].tolist()
    assert drawing.legend(left) == ["paper", "32-bit floats", "16-bit floats"]
    curves = drawing.curves(middle)
    assert list(curves)[:2] == ["budget 256, by arithmetic", "budget 512, by arithmetic"]
    for row in papers.figure("rocketkv", "figure5").itertuples():
        assert set(curves[f"paper's best, budget {row.budget}"].y) == {row.memory_saving}
    ran = workloads.table.dropna(subset="tokens_per_second")
    assert sum(len(points.get_offsets()) for points in right.collections) == len(ran)
    assert drawing.legend(right)[:2] == ["paper, full", "paper, h2o"] and right.get_xscale() == "log"
