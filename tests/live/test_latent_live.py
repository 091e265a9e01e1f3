"""Live runs of latent attention: at full budget plain transformers, at small ones what a replay keeps."""

from __future__ import annotations

import copy

import pytest
import torch
from support.latents import OTHERS, RANK, SHAPED, WIDTH, latent
from support.live_runs import (
    EVERYTHING,
    SMALL,
    WITHOUT_BUDGET,
    agree,
    changes_nothing,
    everything,
    generate,
    left_padded,
    plain_runs,
    prompt,
    small,
)
from support.tensors import sets
from transformers import DynamicCache

import kvlab
from kvlab.errors import KvlabError
from kvlab.live.fidelity import closed_against_open, fidelity

V3, ENTRY = "latent-deepseek-v3", (RANK + WIDTH) * 4
# One of each kind: prefill alone, pseudo-tokens, all layers at once, while decoding, merging, selection, both.
KINDS = ("snapkv", "dapq", "zigzagkv", "h2o", "zsmerge", "sparq", "rocketkv", "morphkv", "triattention", "rerotated")
# It gives entries values of their own.
UNFIT = ("attention_matching",)
CASES = [(V3, name) for name in EVERYTHING if name not in UNFIT]
CASES += [(family, name) for family in SHAPED for name in KINDS if family != V3]
# What differs among these is how they make and turn queries.
CASES += [(family, name) for family in OTHERS for name in ("snapkv", "h2o", "triattention")]


@pytest.fixture(scope="module")
def plain(tiny):
    return plain_runs(lambda family: latent(tiny, family))


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_budget_as_large_as_everything_changes_nothing(tiny, plain, family, name):
    changes_nothing(latent(tiny, family), plain(family), everything(name))


@pytest.mark.parametrize(("family", "name"), [(f, n) for f, n in CASES if n != "full"])
def test_live_keeps_what_a_replay_keeps(tiny, family, name):
    """And at the first step loses what the replay loses, in the first layer that is compressed."""
    lm, one, ids = latent(tiny, family), small(name), prompt(60, seed=7)
    trace = kvlab.capture(lm, ids, 3, policies=[one], pseudo=())
    opened = kvlab.replay(trace, one)
    with kvlab.compress(lm.model, one, probes=["mass_lost", "output_error"], max_new_tokens=3) as session:
        with torch.inference_mode():
            out = lm.model(ids)
            lm.model(trace.ids[60].view(1, 1), past_key_values=out.past_key_values)
    for layer in lm.layout.compressed:
        assert sets(session.kept_after_prefill(layer)) == sets(opened.kept(layer))
    table = session.table
    first = table[table.layer == lm.layout.compressed[0]]
    for measure in ("mass_lost", "output_error"):
        closed = first[first.measure == measure].value.tolist()
        assert closed == pytest.approx(getattr(opened, measure)[0, :, 0].tolist(), abs=1e-4)


@pytest.mark.parametrize("family", SHAPED)
def test_a_latent_is_stored_and_counted_once(tiny, family):
    lm, ids = latent(tiny, family), prompt(60)
    with kvlab.compress(lm.model, small("snapkv")) as session:
        past = generate(lm.model, ids, 5).past_key_values
    assert session.kv_bytes == 2 * 18 * ENTRY
    # Positions, 8 bytes each, and some room; keys and values apart would take twice as much.
    assert session.allocated_bytes < 2 * (18 + 24) * (ENTRY + 8)
    layer = past.layers[lm.layout.compressed[0]]
    assert layer.keys.shape == (1, 1, 18, RANK) and layer.values.shape == (1, 1, 18, WIDTH)


