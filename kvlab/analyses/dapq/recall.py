"""DapQ, section 3.3 and figure 3: which policy's observation window sees what the response will need?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pandas as pd
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvlab.analyses.dapq.position import ids_of
from kvlab.analyses.findings import Findings
from kvlab.core import ranking
from kvlab.lib import progress_bars
from kvlab.methods import Policy, policy
from kvlab.methods._base.needs import NOTHING, Draft
from kvlab.methods._base.policy import Kernel, top_and_last
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Scorer
from kvlab.methods.dapq import DapQ
from kvlab.methods.h2o import accumulated_scores
from kvlab.methods.snapkv import SnapKV
from kvlab.replays.reference import reference
from kvlab.traces.passes import draft_queries, prefilled, pseudo_queries_by_key, repeat_scores
from kvlab.traces.recording import encoder, pseudo_tokens
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

MEASURES = ("window_recall", "recall")
# Policies whose ranking depends on the size of an observation window, and the others.
WINDOWED, UNWINDOWED = ("snapkv", "pyramidkv"), ("h2o", "h2o_prefill", "streamingllm", "lacache")
OTHERS = WINDOWED + UNWINDOWED
SAME = ("snapkv_raw", "snapkv_pooled")
"""DapQ as it is against SnapKV's raw scores with nothing forced in, and both pooled with SnapKV's window forced in."""

RECALL = "{measure}/{policy}/w{window}/b{budget}"
LEAD = "lead/{measure}/{policy}/w{window}/b{budget}"
SMALL_WINDOW_LOSS = "small_window/loss"
SMALL_WINDOW_LEAD = "small_window/lead_less_loss"
SMALL_BUDGET_LEAD = "small_budget/lead_grows"


def with_pseudo(lm: LM, trace: Trace, policies: Sequence[Policy], start: int | None = None) -> Trace:
    """A trace with what `policies` see of passes on top of the prompt, from its prefilled cache.

    Args:
        trace: with a greedy response where a policy drafts an answer: its first token is the draft's.
        policies: their pseudo-tokens, at positions start .. start + window - 1; their drafts; the scores of DapQ with
            softmax="all".
        start: the prompt's length unless given, which is where the response will be; drafts and scores always are.
    """
    prompt, cache = ids_of(trace)[: trace.prompt_length], prefilled(trace, lm)
    tokens = pseudo_tokens(lm, prompt, policies)
    first = trace.prompt_length if start is None else start
    passes = {each.key: each for method in policies for each in getattr(method, "needs", NOTHING).repetitions}
    scores = {key: repeat_scores(lm, cache, each, each.parts(prompt, encoder(lm))) for key, each in passes.items()}
    pseudo = pseudo_queries_by_key(lm, cache, tokens, first)
    for method in policies:
        if isinstance(draft := getattr(method, "needs", NOTHING).pseudo, Draft):
            pseudo[draft.key] = draft_queries(lm, cache, trace.prompt, ids_of(trace)[trace.prompt_length], draft)
    return replace(trace, pseudo=pseudo, repeated=trace.repeated | scores)


def recalls(trace: Trace, method: Policy) -> dict[str, float]:
    """`window_recall` (eq. 1-3: top scores alone) and `recall` (the set that the policy keeps), after the prefill.

    Means over layers and KV heads; the same as in a replay, without its decoding steps.
    """
    ranks, prompt = reference(trace).gold_ranks, trace.prompt
    k = min(method.entries(trace.prompt_length), trace.prompt_length)
    best = ranking.top_positions(method.scores(prompt), k)
    return {
        "window_recall": float(reference(trace).share_found(ranks, best, k).mean()),
        "recall": float(reference(trace).share_found(ranks, method.prefill(prompt), k).mean()),
    }


class PrefillH2O(Scorer):
    """H2O as DapQ's comparison runs it: at the prefill alone, with the last `window` tokens as its recent part.

    Every generated token stays.
    """

    name: ClassVar[str] = "h2o_prefill"
    summary: ClassVar[str] = "H2O at the prefill alone"

    window: Annotated[int, Field(ge=1)] = 32

    @property
    def minimum(self) -> int:
        return self.window + 1

    @property
    def accumulates(self) -> bool:
        return True

    def scores(self, prompt: Prompt) -> Tensor:
        return accumulated_scores(self, prompt)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return top_and_last(self.scores(prompt), budget - self.window, self.window)


class RawSnapKV(SnapKV):
    """SnapKV by equations 2 and 3: the top of its window's scores, nothing pooled and nothing forced in."""

    name: ClassVar[str] = "snapkv_raw"
    summary: ClassVar[str] = "the top of SnapKV's raw scores"

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.top_positions(self.scores(prompt), budget)


