"""Live runs of hybrid models: at full budget plain transformers, at small ones what a replay keeps."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from support.families import HYBRIDS
from support.hybrids import hybrid
from support.live_runs import (
    EVERYTHING,
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
from kvlab.core.softmax import Softmax
from kvlab.errors import KvlabError
from kvlab.live.fidelity import closed_against_open, fidelity
from kvlab.live.shared_prefill import shared_prefill

# One of each kind: prefill alone, pseudo-tokens, all layers at once, while decoding, merging, selection, both.
KINDS = ("snapkv", "dapq", "zigzagkv", "h2o", "zsmerge", "sparq", "rocketkv")
WINDOWED = ("hybrid-gemma2", "hybrid-gemma3", "hybrid-gpt-oss", "hybrid-llama4")
# Every policy on three models, the kinds on the others.
CASES = [
    (family, name)
    for family in HYBRIDS
    for name in EVERYTHING
    if name in KINDS or family in ("hybrid-gemma2", "hybrid-gemma3", "hybrid-gpt-oss")
]


# --- a budget as large as everything ---


@pytest.fixture(scope="module")
def plain(tiny):
    return plain_runs(lambda family: hybrid(tiny, family))


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_budget_as_large_as_everything_changes_nothing(tiny, plain, family, name):
    changes_nothing(hybrid(tiny, family), plain(family), everything(name))


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_others_hold_what_transformers_own_cache_holds(tiny, family):
    lm, ids = hybrid(tiny, family), prompt(40)
    with torch.inference_mode():
        own = DynamicCache(config=lm.model.config)
        lm.model(ids, past_key_values=own)
        with kvlab.compress(lm.model, small("snapkv")) as session:
            past = lm.model(ids).past_key_values
            assert session.layers.bytes.sum() == session.kv_bytes + session.uncompressed_bytes
            session.end_prompt()
    for number in lm.layout.others:
        mine, plain = past.layers[number], own.layers[number]
        assert type(mine) is type(plain)
        for name in ("keys", "values"):
            if hasattr(plain, name):
                torch.testing.assert_close(getattr(mine, name), getattr(plain, name), atol=1e-4, rtol=1e-4)
    assert session.kv_bytes == 14 * 2 * 2 * 2 * 16 * 4
    table = session.layers
    assert table.columns.tolist() == ["layer", "sees", "compressed", "bytes"]
    assert table[table.compressed].bytes.sum() == session.kv_bytes + session.aux_bytes
    assert table[~table.compressed].bytes.sum() == session.uncompressed_bytes > 0


def test_a_plain_model_has_nothing_beside(tiny):
    with kvlab.compress(tiny().model, "full") as session:
        generate(tiny().model, prompt(20), 3)
    assert session.uncompressed_bytes == 0 and session.layers.compressed.all()


def test_a_layer_that_is_not_compressed_is_one_sentence(tiny):
    lm = tiny("hybrid-gemma3")
    trace = kvlab.capture(lm, prompt(40), 3, pseudo=())
    result = kvlab.replay(trace, small("snapkv"))
    with kvlab.compress(lm.model, small("snapkv")) as session:
        generate(lm.model, prompt(40), 3)
    for asked in (session.kept, session.kept_after_prefill, result.kept, result.stored):
        with pytest.raises(KvlabError, match=r"^layer 1 sees a window of 16 tokens .* are layers 2 and 4$"):
            asked(1)
        assert asked(4).shape[0] == 2
    with pytest.raises(KvlabError, match=r"layer 5 is outside 0 \.\. 4"):
        session.kept(5)


# --- the same as a replay ---


@pytest.mark.parametrize(("family", "name"), [(f, n) for f, n in CASES if n != "full"])
def test_live_keeps_what_a_replay_keeps(tiny, family, name):
    """And at the first step loses what the replay loses, in the first layer that is compressed."""
    lm, one, ids = hybrid(tiny, family), small(name), prompt(60, seed=7)
    trace = kvlab.capture(lm, ids, 3, policies=[one], pseudo=())
    opened = kvlab.replay(trace, one)
    probes = ["mass_lost", "output_error", "sink_share"]
    with kvlab.compress(lm.model, one, probes=probes, max_new_tokens=3) as session, torch.inference_mode():
        out = lm.model(ids)
        lm.model(trace.ids[60].view(1, 1), past_key_values=out.past_key_values)
    for layer in lm.layout.compressed:
        assert sets(session.kept_after_prefill(layer)) == sets(opened.kept(layer))
    table = session.table
    assert sorted(table.layer.unique()) == list(lm.layout.compressed) == sorted(opened.table.layer.dropna().unique())
    first = table[table.layer == lm.layout.compressed[0]]
    for measure in ("mass_lost", "output_error"):
        closed = first[first.measure == measure].value.tolist()
        assert closed == pytest.approx(getattr(opened, measure)[0, :, 0].tolist(), abs=1e-4)
    if family == "hybrid-gpt-oss":
        assert table[table.measure == "sink_share"].value.mean() > 0.05
    else:
        assert (table[table.measure == "sink_share"].value == 0).all() and opened.sink_share is None


@pytest.mark.parametrize("family", HYBRIDS)
def test_both_loops_begin_alike(tiny, family):
    lm, ids = hybrid(tiny, family), prompt(60, seed=7)[0]
    loops = closed_against_open(lm, small("snapkv"), ids, new_tokens=6)
    assert loops.table.kl[0] == pytest.approx(0, abs=1e-5)
    whole = closed_against_open(lm, "full", ids, new_tokens=6)
    assert whole.first_difference is None and whole.table.mass_lost_closed.max() < 1e-5
    found = fidelity(lm, "full", ids, new_tokens=6).summary
    assert found["kl"] == pytest.approx(0, abs=1e-5) and found["agreement"] == 1
    assert fidelity(lm, small("streamingllm"), ids, new_tokens=6).summary["kl"] > 1e-4


# --- the ways in which people generate ---


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("name", KINDS)
def test_each_row_of_a_padded_batch_goes_as_it_goes_alone(tiny, family, name):
    lm = hybrid(tiny, family)
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


@pytest.mark.parametrize("family", HYBRIDS)
def test_beams_and_samples_are_those_of_the_plain_model(tiny, family):
    model = hybrid(tiny, family).model
    ids, mask = left_padded(*(prompt(n, seed=n)[0] for n in (40, 23)))
    beams = dict(attention_mask=mask, num_beams=3, num_return_sequences=2, output_logits=False)
    samples = dict(do_sample=True, temperature=1.5, num_return_sequences=3)
    expected = generate(model, ids, 14, **beams)
    torch.manual_seed(7)
    drawn = generate(model, ids[:1], **samples)
    for name in ("snapkv", "h2o"):
        with kvlab.compress(model, everything(name)):
            assert generate(model, ids, 14, **beams).sequences.tolist() == expected.sequences.tolist()
            torch.manual_seed(7)
            agree(generate(model, ids[:1], **samples), drawn)


@pytest.mark.parametrize("family", HYBRIDS)
def test_what_the_others_hold_moves_with_a_beam(tiny, family):
    model, prompts, new = hybrid(tiny, family).model, torch.cat([prompt(40, seed=s) for s in (1, 2)]), prompt(8, seed=4)

    def after(rows, order):
        with kvlab.compress(model, small("snapkv")), torch.no_grad():
            past = model(rows).past_key_values
            for token in new[0, :4]:
                model(token.expand(past.batch, 1), past_key_values=past)
            past.reorder_cache(torch.tensor(order))
            logits = [model(token.expand(past.batch, 1), past_key_values=past).logits for token in new[0, 4:]]
        return torch.cat(logits, 1)

    moved, alone = after(prompts, [1, 1]), after(prompts[1:], [0])
    torch.testing.assert_close(moved, alone.expand_as(moved), atol=1e-4, rtol=0)


def two_turns(model, turns=None, name="full"):
    """Two responses of a padded batch of two, the second to more of the user's tokens."""
    ids, mask = left_padded(prompt(40, seed=1)[0], prompt(29, seed=2)[0])
    new, ones = prompt(7, seed=3, rows=2), torch.ones(2, 7 + 12, dtype=torch.long)
    first = generate(model, ids, attention_mask=mask)
    longer = torch.cat([first.sequences, new], 1)
    longer_mask = torch.cat([mask, ones], 1)
    return first, generate(model, longer, attention_mask=longer_mask, past_key_values=first.past_key_values)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("turns", ["recompress", "leave"])
