"""CompilerKV against its oracle: utility, head table, risk table, and the correction to the budget."""

import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.tensors import exact, layer, sets, shaken

import kvlab
from kvlab.errors import KvlabError
from kvlab.methods import Prompt

SHAPES = [(8, 2), (4, 4), (4, 1)]  # grouped-query, multi-head, multi-query
SMALL = dict(window=16, utility_window=8)
ENTROPIES, PERPLEXITIES = (2, 10), (1, 100)


def model(seed, heads=8, kv_heads=2, prompt=60, layers=3, new=0, n=None):
    return layer(seed, heads, kv_heads, prompt=prompt, layers=layers, new=new, n=n)


def trace_of(tensors, prompt, perplexity=None):
    """`perplexity` of the last prompt tokens, whatever their number."""
    found = kvlab.Trace.from_tensors(*tensors, prompt)
    if perplexity is not None:
        found.nll = torch.full((prompt,), float(np.log(perplexity)))
    return found


def kept_sets(result, step=0):
    return [sets(result.kept(index, step)) for index in range(result.trace.n_layers)]


def quietly(trace, **parameters):
    """Replay, without the warning that neutral tables give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kept_sets(kvlab.replay(trace, kvlab.policy("compilerkv", **parameters)))


def decided(tensors, prompt, **parameters):
    """The oracle's sets; the input must decide clearly, so the same with a little noise."""
    arrays = exact(*tensors)
    kept = oracles.oracle_compilerkv(*arrays, prompt, **parameters)
    noisy = oracles.oracle_compilerkv(*shaken(*arrays), prompt, **parameters)
    assert noisy == kept, "the test's input has near-ties"
    return kept


def random_weights(layers, heads, seed=0):
    return np.round(np.random.default_rng(seed).uniform(0.2, 2, (layers, heads)), 3).tolist()


def flat(layers, threshold, bins=(20, 4)):
    return np.full((layers, *bins), threshold).tolist()


def tables(folder, layers, heads, weights=None, risk=None, **more):
    """A table file; what is not given is neutral."""
    content = (
        dict(
            model="tensors",
            heads=weights or np.ones((layers, heads)).tolist(),
            risk=risk or flat(layers, 0.0),
            entropy=list(ENTROPIES),
            perplexity=list(PERPLEXITIES),
        )
        | more
    )
    path = folder / "tables.json"
    path.write_text(json.dumps(content))
    return str(path)


# Neutral tables


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize(
    "length, parameters",
    [
        (40, dict(budget=10, **SMALL)),
        (90, dict(budget=30, **SMALL)),
        (90, dict(budget=30, kernel=1, **SMALL)),
        (90, dict(budget=20, kernel=7, **SMALL)),
        (90, dict(budget=20, kernel=3, **SMALL)),
        (40, dict(budget=20, window=64, utility_window=32)),
        (90, dict(budget=30, window=8, utility_window=8)),
    ],
)
def test_neutral_tables_keep_what_the_oracle_keeps(heads, kv_heads, length, parameters):
    tensors = model(length + kv_heads, heads, kv_heads, length)
    assert quietly(trace_of(tensors, length), **parameters) == decided(tensors, length, **parameters)


def test_the_default_windows():
    tensors = model(2, 4, 2, 110, n=64)
    found = quietly(trace_of(tensors, 110), budget=40)
    assert found == decided(tensors, 110, budget=40, window=64, utility_window=32)


@pytest.mark.parametrize("length, budget", [(600, 100), (1500, 200)])
def test_a_long_prompt(length, budget):
    tensors = model(length, 4, 1, length, n=8, layers=2)
    parameters = dict(budget=budget, window=8, utility_window=4)
    assert quietly(trace_of(tensors, length), **parameters) == decided(tensors, length, **parameters)


