"""Scissorhands, H2O and Keyformer: step by step against the plain loops, and what holds for any input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support import oracles
from support.cases import SHAPES, named
from support.refusals import refusal
from support.stepwise import LAYERS, agrees, begun, decided, inputs, never_comes_back, tensor, watched
from support.tensors import exact, layer, sets, with_attention

import kvlab
from kvlab.errors import KvlabError
from kvlab.methods._base.clock import decode

CASES = [
    ("scissorhands", dict(budget=24)),
    ("scissorhands", dict(budget=30, recent=0.2, history=0.6)),
    ("scissorhands", dict(budget=60)),  # a prompt of 40 fills it while decoding
    ("h2o", dict(budget=16)),
    ("h2o", dict(budget=21, heavy=0.8)),
    ("h2o", dict(budget=60)),
    ("keyformer", dict(budget=16)),
    ("keyformer", dict(budget=21, recent=0.3, tau_start=0.5, tau_end=4.0, seed=3)),
    ("keyformer", dict(budget=24, noise=False)),
    ("keyformer", dict(budget=60)),
]
NAMES = ["scissorhands", "h2o", "keyformer"]


def newest(policy):
    """How many of the newest entries the policy never evicts."""
    if policy.name == "h2o":
        return max(1, policy.budget - max(1, int(policy.heavy * policy.budget)))
    return max(1, int(policy.recent * policy.budget))


def accumulated(queries, keys, prompt):
    """What a trace carries for H2O, `[layers, heads, prompt]`, from the oracle."""
    return tensor([oracles.accumulated_attention(*exact(q, k), prompt) for q, k in zip(queries, keys)])


def run_of(policy, prompt, layer_index=0):
    """The policy's oracle as a function of queries, keys and values of one layer."""
    parameters = dict(policy)
    if policy.name == "keyformer":
        noisy, _ = parameters.pop("noise"), parameters.pop("seed")

    def run(queries, keys, values):
        more = {}
        if policy.name == "keyformer" and noisy:
            more["gumbel"] = exact(policy.gumbel((layer_index,), len(queries), 0, keys.shape[1]))[0]
        return getattr(oracles, f"oracle_{policy.name}")(queries, keys, values, prompt, **parameters, **more)

    return run


def holds(policy, seed, heads, kv_heads, prompt, steps, size=1e-5):
    tensors = inputs(seed, heads, kv_heads, prompt, steps)
    more = dict(accumulated=accumulated(*tensors[:2], prompt)) if policy.name == "h2o" else {}
    result, watch = watched(policy, tensors, prompt, **more)
    for index in range(LAYERS):
        agrees(result, watch, index, decided(run_of(policy, prompt, index), [t[index] for t in tensors], size))
        never_comes_back(result, index, steps)


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("prompt", [40, 150])
def test_sixty_steps_go_as_the_oracle_says(case, heads, kv_heads, prompt):
    holds(kvlab.policy(case[0], **case[1]), prompt + heads + kv_heads, heads, kv_heads, prompt, 60)


@pytest.mark.parametrize(
    "name, parameters", [("scissorhands", dict(budget=100)), ("h2o", dict(budget=100)), ("keyformer", dict(budget=100))]
)
def test_a_prompt_of_1500(name, parameters):
    holds(kvlab.policy(name, **parameters), 5, 4, 2, 1500, 50, size=1e-6)


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
def test_keep_of_a_batch_is_the_oracles_prefill(case, heads, kv_heads):
    policy = kvlab.policy(case[0], **case[1])
    tensors = inputs(heads + kv_heads, heads, kv_heads, 90)
    more = dict(accumulated=accumulated(*tensors[:2], 90)) if policy.name == "h2o" else {}
    kept = policy.keep(*tensors, **more)
    assert kept.dtype == torch.int64
    for row in range(2):
        assert sets(kept[row]) == decided(run_of(policy, 90), [t[row] for t in tensors])[0]["stored"]


