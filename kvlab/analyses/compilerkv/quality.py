"""CompilerKV, section 5: budgets (figure 2) and competitors (table 1) by what replays lose.

LongBench's scores need models of 7 or 8 billion parameters. Two measures stand in for a score: the share of the
response's attention that falls on stored entries (1 - mass lost), and the recall of the tokens that the response
attends to most. "The paper's share" of a prompt is the share that 512 entries are of LongBench's mean prompt.

By equation 16 the gate may leave a part of the budget unused. The paper compares at equal nominal budgets and says that
tight budgets are always filled (appendix B.1); with tables learnt for a small model they are not. So each rival is
compared first with sets filled up to the budget, where all store the same, and then with the gated ones. A twin with
SnapKV's pooling and kept window tells what the utility does from what these two do.

In filled sets thresholds have no effect, so that of what was learnt the weights of heads alone decide. These are taken
from tables learnt one head at a time, as section 4.3 words it and where the trials hold a clear signal, for the nearest
budget; the gated sets have the tables of joint trials.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import product
from types import MappingProxyType

import pandas as pd
import torch

from kvlab.analyses.findings import Findings
from kvlab.analyses.texts import plain_name
from kvlab.core.store import EMPTY
from kvlab.errors import KvlabError
from kvlab.lib import progress_bars
from kvlab.methods import Policy, policy
from kvlab.methods._base.lookup import DecisionTables
from kvlab.methods.compilerkv import CompilerKV
from kvlab.methods.snapkv import SnapKV
from kvlab.replays.replay import Replay
from kvlab.replays.run import replay
from kvlab.traces.trace import Trace

BUDGETS = (64, 128, 256, 512, 1024)
RIVALS = ("dynamickv", "zigzagkv", "pyramidkv", "snapkv", "h2o", "streamingllm")
MEASURES = ("kept", "recall")
LABELS = {
    "compilerkv": "CompilerKV",
    "filled": "CompilerKV, filled up",
    "twin": "CompilerKV, SnapKV's twin",
    "dynamickv": "DynamicKV",
    "zigzagkv": "ZigZagKV",
    "pyramidkv": "PyramidKV",
    "snapkv": "SnapKV",
    "h2o": "H2O",
    "streamingllm": "StreamingLLM",
    "full": "FullKV",
}
"""The names of the methods in the paper's tables."""

AT_BUDGET = "{measure}/{method}/{budget}"
DROP = "drop/{method}"
FLATTER, FLATTER_FILLED = "flatter/{rival}", "flatter_filled/{rival}"
LEAD, LEAD_FILLED = "lead/{rival}/{budget}", "lead_filled/{rival}/{budget}"
CLAMPED = "clamped/{budget}"
RETAINED, RECALLED, LOST = "retained/{method}", "recalled/{method}", "lost/{method}"
STORED = "stored/{method}"
GAIN, GAIN_FILLED = "gain/{measure}/{rival}", "gain_filled/{measure}/{rival}"
GAIN_TWIN = "gain_twin/{measure}/{rival}"


def paper_share(lengths: pd.DataFrame, entries: int = 512) -> float:
    """The share that `entries` are of LongBench's mean prompt; `lengths` has one row for each task, with its `length`.

    LongBench counts words, and a prompt has more tokens than words, so the paper's own share is somewhat smaller.
    """
    return entries / float(lengths["length"].to_numpy().mean())


def methods(budget: int | float, tables: str | None, weights: DecisionTables | None = None) -> dict[str, Policy]:
    """CompilerKV by equation 16, CompilerKV filled up to the budget as in the published runs, and table 1's six others.

    Args:
        budget: entries for each layer and KV head, or a share of the prompt.
        tables: as CompilerKV takes them; with None no token is turned away, and all sets fill the budget anyway.
        weights: whose weights of heads the filled sets have instead of the tables' own; of `nearest`.
    """
    ours = CompilerKV(budget=budget, tables=tables)
    filled = ours if tables is None else ours.replace(pad="budget")
    if weights is not None:
        filled = ours.using(weights)
    return {"compilerkv": ours, "filled": filled} | {name: policy(name, budget=budget) for name in RIVALS}


