"""RocketKV: coarse eviction of the prompt, then fine selection among what is left."""

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core.softmax import Scaling
from kvlab.core.store import LayerStore, pick
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods import hybrid
from kvlab.methods._base.policy import Budget, Kernel, Policy
from kvlab.methods._base.prompt import Prompt
from kvlab.methods.snapkv_pp import SnapKVPlusPlus

TURN = "turn"
"""The slots that the first stage leaves to a turn, where it only masks; and of how many."""


class RocketKV(Policy):
    """SnapKV++ evicts the prompt to a capacity between its length and the budget; hybrid attention selects from it.

    RocketKV (Behnam et al. 2025), section 3.2 with algorithms 1 and 2: two stages share the compression c = S / t
    evenly. S counts the prompt and the new tokens; t is the budget of entries read at each step. The first stage leaves
    S / sqrt(c) entries, less room for the new tokens. The second reads t // 2 of the stored entries and spends the
    other half on finding them. At a compression of 1 or less nothing is evicted or selected. Cost: one window x prompt
    attention for each layer; two vectors for each page, stored, r dimensions of one of them loaded at every step.

    With `turns="multi"` (RocketKV-MT, in the authors' code and a later version of the paper) the first stage evicts
    nothing. It masks these entries until the next prompt of the same cache has been read, and then chooses anew.
    Storage is the whole cache, the pages and an index of the unmasked entries. Each step copies the unmasked keys and
    values.

    Choices: the authors' code splits differently (`split="adaptive"`). Its first stage compresses by c ** r, r = 0.2 +
    0.06 log2 c, at most 0.8, and leaves at least twice the new tokens. A prompt within the budget is kept whole. Of a
    longer one the first stage leaves at least the window and one more entry. Where the number of new tokens is unknown
    it counts as 0, and the tokens come on top. Keys keep their rotation. All layers are compressed (the paper skips the
    first two of LongChat only).

    Parameters:
        budget: entries read at each step for each layer and KV head, finding included; more are stored.
        split: how the compression is shared by the stages.
        turns: "single" evicts for good; "multi" masks for the current turn alone.
        window, kernel, short, long, threshold: as in `snapkv_pp`.
    """

    name: ClassVar[str] = "rocketkv"
    summary: ClassVar[str] = "coarse eviction of the prompt (snapkv_pp), then selection at each step (hybrid)"
    family: ClassVar[str] = "both: keeps some, reads some of those"
    kind: ClassVar[str] = "selection"
    paper: ClassVar[Paper | None] = PAPERS["rocketkv"]

    budget: Budget
    split: Literal["even", "adaptive"] = "even"
    turns: Literal["single", "multi"] = "single"
    window: Annotated[int, Field(ge=1)] = 32
    kernel: Kernel | None = None
    short: Kernel = 63
    long: Kernel = 511
    threshold: Annotated[int, Field(ge=0)] = 48000

    @property
    def minimum(self) -> int:
        return 2

    @property
    def observes(self) -> int:
        return self.window

    def capacity(self, length: int, new_tokens: int) -> int:
        """Entries that the first stage leaves in the end, the new tokens included."""
        total, budget = length + new_tokens, self.entries(length)
        if total <= budget:
            return total
        if self.split == "even":
            return math.isqrt(total * budget)
        c = total / budget
        exponent = min(0.2 + 0.06 * math.log2(c), 0.8)
        return max(int(total / c**exponent), min(2 * new_tokens, total))

    def scores(self, prompt: Prompt) -> Tensor:
        return self._first_stage(self.window + 1).scores(prompt)

    def prefill(self, prompt: Prompt) -> Tensor:
        room = self.capacity(prompt.length, prompt.max_new_tokens) - prompt.max_new_tokens
        if self.fits(prompt.length):
            room = prompt.length
        return self._first_stage(max(room, self.window + 1)).prefill(prompt)

    def _first_stage(self, budget: int) -> SnapKVPlusPlus:
        same = {name: getattr(self, name) for name in ("window", "kernel", "short", "long", "threshold")}
        return SnapKVPlusPlus(budget=budget, **same)

    @property
    def renews(self) -> bool:
        return self.turns == "multi"

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        store.memory.pop(TURN, None)
        if self.turns == "single":
            super().compress(store, prompt)
        else:
            store.budget = self.entries(prompt.length)
            kept = self.prefill(prompt)
            if kept.shape[2] < prompt.length:
                store.memory[TURN], store.numbers[TURN] = kept, store.length
        # The length is now the capacity; or more, if the prompt is within the budget or the window takes more.
        turn, _ = _of_turn(store)
        hybrid.begin(turn, turn.length + prompt.max_new_tokens)

    def select(self, store: LayerStore, queries: Tensor, scaling: Scaling) -> Tensor | None:
        turn, slots = _of_turn(store)
        chosen = hybrid.select(turn, queries, scaling)
        if slots is None or chosen is None:
            return slots if chosen is None else chosen
        return pick(slots, chosen)

    def overhead_bytes(self, store: LayerStore) -> int:
        return hybrid.overhead_bytes(_of_turn(store)[0])


def _of_turn(store: LayerStore) -> tuple[LayerStore, Tensor | None]:
    """Return the entries that the current turn may read, as a store with the same pages, and their slots in `store`.

    Slots are int64 `[rows, kv_heads, n]`. Where nothing is masked, the result is `store` itself and None.
    """
    if TURN not in store.memory:
        return store, None
    masked = store.memory[TURN]
    newer = torch.arange(store.numbers[TURN], store.length, device=masked.device)
    slots = torch.cat([masked, newer.expand(*masked.shape[:2], -1)], -1)
    turn = LayerStore(*store.gather(slots), latent=store.latent)
    turn.storage, turn.budget = store.storage, store.budget
    turn.memory, turn.numbers = store.memory, store.numbers
    return turn, slots
