"""PyramidKV (Cai et al., 2024): SnapKV with budgets that fall from layer to layer."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.budgets import share_out
from kvlab.methods._base.prompt import Prompt
from kvlab.methods.snapkv import SnapKV


class PyramidKV(SnapKV):
    """Takes SnapKV's scores and window, with more entries in the first layers and fewer in the last; prefill only.

    PyramidKV (Cai et al. 2024): every layer keeps the window. In addition the last layer gets (budget - window) / beta
    entries, and the first 2 x (budget - window) less that. The layers between lie on a straight line, and all spend
    layers x budget. Every generated token is also kept. Cost: SnapKV's.

    Choices where the paper is silent: shares are rounded by largest remainder, so that they sum exactly. Entries beyond
    a short prompt's length go to the other layers in proportion. A prompt within `budget` is kept whole.

    Parameters:
        budget: entries for each layer and KV head on average, the window included.
        window, kernel, sets: SnapKV's (32, 7; "group").
        beta: how steep the pyramid is; 1 is SnapKV (20).
    """

    name: ClassVar[str] = "pyramidkv"
    summary: ClassVar[str] = "SnapKV with budgets that fall linearly with the layer"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "allocation"
    paper: ClassVar[Paper | None] = PAPERS["pyramidkv"]

    beta: Annotated[int | float, Field(ge=1)] = 20

    def budgets(self, n_layers: int, length: int, budget: int) -> Tensor:
        """Entries of each layer for a prompt of `length` tokens, int64 `[n_layers]`, the window included."""
        mean = budget - self.window
        smallest = mean / self.beta
        line = torch.linspace(2 * mean - smallest, smallest, n_layers, dtype=torch.float64)
        return self.window + share_out(line, n_layers * mean, length - self.window)

    def prefill(self, prompt: Prompt) -> Tensor:
        # In a later turn a layer may hold fewer entries than the mean budget, and still more than its own budget.
        if prompt.lossy and prompt.seen > self.entries(prompt.length) and prompt.length > self.window:
            return self.choose(prompt, self.entries(prompt.length))
        return super().prefill(prompt)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        budgets = self.budgets(prompt.n_layers, prompt.seen, budget)
        return self.window_and_best(prompt, budgets[list(prompt.layers)].to(prompt.keys.device))
