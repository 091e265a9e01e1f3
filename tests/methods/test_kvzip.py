"""KVzip: the pass that repeats a prompt, its scores by plain loops, and the one budget of all layers and heads."""

from __future__ import annotations

import pytest
import torch
from support import oracles
from support.eager import eager
from support.live_runs import generate, left_padded, prompt
from support.tensors import exact, sets

import kvlab
from kvlab.core import hookable
from kvlab.core.softmax import Softmax
from kvlab.errors import KvlabError
from kvlab.methods._base.repeating import FIRST, LATER, Repetition

LENGTH, CHUNK = 60, 25


def by_hand(lm, ids, plus, sinks=4, asking=()):
    """Scores [layers][kv_heads][length]: the repeated parts are fed as a response, and plain loops look at it."""
    scores = None
    for start in range(0, len(ids), CHUNK):
        stop = min(start + CHUNK, len(ids))
        fed = torch.cat([*asking[start // CHUNK : start // CHUNK + 1], ids[start:stop]])
        trace = kvlab.capture(lm, ids, len(fed), response=fed)
        seen = eager(lm, torch.cat([ids, fed])) if plus else None
        found = []
        for layer in range(trace.n_layers):
            queries, keys, values = exact(trace.response_queries[layer], trace.keys[layer], trace.values[layer])
            more = (exact(seen.hidden[layer][len(ids) :]), exact(trace.model_projections[layer])) if plus else ()
            found.append(oracles.repeat_scores(queries, keys, values, len(ids), start, stop, sinks, *more))
        scores = found if scores is None else joined(scores, found)
    return scores


def joined(scores, more):
    return [[a + b for a, b in zip(*heads, strict=True)] for heads in zip(scores, more, strict=True)]


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("family", ["tiny-llama-gqa", "tiny-qwen3", "hybrid-qwen3-next"])
def test_scores_and_sets_are_those_of_the_plain_loops(tiny, family, plus):
    lm, ids = tiny(family), prompt(LENGTH, seed=4)[0]
    policy = kvlab.policy("kvzip", budget=20, chunk=CHUNK, plus=plus)
    trace = kvlab.capture(lm, ids, 2, policies=[policy])
    expected = by_hand(lm, ids, plus)
    torch.testing.assert_close(
        trace.prompt.repeated(policy, policy.repetition).double(), torch.tensor(expected).double(), atol=1e-5, rtol=1e-3
    )
    kept = oracles.oracle_kvzip(expected, 20)
    replay = kvlab.replay(trace, policy)
    assert [sets(replay.kept(layer)) for layer in trace.layers] == kept
    sizes = [len(positions) for heads in kept for positions in heads]
    assert sum(sizes) == 20 * len(sizes) and len(set(sizes)) > 1
    with kvlab.compress(lm.model, policy) as session:
        generate(lm.model, ids[None], 3)
    assert [sets(session.kept_after_prefill(layer)) for layer in trace.layers] == kept


def test_the_instruction_comes_before_each_part(tiny):
    lm = tiny("tiny-llama-gqa", tokenizer="smollm2-135m")
    ids = torch.randint(3, 200, (LENGTH,), generator=torch.Generator().manual_seed(1))
    first, later = (lm.encode(text, chat=False)[0] for text in (FIRST, LATER))
    asking = [first, *(torch.cat([later, ids[start - 8 : start]]) for start in (25, 50))]
    policy = kvlab.policy("kvzip", budget=20, chunk=CHUNK)
    trace = kvlab.capture(lm, ids, 2, policies=[policy])
    found = trace.prompt.repeated(policy, policy.repetition).double()
    torch.testing.assert_close(found, torch.tensor(by_hand(lm, ids, False, asking=asking)), atol=1e-5, rtol=1e-3)
    with kvlab.compress(lm, policy) as session:
        generate(lm.model, ids[None], 3)
    replay = kvlab.replay(trace, policy)
    for layer in range(2):
        assert sets(session.kept_after_prefill(layer)) == sets(replay.kept(layer))
    without = kvlab.capture(tiny("tiny-llama-gqa"), ids % 256, 2, policies=[policy]).repeated
    assert without.keys() == trace.repeated.keys(), "without a tokenizer the instruction is left out"


def test_parts_cover_the_prompt_once():
    ids = torch.arange(100, 160)
    parts = Repetition(25, 4, False).parts(ids, None)
    assert [(part.start, part.stop) for part in parts] == [(0, 25), (25, 50), (50, 60)]
    assert torch.cat([part.ids for part in parts]).equal(ids)
    (whole,) = Repetition(2000, 4, False).parts(ids, lambda text: torch.tensor([len(text)]))
    assert whole.ids.tolist() == [len(FIRST), *ids.tolist()]


def test_left_padded_rows_and_branches_keep_what_each_keeps_alone(tiny):
    from kvlab.live.shared_prefill import shared_prefill

    lm, policy = tiny("tiny-llama-gqa"), kvlab.policy("kvzip", budget=14, chunk=20, plus=True)
    rows = [prompt(n, seed=n)[0] for n in (44, 57)]
    ids, mask = left_padded(*rows)
    with kvlab.compress(lm.model, policy) as batch:
        generate(lm.model, ids, 3, attention_mask=mask)
    for row, alone in enumerate(rows):
        with kvlab.compress(lm.model, policy) as session:
            generate(lm.model, alone[None], 3)
        with shared_prefill(lm.model, [policy, kvlab.policy("snapkv", budget=40)]), torch.inference_mode():
            prefilled = lm.model(alone[None], use_cache=True).past_key_values
        branched = kvlab.compress(lm.model, policy)
        with branched:
            branched.branch(prefilled)
            branched.end_prompt()
        for layer in range(2):
            kept = sets(session.kept_after_prefill(layer))
            assert sets(batch.kept_after_prefill(layer, row)) == kept == sets(branched.kept_after_prefill(layer))


def test_budgets_share_one_pass_over_a_prefilled_prompt(tiny, monkeypatch):
    from kvlab.live import passes
    from kvlab.live.shared_prefill import shared_prefill

    lm, ran = tiny("tiny-llama-gqa"), []
    run = passes.run
    monkeypatch.setattr(passes, "run", lambda *args: ran.append(1) or run(*args))
    policies = [kvlab.policy("kvzip", budget=budget) for budget in (8, 12, 30)]
    with shared_prefill(lm.model, policies), torch.inference_mode():
        prefilled = lm.model(prompt(50), use_cache=True).past_key_values
    for policy in policies:
        session = kvlab.compress(lm.model, policy)
        with session:
            session.branch(prefilled)
            session.end_prompt()
        assert session.kv_bytes == policy.budget * 2 * 2 * 2 * 16 * 4
    assert len(ran) == 1


def test_scores_of_a_float64_model_stay_float64():
    repetition = kvlab.policy("kvzip", budget=20).repetition
    states = [torch.randn(1, heads, 30, 16, dtype=torch.float64) for heads in (4, 2, 2)]
    part = repetition.parts(prompt(20)[0], None)[0]
    queries, keys, values = states[0][:, :, :10], *states[1:]
    assert repetition.scores(part, queries, keys, values, Softmax.of(None)).dtype == torch.float64


def test_a_saved_trace_has_the_scores_and_another_says_what_is_missing(tiny, tmp_path):
    lm, policy = tiny("tiny-llama-gqa"), kvlab.policy("kvzip", budget=20)
    trace = kvlab.capture(lm, prompt(50), 2, policies=["kvzip"])
    loaded = kvlab.Trace.load(trace.save(tmp_path / "repeated.safetensors"))
    assert kvlab.replay(loaded, policy).kept(1).equal(kvlab.replay(trace, policy).kept(1))
    told = r"kvzip needs the scores of a pass that repeats the prompt \(chunk=2000, sinks=4, plus=True\): capture with"
    with pytest.raises(KvlabError, match=told):
        kvlab.replay(loaded, policy.replace(plus=True))
    with pytest.raises(KvlabError, match="shares its budget out among all layers"):
        policy.keep(*(torch.ones(1, 2, 30, 4) for _ in range(3)))
    loaded.repeated["chunk=2000, sinks=4, plus=False"] = torch.ones(2, 2, 49)
    loaded.save(tmp_path / "short.safetensors")
    with pytest.raises(KvlabError, match="scores of a repetition"):
        kvlab.Trace.load(tmp_path / "short.safetensors")


def test_what_cannot_be_repeated_is_refused(tiny):
    lm = tiny("tiny-llama-gqa", max_position_embeddings=100)
    with pytest.raises(KvlabError, match="the prompt has 60 tokens and 60 follow it, which is beyond the 100"):
        kvlab.capture(lm, prompt(60), 2, policies=["kvzip"])
    model, policy = tiny("tiny-llama-gqa").model, kvlab.policy("kvzip", budget=20)
    embedded = model.get_input_embeddings()(prompt(40))
    with kvlab.compress(model, policy) as session, torch.inference_mode():
        model(inputs_embeds=embedded)
        with pytest.raises(KvlabError, match="has the model repeat its prompt from the prompt's token ids"):
            session.end_prompt()
    with kvlab.compress(model, policy):
        first = generate(model, prompt(50), 3)
        longer = torch.cat([first.sequences, prompt(9, 1)], 1)
        with pytest.raises(KvlabError, match=r"store later turns whole \(turns='leave'\)"):
            generate(model, longer, 3, past_key_values=first.past_key_values)


def test_the_pass_leaves_the_cache_as_it_was(tiny):
    """With room for everything the answer is that of the full cache."""
    lm = tiny("hybrid-gemma3")
    plain = generate(lm.model, prompt(50), 6)
    policy = kvlab.policy("kvzip", budget=49, sinks=1)
    with kvlab.compress(lm.model, policy.replace(budget=200)) as session:
        assert generate(lm.model, prompt(50), 6).sequences.equal(plain.sequences)
    with kvlab.compress(lm.model, policy) as session:
        generate(lm.model, prompt(50), 2)
    assert session.kv_bytes == (49 + 1) * len(hookable.layers_of(lm.model)) * 2 * 2 * 16 * 4
