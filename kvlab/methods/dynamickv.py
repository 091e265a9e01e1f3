"""DynamicKV (Zhou et al., 2024): SnapKV with budgets that follow where the top scores of all layers lie."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import ranking
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.budgets import share_out
from kvlab.methods._base.prompt import Prompt
from kvlab.methods.snapkv import SnapKV


class DynamicKV(SnapKV):
    """Takes SnapKV's scores and window, with a layer's budget by its share of the top scores of all layers; prefill
    only.

    DynamicKV (Zhou et al. 2024): each layer keeps its window, and the layers share N = layers x (budget - window) more
    entries for each KV head. A layer's share is its share of the top N scores. No layer gets more than `reach` x
    budget. Every generated token is also kept. All layers are seen before any is compressed. Cost: SnapKV's, and one
    selection among the scores of all layers.

    Choices: the paper updates the budgets every few layers, over the layers seen so far; here they are shared out once,
    after the last layer. The pooled scores of all layers, heads and positions are ranked together as they are; of equal
    ones the earlier layer, head and position wins. Entries above a layer's bound go to the others in proportion.

    Parameters:
        budget: entries for each layer and KV head on average, the window included.
        window, kernel, sets: SnapKV's (32, 7; "group").
        reach: largest budget of a layer, as a multiple of the mean (10).
    """

    name: ClassVar[str] = "dynamickv"
    summary: ClassVar[str] = "SnapKV with budgets by where the top scores of all layers fall"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "allocation"
    paper: ClassVar[Paper | None] = PAPERS["dynamickv"]

    reach: Annotated[int | float, Field(ge=1)] = 10.0

    def survey(self, prompt: Prompt) -> Tensor:
        """The pooled scores of each layer, `[rows, sets, older]`."""
        return self.pooled(prompt)

    def plan(self, surveys: Tensor, prompt: Prompt) -> Tensor:
        """Budgets `[n_layers, batch]` from scores `[n_layers, batch, sets, older]`."""
        return budgets_by_top_scores(surveys, self.entries(prompt.length), self.window, self.reach)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        assert prompt.plan is not None, "its layers share a budget, which is planned first"
        return self.window_and_best(prompt, prompt.plan)


def budgets_by_top_scores(scores: Tensor, budget: int, window: int, reach: int | float) -> Tensor:
    """Budgets `[n_layers, batch]` by how many of the top scores `[n_layers, batch, sets, older]` fall in each layer.

    Each budget holds the window. Their mean is `budget`, and none is larger than `reach` times that.
    """
    n_layers, _, sets, older = scores.shape
    spare = budget - window
    best = ranking.top_positions(scores.transpose(0, 1).flatten(1), n_layers * sets * spare)
    counts = torch.stack([torch.bincount(row // (sets * older), minlength=n_layers) for row in best])
    ceiling = min(older, int(reach * budget) - window)
    return window + share_out(counts, n_layers * spare, ceiling).T
