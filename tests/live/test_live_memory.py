"""What branches of one prefill have in common where they share a memory, and when they no longer have."""

import copy

import pytest
import torch

import kvlab
from kvlab.core import attention
from kvlab.live import passes
from kvlab.live.shared_findings import Memory
from kvlab.live.shared_prefill import shared_prefill
from tests.support.live_runs import SMALL, small
from tests.support.tensors import sets


def prompt(n, seed=0):
    return torch.randint(256, (1, n), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def prefill(lm, policies, ids):
    with shared_prefill(lm.model, policies):
        past = lm.model(ids, use_cache=True).past_key_values
    past.memory = Memory()
    return past


@torch.inference_mode()
def branched(lm, policy, past, **options):
    with kvlab.compress(lm.model, policy, **options) as session:
        session.branch(past)
        session.end_prompt()
    return session


@torch.inference_mode()
def alone(lm, policy, ids, **options):
    with kvlab.compress(lm.model, policy, **options) as session:
        lm.model(ids, use_cache=True)
        session.end_prompt()
    return session


def kept(session):
    return [sets(session.kept_after_prefill(layer)) for layer in range(2)]


def at(name, *budgets):
    """The same policy at several budgets."""
    return [small(name).replace(budget=budget) for budget in budgets]


@pytest.mark.parametrize("name", SMALL)
def test_branches_keep_what_each_keeps_after_a_prefill_of_its_own(tiny, name):
    lm, ids = tiny("tiny-llama-gqa"), prompt(60)
    policies = at(name, SMALL[name]["budget"], SMALL[name]["budget"] + 7)
    past = prefill(lm, policies, ids)
    for policy in [*policies, *reversed(policies)]:
        for longest in (5, 9):
            found = branched(lm, policy, past, max_new_tokens=longest)
            assert kept(found) == kept(alone(lm, policy, ids, max_new_tokens=longest))


def test_what_does_not_depend_on_the_budget_is_found_out_once(tiny, monkeypatch):
    lm, attended, ran = tiny("tiny-llama-gqa"), [], []
    over, run = attention.attention_over_prompt, passes.run
    monkeypatch.setattr(attention, "attention_over_prompt", lambda *a, **k: attended.append(1) or over(*a, **k))
    monkeypatch.setattr(passes, "run", lambda *a: ran.append(1) or run(*a))
    policies = [policy for name in ("snapkv", "pyramidkv", "dapq") for policy in at(name, 14, 21)]
    past = prefill(lm, policies, prompt(60))
    for policy in policies:
        branched(lm, policy, past)
    # SnapKV's window and DapQ's pseudo-tokens, each in two layers.
    assert len(attended) == 4 and len(ran) == 1
    branched(lm, small("dapq").replace(content="scattered", seed=3), past)
    assert len(attended) == 6 and len(ran) == 2, "other pseudo-tokens run in a pass of their own"


def test_a_branch_that_is_fed_and_a_prompt_that_goes_on_look_anew(tiny):
    lm, policy = tiny("tiny-llama-gqa"), small("snapkv")
    ids, more, other = prompt(40), prompt(9, 1), prompt(9, 2)
    past = prefill(lm, [policy], ids)
    branched(lm, policy, past)
    for rest in (more, other):
        with kvlab.compress(lm.model, policy) as session, torch.inference_mode():
            lm.model(rest, past_key_values=session.branch(past), use_cache=True)
            session.end_prompt()
        assert kept(session) == kept(alone(lm, policy, torch.cat([ids, rest], 1)))
    assert kept(branched(lm, policy, past)) == kept(alone(lm, policy, ids)), "the first prompt is as it was"
    gathered = shared_prefill(lm.model, [policy])
    with gathered, torch.inference_mode():
        past = lm.model(ids, use_cache=True).past_key_values
    past.memory = Memory()
    branched(lm, policy, past)
    with gathered, torch.inference_mode():
        past = lm.model(more, past_key_values=past, use_cache=True).past_key_values
    assert kept(branched(lm, policy, past)) == kept(alone(lm, policy, torch.cat([ids, more], 1)))


def test_a_prompt_that_is_cropped_and_fed_again_looks_anew(tiny):
    lm, policy = tiny("tiny-llama-gqa"), small("snapkv")
    ids, other = prompt(49), prompt(9, 2)
    gathered = shared_prefill(lm.model, [policy.replace(budget=40, window=30)])
    with gathered, torch.inference_mode():
        past = lm.model(ids, use_cache=True).past_key_values
    past.memory = Memory()
    branched(lm, policy, past)
    past.crop(-9)
    assert kept(branched(lm, policy, past)) == kept(alone(lm, policy, ids[:, :40]))
    with gathered, torch.inference_mode():
        past = lm.model(other, past_key_values=past, use_cache=True).past_key_values
    assert kept(branched(lm, policy, past)) == kept(alone(lm, policy, torch.cat([ids[:, :40], other], 1)))


@pytest.mark.parametrize("name", ["knorm", "keydiff", "lagkv", "leverage"])
def test_another_policy_that_takes_over_a_compressed_branch_sees_what_is_left(tiny, name):
    lm, ids = tiny("tiny-llama-gqa"), prompt(60)
    found = []
    for memory in (Memory(), None):
        past = prefill(lm, [small("knorm"), small(name)], ids)
        past.memory = memory
        branched(lm, small(name).replace(budget=40), past)
        first = kvlab.compress(lm.model, small("knorm").replace(budget=50))
        with first, torch.inference_mode():
            compressed = first.branch(past)
            first.end_prompt()
        with kvlab.compress(lm.model, small(name)) as second, torch.inference_mode():
            lm.model(ids[:, :1], past_key_values=compressed, use_cache=True)
        found.append(kept(second))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "policy",
    [
        kvlab.policy("dapq", budget=12, window=6, content="sentence"),
        kvlab.policy("dapq", budget=12, window=6, content="sentence", softmax="all"),
        kvlab.policy("kvzip", budget=12, chunk=25),
    ],
    ids=str,
)
def test_branches_with_other_tokenizers_are_told_what_their_own_says(tiny, policy):
    class Shifted:
        def __init__(self, shift):
            self.shift = shift

        def __call__(self, text, **_):
            return type("Encoded", (), {"input_ids": [(self.shift + 7 * ord(c)) % 256 for c in text[:9]]})

    lm, ids = tiny("tiny-llama-gqa"), prompt(60)
    past = prefill(lm, [policy], ids)
    found = [kept(branched(lm, policy, past, tokenizer=Shifted(shift))) for shift in (3, 101, 3)]
    expected = [kept(alone(lm, policy, ids, tokenizer=Shifted(shift))) for shift in (3, 101, 3)]
    assert found == expected and expected[0] != expected[1]


def test_nothing_is_shared_unasked_and_nothing_held_beyond_the_prompt(tiny):
    lm, policy, ids = tiny("tiny-llama-gqa"), small("snapkv"), prompt(60)
    past = prefill(lm, [policy], ids)
    session = branched(lm, policy, past)
    assert session._cache.memory is None and copy.deepcopy(past).memory is None and past.memory is not None
    past.memory = None
    assert branched(lm, policy, past)._cache.memory is None and past.memory is None
