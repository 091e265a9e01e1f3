"""MorphKV's sentences follow the numbers in both directions, and hold none of their own."""

from __future__ import annotations

import pandas
import pytest
from support.stories import told

from kvlab.analyses.findings import Findings
from kvlab.analyses.morphkv import facts, groups, headlines, printed, responses, sizes, windows
from kvlab.render.stories import morphkv as story


def made(table: pandas.DataFrame | None = None) -> Findings:
    return Findings(pandas.DataFrame() if table is None else table)


@pytest.mark.parametrize(
    ("value", "phrase"),
    [
        (0.1, "a window of 32 loses less than one of 4 (10 %"),
        (-0.1, "a window of 32 loses more than one of 4 (-10 %"),
        (0.001, "a window of 32 is not told apart from one of 4"),
    ],
)
def test_windows(value, phrase):
    found = made()
    keys = {"measure": "mass_lost", "fusion": "max", "capacity": 512, "old": 4, "new": 32}
    found.set(windows.WINDOW_GAIN, value, (value - 0.05, value + 0.05), **keys)
    found.set(windows.WINDOW_GAIN, value, (value - 0.05, value + 0.05), **keys | {"capacity": 256, "new": 200})
    text = told(story.windows(found))
    assert f"at a capacity of 512 {phrase}" in text and "; at a capacity of 256 a window of 200" in text
    assert "7.1 % more of LongGenBench's checks right with 200 than with 32" in text


def test_along_names_the_best_window_at_both_ends():
    rows = [
        {"measure": "mass_lost", "fusion": "max", "capacity": 64, "window": w, "step": s, "value": v}
        for w, first, last in ((4, 0.1, 0.3), (32, 0.2, 0.25))
        for s, v in ((1, first), (100, last))
    ]
    text = told(story.along(made(pandas.DataFrame(rows)), "max", 64))
    assert "+0.200 with 4 and +0.050 with 32" in text and "4 is the best window at first, 32 at last" in text


@pytest.mark.parametrize(
    ("value", "phrase"),
    [(0.1, "the sum is better (10 %"), (-0.1, "the maximum is better (-10 %"), (0.001, "both are not told apart (")],
)
def test_fusions(value, phrase):
    regimes, found = made(), made()
    for regime in ("writing", "answering"):
        keys = {"measure": "mass_lost", "regime": regime}
        regimes.set(windows.REGIME_GAIN, value, (value - 0.01, value + 0.01), **keys)
    found.set(windows.FUSION_GAIN, value, (value - 0.01, value + 0.01), measure="mass_lost", window=4, capacity=64)
    text = told(story.fusions(found, regimes, printed.fusions()))
    assert text.count(phrase) == 2 and "while its rows are in favour of the sum" in text and "states 1 %" in text
    assert (
        f"of 1 windows the sum is clearly better at {int(value == 0.1)}, the maximum at {int(value == -0.1)}." in text
    )
    assert "table 5 has the sum 2.8 % ahead" in text


@pytest.mark.parametrize(
    ("value", "phrase"), [(0.1, "loses clearly less attention"), (-0.1, "loses clearly more attention")]
)
def test_generating(value, phrase):
    found = made(pandas.DataFrame({"window": [1, 6], "capacity": [128, 128]}))
    for measure in ("mass_lost", "output_error"):
        found.set(windows.WIDER_GAIN, value, (value - 0.01, value + 0.01), measure=measure)
    text = told(story.generating(found))
    assert phrase in text and "a window of 6 instead of 1 in 128" in text and "7.1 %" in text
    assert ("the same direction" in text) is (value > 0)


@pytest.mark.parametrize(("value", "phrase"), [(0.5, "clearly likelier"), (-0.5, "clearly less likely")])
def test_early_facts(value, phrase):
    found = made()
    for name in (facts.WIDE, facts.NARROW):
        found.set(facts.WORSE, 2.0, (1.0, 3.0), policy=name)
    found.set(facts.FULL, 2.3 - value, (2.3 - value - 0.1, 2.3 - value + 0.1))
    found.set(facts.WIDE_AHEAD, value, (value - 0.1, value + 0.1))
    found.set(facts.WIDE_STORES_MORE, value, (value - 0.1, value + 0.1))
    found.set(facts.BEHIND, value, (value - 0.1, value + 0.1), policy="h2o")
    text = told(story.early_facts(found))
    assert phrase in text and ("H2O is clearly worse than the wide window (by" in text) is (value > 0)
    assert "2.0 (1.0 to 3.0) with the wide and 2.0 (1.0 to 3.0) with the narrow window" in text
    assert ("the model knows the code" in text) is (value > 0)
    assert ("the model does not know the code" in text) is (value < 0)


