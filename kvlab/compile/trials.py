"""Trials of joint actions in one context: one prefill, many compressed caches, the likelihood of what follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import PrivateAttr
from torch import Tensor

from kvlab.compile.contexts import Context
from kvlab.compile.settings import Settings
from kvlab.core.store import LayerStore
from kvlab.live.cache import LiveCache
from kvlab.live.session import compress
from kvlab.live.shared_prefill import shared_prefill
from kvlab.methods import Policy, Prompt
from kvlab.methods._base.lookup import DecisionTables
from kvlab.methods.compilerkv import CompilerKV

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

ROWS = 8
"""Compressed caches that go through the model together; a batch of another size rounds differently."""


def draw(rng: np.random.Generator, samples: int, states: int, propensities: Sequence[float]) -> np.ndarray:
    """Joint actions `[samples, states]`, drawn with their propensities, as evenly as possible.

    For each state, points lie evenly on the unit interval from a random start and are then shuffled. So an action's
    count differs by at most one from samples x propensity. States are independent.
    """
    spread = (np.arange(samples)[:, None] + rng.random(states)) / max(samples, 1)
    ends = np.cumsum(propensities)
    actions = np.searchsorted(ends / ends[-1], spread, side="right").clip(max=len(propensities) - 1)
    return rng.permuted(actions, axis=0)


class Watcher(CompilerKV):
    """CompilerKV that compresses nothing and remembers the planned prompts."""

    name: ClassVar[str] = "watcher"
    _prompts: list[Prompt] = PrivateAttr(default_factory=list)

    @property
    def reads_perplexity(self) -> int:
        return self.window

    def plan(self, surveys: Tensor, prompt: Prompt) -> Tensor:
        return surveys.mean(0).expand_as(surveys)

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        self._prompts.append(prompt)


class Kept(Policy):
    """Keeps given positions of each layer: `[rows, kv_heads, n]`, -1 padded."""

    name: ClassVar[str] = "kept"
    budget: int
    _positions: list[Tensor] = PrivateAttr(default_factory=list)

    @classmethod
    def of(cls, positions: list[Tensor]) -> Kept:
        kept = cls(budget=max(layer.shape[-1] for layer in positions))
        kept._positions = positions
        return kept

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        store.budget = self.budget
        store.evict(self._positions[prompt.layers[0]])


@dataclass
class Prefilled:
    """A context inside the model, before anything is compressed.

    Attributes:
        cache: to branch off from.
        prompts: each layer's, planned.
        entropy: of the window's mean attention in nats (eq. 12).
        perplexity: of the window's tokens (eq. 13).
    """

    lm: LM
    context: Context
    cache: LiveCache
    prompts: list[Prompt]
    entropy: float
    perplexity: float

    @property
    def kv_heads(self) -> int:
        return self.prompts[0].kv_heads

    def kept(self, policy: CompilerKV) -> list[Tensor]:
        """Positions that a policy keeps of each layer, `[1, kv_heads, n]`."""
        return [policy.prefill(prompt) for prompt in self.prompts]

    @torch.inference_mode()
    def losses(self, kept: Sequence[list[Tensor]]) -> Tensor:
        """Mean NLL of the continuation (eq. 3) with each of several selections, float64 `[selections]`.

        The whole continuation goes through the model at once. Nothing is evicted after the prefill, so feeding it token
        by token would give the same.
        """
        losses = []
        for start in range(0, len(kept), ROWS):
            rows = kept[start : start + ROWS]
            layers = [_stack([row[layer] for row in rows]) for layer in range(len(self.prompts))]
            with compress(self.lm.model, Kept.of(layers), turns="leave") as session:
                past = session.branch(self.cache)
                if len(rows) > 1:
                    past.batch_repeat_interleave(len(rows))
                session.end_prompt()
                losses.append(self._losses(past, len(rows)))
        return torch.cat(losses) if losses else torch.zeros(0, dtype=torch.float64)

    @torch.inference_mode()
    def full_loss(self) -> float:
        """Mean NLL of the continuation with everything kept."""
        with compress(self.lm.model, "full", turns="leave") as session:
            past = session.branch(self.cache)
            session.end_prompt()
            return float(self._losses(past, 1))

    def _losses(self, past: LiveCache, rows: int) -> Tensor:
        ids = self.context.continuation.to(self.lm.device)
        logits = self.lm.model(ids[None, :-1].expand(rows, -1), past_key_values=past, use_cache=True).logits
        targets = ids[1:].expand(rows, -1)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(rows, -1)
        return loss.cpu().double().mean(1)


def _stack(rows: list[Tensor]) -> Tensor:
    """Selections `[1, kv_heads, n]` of different n as one, `[rows, kv_heads, most]`, -1 padded."""
    most = max(row.shape[-1] for row in rows)
    return torch.cat([F.pad(row, (0, most - row.shape[-1]), value=-1) for row in rows])


@contextmanager
def prefilled(lm: LM, context: Context, settings: Settings) -> Iterator[Prefilled]:
    """Run a context through the model once."""
    watcher = Watcher(**_policy(settings))
    with torch.inference_mode():
        with shared_prefill(lm.model, [watcher]):
            ids = context.ids[None].to(lm.device)
            cache = lm.model(ids, use_cache=True, logits_to_keep=1).past_key_values
        with compress(lm.model, watcher, turns="leave") as session:
            session.branch(cache)
            session.end_prompt()
        prompts = watcher._prompts
        entropy, perplexity = watcher.risk(prompts[0])
        yield Prefilled(lm, context, cache, prompts, float(entropy), float(perplexity))


def _policy(settings: Settings) -> dict[str, Any]:
    names = ("budget", "window", "utility_window", "kernel")
    return {name: getattr(settings, name) for name in names}


def neutral(settings: Settings) -> CompilerKV:
    """The policy without tables."""
    return CompilerKV(**_policy(settings))


def with_weights(settings: Settings, weights: np.ndarray | Sequence[Sequence[float]], group: int) -> CompilerKV:
    """The policy with a weight for each layer and KV head, which its `group` query heads share."""
    heads = [[float(w) for w in layer for _ in range(group)] for layer in weights]
    return neutral(settings).using(DecisionTables(heads=heads, risk=None))


def with_thresholds(policy: CompilerKV, thresholds: np.ndarray | Sequence[float]) -> CompilerKV:
    """A policy's head table with one threshold for each layer, whatever the risk."""
    tables = DecisionTables(heads=policy.tables_in_use.heads, risk=[[[float(tau)]] for tau in thresholds])
    return policy.using(tables)


def candidates(policy: CompilerKV, prefill: Prefilled, thresholds: np.ndarray | Sequence[float]) -> np.ndarray:
    """How many tokens reach each threshold in each layer, `[layers, thresholds]` (eq. 15)."""
    layers = len(prefill.prompts)
    columns = []
    for tau in thresholds:
        gated = with_thresholds(policy, [tau] * layers)
        columns.append([int(gated.candidates(prompt)) for prompt in prefill.prompts])
    return np.array(columns).T