@pytest.mark.parametrize("name", ["quest", "sparq", "hybrid", "rocketkv", "exact_topk"])
def test_a_selection_reads_no_more_than_its_budget_of_latents(tiny, name):
    """With what finding loads: vectors of keys alone, which are all of a latent entry and half of any other."""
    one = small(name)
    trace = kvlab.capture(tiny(V3), prompt(60), 6, policies=[one])
    result = kvlab.replay(trace, one)
    allowed = 2 * one.budget * ENTRY
    # One entry is always read, whatever finding it costs.
    assert allowed / 4 <= float(result.read_bytes.min()) <= float(result.read_bytes.max()) <= allowed + 2 * ENTRY


@pytest.mark.parametrize("family", SHAPED)
def test_layers_left_alone_hold_what_transformers_own_cache_holds(tiny, family):
    lm, ids = latent(tiny, family), prompt(40)
    with torch.inference_mode():
        own = DynamicCache(config=lm.model.config)
        lm.model(ids, past_key_values=own)
        with kvlab.compress(lm.model, "full") as session:
            past = lm.model(ids).past_key_values
            session.end_prompt()
    for number, (mine, theirs) in enumerate(zip(past.layers, own.layers, strict=True)):
        if number in lm.layout.compressed:
            torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(mine.values, theirs.values, atol=1e-4, rtol=1e-4)
        else:
            assert type(mine) is type(theirs)
            for name in ("conv_states", "recurrent_states"):
                for key, state in getattr(theirs, name).items():
                    torch.testing.assert_close(getattr(mine, name)[key], state, atol=1e-4, rtol=1e-4)
    assert bool(session.uncompressed_bytes) == (family == "latent-kimi-linear")


@pytest.mark.parametrize("family", SHAPED)
def test_both_loops_begin_alike(tiny, family):
    lm, ids = latent(tiny, family), prompt(60, seed=7)[0]
    loops = closed_against_open(lm, small("snapkv"), ids, new_tokens=6)
    assert loops.table.kl[0] == pytest.approx(0, abs=1e-5)
    found = fidelity(lm, "full", ids, new_tokens=6).summary
    assert found["kl"] == pytest.approx(0, abs=1e-5) and found["agreement"] == 1
    assert fidelity(lm, small("streamingllm"), ids, new_tokens=6).summary["kl"] > 1e-4


@pytest.mark.parametrize("family", SHAPED)
@pytest.mark.parametrize("name", ["snapkv", "h2o", "zsmerge", "rocketkv"])
def test_each_row_of_a_padded_batch_goes_as_it_goes_alone(tiny, family, name):
    lm = latent(tiny, family)
    rows = [prompt(n, seed=n)[0] for n in (60, 37, 48)]
    ids, mask = left_padded(*rows)
    with kvlab.compress(lm.model, small(name)) as session:
        batch = generate(lm.model, ids, 20, attention_mask=mask)
        kept = [[sets(session.kept(layer, row)) for row in range(3)] for layer in lm.layout.compressed]
    for row, alone in enumerate(rows):
        with kvlab.compress(lm.model, small(name)) as session:
            single = generate(lm.model, alone[None], 20)
        assert batch.sequences[row, 60:].tolist() == single.sequences[0, len(alone) :].tolist()
        assert [kept[place][row] for place in range(2)] == [sets(session.kept(x)) for x in lm.layout.compressed]


@pytest.mark.parametrize("family", SHAPED)
def test_beams_are_those_of_the_plain_model(tiny, family):
    model = latent(tiny, family).model
    ids, mask = left_padded(*(prompt(n, seed=n)[0] for n in (40, 23)))
    beams = dict(attention_mask=mask, num_beams=3, num_return_sequences=2, output_logits=False)
    expected = generate(model, ids, 14, **beams)
    for name in ("snapkv", "h2o"):
        with kvlab.compress(model, everything(name)):
            assert generate(model, ids, 14, **beams).sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("family", SHAPED)
