"""MorphKV's own tables: what they add up to."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvlab.analyses.morphkv import printed


def test_the_printed_tables_by_hand():
    found = printed.long_responses().metrics
    assert found["table2/gain_over_snapkv"] == pytest.approx((1 / 44 + 3 / 49 + 8 / 39) / 3)
    assert found["table2/gain_over_h2o"] == pytest.approx((1 / 44 + 2 / 50 + 5 / 42) / 3)
    assert found["table1/gain_over_snapkv"] == pytest.approx((1.8 / 67.7 + 0 + 0.9 / 63.8 - 3.5 / 68.4) / 4)
    assert found["table1/gain_over_snapkv/Mistral"] == 0
    assert found["table1/gain_over_snapkv/others"] == pytest.approx((1.8 / 67.7 + 0 + 0.9 / 63.8) / 3)
    assert found["table1/below_snapkv/Qwen"] == pytest.approx(3.5 / 68.4)
    assert found["table1/snapkv_from_full"] == pytest.approx((1.2 / 66.5 + 0.2 / 81.3 + 0.9 / 62.9 + 2.2 / 66.2) / 4)


def test_all_recomputed_numbers_stand_in_one_table():
    """What has no interval is its own."""
    table = printed.in_numbers(printed.long_responses(), printed.fusions())
    assert table.loc["table2/gain_over_snapkv/Qwen"].tolist() == pytest.approx([8 / 39] * 3)
    low, high = printed.fusions().intervals["table4/max_over_sum"]
    assert table.loc["table4/max_over_sum", ["low", "high"]].tolist() == [low, high]
    assert len(table) == 21 + 2 + 5


def test_what_the_rounding_of_printed_scores_may_move():
    """Whole numbers stand for half more or less, numbers with one decimal for a twentieth."""
    over, under = pd.Series([45, 52]), pd.Series([44, 49])
    assert printed.rounding(over, under) == pytest.approx((45.5 / 43.5 + 52.5 / 48.5) / 2 - (45 / 44 + 52 / 49) / 2)
    assert printed.rounding(pd.Series([1.5, 2.0]), pd.Series([1.0, 1.0])) == pytest.approx(3.6 / 0.95 / 2 - 1.75)
    assert printed.long_responses().metrics["table2/gain_over_h2o/inputs"] == pytest.approx(
        printed.rounding(pd.Series([45, 52, 47]), pd.Series([44, 50, 42]))
    )


def test_two_tasks_turn_table_3():
    found = printed.long_contexts()
    llama = [-1.1, 0.5, 1.0, 1.0, 0.3, 1.2, 0.0, -0.3, -0.1, -0.6, 0.2, 0.5, 0.0, -0.2, 1.0]
    assert found.metrics["table3/gain/Llama"] == pytest.approx(np.mean(llama))
    assert found.metrics["table3/gain_with_omitted/Llama"] == pytest.approx(np.mean([*llama, -15.5, -6.0]))
    assert found.metrics["table3/gain/Llama"] > 0 > found.metrics["table3/gain_with_omitted/Llama"]
    assert found.metrics["table3/share_not_worse_with_omitted/Llama"] == pytest.approx(10 / 17)
    assert found.metrics["table3/share_not_worse"] == pytest.approx(31 / 45)
    assert found.metrics["table3/share_not_worse/Llama"] == pytest.approx(sum(gain >= 0 for gain in llama) / 15)
    assert found.metrics["table3/share_higher"] == pytest.approx((8 + 9 + 10) / 45)
    assert found.metrics["table3/gain/mnews/least"] == pytest.approx(min(26.6 - 25.6, 26.6 - 26.0, 25.5 - 25.0))
    low, high = found.intervals["table3/share_not_worse"]
    assert low < 31 / 45 < high
    assert len(found.table) == 45 + 2 and found.table["printed"].sum() == 45


def test_table_4s_rows_say_the_opposite_of_its_text():
    found = printed.fusions()
    rows = found.table.query("table == 'table4'").set_index("what")["gain"]
    assert rows["qms"] == pytest.approx(0.6 / 22.9) and rows["trec"] == pytest.approx(-3 / 49) and len(rows) == 17
    assert found.metrics["table4/max_over_sum"] == pytest.approx(rows.mean()) and rows.mean() < 0
    assert found.metrics["table5/sum_over_max"] > 0
