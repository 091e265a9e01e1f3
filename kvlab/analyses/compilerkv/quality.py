"""CompilerKV, section 5: budgets (figure 2) and competitors (table 1) by what replays lose.

LongBench's scores need models of 7 or 8 billion parameters. Two measures replace a score. One is the share of the
response's attention on stored entries (1 - mass lost). The other is the recall of the tokens that the response attends
to most. "The paper's share" of a prompt is the share that 512 entries are of LongBench's mean prompt.

All sets fill their budget, so that all methods store the same; appendix B.1 says that tight budgets are always filled.
Thresholds have no effect then, and of what was learnt the weights of heads alone decide. A twin with SnapKV's pooling
and kept window separates their effect from that of the utility. The authors' code is compared, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence
from itertools import product

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
    "filled": "CompilerKV",
    "twin": "CompilerKV, SnapKV's twin",
    "published": "CompilerKV, the authors' code",
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
DROP, FLATTER_FILLED = "drop/{method}", "flatter_filled/{rival}"
LEAD_FILLED = "lead_filled/{rival}/{budget}"
RETAINED, RECALLED, LOST = "retained/{method}", "recalled/{method}", "lost/{method}"
STORED = "stored/{method}"
GAIN_FILLED, GAIN_TWIN = "gain_filled/{measure}/{rival}", "gain_twin/{measure}/{rival}"
GAIN_PUBLISHED = "gain_published/{measure}/{rival}"


def paper_share(lengths: pd.DataFrame, entries: int = 512) -> float:
    """The share that `entries` are of LongBench's mean prompt; `lengths` has one row for each task, with its `length`.

    LongBench counts words, and a prompt has more tokens than words, so the paper's own share is somewhat smaller.
    """
    return entries / float(lengths["length"].to_numpy().mean())


def methods(budget: int | float, tables: str | None) -> dict[str, Policy]:
    """CompilerKV filled up to the budget, and table 1's six others.

    Args:
        budget: entries for each layer and KV head, or a share of the prompt.
        tables: as CompilerKV takes them; of these the weights of heads alone decide.
    """
    ours = CompilerKV(budget=budget, tables=tables, pad="budget")
    return {"filled": ours} | {name: policy(name, budget=budget) for name in RIVALS}


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


def published(budget: int | float) -> CompilerKV:
    """The authors' code with SnapKV's window, which leaves more of a small budget to choose than their 64 tokens."""
    return CompilerKV(budget=budget, variant="published", window=SnapKV(budget=budget).window)


def sweep(traces: Sequence[Trace], settings: Sequence[tuple[str, Policy]]) -> pd.DataFrame:
    """Replay every setting on every trace.

    Args:
        settings: (name, policy); one name can be that of one method at several budgets.

    Returns:
        Tidy, one row for each query head, with columns document, method, budget, layer, head and:
        - entries: the budget in entries.
        - kept: the share of the response's attention on stored entries.
        - recall: of the head's group.
        - error: of the attention output.
        - stored: the entries of the prompt that the head's KV head stores.
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
    steep: tuple[int, int] = (256, 64),
) -> Findings:
    """Measure figure 2: the attention that every method keeps, from the smallest budget to the largest.

    Args:
        steep: budgets between which the paper sees eviction drop (section 5.3).

    Raises:
        KvlabError: these two are not among the budgets, or a text that the tables were learnt from.

    Returns:
        The table of `sweep`. Metrics:
        - `kept/filled/512` and `recall/...`: the measures of each method at each budget.
        - `lead_filled/RIVAL/512`: the attention that CompilerKV keeps less the rival's.
        - `drop/METHOD`: the loss between the two budgets of `steep`.
        - `flatter_filled/RIVAL`: the rival's drop less CompilerKV's.
    """
    if not set(steep) <= set(budgets):
        raise KvlabError(f"the drop from {steep[0]} to {steep[1]} entries needs both among the budgets {list(budgets)}")
    require_unseen([CompilerKV(budget=1, tables=tables).tables_in_use], map(plain_name, traces))
    settings = [item for budget in budgets for item in methods(budget, tables).items()]
    findings = Findings(sweep(traces, settings))
    values = {measure: dict(by_document(findings.table, measure).items()) for measure in MEASURES}
    names = ("filled", *RIVALS)
    for measure, name, budget in product(MEASURES, names, budgets):
        findings.add(AT_BUDGET, values[measure][name, budget], measure=measure, method=name, budget=budget)
    kept, large, small = values["kept"], *steep
    drops = {name: kept[name, large] - kept[name, small] for name in names}
    for name, drop in drops.items():
        findings.add(DROP, drop, method=name)
    for rival in RIVALS:
        findings.add_difference(FLATTER_FILLED, drops[rival], drops["filled"], rival=rival)
        for budget in budgets:
            findings.add_difference(
                LEAD_FILLED, kept["filled", budget], kept[rival, budget], rival=rival, budget=budget
            )
    return findings


def table_1(traces: Sequence[Trace], tables: str | None, share: float) -> Findings:
    """Compare the methods of table 1 at the paper's share of each prompt, document by document.

    Raises:
        KvlabError: a text that the tables were learnt from.

    Returns:
        The table of `sweep`. Metrics:
        - `retained/METHOD`: the attention kept; `lost/METHOD`: the rest.
        - `recalled/METHOD`: the recall.
        - `stored/METHOD`: the mean entries of the prompt.
        - `gain_filled/kept/RIVAL` and `gain_filled/recall/RIVAL`: CompilerKV's measure over the rival's, less 1.
        - `gain_twin/...`: the same where CompilerKV has SnapKV's pooling and kept window as well.
        - `gain_published/...`: the same of the authors' code with that window, over `twin`, too.
    """
    compared = methods(share, tables)
    filled = compared["filled"]
    assert isinstance(filled, CompilerKV)
    require_unseen([filled.tables_in_use], map(plain_name, traces))
    compared |= {"twin": twin(filled, share), "published": published(share)}
    findings = Findings(sweep(traces, list(compared.items())))
    for name, stored in by_method(findings.table, "stored").items():
        findings.add(STORED, stored, method=name)
    sides = {
        "filled": (GAIN_FILLED, RIVALS),
        "twin": (GAIN_TWIN, RIVALS),
        "published": (GAIN_PUBLISHED, (*RIVALS, "twin")),
    }
    for measure, effect in zip(MEASURES, (RETAINED, RECALLED), strict=True):
        values = by_method(findings.table, measure)
        for name in compared:
            findings.add(effect, values[name], method=name)
            if measure == "kept":
                findings.add(LOST, 1 - values[name], method=name)
        for ours, (gain, rivals) in sides.items():
            for rival in rivals:
                findings.add(gain, values[ours] / values[rival] - 1, measure=measure, rival=rival)
    return findings
