"""LaCache (Shi et al., 2025): a ladder of spans, the later the deeper the layer."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt


class LaCache(Policy):
    """Keeps attention sinks, recent tokens and one span in between, earlier in shallow layers, later in deep ones;
    prefill only.

    LaCache (Shi et al. 2025): every layer keeps the first `sinks` and the most recent tokens. The rest of its budget is
    a run of consecutive tokens in between. `span` of the layers share a rung of the ladder, and neighbouring rungs
    share `overlap` of theirs. The rungs climb from the oldest tokens in the first layers to the newest in the last.
    Every generated token is also kept. Cost: none; it scores nothing.

    Choices where the paper is silent: rungs start at equal distances; a layer that two rungs share belongs to the
    later. The paper compacts the cache again whenever it is full while decoding; here the pattern is laid over the
    prompt once.

    Parameters:
        budget: entries for each layer and KV head, sinks included.
        sinks: first tokens that always stay (4).
        recent: share of the budget for the most recent tokens (0.25).
        span: share of the layers that keep the same run (0.25).
        overlap: share of a span's layers that the next one shares (0.5).
    """

    name: ClassVar[str] = "lacache"
    summary: ClassVar[str] = "sinks, recent tokens, and a ladder of spans over the layers"
    family: ClassVar[str] = "recent tokens, or layers' and heads' shares"
    kind: ClassVar[str] = "allocation"
    paper: ClassVar[Paper | None] = PAPERS["lacache"]

    by_position: ClassVar[bool] = True

    budget: Budget
    sinks: Annotated[int, Field(ge=0)] = 4
    recent: Annotated[float, Field(ge=0, lt=1)] = 0.25
    span: Annotated[float, Field(gt=0, le=1)] = 0.25
    overlap: Annotated[float, Field(ge=0, le=1)] = 0.5

    @property
    def minimum(self) -> int:
        """Room for the sinks, the recent tokens and one token of the span."""
        budget = self.sinks + 2
        while sum(self._ends(budget)) >= budget:
            budget += 1
        return budget

    def _ends(self, budget: int) -> tuple[int, int]:
        """How many first and last tokens every layer keeps."""
        return self.sinks, max(1, int(self.recent * budget))

    def _rungs(self, n_layers: int) -> Tensor:
        """Rung of each layer, from 0 on, `[n_layers]`."""
        span = max(1, round(self.span * n_layers))
        return torch.arange(n_layers) // max(1, span - int(self.overlap * span))

    def scores(self, prompt: Prompt) -> Tensor:
        """1 for what is kept, 0 for the rest: the method has no finer scores."""
        blank = super().scores(prompt)
        return blank.scatter(-1, self.prefill(prompt), 1.0)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        first, last = self._ends(budget)
        between, kept = prompt.length - first - last, budget - first - last
        rungs = self._rungs(prompt.n_layers)
        climb = rungs.double() * (between - kept) / max(1, int(rungs[-1]))
        starts = first + (climb + 0.5).floor().long()[list(prompt.layers)]
        positions = torch.cat(
            [
                torch.arange(first).expand(prompt.rows, first),
                starts[:, None] + torch.arange(kept),
                torch.arange(prompt.length - last, prompt.length).expand(prompt.rows, last),
            ],
            -1,
        )
        return positions.to(prompt.keys.device)[:, None].expand(prompt.rows, prompt.kv_heads, budget)
