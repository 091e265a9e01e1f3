"""CompilerKV, section 4 and appendix B: do learnt tables beat others on texts that they were not learnt from?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvlab.analyses.compilerkv.quality import require_unseen
from kvlab.analyses.compilerkv.tables import visits
from kvlab.analyses.compilerkv.variants import static_thresholds, with_numbers
from kvlab.analyses.findings import Findings
from kvlab.analyses.texts import DOCUMENTS, without_span
from kvlab.compile import Settings
from kvlab.compile.contexts import Context
from kvlab.compile.trials import Prefilled, neutral, prefilled
from kvlab.core import attention, hooks
from kvlab.core.adapter import StoreCache, copy_layer
from kvlab.core.store import LayerStore
from kvlab.inputs import corpus
from kvlab.lib import progress_bars
from kvlab.methods._base.lookup import DecisionTables

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.methods.compilerkv import CompilerKV

MEAN = "{measure}/{variant}"
GAIN = "gain/{measure}/{comparison}"

PAIRS = {
    "over_neutral": ("learnt", "neutral"),
    "heads_over_neutral": ("heads", "neutral"),
    "heads_over_shuffled": ("heads", "shuffled heads"),
    "learnt_over_static": ("learnt", "static"),
    "learnt_over_shuffled_risk": ("learnt", "shuffled risk"),
    "equal/over_neutral": ("learnt", "equal neutral"),
    "equal/gate": ("learnt", "ungated learnt"),
}
"""The two kinds of tables in each comparison; the one that should be better comes first."""

GATES = {"equal/learnt_over_static": "static", "equal/learnt_over_shuffled_risk": "shuffled risk"}
"""The gate that the learnt one is compared with; of each gate its own ungated twin is subtracted."""

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


def variants(tables: DecisionTables, shuffles: int = 3, seed: int = 0) -> dict[str, DecisionTables]:
    """The learnt tables, parts of them, and the same numbers in other places.

    `neutral`: neither table; `learnt`: both; `heads`: the weights alone; `static`: the learnt weights, and in each
    layer the median threshold of the contexts that it was learnt from, for all prompts; `shuffled heads N`: the weights
    alone, each KV head's at another's place; `shuffled risk N`: both, and in each layer the visited cells' thresholds
    at each other's places.
    """
    heads, risk, seen = np.array(tables.heads), np.array(tables.risk), visits(tables) > 0
    static = static_thresholds(tables).numpy()
    made = {
        "neutral": with_numbers(tables, None, None),
        "learnt": tables,
        "heads": with_numbers(tables, heads, None),
        "static": with_numbers(tables, heads, np.broadcast_to(static[:, None, None], risk.shape)),
    }
    rng = np.random.default_rng(seed)
    # The heads of a group act as one and carry one weight; whole groups change places.
    group = heads.shape[1] // (tables.model_extra or {})["kv_heads"]
    for number in range(shuffles):
        parts = rng.permutation(heads.reshape(-1, group)).reshape(heads.shape)
        made[f"shuffled heads {number + 1}"] = with_numbers(tables, parts, None)
    for number in range(shuffles):
        moved = risk.copy()
        moved[:, seen] = rng.permuted(risk[:, seen], axis=1)
        made[f"shuffled risk {number + 1}"] = with_numbers(tables, heads, moved)
    return made


def windows(lm: LM, documents: Sequence[str], tokens: int, continuation: int, per_document: int) -> list[Context]:
    """Windows of held-out texts with what follows each, evenly over each document and none overlapping another."""
    contexts = []
    for document in corpus.documents(documents):
        name, ids = document.name, lm.encode(document.text, chat=False)[0].cpu()
        size = tokens + continuation + 1
        room = len(ids) - size * per_document
        if room < 0:
            document.window(lm, size * per_document)  # says that it is too short
        starts = [number * size + room * number // max(per_document - 1, 1) for number in range(per_document)]
        contexts += [
            Context(f"{name}[{s}:{s + tokens}]", ids[s : s + tokens], ids[s + tokens : s + size]) for s in starts
        ]
    return contexts


def held_out(
    lm: LM,
    tables: Mapping[str, DecisionTables],
    budget: int,
    documents: Sequence[str] = DOCUMENTS,
    tokens: int = 700,
    continuation: int = 64,
    per_document: int = 2,
) -> Findings:
    """Do learnt tables beat others on texts that they were not learnt from?

    Each window is prefilled once; then its continuation is fed (teacher forcing) with the cache of each variant. A gate
    can only leave entries out, so tables with thresholds store fewer entries than the budget. Each of them is therefore
    compared with its own weights without thresholds (`ungated VARIANT`), at one budget for all windows and layers: the
    mean of what it stored itself. `equal neutral` has neither table, at what `learnt` stored. For these means, the
    caches of all windows are held at once.

    Returns:
        Table: window, document, variant, nll_change (nats, against the full cache), mass_lost (share of the
        continuation's attention that falls on evicted tokens, mean over layers, heads and tokens), entries (stored for
        each layer and head). Metrics `nll_change/VARIANT`, `mass_lost/VARIANT`, `entries/VARIANT`; paired differences,
        positive where the learnt tables are better: `gain/MEASURE/over_neutral` (learnt, over neutral),
        `.../heads_over_neutral`, `.../heads_over_shuffled`, `.../learnt_over_shuffled_risk`, `.../learnt_over_static`,
        for the measures nll and mass; and at equal storage `.../equal/over_neutral`, `.../equal/gate` (learnt, over the
        same weights without thresholds), `.../equal/learnt_over_static` and `.../equal/learnt_over_shuffled_risk` (the
        learnt gate's gain over its ungated twin, less the other gate's over its own). Shuffles are averaged within a
        window; intervals are over windows.

    Raises:
        KvlabError: a document that one of the tables was learnt from.
    """
    require_unseen(tables.values(), corpus.named(documents))
    settings = Settings(budget=budget, lengths=(tokens,), continuation=continuation)
    contexts = windows(lm, documents, tokens, continuation, per_document)
    rows = []
    with ExitStack() as opened:
        prefills = [
            opened.enter_context(prefilled(lm, context, settings))
            for context in progress_bars.each(contexts, "prefill", "window")
        ]
        kept = [
            {name: prefill.kept(neutral(settings).using(variant)) for name, variant in tables.items()}
            for prefill in prefills
        ]
        for name, policy in _at_equal_storage(tables, kept, settings).items():
            for prefill, sets in zip(prefills, kept, strict=True):
                sets[name] = prefill.kept(policy)
        pairs = list(zip(prefills, kept, strict=True))
        for prefill, sets in progress_bars.each(pairs, "held out", "window"):
            rows += _of_window(prefill, sets)
    return _compared(pd.DataFrame(rows))


def _of_window(prefill: Prefilled, sets: Mapping[str, Sequence[Tensor]]) -> list[dict[str, object]]:
    """The rows of `held_out` for one window; `sets` holds the positions that each variant keeps, layer by layer."""
    losses, full = prefill.losses([list(layers) for layers in sets.values()]), prefill.full_loss()
    attended, window = continuation_attention(prefill), prefill.context.name
    rows = []
    for (variant, layers), loss in zip(sets.items(), losses.tolist(), strict=True):
        pairs = zip(attended, layers, strict=True)
        lost = [float(shares.sum() - shares[layer[0, 0]].sum()) for shares, layer in pairs]
        rows.append(
            {
                "window": window,
                "document": without_span(window),
                "variant": variant,
                "nll_change": loss - full,
                "mass_lost": float(np.mean(lost)),
                "entries": _entries(layers),
            }
        )
    return rows


def _entries(layers: Sequence[Tensor]) -> float:
    """Mean number of entries that a selection stores for each layer and head."""
    return float(np.mean([layer.shape[-1] for layer in layers]))


def _at_equal_storage(
    tables: Mapping[str, DecisionTables], kept: Sequence[Mapping[str, Sequence[Tensor]]], settings: Settings
) -> dict[str, CompilerKV]:
    """By kind of variant: the policy without thresholds at the mean storage of the one with thresholds."""
    ungated = {}
    for kind in dict.fromkeys(_kind(name) for name, variant in tables.items() if variant.risk is not None):
        members = [name for name in tables if _kind(name) == kind]
        mean = round(float(np.mean([_entries(sets[name]) for sets in kept for name in members])))
        free = neutral(settings.replace(budget=max(1, mean)))
        heads = tables[members[0]].heads
        ungated[f"ungated {kind}"] = free if heads is None else free.using(DecisionTables(heads=heads, risk=None))
        if kind == "learnt":
            ungated["equal neutral"] = free
    return ungated


def _kind(variant: str) -> str:
    """A variant's name without the number of its shuffle."""
    return re.sub(r" \d+$", "", variant)


