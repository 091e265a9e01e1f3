"""CompilerKV's weights from marginal contributions: the signal in trials, and what it is worth on prompts held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvlab.analyses.compilerkv.quality import by_method, require_unseen, sweep
from kvlab.analyses.findings import Findings
from kvlab.analyses.texts import plain_name, to_summarise
from kvlab.compile.marginal import ActionEffects, MarginalSettings
from kvlab.errors import KvlabError
from kvlab.methods._base.lookup import DecisionTables
from kvlab.methods.compilerkv import CompilerKV

if TYPE_CHECKING:
    from kvlab.inputs.corpus import Document
    from kvlab.inputs.models import LM
    from kvlab.traces.trace import Trace

P, F = "signal/alone_heads/p", "signal/alone_heads/f"
KEPT = "alone/kept/{variant}/{budget}"
GAIN = "alone/gain/heads/{budget}"
CHANGED = "alone/changed/{budget}"


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
    """Test whether changes of heads move the lost attention at all, more than chance does.

    Under the null the changes of a context are as likely with the other sign. F is the squared mean of the contexts
    over its variance.

    Returns:
        Metrics `signal/alone_heads/p` and `signal/alone_heads/f`. p is the share of exchanges, the real one counted,
        with an F as large. There are no metrics where nothing moved, as with the weights of layers with one KV head.
    """
    rng, findings = np.random.default_rng(seed), Findings(pd.DataFrame())
    changes = np.delete(effects.heads, settings.neutral, 2).reshape(len(effects.names), -1)
    if len(changes) > 1 and changes.any():
        signs = rng.choice([-1.0, 1.0], (exchanges, len(changes), 1))
        f, exchanged = _mean_over_spread(changes), [_mean_over_spread(changes * sign) for sign in signs]
        large = [True, *(other >= f * (1 - 1e-12) for other in exchanged)]
        findings.set(P, sum(large) / len(large))
        findings.set(F, f)
    return findings


def _mean_over_spread(changes: np.ndarray) -> float:
    return float(len(changes) * (changes.mean(0) ** 2).sum() / changes.var(0, ddof=1).sum())


def held_out(traces: Sequence[Trace], tables: Mapping[int, DecisionTables]) -> Findings:
    """Measure the attention kept by weights on prompts that they were not learnt from, in the same format.

    Args:
        tables: by the budget that they were learnt for.

    Returns:
        The table of `sweep`. Metrics for each budget:
        - `alone/kept/neutral/BUDGET` and `alone/kept/heads/BUDGET`: the attention kept.
        - `alone/gain/heads/BUDGET`: learnt weights less equal ones, both filled up.
        - `alone/changed/BUDGET`: the share of heads whose weight is not 1.

    Raises:
        KvlabError: a prompt whose document the tables were learnt from.
    """
    require_unseen(tables.values(), map(plain_name, traces))
    settings: list[tuple[str, CompilerKV]] = []
    for budget, of_budget in tables.items():
        base = CompilerKV(budget=budget)
        weights = DecisionTables(heads=of_budget.heads, risk=None)
        settings += [(f"neutral/{budget}", base), (f"heads/{budget}", base.using(weights))]
    findings = Findings(sweep(traces, settings))
    kept = {str(name): column for name, column in by_method(findings.table, "kept").items()}
    for budget, of_budget in tables.items():
        neutral, heads = kept[f"neutral/{budget}"], kept[f"heads/{budget}"]
        findings.add(KEPT, neutral, variant="neutral", budget=budget)
        findings.add(KEPT, heads, variant="heads", budget=budget)
        findings.add_difference(GAIN, heads, neutral, budget=budget)
        findings.set(CHANGED, (np.array(of_budget.heads) != 1).mean(), budget=budget)
    return findings


def in_words(held_out: Findings) -> str:
    """A line for each budget."""
    return "\n".join(
        f"{row['budget']:5} entries, learnt weights over equal ones: {row['value']:+.4f}   "
        f"{row['low']:+.4f} to {row['high']:+.4f}"
        for row in held_out.frame(GAIN).to_dict("records")
    )
