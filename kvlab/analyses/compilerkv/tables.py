"""CompilerKV, sections 3.2, 4.3, 4.4 and appendix B: tables learnt for real, what is in them, and what they change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from tqdm.auto import tqdm
from transformers.cache_utils import DynamicCache

from kvlab.analyses.compilerkv.variants import static_thresholds
from kvlab.analyses.findings import Findings
from kvlab.analyses.texts import DOCUMENTS
from kvlab.compile import Settings, learning
from kvlab.compile.contexts import Context
from kvlab.compile.log import Samples
from kvlab.compile.trials import Prefilled, neutral, prefilled
from kvlab.core import attention, hooks
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.methods.lookup import DecisionTables

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.methods.compilerkv import CompilerKV

MIDDLE = (12 / 31, 20 / 31)
"""Relative depths of the layers that appendix B.3 calls middle: L12 to L20 of 32."""


# ---------------------------------------------------------------------------------------------------- what is in them


def relative_weights(tables: DecisionTables) -> pd.DataFrame:
    """The head table, each weight over the largest of its layer: layers down, query heads across.

    A layer's tokens are ranked among themselves, so that a factor on all of its heads changes nothing (eq. 10, 16).
    """
    weights = np.array(tables.heads)
    return pd.DataFrame(weights / weights.max(1, keepdims=True)).rename_axis(index="layer", columns="head")


def mean_thresholds(tables: DecisionTables) -> pd.DataFrame:
    """The risk table averaged over layers: entropy bins down, perplexity bins across, by the middle of each bin.

    NaN where no context fell while the table was learnt.
    """
    grid = np.where(np.array(tables.visited) > 0, np.mean(tables.risk, 0), np.nan)
    rows, columns = (_middles(*ends, n) for ends, n in zip(_ranges(tables), grid.shape, strict=True))
    across = pd.Index(np.exp(columns).round(1), name="perplexity")
    return pd.DataFrame(grid, pd.Index(rows.round(2), name="entropy"), across)


def _ranges(tables: DecisionTables) -> list[tuple[float, float]]:
    return [tuple(tables.entropy), tuple(np.log(tables.perplexity))]


def _middles(low: float, high: float, n: int) -> np.ndarray:
    return low + (np.arange(n) + 0.5) / n * (high - low)


def structure(tables: DecisionTables) -> Findings:
    """Figures A2 and A3 in numbers.

    Returns:
        Table with a row for each layer: layer, depth, weight (mean relative weight of its heads), entropy_slope (of its
        thresholds over visited entropy bins, per nat, averaged over perplexity bins), high_less_low (its threshold in
        the highest visited perplexity bin less the lowest, averaged over entropy bins). Metrics with intervals over
        layers: `heads/middle_less_rest`, `risk/entropy_slope`, `risk/high_less_low_perplexity`; and
        `heads/changed` (share of heads whose weight is not 1), `risk/visited` (share of cells), `risk/mean_threshold`.
    """
    depth = np.linspace(0, 1, tables.n_layers)
    weight = relative_weights(tables).mean(1).to_numpy()
    middle = (depth >= MIDDLE[0]) & (depth <= MIDDLE[1])
    risk, seen = np.array(tables.risk), np.array(tables.visited) > 0
    entropies = _middles(*tables.entropy, risk.shape[1])
    slopes, steps = _trends(risk, seen, entropies)
    findings = Findings(pd.DataFrame({"layer": range(tables.n_layers), "depth": depth, "weight": weight}))
    if middle.sum() > 1:
        both = stats.bootstrap(
            (weight[middle], weight[~middle]),
            _difference,
            n_resamples=2000,
            method="percentile",
            rng=np.random.default_rng(0),
        )
        findings.metrics["heads/middle_less_rest"] = float(weight[middle].mean() - weight[~middle].mean())
        findings.intervals["heads/middle_less_rest"] = tuple(map(float, both.confidence_interval))
    findings.metrics["heads/changed"] = float((np.array(tables.heads) != 1).mean())
    findings.metrics["risk/visited"] = float(seen.mean())
    findings.metrics["risk/mean_threshold"] = float(risk[:, seen].mean())
    for name, values in (("risk/entropy_slope", slopes), ("risk/high_less_low_perplexity", steps)):
        if values is not None:
            findings.table[name.rpartition("/")[2]] = values
            findings.add(name, values)
    return findings


def _difference(left: np.ndarray, right: np.ndarray, axis: int = -1) -> np.ndarray:
    return left.mean(axis) - right.mean(axis)


def _trends(risk: np.ndarray, seen: np.ndarray, entropies: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Of each layer: slope over entropy, and highest less lowest perplexity; None where fewer than two bins count."""
    columns = [column for column in range(seen.shape[1]) if seen[:, column].sum() > 1]
    slopes = [np.polyfit(entropies[seen[:, c]], risk[:, seen[:, c], c].T, 1)[0] for c in columns]
    rows = [row for row in range(seen.shape[0]) if seen[row].sum() > 1]
    steps = [risk[:, row, seen[row].nonzero()[0][-1]] - risk[:, row, seen[row].nonzero()[0][0]] for row in rows]
    return (np.mean(slopes, 0) if slopes else None), (np.mean(steps, 0) if steps else None)


