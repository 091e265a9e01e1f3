"""What branches of one prefill have in common, and when they no longer have."""

import pytest
import torch

import kvlab
from kvlab.core import attention
from kvlab.live import passes
from kvlab.live.gather import gather
from kvlab.live.memory import Memory
from tests.support.live_runs import SMALL, small
from tests.support.tensors import sets


def prompt(n, seed=0):
    return torch.randint(256, (1, n), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def prefill(lm, policies, ids):
    with gather(lm.model, policies):
        return lm.model(ids, use_cache=True).past_key_values


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
    gathered = gather(lm.model, [policy])
    with gathered, torch.inference_mode():
        past = lm.model(ids, use_cache=True).past_key_values
    branched(lm, policy, past)
    with gathered, torch.inference_mode():
        past = lm.model(more, past_key_values=past, use_cache=True).past_key_values
    assert kept(branched(lm, policy, past)) == kept(alone(lm, policy, torch.cat([ids, more], 1)))


def test_a_prompt_that_is_cropped_and_fed_again_looks_anew(tiny):
    lm, policy = tiny("tiny-llama-gqa"), small("snapkv")
    ids, other = prompt(49), prompt(9, 2)
    gathered = gather(lm.model, [policy.replace(budget=40, window=30)])
    with gathered, torch.inference_mode():
        past = lm.model(ids, use_cache=True).past_key_values
    branched(lm, policy, past)
    past.crop(9)
    assert kept(branched(lm, policy, past)) == kept(alone(lm, policy, ids[:, :40]))
    with gathered, torch.inference_mode():
        past = lm.model(other, past_key_values=past, use_cache=True).past_key_values
    assert kept(branched(lm, policy, past)) == kept(alone(lm, policy, torch.cat([ids[:, :40], other], 1)))


def test_a_session_by_itself_holds_on_to_nothing(tiny):
    session = alone(tiny("tiny-llama-gqa"), small("snapkv"), prompt(40))
    assert session._cache.memory is None


def test_what_a_trace_knows_of_a_repetition_is_taken_from_it(tiny, monkeypatch):
    lm, ids, ran, run = tiny("tiny-llama-gqa"), prompt(50), [], passes.run
    monkeypatch.setattr(passes, "run", lambda *a: ran.append(1) or run(*a))
    policies = at("kvzip", 12, 19)
    trace = kvlab.capture(lm, ids, 2, policies=policies)
    past = prefill(lm, policies, ids)
    past.memory = Memory()
    past.memory.know(policies, trace.repeated)
    for policy in policies:
        found = branched(lm, policy, past)
        assert kept(found) == [sets(kvlab.replay(trace, policy).kept(layer)) for layer in range(2)]
    assert not ran
    plus = policies[0].replace(plus=True)
    assert kept(branched(lm, plus, past)) == kept(alone(lm, plus, ids)), "what the trace does not know runs"
    assert len(ran) == 4, "two parts, in the branch and alone"
