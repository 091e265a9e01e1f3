"""The share of the gap from random eviction to an oracle that a policy closes: numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

import kvlab
from kvlab.methods._base.given_sets import GivenSets
from kvlab.replays.gaps import gaps_closed

WEIGHTS = (0.5, 0.3, 0.15, 0.05)
VALUES = (4.0, 2.0, 0.0, 8.0)


def by_hand() -> kvlab.Trace:
    """The case of docs/measures.md: four keys, one head, one step, whose own key weighs nothing."""
    keys = torch.tensor([*map(math.log, WEIGHTS), -100.0]).view(1, 1, 5, 1)
    values = torch.tensor([*VALUES, 0.0]).view(1, 1, 5, 1)
    return kvlab.Trace.from_tensors(torch.ones(1, 1, 5, 1), keys, values, 4, scaling=1.0)


def keeping(*positions: int, oracle: bool = False) -> GivenSets:
    return GivenSets(budget=len(positions), sets=torch.tensor([[positions]]), oracle=oracle)


def losses(kept: list[int]) -> tuple[float, float]:
    """Mass lost, and the relative error of the output, whose true value is 3."""
    mass = sum(WEIGHTS[position] for position in kept)
    return 1 - mass, abs(sum(WEIGHTS[position] * VALUES[position] for position in kept) / mass - 3) / 3


def test_a_policy_in_the_middle_closes_half_of_the_gap():
    random, snapkv, oracle, full = (
        kvlab.policy("random", budget=8),
        kvlab.policy("snapkv", budget=8, window=4),
        kvlab.policy("oracle_attention", budget=8),
        kvlab.policy("full"),
    )
    found = gaps_closed([(random, 8, 0.7), (snapkv, 8, 0.4), (oracle, 8, 0.1), (full, None, 0.0), (snapkv, 9, 0.2)])
    assert found[:3] == pytest.approx([0, 0.5, 1]) and all(map(math.isnan, found[3:]))
    assert gaps_closed([(random, 8, 0.7), (snapkv, 8, 1.0), (oracle, 8, 0.1)])[1] == pytest.approx(-0.5)
    # Neither without one of the two, nor where the oracle does no better.
    assert all(map(math.isnan, gaps_closed([(random, 8, 0.7), (snapkv, 8, 0.4)])))
    assert all(map(math.isnan, gaps_closed([(snapkv, 8, 0.4), (oracle, 8, 0.1)])))
    assert all(map(math.isnan, gaps_closed([(random, 8, 0.1), (snapkv, 8, 0.4), (oracle, 8, 0.1)])))


def test_seeds_are_averaged_and_sinks_and_the_best_oracle_count():
    drawn = [(kvlab.policy("random", budget=2, seed=seed), 2, loss) for seed, loss in enumerate((0.9, 0.5))]
    sinks = [(kvlab.policy("random", budget=2, seed=seed, sinks=1), 2, loss) for seed, loss in enumerate((0.6, 0.4))]
    ends = [(keeping(0, 1, oracle=True), 2, 0.2), (kvlab.policy("oracle_attention", budget=2), 2, 0.3)]
    mine = [(keeping(0, 3), 2, 0.35)]
    assert gaps_closed([*drawn, *ends, *mine])[-1] == pytest.approx((0.7 - 0.35) / (0.7 - 0.2))
    assert gaps_closed([*drawn, *sinks, *ends, *mine])[-1] == pytest.approx((0.5 - 0.35) / (0.5 - 0.2))


def test_replays_say_how_much_of_the_gap_each_policy_closes():
    draws = kvlab.replay([by_hand()], [kvlab.policy("random", budget=2, seed=seed) for seed in range(9)])
    random = next(draw.policy for draw in draws if draw.kept(0)[0].tolist() != [0, 1])
    oracle = kvlab.policy("oracle_attention", budget=2)
    found = kvlab.replay([by_hand()], [random, keeping(0, 2), oracle, kvlab.policy("full"), keeping(1)])
    drawn, best, mine = losses(found[0].kept(0)[0].tolist()), losses([0, 1]), losses([0, 2])
    assert best == pytest.approx((0.2, 0.25 / 3)) and mine == pytest.approx((0.35, 0.0769 / 3), abs=1e-4)
    assert found.summary["mass_gap_closed"].tolist()[:3] == pytest.approx(
        [0, (drawn[0] - 0.35) / (drawn[0] - 0.2), 1], abs=1e-5
    )
    # The gold set is no limit of the output's error: a policy goes beyond 1.
    error = found.summary["error_gap_closed"].tolist()
    assert error[1] == pytest.approx((drawn[1] - mine[1]) / (drawn[1] - best[1]), abs=1e-4) and error[1] > 1
    assert found.summary["mass_gap_closed"].isna().tolist() == [False, False, False, True, True]
    names = found.summary.columns.tolist()
    assert names.index("mass_gap_closed") == names.index("output_error") + 1
    assert "mass_gap_closed" in repr(found.summary)
    intervals = found.intervals.query("measure == 'mass_gap_closed'")
    assert intervals["value"].tolist() == pytest.approx(found.summary["mass_gap_closed"].tolist()[:3])


def test_replays_without_both_references_have_no_such_columns():
    for reference in (kvlab.policy("random", budget=2, seed=1), kvlab.policy("oracle_attention", budget=2)):
        policies = [reference, keeping(0, 2)]
        found = kvlab.replay([by_hand()], policies)
        assert not {"mass_gap_closed", "error_gap_closed"} & {*found.summary, *found.intervals["measure"]}


def test_each_trace_and_storage_is_compared_with_its_own_references(random_traces):
    budgets, names = [34, 48], ["random", "snapkv", "oracle_attention"]
    found = kvlab.replay(list(random_traces[:2]), names, budgets, storage=["as_is", "int8"])
    alone = kvlab.replay(random_traces[1], names, [48], storage=["int8"])
    table = found.summary.query("budget == 48 and storage == 'int8'")
    assert table["mass_gap_closed"].tolist()[3:] == pytest.approx(alone.summary["mass_gap_closed"].tolist())
    row = found.intervals.query("policy == 'snapkv' and budget == 48 and storage == 'int8'").set_index("measure")
    expected = table.query("policy == 'snapkv'")["mass_gap_closed"].mean()
    assert row.loc["mass_gap_closed", "value"] == pytest.approx(expected) and row.loc["mass_gap_closed", "traces"] == 2