@pytest.mark.parametrize(
    ("value", "phrase"), [(0.2, "loses clearly less than"), (-0.2, "clearly more"), (0.0, "neither")]
)
def test_section_3_3(value, phrase):
    found = made()
    for variant in ("own_sets", "llama_code", "other_code"):
        found.set(groups.GAIN, value, (value - 0.1, value + 0.1), measure="mass_lost", variant=variant)
    text = told(story.section_3_3(found))
    assert phrase in text and "section 3.3 says that both perform equally well" in text
    assert ("for Llama is clearly better than" in text) is (value > 0)


@pytest.mark.parametrize(
    ("value", "phrase"), [(0.2, "MorphKV is ahead of SnapKV (0.20"), (-0.2, "MorphKV is behind SnapKV (-0.20")]
)
def test_budgets(value, phrase):
    found = made(pandas.DataFrame({"share": [0.01, 0.07]}))
    for share in (0.01, 0.07):
        for name in ("snapkv", "snapkv_choosing", "snapkv_shared"):
            keys = {"measure": "mass_lost", "policy": name, "share": share}
            found.set(responses.BEHIND_AT_SHARE, value, (value - 0.1, value + 0.1), **keys)
    found.set(responses.RECALL_DROP, value, (value - 0.1, value + 0.1), policy="snapkv", share=0.01)
    for name, free in (("snapkv", 1), ("morphkv", 15)):
        found.set(responses.CHOICES, free, policy=name, share=0.01)
    text = told(story.budgets(found))
    assert text.count(phrase) == 2 and "leaves 1 of its entries to choose where MorphKV chooses 15" in text
    assert f"at 7 % {phrase}" in text and "the paper's 0.5000 lies outside" in text
    assert "it is 1 against 101" in text


def test_growth_and_sizes():
    found = made()
    found.set(sizes.DEVIATION, 1e-9)
    for name, value in (("full", 1.0), ("snapkv", 3.0), ("morphkv", 0.0)):
        found.set(sizes.GROWTH, value, policy=name)
    text = told(story.growth(found))
    assert "SnapKV 3.00 and MorphKV 0.00" in text and "MorphKV's stays, as here" in text
    found.set(sizes.GROWTH, 0.5, policy="snapkv")
    assert "other than here" in told(story.growth(found))
    found.set(sizes.DEVIATION, 0.2)
    assert "is off by up to 20.0 %" in told(story.growth(found))
    text = told(story.predicted_sizes(sizes.printed_sizes()))
    assert "(stated 52.9 %)" in text and "(stated 88.1 %)" in text


@pytest.mark.parametrize(("value", "phrase"), [(0.3, "further from the full"), (-0.3, "nearer to the full")])
def test_figure_7(value, phrase):
    along, inside = made(), made()
    along.set(responses.TIMES, 1 + value, (0.9 + value, 1.1 + value), measure="mass_lost", policy="h2o")
    for name in ("h2o", "snapkv"):
        for effect in (responses.BEHIND, responses.STEEPER):
            inside.set(effect, value, (value - 0.1, value + 0.1), measure="kl", policy=name)
    text = told(story.figure_7(along, inside))
    assert text.count(phrase) == 2 and "15 % to 18 % lost where MorphKV loses 10 %" in text
    assert ("grows clearly faster than" in text) is (value > 0)


@pytest.mark.parametrize(("value", "phrase"), [(0.3, "clearly more early"), (-0.3, "clearly fewer early")])
def test_figure_3(value, phrase):
    found = made()
    for name in ("h2o", "keyformer", "scissorhands", "streamingllm"):
        found.set(responses.BEHIND, value, (value - 0.1, value + 0.1), measure="mass_lost", policy=name)
        found.set(responses.DIVERGES_EARLIER, value, (value - 0.1, value + 0.1), policy=name)
    text = told(story.figure_3(found))
    assert text.count(phrase) == 2
    assert ("MorphKV loses less than H2O (0.30" in text) is (value > 0)
    assert ("MorphKV loses more than H2O (-0.30" in text) is (value < 0)


def test_what_is_recomputed_is_told_from_the_tables():
    text = told(story.stated_and_recomputed(headlines.everything()))
    assert "54.9 % over H2O where the text says 52.9 %" in text and "89.0 % over SnapKV" in text
    assert "In table 7, 3 rows end in another number" in text
    text = told(story.printed_tables(printed.long_responses(), printed.long_contexts()))
    assert "turn the mean over tasks" in text and "do not turn" not in text and "the text states 18.2 %" in text
