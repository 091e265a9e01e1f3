"""RocketKV's table 1 on a small random trace: every share is counted by hand from what the method must hold."""

from __future__ import annotations

import math

import pytest
from support.tensors import layer

from kvlab.analyses.rocketkv import common
from kvlab.errors import KvlabError
from kvlab.methods import policy
from kvlab.replays.run import replay
from kvlab.traces.trace import Trace

PROMPT, STEPS, LAYERS, HEADS, DIM = 600, 40, 2, 2, 16
TOTAL = PROMPT + STEPS
BUDGETS = (60, 160, 320)
ENTRY = 2 * DIM * 4  # a key and a value of 16 numbers in float32


@pytest.fixture(scope="module")
def small() -> Trace:
    return Trace.from_tensors(*layer(7, 4, HEADS, DIM, PROMPT, STEPS, layers=LAYERS), PROMPT)


@pytest.fixture(scope="module")
def table(small):
    return common.table_1(small, BUDGETS).table.set_index(["method", "budget"])


def full(step):
    """Entries of the full cache after a step, for each layer and head."""
    return PROMPT + step


def mean(values):
    values = list(values)
    return sum(values) / len(values)


STEP = range(1, STEPS + 1)
WHOLE = mean(full(t) for t in STEP)


def test_the_paper_s_formulas(table):
    assert list(table.index.get_level_values(0).unique()) == ["snapkv", "quest", "sparq", "rocketkv"]
    assert len(table) == 4 * len(BUDGETS)
    row = table.loc["rocketkv", 160]
    assert row["c"] == TOTAL / 160 == 4.0
    assert row["storage_paper"] == pytest.approx(1 / 2 + 2 / 4**0.75)
    assert row["storage_tensors"] == pytest.approx(1 / 2 + 1 / 4**0.75)
    assert row["traffic_paper"] == 1 / 4
    assert table.loc["quest", 160]["storage_paper"] == 1.25 and table.loc["sparq", 160]["storage_paper"] == 2
    assert table.loc["snapkv", 160]["storage_paper"] == 0.25
    assert (table["traffic_paper"] == 1 / table["c"]).all()
    assert (table["storage_tensors"] <= table["storage_paper"]).all()


def test_snapkv_leaves_room_for_the_response(table):
    assert math.isnan(table.loc["snapkv", 60]["storage_measured"]), "60 - 40 does not hold a window of 32"
    for budget in (160, 320):
        row = table.loc["snapkv", budget]
        share = mean(budget - STEPS + t for t in STEP) / WHOLE
        assert row["storage_measured"] == pytest.approx(share) == pytest.approx(row["traffic_measured"])
        assert row["storage_measured"] < row["storage_paper"]


def test_quest_stores_two_vectors_for_each_page(table):
    for budget in BUDGETS:
        page = max(16, math.ceil(TOTAL / (budget // 2)))
        pages = mean(math.ceil(full(t) / page) for t in STEP)
        # The maximum and the minimum of a page together weigh as much as one entry.
        assert table.loc["quest", budget]["storage_measured"] == pytest.approx(1 + pages / WHOLE)
        assert 1 < table.loc["quest", budget]["storage_measured"] < table.loc["quest", budget]["storage_paper"]


def test_sparq_copies_the_keys_only(table):
    # Beside the copy there is one running sum of the values.
    assert table.loc["sparq"]["storage_measured"].tolist() == pytest.approx([1.5 + 0.5 / WHOLE] * 3)


def test_rocketkv_stores_what_its_stages_say(table):
    for budget in BUDGETS:
        kept = max(math.isqrt(TOTAL * budget) - STEPS, 33)
        c2 = (kept + STEPS) / budget
        page = math.ceil(math.sqrt(c2))
        page = page if page <= c2 else 1
        stored = mean(kept + t + (math.ceil((kept + t) / page) if page > 1 else 0) for t in STEP)
        assert table.loc["rocketkv", budget]["storage_measured"] == pytest.approx(stored / WHOLE)
        assert table.loc["rocketkv", budget]["storage_measured"] < table.loc["rocketkv", budget]["storage_paper"]


def test_no_step_loads_more_than_its_budget_and_most_come_near(small):
    for method in ("quest", "sparq", "rocketkv"):
        for budget in BUDGETS:
            loaded = replay(small, policy(method, budget=budget)).read_bytes
            allowed = LAYERS * HEADS * budget * ENTRY
            assert (loaded <= allowed).all(), (method, budget, (loaded / allowed).max())
            assert loaded.mean() >= 0.6 * allowed, (method, budget)


def test_half_precision_changes_no_share_but_the_sum_s(small, table):
    half = Trace.from_tensors(small.queries.half(), small.keys.half(), small.values.half(), PROMPT)
    again = common.table_1(half, BUDGETS[:2]).table.set_index(["method", "budget"])
    for method in ("quest", "rocketkv"):
        for column in ("storage_measured", "traffic_measured"):
            assert again.loc[method][column].tolist() == pytest.approx(table.loc[method][column].tolist()[:2], rel=0.02)
    # The running sum stays in float32.
    assert again.loc["sparq"]["storage_measured"].tolist() == pytest.approx([1.5 + 1 / WHOLE] * 2)


def test_metrics_are_the_measured_shares(small):
    found = common.table_1(small, [160])
    rows = found.table.set_index("method")
    assert found.metrics["storage/quest/160"] == rows.loc["quest", "storage_measured"]
    assert found.metrics["traffic/rocketkv/160"] == rows.loc["rocketkv", "traffic_measured"]
    assert "storage/snapkv/60" not in common.table_1(small, [60]).metrics


def test_a_trace_without_a_response_is_refused():
    trace = Trace.from_tensors(*layer(7, 4, HEADS, DIM, PROMPT, layers=LAYERS), PROMPT)
    with pytest.raises(KvlabError, match="no response.*new_tokens"):
        common.table_1(trace, [160])
