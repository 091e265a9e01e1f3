"""CompilerKV's sentences follow from the numbers: on made-up findings in both directions."""

from __future__ import annotations

import pandas as pd
import pytest
from support.stories import around, told, unmeasured

from kvlab import papers
from kvlab.analyses.compilerkv import ablation, held_out, marginal, printed, quality, tables, theorem, veto
from kvlab.analyses.compilerkv.signal import P
from kvlab.analyses.findings import Findings
from kvlab.render.stories import compilerkv as story

SIDES = {"gain": 0.05, "loss": -0.05}


def signalled(p, question="heads"):
    found = Findings(pd.DataFrame())
    found.set(P, p, question=question)
    return found


def gains(filled, gated, twin):
    found = Findings(pd.DataFrame())
    for rival in quality.RIVALS:
        of_rival = -filled if rival == "h2o" else filled
        found.set(quality.GAIN_FILLED, *around(of_rival), measure="kept", rival=rival)
        found.set(quality.GAIN, *around(gated), measure="kept", rival=rival)
        found.set(quality.GAIN_TWIN, *around(twin), measure="kept", rival=rival)
    return found


def test_table_1_names_who_is_ahead():
    paper = printed.gains(papers.figure("compilerkv", "table1"))
    ahead = told(story.table_1(gains(0.05, -0.2, 0.03), paper))
    assert "more of the response's attention than DynamicKV, ZigZagKV, PyramidKV, SnapKV and StreamingLLM" in ahead
    assert "clearly less than H2O" in ahead and "worth something" in ahead and "-20 %" in ahead
    assert "ahead of all 6, by 1.0 to 27.5 %" in ahead
    behind = told(story.table_1(gains(-0.05, -0.2, -0.03), paper))
    assert "clearly less than DynamicKV" in behind and "the worse one" in behind
    unsure = told(story.table_1(gains(0.005, 0.005, 0.005), paper))
    assert "no clearly different share from" in unsure and "cannot be told apart" in unsure


@pytest.mark.parametrize(
    ("flatter", "clamped", "says"), [(0.05, 1.0, "as the paper says"), (-0.05, 0.4, "stays empty")]
)
def test_figure_2_says_which_curves_fall_less(flatter, clamped, says):
    found = Findings(pd.DataFrame())
    found.set(quality.DROP, *around(0.1), method="filled")
    for rival in quality.RIVALS:
        found.set(quality.FLATTER_FILLED, *around(flatter), rival=rival)
    for budget in (64, 1024):
        found.set(quality.CLAMPED, *around(clamped), budget=budget)
    text = told(story.figure_2(found))
    assert says in text and ("falls clearly less" in text) is (flatter > 0) and "At 64 entries" in text
    assert "where figure 2 draws it flatter than every rival's" in text


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("p", [0.2, 0.001])
def test_table_2_reads_weights_only_with_a_signal(side, p):
    found, cells = Findings(pd.DataFrame()), Findings(pd.DataFrame())
    found.set(ablation.LOSS, *around(SIDES[side]), measure="kept", part="raw_attention")
    found.set(ablation.EQUAL_STORAGE, *around(SIDES[side]), measure="kept")
    cells.set("risk/cells", 1 if p > 0.1 else 3)
    text = told(story.table_2(found, signalled(p), cells))
    assert ("as in the paper" in text) is (side == "gain") and f"(a {side})" in text
    assert "table 2 loses 4.5 %" in text
    assert ("holds no signal" in text) is ("one threshold" in text) is (p > 0.1)
    assert "no log" in story.heads_signal(Findings(pd.DataFrame()))


def test_printed_tables_contradict_each_other():
    text = told(story.printed_tables(printed.points(papers.figure("compilerkv", "table2"))))
    assert "3.01 points" in text and "at least 2.85" in text


def test_thresholds_beside_those_that_matter():
    table = pd.DataFrame({"needed": [0.01, 0.02], "threshold": [0.02, 0.0], "at_tenth": [20, 22]})
    text = told(story.admitted(table))
    assert "0.0150" in text and "50%" in text and "21 tokens" in text and "where appendix B.1" in text
    text = told(story.admitted(table.assign(threshold=0.0)))
    assert "In none is the table's threshold stricter" in text and "as appendix B.1 says" in text


