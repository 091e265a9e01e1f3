"""What a live run tells its policies besides the window: the attention of all queries, likelihoods, other layers."""

from typing import ClassVar

import pytest
import torch
from support.live_runs import generate, left_padded, prompt

import kvlab
from kvlab.errors import KvlabError
from kvlab.methods._base.policy import Budget, Policy


class Curious(Policy):
    """Keeps everything but asks for all that there is to know."""

    name: ClassVar[str] = "curious"
    told: ClassVar[list] = []

    budget: Budget = 8

    @property
    def accumulates(self):
        return True

    @property
    def reads_perplexity(self):
        return 10

    def compress(self, store, prompt):
        super().compress(store, prompt)
        self.told.append((prompt.layers, prompt.accumulated(self), prompt.perplexity(self), prompt.max_new_tokens))


class Planning(Policy):
    """Each layer keeps the most recent entries; how many follows from all layers together."""

    name: ClassVar[str] = "planning"
    budget: Budget = 8

    def survey(self, prompt):
        return prompt.keys.norm(dim=-1).mean((1, 2))

    def plan(self, surveys, prompt):
        ranks = surveys.argsort(0).argsort(0)
        return self.entries(prompt.length) - ranks

    def choose(self, prompt, budget):
        assert prompt.plan is not None
        widest = int(prompt.plan.max())
        newest = prompt.length - prompt.plan[:, None] + torch.arange(widest)
        return newest.masked_fill(newest >= prompt.length, -1)[:, None].expand(-1, prompt.kv_heads, -1)


@pytest.fixture
def curious():
    Curious.told.clear()
    return Curious()


def told_of(lm, policy, ids, pieces=1, **options):
    with kvlab.compress(lm.model, policy, max_new_tokens=7) as session, torch.inference_mode():
        cache = None
        for piece in ids.chunk(pieces, dim=1):
            cache = lm.model(piece, past_key_values=cache, logits_to_keep=1, **options).past_key_values
        session.end_prompt()
    return list(policy.told)


def perplexity(model, ids, n):
    """exp of the mean NLL of the last n tokens, by the plain model."""
    with torch.inference_mode():
        logits = model(ids[None]).logits[0].double()
    told = logits.log_softmax(-1)[range(len(ids) - n - 1, len(ids) - 1), ids[-n:]]
    return (-told.mean()).exp()


@pytest.mark.parametrize("pieces", [1, 3])
def test_one_prompt_whole_or_in_pieces(tiny, curious, pieces):
    lm, ids = tiny("tiny-llama-gqa"), prompt(45, seed=5)
    expected = kvlab.capture(lm, ids, new_tokens=0, window=12, accumulate=True, pseudo=())
    told = told_of(lm, curious, ids, pieces)
    assert [layers for layers, *_ in told] == [(0,), (1,)]
    for layer, (_, accumulated, found, longest) in enumerate(told):
        torch.testing.assert_close(accumulated[0], expected.accumulated[layer], atol=1e-4, rtol=1e-4)
        assert found == pytest.approx(float(perplexity(lm.model, ids[0], 10)), rel=1e-4)
        assert float(found) == pytest.approx(float(expected.prompt.perplexity(curious)[layer]), rel=1e-4)
        assert longest == 7


def test_padding_neither_gives_nor_gathers_attention(tiny, curious):
    lm = tiny("tiny-llama-gqa")
    rows = [prompt(n, seed=n)[0] for n in (40, 25, 40)]
    ids, mask = left_padded(*rows)
    with kvlab.compress(lm.model, curious):
        generate(lm.model, ids, 3, attention_mask=mask)
    told = list(curious.told)
    assert len(told) == 4  # two layers of two groups of equal length
    for (members, layer), (layers, accumulated, found, _) in zip(
        [([0, 2], 0), ([0, 2], 1), ([1], 0), ([1], 1)], sorted(told, key=lambda t: -t[1].shape[2]), strict=True
    ):
        assert layers == (layer,) * len(members)
        for place, row in enumerate(members):
            alone = kvlab.capture(lm, rows[row], new_tokens=0, window=12, accumulate=True, pseudo=())
            torch.testing.assert_close(accumulated[place], alone.accumulated[layer], atol=1e-4, rtol=1e-4)
            assert float(found[place]) == pytest.approx(float(perplexity(lm.model, rows[row], 10)), rel=1e-4)


def test_asking_for_likelihoods_hides_nothing_from_the_caller(tiny, curious):
    lm, ids = tiny("tiny-llama-gqa"), prompt(30, seed=6)
    with torch.inference_mode():
        for keep in (0, 1, 4):
            plain = lm.model(ids, logits_to_keep=keep).logits
            with kvlab.compress(lm.model, curious):
                torch.testing.assert_close(lm.model(ids, logits_to_keep=keep).logits, plain, atol=1e-5, rtol=1e-5)


def test_a_policy_that_plans_over_all_layers_keeps_the_same_live_and_replayed(tiny):
    lm, ids = tiny("tiny-llama-gqa"), prompt(40, seed=7)
    trace = kvlab.capture(lm, ids, new_tokens=3, pseudo=())
    result = kvlab.replay(trace, Planning())
    with kvlab.compress(lm.model, Planning()) as session:
        generate(lm.model, ids, 4)
    sizes = set()
    for layer in range(2):
        kept = session.kept_after_prefill(layer)
        wide = result.kept(layer)
        assert [[p for p in row if p >= 0] for row in wide.tolist()] == kept.tolist()
        sizes.add(kept.shape[1])
    assert sizes == {7, 8}
    with pytest.raises(KvlabError, match=r"all layers.*replay"):
        Planning().keep(trace.queries[:1], trace.prompt_keys[:1], trace.prompt_values[:1])