def test_a_cache_from_before_and_a_cache_for_afterwards(tiny, family):
    """A plain cache of the caller's goes on in a session, and what the session leaves goes on without one."""
    model, ids, new = latent(tiny, family).model, prompt(40), prompt(9, seed=5)
    with torch.inference_mode():
        expected = model(torch.cat([ids, new], 1)).logits[:, 40:]
        own = DynamicCache(config=model.config)
        model(ids[:, :30], past_key_values=own)
        with kvlab.compress(model, "full"):
            model(ids[:, 30:], past_key_values=own)
            found = [model(new[:, :3], past_key_values=own).logits]
        found.append(model(new[:, 3:], past_key_values=own).logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("storage", ["fp8", "int8", "kivi-4", "kivi-2", "turbo-4", "turbo-3", "nvfp4"])
def test_a_rounded_cache_takes_the_bytes_of_one_vector(tiny, storage):
    """Of a model with plain attention over heads as wide, what keys and values take is twice that, or as kivi says."""
    lm, ids = tiny(V3), prompt(60)
    with kvlab.compress(lm.model, "full", storage=storage) as session:
        rounded = generate(lm.model, ids, 10)
    from kvlab.core.storage import stored_as
    from kvlab.core.store import LayerStore

    keys = torch.randn(1, 1, 69, RANK + WIDTH)
    both, once = LayerStore(keys, keys), LayerStore(keys, keys, latent=WIDTH)
    for store in (both, once):
        store.set_storage(stored_as(storage))
    assert session.kv_bytes == 2 * once.kv_bytes and once.kv_bytes == once.key_bytes
    assert both.key_bytes <= once.kv_bytes + 4 < both.kv_bytes
    assert (once.values[..., :WIDTH] == 0).all() and torch.equal(once.values[..., WIDTH:], once.keys[..., WIDTH:])
    assert torch.equal(once.keys, both.keys)
    plain = generate(lm.model, ids, 10)
    off = (rounded.logits[1] - plain.logits[1]).norm() / plain.logits[1].norm()
    assert 0 < off < 0.5 or storage.startswith("kivi")


def test_what_latents_cannot_have_is_one_sentence(tiny):
    model, ids = tiny(V3).model, prompt(60)
    with pytest.raises(KvlabError, match=r"^turbo-4/kivi-2 stores keys and values apart, .* such as 'turbo-4'$"):
        kvlab.compress(model, "full", storage="turbo-4/kivi-2")
    trace = kvlab.capture(tiny(V3), ids, 2, policies=[small("attention_matching"), small("think"), small("merging")])
    with pytest.raises(KvlabError, match=r"^turbo-4/kivi-2 stores keys and values apart"):
        kvlab.replay(trace, "full", storage="turbo-4/kivi-2")
    for name, more in (("attention_matching", {}), ("think", {}), ("merging", {"averaged": "values"})):
        one = kvlab.policy(name, **(SMALL | WITHOUT_BUDGET)[name] | more)
        why = "^this policy changes keys or values separately, and in latent attention"
        with pytest.raises(KvlabError, match=why):
            with kvlab.compress(model, one):
                generate(model, ids, 3)
        with pytest.raises(KvlabError, match=why):
            kvlab.replay(trace, one)


def test_an_adapter_on_the_expansion_is_seen(tiny):
    """What makes keys and values may be more than a matrix in memory: what it does to a latent is what counts."""
    model = copy.deepcopy(tiny(V3).model)
    expanding = model.model.layers[0].self_attn.kv_b_proj
    with torch.no_grad():
        delta = 0.05 * torch.randn(expanding.weight.shape, generator=torch.Generator().manual_seed(2))
    expanding.register_forward_hook(lambda _m, args, out: out + args[0] @ delta.T)
    ids = prompt(40)
    expected = generate(model, ids)
    with kvlab.compress(model, "full"):
        agree(generate(model, ids), expected)
    with torch.inference_mode():
        plain = generate(tiny(V3).model, ids)
    assert (plain.logits[0] - expected.logits[0]).abs().max() > 1e-3
