"""Sessions that go on as the rows of one batch: each as it would alone, and what cannot be joined."""

from __future__ import annotations

import pytest
import torch
from support.live_runs import SMALL, everything, prompt, small
from support.tensors import sets

import kvlab
from kvlab.errors import KvlabError


def ended(model, one, ids, **options):
    """A session whose prompt has ended, and its cache."""
    with kvlab.compress(model, one, turns="leave", max_new_tokens=8, **options) as session:
        past = model(ids, use_cache=True).past_key_values
        session.end_prompt()
    return session, past


@torch.inference_mode()
def alone(model, one, ids, fed):
    """Logits `[rows, n, vocabulary]` of `fed`, token by token, and the session."""
    with kvlab.compress(model, one, turns="leave", max_new_tokens=8) as session:
        past = model(ids, use_cache=True).past_key_values
        logits = [model(token[:, None], past_key_values=past).logits for token in fed.unbind(1)]
    return torch.cat(logits, 1), session


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2])
def test_joined_sessions_go_as_each_goes_alone(tiny, rows):
    model, ids, fed = tiny().model, prompt(40, seed=1, rows=rows), prompt(8, seed=2, rows=rows)
    policies = [kvlab.policy("full"), *(small(name) for name in SMALL)]
    sessions = [ended(model, one, ids)[0] for one in policies]
    with kvlab.compress(model, "full", turns="leave") as together:
        past = together.join(sessions)
        each = fed.repeat(len(policies), 1)
        joined = torch.cat([model(token[:, None], past_key_values=past).logits for token in each.unbind(1)], 1)
    for number, (one, session) in enumerate(zip(policies, sessions, strict=True)):
        expected, single = alone(model, one, ids, fed)
        torch.testing.assert_close(joined[number * rows : (number + 1) * rows], expected, atol=1e-4, rtol=0)
        assert (session.kv_bytes, session.aux_bytes) == (single.kv_bytes, single.aux_bytes)
        for row in range(rows):
            kept = sets(single.kept(1, row))
            assert sets(session.kept(1, row)) == sets(together.kept(1, number * rows + row)) == kept, one


@torch.inference_mode()
def test_sequences_of_several_lengths_go_as_each_goes_alone(tiny):
    """One leaves early; the others go on in a batch without it, and what each has read is still known."""
    model, fed = tiny().model, prompt(8, seed=2, rows=3)
    lengths = 40, 23, 31
    for name in SMALL:
        asked = [prompt(length, seed=length) for length in lengths]
        sessions, rows = [ended(model, small(name), ids)[0] for ids in asked], [[], [], []]
        with kvlab.compress(model, "full", turns="leave") as together:
            for left, steps in (((0, 1, 2), range(5)), ((0, 2), range(5, 8))):
                past = together.join([sessions[row] for row in left])
                for step in steps:
                    logits = model(fed[left, step, None], past_key_values=past).logits[:, -1]
                    for row, found in zip(left, logits, strict=True):
                        rows[row].append(found)
        for session, found, ids, tokens in zip(sessions, rows, asked, fed, strict=True):
            expected, single = alone(model, small(name), ids, tokens[None, : len(found)])
            torch.testing.assert_close(torch.stack(found), expected[0], atol=1e-4, rtol=0)
            assert sets(session.kept(1)) == sets(single.kept(1)), name
            for what in ("kv_bytes", "aux_bytes", "read_bytes"):
                assert getattr(session, what) == getattr(single, what) > (0 if what != "aux_bytes" else -1), (
                    name,
                    what,
                )


@torch.inference_mode()
def test_layers_left_alone_keep_one_length(tiny):
    """A window of another layer is one tensor for all rows, which begin and end together."""
    model = tiny("hybrid-gemma3").model
    sessions = [ended(model, small("snapkv"), prompt(length))[0] for length in (40, 41)]
    with kvlab.compress(model, "full", turns="leave") as together:
        with pytest.raises(KvlabError, match="at one length; these have 40, 41 tokens"):
            together.join(sessions)
        model(prompt(1), past_key_values=together.join(sessions[:1]))
        with pytest.raises(KvlabError, match="joined once"):
            together.join(sessions[:1])


@torch.inference_mode()
def test_what_rests_while_decoding_may_be_fed_at_once(tiny):
    model, ids, fed = tiny().model, prompt(40, seed=3), prompt(6, seed=4)
    policies = [small(name) for name in ("snapkv", "dapq", "zigzagkv", "compilerkv")]
    sessions = [ended(model, one, ids)[0] for one in policies]
    with kvlab.compress(model, "full", turns="leave") as together:
        joined = model(fed.expand(len(policies), -1), past_key_values=together.join(sessions)).logits
    for row, one in zip(joined, policies, strict=True):
        torch.testing.assert_close(row, alone(model, one, ids, fed)[0][0], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_who_cannot_take_tokens_back_still_cannot(tiny):
    model, ids = tiny().model, prompt(40)
    for name, refused in (("snapkv", False), ("h2o", True)):
        session, _ = ended(model, small(name), ids)
        with kvlab.compress(model, "full", turns="leave") as together:
            past = together.join([session])
            model(prompt(2), past_key_values=past)
            if refused:
                with pytest.raises(KvlabError, match="h2o cannot take tokens back"):
                    past.crop(-1)
            else:
                past.crop(-1)
                assert past.seen == 41


@torch.inference_mode()
def test_what_cannot_be_joined_is_refused(tiny):
    model, ids = tiny().model, prompt(40)
    one = kvlab.policy("snapkv", **SMALL["snapkv"])
    session, _ = ended(model, one, ids)
    watched, _ = ended(model, one, ids, probes=["mass_lost"])
    with kvlab.compress(model, one, turns="leave") as early:
        model(ids, use_cache=True)
    together = kvlab.compress(model, "full", turns="leave")
    for several in ([], [early], [session, early], [kvlab.compress(model, one)]):
        with pytest.raises(KvlabError, match="once their prompts have ended"):
            together.join(several)
    with kvlab.compress(model, one, turns="leave") as padded:
        mask = torch.ones(2, 40, dtype=torch.int64)
        mask[0, :3] = 0
        model(ids.expand(2, -1), attention_mask=mask, use_cache=True)
        padded.end_prompt()
    with pytest.raises(KvlabError, match="without padding"):
        together.join([session, padded])
    with pytest.raises(KvlabError, match="without probes"):
        together.join([session, watched])
    with pytest.raises(KvlabError, match="turns='leave'"):
        kvlab.compress(model, "full").join([session])


@torch.inference_mode()
def test_another_policy_takes_over_all_of_the_joined(tiny):
    model, ids = tiny().model, prompt(40)
    sessions = [ended(model, everything(name), ids)[0] for name in ("h2o", "morphkv")]
    with kvlab.compress(model, "full", turns="leave") as together:
        past = together.join(sessions)
        model(prompt(1).expand(2, -1), past_key_values=past)
    with kvlab.compress(model, kvlab.policy("streamingllm", budget=12)) as later:
        for token in prompt(4, seed=5).unbind(1):
            model(token[:, None].expand(2, -1), past_key_values=past)
    kept = [sets(later.kept(0, row)) for row in range(2)]
    assert kept[0] == kept[1] and all(len(head) == 12 for head in kept[0])