class PooledDapQ(DapQ):
    """DapQ with SnapKV's pooling, and with the prompt's last tokens forced in as SnapKV has them."""

    name: ClassVar[str] = "dapq_pooled_kept"
    summary: ClassVar[str] = "DapQ with SnapKV's pooling and kept window"

    kernel: Kernel = 7

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        older = self.scores(prompt)[..., : prompt.length - self.window]
        pooled = F.avg_pool1d(older, self.kernel, stride=1, padding=self.kernel // 2)
        return top_and_last(F.pad(pooled, (0, self.window), value=torch.inf), budget - self.window, self.window)


def retained(trace: Trace, method: Policy) -> float:
    """Share of the gold top k in what the policy keeps, k being the entries that it keeps."""
    kept = method.prefill(trace.prompt)
    return float(reference(trace).share_found(reference(trace).gold_ranks, kept, kept.shape[-1]).mean())


def same_pooling(
    lm: LM, traces: Sequence[Trace], budgets: Sequence[int] = (64, 128, 256, 512), window: int = 32, seed: int = 0
) -> Findings:
    """Section 3.3 with equal means on both sides: raw windows against raw ones, pooled ones against pooled ones.

    DapQ's pseudo-tokens are random, as in `figure_3`.

    Returns:
        Table with columns document, pair (of `SAME`), budget, dapq, snapkv (recall of the retained sets). Metrics
        `lead/recall/snapkv_raw/w32/b256` and `lead/recall/snapkv_pooled/w32/b256`, DapQ less SnapKV, paired by
        document.
    """
    rows = []
    for number, trace in enumerate(progress_bars.each(traces, "same pooling", "doc")):
        random = {"content": "vocabulary", "window": window, "seed": seed + number}
        own = with_pseudo(lm, trace, [DapQ(budget=1.0, **random)])
        for b in budgets:
            pairs = {
                "snapkv_raw": (DapQ(budget=b, **random), RawSnapKV(budget=b, window=window)),
                "snapkv_pooled": (PooledDapQ(budget=b, **random), SnapKV(budget=b, window=window)),
            }
            for pair, (dapq, snapkv) in pairs.items():
                values = {"dapq": retained(own, dapq), "snapkv": retained(own, snapkv)}
                rows.append({"document": trace.document, "pair": pair, "budget": b} | values)
    findings = Findings(pd.DataFrame(rows))
    groups: Any = findings.table.groupby(["pair", "budget"])
    for (pair, b), part in groups:
        wide = part.set_index("document")
        keys = {"measure": "recall", "policy": pair, "window": window, "budget": b}
        findings.add_difference(LEAD, wide["dapq"], wide["snapkv"], **keys)
    return findings


def figure_3(
    lm: LM,
    traces: Sequence[Trace],
    windows: Sequence[int] = (8, 16, 32, 64, 128),
    budgets: Sequence[int] = (64, 128, 256, 512),
    window: int = 32,
    budget: int = 256,
    contents: int = 1,
    seed: int = 0,
) -> Findings:
    """Measure figure 3: recall against the window's size (at one budget) and against the budget (at one window's size).

    DapQ's pseudo-tokens are random (drawn from the vocabulary), as in the paper.

    Args:
        window, budget: each stays fixed while the other varies.
        contents: random contents for each document, averaged.

    Returns:
        Table with columns document, policy, window, budget, measure, value. Metrics, with intervals over documents:
        - `window_recall/dapq/w32/b256` and so on, and `recall/...`.
        - `lead/window_recall/snapkv/w32/b256`: DapQ less the other, paired by document.
    """
    settings = [(w, budget) for w in windows] + [(window, b) for b in budgets if (window, b) != (window, budget)]
    if window not in windows:
        settings.append((window, budget))
    rows = []
    for number, trace in enumerate(progress_bars.each(traces, "figure 3", "doc")):
        seeds = [seed + contents * number + i for i in range(contents)]
        random = {
            (w, s): DapQ(budget=1.0, content="vocabulary", window=w, seed=s) for w in {*windows, window} for s in seeds
        }
        own = with_pseudo(lm, trace, list(random.values()))
        unwindowed = {
            (name, b): recalls(own, without_window(name, b)) for name in UNWINDOWED for b in {b for _, b in settings}
        }
        for w, b in settings:
            measured = [recalls(own, random[w, s].replace(budget=b)) for s in seeds]
            values = {"dapq": {name: sum(f[name] for f in measured) / contents for name in MEASURES}}
            values |= {name: recalls(own, policy(name, budget=b, window=w)) for name in WINDOWED}
            values |= {name: result for (name, of), result in unwindowed.items() if of == b}
            rows += [
                {"document": trace.document, "policy": name, "window": w, "budget": b, "measure": measure, "value": v}
                for name, both in values.items()
                for measure, v in both.items()
            ]
    findings = Findings(pd.DataFrame(rows))
    settings = ["measure", "window", "budget"]
    values = findings.table.pivot(index="document", columns=[*settings, "policy"], values="value").sort_index(axis=1)
    for setting in values.columns.droplevel("policy").unique():
        wide, at = values.loc[:, setting], dict(zip(settings, setting, strict=True))
        for name in wide:
            findings.add(RECALL, wide[name], policy=name, **at)
        for name in OTHERS:
            findings.add_difference(LEAD, wide["dapq"], wide[name], policy=name, **at)
    return findings


def without_window(name: str, budget: int) -> Policy:
    """One of UNWINDOWED at a budget."""
    return PrefillH2O(budget=budget) if name == PrefillH2O.name else policy(name, budget=budget)


def small_windows(figure: Findings, small: int, budget: int) -> Findings:
    """Measure DapQ's loss of window recall at a small window, and its lead over SnapKV there (section 3.3).

    Args:
        figure: from `figure_3`.

    Returns:
        Metrics, paired by document:
        - `small_window/loss`: DapQ at the window that is best on average, less DapQ at `small`.
        - `small_window/lead_less_loss`: DapQ less SnapKV at `small`, less that loss.
    """
    table = figure.table.query("measure == 'window_recall' and budget == @budget")
    wide = table.pivot(index="document", columns=["policy", "window"], values="value")
    dapq, snapkv = wide.loc[:, "dapq"], wide.loc[:, "snapkv"]
    loss = dapq[dapq.mean().idxmax()] - dapq[small]
    findings = Findings(figure.table)
    findings.add(SMALL_WINDOW_LOSS, loss)
    findings.add_difference(SMALL_WINDOW_LEAD, dapq[small] - snapkv[small], loss)
    return findings


def small_budgets(figure: Findings, small: int, large: int, window: int) -> Findings:
    """Abstract: is the lead over SnapKV larger under a tight budget?

    Returns:
        Metric `small_budget/lead_grows`: DapQ's lead in window recall at the budget `small` less that at `large`,
        paired by document.
    """
    table = figure.table.query("measure == 'window_recall' and window == @window")
    wide = table.pivot(index="document", columns=["policy", "budget"], values="value")
    lead = wide.loc[:, "dapq"] - wide.loc[:, "snapkv"]
    findings = Findings(figure.table)
    findings.add_difference(SMALL_BUDGET_LEAD, lead[small], lead[large])
    return findings
