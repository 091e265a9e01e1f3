"""Which tokens of a prompt are padding, where `generate` is not told: transformers guesses it from the pad id."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def masks_told(model: nn.Module) -> Iterator[None]:
    """While the block runs, `model.generate` without an attention mask gets one from `left_padding`.

    A prompt may hold the pad id as a token of its own (in OLMo 2 it is an id like any other). transformers' guess hides
    that token and shifts all later positions, and a session would speak of padding where there is none. The guess is
    made inside `generate`, so that this stands around it, on this one model and not on its class.
    """
    before = vars(model).get("generate")
    generate = getattr(model, "generate", None)
    if generate is None:  # a decoder without a head
        yield
        return

    @functools.wraps(generate)
    def told(inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids") if inputs is None else inputs
        if kwargs.get("attention_mask") is None and kwargs.get("inputs_embeds") is None and isinstance(ids, Tensor):
            configs = kwargs.get("generation_config") or (args[0] if args else None), model.generation_config

            def known(name: str) -> Any:
                given = kwargs.get(name), *(getattr(config, name, None) for config in configs)
                return next((value for value in given if value is not None), None)

            going_on = kwargs.get("past_key_values") is not None
            mask = left_padding(ids, known("pad_token_id"), known("eos_token_id"), going_on)
            if mask is not None:
                kwargs["attention_mask"] = mask
        return generate(inputs, *args, **kwargs)

    vars(model)["generate"] = told
    try:
        yield
    finally:
        del vars(model)["generate"]
        if before is not None:
            vars(model)["generate"] = before


def left_padding(ids: Tensor, pad: int | None, eos: int | list[int] | None, going_on: bool = False) -> Tensor | None:
    """The mask of prompts of which only the ids are known, int64 `[batch, tokens]`, 0 for padding.

    A single prompt has no padding. In a batch it is what a row has more of the pad id at its beginning than the row
    with the fewest; anywhere else that id is a token.

    Args:
        ids: `[batch, tokens]`.
        pad, eos: the ids of padding and of a text's end.
        going_on: whether the ids follow on others in a cache.

    Returns:
        None where transformers' guess stands: no pad id among the ids or none known, one that ends texts as well (then
        transformers takes it for a token), a batch that may be padded on the right, or one that goes on.
    """
    ends = [] if eos is None else torch.as_tensor(eos).reshape(-1).tolist()
    if pad is None or int(pad) in ends or ids.dim() != 2 or ids.is_floating_point():
        return None
    padding = ids == int(pad)
    if not bool(padding.any()):
        return None
    if len(ids) == 1:
        return torch.ones_like(ids)
    if going_on or bool(padding[:, -1].any()):
        return None
    first = padding.long().cumprod(-1).sum(-1, keepdim=True)
    return (torch.arange(ids.shape[1], device=ids.device) >= first - first.min()).long()
