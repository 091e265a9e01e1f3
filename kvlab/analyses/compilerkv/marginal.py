"""CompilerKV's tables from marginal contributions: what they teach, and what they are worth on prompts held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvlab.analyses.compilerkv.quality import by_method, require_unseen, sweep
from kvlab.analyses.compilerkv.signal import p_value, tested
from kvlab.analyses.compilerkv.variants import static_thresholds, with_numbers
from kvlab.analyses.findings import Findings
from kvlab.analyses.texts import plain_name, to_summarise
from kvlab.compile import evidence
from kvlab.compile.marginal import ActionEffects, MarginalSettings, Planner
from kvlab.errors import KvlabError
from kvlab.methods import policy
from kvlab.methods._base.lookup import DecisionTables
from kvlab.methods.compilerkv import CompilerKV

if TYPE_CHECKING:
    from kvlab.inputs.corpus import Document
    from kvlab.inputs.models import LM
    from kvlab.traces.trace import Trace

KEPT = "alone/kept/{variant}/{budget}"
GAIN = "alone/gain/{comparison}/{budget}"
CHANGED = "alone/changed/{budget}"
CELLS = "alone/cells"
COMPARED = {
    "heads": "learnt weights, over equal ones",
    "gate": "learnt thresholds, over none, at equal storage",
    "risk": "thresholds by risk, over static ones, at equal storage",
}
"""How the differences of `held_out` are named for a reader."""


def prompts(lm: LM, documents: Sequence[Document], settings: MarginalSettings, n: int) -> list[Document]:
    """Requests to summarise parts of documents, in the evaluations' format: documents and lengths take turns, the seed
    draws the places.

    Raises:
        KvlabError: no document is long enough for any of the lengths.
    """
    rng, slack = np.random.default_rng([settings.seed, 4]), 16
    sizes = {document.name: document.tokens(lm) for document in documents}
    fitting = [document for document in documents if sizes[document.name] >= min(settings.lengths) + slack]
    if not fitting:
        raise KvlabError(f"no document has the {min(settings.lengths) + slack} tokens that a prompt takes")
    made = []
    for number in range(n):
        document = fitting[number % len(fitting)]
        length = settings.lengths[(number + number // len(fitting)) % len(settings.lengths)]
        tokens = min(length, sizes[document.name] - slack)
        start = int(rng.integers(sizes[document.name] - tokens - slack + 1))
        made.append(to_summarise(lm, document.window(lm, tokens + slack, start), tokens))
    return made


def signal(effects: ActionEffects, settings: MarginalSettings, exchanges: int = 999, seed: int = 0) -> Findings:
    """Do the trials of one change at a time hold a signal?

    `alone_heads`: do changes of heads move the attention that is lost at all? Under the null the changes of a context
    are as likely with the other sign; F is the contexts' mean squared over its variance. `alone_risk`: does what
    thresholds cost depend on the cell of risk? Under the null contexts may exchange their cells; F is the variance
    between cells over that within (Anderson 2001).

    Returns:
        Table: question, f, p. Metrics `signal/alone_heads/p`, `signal/alone_risk/p` and their F; none of a question
        that the trials cannot answer, since nothing moved (as the weights of layers with one KV head), or there is one
        cell, or no two contexts in a cell that differ.
    """
    rng, rows = np.random.default_rng(seed), []
    changes = np.delete(effects.heads, settings.at_rest("heads"), 2).reshape(len(effects.names), -1)
    if len(changes) > 1 and changes.any():
        signs = rng.choice([-1.0, 1.0], (exchanges, len(changes), 1))
        f, exchanged = _mean_over_spread(changes), [_mean_over_spread(changes * sign) for sign in signs]
        rows.append({"question": "alone_heads", "f": f, "p": p_value(f, exchanged)})
    cell, costs = evidence.cells_of(effects, settings)[0], effects.risk.reshape(len(effects.names), -1)
    names = np.unique(cell)
    if len(names) > 1 and any(np.ptp(costs[cell == name], 0).any() for name in names):
        exchanged = [_between_over_within(costs, rng.permutation(cell)) for _ in range(exchanges)]
        f = _between_over_within(costs, cell)
        rows.append({"question": "alone_risk", "f": f, "p": p_value(f, exchanged)})
    return tested(rows, ["question", "f", "p"])


def _mean_over_spread(changes: np.ndarray) -> float:
    return float(len(changes) * (changes.mean(0) ** 2).sum() / changes.var(0, ddof=1).sum())


def _between_over_within(costs: np.ndarray, cell: np.ndarray) -> float:
    names = np.unique(cell)
    means = {name: costs[cell == name].mean(0) for name in names}
    within = sum(((costs[cell == name] - means[name]) ** 2).sum() for name in names)
    between = ((costs - costs.mean(0)) ** 2).sum() - within
    return float(between / (len(names) - 1) / (within / (len(cell) - len(names))))


def held_out(traces: Sequence[Trace], tables: Mapping[int, DecisionTables]) -> Findings:
    """What tables are worth on prompts that they were not learnt from, in the same format: attention kept.

    Args:
        tables: by the budget that they were learnt for.

    Returns:
        The table of `sweep`. Metrics for each budget: `alone/kept/VARIANT/BUDGET`; `alone/gain/heads/BUDGET` (learnt
        weights less equal ones, both filled up); `alone/gain/gate/BUDGET` (both tables less the learnt weights alone at
        the mean of what the gate stored); `alone/gain/risk/BUDGET` (that gain less the gain of static thresholds over
        their own ungated twin); `alone/changed/BUDGET`, the share of heads whose weight is not 1; `alone/cells`, how
        many different cells of risk the prompts fall into.

    Raises:
        KvlabError: a prompt whose document the tables were learnt from.
    """
    require_unseen(tables.values(), map(plain_name, traces))
    settings: dict[str, CompilerKV] = {}
    for budget, of_budget in tables.items():
        heads, risk = np.array(of_budget.heads), np.array(of_budget.risk)
        static = np.broadcast_to(static_thresholds(of_budget).numpy()[:, None, None], risk.shape)
        base = policy("compilerkv", budget=budget)
        assert isinstance(base, CompilerKV)
        settings |= {
            f"neutral/{budget}": base,
            f"heads/{budget}": base.using(with_numbers(of_budget, heads, None)),
            f"gated/{budget}": base.using(of_budget),
            f"static/{budget}": base.using(with_numbers(of_budget, heads, static)),
        }
    findings = Findings(sweep(traces, list(settings.items())))
    stored = {str(name): column.mean() for name, column in by_method(findings.table, "stored").items()}
    ungated = {
        f"ungated {kind}/{budget}": settings[f"heads/{budget}"].replace(
            budget=max(1, round(stored[f"{kind}/{budget}"]))
        )
        for budget in tables
        for kind in ("gated", "static")
    }
    findings.table = pd.concat([findings.table, sweep(traces, list(ungated.items()))], ignore_index=True)
    kept = {str(name): column for name, column in by_method(findings.table, "kept").items()}
    for name, column in kept.items():
        variant, _, budget = name.rpartition("/")
        findings.add(KEPT, column, variant=variant.replace(" ", "_"), budget=int(budget))
    for budget, of_budget in tables.items():
        at = {variant: kept[f"{variant}/{budget}"] for variant in ("neutral", "heads", "gated", "static")}
        gains = {kind: at[kind] - kept[f"ungated {kind}/{budget}"] for kind in ("gated", "static")}
        findings.add_difference(GAIN, at["heads"], at["neutral"], comparison="heads", budget=budget)
        findings.add(GAIN, gains["gated"], comparison="gate", budget=budget)
        findings.add_difference(GAIN, gains["gated"], gains["static"], comparison="risk", budget=budget)
        findings.set(CHANGED, (np.array(of_budget.heads) != 1).mean(), budget=budget)
    # The bins of risk are the same at all budgets.
    findings.set(CELLS, _visited_cells(traces, next(iter(tables.values()))))
    return findings


def _visited_cells(traces: Sequence[Trace], tables: DecisionTables) -> int:
    planner, found = Planner(budget=1), set()
    for trace in traces:
        risks = planner.risk(planner.planned(trace.prompt))
        found.add(tuple(int(index[0]) for index in tables.cell(*risks)))
    return len(found)


def in_words(held_out: Findings) -> str:
    """A line for each budget and comparison."""
    return "\n".join(
        f"{row['budget']:5} entries, {COMPARED[row['comparison']]:56}{row['value']:+.4f}   "
        f"{row['low']:+.4f} to {row['high']:+.4f}"
        for row in held_out.frame(GAIN).to_dict("records")
    )