@pytest.mark.parametrize("side", SIDES)
def test_steps_say_what_gains_and_what_costs(side):
    found = Findings(pd.DataFrame())
    for effect in (ablation.ONE_SET_COSTS, ablation.NORMS_SPARE, ablation.MODEL_MEAN_SPARES, ablation.AGAINST_SNAPKV):
        found.set(effect, *around(SIDES[side]), percent=7)
    text = told(story.steps(found, 7))
    assert ("value norms spare attention" in text) is (side == "gain")
    assert ("loses more" in text) is (side == "gain") and "At 7 %" in text
    assert ("costs 0.0500 (0.0400 to 0.0600)" if side == "gain" else "spares 0.0500 (0.0400 to 0.0600)") in text


@pytest.mark.parametrize("side", SIDES)
def test_a_veto_is_seen_or_not(side):
    found = Findings(pd.DataFrame())
    found.set(veto.PROTECTED, *around(0.9), method="compilerkv")
    found.set(veto.DIFFERENCE, *around(SIDES[side]))
    text = told(story.protected(found, signalled(0.3)))
    assert ("more than with equal weights" in text) is (side == "gain") and "holds no signal" in text
    assert ("as section 4.3 says" in text) is (side == "gain")
    assert "none has a veto" in unmeasured(story.protected(Findings(pd.DataFrame()), signalled(0.3)))


def test_what_of_the_theorem_fails():
    found = Findings(pd.DataFrame())
    found.set(theorem.VIOLATED, *around(0.28))
    found.set(theorem.LARGEST_RATIO, 0.91)
    assert "28 %" in told(story.theorem_4_1(found)) and "91%" in told(story.theorem_4_1(found))


# --- the learnt tables


def test_signals_are_named_by_what_they_are_of():
    found = signalled(0.21) | signalled(0.001, "thresholds")
    text = told(story.signals(found))
    assert "a signal on the layers' thresholds (p = 0.001)" in text and "none on the heads' weights (p = 0.21)" in text


@pytest.mark.parametrize("side", SIDES)
def test_the_tables_beside_what_the_paper_draws(side):
    found = Findings(pd.DataFrame())
    found.set(tables.MIDDLE_LESS_REST, *around(SIDES[side]))
    found.set("{table}/split_half", *around(0.1), table="heads")
    found.set(tables.VISITED, 0.11)
    found.set(tables.ENTROPY_SLOPE, *around(SIDES[side]))
    text = told(story.figure_a2(found, signalled(0.01)))
    assert "correlation of 0.100" in text and ("lower, as figure A2 draws them" in text) is (side == "loss")
    text = told(story.figure_a3(found))
    assert ("a rise where figure A3 draws a fall" in text) is (side == "gain") and "11%" in text


def test_alpha_is_a_preference():
    rows = [
        {"log": log, "alpha": a, "changed": changed, "neutral": neutral}
        for log, a, changed, neutral in (
            ("even_log", 0, 0.0, 0.3),
            ("even_log", 1, 0.02, 0.3),
            ("neutral_log", 0, 0.0, 0.4),
            ("neutral_log", 1, 0.5, 0.9),
        )
    ]
    text = told(story.alpha(Findings(pd.DataFrame(rows))))
    assert "changes 2%" in text and "40%" in text and "90%" in text


@pytest.mark.parametrize("side", SIDES)
def test_held_out_gains_and_losses(side):
    found = Findings(pd.DataFrame())
    for comparison in ("heads_over_neutral", "equal/over_neutral"):
        found.set(held_out.GAIN, *around(SIDES[side]), measure="nll", comparison=comparison)
    text = told(story.held_out_gains(found, signalled(0.2)))
    assert text.count(f"(a {side})") == 2 and "Table 2 loses 2.2 %" in text
    one_by_one = Findings(pd.DataFrame())
    for comparison in marginal.COMPARED:
        one_by_one.set(marginal.GAIN, *around(SIDES[side]), comparison=comparison, budget=128)
    one_by_one.set(marginal.CHANGED, 0.2, budget=128)
    text = told(story.alone_gains(one_by_one, signalled(0.001, "alone_heads")))
    assert text.count(f"(a {side})") == 2 and "20% of the heads" in text and "holds a signal" in text
    assert "7.5 % with static thresholds" in text


def test_the_penalty_decides():
    rows = [
        {"log": "joint", "penalty": penalty, "threshold": penalty, "neutral": 0.5, "slope": slope}
        for penalty, slope in ((0, 0.1), (0.01, -0.1))
    ]
    text = told(story.penalties(Findings(pd.DataFrame(rows))))
    assert "changes its sign" in text and "0.0100 with 0.01" in text
    rows[1]["slope"] = 0.2
    assert "changes its sign" not in told(story.penalties(Findings(pd.DataFrame(rows))))
