"""What ends a prompt, and `generate`'s modes: each as without kvlab, as the policy alone, or refused."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
from support.live_runs import EVERYTHING, everything, generate, prompt, small
from transformers import GenerationConfig

import kvlab
from kvlab import KvlabError
from kvlab.core.storage import keys_and_values, kivi


def sequences(model, ids, n=12, **options):
    return generate(model, ids, n, output_logits=False, **options).sequences.tolist()


@pytest.fixture(scope="module")
def drafting(tiny):
    """A model, one that drafts well for it, and a prompt."""
    model = tiny().model
    draft = copy.deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for weights in draft.parameters():
            weights.add_(torch.randn_like(weights) * 0.002)
    return model, draft, prompt(20).repeat(1, 3)


# --- where a prompt ends ---


@pytest.mark.parametrize("name", [name for name in EVERYTHING if name not in ("full", "think")])
def test_a_last_chunk_of_one_token_is_prompt(tiny, name):
    model, ids, policy = tiny().model, prompt(65), small(name)
    found = []
    for options in ({}, {"prefill_chunk_size": 32}):
        with kvlab.compress(model, policy) as session:
            tokens = sequences(model, ids, 4, **options)
        found.append((tokens, [session.kept_after_prefill(layer).sort(-1).values.tolist() for layer in range(2)]))
    assert found[0] == found[1]


def test_going_on_with_a_response_is_no_new_turn(tiny):
    model, ids = tiny().model, prompt(50)
    with kvlab.compress(model, small("snapkv")) as session:
        whole = sequences(model, ids, 12)
        kept = session.kept(0)
        past = generate(model, ids, 6)
        assert sequences(model, past.sequences, 6, past_key_values=past.past_key_values) == whole
        assert torch.equal(session.kept(0), kept)


# --- drafts ---

RESTING = ["snapkv", "knorm", "dapq", "streamingllm", "h2o", "zsmerge", "quest", "pyramidkv", "adakv"]


@pytest.mark.parametrize("turns", ["recompress", "leave"])
@pytest.mark.parametrize("name", RESTING)
@pytest.mark.parametrize("how", ["assistant", "lookup"])
def test_with_drafts_a_policy_says_what_it_says_without_or_refuses_them(drafting, name, how, turns):
    model, draft, ids = drafting
    options = {"assistant_model": draft} if how == "assistant" else {"prompt_lookup_num_tokens": 3}
    policy = small(name)
    with kvlab.compress(model, policy, turns=turns) as session:
        expected, kept = sequences(model, ids, 20), session.kept(0)
        if policy.needs.acts_while_decoding:
            with pytest.raises(KvlabError, match=f"{name} cannot take tokens back.*assistant_model"):
                sequences(model, ids, 20, **options)
            return
        assert sequences(model, ids, 20, **options) == expected
        found = session.kept(0)
        assert torch.equal(found[:, : kept.shape[1]], kept) and found.shape[1] <= kept.shape[1] + 1
    assert sequences(model, ids, 20) != expected, "the full cache says something else, so that this test can fail"


def test_drafts_are_refused_where_probes_or_a_storage_need_single_steps(drafting):
    model, draft, ids = drafting
    rounding = kivi(4, group=16)
    forms = rounding, keys_and_values("turbo-4", rounding), keys_and_values(rounding, "int8")
    several = [({"storage": form}, "rounds several tokens") for form in forms]
    for options, why in (({"probes": ["mass_lost"]}, "single steps"), *several):
        with kvlab.compress(model, small("snapkv"), **options), pytest.raises(KvlabError, match=why):
            sequences(model, ids, assistant_model=draft)


@pytest.mark.parametrize("form", ["int8", "turbo-4", "nvfp4", "turbo-2/fp8"])
def test_storages_that_round_each_token_by_itself_take_drafts(drafting, form):
    model, draft, ids = drafting
    found = []
    for options in ({}, {"assistant_model": draft}):
        with kvlab.compress(model, small("snapkv"), storage=form):
            found.append(sequences(model, ids, 20, **options))
    assert found[0] == found[1]


def test_layers_of_the_model_itself_do_not_draft(tiny):
    model = tiny().model
    with kvlab.compress(model, "full"), pytest.raises(KvlabError, match="assistant_early_exit"):
        generate(model, prompt(20), assistant_early_exit=1)


# --- other modes ---


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 1.5},
        {"guidance_scale": 1.5, "negative_prompt_ids": prompt(9, seed=5)},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"repetition_penalty": 1.3},
        {"prefill_chunk_size": 7},
        {"cache_implementation": "dynamic"},
    ],
    ids=lambda options: "-".join(options),
)
def test_a_mode_at_full_budget_goes_as_without_kvlab(tiny, options):
    model, found = tiny().model, []
    for session in (contextlib.nullcontext(), kvlab.compress(model, everything("snapkv"))):
        torch.manual_seed(0)
        with session:
            found.append(sequences(model, prompt(60), **options))
    assert found[0] == found[1]


def test_embeddings_are_a_prompt_as_ids_are(tiny):
    model, ids = tiny().model, prompt(60)
    embedded = model.get_input_embeddings()(ids).detach()
    with kvlab.compress(model, small("snapkv")) as session:
        expected, kept = sequences(model, ids), session.kept(0)
        found = model.generate(inputs_embeds=embedded, max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert found.tolist()[0] == expected[0][60:] and torch.equal(session.kept(0), kept)


def test_what_is_no_dynamic_cache_is_refused(tiny):
    model = tiny().model
    with kvlab.compress(model, "full"), pytest.raises(KvlabError, match="a DynamicCache or None.*not a tuple"):
        model(prompt(20), past_key_values=())


def test_continuous_batching_is_refused(tiny):
    model = tiny().model
    with kvlab.compress(model, "full"), pytest.raises(KvlabError, match="continuous batching"):
        model.generate_batch([[5, 6, 7]])
    assert "generate_batch" not in vars(model) and "generate" not in vars(model)


# --- what the caller and the checkpoint ask for ---


def test_a_checkpoints_use_cache_is_not_the_callers(tiny):
    model = copy.deepcopy(tiny().model)
    expected = sequences(model, prompt(40))
    model.config.use_cache = model.generation_config.use_cache = False
    with kvlab.compress(model, "full"):
        assert sequences(model, prompt(40)) == expected
        assert sequences(model, prompt(40), generation_config=GenerationConfig(eos_token_id=None)) == expected
        with pytest.raises(KvlabError, match="use_cache=False"):
            sequences(model, prompt(40), use_cache=False)


def test_attention_weights_are_refused_and_not_left_out(tiny):
    model = tiny().model
    with kvlab.compress(model, "full"):
        with pytest.raises(KvlabError, match="output_attentions"):
            model(prompt(20), output_attentions=True)
        with pytest.raises(KvlabError, match="output_attentions"):
            generate(model, prompt(20), output_attentions=True)


def test_gradients_are_refused_and_not_zero(tiny):
    model = copy.deepcopy(tiny().model).requires_grad_(True)
    with kvlab.compress(model, "full"):
        loss = model(prompt(20)).logits.sum()
        with pytest.raises(KvlabError, match="gradients"):
            loss.backward()


@pytest.mark.parametrize("name", ["snapkv", "dapq", "expected_attention", "triattention", "kvzip"])
def test_positions_count_from_where_the_caller_puts_them(tiny, name):
    """RoPE is relative: the same tokens a hundred places on are the same prompt."""
    lm, ids = tiny("tiny-llama-gqa"), prompt(60)
    kept = []
    for start in (0, 100):
        with torch.no_grad(), kvlab.compress(lm, small(name)) as session:
            lm.model(ids, position_ids=torch.arange(start, start + 60)[None])
            session.end_prompt()
        kept.append([session.kept(layer).tolist() for layer in range(2)])
    assert kept[0] == kept[1]


def test_positions_with_gaps_are_refused_where_a_policy_counts_on(tiny):
    model, places = tiny().model, torch.cat([torch.arange(30), torch.arange(50, 80)])[None]
    for name, refused in (("snapkv", False), ("dapq", True)):
        with torch.no_grad(), kvlab.compress(model, small(name)) as session:
            model(prompt(60), position_ids=places)
            if refused:
                with pytest.raises(KvlabError, match="leave gaps"):
                    session.end_prompt()
            else:
                session.end_prompt()


# --- threads ---


def test_two_threads_in_one_session_each_get_their_own_answer(tiny):
    model, prompts = tiny().model, [prompt(40 + 9 * i, seed=i) for i in range(4)]
    with kvlab.compress(model, small("snapkv")):
        expected = [sequences(model, ids, 16) for ids in prompts]
        for _round in range(3):
            found: dict[int, list] = {}

            def answer(i, found=found):
                found[i] = sequences(model, prompts[i], 16)

            threads = [threading.Thread(target=answer, args=(i,)) for i in range(len(prompts))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert [found.get(i) for i in range(len(prompts))] == expected


def test_a_pass_that_failed_does_not_lock_other_threads_out(tiny):
    model, found = tiny().model, []
    with kvlab.compress(model, "full"):
        with pytest.raises(KvlabError):
            model(prompt(20), use_cache=False)
        thread = threading.Thread(target=lambda: found.append(sequences(model, prompt(20), 3)))
        thread.start()
        thread.join(60)
    assert found
