"""CompilerKV, section 5: budgets (figure 2), competitors (table 1) and ablations (table 2) by what replays lose.

LongBench's scores need models of 7 or 8 billion parameters. What stands in for a score is the share of the response's
attention that falls on what is stored (1 - mass lost), and the recall of the tokens that the response attends to most.
A method that is compared at "the paper's share" gets the part of each prompt that 512 entries are of LongBench's mean
prompt.

By equation 16 the gate may leave entries of the budget empty. The paper compares at equal nominal budgets and says that
under tight ones the budget always decides (appendix B.1); with tables learnt for a small model it does not. So rivals
are met twice: by the gated sets, and by sets filled up to the budget, where all store the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pandas as pd
import torch
from tqdm.auto import tqdm

from kvlab.analyses.compilerkv.variants import ABLATIONS, Inspected, NoHeadTable, RawAttention, ladder
from kvlab.analyses.findings import Findings
from kvlab.core import ranking
from kvlab.core.store import EMPTY
from kvlab.errors import KvlabError
from kvlab.instruments import measures
from kvlab.methods import Policy, policy
from kvlab.replays.run import Replay
from kvlab.traces.trace import Trace

BUDGETS = (64, 128, 256, 512, 1024)
RIVALS = ("dynamickv", "zigzagkv", "pyramidkv", "snapkv", "h2o", "streamingllm")
MEASURES = ("kept", "recall")
LABELS = {
    "compilerkv": "CompilerKV",
    "filled": "CompilerKV, filled up",
    "dynamickv": "DynamicKV",
    "zigzagkv": "ZigZagKV",
    "pyramidkv": "PyramidKV",
    "snapkv": "SnapKV",
    "h2o": "H2O",
    "streamingllm": "StreamingLLM",
    "full": "FullKV",
}


def paper_share(lengths: pd.DataFrame, entries: int = 512) -> float:
    """What part `entries` are of LongBench's mean prompt; `lengths` has one row for each task, with its `length`.

    LongBench counts words, of which a prompt has fewer than tokens, so that the paper's own share is somewhat smaller.
    """
    return entries / float(lengths["length"].mean())


def methods(budget: int | float, tables: str | None) -> dict[str, Policy]:
    """CompilerKV as equation 16 has it, filled up to the budget as in the published runs, and table 1's six others.

    Args:
        budget: entries for each layer and KV head, or a share of the prompt.
        tables: as CompilerKV takes them; with None nothing is turned away, and there is nothing to fill up.
    """
    ours = {"compilerkv": policy("compilerkv", budget=budget, tables=tables)}
    if tables is not None:
        ours["filled"] = ours["compilerkv"].replace(pad="budget")
    return ours | {name: policy(name, budget=budget) for name in RIVALS}


def ablations(budget: int | float, tables: str | None) -> dict[str, Policy]:
    """Table 2's rows, and CompilerKV without any gate, which the paper does not print; without tables, those rows alone
    that need none.
    """
    whole = policy("compilerkv", budget=budget, tables=tables)
    if tables is None:
        return {"full": whole, "raw_attention": RawAttention(budget=budget)}
    parts = {name: cls(budget=budget, tables=tables) for name, cls in ABLATIONS.items()}
    return {"full": whole} | parts | {"no_gate": whole.replace(pad="budget")}


def sweep(traces: Sequence[Trace], settings: Sequence[tuple[str, Policy]]) -> pd.DataFrame:
    """Replays of every setting on every trace.

    Args:
        settings: (name, policy); a name may stand for one method at several budgets.

    Returns:
        Tidy, one row for each query head: document, method, budget, entries (what the budget comes to), layer, head,
        kept (share of the response's attention), recall (of the head's group), error (of the attention output), stored
        (entries of the prompt that the head's KV head stores).
    """
    frames = []
    jobs = [(trace, name, one) for trace in traces for name, one in settings]
    for trace, name, one in tqdm(jobs, desc="budgets", unit="replay", disable=len(jobs) < 20, leave=False):
        frames.append(_by_head(trace, one).assign(document=trace.document, method=name, budget=one.budget))
    return pd.concat(frames, ignore_index=True)


def _by_head(trace: Trace, one: Policy) -> pd.DataFrame:
    """A replay's rows of `sweep`, kept with the trace: tables 1 and 2 share some of their settings."""
    known = trace.__dict__.setdefault("_by_head", {})
    # As numbers, one entry and the whole prompt are equal budgets.
    key = one, str(one.budget)
    if key not in known:
        found = replayed(trace, one)
        group = trace.heads // trace.kv_heads
        stored = torch.stack([(found.kept(layer) != EMPTY).sum(-1) for layer in range(trace.n_layers)])
        of_heads = {
            "kept": 1 - found.mass_lost.mean(-1),
            "recall": found.recall.repeat_interleave(group, 1),
            "error": found.output_error.mean(-1),
            "stored": stored.repeat_interleave(group, 1),
        }
        places = pd.MultiIndex.from_product([range(trace.n_layers), range(trace.heads)], names=["layer", "head"])
        frame = pd.DataFrame({key: value.flatten().double().numpy() for key, value in of_heads.items()}, index=places)
        known[key] = frame.reset_index().assign(entries=found.budget)
    return known[key]


def replayed(trace: Trace, one: Policy) -> Replay:
    """A replay in which neutral tables are meant, so that nothing warns of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="compilerkv runs with neutral tables")
        return Replay(trace, one)


def by_document(table: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Means over layers and heads: one row for each document, one column for each (method, budget)."""
    return table.pivot_table(index="document", columns=["method", "budget"], values=measure)


def figure_2(
    traces: Sequence[Trace],
    budgets: Sequence[int] = BUDGETS,
    tables: str | None = None,
    steep: tuple[int, int] = (256, 64),
) -> Findings:
    """Figure 2: what every method keeps from the smallest budget to the largest.

    Args:
        steep: budgets between which the paper sees eviction drop (section 5.3).

    Raises:
        KvlabError: these two are not among the budgets.

    Returns:
        The table of `sweep`; metrics `kept/compilerkv/512`, `recall/...`, `stored/...` (mean entries of the prompt);
        `lead/RIVAL/512`, the attention that CompilerKV keeps less what the rival does; `drop/METHOD`, what is lost
        between the two budgets of `steep`, and `flatter/RIVAL`, how much larger that is than CompilerKV's; with tables
        `lead_filled/...` and `flatter_filled/...`, the same of sets filled up to the budget, and `clamped/512`, the
        share of prompts and layers whose candidates fill the budget.
    """
    if not set(steep) <= set(budgets):
        raise KvlabError(f"the drop from {steep[0]} to {steep[1]} entries needs both among the budgets {list(budgets)}")
    settings = [pair for budget in budgets for pair in methods(budget, tables).items()]
    findings = Findings(sweep(traces, settings))
    for measure in (*MEASURES, "stored"):
        for (name, budget), values in by_document(findings.table, measure).items():
            findings.add(f"{measure}/{name}/{budget}", values)
    kept = by_document(findings.table, "kept")
    drops = {name: kept[name, steep[0]] - kept[name, steep[1]] for name in kept.columns.unique("method")}
    ours = {"": "compilerkv"} | ({"_filled": "filled"} if "filled" in drops else {})
    for name, drop in drops.items():
        findings.add(f"drop/{name}", drop)
        for ending, one in ours.items() if name in RIVALS else ():
            findings.add_difference(f"flatter{ending}/{name}", drop, drops[one])
            for budget in budgets:
                findings.add_difference(f"lead{ending}/{name}/{budget}", kept[one, budget], kept[name, budget])
    if tables is None:
        return findings
    gated = findings.table.query("method == 'compilerkv'")
    for budget, part in gated.assign(full=gated["stored"] >= gated["entries"]).groupby("budget"):
        findings.add(f"clamped/{budget}", part.groupby("document")["full"].mean())
    return findings


def curves(findings: Findings, measure: str) -> pd.DataFrame:
    """Metrics of `figure_2` as points to draw: method, budget, value, low, high."""
    rows = []
    for name, value in findings.metrics.items():
        kind, *rest = name.split("/")
        if kind == measure:
            low, high = findings.intervals[name]
            rows.append({"method": rest[0], "budget": int(rest[1]), "value": value, "low": low, "high": high})
    return pd.DataFrame(rows)


def table_1(traces: Sequence[Trace], tables: str | None, share: float) -> Findings:
    """Table 1's comparison at the paper's share of each prompt, document by document.

    Returns:
        The table of `sweep`; metrics `retained/METHOD` (attention kept), `lost/METHOD` (the rest), `recalled/METHOD`;
        `gain/kept/RIVAL` and `gain/recall/RIVAL`, CompilerKV's measure over the rival's, less 1; with tables also
        `gain_filled/...`, where CompilerKV is filled up to the budget.
    """
    findings = Findings(sweep(traces, list(methods(share, tables).items())))
    for measure, label in zip(MEASURES, ("retained", "recalled"), strict=True):
        found = by_document(findings.table, measure).droplevel("budget", axis=1)
        for name in found:
            findings.add(f"{label}/{name}", found[name])
            if measure == "kept":
                findings.add(f"lost/{name}", 1 - found[name])
        for rival in RIVALS:
            findings.add(f"gain/{measure}/{rival}", found["compilerkv"] / found[rival] - 1)
            if "filled" in found:
                findings.add(f"gain_filled/{measure}/{rival}", found["filled"] / found[rival] - 1)
    return findings


def table_2(traces: Sequence[Trace], tables: str | None, share: float) -> Findings:
    """Table 2: what is lost when one part of CompilerKV is taken away, as a share of what the whole keeps.

    The gate can only leave entries out, so whoever removes it cannot keep less attention; `equal_storage` therefore
    compares with the same method without a gate whose budget is the mean of what the gated one stored. Without tables
    only `raw_attention` has something to take away.

    Returns:
        The table of `sweep`; metrics `ablation/kept/PART`, `ablation/recall/PART` (1 - without / with, positive where
        the part helps), `ablation/stored/PART` and `ablation/stored/full` (entries); `equal_storage/kept` and
        `equal_storage/recall` (gated less ungated).
    """
    variants = ablations(share, tables)
    findings = Findings(sweep(traces, list(variants.items())))
    if tables is not None:
        whole = findings.table[findings.table["method"] == "full"]
        ungated = variants["no_gate"].replace(budget=max(1, round(float(whole["stored"].mean()))))
        findings.table = pd.concat([findings.table, sweep(traces, [("equal_storage", ungated)])], ignore_index=True)
    for measure in MEASURES:
        found = by_document(findings.table, measure).droplevel("budget", axis=1)
        for name in variants.keys() - {"full"}:
            findings.add(f"ablation/{measure}/{name}", 1 - found[name] / found["full"])
        if tables is not None:
            findings.add_difference(f"equal_storage/{measure}", found["full"], found["equal_storage"])
    stored = by_document(findings.table, "stored").droplevel("budget", axis=1)
    for name in stored:
        findings.add(f"ablation/stored/{name}", stored[name])
    return findings


def steps_to_snapkv(traces: Sequence[Trace], shares: Sequence[float]) -> Findings:
    """Where one set for each layer loses to a set for each KV head: the way from CompilerKV to SnapKV, step by step.

    All steps store the same entries; there are no tables.

    Args:
        shares: budgets as parts of the prompt.

    Returns:
        The table of `sweep`, its methods the steps in order. Metrics, for a share of 7 %: `steps/0/7` .. `steps/6/7`
        (attention lost); what value norms (eq. 7) and the mean over layers (eq. 6) spare, `norms_spare/7` and
        `model_mean_spares/7`; `one_set_costs/7`, CompilerKV's loss less that of a set for each KV head, and
        `against_snapkv/7`, less SnapKV's; `heads_worse/7`, the share of heads that lose more than with SnapKV.
    """
    settings = [pair for share in shares for pair in ladder(share).items()]
    findings = Findings(sweep(traces, settings))
    lost = 1 - by_document(findings.table, "kept")
    for share in shares:
        at = percent(share)
        steps = [lost[name, share] for name in ladder(share)]
        for number, values in enumerate(steps):
            findings.add(f"steps/{number}/{at}", values)
        findings.add_difference(f"norms_spare/{at}", steps[0], steps[1])
        findings.add_difference(f"model_mean_spares/{at}", steps[2], steps[0])
        findings.add_difference(f"one_set_costs/{at}", steps[1], steps[4])
        findings.add_difference(f"against_snapkv/{at}", steps[1], steps[6])
        findings.metrics[f"heads_worse/{at}"] = float((against_snapkv(findings, share) > 0).to_numpy().mean())
    return findings


def percent(share: float) -> int:
    """A share in whole percent, as metrics are named."""
    return round(100 * share)


def against_snapkv(findings: Findings, share: float) -> pd.DataFrame:
    """Attention that neutral CompilerKV loses less what SnapKV does, averaged over documents: a row for each layer, a
    column for each query head.
    """
    _, ours, *_, theirs = ladder(share)
    table = findings.table[findings.table["budget"] == share]
    lost = 1 - table.pivot_table(index="layer", columns=["method", "head"], values="kept")
    return lost[ours] - lost[theirs]


def protected(traces: Sequence[Trace], tables: str | None, share: float, strongest: int = 16) -> Findings:
    """Section 4.3's veto: are the tokens kept that a layer's most reliable head attends to most?

    Of each layer's head with the largest weight (all of equal ones), the `strongest` prompt tokens by its own attention
    over the utility window. Sets are filled up to the budget, so that learnt and equal weights store as much.

    Returns:
        Table with columns document, method, layer, protected (share of those tokens that are kept); metrics
        `veto/compilerkv`, `veto/equal_weights` and `veto/difference`.
    """
    ours = Inspected(budget=share, tables=tables, pad="budget")
    rows = []
    for trace in traces:
        weights = ours.weights(trace.prompt)
        reliable = (weights == weights.amax(-1, keepdim=True)).cpu()
        best = ranking.top_positions(trace.prompt.window_sums(ours.utility_window), strongest).cpu()
        equal = NoHeadTable(budget=share, tables=tables, pad="budget")
        for name, one in {"compilerkv": ours, "equal_weights": equal}.items():
            found = replayed(trace, one)
            for layer in range(trace.n_layers):
                sets = found.kept(layer).repeat_interleave(trace.heads // trace.kv_heads, 0)
                here = measures.recall(sets, best[layer])[reliable[layer]]
                about = {"document": trace.document, "method": name, "layer": layer}
                rows.append(about | {"protected": float(here.mean())})
    findings = Findings(pd.DataFrame(rows))
    found = findings.table.pivot_table(index="document", columns="method", values="protected")
    for name in found:
        findings.add(f"veto/{name}", found[name])
    findings.add_difference("veto/difference", found["compilerkv"], found["equal_weights"])
    return findings


def admitted(traces: Sequence[Trace], tables: str | None, share: float) -> pd.DataFrame:
    """Appendix B.1: what thresholds can do, given how scores relative to the largest are spread.

    Returns:
        One row for each document and layer: document, layer, needed (the threshold that lets exactly the budget pass),
        threshold (the table's), at_tenth and at_half (tokens that thresholds of 0.1 and 0.5 let pass).
    """
    one, frames = Inspected(budget=share, tables=tables), []
    for trace in traces:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="compilerkv runs with neutral tables")
            planned = one.planned(trace.prompt)
        scores = one.utilities(planned)
        relative = scores / scores.amax(-1, keepdim=True)
        frames.append(
            pd.DataFrame(
                {
                    "document": trace.document,
                    "layer": range(trace.n_layers),
                    "needed": relative.topk(one.entries(trace.prompt_length), -1).values[:, -1].tolist(),
                    "threshold": one.thresholds(planned).tolist(),
                    "at_tenth": (relative >= 0.1).sum(-1).tolist(),
                    "at_half": (relative >= 0.5).sum(-1).tolist(),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)