def nearest(per_head: Mapping[int, DecisionTables], entries: float) -> DecisionTables | None:
    """The weights that were learnt for the budget whose ratio to `entries` is nearest to 1, without thresholds, which
    filled sets do not need; None where none were learnt.
    """
    if not per_head:
        return None
    at = min(per_head, key=lambda budget: (abs(math.log(budget / entries)), budget))
    return DecisionTables(model=per_head[at].model, heads=per_head[at].heads, risk=None)


def require_unseen(tables: Iterable[DecisionTables], documents: Iterable[str]) -> None:
    """Raises KvlabError where a document that is judged on is one that any of the tables was learnt from.

    documents: names, as `corpus.named` gives them (`texts.plain_name` has those of traces).
    """
    learnt = (name for each in tables for name in (each.model_extra or {}).get("documents") or [])
    learnt_from = {name.rpartition("@")[0] for name in learnt}
    if seen := learnt_from & set(documents):
        raise KvlabError(f"these tables were learnt from {', '.join(sorted(seen))}: name texts that they have not seen")


def twin(filled: CompilerKV, budget: int | float) -> CompilerKV:
    """CompilerKV that differs from SnapKV in its utility alone: with the same pooling and the same kept window."""
    snapkv = SnapKV(budget=budget)
    return filled.replace(kernel=snapkv.kernel, recent=snapkv.window)


def sweep(traces: Sequence[Trace], settings: Sequence[tuple[str, Policy]]) -> pd.DataFrame:
    """Replays of every setting on every trace.

    Args:
        settings: (name, policy); a name may stand for one method at several budgets.

    Returns:
        Tidy, one row for each query head: document, method, budget, entries (what the budget comes to), layer, head,
        kept (share of the response's attention), recall (of the head's group), error (of the attention output), stored
        (entries of the prompt that the head's KV head stores).
    """
    jobs = [(trace, name, method) for trace in traces for name, method in settings]
    return pd.concat(
        [
            _by_head(trace, method).assign(document=trace.document, method=name, budget=getattr(method, "budget", None))
            for trace, name, method in progress_bars.each(jobs, "budgets", "replay")
        ],
        ignore_index=True,
    )


def _by_head(trace: Trace, method: Policy) -> pd.DataFrame:
    """The rows of `sweep` for one replay. They are kept with the trace, because tables 1 and 2 share some settings."""

    def measured() -> pd.DataFrame:
        replay = replayed(trace, method)
        group = trace.heads // trace.kv_heads
        stored = torch.stack([(replay.kept(layer) != EMPTY).sum(-1) for layer in trace.layers])
        of_heads = {
            "kept": 1 - replay.mass_lost.mean(-1),
            "recall": replay.recall.repeat_interleave(group, 1),
            "error": replay.output_error.mean(-1),
            "stored": stored.repeat_interleave(group, 1),
        }
        rows = pd.MultiIndex.from_product([trace.layers, range(trace.heads)], names=["layer", "head"])
        frame = pd.DataFrame({key: value.flatten().double().numpy() for key, value in of_heads.items()}, index=rows)
        return frame.reset_index().assign(entries=replay.budget)

    # As numbers, one entry and the whole prompt are equal budgets.
    return trace.share(("by head", method, str(getattr(method, "budget", None))), measured)


def replayed(trace: Trace, method: Policy) -> Replay:
    """A replay without the warning about neutral tables, which are intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="compilerkv runs with neutral tables")
        return replay(trace, method)


def by_document(table: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Means over layers and heads: one row for each document, one column for each (method, budget)."""
    return table.pivot_table(index="document", columns=["method", "budget"], values=measure)


def by_method(table: pd.DataFrame, measure: str) -> dict[Hashable, pd.Series]:
    """`by_document` of a sweep in which each method has one budget: its column for each method."""
    return dict(by_document(table, measure).droplevel("budget", axis=1).items())