def _compared(table: pd.DataFrame) -> Findings:
    findings = Findings(table)
    kinds = table.assign(kind=table["variant"].map(_kind))
    for measure in ("nll_change", "mass_lost", "entries"):
        for kind, values in kinds.pivot_table(index="window", columns="kind", values=measure).items():
            findings.add(MEAN, values, measure=measure, variant=str(kind).replace(" ", "_"))
    for measure, short in (("nll_change", "nll"), ("mass_lost", "mass")):
        values = dict(kinds.pivot_table(index="window", columns="kind", values=measure).items())
        for comparison, (learnt, other) in PAIRS.items():
            if {learnt, other} <= set(values):
                findings.add_difference(GAIN, values[other], values[learnt], measure=short, comparison=comparison)
        for comparison, other in GATES.items():
            if {"ungated learnt", f"ungated {other}"} <= set(values):
                learnt, control = (values[f"ungated {gate}"] - values[gate] for gate in ("learnt", other))
                findings.add_difference(GAIN, learnt, control, measure=short, comparison=comparison)
    return findings


@torch.inference_mode()
def continuation_attention(prefill: Prefilled) -> Tensor:
    """Attention of a continuation to its context under the full cache, averaged over its tokens and each layer's query
    heads: `[layers, tokens]`. Rows sum to less than 1: attention to the continuation itself is left out.
    """
    length, shares = len(prefill.context.ids), {}

    def look(call: hooks.Call) -> Tensor:
        visible = attention.last_visible(call.queries.shape[2], call.keys.shape[2], call.keys.device)
        weights = attention.weights(call.queries, call.keys, call.softmax, visible)
        shares[call.index] = weights[0, :, :, :length].mean((0, 1)).cpu().double()
        return call.attend()

    cache = StoreCache([LayerStore(prompt.keys, prompt.values) for prompt in prefill.prompts], prefill.lm.model)
    for number, layer in prefill.cache.others.items():
        cache.layers[number] = copy_layer(layer)
    with hooks.hooked(prefill.lm.model, look, pre_rope=False):
        ids = prefill.context.continuation[None, :-1].to(prefill.lm.device)
        prefill.lm.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return torch.stack([shares[layer] for layer in range(len(prefill.prompts))])


def by_variant(held_out: Findings) -> pd.DataFrame:
    """Means over windows of what `held_out` measured: a row for each kind of table."""
    kinds = held_out.table.groupby(held_out.table["variant"].map(_kind), sort=False)
    return kinds.agg({"nll_change": "mean", "mass_lost": "mean", "entries": "mean"}).round(4)
