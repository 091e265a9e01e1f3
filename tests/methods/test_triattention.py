"""TriAttention step by step against the paper's series, and live as in a replay."""

from __future__ import annotations

import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.live_runs import generate, prompt
from support.stepwise import LAYERS, inputs, never_comes_back, watched
from support.tensors import exact, sets, shaken

import kvlab
from kvlab.core.rotation import Rotation

FREQUENCIES = (1.0, 0.35, 0.1, 0.02, 0.004)  # a part of 16 channels


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("parameters", [dict(interval=6), dict(interval=1, reach=1), dict(interval=9, reach=64)])
def test_thirty_steps_as_the_plain_loop(heads, kv_heads, parameters):
    queries, keys, values = inputs(heads + kv_heads, heads, kv_heads, 40, 30)
    centres = 2 * torch.randn(LAYERS, heads, 1, 16, generator=torch.Generator().manual_seed(8))
    before, options = queries + centres, dict(budget=24, reach=65536) | parameters
    rotations = [Rotation(FREQUENCIES)] * LAYERS
    policy = kvlab.policy("triattention", **options)
    result, _ = watched(policy, (queries, keys, values), 40, rotations=rotations, pre_queries=before)

    def turn_back(key, position):
        return oracles.turned(key, -position, FREQUENCIES)

    for index in range(LAYERS):
        arrays = exact(before[index], keys[index])
        given = 40, options["budget"], options["interval"], FREQUENCIES, turn_back, options["reach"]
        expected = oracles.oracle_triattention(*arrays, *given)
        assert oracles.oracle_triattention(*shaken(*arrays), *given) == expected, "the test's input has near-ties"
        for step, (read, stored) in enumerate(expected):
            assert sets(result.kept(index, step)) == read, step
            assert sets(result.stored(index, step)) == stored, step
            assert all(len(positions) <= 24 for positions in stored)
        never_comes_back(result, index, 30)


@pytest.mark.parametrize("family", ["tiny-phi3", "hybrid-llama4"])
def test_live_it_keeps_what_a_replay_of_the_same_steps_keeps(tiny, family):
    lm, policy = tiny(family), kvlab.policy("triattention", budget=24, interval=5)
    trace = kvlab.capture(lm, prompt(60, seed=3), 0, policies=[policy])
    with kvlab.compress(lm.model, policy) as session:
        generate(lm.model, prompt(60, seed=3), 12)
    replay = kvlab.replay(trace, policy)
    for number in trace.layers:
        assert sets(session.kept_after_prefill(number)) == sets(replay.kept(number))
        kept = session.kept(number)
        assert 19 <= kept.shape[1] <= 24 and int(kept.max()) == 70


def test_layouts_and_factors_change_nothing_but_the_layout():
    """Neighbouring channels as pairs, and a factor: the same scores as of the same pairs apart."""
    queries, keys, values = inputs(3, 4, 2, 40)
    apart = torch.arange(16).view(2, 8).T.flatten()  # channel i of a pair and i + 8 become neighbours
    frequencies = tuple(0.5**i for i in range(8))
    policy = kvlab.policy("triattention", budget=20)

    def kept(order, rotation):
        tensors = [t[..., order] for t in (queries, keys)]
        given = dict(rotations=[rotation] * LAYERS, pre_queries=tensors[0] + 1)
        trace = kvlab.Trace.from_tensors(*tensors, values, 40, **given)
        return kvlab.replay(trace, policy).kept(0)

    same = torch.arange(16)
    assert kept(same, Rotation(frequencies)).equal(kept(apart, Rotation(frequencies, interleaved=True)))
    assert kept(same, Rotation(frequencies)).equal(kept(same, Rotation(frequencies, factor=1.5)))
