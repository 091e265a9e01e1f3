"""The end of a prompt in a live session: what the policy is shown of it, and the compression of every layer.

A policy may ask for pseudo-queries, which a pass of made-up tokens over the stored prompt finds, and it may plan over
all layers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.core import attention, hookable, hooks
from kvlab.core.storage import Storage
from kvlab.errors import KvlabError
from kvlab.live.attending import ACCUMULATED
from kvlab.live.cache import LiveCache
from kvlab.methods import Policy, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Prefill:
    """Compresses the prompts of one session when they end.

    Args:
        model: makes the pseudo-queries.
        turns: as `compress` takes it.
        encode: the token ids of a text, for pseudo-tokens that are made from a sentence; None without a tokenizer.
        max_new_tokens: how long the response may grow; 0 where that is not known.
        storage: in what form what the policy keeps is stored.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        turns: str,
        encode: Callable[[str], Tensor] | None,
        max_new_tokens: int,
        storage: Storage,
    ):
        self._model, self._policy, self._turns, self._storage = model, policy, turns, storage
        self._encode, self._max_new_tokens = encode or _no_tokenizer, max_new_tokens

    def end(self, cache: LiveCache) -> None:
        """Compress what a cache without padding holds, layer by layer, and mark its prompt as ended.

        Raises:
            KvlabError: the policy cannot work on this prompt.
        """
        policy = self._policy
        for number in range(len(cache.compressed[0].groups)):
            stores = [layer.groups[number].store for layer in cache.compressed]
            judged = any(self._judges(store.length) for store in stores)
            if any(store.ragged for store in stores) and not policy.takes_ragged:
                raise KvlabError(
                    f"{policy.name} left sequences or heads with different numbers of entries, which cannot be "
                    "one prompt again; store later turns whole (turns='leave')"
                )
            pseudo = self._pseudo_queries(cache, number) if judged and policy.pseudo_key else {}
            planned = self._planned(cache, number) if policy.sees_all_layers and judged else []
            for index, layer in enumerate(cache.compressed):
                group = layer.groups[number]
                # What a layer's prompt holds on to is freed before the next layer is compressed.
                prompt = planned.pop(0) if planned else self._prompt(cache, index, number, pseudo.get(index))
                policy.compress(group.store, prompt)
                # After the eviction: what is rounded are the entries that stay.
                group.store.hold(self._storage)
                group.kept = group.store.positions.clone()
                group.lossy = group.lossy or group.store.length < group.store.seen or group.store.merged
        for layer in cache.compressed:
            if self._turns == "leave" or policy.observes is None:
                layer.forget()
        cache.ended = True

    def _prompt(self, cache: LiveCache, index: int, number: int, pseudo: Tensor | None = None) -> Prompt:
        """The end of one layer's and one group's prefill, as the policy sees it."""
        layer = cache.compressed[index]
        group = layer.groups[number]
        store = group.store
        window = layer.observed
        window = store.keys[:, :, :0] if window is None else group.of(window)
        window = window[:, :, max(window.shape[2] - store.length, 0) :]
        self._check_window(window.shape[2], store.length)
        accumulated = None
        if store.has_column(ACCUMULATED):
            accumulated = store.remove_column(ACCUMULATED).transpose(2, 3).flatten(1, 2)

        def perplexity(n: int) -> Tensor | None:
            return cache.likelihood.perplexity(min(n, store.seen - 1), group.rows)

        prompt = Prompt(
            window,
            store.keys,
            store.values,
            store.layers,
            len(cache.compressed),
            pseudo,
            accumulated,
            self._max_new_tokens,
            layer.softmax,
            perplexity,
        )
        prompt.lossy, prompt.seen = group.lossy, store.seen
        return prompt

    def _planned(self, cache: LiveCache, number: int) -> list[Prompt]:
        """One group's prompt in each layer, with what the policy plans over all of them."""
        prompts = [self._prompt(cache, index, number) for index in range(len(cache.compressed))]
        surveys = [self._policy.survey(prompt) for prompt in prompts]
        # In a later turn layers hold different numbers of entries; what is not there scores least.
        widest = max(survey.shape[-1] for survey in surveys)
        surveys = [F.pad(survey, (0, widest - survey.shape[-1]), value=-torch.inf) for survey in surveys]
        plan = self._policy.plan(torch.stack(surveys), max(prompts, key=lambda prompt: prompt.length))
        return [prompt.with_plan(layer) for prompt, layer in zip(prompts, plan, strict=True)]

    def _judges(self, length: int) -> bool:
        """Whether the policy looks at a prompt of this length, or keeps it whole unseen."""
        return self._policy.steps or not self._policy.fits(length)

    def _check_window(self, known: int, length: int) -> None:
        """Raise KvlabError where the policy looks at more of the last queries than are `known`."""
        policy = self._policy
        need = length if policy.observes is None else min(policy.observes, length)
        if known >= need or not self._judges(length):
            return
        if policy.observes is None:
            raise KvlabError(
                f"{policy.name} looks at every query of its prompt, and after an earlier turn or a cache that was "
                f"handed in only {known} of {length} are known; store later turns whole (turns='leave'), or begin anew"
            )
        raise KvlabError(
            f"{policy.name} looks at the last {need} queries, and only {known} were fed inside the session after "
            "the cache that was handed in; feed the end of the prompt there"
        )

    def _pseudo_queries(self, cache: LiveCache, number: int) -> dict[int, Tensor]:
        """Post-RoPE pseudo-queries `[rows, heads, m, head_dim]` of one group, by place of the layer."""
        if not cache.ids or sum(chunk.shape[1] for chunk in cache.ids) != cache.seen:
            raise KvlabError(
                f"{self._policy.name} makes pseudo-tokens from the prompt's token ids, and not all are known; feed the "
                "whole prompt as input_ids inside the session"
            )
        group = cache.compressed[0].groups[number]
        length = group.store.seen
        prompts = group.of(torch.cat(cache.ids, 1))[:, cache.seen - length :].cpu()
        vocabulary = hookable.text_config(self._model).vocab_size
        ids = torch.stack([self._policy.pseudo_tokens(row, vocabulary, self._encode) for row in prompts])
        device = group.store.device
        positions = torch.arange(length, length + ids.shape[1], device=device).expand_as(ids)
        # Layers left alone hold the padding too.
        padding = cache.seen - length
        mask = (torch.arange(cache.seen + ids.shape[1], device=device) >= padding).expand(len(ids), -1)
        cache.pseudo = pseudo = PseudoPass(number)
        try:
            with cache.on_trial(group.rows):
                self._model.base_model(
                    input_ids=ids.to(device),
                    attention_mask=mask.long() if padding else None,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                )
        finally:
            cache.pseudo = None
            for layer in cache.compressed:
                store = layer.groups[number].store
                store.truncate(store.length - (store.seen - length))
        return pseudo.queries


class PseudoPass:
    """A forward pass of pseudo-tokens over one group's prompt.

    Attributes:
        queries: of the layers that it went through, by their places, `[rows, heads, m, head_dim]` each.
    """

    def __init__(self, group: int):
        self._group = group
        self.queries: dict[int, Tensor] = {}

    def attend(self, cache: LiveCache, call: hooks.Call) -> Tensor:
        """Attend over the prompt, whose store holds the pseudo-tokens' entries too until the pass is over."""
        store = cache.compressed[call.place].groups[self._group].store
        self.queries[call.place] = call.queries
        store.append(call.keys, call.values)
        return attention.attend(call.queries, store.keys, store.values, call.softmax)


def _no_tokenizer(text: str) -> Tensor:
    raise KvlabError("pseudo-tokens from a sentence need a tokenizer: compress(model, policy, tokenizer=...)")