def test_a_second_turn_goes_on_as_plain_generation(tiny, family, turns):
    model = hybrid(tiny, family).model
    expected = two_turns(model)
    for name in ("snapkv", "zsmerge", "dapq"):
        with kvlab.compress(model, everything(name), turns=turns):
            for found, wanted in zip(two_turns(model), expected, strict=True):
                agree(found, wanted)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_second_turn_is_recompressed(tiny, family):
    lm = hybrid(tiny, family)
    with kvlab.compress(lm.model, small("snapkv"), probes=["mass_lost"]) as session:
        first = generate(lm.model, prompt(50), 12)
        longer = torch.cat([first.sequences, prompt(20, seed=8)], 1)
        generate(lm.model, longer, 9, past_key_values=first.past_key_values)
    assert session.kv_bytes == (14 + 8) * 2 * 2 * 2 * 16 * 4
    assert session.table.value.between(0, 1).all()


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_in_pieces_is_one_prompt(tiny, family, name):
    lm = hybrid(tiny, family)
    ids, mask = left_padded(prompt(60, seed=1)[0], prompt(33, seed=2)[0])
    with kvlab.compress(lm.model, small(name)) as session:
        whole = generate(lm.model, ids, attention_mask=mask)
        kept = [sets(session.kept_after_prefill(layer, 1)) for layer in lm.layout.compressed]
        found = generate(lm.model, ids, attention_mask=mask, prefill_chunk_size=23)
        assert [sets(session.kept_after_prefill(layer, 1)) for layer in lm.layout.compressed] == kept
    agree(found, whole, atol=1e-3)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_plain_cache_with_content_is_continued(tiny, family):
    model, ids = hybrid(tiny, family).model, prompt(60)
    expected = generate(model, ids)
    for past in (DynamicCache(config=model.config), DynamicCache()):
        if not past.layers and family not in WINDOWED:
            continue  # transformers itself makes no convolution or linear state without the configuration
        with torch.no_grad():
            model(ids[:, :30], past_key_values=past)
        with kvlab.compress(model, everything("snapkv")):
            agree(generate(model, ids, past_key_values=past), expected)
        assert past.get_seq_length() == 60 + 11, "the caller's own cache is the one that was filled"


