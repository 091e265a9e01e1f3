"""LaCache's ladder: where its rungs stand in each layer."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.layer_budgets import kept_sets, model, replayed
from support.tensors import layer, sets

import kvlab


@settings(max_examples=100, deadline=None)
@given(
    layers=st.integers(1, 33),
    budget=st.integers(12, 60),
    length=st.integers(12, 200),
    sinks=st.integers(0, 5),
    recent=st.sampled_from([0.1, 0.25, 0.5]),
    span=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    overlap=st.sampled_from([0.0, 0.25, 0.5]),
)
def test_the_ladder_climbs_from_the_first_token_to_the_last(layers, budget, length, sinks, recent, span, overlap):
    queries, keys, values = layer(14, 1, 1, head_dim=2, prompt=length, n=1, layers=1)
    parameters = dict(sinks=sinks, recent=recent, span=span, overlap=overlap)
    policy = kvlab.policy("lacache", budget=budget, **parameters)
    kept = [sets(policy.keep(queries, keys, values, layer=i, n_layers=layers)[0])[0] for i in range(layers)]
    assert kept == [oracles.lacache_layer(i, layers, length, budget, **parameters) for i in range(layers)]
    last = max(1, int(recent * budget))
    assert all(
        row[:sinks] == list(range(min(sinks, length)))
        and row[-last:] == list(range(length))[-last:]
        and len(row) == min(budget, length)
        for row in kept
    )
    if length > budget:
        starts = [row[sinks] for row in kept]
        assert starts == sorted(starts) and starts[0] == sinks
        rungs = len(set(starts))
        if rungs > 1:
            assert kept[-1][-last - 1] == length - last - 1
        middle, width = length - sinks - last, budget - sinks - last
        if rungs * width >= middle:  # then nothing falls between two rungs
            assert set().union(*kept) == set(range(length))


def test_neighbouring_rungs_overlap():
    tensors = model(15, 1, 1, 100, layers=8, n=1)
    kept = [set(heads[0]) for heads in kept_sets(replayed(tensors, 100, "lacache", budget=40))]
    for lower, upper in zip(kept, kept[1:]):
        assert len(lower & upper) > 4 + 10  # more than the sinks and the recent tokens
        assert lower != upper
    assert set().union(*kept) == set(range(100))
