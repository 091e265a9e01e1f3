"""DuoAttention (Xiao et al., 2024): retrieval heads keep everything, streaming heads sinks and recent tokens."""

import math
import warnings
from typing import Annotated, ClassVar, Self

import torch
from pydantic import AfterValidator, BeforeValidator, PrivateAttr, ValidationInfo, model_validator
from torch import Tensor

from kvlab.core.store import EMPTY, LayerStore
from kvlab.errors import KvlabError
from kvlab.lib.parameters import PathText
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.lookup import HeadScores
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt

SINKS, RECENT = 128 / 16000, 512 / 16000
"""The shares of the prompt that RocketKV's runs give to a streaming head's parts, by its authors' code."""


def _given(value: object, info: ValidationInfo) -> object:
    # None was the default of earlier versions.
    return {"sinks": SINKS, "recent": RECENT}[str(info.field_name)] if value is None else value


def _part(value: int | float, info: ValidationInfo) -> int | float:
    least = 0 if info.field_name == "sinks" else 1
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(f"{info.field_name} {value} is neither an integer (entries) nor a share of the prompt")
    if isinstance(value, int) and value < least:
        raise ValueError(f"{info.field_name} {value} must be at least {least}, or a share of the prompt")
    return value


Part = Annotated[int | float, BeforeValidator(_given), AfterValidator(_part)]
"""Entries of a streaming head, or a share of the prompt."""


