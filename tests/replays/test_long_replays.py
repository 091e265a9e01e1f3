"""Replays of traces whose attention is too large to be kept: the same numbers, a layer and a few steps at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.live_runs import SMALL

import kvlab
from kvlab.core import attention
from kvlab.replays import reference as module
from kvlab.replays.reference import reference


@pytest.fixture
def widest(monkeypatch):
    """The most numbers of attention that were computed at once, and how many there were in all."""
    counted = []
    weights = attention.weights

    def counting(*given, **more):
        found = weights(*given, **more)
        counted.append(found.numel())
        return found

    monkeypatch.setattr(attention, "weights", counting)
    return counted


def numbers(trace):
    return trace.n_layers * trace.heads * trace.steps * trace.length


@pytest.fixture
def bounded(monkeypatch, random_traces):
    """bounded(share): a trace of which only that share of the attention may be kept, in whole layers."""

    def make(share):
        monkeypatch.setattr(module, "KEPT_BYTES", int(4 * share * numbers(random_traces[0])))
        return replace(random_traces[0])

    return make


POLICIES = [kvlab.policy(name, **SMALL[name]) for name in ("snapkv", "h2o", "quest", "morphkv", "zsmerge", "tova")]


@pytest.mark.parametrize("share", [0.9, 0.5, 0.001])
def test_what_is_not_kept_is_computed_again_and_is_the_same(random_traces, bounded, share):
    kept = [kvlab.replay(replace(random_traces[0]), policy, probes=["entropy", "mass_lost"]) for policy in POLICIES]
    trace = bounded(share)
    for policy, expected in zip(POLICIES, kept, strict=True):
        found = kvlab.replay(trace, policy, probes=["entropy", "mass_lost"])
        assert len(reference(trace)._rows) < trace.n_layers, "not all of it is kept"
        assert found.summary == pytest.approx(expected.summary, rel=1e-4)
        torch.testing.assert_close(found.mass_lost, expected.mass_lost, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(found.concentrated_loss, expected.concentrated_loss, atol=1e-6, rtol=1e-4)
        assert found.records.means == pytest.approx(expected.records.means, rel=1e-4)


@pytest.mark.parametrize("share, layers", [(1, 2), (0.9, 1), (0.5, 1), (0.4, 0)])
def test_a_layer_that_fits_is_computed_once_for_all_policies(bounded, widest, share, layers):
    """Of two layers that one policy after the other reads by what the model recorded."""
    trace = bounded(share)
    one = numbers(trace) // trace.n_layers
    side = reference(trace)
    for _ in range(4):
        for layer in range(trace.n_layers):
            side.weights(layer)
    assert trace.n_layers == 2 and sum(widest) == one * (layers + 4 * (2 - layers))
    assert side.cached_bytes == 4 * one * layers <= module.KEPT_BYTES


def test_steps_in_any_order_see_the_full_caches_attention(random_traces, bounded):
    trace = bounded(0.5)
    expected, side = reference(random_traces[0]), reference(trace)
    for step in (1, 20, 7, 8, 1, 13):
        torch.testing.assert_close(side.at(step), expected.at(step), atol=1e-6, rtol=1e-4)
        assert side.at(step).shape[-1] == random_traces[0].prompt_length + step


def test_attention_that_is_not_kept_is_computed_a_few_steps_at_a_time(bounded, widest):
    """A twelfth of all is one or two of the twenty steps; each pass over the steps computes each of them once."""
    trace = bounded(0.5)
    side = reference(trace)
    for step in range(1, trace.steps + 1):
        side.at(step)
    assert max(widest) <= numbers(trace) / 12 / trace.n_layers
    assert sum(widest) <= numbers(trace)


def test_a_policy_that_keeps_everything_remembers_no_positions(random_traces):
    result = kvlab.replay(random_traces[0], kvlab.policy("quest", **SMALL["quest"]))
    assert not any(isinstance(sets, torch.Tensor) for sets in result.stored_sets)
    for step in (0, 1, 20):
        everything = torch.arange(random_traces[0].prompt_length + step).expand(random_traces[0].kv_heads, -1)
        assert torch.equal(result.stored(1, step), everything)


def test_many_traces_together_hold_no_more_than_one_may(monkeypatch, random_traces):
    traces = [replace(random_traces[0]) for _ in range(4)]
    alone = kvlab.replay(traces[0], POLICIES[1])
    full = reference(traces[0]).cached_bytes
    assert full > 4 * numbers(traces[0])
    monkeypatch.setattr(module, "CACHE_BYTES", int(2.5 * full))
    first = kvlab.replay(traces, POLICIES, budgets=[12, 20])
    held = [reference(trace).cached_bytes for trace in traces]
    assert held[0] == 0 and sum(held) <= 2.5 * full and held[-1] > 0
    again = kvlab.replay(traces[0], POLICIES[1])
    for name in ("mass_lost", "output_error", "step_recall"):
        assert torch.equal(getattr(again, name), getattr(alone, name))
    assert len(first.table) and reference(traces[0]).cached_bytes == full
