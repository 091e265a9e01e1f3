"""A policy inside generate(): at full budget nothing changes, at small ones the plain-loop simulations are followed."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from support import oracles
from support.families import FAMILIES
from support.live_runs import (
    EVERYTHING,
    SMALL,
    Witness,
    agree,
    continued,
    everything,
    generate,
    left_padded,
    prompt,
    small,
    witnessed,
)
from support.sessions import UNFIT, state, unfit
from support.tensors import exact, sets
from support.texts import FERRY
from transformers import DynamicCache, StaticCache, StoppingCriteria

import kvlab
from kvlab.core import ranking
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError

# --- a budget as large as everything ---


@pytest.fixture(scope="module")
def plain(tiny):
    """Plain generation of a family, alone and as a left-padded batch of three, once."""
    found = {}

    def make(family):
        if family not in found:
            model = tiny(family).model
            ids, mask = left_padded(*(prompt(n, seed=n)[0] for n in (40, 23, 31)))
            found[family] = ids, mask, generate(model, ids[:1]), generate(model, ids, attention_mask=mask)
        return found[family]

    return make


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", EVERYTHING)
def test_a_budget_as_large_as_everything_changes_nothing(tiny, plain, family, name):
    model = tiny(family).model
    ids, mask, alone, batch = plain(family)
    with kvlab.compress(model, everything(name)) as session:
        agree(generate(model, ids[:1]), alone)
        agree(generate(model, ids, attention_mask=mask), batch)
    assert [session.kept(1, row).tolist()[0] for row in range(3)] == [list(range(n + 11)) for n in (40, 23, 31)]


@pytest.fixture(scope="module")
def said(lm):
    """What the real model says to a prompt of 300 tokens."""
    ids = lm.encode(FERRY)[:, -300:]
    return ids, generate(lm.model, ids, 16)


@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_the_real_model_says_the_same_at_full_budget(lm, said, name):
    ids, expected = said
    policy = kvlab.policy(name) if name == "full" else kvlab.policy(name, budget=2000)
    with kvlab.compress(lm.model, policy):
        agree(generate(lm.model, ids, 16), expected)


# --- step by step against the plain loops ---


@pytest.mark.parametrize(
    "name",
    [
        "streamingllm",
        "scissorhands",
        "h2o",
        "keyformer",
        "snapkv",
        "morphkv",
        "zsmerge",
        "dapq",
        "quest",
        "sparq",
        "hybrid",
        "snapkv_pp",
        "rocketkv",
    ],
)
def test_what_is_read_and_stored_follows_the_simulation_for_200_steps(tiny, name):
    session, witness, trace, _ = witnessed(tiny, name)
    for layer in range(2):
        steps = [witness.steps[layer, t] for t in range(1, 201)]
        queries, keys, values = (
            torch.cat([old[layer], torch.stack([s[part][0] for s in steps], 1)], 1)
            for old, part in ((trace.queries, "queries"), (trace.keys, "key"), (trace.values, "value"))
        )
        more = dict(SMALL[name])
        if name == "dapq":
            more = dict(budget=12, pseudo=exact(next(iter(trace.pseudo.values()))[layer]))
        if name == "keyformer":
            more["gumbel"] = exact(session.policy.gumbel((layer,), 4, 0, 260)[0])
        expected = getattr(oracles, f"oracle_{name}")(*exact(queries, keys, values), trace.prompt_length, **more)
        assert sets(session.kept_after_prefill(layer)) == [list(p) for p in expected[0]["stored"]]
        for t, step in enumerate(steps, 1):
            assert sets(step["read"][0]) == [list(p) for p in expected[t]["read"]], f"read at step {t}"
            assert sets(step["stored"][0]) == [list(p) for p in expected[t]["stored"]], f"stored after step {t}"
            np.testing.assert_allclose(step["output"][0], expected[t]["output"], atol=2e-4)
        assert sets(session.kept(layer)) == [list(p) for p in expected[200]["stored"]]


def test_exact_topk_reads_the_top_of_each_step_and_stores_all(tiny):
    session, witness, trace, _ = witnessed(tiny, "exact_topk")
    for layer in range(2):
        keys = trace.keys[layer]
        for t in range(1, 201):
            step = witness.steps[layer, t]
            keys = torch.cat([keys, step["key"][0][:, None]], 1)
            for group, read in enumerate(sets(step["read"][0])):
                heads = exact(step["queries"][0])[2 * group : 2 * group + 2]
                scores = sum(oracles.attention_weights(q, exact(keys[group])) for q in heads)
                assert read == oracles.top_positions(scores, 8), f"step {t}"
            assert sets(step["stored"][0]) == [list(range(60 + t))] * 2
    assert session.kv_bytes == 2 * 260 * 2 * 2 * 16 * 4


def test_exact_topk_for_each_query_head_stores_no_more_in_a_live_run(tiny):
    """It loses less than one set for the group does, over two turns."""
    model, stored, lost = tiny().model, {}, {}
    for who in ("group", "head"):
        with kvlab.compress(model, kvlab.policy("exact_topk", budget=8, sets=who), probes=["mass_lost"]) as session:
            first = generate(model, prompt(50), 12)
            stored[who] = [session.kv_bytes]
            longer = torch.cat([first.sequences, prompt(20, seed=8)], 1)
            assert continued(model, first.past_key_values, longer, 4).sequences.shape == (1, 86)
            stored[who].append(session.kv_bytes)
        lost[who] = session.means["mass_lost"]
    assert stored["group"] == stored["head"] and lost["head"] < lost["group"]


PREFILL_ONLY = ["random", "snapkv", "pyramidkv", "zigzagkv", "dynamickv", "lacache", "dapq", "snapkv_pp", "compilerkv"]
PREFILL_ONLY += ["knorm", "keydiff", "lagkv", "adakv", "chunkkv", "criticalkv", "expected_attention", "leverage"]
PREFILL_ONLY += ["chain", "layered", "rerotated", "cake", "compactor", "criticaladakv", "curdkv", "qfilters", "kvzap"]


@pytest.mark.parametrize("name", PREFILL_ONLY)
def test_prefill_policies_keep_what_a_replay_keeps(tiny, name):
    lm, policy = tiny("tiny-qwen3"), small(name)
    ids = prompt(70, seed=5)
    trace = kvlab.capture(lm, ids, new_tokens=20, policies=[policy])
    replay = kvlab.replay(trace, policy)
    with kvlab.compress(lm.model, policy) as session:
        generate(lm.model, ids, 21)
    for layer in range(2):
        assert sets(session.kept_after_prefill(layer)) == sets(replay.kept(layer, 0))
        assert sets(session.kept(layer)) == sets(replay.stored(layer, 20))


# --- heads and layers of different sizes ---


class Uneven(kvlab.Policy):
    """Heads and layers keep different numbers of the prompt's tokens."""

    name, summary = "uneven", "for tests"
    budget: int

    @property
    def observes(self):
        return 4

    def choose(self, prompt, budget):
        shares = torch.tensor([[budget - 3 + layer, budget + 3 - 2 * layer] for layer in prompt.layers])
        return ranking.top_positions(self.scores(prompt), shares)

    def scores(self, prompt):
        return prompt.window_scores(4)


