"""One KV head at a time: the effect of a weight on its own layer, measured on captured prompts.

Section 4.3 credits a head with its marginal contribution, "applying an action while holding others constant".
Attention is averaged over the model before any weight (eq. 6). So a layer's set depends only on that layer's weights. A
trace shows the effect of a change: the attention of the response that the layer loses. This needs one run of the model
for each prompt. The prompts may have the format and length of those that the tables are for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field, FiniteFloat, model_validator
from torch import Tensor

from kvlab.compile import log
from kvlab.compile.contexts import checked
from kvlab.compile.log import Journal
from kvlab.core import attention
from kvlab.core.store import EMPTY
from kvlab.errors import KvlabError
from kvlab.inputs.corpus import Document
from kvlab.lib.parameters import Parameters
from kvlab.methods import Prompt
from kvlab.methods._base.lookup import DecisionTables
from kvlab.methods.compilerkv import CompilerKV
from kvlab.traces.run import capture

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.traces.trace import Trace


Advance = Callable[[str, int, int], None]


class MarginalSettings(Parameters):
    """The weights that are tried one by one, and how tables follow from them.

    Attributes:
        budgets: entries for each layer and KV head; a table is learnt for each.
        lengths: tokens of the prompts, used in turn.
        new_tokens: greedy tokens whose attention makes the reward.
        weights: actions on a head; the neutral 1 is among them.
        level: the false discovery rate among all heads and weights of a table (Benjamini and Hochberg). A table has a
            weight other than 1 only where its gain is clear at this rate.
        window, utility_window, kernel: the policy's.
        seed: for the places of prompts in their documents.
    """

    called: ClassVar[str] = "setting"

    budgets: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (64, 128, 256)
    lengths: Annotated[tuple[Annotated[int, Field(ge=2)], ...], Field(min_length=1)] = (1200, 2000)
    new_tokens: Annotated[int, Field(ge=1)] = 32
    weights: tuple[Annotated[FiniteFloat, Field(ge=0)], ...] = (0.25, 0.5, 1.0, 2.0)
    level: Annotated[float, Field(gt=0, lt=1)] = 0.05
    window: Annotated[int, Field(ge=1)] = 64
    utility_window: Annotated[int, Field(ge=1)] = 32
    kernel: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _acts(self) -> Self:
        if 1.0 not in self.weights or len(set(self.weights)) != len(self.weights) or len(self.weights) < 2:
            raise ValueError("weights must be at least two different ones, the neutral 1 among them")
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if min(self.lengths) <= max(self.budgets):
            raise ValueError(
                f"a prompt of {min(self.lengths)} tokens fits the budget of {max(self.budgets)}: nothing to learn"
            )
        return self

    @property
    def neutral(self) -> int:
        """Index of the weight 1."""
        return self.weights.index(1.0)

    def policy(self, budget: int) -> CompilerKV:
        """The policy without tables."""
        return CompilerKV(budget=budget, window=self.window, utility_window=self.utility_window, kernel=self.kernel)


@dataclass(frozen=True)
class ActionEffects:
    """The effect of every single weight in every context, at one budget.

    Attributes:
        heads: `[contexts, layers x kv_heads, weights]`, the share of the response's attention that the head's layer
            loses, less that with all weights neutral.
        names: of the contexts.
    """

    heads: np.ndarray
    names: list[str]

    @classmethod
    def of(cls, lines: Sequence[dict[str, Any]], budget: int) -> ActionEffects:
        """From the journal's lines."""
        heads = np.array([line["budgets"][str(budget)]["heads"] for line in lines])
        return cls(heads, [line["context"] for line in lines])


def attended(trace: Trace) -> Tensor:
    """Attention of the response to the prompt, averaged over its tokens and each layer's query heads, float64
    `[layers, prompt]`.
    """
    visible = attention.last_visible(trace.steps, trace.length, trace.keys.device)
    rows = []
    for layer in range(trace.n_layers):
        queries, keys = trace.response_queries[layer], trace.keys[layer]
        shares = attention.weights(queries, keys, trace.softmax.row(layer), visible)
        rows.append(shares[..., : trace.prompt_length].mean((0, 1)).cpu().double())
    return torch.stack(rows)


