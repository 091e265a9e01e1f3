"""Soft caps and learnt sinks: attention against plain loops, and the chunks of a long prompt against one matrix."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tensors import layer

from kvlab.core import attention
from kvlab.core.softmax import Softmax

HEADS, KV_HEADS = 4, 2
SINKS = torch.tensor([2.0, -1.0, 0.5, 4.0])
KINDS = {
    "plain": Softmax(0.3),
    "capped": Softmax(0.3, softcap=1.5),
    "sinks": Softmax(0.3, sinks=SINKS),
    "both": Softmax(0.3, 1.5, SINKS),
}


def row_by_hand(query, keys, softmax, head, bias=None):
    """Weights of one query `[d]` over `[n, d]` keys, number by number."""
    logits = [softmax.factor * math.fsum((query * key).tolist()) for key in keys]
    if softmax.softcap is not None:
        logits = [softmax.softcap * math.tanh(logit / softmax.softcap) for logit in logits]
    if bias is not None:
        logits = [logit + float(b) for logit, b in zip(logits, bias, strict=True)]
    powers = [math.exp(logit) for logit in logits]
    total = math.fsum(powers) + (0 if softmax.sinks is None else math.exp(float(softmax.sinks[head])))
    return torch.tensor([power / total for power in powers])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_a_plain_loop(kind):
    queries, keys, values = layer(1, HEADS, KV_HEADS, 8, prompt=13, n=5)
    bias = torch.randn(HEADS, 1, 13, generator=torch.Generator().manual_seed(2))
    found = attention.weights(queries, keys, KINDS[kind], attention.last_visible(5, 13), bias)
    mixed = attention.output(found, values)
    for head in range(HEADS):
        for i in range(5):
            seen = 9 + i
            row = row_by_hand(queries[head, i], keys[head // 2, :seen], KINDS[kind], head, bias[head, 0, :seen])
            torch.testing.assert_close(found[head, i, :seen], row, atol=1e-6, rtol=1e-5)
            assert not found[head, i, seen:].any()
            expected = (row[:, None] * values[head // 2, :seen]).sum(0)
            torch.testing.assert_close(mixed[head, i], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("n", [1, 7, 30])
def test_the_output_of_a_prompt_in_chunks_is_that_of_one_matrix(monkeypatch, kind, padded, n):
    monkeypatch.setattr(attention, "CHUNK", 4)
    parts = [layer(seed, HEADS, KV_HEADS, 8, prompt=30, n=n) for seed in (4, 5)]
    queries, keys, values = (torch.stack(x) for x in zip(*parts, strict=True))
    padding = torch.arange(30)[None] >= torch.tensor([[0], [6 if padded else 0]])
    found = attention.attend(queries, keys, values, KINDS[kind], padding if padded else None)
    visible = attention.last_visible(n, 30) & padding[:, None, None]
    rows = attention.output(attention.weights(queries, keys, KINDS[kind], visible), values)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[0], rows[0], atol=1e-5, rtol=1e-4)
    real = max(0, 6 - (30 - n)) if padded else 0  # the first query of the second row that is no padding
    torch.testing.assert_close(found[1, :, real:], rows[1, :, real:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_decides_who_sees_whom_in_chunks_too(monkeypatch, kind):
    monkeypatch.setattr(attention, "CHUNK", 3)
    queries, keys, values = layer(6, HEADS, KV_HEADS, 8, prompt=20, n=8)
    mask = torch.rand(8, 20, generator=torch.Generator().manual_seed(7)) < 0.5
    mask[:, 0] = True
    found = attention.attend(queries[None], keys[None], values[None], KINDS[kind], mask=mask)[0]
    expected = attention.output(attention.weights(queries, keys, KINDS[kind], mask), values)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_accumulated_attention_is_the_sum_of_all_rows(kind, chunk):
    queries, keys, _ = layer(8, HEADS, KV_HEADS, 8, prompt=33)
    found = attention.accumulate(queries, keys, KINDS[kind], chunk)
    expected = attention.weights(queries, keys, KINDS[kind], attention.last_visible(33, 33)).sum(1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_rows_of_layers_have_their_own_sinks():
    """In a replay the rows are layers, each with the sinks of its heads."""
    queries, keys, _ = layer(9, HEADS, KV_HEADS, 8, prompt=13, n=2, layers=2)
    softmax = Softmax(0.3, 1.5, torch.stack([SINKS, -SINKS]))
    together = attention.weights(queries, keys, softmax)
    for row in range(2):
        torch.testing.assert_close(together[row], attention.weights(queries[row], keys[row], softmax.row(row)))
    assert (together[0].sum(-1) - together[1].sum(-1)).abs().min() > 1e-3


def test_what_policies_are_told_is_a_number_where_that_is_all():
    assert Softmax(0.3).scaling == 0.3 and Softmax().scaling is None
    assert KINDS["capped"].scaling is KINDS["capped"] and Softmax.of(KINDS["both"]) is KINDS["both"]
    assert Softmax.of(0.25).factor == 0.25 and Softmax().scale(16) == 0.25


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(-60, 60),
    st.one_of(st.none(), st.floats(0.1, 50)),
    st.floats(0.01, 30),
)
def test_a_sink_is_one_more_key_without_a_value(seed, sink, softcap, factor):
    """The weights are those of a softmax over the keys and one more, whose logit the sink is; also for large logits."""
    queries, keys, _ = layer(seed, 2, 1, 4, prompt=9, n=3)
    found = attention.weights(queries, keys, Softmax(factor, softcap, torch.full((2,), sink)))
    logits = attention.logits(queries.double(), keys.double(), Softmax(factor, softcap))
    expected = torch.cat([logits, torch.full((2, 3, 1), sink, dtype=torch.float64)], -1).softmax(-1)
    torch.testing.assert_close(found.double(), expected[..., :-1], atol=1e-4, rtol=1e-3)
    assert (found.sum(-1) <= 1 + 1e-5).all() and (found >= 0).all()
    if softcap is not None:
        assert (logits.abs() <= softcap).all()