def test_scissorhands_needs_its_history_only():
    queries, keys, values = inputs(1, 4, 2, 90)
    policy = kvlab.policy("scissorhands", budget=24, history=0.5)
    assert policy.observes == 12
    assert policy.keep(queries[:, :, -12:], keys, values).equal(policy.keep(queries, keys, values))


@pytest.mark.parametrize("name", NAMES)
def test_a_fraction_is_its_number_of_entries(name):
    tensors = inputs(2, 4, 2, 90)
    more = dict(accumulated=accumulated(*tensors[:2], 90))
    found, expected = (kvlab.policy(name, budget=b).keep(*tensors, **more) for b in (0.25, 22))
    assert found.equal(expected)


# The oracles by hand


def test_scissorhands_counts_by_hand():
    """Five tokens, a history of two queries: 1 is below average twice, 0 and 2 once; of equals the later goes."""
    rows = np.eye(5)
    rows[3, :4] = [0.3, 0.1, 0.3, 0.3]  # average 1/4
    rows[4, :5] = [0.1, 0.1, 0.1, 0.35, 0.35]  # average 1/5
    queries, keys = with_attention(rows)
    kept = {
        budget: oracles.oracle_scissorhands(queries, keys, keys, 5, budget, recent=0.5, history=2.001 / budget)
        for budget in (2, 3, 4)
    }
    assert [steps[0]["stored"][0] for steps in kept.values()] == [[3, 4], [0, 3, 4], [0, 2, 3, 4]]


def test_h2o_by_hand():
    """Accumulated: 1.6, 0.7 and 0.7 of the first three; the heaviest stays beside the newest."""
    queries, keys = with_attention([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.1, 0.2, 0.7, 0], [0.1, 0.1, 0.1, 0.7]])
    np.testing.assert_allclose(oracles.accumulated_attention(queries[:, :3], keys[:, :3], 3), [[1.6, 0.7, 0.7]])
    steps = oracles.oracle_h2o(queries, keys, keys, 3, budget=2)
    assert [step["stored"][0] for step in steps] == [[0, 2], [0, 3]]
    assert steps[1]["read"] == [[0, 2, 3]]


def test_keyformers_noise_and_temperature_by_hand():
    rows = [[1, 0, 0], [0.5, 0.5, 0], [0.6, 0.3, 0.1]]
    queries, keys = with_attention(rows)
    noise = np.log([[1.0, 4.0, 1.0]])
    gathered = oracles.accumulated_attention(queries, keys, 3, noise, tau=1.0)
    np.testing.assert_allclose(gathered, [[1 + 0.2 + 0.6 / 1.9, 0.8 + 1.2 / 1.9, 0.1 / 1.9]], atol=1e-12)
    hot = oracles.attention_row(queries[0, 2], keys[0], tau=2.0)
    np.testing.assert_allclose(hot, np.sqrt([0.6, 0.3, 0.1]) / np.sqrt([0.6, 0.3, 0.1]).sum())


# What holds for any input


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    shape=st.sampled_from([(1, 1), (6, 2), (4, 1)]),
    seed=st.integers(0, 999),
    prompt=st.integers(1, 50),
    steps=st.integers(1, 12),
    budget=st.integers(4, 60),
)
def test_the_budget_is_filled_and_never_exceeded_and_the_newest_stay(name, shape, seed, prompt, steps, budget):
    tensors = layer(seed, *shape, head_dim=4, prompt=prompt, new=steps, layers=1)
    policy = kvlab.policy(name, budget=budget)
    result, _ = watched(policy, tensors, prompt, accumulated=accumulated(*tensors[:2], prompt))
    for t in range(steps + 1):
        for stored in sets(result.stored(0, t)):
            assert len(stored) == min(budget, prompt + t)
            recent = min(newest(policy), prompt + t)
            assert stored[-recent:] == list(range(prompt + t - recent, prompt + t))
    never_comes_back(result, 0, steps)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [70, 71, 1000])