class DuoAttention(Policy):
    """Retrieval heads keep every entry; streaming heads keep the first and the most recent ones, at every step.

    DuoAttention (Xiao et al. 2024), the sizes of its parts as in RocketKV, appendix A.3: the heads with the best scores
    are retrieval heads. Their number is the largest at which all heads hold at most layers x KV heads x budget entries
    of the prompt. Streaming heads roll on while decoding; retrieval heads keep the response. Cost: none while running;
    the scores are measured once for a model.

    The appendix prints 128 sinks and 512 recent tokens. Its authors' code scales both with the prompt, and these are
    the numbers at 16,000 tokens. Shares do the same here. A budget of at most both parts makes all heads stream, and
    the recent part is the rest. A budget of at most twice the sinks gives the sinks a fifth of it.

    Choices: the paper trains gates; here scores are measured (`kvlab heads`). A score is the share of the answer
    tokens' attention that falls on a needle's tokens, the largest in the GQA group. Of equal scores the earlier layer
    wins, then the earlier head; without scores all are equal, and a warning says so. If the parts of a streaming head
    take the whole budget, all heads stream. Otherwise every head keeps a prompt within the budget whole, and its
    response.

    Parameters:
        budget: entries for each layer and KV head on average.
        sinks: first tokens that a streaming head keeps, a share of the prompt (128 of 16,000) or a number.
        recent: most recent tokens that it keeps, a share of the prompt (512 of 16,000) or a number.
        heads: JSON file of measured scores, or the name of a model whose scores come with kvlab ("smollm2-135m").
    """

    name: ClassVar[str] = "duoattention"
    summary: ClassVar[str] = "retrieval heads keep everything, streaming heads sinks and recent tokens"
    family: ClassVar[str] = "recent tokens, or layers' and heads' shares"
    kind: ClassVar[str] = "allocation"
    paper: ClassVar[Paper | None] = PAPERS["duoattention"]

    by_position: ClassVar[bool] = True
    weighs: ClassVar[bool] = False
    takes_ragged: ClassVar[bool] = True

    budget: Budget
    sinks: Part = SINKS
    recent: Part = RECENT
    heads: PathText | None = None

    _measured: HeadScores | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _read(self) -> Self:
        if self.heads is not None:
            self._measured = HeadScores.load(self.heads)
        return self

    @property
    def from_files(self) -> str:
        return "" if self._measured is None else self._measured.model_dump_json(exclude_none=True)

    @property
    def minimum(self) -> int:
        return sum(part if isinstance(part, int) else 1 for part in (self.sinks, self.recent))

    def parts(self, budget: int, length: int) -> tuple[int, int]:
        """First and recent tokens of a streaming head, of a prompt of `length` tokens."""
        sinks, recent = self.sinks, self.recent
        if isinstance(sinks, float):
            wanted = sinks * length if budget > 2 * sinks * length else budget / 5
            sinks = min(max(1, math.floor(wanted)), budget - (recent if isinstance(recent, int) else 1))
        if isinstance(recent, float):
            recent = min(max(1, math.floor(recent * length)), budget - sinks)
        return sinks, recent

    def retrieval(self, n_layers: int, kv_heads: int, length: int, budget: int) -> Tensor:
        """Which heads keep everything of a prompt of `length` tokens, bool `[n_layers, kv_heads]`."""
        heads, streaming = n_layers * kv_heads, sum(self.parts(budget, length))
        if length > streaming:
            affordable = heads * (budget - streaming) // (length - streaming)
        else:
            affordable = heads if budget > streaming else 0
        best = self._ranked(n_layers, kv_heads)[: min(affordable, heads)]
        return torch.zeros(heads, dtype=torch.bool).index_fill(0, best, True).view(n_layers, kv_heads)

    def _ranked(self, n_layers: int, kv_heads: int) -> Tensor:
        """All heads of all layers, the best first, `[n_layers x kv_heads]`."""
        measured = self._measured
        if measured is None:
            return torch.arange(n_layers * kv_heads)
        if (measured.n_layers, measured.kv_heads) != (n_layers, kv_heads):
            raise KvlabError(
                f"the head scores of {self.heads!r} are of {measured.model}, {measured.n_layers} layers of "
                f"{measured.kv_heads} KV heads, and this model has {n_layers} of {kv_heads}. Measure it with "
                "`kvlab heads`; pass keep() its layer= and n_layers="
            )
        return measured.per_kv_head().flatten().sort(descending=True, stable=True).indices

    def scores(self, prompt: Prompt) -> Tensor:
        """Recency, with the sinks above everything, as a streaming head would have it."""
        recency = torch.arange(prompt.length, dtype=torch.float32, device=prompt.keys.device)
        recency[: self.parts(self.entries(prompt.length), prompt.length)[0]] += prompt.length
        return recency.expand(prompt.rows, prompt.kv_heads, prompt.length)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        retrieval = self.retrieval(prompt.n_layers, prompt.kv_heads, prompt.length, budget)
        if self.heads is None and bool(retrieval.any()):
            warnings.warn(
                "duoattention knows no head scores and takes the first heads for its retrieval heads; measure them "
                "with `kvlab heads` and pass heads=FILE",
                stacklevel=2,
            )
        everything = retrieval[list(prompt.layers)].to(prompt.keys.device)
        length = prompt.length
        sinks, recent = self.parts(budget, length)
        size = sinks + recent
        slots = torch.arange(length if bool(everything.any()) else size, device=prompt.keys.device)
        rolled = torch.where(slots < sinks, slots, slots + length - size)
        rolled = torch.where(slots < size, rolled, -1)
        return torch.where(everything[..., None], slots, rolled)

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        store.budget = self.entries(store.seen)
        everything = self.retrieval(prompt.n_layers, prompt.kv_heads, store.seen, store.budget)[list(prompt.layers)]
        store.numbers = {"length": store.seen, "n_layers": prompt.n_layers}
        store.numbers |= {"streams": int(not everything.all()), "retrieves": int(everything.any())}
        if store.ragged or store.length < store.seen:
            # In a later turn of a chat streaming heads have already lost entries, and slots are not positions.
            self._stream(store)
        else:
            super().compress(store, prompt)

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        self._stream(store)

    def _stream(self, store: LayerStore) -> None:
        """Let each streaming head drop its oldest entries after the sinks, down to its size."""
        numbers = store.numbers
        sinks, recent = self.parts(store.budget, numbers["length"])
        size = sinks + recent
        if not numbers["streams"] or store.length <= size:
            return
        if not numbers["retrieves"] and not store.ragged and store.length == size + 1:
            store.drop(sinks)
            return
        retrieval = self.retrieval(numbers["n_layers"], store.kv_heads, numbers["length"], store.budget)
        # On the CPU, which knows how many entries each head holds.
        everything = retrieval[list(store.layers)]
        counts = torch.tensor(store.head_counts).view(everything.shape)
        over = (counts - size).clamp_min(0).masked_fill(everything, 0)[..., None]
        if numbers["retrieves"] and store.ragged:
            store.cut(sinks, over[..., 0])
            return
        left = counts[..., None] - over
        slots = torch.arange(int(left.max()))
        kept = torch.where(slots < sinks, slots, slots + over).masked_fill(slots >= left, EMPTY)
        store.evict(kept.to(store.device))
