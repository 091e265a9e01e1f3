"""CompilerKV with one part replaced at a time: raw attention (table 2), and the steps from CompilerKV to SnapKV."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvlab.core import ranking
from kvlab.methods import Policy, Prompt, policy
from kvlab.methods.compilerkv import CompilerKV


class Inspected(CompilerKV):
    """CompilerKV that shows the scores and weights of its decision."""

    name: ClassVar[str] = "compilerkv_inspected"

    def planned(self, prompt: Prompt) -> Prompt:
        """The prompt with its plan; it must hold all layers of the model."""
        return prompt.with_plan(self.plan(self.survey(prompt)[:, None], prompt)[:, 0])

    def utilities(self, planned: Prompt) -> Tensor:
        """S, the scores of each layer's tokens, not normalised (eq. 10), `[layers, length]`."""
        return self._weighted(planned)

    def weights(self, prompt: Prompt) -> Tensor:
        """W, the weights of the heads, `[layers, heads]`; 1 without a table (eq. 9)."""
        weights = self._head_weights(prompt)
        return torch.ones(prompt.n_layers, prompt.heads) if weights is None else weights


class RawAttention(CompilerKV):
    """CompilerKV without the stabilised utility (table 2): each head's own attention.

    It has neither the mean over heads and layers (eq. 6) nor the norms of values (eq. 7). Weights and thresholds stay.
    """

    name: ClassVar[str] = "compilerkv_raw_attention"

    def _weighted(self, prompt: Prompt) -> Tensor:
        own, weights = prompt.window_sums(self.utility_window), self._head_weights(prompt)
        return (own if weights is None else own * weights[..., None]).amax(1)


class LayerMean(CompilerKV):
    """Each layer's own attention, averaged over its heads."""

    name: ClassVar[str] = "compilerkv_layer_mean"

    def _weighted(self, prompt: Prompt) -> Tensor:
        return prompt.window_sums(self.utility_window).mean(1)


class GroupSets(CompilerKV):
    """A set for each KV head, by the attention of its own group, with no gate: SnapKV without window and pooling."""

    name: ClassVar[str] = "compilerkv_group_sets"

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.top_positions(prompt.window_scores(self.utility_window), budget)


def ladder(budget: int | float) -> dict[str, Policy]:
    """From CompilerKV's utility to SnapKV's, one change at a time, all with the same entries stored and no tables."""
    return {
        "mean of the model": policy("compilerkv", budget=budget, norms="none"),
        "x value norms (CompilerKV)": policy("compilerkv", budget=budget),
        "mean of the layer": LayerMean(budget=budget),
        "largest of the heads": RawAttention(budget=budget),
        "a set for each KV head": GroupSets(budget=budget),
        "the window stays": policy("snapkv", budget=budget, kernel=1),
        "pooling of 7 (SnapKV)": policy("snapkv", budget=budget),
    }