def test_neutral_tables_say_so_once():
    trace = trace_of(model(3), 60)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        kvlab.replay(trace, kvlab.policy("compilerkv", budget=20, **SMALL))
    said = [str(w.message) for w in found if "compilerkv" in str(w.message).lower()]
    assert len(said) == 1 and "tables" in said[0]


def test_a_table_file_is_no_reason_to_warn(tmp_path):
    path = tables(tmp_path, 3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = kvlab.replay(trace_of(model(3), 60, 5.0), kvlab.policy("compilerkv", budget=20, tables=path, **SMALL))
    assert kept_sets(found) == quietly(trace_of(model(3), 60), budget=20, **SMALL)


def test_the_heads_of_a_layer_share_one_set():
    for heads in quietly(trace_of(model(4, 8, 4), 60), budget=20, **SMALL):
        assert all(kept == heads[0] for kept in heads)


def test_layers_differ_by_their_values_alone():
    """Attention is averaged over all layers (eq. 6), so that equal values give equal sets."""
    queries, keys, values = model(5)
    trace = trace_of((queries, keys, values[:1].expand_as(values)), 60)
    found = quietly(trace, budget=20, **SMALL)
    assert found[0] == found[1] == found[2] != quietly(trace_of((queries, keys, values), 60), budget=20, **SMALL)[1]


def test_every_generated_token_stays():
    tensors = model(6, new=4)
    with pytest.warns(UserWarning, match="neutral"):
        result = kvlab.replay(trace_of(tensors, 60), kvlab.policy("compilerkv", budget=20, **SMALL))
    assert kept_sets(result, 4) == [[[*kept, 60, 61, 62, 63] for kept in heads] for heads in kept_sets(result)]


def test_measures_of_a_replay(tmp_path):
    tensors, risk = model(19, new=6), [flat(1, t)[0] for t in (0.0, 0.7, 0.8)]
    trace, path = trace_of(tensors, 60, 5.0), tables(tmp_path, 3, 8, risk=risk)
    result = kvlab.replay(trace, kvlab.policy("compilerkv", budget=20, tables=path, **SMALL))
    kept = decided([t[:, :, :60] for t in tensors], 60, budget=20, risk=risk, perplexity=5.0, **SMALL)
    assert kept_sets(result) == kept and len({len(heads[0]) for heads in kept}) == 3
    expected = []
    for arrays, sets_of in zip(zip(*exact(*tensors)), kept):
        run = oracles.simulate(*arrays, 60, lambda g: oracles.taken(*arrays[1:], g, sets_of[g]))
        expected.append(oracles.replay_measures(*arrays, 60, run, 20))
    for measure in ("recall", "step_recall", "mass_lost", "output_error"):
        assert result.summary[measure] == pytest.approx(np.mean([e[measure] for e in expected]), abs=1e-5), measure
    entries = sum(2 * len(heads[0]) for heads in kept)
    assert result.stored_bytes.tolist() == [(entries + 6 * t) * 2 * 16 * 4 for t in range(1, 7)]


def test_sequences_of_a_batch_are_planned_for_apart(tmp_path):
    """As in a live run: surveys of one layer after the other, each of two sequences, then one plan."""
    sequences, perplexities = [model(seed) for seed in (20, 21)], (5.0, 50.0)
    risk = np.zeros((3, 20, 4))
    risk[..., 2:] = 0.8  # perplexity 50 is gated, 5 is not
    policy = kvlab.policy("compilerkv", budget=20, tables=tables(tmp_path, 3, 8, risk=risk.tolist()), **SMALL)
    prompts = [
        Prompt(
            *(torch.stack([one[part][index] for one in sequences]) for part in range(3)),
            (index, index),
            3,
            perplexity=torch.tensor(perplexities),
        )
        for index in range(3)
    ]
    plan = policy.plan(torch.stack([policy.survey(prompt) for prompt in prompts]), prompts[0])
    found = [policy.prefill(prompt.with_plan(plan[index])) for index, prompt in enumerate(prompts)]
    for row, tensors in enumerate(sequences):
        expected = decided(tensors, 60, budget=20, risk=risk.tolist(), perplexity=perplexities[row], **SMALL)
        assert [sets(kept[row]) for kept in found] == expected
        assert all((len(heads[0]) < 20) == (row == 1) for heads in expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    tensors = [t.to(dtype) for t in model(22, prompt=70)]
    found = quietly(trace_of(tensors, 70), budget=20, **SMALL)
    assert found == decided([t.float() for t in tensors], 70, budget=20, **SMALL)


def test_a_short_prompt_has_a_shorter_window(tmp_path):
    """Of a prompt within the window all tokens but the first have a likelihood."""
    tensors = model(23, prompt=40)
    trace, path = trace_of(tensors, 40), tables(tmp_path, 3, 8, risk=flat(3, 0.7))
    trace.nll = torch.full((39,), 2.0)
    found = quietly(trace, budget=20, tables=path)
    assert found == decided(tensors, 40, budget=20, risk=flat(3, 0.7), perplexity=np.exp(2.0))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), budgets=st.lists(st.integers(1, 60), min_size=2, max_size=3, unique=True).map(sorted))
