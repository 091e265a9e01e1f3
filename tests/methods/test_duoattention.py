"""DuoAttention against its oracle: which heads keep everything, and what the streaming ones keep at every step."""

import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.cases import SHAPES
from support.measured_files import head_scores
from support.refusals import one_sentence
from support.tensors import exact, layer, sets

import kvlab

LAYERS, STEPS = 3, 52


def model(seed, heads=8, kv_heads=2, prompt=60, steps=STEPS, layers=LAYERS):
    return layer(seed, heads, kv_heads, prompt=prompt, layers=layers, new=steps)


def head_file(folder, scores, kv_heads, **other):
    """Scores by query head; a KV head is worth its group's best."""
    path = folder / "heads.json"
    path.write_text(json.dumps(head_scores(scores, kv_heads) | other))
    return str(path)


def random_scores(layers, heads, seed=0):
    return np.random.default_rng(seed).uniform(0, 1, (layers, heads)).round(3).tolist()


def replayed(tensors, prompt, **parameters):
    """Replay, without the warning that it takes the heads in order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kvlab.replay(kvlab.Trace.from_tensors(*tensors, prompt), kvlab.policy("duoattention", **parameters))


def agrees(result, expected, steps):
    for index, layer_steps in enumerate(expected):
        for t in range(steps + 1):
            assert sets(result.kept(index, t)) == [list(p) for p in layer_steps[t]["read"]], f"layer {index} step {t}"
            assert sets(result.stored(index, t)) == [list(p) for p in layer_steps[t]["stored"]], f"stored after {t}"


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize(
    "parameters",
    [
        dict(budget=40, sinks=4, recent=10),
        dict(budget=20, sinks=2, recent=5),
        dict(budget=16, sinks=4, recent=12),
        dict(budget=55, sinks=4, recent=10),
        dict(budget=30),
    ],
    ids=str,
)
def test_every_step_with_measured_heads(tmp_path, heads, kv_heads, parameters):
    tensors, scores = model(heads + kv_heads, heads, kv_heads), random_scores(LAYERS, heads)
    result = replayed(tensors, 60, heads=head_file(tmp_path, scores, kv_heads), **parameters)
    agrees(result, oracles.oracle_duoattention(*exact(*tensors), 60, scores=scores, **parameters), STEPS)


@pytest.mark.parametrize("budget", [10, 25, 40])
def test_outputs_and_lost_mass_at_every_step(tmp_path, budget):
    tensors, scores = model(2), random_scores(LAYERS, 8, seed=2)
    parameters = dict(budget=budget, sinks=2, recent=6)
    result = replayed(tensors, 60, heads=head_file(tmp_path, scores, 2), **parameters)
    arrays = exact(*tensors)
    for index, steps in enumerate(oracles.oracle_duoattention(*arrays, 60, scores=scores, **parameters)):
        expected = oracles.replay_measures(*(a[index] for a in arrays), 60, steps, budget)
        np.testing.assert_allclose(result.mass_lost[index].T, expected["mass_lost"], atol=1e-5)
        np.testing.assert_allclose(result.output_error[index].T, expected["output_error"], atol=1e-5)
        np.testing.assert_allclose(result.step_recall[index].T, expected["step_recall"], atol=1e-6)


def test_without_scores_heads_are_taken_in_order_and_it_says_so():
    tensors = model(3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trace = kvlab.Trace.from_tensors(*tensors, 60)
        result = kvlab.replay(trace, kvlab.policy("duoattention", budget=30, sinks=2, recent=8))
    said = [str(w.message) for w in found if "duoattention" in str(w.message).lower()]
    assert len(said) == 1 and "heads" in said[0]
    agrees(result, oracles.oracle_duoattention(*exact(*tensors), 60, 30, 2, 8), STEPS)
    assert [[len(kept) for kept in sets(result.kept(i, 0))] for i in range(LAYERS)] == [[60, 60], [10, 10], [10, 10]]


def test_equal_scores_prefer_the_earlier_head(tmp_path):
    tensors = model(4, 2, 2, steps=1)
    path = head_file(tmp_path, [[0.1, 0.5], [0.5, 0.5], [0.5, 0.2]], 2)
    result = replayed(tensors, 60, heads=path, budget=30, sinks=2, recent=8)
    assert [[len(kept) for kept in sets(result.kept(i, 0))] for i in range(LAYERS)] == [[10, 60], [60, 10], [10, 10]]


def test_streaming_heads_roll_and_retrieval_heads_keep_everything(tmp_path):
    tensors, scores = model(5, 4, 2), [[0.0, 0.1, 0.0, 0.9], [0.0, 0.8, 0.3, 0.3], [0.2, 0.2, 0.4, 0.0]]
    result = replayed(tensors, 60, heads=head_file(tmp_path, scores, 2), budget=32, sinks=3, recent=15)
    for t in range(1, STEPS + 1):
        everything, own = list(range(60 + t)), 60 + t - 1
        rolled = [0, 1, 2, *range(own - 14, own + 1)]
        assert sets(result.stored(0, t)) == [rolled, everything]
        assert sets(result.stored(1, t)) == [everything, rolled]
        assert sets(result.stored(2, t)) == [rolled, rolled]
        assert sets(result.kept(2, t)) == [[0, 1, 2, *range(own - 15, own + 1)]] * 2  # attended before it is evicted
        ragged = result.stored(0, t)
        assert ragged.shape == (2, 60 + t) and (ragged[0, 18:] == -1).all()


def test_bytes_are_those_of_the_entries():
    tensors = model(6)
    result = replayed(tensors, 60, budget=30, sinks=2, recent=8)
    entry = 2 * 16 * 4
    for t in range(1, STEPS + 1):
        assert int(result.stored_bytes[t - 1]) == (2 * (60 + t) + 4 * 10) * entry
        assert int(result.read_bytes[t - 1]) == (2 * (60 + t) + 4 * 11) * entry


@pytest.mark.parametrize("prompt", [1, 3, 9])
@pytest.mark.parametrize("budget, rolls", [(6, True), (8, False), (12, False)])
def test_a_short_prompt_outgrown_by_its_response(prompt, budget, rolls):
    """Streaming parts that take the whole budget roll; else heads that a short prompt can afford keep all."""
    tensors = model(7, prompt=prompt)
    result = replayed(tensors, prompt, budget=budget, sinks=2, recent=4)
    agrees(result, oracles.oracle_duoattention(*exact(*tensors), prompt, budget, 2, 4), STEPS)
    if rolls:
        assert {len(kept) for i in range(LAYERS) for kept in sets(result.stored(i, STEPS))} == {6}


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 5),
    kv_heads=st.sampled_from([1, 2, 3]),
    prompt=st.integers(1, 90),
    sinks=st.integers(0, 4),
    recent=st.integers(1, 12),
    more=st.integers(0, 80),
)
def test_heads_spend_at_most_the_budget_and_one_more_would_exceed_it(layers, kv_heads, prompt, sinks, recent, more):
    tensors = model(8, kv_heads, kv_heads, prompt, steps=0, layers=layers)
    budget = max(sinks + recent + more, 2)
    result = replayed(tensors, prompt, budget=budget, sinks=sinks, recent=recent)
    sizes = [len(kept) for index in range(layers) for kept in sets(result.kept(index, 0))]
    streaming = min(prompt, sinks + recent)
    assert set(sizes) <= {streaming, prompt}
    assert sum(sizes) <= len(sizes) * budget
    if streaming in sizes and streaming < prompt:
        assert sum(sizes) + prompt - streaming > len(sizes) * budget
    else:
        assert sizes == [prompt] * len(sizes)


@pytest.mark.parametrize(
    "given_parts, parts",
    [
        (dict(sinks=2), (2, 20)),
        (dict(recent=25), (5, 25)),
        (dict(recent=28), (2, 28)),
        (dict(sinks=0), (0, 20)),
        (dict(sinks=0.02, recent=0.03), (12, 18)),
        (dict(sinks=0.05), (6, 20)),
        (dict(sinks=12, recent=0.9), (12, 18)),
    ],
    ids=str,
)
def test_a_part_given_as_a_number_or_as_a_share(given_parts, parts):
    tensors = model(9, 1, 1, prompt=625, steps=0, layers=2)
    result = replayed(tensors, 625, budget=30, **given_parts)
    sinks, recent = parts
    assert sets(result.kept(1, 0))[0] == [*range(sinks), *range(625 - recent, 625)]


@pytest.mark.parametrize(
    "budget, sinks, recent",
    [
        (2, 1, 1),
        (7, 1, 6),
        (16, 3, 13),
        (17, 8, 9),
        (39, 8, 31),
        (40, 8, 32),
        (41, 8, 32),
        (250, 8, 32),
    ],
)
def test_sizes_that_follow_the_prompt_and_the_budget(budget, sinks, recent):
    """RocketKV's appendix at a sixteenth of its 16,000 tokens; above 40 entries the rest goes to retrieval heads."""
    tensors = model(9, 1, 1, prompt=1000, steps=0, layers=8)
    result = replayed(tensors, 1000, budget=budget)
    kept = [sets(result.kept(index, 0))[0] for index in range(8)]
    assert kept[-1] == [*range(sinks), *range(1000 - recent, 1000)]
    retrieval = 8 * (budget - 40) // 960 if budget > 40 else 0
    assert [len(row) for row in kept] == [1000] * retrieval + [sinks + recent] * (8 - retrieval)