@torch.inference_mode()
def action_losses(trace: Trace, settings: MarginalSettings) -> dict[str, Any]:
    """Every weight alone on one trace: by budget what `ActionEffects` holds of a context.

    Raises:
        KvlabError: a budget that the whole prompt fits.
    """
    if max(settings.budgets) >= trace.prompt_length:
        raise KvlabError(
            f"a prompt of {trace.prompt_length} tokens fits a budget of {max(settings.budgets)}: nothing is evicted, "
            "and nothing can be learnt"
        )
    prompt, shares = trace.prompt, attended(trace)
    free = settings.policy(1)
    # The mean over layers (eq. 6); `plan` would warn of the missing tables.
    surveys = free.survey(prompt)
    planned = prompt.with_plan(surveys.mean(0).expand_as(surveys))
    return {"budgets": {str(budget): _at_budget(planned, shares, settings, budget) for budget in settings.budgets}}


def _at_budget(planned: Prompt, shares: Tensor, settings: MarginalSettings, budget: int) -> dict[str, Any]:
    neutral, layers, kv_heads = settings.policy(budget), planned.rows, planned.kv_heads
    group = planned.queries.shape[1] // kv_heads

    def lost(policy: CompilerKV) -> Tensor:
        # The heads of a layer share one set; its layers decide apart, so that one call tries a change in all of them.
        kept = policy.prefill(planned)[:, 0].cpu()
        return shares.sum(-1) - shares.gather(1, kept.clamp_min(0)).masked_fill(kept == EMPTY, 0).sum(-1)

    base = lost(neutral)
    heads = torch.zeros(layers, kv_heads, len(settings.weights), dtype=torch.float64)
    for head in range(kv_heads):
        for action, weight in enumerate(settings.weights):
            if action != settings.neutral:
                row = [weight if index == head else 1.0 for index in range(kv_heads)]
                tables = DecisionTables(heads=[[w for w in row for _ in range(group)]] * layers, risk=None)
                heads[:, head, action] = lost(neutral.using(tables)) - base
    return {"heads": heads.flatten(0, 1).numpy().round(7).tolist()}


@dataclass(frozen=True)
class Measured:
    """The result of `measure`: the lines of the journal, one for each context, and what they were made with.

    Attributes:
        documents: signatures of the texts that the prompts came from.
    """

    lm: LM
    settings: MarginalSettings
    lines: list[dict[str, Any]]
    documents: list[str]

    def effects(self, budget: int) -> ActionEffects:
        """The effect of every weight, at one of the budgets."""
        if budget not in self.settings.budgets:
            raise KvlabError(
                f"nothing was tried at {budget} entries, only at {', '.join(map(str, self.settings.budgets))}"
            )
        return ActionEffects.of(self.lines, budget)


def measure(
    lm: LM,
    settings: MarginalSettings,
    prompts: Sequence[Document],
    journal: str | Path | None = None,
    advance: Advance = lambda *_: None,
) -> Measured:
    """Try every weight of every head alone on every prompt.

    Args:
        prompts: in the format and of the length of those that the tables are for. Each is named like the document that
            it came from (`sotu/1867[0:1200]`). kvlab refuses texts that it evaluates on.
        journal: a JSONL file of the results. With it, a run that was cut off goes on where it stopped.
        advance: called with a label, the prompts done so far, and how many there are.

    Raises:
        KvlabError: there are no prompts, a prompt overlaps with evaluations or fits a budget, or the model has no
            tokenizer. Or the journal is damaged, or another process writes it.
    """
    lm.require_tokenizer("nothing can be learnt from texts")
    checked(prompts)
    names = ("budgets", "new_tokens", "weights", "window", "utility_window", "kernel")
    about = [lm.sha256, str(lm.dtype), lm.device.type, [getattr(settings, name) for name in names]]
    lines = []
    with Journal.open(journal) as kept:
        for number, prompt in enumerate(prompts):
            name = log.key("alone", about, prompt.signature)
            line = kept.get(name)
            if line is None:
                trace = capture(lm, prompt, settings.new_tokens, settings.window, pseudo=(), progress=False)
                line = kept.add(name, {"kind": "alone", "context": prompt.signature, **action_losses(trace, settings)})
            lines.append(line)
            advance("one head at a time", number + 1, len(prompts))
    return Measured(lm, settings, lines, [prompt.signature for prompt in prompts])
