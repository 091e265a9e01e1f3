"""The measures against plain loops, and what must hold for any input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.tensors import exact, layer, sets

from kvlab.core import attention as measures_attention
from kvlab.core import ranking
from kvlab.core.ranking import top_positions
from kvlab.instruments import measures

SHAPES = [(6, 2), (4, 4), (4, 1)]  # grouped-query, multi-head, multi-query
quick = settings(max_examples=30, deadline=None)


def close(fast, slow, tolerance=2e-6):
    np.testing.assert_allclose(np.asarray(fast, dtype=np.float64), slow, atol=tolerance, rtol=0)


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
def test_attention_over_prompt_agrees(heads, kv_heads):
    queries, keys, _ = layer(1, heads, kv_heads, prompt=30, n=7)
    close(measures_attention.attention_over_prompt(queries, keys), oracles.attention_over_prompt(*exact(queries, keys)))
    inside = measures_attention.attention_over_prompt(
        queries, keys, inside=True
    )  # the last 7 tokens of the prompt themselves
    close(inside, oracles.attention_over_prompt(*exact(queries, keys), range(23, 30)))
    assert inside[:, 0, 24:].abs().max() == 0
    double = measures_attention.attention_over_prompt(2 * queries, keys, scaling=1 / 8)
    close(double, measures_attention.attention_over_prompt(queries, keys, scaling=1 / 4))


def gold_topk(queries, keys, k):
    return top_positions(measures.gold_scores(queries, keys), k)


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("k", [1, 5, 40])
def test_gold_topk_agrees(heads, kv_heads, k):
    queries, keys, _ = layer(2, heads, kv_heads, prompt=40, n=9)
    gold = gold_topk(queries, keys, k)
    assert gold.dtype == torch.int64 and gold.shape == (kv_heads, k)
    assert sets(gold) == oracles.gold_topk(*exact(queries, keys), k)


def test_gold_topk_takes_leading_dimensions_and_the_earlier_of_equals():
    queries, keys, _ = layer(3, prompt=20, n=5, layers=3)
    batched = gold_topk(queries, keys, 6)
    for i in range(3):
        assert sets(batched[i]) == oracles.gold_topk(*exact(queries[i], keys[i]), 6)
    equal = gold_topk(torch.zeros(1, 1, 4), torch.ones(1, 50, 4), 3)
    assert equal.tolist() == [[0, 1, 2]]


def test_top_positions_agrees_and_breaks_ties_by_position():
    generator = np.random.default_rng(0)
    scores = generator.integers(0, 4, size=(5, 200)).astype(float)  # many ties, at the cut too
    fast = ranking.top_positions(torch.tensor(scores), 37)
    assert fast.tolist() == [oracles.top_positions(row, 37) for row in scores]


def test_recall_agrees_on_padded_sets():
    kept = torch.tensor([[1, 4, 9, -1], [0, 2, 3, 8], [5, -1, -1, -1]])
    gold = torch.tensor([[4, 9, 11], [0, 1, 2], [6, 7, 8]])
    close(measures.recall(kept, gold), oracles.recall(sets(kept), sets(gold)))
    close(measures.recall(kept, gold), [2 / 3, 2 / 3, 0])
    batch = measures.recall(torch.stack([kept, kept.flip(0)]), torch.stack([gold, gold]))
    close(batch, [[2 / 3, 2 / 3, 0], [0, 2 / 3, 0]])


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
def test_mass_lost_and_entropy_agree(heads, kv_heads):
    queries, keys, _ = layer(4, heads, kv_heads, prompt=25, n=3)
    weights = measures_attention.attention_over_prompt(queries, keys)[:, -1]
    read = torch.tensor([[2, 5, 6, 24], [0, 1, -1, -1], [3, 4, 5, -1], [7, 20, -1, -1]][:kv_heads])
    close(measures.mass_lost(weights, read), oracles.mass_lost(exact(weights), sets(read)))
    close(measures_attention.entropy(weights), [oracles.entropy(row) for row in exact(weights)])


def test_entropy_of_a_point_and_of_a_uniform_row():
    close(measures_attention.entropy(torch.tensor([[0.0, 1, 0, 0], [0.25, 0.25, 0.25, 0.25]])), [0, np.log(4)])


def test_output_error_agrees():
    generator = torch.Generator().manual_seed(5)
    full, other = torch.randn(2, 6, 16, generator=generator)
    close(measures.output_error(full, other), oracles.output_error(*exact(full, other)))
    close(measures.output_error(full, torch.zeros_like(full)), np.ones(6))
    close(measures.output_error(full, full), np.zeros(6))


def test_query_similarity_agrees():
    a, b = torch.randn(2, 3, 6, 10, 16, generator=torch.Generator().manual_seed(6))
    cosines = measures.query_similarity(a, b)
    close(cosines.mean(), oracles.query_similarity(*exact(a, b)))
    close(cosines[2, 5, 9], oracles.query_similarity(*exact(a[2, 5, 9], b[2, 5, 9])))
    close(measures.query_similarity(a, -a), -1)


# What must hold for any input

shapes = st.sampled_from([(1, 1), (6, 2), (4, 4), (4, 1)])
seeds = st.integers(0, 10_000)


@st.composite
def sets_and_weights(draw):
    heads, kv_heads = draw(shapes)
    length = draw(st.integers(2, 30))
    queries, keys, _ = layer(draw(seeds), heads, kv_heads, prompt=length, n=2)
    weights = measures_attention.attention_over_prompt(queries, keys)[:, -1]
    small = draw(st.lists(st.integers(0, length - 1), unique=True, min_size=1, max_size=length))
    large = sorted({*small, *draw(st.lists(st.integers(0, length - 1)))})
    return weights, kv_heads, sorted(small), large


@quick
@given(sets_and_weights())
def test_keeping_more_never_loses_more(case):
    weights, kv_heads, small, large = case
    lost = [measures.mass_lost(weights, torch.tensor([kept] * kv_heads)) for kept in (small, large)]
    assert (lost[1] <= lost[0] + 1e-6).all()
    assert (lost[0] >= 0).all() and (lost[0] <= 1).all()
    everything = torch.arange(weights.shape[-1]).repeat(kv_heads, 1)
    assert measures.mass_lost(weights, everything).abs().max() < 1e-6


@quick
@given(sets_and_weights(), st.data())
def test_recall_is_a_share_and_grows_with_the_set(case, data):
    weights, kv_heads, small, large = case
    length = weights.shape[-1]
    gold = sorted(data.draw(st.lists(st.integers(0, length - 1), unique=True, min_size=1, max_size=length)))
    gold = torch.tensor([gold] * kv_heads)
    less, more = (measures.recall(torch.tensor([kept] * kv_heads), gold) for kept in (small, large))
    assert ((less >= 0) & (less <= more) & (more <= 1)).all()
    assert (measures.recall(gold, gold) == 1).all()


@quick
@given(shapes, seeds, st.integers(2, 30))
def test_permuting_heads_within_a_group_or_whole_groups_changes_nothing_else(shape, seed, length):
    heads, kv_heads = shape
    queries, keys, _ = layer(seed, heads, kv_heads, prompt=length, n=2)
    k = max(1, length // 3)
    gold = sets(gold_topk(queries, keys, k))
    attention = measures_attention.attention_over_prompt(queries, keys)
    size = heads // kv_heads
    within = torch.cat([torch.arange((g + 1) * size - 1, g * size - 1, -1) for g in range(kv_heads)])
    groups = torch.cat([torch.arange(g * size, (g + 1) * size) for g in reversed(range(kv_heads))])
    close(measures_attention.attention_over_prompt(queries[within], keys), attention[within])
    close(measures_attention.attention_over_prompt(queries[groups], keys.flip(0)), attention[groups])
    assert sets(gold_topk(queries[groups], keys.flip(0), k)) == gold[::-1]


@quick
@given(seeds, st.floats(0.1, 10))
def test_similarity_is_bounded_symmetric_and_one_with_itself(seed, factor):
    a, b, _ = layer(seed, heads=4, kv_heads=4, prompt=6)
    close(measures.query_similarity(a, factor * a), 1, 1e-5)
    there, back = measures.query_similarity(a, b), measures.query_similarity(b, a)
    close(there, back.numpy())
    assert there.shape == a.shape[:-1]
    assert -1 <= float(there.mean()) <= 1


@quick
@given(sets_and_weights())
def test_entropy_lies_between_zero_and_uniform(case):
    weights = case[0]
    found = measures_attention.entropy(weights)
    assert (found >= 0).all() and (found <= np.log(weights.shape[-1]) + 1e-6).all()


@quick
@given(sets_and_weights())
def test_lost_mass_is_half_the_l1_distance_to_the_renormalised_row(case):
    weights, kv_heads, kept, _ = case
    lost = measures.mass_lost(weights, torch.tensor([kept] * kv_heads))
    part = torch.zeros_like(weights)
    part[:, kept] = weights[:, kept] / weights[:, kept].sum(-1, keepdim=True)
    close(lost, (weights - part).abs().sum(-1) / 2, 1e-5)