# ---------------------------------------------------------------------------------------------------- the learning


def alpha_effect(
    samples: Mapping[str, Samples], settings: Settings, alphas: Sequence[float] = (0, 0.01, 0.1, 1, 10, 100)
) -> pd.DataFrame:
    """What the conservative penalty does (eq. 4): table, alpha, spread (mean over states of the largest less the
    smallest Q, in nats), changed (share of states whose best action is another than with alpha = 0), neutral (share of
    states that take the neutral action).
    """
    rows = []
    for phase, found in samples.items():
        evidence = (learning.head_evidence if phase == "heads" else learning.risk_evidence)(found, settings)
        behaviour, rest = np.array(settings.propensities(phase)), settings.at_rest(phase)
        known = evidence.counts.sum(1) > 0
        first = learning.best(learning.solve(evidence, behaviour, 0.0), rest)[known]
        for alpha in alphas:
            q = learning.solve(evidence, behaviour, alpha)
            chosen = learning.best(q, rest)[known]
            spread = np.nanmax(q[known], 1) - np.nanmin(q[known], 1)
            rows.append(
                {
                    "table": phase,
                    "alpha": alpha,
                    "spread": spread.mean(),
                    "changed": (chosen != first).mean(),
                    "neutral": (chosen == rest).mean(),
                }
            )
    return pd.DataFrame(rows)