def test_sets_are_nested_as_the_budget_grows(seed, budgets):
    trace = trace_of(model(seed, 2, 2, n=16), 60)
    found = [quietly(trace, budget=b, **SMALL) for b in budgets]
    for smaller, larger in zip(found, found[1:]):
        assert all(set(a[0]) < set(b[0]) for a, b in zip(smaller, larger))


@pytest.mark.parametrize("length, budget", [(50, 50), (50, 1000), (50, 1.0), (6, 40), (1, 33)])
def test_a_budget_of_the_prompt_or_more_keeps_everything(length, budget):
    assert quietly(trace_of(model(7, prompt=length), length), budget=budget) == [[list(range(length))] * 2] * 3


def test_one_layer_alone_cannot_decide():
    queries, keys, values = layer(8, prompt=80, layers=1)
    with warnings.catch_warnings(), pytest.raises(KvlabError, match="replay"):
        warnings.simplefilter("ignore")
        kvlab.policy("compilerkv", budget=40).keep(queries, keys, values)


# The head table


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
def test_head_weights_change_what_is_kept(tmp_path, heads, kv_heads):
    tensors, weights = model(9, heads, kv_heads, 70), random_weights(3, heads)
    weights[1][heads - 1] = 20.0  # one head of the second layer rules
    parameters = dict(budget=25, **SMALL)
    found = quietly(trace_of(tensors, 70), tables=tables(tmp_path, 3, heads, weights), **parameters)
    assert found == decided(tensors, 70, heads=weights, **parameters)
    neutral = quietly(trace_of(tensors, 70), **parameters)
    if kv_heads > 1:
        assert found != neutral
    else:
        assert found == neutral  # one KV head has one utility: weights scale it


def test_head_weights_with_pooling(tmp_path):
    tensors, weights = model(10, prompt=80), random_weights(3, 8, seed=1)
    found = quietly(trace_of(tensors, 80), budget=25, kernel=7, tables=tables(tmp_path, 3, 8, weights), **SMALL)
    assert found == decided(tensors, 80, budget=25, kernel=7, heads=weights, **SMALL)


# The risk table