def test_heads_and_layers_may_keep_different_numbers(tiny):
    lm, policy, witness = tiny("tiny-llama-gqa"), Uneven(budget=12), Witness()
    ids, mask = left_padded(prompt(60, seed=1)[0], prompt(45, seed=2)[0])
    replay = kvlab.replay(kvlab.capture(lm, ids[1:, 15:], new_tokens=8, pseudo=()), policy)
    with kvlab.compress(lm.model, policy, probes=[witness]) as session:
        out = generate(lm.model, ids, 9, attention_mask=mask)
    trace = kvlab.capture(lm, out.sequences[1, 15:-1], new_tokens=0, pseudo=())
    for layer in range(2):
        assert [len(kept) for kept in sets(session.kept_after_prefill(layer, 1))] == [9 + layer, 15 - 2 * layer]
        assert sets(session.kept_after_prefill(layer, 1)) == sets(replay.kept(layer, 0))
    assert session.kv_bytes == (2 * (9 + 15 + 10 + 13) + 2 * 4 * 8) * 2 * 16 * 4
    for head in range(4):  # keys of the first layer depend on tokens and positions alone
        step, read = witness.steps[0, 8], sets(session.kept(0, 1))[head // 2]
        keys, values = exact(trace.keys[0, head // 2, read], trace.values[0, head // 2, read])
        weights = oracles.attention_weights(exact(step["queries"])[-1, head], keys)
        np.testing.assert_allclose(step["output"][-1, head], oracles.attention_output(weights, values), atol=1e-4)


@pytest.mark.parametrize("policy", [Uneven(budget=12), kvlab.policy("snapkv", **SMALL["snapkv"])], ids=str)
def test_a_turn_at_once_is_a_turn_token_by_token(tiny, policy):
    model, new, found = tiny().model, prompt(9, seed=5), []
    for pieces in ([9], [1] * 9, [4, 1, 4]):
        with kvlab.compress(model, policy, turns="leave") as session, torch.no_grad():
            past = generate(model, prompt(60), 6).past_key_values
            logits = [model(piece, past_key_values=past).logits for piece in new.split(pieces, 1)]
        found.append((torch.cat(logits, 1), sets(session.kept(1))))
    for logits, kept in found[1:]:
        torch.testing.assert_close(logits, found[0][0], atol=1e-4, rtol=0)
        assert kept == found[0][1]


# --- memory ---


@pytest.mark.parametrize("name", ["streamingllm", "scissorhands", "h2o", "keyformer", "zsmerge", "morphkv"])
def test_a_constant_cache_stays_constant_over_a_thousand_steps(tiny, name):
    lm, budget = tiny("tiny-llama-gqa"), SMALL[name]["budget"]
    entries, allocated, aux = [], set(), set()
    with kvlab.compress(lm.model, small(name)) as session, torch.inference_mode():
        out = lm.model(prompt(60))
        assert session.kv_bytes == 60 * 2 * 2 * 2 * 16 * 4
        for step in range(1000):
            past = out.past_key_values
            out = lm.model(out.logits[:, -1:].argmax(-1), past_key_values=past)
            entries.append(session.kv_bytes)
            if step > 100:
                allocated.add(session.allocated_bytes)
                aux.add(session.aux_bytes)
    assert set(entries) == {budget * 2 * 2 * 2 * 16 * 4}
    assert len(aux) == 1 and len(allocated) == 1
    # Key and value, position, fusion count and columns of a slot, and at most twice the slots with some to spare.
    slot = 2 * 16 * 4 + 8 + 4 + max(aux) / (4 * budget)
    assert max(allocated) <= 4 * slot * (2 * budget + 80)


@pytest.mark.parametrize("name", PREFILL_ONLY)
def test_a_prefill_policy_stores_its_budget_and_every_generated_token(tiny, name):
    lm, budget = tiny("tiny-llama-gqa"), SMALL[name]["budget"]
    with kvlab.compress(lm.model, small(name)) as session, torch.inference_mode():
        out = lm.model(prompt(60))
        for step in range(1, 40):
            past = out.past_key_values
            out = lm.model(out.logits[:, -1:].argmax(-1), past_key_values=past)
            assert session.kv_bytes == session.read_bytes == (budget + step) * 2 * 2 * 2 * 16 * 4
            assert session.aux_bytes == 0


@pytest.mark.parametrize("name, least", [("quest", 0.8), ("sparq", 0.6), ("hybrid", 0.7), ("exact_topk", 1.0)])
def test_a_selection_policy_stores_all_and_reads_its_budget_with_what_finding_costs(tiny, name, least):
    lm, budget = tiny("tiny-llama-gqa"), SMALL[name]["budget"]
    policy = small(name)
    with kvlab.compress(lm.model, policy, max_new_tokens=40) as session, torch.inference_mode():
        out = lm.model(prompt(60))
        for step in range(1, 41):
            past = out.past_key_values
            out = lm.model(out.logits[:, -1:].argmax(-1), past_key_values=past)
            assert session.kv_bytes == (60 + step) * 2 * 2 * 2 * 16 * 4
            # Less where the next page no longer fits, or a dimension more would be too much.
            assert least <= session.read_bytes / (budget * 2 * 2 * 2 * 16 * 4) <= 1


def tensors_alive(length):
    """Bytes of the tensors that hold `length` entries in all heads."""
    gc.collect()
    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) is torch.Tensor and t.dim() == 4 and t.shape[1:] == (2, length, 16)
    }
    return sum(found.values())


@pytest.mark.parametrize("family", ["tiny-llama-gqa", "tiny-phi3"])
def test_what_is_evicted_is_freed(tiny, family):
    lm = tiny(family)
    with kvlab.compress(lm.model, kvlab.policy("snapkv", **SMALL["snapkv"])) as session, torch.inference_mode():
        out = lm.model(prompt(333))
        past = out.past_key_values
        stores = [group.store for layer in past.layers for group in layer.groups]
        held = [weakref.ref(s._entries.slots.tensors[part]) for s in stores for part in ("keys", "values")]
        assert all(ref() is not None for ref in held)
        before = session.allocated_bytes
        session.end_prompt()
        gc.collect()
        assert [ref() for ref in held] == [None] * 4
        assert tensors_alive(333) == 0
        assert session.allocated_bytes < before / 8


# --- what cannot be done ---


class Quantized(DynamicCache):
    """As transformers' quantised cache: a DynamicCache by inheritance whose layers hold something else."""


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(use_cache=False), "use_cache=False"),
        (dict(cache_implementation="static"), "StaticCache cannot be compressed"),
        (dict(cache_implementation="offloaded"), "an offloaded cache cannot be compressed"),
        (dict(past_key_values=Quantized()), "Quantized cannot be compressed"),
    ],
)
def test_a_cache_that_cannot_shrink_is_refused_before_anything_runs(tiny, options, message):
    model = tiny().model
    ran = []
    handle = model.model.embed_tokens.register_forward_hook(lambda *_: ran.append(1))
    try:
        with kvlab.compress(model, "full"), pytest.raises(KvlabError, match=message):
            generate(model, prompt(20), **options)
        with kvlab.compress(model, "full"), pytest.raises(KvlabError, match="StaticCache"):
            model(prompt(20), past_key_values=StaticCache(model.config, max_cache_len=32))
        ids, mask = left_padded(prompt(20)[0], prompt(10)[0])
        with kvlab.compress(model, "full"), pytest.raises(KvlabError, match="only left padding"):
            model(ids.flip(1), attention_mask=mask.flip(1))
    finally:
        handle.remove()
    assert not ran