def test_layers_of_a_cache_that_was_handed_in_have_their_places(tiny):
    """PyramidKV gives the first of the compressed layers more than the last, whoever fed the prompt."""
    for family in ("tiny-llama-gqa", "hybrid-gemma3"):
        lm, ids, past = tiny(family), prompt(60), DynamicCache(config=tiny(family).model.config)
        policy = kvlab.policy("pyramidkv", budget=20, window=6, kernel=3)
        trace = kvlab.capture(lm, ids, 1, pseudo=())
        with torch.no_grad():
            lm.model(ids[:, :30], past_key_values=past)
            with kvlab.compress(lm.model, policy) as session:
                lm.model(ids[:, 30:], past_key_values=past)
                session.end_prompt()
        opened = kvlab.replay(trace, policy)
        for layer in lm.layout.compressed:
            assert sets(session.kept(layer)) == sets(opened.kept(layer))
        assert session.kept(lm.layout.compressed[0]).shape[1] > session.kept(lm.layout.compressed[1]).shape[1]


@pytest.mark.parametrize("family", (*WINDOWED, "hybrid-lfm2"))
def test_drafted_tokens_are_taken_back(tiny, family):
    model, ids = hybrid(tiny, family).model, prompt(20).repeat(1, 3)
    expected = generate(model, ids, 20, output_logits=False)
    with kvlab.compress(model, everything("snapkv"), turns="leave"):
        found = generate(model, ids, 20, output_logits=False, prompt_lookup_num_tokens=3)
    assert found.sequences.tolist() == expected.sequences.tolist()


# --- one prefill for several policies, and several sessions as one batch ---


