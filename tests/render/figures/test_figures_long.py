"""The figures of long responses and headlines, of MorphKV and ZSMerge: what was found, and what the papers print."""

from __future__ import annotations

import pandas
import pytest
from support import drawing

from kvlab import papers
from kvlab.analyses.findings import Findings
from kvlab.analyses.morphkv import facts, groups, headlines, responses, windows
from kvlab.analyses.zsmerge import decoding, merging, printed, sensitivity
from kvlab.render.figures import morphkv, morphkv_long, plots, zsmerge

pytestmark = pytest.mark.usefixtures("headless")


@pytest.fixture(scope="module")
def cuts(random_traces):
    return [windows.continuation(t, 20, 100, accumulate=True) for t in random_traces]


def middles(ax) -> list[float]:
    """Where the points of error bars lie, along x."""
    return [float(container.lines[0].get_xdata()[0]) for container in ax.containers]


def test_figure_3_has_the_methods_of_constant_size_and_their_early_entries(cuts):
    along = responses.along_a_response(cuts, 24, 4)
    lost, early = morphkv_long.figure_3(along).axes
    names = [morphkv.NAMES[name] for name in morphkv_long.CONSTANT]
    assert set(drawing.curves(lost)) == set(names), "SnapKV and the full cache grow"
    shares = [100 * along.metrics[f"early/{name}"] for name in morphkv_long.CONSTANT]
    assert middles(early) == pytest.approx(shares)
    assert [label.get_text() for label in early.get_yticklabels()] == names


def test_section_3_3_draws_a_gain_for_each_variant(cuts):
    found = groups.section_3_3(cuts, 4, 24)
    figure = morphkv_long.section_3_3(found)
    for ax, measure in zip(figure.axes, groups.COMPARED, strict=True):
        gains = [100 * found.metrics[f"groups/gain/{measure}/{variant}"] for variant in morphkv_long.VARIANTS]
        assert middles(ax) == pytest.approx(gains)
    figure.canvas.draw()


def test_the_wider_window_is_drawn_step_by_step_and_over_documents(cuts):
    found = windows.wider_window(cuts, [2, 8], 24)
    lost, output, gains = morphkv_long.table_6_long(found).axes
    assert list(drawing.curves(lost)) == list(drawing.curves(output)) == ["R = 2", "R = 8"]
    assert middles(gains) == pytest.approx(
        [100 * found.metrics[f"gain/{measure}/generating/narrow_to_wide"] for measure in windows.MEASURES]
    )


def test_early_facts_are_drawn_for_both_windows_and_h2o():
    found = Findings(pandas.DataFrame())
    for place, name in enumerate((facts.WIDE, facts.NARROW, "h2o")):
        found.set(facts.WORSE, place, (place - 0.1, place + 0.1), policy=name)
        found.set(facts.STORED, place / 4, (place / 5, place / 3), policy=name)
    nats, stored = morphkv_long.early_facts(found).axes
    assert middles(nats) == [1, 0, 2] and middles(stored) == [25, 0, 50]
    assert [label.get_text() for label in nats.get_yticklabels()] == list(morphkv_long.TEXTS.values())


def test_headlines_stand_beside_what_the_figures_give():
    memory, gains, *_ = headlines.everything()
    saved, qwen = morphkv_long.stated_and_recomputed(memory, gains).axes
    assert drawing.bars(saved, plots.PAPER) == pytest.approx([52.9, 88.1])
    assert drawing.our_bars(saved) == pytest.approx(
        [100 * memory.metrics[f"bars/saving/{m}/longgenbench"] for m in ("h2o", "snapkv")]
    )
    assert drawing.bars(qwen, plots.PAPER) == pytest.approx([21, 83])
    assert drawing.our_bars(qwen) == pytest.approx([100 * 8 / 39, 100 * 6 / 7])


def test_zsmerge_while_decoding_by_definition_and_by_quarter(cuts):
    found = decoding.merging_while_decoding(cuts, 24, 3)
    kinds, parts = zsmerge.while_decoding(found).axes
    settings = [" ".join(tick.split()) for tick in drawing.ticks(kinds)]
    assert settings == ["residual merging", "scores by eq. 2", "the newcomer displaces", "alpha = 0"]
    first = kinds.containers[0].lines[0].get_ydata()
    expected = [100 * found.metrics[f"decoding/error/{name}"] for name in ("merge", "plain", "displaces", "alpha0")]
    assert first.tolist() == pytest.approx(expected) and len(kinds.containers) == 3
    assert parts.containers[0].lines[0].get_ydata()[-1] == pytest.approx(100 * found.metrics["decoding/part/4"])


def test_zsmerges_open_choices_in_figure_4_and_beside_figure_5(random_traces):
    figure_4 = merging.figure_4(random_traces, (0.2, 0.3), without_bias=(), choices=(0.2,))
    labels = drawing.legend(zsmerge.figure_4(figure_4).axes[1])
    choices = ("filled by similarity (eq. 6)", "the newcomer displaces", "scores by eq. 2")
    assert {f"of the error: {choice}" for choice in choices} <= set(labels)
    found = sensitivity.open_choices(random_traces, 0.2)
    (ax,) = zsmerge.open_choices(found).axes
    shares = [found.metrics[f"worse_by_over_merging/{choice}"] for choice in merging.CHOICES]
    assert ax.containers[0].lines[0].get_xdata().tolist() == pytest.approx(shares)


def test_zsmerges_tables_show_their_differences_and_the_stated_range():
    scores, gains = zsmerge.tables_2_and_3(printed.over_snapkv(), printed.summaries()).axes
    heights = sorted(bar.get_height() for bar in scores.patches)
    assert len(heights) == 24 and sum(height > 0 for height in heights) == 6
    assert {"llama-2-7b", "falcon-7b", "stated in section 5"} == set(drawing.legend(gains))
    stated = papers.figure("zsmerge", "headline").iloc[0]
    (band,) = gains.patches
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx(
        (100 * stated["low"], 100 * stated["high"])
    )