@pytest.mark.parametrize("name", UNFIT)
def test_a_model_that_cannot_be_hooked_is_refused(name):
    lm, message = unfit(name)
    before = state(lm.model)
    with pytest.raises(KvlabError, match=message):
        kvlab.compress(lm.model, "full")
    assert state(lm.model) == before


def test_what_is_asked_for_must_exist(tiny):
    model = tiny().model
    with pytest.raises(KvlabError, match="unknown probe 'mass_lots'; did you mean 'mass_lost'"):
        kvlab.compress(model, "full", probes=["mass_lots"])
    with pytest.raises(KvlabError, match="turns='again' is neither"):
        kvlab.compress(model, "full", turns="again")
    with pytest.raises(KvlabError, match="unknown policy 'snapk'"):
        kvlab.compress(model, "snapk")
    with kvlab.compress(model, "full") as session:
        with pytest.raises(KvlabError, match="already inside a kvlab session"), kvlab.compress(model, "full"):
            pass
        with pytest.raises(KvlabError, match="no prompt has been fed"):
            session.end_prompt()
        with pytest.raises(KvlabError, match="nothing has been fed"):
            session.kept(0)
        with pytest.raises(KvlabError, match="call the LlamaForCausalLM itself"):
            model.model(prompt(5))
        agree(generate(model, prompt(20)), generate(model, prompt(20)))
        with pytest.raises(KvlabError, match=r"layer 2 is outside 0 .. 1"):
            session.kept(2)
        with pytest.raises(KvlabError, match="sequence 1 is outside this batch of 1"):
            session.kept(0, 1)