@pytest.mark.parametrize("length", [1200, 4096, 16000])
@pytest.mark.parametrize("compression, share", [(4, 0.21), (8, 0.08), (16, 0.02), (32, 0)])
def test_as_many_retrieval_heads_as_in_the_papers_runs_at_any_length(length, compression, share):
    """Of 1,000 heads the share that RocketKV's authors have, in percent, whatever the prompt's length."""
    policy = kvlab.policy("duoattention", budget=length // compression)
    found = policy.retrieval(100, 10, length, length // compression).float().mean()
    assert share <= found < share + 0.011


def test_the_sizes_of_earlier_versions_are_numbers():
    assert str(kvlab.policy("duoattention", budget=9, sinks=None, recent=None)) == str(
        kvlab.policy("duoattention", budget=9)
    )
    policy = kvlab.policy("duoattention", budget=900, sinks=128, recent=512)
    assert policy.minimum == 640 and policy.parts(900, 1000) == policy.parts(900, 16000) == (128, 512)


@pytest.mark.parametrize("part", [dict(sinks=-1), dict(recent=0), dict(sinks=1.5), dict(recent=0.0), dict(sinks="a")])
def test_parts_that_are_none(part):
    with one_sentence(next(iter(part))):
        kvlab.policy("duoattention", budget=40, **part)


def test_a_layer_at_a_time_is_the_replay_of_all():
    tensors = model(10, steps=0)
    result = replayed(tensors, 60, budget=34, sinks=2, recent=8)
    policy = kvlab.policy("duoattention", budget=34, sinks=2, recent=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(LAYERS):
            twice = [torch.stack([t[index], t[index]]) for t in tensors]  # a batch of two
            kept = policy.keep(*twice, layer=index, n_layers=LAYERS)
            assert [sets(k) for k in kept] == [sets(result.kept(index, 0))] * 2


@pytest.mark.parametrize("length, budget", [(50, 50), (50, 1000), (50, 1.0), (6, 40), (1, 33)])
def test_a_budget_of_the_prompt_or_more_keeps_everything(length, budget):
    for sizes in ({}, dict(sinks=4, recent=8)):
        result = replayed(model(11, prompt=length, steps=0), length, budget=budget, **sizes)
        assert all(sets(result.kept(i, 0)) == [list(range(length))] * 2 for i in range(LAYERS))


def test_a_fraction_of_the_prompt():
    tensors = model(13, steps=2)
    found, entries = (replayed(tensors, 60, budget=b, sinks=2, recent=8) for b in (0.51, 30))
    assert [sets(found.kept(i, 2)) for i in range(LAYERS)] == [sets(entries.kept(i, 2)) for i in range(LAYERS)]
    least = replayed(tensors, 60, budget=0.01, sinks=2, recent=8)
    assert least.raised and least.budget == 10


# What cannot be done

GOOD = head_scores([[0.1, 0.2, 0.3, 0.4]] * 3, 2)


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "heads.json"),
        ("[1]", "heads.json"),
        ("", "heads.json"),
        (json.dumps({key: value for key, value in GOOD.items() if key != "scores"}), "scores"),
        (json.dumps(GOOD | dict(scores=[[0.1] * 4] * 2)), "scores"),
        (json.dumps(GOOD | dict(scores=[[0.1] * 4, [0.1] * 4, [0.1] * 3])), "scores"),
        (json.dumps(GOOD | dict(scores=[[0.1, 0.2, 0.3, float("nan")]] * 3)), "scores"),
        (json.dumps(GOOD | dict(scores=[[0.1, 0.2, 0.3, "high"]] * 3)), "scores"),
        (json.dumps(head_scores([[0.1] * 4] * 2, 2)), "layers"),
        (json.dumps(head_scores([[0.1] * 4] * 3, 1)), "heads"),
        (json.dumps(GOOD | dict(kv_heads=3)), "heads"),
    ],
)
def test_a_damaged_head_file(tmp_path, text, said):
    (tmp_path / "heads.json").write_text(text)
    with one_sentence(said):
        replayed(model(12, 4, 2, steps=0), 60, budget=30, sinks=2, recent=8, heads=str(tmp_path / "heads.json"))