def test_a_budget_of_everything_is_full_attention(name, budget):
    tensors = inputs(3, 4, 2, 50, 20)
    result, _ = watched(kvlab.policy(name, budget=budget), tensors, 50, accumulated=accumulated(*tensors[:2], 50))
    assert sets(result.stored(1, 20)) == [list(range(70))] * 2
    assert result.mass_lost.max() < 1e-6 and result.output_error.max() < 1e-6


def test_h2o_never_forgets_and_scissorhands_does():
    """The prompt looks at token 2 alone, the response at the ten newest alone."""
    n, prompt = 60, 20
    rows = np.eye(n)
    rows[2:prompt] = np.eye(n)[2]
    for i in range(prompt, n):
        rows[i, i - 9 : i + 1] = 0.1
    queries, keys = with_attention(rows)
    tensors = [tensor(x)[None] for x in (queries, keys, keys)]
    more = dict(accumulated=accumulated(*tensors[:2], prompt))
    stored = {
        name: sets(watched(kvlab.policy(name, budget=10), tensors, prompt, **more)[0].stored(0, n - prompt))[0]
        for name in ("h2o", "scissorhands")
    }
    assert 2 in stored["h2o"] and 2 not in stored["scissorhands"]


# Keyformer's noise


def test_the_noise_is_gumbels():
    noise = kvlab.policy("keyformer", budget=16).gumbel((0, 1), 4, 0, 5000)
    assert noise.shape == (2, 4, 5000) and noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(np.euler_gamma, abs=0.03)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, abs=0.08)
    assert stats.kstest(noise[1, 2].numpy(), "gumbel_r").pvalue > 0.001


def test_the_noise_depends_on_seed_layer_head_and_position_alone():
    policy = kvlab.policy("keyformer", budget=16, seed=7)
    whole = policy.gumbel((0, 1, 2), 4, 0, 3000)
    assert policy.gumbel((0, 1, 2), 4, 0, 3000).equal(whole)
    for start, stop in [(0, 1), (0, 999), (255, 257), (1023, 1025), (1500, 3000), (2999, 3000), (40, 40)]:
        assert policy.gumbel((0, 1, 2), 4, start, stop).equal(whole[:, :, start:stop]), (start, stop)
    assert policy.gumbel((2,), 4, 10, 50).equal(whole[2:, :, 10:50])
    assert policy.gumbel((1, 1), 4, 10, 50).equal(whole[[1, 1], :, 10:50])
    assert not kvlab.policy("keyformer", budget=16, seed=8).gumbel((0, 1, 2), 4, 0, 3000).equal(whole)
    rows = whole.flatten(0, 1)
    assert (torch.corrcoef(rows) - torch.eye(12)).abs().max() < 0.1  # standard error 0.018


def test_a_seed_decides_what_keyformer_keeps():
    tensors = inputs(6, 4, 2, 120)

    def kept(**parameters):
        return kvlab.policy("keyformer", budget=30, **parameters).keep(*tensors)

    assert kept(seed=1).equal(kept(seed=1)) and not kept(seed=1).equal(kept(seed=2))
    assert kept(seed=1, noise=False).equal(kept(seed=2, noise=False))


def test_keyformer_without_noise_and_with_tau_1_is_h2o():
    tensors = inputs(8, 8, 2, 80, 50)
    h2o, _ = watched(kvlab.policy("h2o", budget=20), tensors, 80, accumulated=accumulated(*tensors[:2], 80))
    keyformer, _ = watched(kvlab.policy("keyformer", budget=20, noise=False, tau_end=1.0), tensors, 80)
    for t in range(51):
        assert sets(h2o.stored(1, t)) == sets(keyformer.stored(1, t))


