"""A pass in which the model repeats its prompt, and what of the prompt it looks at for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvlab.core import attention
from kvlab.core.softmax import Softmax

FIRST = "\n\nNow write the text above once more, word for word.\n"
LATER = "\n\nNow write a part of the text above once more, word for word: the part that follows on these words:"
OVERLAP = 8
"""Last tokens of the part before that tell the model where a part begins."""
BLOCK = 256


class Part(NamedTuple):
    """A part of a prompt, and the tokens that have the model repeat it."""

    start: int
    stop: int
    ids: Tensor  # int64 [m], fed after the prompt: the instruction, then the part itself


@dataclass(frozen=True)
class Repetition:
    """How a prompt is repeated and what its tokens are scored by: the largest attention that any token of the pass pays
    to them.

    Attributes:
        chunk: tokens that are repeated at once.
        sinks: first tokens of the prompt that take part in the softmax of every chunk.
        plus: whether attention is multiplied by `|W_o v|` and divided by the norm of the hidden state that attends.
        group: whether the query heads of a group count by their largest score or by its mean.
        asks: whether an instruction asks for the repetition.
    """

    chunk: int
    sinks: int
    plus: bool
    group: Literal["max", "mean"] = field(default="max", kw_only=True)
    asks: bool = field(default=True, kw_only=True)

    @property
    def key(self) -> str:
        """The name under which a trace keeps the scores."""
        # Options that KVzip does not use come last, and only where they are set: so its older traces are found.
        more = [f"group={self.group}"] * (self.group != "max") + ["asks=False"] * (not self.asks)
        return ", ".join([f"chunk={self.chunk}, sinks={self.sinks}, plus={self.plus}", *more])

    def parts(self, prompt: Tensor, encode: Callable[[str], Tensor] | None) -> list[Part]:
        """The parts that are fed after a prompt `[length]`; without instructions where nothing encodes them."""
        parts = []
        for start in range(0, len(prompt), self.chunk):
            part = prompt[start : start + self.chunk]
            asking = prompt.new_empty(0)
            if encode is not None and self.asks:
                asking = encode(LATER if start else FIRST).to(prompt)
                asking = torch.cat([asking, prompt[max(start - OVERLAP, 0) : start]])
            parts.append(Part(start, start + len(part), torch.cat([asking, part])))
        return parts

    def scores(
        self,
        part: Part,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        softmax: Softmax,
        hidden: Tensor | None = None,
        projection: Tensor | None = None,
    ) -> Tensor:
        """Scores of one part in one layer, `[rows, kv_heads, stop - start]`.

        The softmax is over the part, the prompt's sinks before it, and what the pass itself has fed so far.

        Args:
            queries: of the pass, `[rows, heads, m, head_dim]`.
            keys, values: of the prompt and then of the pass, `[rows, kv_heads, length + m, head_dim]`.
            hidden: with `plus`, what the layer's projections were given in the pass, `[rows, m, width]`.
            projection: with `plus`, W_o, `[hidden, heads x head_dim]`.
        """
        (heads, m), kv_heads = queries.shape[1:3], keys.shape[1]
        size, sinks, fed = part.stop - part.start, min(self.sinks, part.start), keys.shape[2] - m
        shown = torch.cat([keys[:, :, :sinks], keys[:, :, part.start : part.stop], keys[:, :, fed:]], 2)
        largest = torch.zeros(len(queries), heads, size, dtype=attention.exact(queries).dtype, device=queries.device)
        for of_group, asking, own, scores in attention.by_blocks(queries, shown, softmax, BLOCK):
            weights = own.shares(scores)[..., sinks : sinks + size]
            if self.plus:
                assert hidden is not None, "what the projections were given is asked for"
                weights = weights / attention.exact(hidden[:, asking]).norm(dim=-1)[:, None, :, None]
            largest[:, of_group] = torch.maximum(largest[:, of_group], weights.amax(-2))
        if self.plus:
            assert projection is not None, "the output projection is asked for"
            rows = values[:, :, part.start : part.stop]
            largest = largest * torch.stack(
                [attention.projected_norms(row, projection, heads, order=2) for row in rows]
            )
        by_group = largest.unflatten(1, (kv_heads, -1))
        return by_group.amax(2) if self.group == "max" else by_group.mean(2)


def longest(parts: Sequence[Part]) -> int:
    """Tokens that the longest pass feeds."""
    return max((len(part.ids) for part in parts), default=0)
