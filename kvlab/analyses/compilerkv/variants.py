"""CompilerKV with one part replaced at a time: table 2's ablations, and the steps from CompilerKV to SnapKV."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvlab.core import ranking
from kvlab.methods import Policy, Prompt, policy
from kvlab.methods._base.lookup import DecisionTables
from kvlab.methods.compilerkv import CompilerKV


class Inspected(CompilerKV):
    """CompilerKV that shows the scores, thresholds and weights of its decision."""

    name: ClassVar[str] = "compilerkv_inspected"

    def planned(self, prompt: Prompt) -> Prompt:
        """The prompt with its plan; it must hold all layers of the model."""
        return prompt.with_plan(self.plan(self.survey(prompt)[:, None], prompt)[:, 0])

    def utilities(self, planned: Prompt) -> Tensor:
        """S, the scores of each layer's tokens, not normalised (eq. 10), `[layers, length]`."""
        return self._weighted(planned)

    def thresholds(self, planned: Prompt) -> Tensor:
        """Tau, each layer's threshold for this prompt (eq. 15), `[layers]`; 0 where nothing is turned away."""
        return self._thresholds(planned) if self.gates else torch.zeros(planned.n_layers, dtype=torch.float64)

    def weights(self, prompt: Prompt) -> Tensor:
        """W, the weights of the heads, `[layers, heads]`; 1 without a table (eq. 9)."""
        weights = self._head_weights(prompt)
        return torch.ones(prompt.n_layers, prompt.heads) if weights is None else weights


class NoHeadTable(CompilerKV):
    """Table 2, without head reliability: all heads weigh the same."""

    name: ClassVar[str] = "compilerkv_no_head_table"

    def _head_weights(self, prompt: Prompt) -> Tensor | None:
        return None


def static_thresholds(tables: DecisionTables) -> Tensor:
    """One threshold for each layer, float64 `[layers]`: the median over the contexts that the table was learnt from, or
    over all cells if the tables do not say how many contexts fell into each (`visited`).
    """
    grid = torch.tensor(tables.risk, dtype=torch.float64).flatten(1)
    visited = (tables.model_extra or {}).get("visited")
    if visited is not None:
        grid = grid.repeat_interleave(torch.tensor(visited).flatten(), 1)
    # Of an even number it is the lower middle one, so that it is a threshold of the table.
    return grid.median(-1).values


def with_numbers(tables: DecisionTables, heads: np.ndarray | None, risk: np.ndarray | None) -> DecisionTables:
    """Tables with the bins of others, and these numbers; None leaves a table out."""
    edges = {} if risk is None else tables.model_dump(include={"entropy_edges", "perplexity_edges"})
    return DecisionTables(
        heads=None if heads is None else heads.tolist(),
        risk=None if risk is None else risk.tolist(),
        entropy=tables.entropy,
        perplexity=tables.perplexity,
        **edges,
    )


class StaticThreshold(CompilerKV):
    """Table 2, without risk adaption: one threshold for each layer and every prompt (`static_thresholds`)."""

    name: ClassVar[str] = "compilerkv_static_threshold"

    def _thresholds(self, prompt: Prompt) -> Tensor:
        if not self.gates:
            return super()._thresholds(prompt)
        return static_thresholds(self._tables).to(prompt.keys.device)[list(prompt.layers)]


class RawAttention(CompilerKV):
    """Table 2, without stabilised utility: each head's own attention, without the mean over heads and layers (eq. 6)
    and without the norms of values (eq. 7). Weights and thresholds stay.
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


ABLATIONS: dict[str, type[CompilerKV]] = {
    "no_head_table": NoHeadTable,
    "static_threshold": StaticThreshold,
    "raw_attention": RawAttention,
}
"""The rows of table 2, by their names in the printed table as it is stored here."""


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