@torch.inference_mode()
@pytest.mark.parametrize("family", HYBRIDS)
def test_sessions_branch_off_from_one_prefill_and_join_again(tiny, family):
    lm, ids, fed = hybrid(tiny, family), prompt(45, seed=1), prompt(8, seed=2)
    policies = [kvlab.policy("full"), *map(small, KINDS)]
    expected = []
    for one in policies:
        with kvlab.compress(lm.model, one, turns="leave", max_new_tokens=8) as session:
            past = lm.model(ids).past_key_values
            logits = [lm.model(token[:, None], past_key_values=past).logits for token in fed.unbind(1)]
        expected.append((torch.cat(logits, 1), [sets(session.kept(layer)) for layer in lm.layout.compressed]))
    with shared_prefill(lm.model, policies):
        prefilled = lm.model(ids).past_key_values
    ended = []
    for one, (logits, kept) in zip(policies, expected, strict=True):
        with kvlab.compress(lm.model, one, turns="leave", max_new_tokens=8) as session:
            past = session.branch(prefilled)
            found = [lm.model(token[:, None], past_key_values=past).logits for token in fed.unbind(1)]
        torch.testing.assert_close(torch.cat(found, 1), logits, atol=1e-4, rtol=0)
        assert [sets(session.kept(layer)) for layer in lm.layout.compressed] == kept, one
        with kvlab.compress(lm.model, one, turns="leave", max_new_tokens=8) as session:
            session.branch(prefilled)
            session.end_prompt()
        ended.append(session)
    with kvlab.compress(lm.model, "full", turns="leave") as together:
        past = together.join(ended)
        each = fed.expand(len(policies), -1)
        joined = torch.cat([lm.model(token[:, None], past_key_values=past).logits for token in each.unbind(1)], 1)
    for row, (logits, kept) in enumerate(expected):
        torch.testing.assert_close(joined[row : row + 1], logits, atol=1e-4, rtol=0)
        assert [sets(together.kept(layer, row)) for layer in lm.layout.compressed] == kept


class Told(kvlab.Policy):
    """Keeps everything, and writes down what it is told of the logits."""

    name: ClassVar[str] = "told"
    scalings: ClassVar[list] = []
    budget: int = 4

    def choose(self, prompt, budget):
        self.scalings.append(prompt.scaling)
        return super().choose(prompt, budget)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["hybrid-gemma3", "hybrid-gemma2", "hybrid-gpt-oss", "tiny-granite"])
def test_a_branch_whose_first_step_ends_the_prompt_knows_the_models_factor(tiny, family):
    """It has made no forward pass of its own by then; 1 / sqrt(head_dim) is wrong for all but gpt-oss."""
    lm, ids = hybrid(tiny, family), prompt(45, seed=1)
    Told.scalings.clear()
    with shared_prefill(lm.model, [Told()]):
        prefilled = lm.model(ids).past_key_values
    with kvlab.compress(lm.model, Told()) as session:
        lm.model(ids[:, :1], past_key_values=session.branch(prefilled))
    modules = [lm.model.model.layers[layer].self_attn for layer in lm.layout.compressed]
    for told, module in zip(map(Softmax.of, Told.scalings), modules, strict=True):
        assert told.factor == module.scaling and (told.softcap or 0) == (
            getattr(module, "attn_logit_softcapping", 0) or 0
        )
        assert told.sinks is None if family != "hybrid-gpt-oss" else torch.equal(told.sinks, module.sinks)
    assert family == "hybrid-gpt-oss" or modules[0].scaling != 16**-0.5
    policy = small("snapkv")
    with shared_prefill(lm.model, [policy]):
        prefilled = lm.model(ids).past_key_values
    with kvlab.compress(lm.model, policy) as session:
        lm.model(ids[:, :1], past_key_values=session.branch(prefilled))
    opened = kvlab.replay(kvlab.capture(lm, ids, 0, pseudo=()), policy)
    for layer in lm.layout.compressed:
        assert sets(session.kept_after_prefill(layer)) == sets(opened.kept(layer))


# --- a model that sees nothing but windows ---


def test_a_model_of_windows_alone_is_refused_beyond_them(tiny):
    model = tiny("tiny-mistral", sliding_window=32).model
    with kvlab.compress(model, small("snapkv")):
        agree(generate(model, prompt(20), 10), generate(model, prompt(20), 10))
        with pytest.raises(KvlabError, match="every layer of .* has a sliding window, .* at most 32 tokens"):
            generate(model, prompt(20), 20)