@pytest.mark.parametrize("threshold", [0.02, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("pad", ["none", "budget"])
def test_a_threshold_keeps_its_candidates_or_pads_up(tmp_path, threshold, pad):
    tensors = model(11, prompt=80)
    path = tables(tmp_path, 3, 8, risk=flat(3, threshold))
    found = quietly(trace_of(tensors, 80, 5.0), budget=30, pad=pad, tables=path, **SMALL)
    assert found == decided(tensors, 80, budget=30, pad=pad, risk=flat(3, threshold), perplexity=5.0, **SMALL)
    sizes = [len(heads[0]) for heads in found]
    if pad == "budget":
        assert sizes == [30] * 3 and found == quietly(trace_of(tensors, 80), budget=30, **SMALL)
    elif threshold >= 0.7:
        assert max(sizes) < 30 and min(sizes) >= 1  # eq. 16: fewer candidates than the budget are kept
    if pad == "none" and threshold == 1.0:
        assert sizes == [1] * 3  # the scores are divided by their maximum


def test_layers_may_keep_different_numbers(tmp_path):
    tensors, risk = model(12, prompt=80), [flat(1, t)[0] for t in (0.0, 0.6, 0.8)]
    path = tables(tmp_path, 3, 8, risk=risk)
    found = quietly(trace_of(tensors, 80, 5.0), budget=30, tables=path, **SMALL)
    assert found == decided(tensors, 80, budget=30, risk=risk, perplexity=5.0, **SMALL)
    sizes = [len(heads[0]) for heads in found]
    assert sizes[0] == 30 > sizes[1] > sizes[2]


@pytest.mark.parametrize(
    "perplexity, expected",
    [
        (0.5, 0),
        (1.0, 0),
        (3.1, 0),
        (3.2, 1),
        (9.9, 1),
        (10.1, 2),
        (31.6, 2),
        (31.7, 3),
        (99.0, 3),
        (100.0, 3),
        (5000.0, 3),
    ],
)
def test_perplexity_bins_are_logarithmic_and_the_last_is_reached(tmp_path, perplexity, expected):
    tensors = model(13, 2, 1, prompt=50, layers=2)
    for column in range(4):
        risk = np.zeros((2, 20, 4))
        risk[:, :, column] = 1.0
        path = tables(tmp_path, 2, 2, risk=risk.tolist())
        found = quietly(trace_of(tensors, 50, perplexity), budget=20, tables=path, **SMALL)
        assert [len(heads[0]) for heads in found] == [1 if column == expected else 20] * 2


@pytest.mark.parametrize("part", [0.01, 0.049, 0.051, 0.5001, 0.949, 0.951, 0.999])
def test_entropy_bins_are_linear_and_the_last_is_reached_before_the_maximum(tmp_path, part):
    """The table's range is laid so that the prompt's entropy stands at `part` of it."""
    tensors = model(14, 2, 1, prompt=50, layers=2)
    entropy = oracles.compilerkv_entropy(*exact(*tensors[:2]), 50, 16)
    low, high = entropy - part, entropy + 1 - part
    expected = oracles.bin_of(entropy, low, high, 20)
    assert expected == int(part * 20)
    for row in range(20):
        risk = np.zeros((2, 20, 4))
        risk[:, row] = 1.0
        path = tables(tmp_path, 2, 2, risk=risk.tolist(), entropy=[low, high])
        found = quietly(trace_of(tensors, 50, 5.0), budget=20, tables=path, **SMALL)
        assert [len(heads[0]) for heads in found] == [1 if row == expected else 20] * 2


def test_entropy_is_that_of_the_whole_window_over_all_layers_in_nats(tmp_path):
    tensors = model(15, prompt=70)
    entropy = oracles.compilerkv_entropy(*exact(*tensors[:2]), 70, 16)
    assert 2 < entropy < np.log(70)
    risk = np.zeros((3, 20, 4))
    risk[:, int((entropy - 2) / 8 * 20)] = 0.7
    found = quietly(trace_of(tensors, 70, 5.0), budget=30, tables=tables(tmp_path, 3, 8, risk=risk.tolist()), **SMALL)
    assert found == decided(tensors, 70, budget=30, risk=risk.tolist(), perplexity=5.0, **SMALL)
    assert all(len(heads[0]) < 30 for heads in found)


def test_thresholds_need_the_perplexity_and_neutral_ones_do_not(tmp_path):
    trace = trace_of(model(16), 60)
    path = tables(tmp_path, 3, 8, risk=flat(3, 0.2))
    with pytest.raises(KvlabError, match="perplexity"):
        kvlab.replay(trace, kvlab.policy("compilerkv", budget=20, tables=path, **SMALL))
    neutral = quietly(trace, budget=20, tables=tables(tmp_path, 3, 8), **SMALL)
    assert neutral == quietly(trace, budget=20, **SMALL)


def test_a_table_may_be_null(tmp_path):
    tensors, weights, risk = model(24), random_weights(3, 8, seed=2), flat(3, 0.7)
    path = tables(tmp_path, 3, 8, weights, risk=risk)
    content = json.loads((tmp_path / "tables.json").read_text())
    for nothing in ("heads", "risk"):
        (tmp_path / "tables.json").write_text(json.dumps(content | {nothing: None}))
        given_tables = {"heads": weights, "risk": risk, nothing: None}
        found = quietly(trace_of(tensors, 60, 5.0), budget=20, tables=path, **SMALL)
        assert found == decided(tensors, 60, budget=20, perplexity=5.0, **given_tables, **SMALL)


# What cannot be done


def sentence_of(trace, **parameters):
    with warnings.catch_warnings(), pytest.raises(KvlabError) as caught:
        warnings.simplefilter("ignore")
        kvlab.replay(trace, kvlab.policy("compilerkv", **{"budget": 20, **SMALL, **parameters}))
    assert "\n" not in str(caught.value) and len(str(caught.value).split()) >= 4
    return str(caught.value)


GOOD = dict(model="tensors", heads=np.ones((3, 8)).tolist(), risk=flat(3, 0.1), entropy=[2, 10], perplexity=[1, 100])


def without(key):
    return json.dumps({k: v for k, v in GOOD.items() if k != key})


def having(**more):
    return json.dumps(GOOD | more)


@pytest.mark.parametrize(
    "text, said",
    [
        ("not json {", "tables.json"),
        ("[1, 2]", "tables.json"),
        ("", "tables.json"),
        (without("heads"), "heads"),
        (without("risk"), "risk"),
        (having(heads=np.ones((2, 8)).tolist()), "layers"),
        (having(heads=np.ones((3, 7)).tolist()), "heads"),
        (having(heads=[[1.0] * 8, [1.0] * 8, [1.0] * 7]), "heads"),
        (having(heads=[1.0] * 8), "heads"),
        (having(heads=[["a"] * 8] * 3), "heads"),
        (having(heads=[[float("nan")] * 8] * 3), "heads"),
        (having(heads=[[float("inf")] * 8] * 3), "heads"),
        (having(risk=flat(2, 0.1)), "layers"),
        (having(risk=flat(3, float("nan"))), "risk"),
        (having(risk=[[0.1] * 4] * 3), "risk"),
        (having(risk=[]), "risk"),
        (having(entropy=[10, 2]), "entropy"),
        (having(entropy=[2]), "entropy"),
        (having(perplexity=[0, 100]), "perplexity"),
        (having(perplexity=[100, 1]), "perplexity"),
    ],
)
def test_a_damaged_table_file(tmp_path, text, said):
    (tmp_path / "tables.json").write_text(text)
    assert said in sentence_of(trace_of(model(17), 60, 5.0), tables=str(tmp_path / "tables.json"))


def test_no_table_file():
    assert "nowhere.json" in sentence_of(trace_of(model(17), 60), tables="nowhere.json")


@pytest.mark.parametrize(
    "parameters, said",
    [
        (dict(budget=0), "budget"),
        (dict(window=0), "window"),
        (dict(utility_window=0), "utility_window"),
        (dict(window=8, utility_window=16), "utility_window"),
        (dict(kernel=4), "kernel"),
        (dict(pad="zeros"), "pad"),
        (dict(windw=8), "window"),
    ],
)
def test_bad_parameters_are_named(parameters, said):
    assert said in sentence_of(trace_of(model(17), 60), **parameters)


def test_too_few_prompt_queries():
    assert "64" in sentence_of(trace_of(model(18, prompt=90, n=20), 90), window=64, utility_window=32)