def figure_2(
    traces: Sequence[Trace],
    budgets: Sequence[int] = BUDGETS,
    tables: str | None = None,
    per_head: Mapping[int, DecisionTables] = MappingProxyType({}),
    steep: tuple[int, int] = (256, 64),
) -> Findings:
    """Figure 2: what every method keeps from the smallest budget to the largest.

    Args:
        per_head: tables by the budget that they were learnt for, one head at a time; each filled set has the weights of
            the nearest.
        steep: budgets between which the paper sees eviction drop (section 5.3).

    Raises:
        KvlabError: these two are not among the budgets; a text that tables were learnt from.

    Returns:
        The table of `sweep`; metrics `kept/compilerkv/512`, `recall/...`, `stored/...` (mean entries of the prompt);
        `lead/RIVAL/512`, the attention that CompilerKV keeps less what the rival does; `drop/METHOD`, the loss between
        the two budgets of `steep`, and `flatter/RIVAL`, the rival's drop less CompilerKV's; `lead_filled/...` and
        `flatter_filled/...`, the same for sets filled up to the budget; with tables `clamped/512`, the share of prompts
        and layers whose candidates fill the budget.
    """
    if not set(steep) <= set(budgets):
        raise KvlabError(f"the drop from {steep[0]} to {steep[1]} entries needs both among the budgets {list(budgets)}")
    require_unseen(per_head.values(), map(plain_name, traces))
    settings = {
        (name, budget): method
        for budget in budgets
        for name, method in methods(budget, tables, nearest(per_head, budget)).items()
    }
    findings = Findings(sweep(traces, [(name, method) for (name, _), method in settings.items()]))
    values = {measure: dict(by_document(findings.table, measure).items()) for measure in (*MEASURES, "stored")}
    for measure, (name, budget) in product(values, settings):
        findings.add(AT_BUDGET, values[measure][name, budget], measure=measure, method=name, budget=budget)
    kept, large, small = values["kept"], *steep
    drops = {name: kept[name, large] - kept[name, small] for name in ("compilerkv", "filled", *RIVALS)}
    for name, drop in drops.items():
        findings.add(DROP, drop, method=name)
    sides = {"compilerkv": (FLATTER, LEAD), "filled": (FLATTER_FILLED, LEAD_FILLED)}
    for (ours, (flatter, lead)), rival in product(sides.items(), RIVALS):
        findings.add_difference(flatter, drops[rival], drops[ours], rival=rival)
        for budget in budgets:
            findings.add_difference(lead, kept[ours, budget], kept[rival, budget], rival=rival, budget=budget)
    if tables is None:
        return findings
    gated = findings.table.query("method == 'compilerkv'")
    fills = gated.assign(fills=gated["stored"] >= gated["entries"])
    for budget, shares in fills.pivot_table(index="document", columns="budget", values="fills").items():
        findings.add(CLAMPED, shares, budget=budget)
    return findings


def table_1(
    traces: Sequence[Trace],
    tables: str | None,
    share: float,
    per_head: Mapping[int, DecisionTables] = MappingProxyType({}),
) -> Findings:
    """Table 1's comparison at the paper's share of each prompt, document by document.

    Args:
        per_head: as for `figure_2`; the budget is the share of the mean prompt.

    Raises:
        KvlabError: a text that tables were learnt from.

    Returns:
        The table of `sweep`; metrics `retained/METHOD` (attention kept), `lost/METHOD` (the rest), `recalled/METHOD`,
        `stored/METHOD` (mean entries of the prompt, of which a gate may leave some empty);
        `gain/kept/RIVAL` and `gain/recall/RIVAL`, CompilerKV's measure over the rival's, less 1; `gain_filled/...`,
        where CompilerKV is filled up to the budget; and `gain_twin/...`, where it has SnapKV's pooling and kept window
        besides.
    """
    require_unseen(per_head.values(), map(plain_name, traces))
    entries = share * sum(trace.prompt_length for trace in traces) / len(traces)
    compared = methods(share, tables, nearest(per_head, entries))
    filled = compared["filled"]
    assert isinstance(filled, CompilerKV)
    compared["twin"] = twin(filled, share)
    findings = Findings(sweep(traces, list(compared.items())))
    for name, stored in by_method(findings.table, "stored").items():
        findings.add(STORED, stored, method=name)
    for measure, effect in zip(MEASURES, (RETAINED, RECALLED), strict=True):
        values = by_method(findings.table, measure)
        for name in compared:
            findings.add(effect, values[name], method=name)
            if measure == "kept":
                findings.add(LOST, 1 - values[name], method=name)
        for rival in RIVALS:
            findings.add(GAIN, values["compilerkv"] / values[rival] - 1, measure=measure, rival=rival)
            findings.add(GAIN_FILLED, values["filled"] / values[rival] - 1, measure=measure, rival=rival)
            findings.add(GAIN_TWIN, values["twin"] / values[rival] - 1, measure=measure, rival=rival)
    return findings
