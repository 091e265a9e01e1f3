"""DapQ, section 3.3 and figure 3: whose observation window sees what the response will need?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd
import torch
from tqdm.auto import tqdm

from kvlab.analyses.dapq.position import ids_of
from kvlab.analyses.findings import Findings
from kvlab.core import ranking
from kvlab.methods import Policy, policy
from kvlab.methods.dapq import DapQ
from kvlab.replays.reference import reference
from kvlab.traces.run import prefilled, pseudo_queries
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

MEASURES = ("window_recall", "recall")
# Those whose ranking depends on the size of an observation window, and the others.
WINDOWED, UNWINDOWED = ("snapkv", "pyramidkv"), ("h2o", "streamingllm")
OTHERS = WINDOWED + UNWINDOWED

RECALL = "{measure}/{policy}/w{window}/b{budget}"
LEAD = "lead/{measure}/{policy}/w{window}/b{budget}"
SMALL_WINDOW_LOSS = "small_window/loss"
SMALL_WINDOW_LEAD = "small_window/lead_less_loss"
SMALL_BUDGET_LEAD = "small_budget/lead_grows"


def with_pseudo(lm: LM, trace: Trace, policies: Sequence[DapQ], start: int | None = None) -> Trace:
    """A trace with the pseudo-queries that `policies` ask for, which run on its prefilled cache.

    Args:
        policies: their pseudo-tokens, at positions start .. start + window - 1.
        start: the prompt's length unless given, which is where the response will be.
    """
    here = trace.prompt_length if start is None else start
    vocabulary = lm.model.config.get_text_config(decoder=True).vocab_size
    prompt, cache = ids_of(trace)[: trace.prompt_length], prefilled(trace, lm)

    def encode(text: str) -> torch.Tensor:
        tokenizer = lm.require_tokenizer("pseudo-tokens cannot be made from a sentence")
        return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)

    tokens = {one.pseudo_key: one.pseudo_tokens(prompt, vocabulary, encode) for one in policies}
    found = {key: pseudo_queries(lm, cache, ids, torch.arange(here, here + len(ids)))[0] for key, ids in tokens.items()}
    return replace(trace, pseudo=found)


def recalls(trace: Trace, one: Policy) -> dict[str, float]:
    """`window_recall` (eq. 1-3: top scores alone) and `recall` (the set that the policy keeps), after the prefill.

    Means over layers and KV heads; the same as in a replay, without its decoding steps.
    """
    ranks, prompt = reference(trace).gold_ranks, trace.prompt
    k = min(one.entries(trace.prompt_length), trace.prompt_length)
    best = ranking.top_positions(one.scores(prompt), k)
    return {
        "window_recall": float(reference(trace).share_found(ranks, best, k).mean()),
        "recall": float(reference(trace).share_found(ranks, one.prefill(prompt), k).mean()),
    }


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
    """Figure 3: recall against the window's size (at one budget) and against the budget (at one window's size).

    DapQ's pseudo-queries say something random (drawn from the vocabulary), as in the paper.

    Args:
        window, budget: what stays fixed while the other varies.
        contents: random contents for each document, averaged.

    Returns:
        Table with columns document, policy, window, budget, measure, value; metrics `window_recall/dapq/w32/b256` and
        so on, `recall/...`, and `lead/window_recall/snapkv/w32/b256`: DapQ less the other, paired by document;
        intervals over documents.
    """
    settings = [(w, budget) for w in windows] + [(window, b) for b in budgets if (window, b) != (window, budget)]
    if window not in windows:
        settings.append((window, budget))
    rows = []
    for number, trace in enumerate(tqdm(traces, desc="figure 3", unit="doc", leave=False)):
        seeds = [seed + contents * number + i for i in range(contents)]
        random = {
            (w, s): DapQ(budget=1.0, content="vocabulary", window=w, seed=s) for w in {*windows, window} for s in seeds
        }
        own = with_pseudo(lm, trace, list(random.values()))
        unwindowed = {
            (name, b): recalls(own, policy(name, budget=b)) for name in UNWINDOWED for b in {b for _, b in settings}
        }
        for w, b in settings:
            found = [recalls(own, random[w, s].replace(budget=b)) for s in seeds]
            values = {"dapq": {name: sum(f[name] for f in found) / contents for name in MEASURES}}
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


def small_windows(figure: Findings, small: int, budget: int) -> Findings:
    """Section 3.3: what DapQ's window recall loses from its best window to a small one, and its lead over SnapKV there.

    Args:
        figure: from `figure_3`.

    Returns:
        Metrics `small_window/loss` (DapQ at the window that is best on average, less DapQ at `small`) and
        `small_window/lead_less_loss` (DapQ less SnapKV at `small`, less that loss), paired by document.
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
