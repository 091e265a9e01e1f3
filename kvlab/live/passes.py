"""Forward passes that a live session makes by itself on top of a prompt, and what they are fed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from kvlab.core.hooks import Call, Handler
from kvlab.errors import KvlabError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvlab.live.cache import LiveCache
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


def run(model: PreTrainedModel, cache: LiveCache, number: int, ids: Tensor, handler: Handler, policy: Policy) -> Any:
    """Feed `ids` `[rows, m]` on top of one group's prompts, for a policy; afterwards the cache is as it was.

    Args:
        handler: gets each layer's call with the stored keys and values, and those of the pass behind them.

    Returns:
        What the model's own forward pass gives.
    """
    group = cache.compressed[0].groups[number]
    length, device = group.store.seen, group.store.device
    positions = torch.arange(length, length + ids.shape[1], device=device).expand_as(ids)
    positions = positions + torch.tensor(cache.offsets(number, policy), device=device)[:, None]
    # Layers left alone hold the padding too.
    padding = cache.seen - length
    mask = (torch.arange(cache.seen + ids.shape[1], device=device) >= padding).expand(len(ids), -1)

    def attend(call: Call) -> Tensor:
        store = cache.compressed[call.index].groups[number].store
        store.append(call.keys, call.values)
        return handler(replace(call, keys=store.keys, values=store.values, padding=None))

    cache.own_pass = attend
    try:
        with cache.on_trial(group.rows):
            output = model.base_model(
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
    return output


def next_ids(model: PreTrainedModel, output: Any) -> Tensor:
    """The most likely token after a pass, `[rows]`, from what `run` gives: hidden states, or logits of some models."""
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = cast("Any", model.get_output_embeddings())(output.last_hidden_state[:, -1:])
    return logits[:, -1].argmax(-1)
