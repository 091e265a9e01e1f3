"""RocketKV: coarse eviction of the prompt, then fine selection among what is left."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from kvlab.core.softmax import Scaling
from kvlab.core.store import LayerStore
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods import hybrid
from kvlab.methods._base.policy import Budget, Kernel, Policy
from kvlab.methods._base.prompt import Prompt
from kvlab.methods.snapkv_pp import SnapKVPlusPlus


class RocketKV(Policy):
    """SnapKV++ evicts the prompt to a capacity between its length and the budget; hybrid attention selects from it.

    RocketKV (Behnam et al. 2025), section 3.2 with algorithms 1 and 2: over S tokens, the prompt and the new ones, a
    budget of t entries read at each step is a compression of c = S / t, split evenly. The first stage leaves S /
    sqrt(c) entries, from which the new tokens' room is taken, and the second reads t // 2 of what is stored and spends
    the other half on finding them. At a compression of 1 or less nothing is evicted or selected. Cost: one window x
    prompt attention for each layer; two vectors for each page, stored, r dimensions of one of them loaded at every
    step.

    Choices: the authors' code splits differently, `split="adaptive"`: the first stage takes c ** r with r = 0.2 + 0.06
    log2 c, at most 0.8, and leaves at least twice the new tokens. A prompt within the budget is kept whole; what the
    first stage leaves of a longer one is at least the window and one more. Where the number of new tokens is unknown
    it counts as 0, and the tokens come on top. Keys keep their rotation. All layers are compressed (the paper skips the
    first two of LongChat only).

    Parameters:
        budget: entries read at each step for each layer and KV head, finding included; more are stored.
        split: how the compression is shared by the stages.
        window, kernel, short, long, threshold: as in `snapkv_pp`.
    """

    name: ClassVar[str] = "rocketkv"
    summary: ClassVar[str] = "coarse eviction of the prompt (snapkv_pp), then selection at each step (hybrid)"
    family: ClassVar[str] = "both: keeps some, reads some of those"
    kind: ClassVar[str] = "selection"
    paper: ClassVar[Paper | None] = PAPERS["rocketkv"]

    budget: Budget
    split: Literal["even", "adaptive"] = "even"
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

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        super().compress(store, prompt)
        # The length is now the capacity; or more, if the prompt is within the budget or the window takes more.
        hybrid.begin(store, store.length + prompt.max_new_tokens)

    def select(self, store: LayerStore, queries: Tensor, scaling: Scaling) -> Tensor | None:
        return hybrid.select(store, queries, scaling)

    def overhead_bytes(self, store: LayerStore) -> int:
        return hybrid.overhead_bytes(store)
