"""Hooks between a session and the model's own `generate` when it is called inside the session.

`generate` knows where a prompt ends, and a forward pass does not. A prompt's last chunk may be a single token, and
drafted tokens come several at once. So `generate` is wrapped on this one model, not on its class.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvlab.errors import KvlabError

if TYPE_CHECKING:
    from kvlab.live.cache import LiveCache


CONTINUOUS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")
"""The methods of a model that begin transformers' continuous batching."""


@dataclass
class Generation:
    """One call of `generate`.

    Attributes:
        prompt_end: tokens of the sequence when its prompt has been fed, padding included; None where that is not known.
        has_cache: whether the caller handed a cache over.
        drafting: whether several tokens of the response may be fed at once.
        cache: what it goes on with, from its first forward pass on.
    """

    prompt_end: int | None
    has_cache: bool
    drafting: bool
    cache: LiveCache | None = None


class Generations(local):
    """The calls of `generate` under way, the innermost last; each thread has its own."""

    def __init__(self) -> None:
        self.calls: list[Generation] = []

    @property
    def starting(self) -> Generation | None:
        """The innermost call, as long as no forward pass has begun in it."""
        return self.calls[-1] if self.calls and self.calls[-1].cache is None else None


@contextmanager
def generating(model: nn.Module, generations: Generations) -> Iterator[None]:
    """Have `model.generate` note in `generations` what it is asked for, while the block runs.

    A call without an attention mask gets one from `left_padding`. A call uses a cache, whatever the checkpoint's
    configuration says.

    A prompt may hold the pad id as a token of its own (in OLMo 2 it is an id like any other). transformers' guess hides
    that token and shifts all later positions, and a session would report padding where there is none.
    """
    generate = getattr(model, "generate", None)
    if generate is None:  # a decoder without a head
        yield
        return

    @functools.wraps(generate)
    def generated(inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids") if inputs is None else inputs
        own = kwargs.get("generation_config") or (args[0] if args else None)

        def setting(name: str) -> Any:
            values = kwargs.get(name), getattr(own, name, None), getattr(model.generation_config, name, None)
            return next((value for value in values if value is not None), None)

        past = kwargs.get("past_key_values")
        embedded = kwargs.get("inputs_embeds")
        if kwargs.get("attention_mask") is None and embedded is None and isinstance(ids, Tensor):
            mask = left_padding(ids, setting("pad_token_id"), setting("eos_token_id"), past is not None)
            if mask is not None:
                kwargs["attention_mask"] = mask
        asked = None if own is model.generation_config else getattr(own, "use_cache", None)
        if kwargs.get("use_cache") is None and asked is None:
            kwargs["use_cache"] = True
        for name in ("assistant_early_exit", "use_mtp", "speculation_type"):
            if setting(name):
                raise KvlabError(
                    f"{name} drafts with layers of the model itself, which no kvlab session follows; leave it out"
                )
        call = Generation(
            _prompt_end(ids, embedded, kwargs.get("attention_mask")),
            past is not None,
            kwargs.get("assistant_model") is not None or setting("prompt_lookup_num_tokens") is not None,
        )
        generations.calls.append(call)
        try:
            return generate(inputs, *args, **kwargs)
        finally:
            generations.calls.pop()
            if call.cache is not None:
                call.cache.prompt_end = None

    def refused(*_: Any, **__: Any) -> Any:
        raise KvlabError(
            "continuous batching (generate_batch) keeps a paged cache of its own, which no kvlab session compresses; "
            "use generate"
        )

    wrapped = {"generate": generated} | {name: refused for name in CONTINUOUS if hasattr(model, name)}
    own = {name: vars(model)[name] for name in wrapped if name in vars(model)}
    vars(model).update(wrapped)
    try:
        yield
    finally:
        for name in wrapped:
            del vars(model)[name]
        vars(model).update(own)


def _prompt_end(ids: Any, embedded: Any, mask: Any) -> int | None:
    """How long the sequence is when its prompt has been fed: a mask tells, also where only the newest ids are given."""
    longest = mask if isinstance(mask, Tensor) and mask.dim() == 2 else embedded if ids is None else ids
    return longest.shape[1] if isinstance(longest, Tensor) and longest.dim() > 1 else None


def left_padding(ids: Tensor, pad: int | None, eos: int | list[int] | None, going_on: bool = False) -> Tensor | None:
    """The mask of prompts of which only the ids are known, int64 `[batch, tokens]`, 0 for padding.

    A single prompt has no padding. In a batch, the row with the fewest pad ids at its beginning has none. Another row's
    padding is as many pad ids as it has there in excess. Anywhere else that id is a token.

    Args:
        ids: `[batch, tokens]`.
        pad, eos: the ids of padding and of a text's end.
        going_on: whether the ids follow on others in a cache.

    Returns:
        The mask, or None where transformers' own guess stays. That is so where no pad id is known or among the ids. It
        is so where the pad id also ends texts: transformers treats it as a token then. It is so for a batch that goes
        on or may be padded on the right.
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