@pytest.mark.parametrize("announced", [0, 15])
def test_keyformers_temperature_stays_at_its_end_beyond_what_was_announced(announced):
    policy = kvlab.policy("keyformer", budget=20, recent=0.2, tau_start=0.3, tau_end=5.0)
    tensors = inputs(9, 4, 2, 50, 50)
    gumbel = exact(policy.gumbel((0, 1), 4, 0, 100))
    expected = [
        oracles.oracle_keyformer(*exact(*(t[i] for t in tensors)), 50, 20, gumbel[i], 0.2, 0.3, 5.0, announced)
        for i in range(LAYERS)
    ]
    store = begun(policy, tensors, 50, announced, accumulated=accumulated(*tensors[:2], 50))
    for t in range(1, 51):
        step_of(policy, store, tensors, 50 + t - 1)
        assert [sets(row) for row in store.positions] == [steps[t]["stored"] for steps in expected], f"step {t}"


# Several tokens at once


def step_of(policy, store, tensors, position):
    attended = decode(policy, store, *(t[:, :, position : position + 1] for t in tensors), None, weigh=True)
    policy.step(store, attended.weights)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("together", [1, 5, 40])
def test_a_turn_that_leaves_many_too_many_is_brought_down_by_the_next_step(name, together):
    policy, tensors = kvlab.policy(name, budget=20), inputs(10, 4, 2, 100)
    store = begun(policy, tensors, 50, accumulated=accumulated(*tensors[:2], 50))
    store.append(*(t[:, :, 50 : 50 + together] for t in tensors[1:]))
    before = [sets(row) for row in store.positions]
    step_of(policy, store, tensors, 50 + together)
    for old, row in zip(before, store.positions, strict=True):
        for previous, stored in zip(old, sets(row), strict=True):
            assert len(stored) == 20 and set(stored) <= {*previous, 50 + together}
            assert stored[-10:][-together - 1 :] == list(range(50, 51 + together))[-10:]
    step_of(policy, store, tensors, 51 + together)
    assert store.positions.shape == (2, 2, 20)


# What cannot be


def refused(name, tensors=None, **parameters):
    tensors, accumulated = inputs(9, 4, 2, 60) if tensors is None else tensors, torch.ones(2, 4, 60)
    return refusal(lambda: kvlab.policy(name, **parameters).keep(*tensors, accumulated=accumulated))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [0, 1, -3, 0.0, 1.5, True, "many"])
def test_a_budget_that_is_none(name, budget):
    assert "budget" in refused(name, budget=budget)


@pytest.mark.parametrize(
    "name, parameters, said",
    [
        ("scissorhands", dict(recent=1.5), "recent"),
        ("scissorhands", dict(recent=-0.1), "recent"),
        ("scissorhands", dict(history=-1.0), "history"),
        ("h2o", dict(heavy=1.5), "heavy"),
        ("h2o", dict(heavy=-0.1), "heavy"),
        ("keyformer", dict(recent=2.0), "recent"),
        ("keyformer", dict(tau_start=0.0), "tau_start"),
        ("keyformer", dict(tau_end=-1.0), "tau_end"),
        ("keyformer", dict(tau_end=float("nan")), "tau_end"),
        ("keyformer", dict(seed="x"), "seed"),
        ("keyformer", dict(noise="yes"), "noise"),
    ],
)
def test_bad_parameters_are_named(name, parameters, said):
    assert said in refused(name, budget=20, **parameters)


def test_h2o_without_accumulated_attention_says_so():
    queries, keys, values = inputs(9, 4, 2, 60)
    with pytest.raises(KvlabError, match="accumulate"):
        kvlab.policy("h2o", budget=16).keep(queries, keys, values)
    with pytest.raises(KvlabError, match="accumulate"):
        kvlab.replay(kvlab.Trace.from_tensors(queries, keys, values, 50), kvlab.policy("h2o", budget=16))


@pytest.mark.parametrize(
    "name, parameters, need", [("scissorhands", dict(budget=24, history=0.5), 12), ("keyformer", dict(budget=24), 60)]
)
def test_too_few_prompt_queries(name, parameters, need):
    queries, keys, values = inputs(9, 4, 2, 60)
    sentence = refused(name, (queries[:, :, -11:], keys, values), **parameters)
    assert str(need) in sentence and "11" in sentence