def reliability(samples: Mapping[str, Samples], settings: Settings, splits: int = 20, seed: int = 0) -> Findings:
    """Do two halves of the contexts teach the same? Correlation of their mean NLL changes, action by action.

    Without the penalty of the budget, which both halves share because it is known.

    Returns:
        Table with a row for each state that both halves visited: table, state, together (product of the two halves'
        deviations from the state's mean, averaged over actions and random splits), alone (mean of their squares).
        Metrics `heads/split_half` and `risk/split_half`, correlations, with intervals over states.
    """
    rng, tables = np.random.default_rng(seed), []
    free = Settings(**settings.model_dump() | {"penalty": 0.0})
    for phase, found in samples.items():
        evidence = learning.head_evidence if phase == "heads" else learning.risk_evidence
        contexts, sums = len(found.names), []
        for _ in range(splits):
            half = np.isin(found.context, rng.permutation(contexts)[: contexts // 2])
            left, right = (evidence(_part(found, chosen), free) for chosen in (half, ~half))
            both = (left.counts > 0).all(1) & (right.counts > 0).all(1)
            x, y = ((one.means - one.means.mean(1, keepdims=True)) for one in (left, right))
            sums.append(np.where(both[:, None], np.stack([(x * y).mean(1), ((x**2 + y**2) / 2).mean(1)], 1), np.nan))
        seen = ~np.isnan(sums).all((0, 2))
        together, alone = np.nanmean(np.array(sums)[:, seen], 0).T
        tables.append(pd.DataFrame({"table": phase, "state": seen.nonzero()[0], "together": together, "alone": alone}))
    findings = Findings(pd.concat(tables, ignore_index=True))
    for phase, part in findings.table.groupby("table", sort=False):
        pair = part["together"].to_numpy(), part["alone"].to_numpy()
        spread = stats.bootstrap(
            pair, _ratio, paired=True, n_resamples=2000, method="percentile", rng=np.random.default_rng(seed)
        )
        findings.metrics[f"{phase}/split_half"] = float(_ratio(*pair))
        findings.intervals[f"{phase}/split_half"] = tuple(map(float, spread.confidence_interval))
    return findings


def _ratio(together: np.ndarray, alone: np.ndarray, axis: int = -1) -> np.ndarray:
    return together.sum(axis) / alone.sum(axis)


def _part(samples: Samples, chosen: np.ndarray) -> Samples:
    retained = samples.retained[chosen] if len(samples.retained) else samples.retained
    return Samples(
        samples.actions[chosen],
        samples.change[chosen],
        samples.context[chosen],
        samples.names,
        samples.entropy,
        samples.perplexity,
        retained,
    )


# ---------------------------------------------------------------------------------------------------- held-out text


def variants(tables: DecisionTables, shuffles: int = 3, seed: int = 0) -> dict[str, DecisionTables]:
    """The learnt tables, parts of them, and the same numbers in other places.

    `neutral`: neither table; `learnt`: both; `heads`: the weights alone; `static`: the learnt weights, and in each
    layer the median threshold of the contexts that it was learnt from, for all prompts; `shuffled heads N`: the weights
    alone, each KV head's at another's place; `shuffled risk N`: both, and in each layer the visited cells' thresholds
    at each other's places.
    """
    heads, risk = np.array(tables.heads), np.array(tables.risk)
    seen = np.array(tables.visited) > 0
    static = static_thresholds(tables).numpy()
    found = {
        "neutral": _with(tables, None, None),
        "learnt": tables,
        "heads": _with(tables, heads, None),
        "static": _with(tables, heads, np.broadcast_to(static[:, None, None], risk.shape)),
    }
    rng = np.random.default_rng(seed)
    # The heads of a group act as one and carry one weight; whole groups change places.
    group = heads.shape[1] // tables.kv_heads
    for number in range(shuffles):
        parts = rng.permutation(heads.reshape(-1, group)).reshape(heads.shape)
        found[f"shuffled heads {number + 1}"] = _with(tables, parts, None)
    for number in range(shuffles):
        moved = risk.copy()
        moved[:, seen] = rng.permuted(risk[:, seen], axis=1)
        found[f"shuffled risk {number + 1}"] = _with(tables, heads, moved)
    return found


def _with(tables: DecisionTables, heads: np.ndarray | None, risk: np.ndarray | None) -> DecisionTables:
    given = {"heads": None if heads is None else heads.tolist(), "risk": None if risk is None else risk.tolist()}
    return DecisionTables(**given, entropy=tables.entropy, perplexity=tables.perplexity)


def windows(lm: LM, documents: Sequence[str], tokens: int, continuation: int, per_document: int) -> list[Context]:
    """Windows of held-out texts with what follows each, evenly over each document and none overlapping another."""
    found = []
    for name in documents:
        ids = lm.encode(corpus.document(name).text, chat=False)[0].cpu()
        size = tokens + continuation + 1
        room = len(ids) - size * per_document
        if room < 0:
            corpus.document(name).window(lm, size * per_document)  # says that it is too short
        starts = [number * size + room * number // max(per_document - 1, 1) for number in range(per_document)]
        found += [Context(f"{name}[{s}:{s + tokens}]", ids[s : s + tokens], ids[s + tokens : s + size]) for s in starts]
    return found


def held_out(
    lm: LM,
    tables: Mapping[str, DecisionTables],
    budget: int,
    documents: Sequence[str] = DOCUMENTS,
    tokens: int = 700,
    continuation: int = 64,
    per_document: int = 2,
) -> Findings:
    """Do learnt tables beat others on text that they were not learnt from?

    Each window is prefilled once; what follows is fed by teacher forcing with each variant's cache. A gate can only
    leave entries out, so that tables with thresholds store fewer than the budget. Each of them therefore meets its own
    weights without thresholds at one budget for all windows and layers, the mean of what it stored itself (`ungated
    VARIANT`); `equal neutral` is neither table at what `learnt` stored. For that mean, the caches of all windows are
    held at once.

    Returns:
        Table: window, document, variant, nll_change (nats, against the full cache), mass_lost (share of the
        continuation's attention that falls on evicted tokens, mean over layers, heads and tokens), entries (stored for
        each layer and head). Metrics `nll_change/VARIANT`, `mass_lost/VARIANT`, `entries/VARIANT`; paired differences,
        positive where the learnt tables are better: `gain/MEASURE/over_neutral` (learnt, over neutral),
        `.../heads_over_neutral`, `.../heads_over_shuffled`, `.../learnt_over_shuffled_risk`, `.../learnt_over_static`,
        for the measures nll and mass; and at equal storage `.../equal/over_neutral`, `.../equal/gate` (learnt, over the
        same weights without thresholds), `.../equal/learnt_over_static` and `.../equal/learnt_over_shuffled_risk` (what
        the learnt gate gains so, less what the other gate gains over its own ungated twin). Shuffles are averaged
        within a window; intervals are over windows.
    """
    learnt_from = {name.rpartition("@")[0] for one in tables.values() for name in getattr(one, "documents", None) or []}
    if seen := learnt_from & set(documents):
        raise KvlabError(f"these tables were learnt from {', '.join(sorted(seen))}: name texts that they have not seen")
    settings = Settings(budget=budget, lengths=(tokens,), continuation=continuation)
    rows, contexts = [], windows(lm, documents, tokens, continuation, per_document)
    with ExitStack() as opened:
        found = [
            opened.enter_context(prefilled(lm, context, settings))
            for context in tqdm(contexts, desc="prefill", unit="window", leave=False)
        ]
        kept = [{name: each.kept(neutral(settings).using(one)) for name, one in tables.items()} for each in found]
        for name, one in _at_equal_storage(tables, kept, settings).items():
            for each, sets in zip(found, kept, strict=True):
                sets[name] = each.kept(one)
        for each, sets in tqdm(list(zip(found, kept, strict=True)), desc="held out", unit="window", leave=False):
            losses, full = each.losses(list(sets.values())), each.full_loss()
            looked, name = continuation_attention(each), each.context.name
            for (variant, layers), loss in zip(sets.items(), losses.tolist(), strict=True):
                pairs = zip(looked, layers, strict=True)
                lost = [float(there.sum() - there[layer[0, 0]].sum()) for there, layer in pairs]
                rows.append(
                    {
                        "window": name,
                        "document": name.partition("[")[0],
                        "variant": variant,
                        "nll_change": loss - full,
                        "mass_lost": float(np.mean(lost)),
                        "entries": _entries(layers),
                    }
                )
    return _compared(pd.DataFrame(rows))


def _entries(layers: Sequence[Tensor]) -> float:
    """Stored for each layer and head, of one selection."""
    return float(np.mean([layer.shape[-1] for layer in layers]))


def _at_equal_storage(
    tables: Mapping[str, DecisionTables], kept: Sequence[Mapping[str, Sequence[Tensor]]], settings: Settings
) -> dict[str, CompilerKV]:
    """The policies without thresholds that store what those with thresholds did, by kind of variant."""
    found = {}
    for kind in dict.fromkeys(_kind(name) for name, one in tables.items() if one.risk is not None):
        members = [name for name in tables if _kind(name) == kind]
        mean = round(np.mean([_entries(sets[name]) for sets in kept for name in members]))
        free = neutral(Settings(**settings.model_dump() | {"budget": max(1, mean)}))
        heads = tables[members[0]].heads
        found[f"ungated {kind}"] = free if heads is None else free.using(DecisionTables(heads=heads, risk=None))
        if kind == "learnt":
            found["equal neutral"] = free
    return found


def _kind(variant: str) -> str:
    """A variant's name without the number of its shuffle."""
    return re.sub(r" \d+$", "", variant)


def _compared(table: pd.DataFrame) -> Findings:
    findings = Findings(table)
    kind = table["variant"].map(_kind)
    pairs = {
        "over_neutral": ("learnt", "neutral"),
        "heads_over_neutral": ("heads", "neutral"),
        "heads_over_shuffled": ("heads", "shuffled heads"),
        "learnt_over_static": ("learnt", "static"),
        "learnt_over_shuffled_risk": ("learnt", "shuffled risk"),
        "equal/over_neutral": ("learnt", "equal neutral"),
        "equal/gate": ("learnt", "ungated learnt"),
    }
    gates = {"equal/learnt_over_static": "static", "equal/learnt_over_shuffled_risk": "shuffled risk"}
    for measure, short in (("nll_change", "nll"), ("mass_lost", "mass"), ("entries", "")):
        by_window = table.groupby(["window", kind])[measure].mean().unstack()
        for variant in by_window:
            findings.add(f"{measure}/{variant.replace(' ', '_')}", by_window[variant])
        for name, (ours, other) in pairs.items() if short else ():
            if {ours, other} <= set(by_window):
                findings.add_difference(f"gain/{short}/{name}", by_window[other], by_window[ours])
        for name, other in gates.items() if short else ():
            if {"ungated learnt", f"ungated {other}"} <= set(by_window):
                ours, theirs = (by_window[f"ungated {gate}"] - by_window[gate] for gate in ("learnt", other))
                findings.add_difference(f"gain/{short}/{name}", ours, theirs)
    return findings


@torch.inference_mode()
def continuation_attention(found: Prefilled) -> Tensor:
    """Where a continuation looks in its context under the full cache, averaged over its tokens and each layer's query
    heads: `[layers, tokens]`; what it pays to itself is missing from a sum of 1.
    """
    length, shares = len(found.context.ids), {}

    def look(call: hooks.Call) -> Tensor:
        visible = attention.last_visible(call.queries.shape[2], call.keys.shape[2], call.keys.device)
        weights = attention.weights(call.queries, call.keys, call.scaling, visible)
        shares[call.layer] = weights[0, :, :, :length].mean((0, 1)).cpu().double()
        return call.attend()

    cache = DynamicCache()
    for layer, prompt in enumerate(found.prompts):
        cache.update(prompt.keys, prompt.values, layer)
    with hooks.hooked(found.lm.model, look, pre_rope=False):
        ids = found.context.continuation[None, :-1].to(found.lm.device)
        found.lm.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return torch.stack([shares[layer] for layer in range(len(found.prompts))])


COMPARED = {
    "over_neutral": "learnt, over neutral",
    "heads_over_neutral": "learnt heads, over neutral",
    "heads_over_shuffled": "learnt heads, over shuffled",
    "learnt_over_static": "thresholds by risk, over static",
    "learnt_over_shuffled_risk": "thresholds by risk, over shuffled",
    "equal/over_neutral": "equal storage: learnt, over neutral",
    "equal/gate": "equal storage: thresholds, over none",
    "equal/learnt_over_static": "equal storage: by risk, over static",
    "equal/learnt_over_shuffled_risk": "equal storage: by risk, over shuffled",
}
"""How the paired differences of `held_out` are named in a figure."""


def by_variant(held: Findings) -> pd.DataFrame:
    """Means over windows of what `held_out` measured: a row for each kind of table."""
    kinds = held.table.groupby(held.table["variant"].map(_kind), sort=False)
    return kinds[["nll_change", "mass_lost", "entries"]].mean().round(4)


def alpha_metrics(effect: pd.DataFrame, log: str) -> dict[str, float]:
    """`alpha_effect` as metrics: `alpha/LOG/neutral/ALPHA`, share of all states left neutral, and
    `alpha/LOG/spread/ALPHA`, both averaged over the two tables.
    """
    means = effect.groupby("alpha")[["neutral", "spread"]].mean()
    values = means.stack()
    return {f"alpha/{log}/{column}/{alpha:g}": float(value) for (alpha, column), value in values.items()}