# --- the model afterwards ---


class Stop(StoppingCriteria):
    """Raises once `n` tokens were asked about."""

    def __init__(self, n, error):
        self.left, self.error = n, error

    def __call__(self, input_ids, scores, **_):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_generation_leaves_its_tables_and_the_model_as_it_was(tiny, error):
    model, ids = tiny().model, prompt(50)
    before, expected = state(model), generate(model, ids)
    policy = kvlab.policy("zsmerge", budget=16)
    with pytest.raises(error), kvlab.compress(model, policy, probes=["mass_lost"]) as session:
        generate(model, ids, 30, stopping_criteria=[Stop(8, error())])
    table = session.table
    assert table.step.tolist() == [step for step in range(1, 8) for _ in range(2 * 4)]
    assert session.means["mass_lost"] == pytest.approx(table.value.mean())
    assert sets(session.kept(0)) and state(model) == before
    agree(generate(model, ids), expected, atol=0)


def test_the_model_is_as_it_was_after_an_exception_inside_a_layer(tiny, monkeypatch):
    model, ids = tiny("tiny-qwen3").model, prompt(50)
    before, expected = state(model), generate(model, ids)
    with monkeypatch.context() as patch:
        patch.setattr(LayerStore, "evict", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), kvlab.compress(model, kvlab.policy("snapkv", budget=40)):
            generate(model, ids)
    assert state(model) == before
    agree(generate(model, ids), expected, atol=0)
    with kvlab.compress(model, "full"):
        agree(generate(model, ids), expected)
    assert state(model) == before
