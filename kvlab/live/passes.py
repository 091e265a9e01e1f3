"""Passes that a live session makes by itself on top of a prompt: of pseudo-tokens, and of the prompt once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.core import attention, hooks
from kvlab.errors import KvlabError
from kvlab.methods._base.repeating import Part, Repetition

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvlab.live.cache import LiveCache, Pass
    from kvlab.methods import Policy


def prompts(cache: LiveCache, number: int, why: str) -> Tensor:
    """The token ids of one group's prompts, `[rows, length]`, on the CPU.

    Args:
        why: what they are needed for, as the beginning of a sentence.

    Raises:
        KvlabError: not all of them are known.
    """
    if not cache.ids or sum(chunk.shape[1] for chunk in cache.ids) != cache.seen:
        raise KvlabError(
            f"{why} from the prompt's token ids, and not all are known; feed the whole prompt as input_ids inside the "
            "session"
        )
    group = cache.compressed[0].groups[number]
    return group.of(torch.cat(cache.ids, 1))[:, cache.seen - group.store.seen :].cpu()


def run(model: PreTrainedModel, cache: LiveCache, number: int, ids: Tensor, handler: Pass, policy: Policy) -> None:
    """Feed `ids` `[rows, m]` on top of one group's prompts, for a policy; afterwards the cache is as it was."""
    group = cache.compressed[0].groups[number]
    length, device = group.store.seen, group.store.device
    positions = torch.arange(length, length + ids.shape[1], device=device).expand_as(ids)
    positions = positions + torch.tensor(cache.offsets(number, policy), device=device)[:, None]
    # Layers left alone hold the padding too.
    padding = cache.seen - length
    mask = (torch.arange(cache.seen + ids.shape[1], device=device) >= padding).expand(len(ids), -1)
    cache.own_pass = handler
    try:
        with cache.on_trial(group.rows):
            model.base_model(
                input_ids=ids.to(device),
                attention_mask=mask.long() if padding else None,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
    finally:
        cache.own_pass = None
        for layer in cache.compressed:
            store = layer.groups[number].store
            store.truncate(store.length - (store.seen - length))


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
        store = cache.compressed[call.index].groups[self._group].store
        self.queries[call.index] = call.queries
        store.append(call.keys, call.values)
        return attention.attend(call.queries, store.keys, store.values, call.softmax)


class RepeatPass:
    """A forward pass in which the model repeats a part of one group's prompts.

    Attributes:
        scores: of the part, by index of the layer, `[rows, kv_heads, stop - start]`.
    """

    def __init__(self, group: int, repetition: Repetition, part: Part, projections: Sequence[Tensor | None]):
        self._group, self._repetition, self._part, self._projections = group, repetition, part, projections
        self.scores: dict[int, Tensor] = {}

    def attend(self, cache: LiveCache, call: hooks.Call) -> Tensor:
        store = cache.compressed[call.index].groups[self._group].store
        store.append(call.keys, call.values)
        keys, values, weight = store.keys, store.values, self._projections[call.index]
        self.scores[call.index] = self._repetition.scores(
            self._part, call.queries, keys, values, call.softmax, call.hidden, weight
        )
        return attention.attend(call.queries, keys, values, call.softmax)
