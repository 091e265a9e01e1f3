"""SimLayerKV (Zhang et al., 2024): lazy layers keep sinks and recent tokens, the others everything."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import ranking
from kvlab.core.slots import EMPTY
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt


class SimLayerKV(Policy):
    """Lazy layers, whose last query attends to sinks and recent tokens, keep only these; the others keep the prompt;
    prefill only.

    "SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction" (Zhang et al. 2024): some layers are lazy. Their
    attention to the first and last tokens, averaged over heads, exceeds `threshold`. A lazy layer keeps `sinks` first
    and `recent` last tokens. Every generated token is also kept. All layers are seen before any is compressed. Cost:
    one row of attention for each layer.

    Choices: the authors' code looks at the first generated token's query, which a prefill does not have. Here it is the
    prompt's last query, as in kvpress. The paper bounds no memory. With a `budget` the laziest layers stream, as many
    as layers x budget entries need, and `threshold` has no effect. If the budget is less than twice a lazy layer's
    entries, such a layer keeps half of the budget. The authors' thresholds are 0.65 (LLaMA2), 0.8 (Mistral), 0.85
    (Qwen2.5) and 0.9 (LLaMA3).

    Parameters:
        budget: entries for each layer and KV head on average, or a fraction of the prompt; None goes by `threshold`.
        threshold: attention above which a layer is lazy (0.9).
        sinks: first tokens of a lazy layer (4).
        recent: last tokens of a lazy layer (1024).
    """

    name: ClassVar[str] = "simlayerkv"
    summary: ClassVar[str] = "lazy layers keep sinks and recent tokens, the others everything"
    family: ClassVar[str] = "recent tokens, or layers' and heads' shares"
    kind: ClassVar[str] = "allocation"
    paper: ClassVar[Paper | None] = PAPERS["simlayerkv"]

    by_position: ClassVar[bool] = True

    budget: Budget | None = None
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.9
    sinks: Annotated[int, Field(ge=0)] = 4
    recent: Annotated[int, Field(ge=1)] = 1024

    @property
    def minimum(self) -> int:
        return self.sinks + 1

    @property
    def observes(self) -> int:
        return 1

    def fits(self, prompt_length: int) -> bool:
        return prompt_length <= (self.sinks + self.recent if self.budget is None else self.entries(prompt_length))

    def size(self, length: int) -> int:
        """Entries of a lazy layer, of a prompt of `length` tokens."""
        size = self.sinks + self.recent
        return size if self.budget is None else min(size, max(self.minimum, self.entries(length) // 2))

    def survey(self, prompt: Prompt) -> Tensor:
        """Attention of the last query to a lazy layer's tokens, averaged over heads, `[rows]`."""
        recent = self.size(prompt.seen) - self.sinks

        def laziness() -> Tensor:
            row = prompt.window_sums(1).float()
            ends = row[..., : self.sinks].sum(-1) + row[..., max(self.sinks, prompt.length - recent) :].sum(-1)
            return ends.mean(-1)

        return prompt.share(("simlayerkv", self.sinks, recent), laziness)

    def plan(self, surveys: Tensor, prompt: Prompt) -> Tensor:
        """Which layers are lazy, bool `[n_layers, batch]`."""
        if self.budget is None:
            return surveys > self.threshold
        length, size = prompt.seen, self.size(prompt.seen)
        whole = prompt.n_layers * (self.entries(length) - size) // max(length - size, 1)
        lazy = torch.ones_like(surveys, dtype=torch.bool)
        keep = ranking.top_positions(-surveys.T, min(whole, prompt.n_layers)).T
        return lazy.scatter(0, keep, False)

    def scores(self, prompt: Prompt) -> Tensor:
        """Recency, with the sinks above everything, as a lazy layer would have it."""
        recency = torch.arange(prompt.length, dtype=torch.float32, device=prompt.keys.device)
        recency[: self.sinks] += prompt.length
        return recency.expand(prompt.rows, prompt.kv_heads, prompt.length)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        assert prompt.plan is not None, "lazy layers are found before any layer is compressed"
        length, size = prompt.length, min(self.size(prompt.seen), prompt.length)
        lazy = prompt.plan.to(prompt.keys.device)
        slots = torch.arange(size if bool(lazy.all()) else length, device=lazy.device)
        ends = torch.where(slots < self.sinks, slots, slots + length - size).masked_fill(slots >= size, EMPTY)
        return torch.where(lazy[:, None], ends, slots)[:, None].expand(-1, prompt.kv_heads, -1)
