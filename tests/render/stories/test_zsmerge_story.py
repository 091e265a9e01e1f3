"""ZSMerge's sentences follow the numbers in both directions, and hold none of their own."""

from __future__ import annotations

import pandas
import pytest
from support.stories import told

from kvlab.analyses.findings import Findings
from kvlab.analyses.zsmerge import decoding, merging, printed, sensitivity, theorem
from kvlab.render.stories import zsmerge as story


def reductions(value: float, growth: float, layer: float, similarity: float) -> Findings:
    found = Findings(pandas.DataFrame())
    for ratio in (0.05, 0.2, 0.5):
        found.set(merging.REDUCTION, value, (value - 0.02, value + 0.02), ratio=ratio)
    found.set(merging.REDUCTION_SQUARED, value + 0.01, (value, value + 0.1), ratio=0.2)
    found.set(merging.REDUCTION_LAYER, layer, (layer - 0.02, layer + 0.02), ratio=0.2)
    found.set(merging.GROWTH, growth, (growth - 0.02, growth + 0.02), first=0.05, last=0.5)
    found.set(merging.REDUCTION_OF_CHOICE, value, (value - 0.02, value + 0.02), choice="similarity", ratio=0.2)
    found.set(
        merging.SAVED_BY_CHOICE, similarity, (similarity - 0.02, similarity + 0.02), choice="similarity", ratio=0.2
    )
    return found


def test_figure_4_where_merging_gains_and_where_it_does_not():
    text = told(story.figure_4(reductions(0.2, 0.1, 0.3, 0.1)))
    assert "clearly ahead of eviction at 3 of 3 ratios" in text and "share grows" in text
    assert "20 % (18 to 22) at 20 % of the cache (60.5 %)" in text and "0 of these 3 lie inside our intervals" in text
    assert "does not explain the difference" in text and "serves clearly better" in text
    text = told(story.figure_4(reductions(-0.2, -0.1, 0.6, -0.1)))
    assert "ahead of eviction at 0 of 3" in text and "share falls" in text and "serves clearly worse" in text
    assert "over whole layers is nearest to the paper's, within a tenth of it" in text
    assert "1 of these 3 lie inside" in told(story.figure_4(reductions(0.605, 0.1, 0.3, 0.1)))


def test_figure_4_tells_what_a_short_run_has():
    found = Findings(pandas.DataFrame())
    found.set(merging.REDUCTION, 0.1, (0.05, 0.2), ratio=0.3)
    text = told(story.figure_4(found))
    assert text.startswith(
        "Merging is clearly ahead of eviction at 1 of 1 ratios, of which figure 4 has it ahead at all. Next:"
    )


def test_by_layer_names_the_best_and_the_worst():
    rows = [
        {"layer": layer, "ratio": 0.1, "variant": variant, "error": error}
        for layer, evict, merge in ((0, 1.0, 0.5), (1, 1.0, 1.2))
        for variant, error in (("evict", evict), ("merge", merge))
    ]
    text = told(story.by_layer(Findings(pandas.DataFrame(rows))))
    assert "most in layer 0 (50 % of" in text and "least in layer 1 (-20 %" in text and "in 50 % of the layers" in text


@pytest.mark.parametrize(("value", "phrase"), [(0.2, "it is clearly ahead;"), (-0.2, "it is clearly behind;")])
def test_while_decoding(value, phrase):
    found, slots = Findings(pandas.DataFrame()), Findings(pandas.DataFrame())
    found.set(decoding.REDUCTION, value, (value - 0.1, value + 0.1), definition="error", variant="merge")
    found.set(decoding.REDUCTION_OF_PART, value, (value - 0.3, value + 0.3), part=4)
    for choice in ("displaces", "plain", "alpha0"):
        found.set(decoding.AHEAD, value, (value - 0.1, value + 0.1), choice=choice)
    fullest = 0.9 if value > 0 else 0.26
    slots.set(theorem.FULLEST, fullest, (fullest - 0.01, fullest + 0.01), moment=theorem.WHILE_DECODING)
    slots.set(theorem.EVEN, 0.25, moment=theorem.WHILE_DECODING)
    text = told(story.while_decoding(found, slots))
    assert phrase in text and "in the last quarter it is not told apart from eviction, where section 3.4" in text
    assert ("sends most tokens into one slot" in text) is (value > 0)
    every = "the newcomer displacing another (0.20 (0.10 to 0.30) saved), scores by eq. 2"
    assert (f"The error is clearly lower with {every}" in text) is (value > 0)
    assert ("The error is clearly higher with" in text) is (value < 0)


def test_printed_tables_are_told_from_the_tables():
    text = told(story.printed_tables(printed.over_snapkv(), printed.infinite_bench(), printed.summaries()))
    assert "above SnapKV in 6 cells, below in 17 and level in 1, which is not what" in text
    assert "from 2.6 % to 113 %; section 5 states 12 % to 34 %" in text and "97.9 %" in text and "96.8 %" in text


@pytest.mark.parametrize(
    ("value", "phrase"), [(2.0, "matters more than"), (0.1, "matters less than"), (1.0, "may matter")]
)
def test_figure_5_and_open_choices(value, phrase):
    found = Findings(pandas.DataFrame())
    found.set(sensitivity.SPREAD_OVER_MERGING, value, (value - 0.05, value + 0.05), parameter="decay")
    found.set(sensitivity.BEST, 0.7, (0.5, 0.9), parameter="proximity")
    found.set(sensitivity.WORSE, -0.1, (-0.2, -0.05), parameter="residual", setting=0.0)
    text = told(story.figure_5(found))
    assert f"the decay {phrase}" in text and "the paper recommends 0.5" in text and "clearly saves error" in text
    assert "costs the paper 6 to 11 % of ROUGE" in text and "comes to 0.33 at most" in text
    for choice in ("similarity", "displaces", "plain"):
        found.set(sensitivity.CHOICE_OVER_MERGING, value, (value - 0.05, value + 0.05), choice=choice)
        found.set(sensitivity.WORSE_BY_CHOICE, -value, (-value - 0.05, -value + 0.05), choice=choice)
    text = told(story.choices(found))
    assert text.count(phrase) == 3 and text.count("for the better") == 3
