"""Which evicted entries cost a response, for several policies on the same documents and responses.

`kvlab.attribute` gives the effect of an entry: nats of the response's loss that follow from losing it. Its positive
part is the harm. Harm and entries are counted among the evicted entries of each policy. A share of harm is compared
with the share of evicted entries that it could have come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvlab.analyses.findings import DOCUMENT, Findings
from kvlab.analyses.tasks.contenders import contender
from kvlab.analyses.texts import to_summarise, without_span
from kvlab.analyses.why_it_fails import token_kinds
from kvlab.attribution.attribute import attributions
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.lib import progress_bars
from kvlab.methods._base.lookup import HeadScores

if TYPE_CHECKING:
    from kvlab.attribution.results import Attribution
    from kvlab.inputs.models import LM

HALF = "half/{policy}/b{budget:g}"
"""Share of the evicted entries that carry half of the harm."""
MOST = "most/{policy}/b{budget:g}"
"""Share of the evicted entries that carry 90 % of the harm."""
FOUND = "found/{policy}/b{budget:g}"
"""Share of the costly entries that are among as many evicted entries of largest attention."""
RANK = "rank/{policy}/b{budget:g}"
"""Median place of the costly entries by attention, as a share of the evicted entries; 0 is the most attended."""
COST = "cost/{policy}/b{budget:g}"
"""Loss of the response under the policy less that under the full cache, nats."""
REGAINED = "regained/{order}/{policy}/b{budget:g}"
"""Loss regained by as many entries as are costly, put back by effect or by attention, nats."""
LIFT = "lift/{group}/{part}/{policy}/b{budget:g}"
"""A part's share of the harm over its share of the evicted entries; `all` is the mean of all policies but `random`."""
KEPT = "kept/{policy}/{keeper}/b{budget:g}"
"""Share of the harm in the costly entries of `policy` whose entries `keeper` keeps."""
ALL = "all"
REFERENCE = "random"
"""No method: without the prompt's first tokens it loses what no method loses, and would rule every mean."""

HALF_OF_IT, MOST_OF_IT = 0.5, 0.9
RETRIEVAL = 0.25
"""Share of the heads, best first by DuoAttention's scores, that count as retrieval heads."""
SINKS = 4
DISTANCES = (16, 64, 256, 1024)
"""Last tokens before the end of the prompt in each bin; the first tokens have a bin of their own."""
FIRST = f"first {SINKS}"
GRID = np.geomspace(1e-4, 1, 41)
"""Shares of the evicted entries at which curves are read."""


class Measured(NamedTuple):
    """Tidy tables; each row names document, policy and budget.

    Attributes:
        cases: one row for each: numbers of the whole response and of its costly entries (see `case`).
        curves: entries (a share of the evicted ones), by_effect and by_attention (shares of the harm that the first of
            them carry, in either order).
        parts: group (kind, distance, layer, heads), part, harm and entries (shares).
        keepers: keeper, kept (share of the costly entries' harm that it keeps), chance (share of the evicted entries).
    """

    cases: pd.DataFrame
    curves: pd.DataFrame
    parts: pd.DataFrame
    keepers: pd.DataFrame


@dataclass
class Lost:
    """The evicted entries of one attribution, flat: `[entries]` each.

    Attributes:
        effect: nats.
        attention: of the response with the full cache.
        places: `[entries, 3]`: layer (by its row), KV head, position.
    """

    effect: Tensor
    attention: Tensor
    places: Tensor

    @classmethod
    def of(cls, why: Attribution) -> Lost:
        evicted = why.evicted
        return cls(why.effects[evicted].double(), why.attention[evicted].double(), evicted.nonzero())

    @property
    def harm(self) -> Tensor:
        return self.effect.clamp_min(0)

    def carrying(self, share: float) -> int:
        """The fewest entries that carry this share of the harm."""
        sums = self.harm.sort(descending=True).values.cumsum(0)
        return int((sums < share * sums[-1]).sum()) + 1

    def costly(self) -> Tensor:
        """Places among the evicted entries of the fewest that carry half of the harm, the costliest first."""
        return self.effect.argsort(descending=True, stable=True)[: self.carrying(HALF_OF_IT)]

    def attended(self) -> Tensor:
        """Places among the evicted entries, the most attended first."""
        return self.attention.argsort(descending=True, stable=True)


def measure(
    lm: LM,
    documents: Sequence[str],
    tokens: int,
    new_tokens: int,
    policies: Sequence[str],
    budgets: Sequence[int | float],
    *,
    points: int = 8,
    heads: str | None = None,
    tables: str | None = None,
) -> Measured:
    """Attribute the full cache's response to a request to summarise, under every policy at every budget.

    compilerkv fills up to its budget, as where policies are compared at equal bytes.

    Args:
        documents: names, as `kvlab.document` takes them.
        tokens: length of each prompt.
        new_tokens: length of each response.
        policies: names, as `contender` takes them.
        points: on the line to the full cache, at first.
        heads: DuoAttention's head scores, a name or a file; None leaves out which heads are retrieval heads.
        tables: CompilerKV's tables, a name or a file; None takes neutral ones.

    Raises:
        KvlabError: a policy that cannot be attributed, or one that evicts nothing at a budget.
    """
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in Measured._fields}
    retrieval = None if heads is None else retrieval_heads(HeadScores.load(heads))
    around = token_kinds.around(lm)
    chosen = corpus.documents(documents)
    with progress_bars.counting(len(chosen), "attribute", "document") as bar:
        for document in chosen:
            prompt = to_summarise(lm, document, tokens)
            tested = [contender(name, budget, tables=tables, pad="budget") for budget in budgets for name in policies]
            found = attributions(lm, tested, prompt, new_tokens, points=points, progress=False)
            for number, budget in enumerate(budgets):
                whys = dict(zip(policies, found[number * len(policies) :], strict=False))
                for name, why in whys.items():
                    if not why.evicted.any():
                        raise KvlabError(
                            f"{name} keeps all of {document.name} at a budget of {budget:g}; give a smaller one"
                        )
                keys = {DOCUMENT: without_span(document.name), "budget": budget}
                for table, rows in _rows(whys, around, retrieval).items():
                    made[table] += [keys | row for row in rows]
            bar.update()
    return Measured(**{name: pd.DataFrame(rows) for name, rows in made.items()})


def retrieval_heads(scores: HeadScores) -> Tensor:
    """Which KV heads are the best quarter by DuoAttention's scores, bool `[layers, kv_heads]`."""
    ranked = scores.per_kv_head()
    best = ranked.flatten().argsort(descending=True, stable=True)[: max(1, round(RETRIEVAL * ranked.numel()))]
    return torch.zeros(ranked.numel(), dtype=torch.bool).index_fill(0, best, True).view(ranked.shape)


def _rows(
    whys: Mapping[str, Attribution], around: tuple[int, int], retrieval: Tensor | None
) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table of `Measured`, of one document at one budget."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in Measured._fields}
    kept = {name: why.kept for name, why in whys.items()}
    for name, why in whys.items():
        lost, key = Lost.of(why), {"policy": name}
        found["cases"].append(key | case(why, lost))
        found["curves"] += [key | row for row in curve(lost)]
        found["parts"] += [key | row for row in parts(why, lost, around, retrieval)]
        found["keepers"] += [key | row for row in keepers(lost, kept)]
    return found


def case(why: Attribution, lost: Lost) -> dict[str, float]:
    """Return the numbers of one policy on one document.

    They are those of `Attribution.summary` and:
    - half and most: entries that carry 50 and 90 % of the harm.
    - found: the share of the costly entries that attention finds.
    - rank: the median place of the costly entries by attention.
    - attended: their share of the evicted entries' attention.
    - regained_effect and regained_attention: nats, measured with so many entries put back.
    """
    costly, attended = lost.costly(), lost.attended()
    number, evicted = len(costly), len(lost.effect)
    place = torch.empty_like(attended)
    place[attended] = torch.arange(evicted)
    back = why.restore((number,), ("effect", "attention"))
    regained = dict(zip(back["order"], back["regained"], strict=True))
    return why.summary | {
        "half": number,
        "most": lost.carrying(MOST_OF_IT),
        "found": float((place[costly] < number).double().mean()),
        "rank": float(place[costly].double().median()) / evicted,
        "attended": float(lost.attention[costly].sum() / lost.attention.sum()),
        "regained_effect": regained["effect"],
        "regained_attention": regained["attention"],
    }


def curve(lost: Lost) -> Iterator[dict[str, float]]:
    """Shares of the harm that the first entries carry, by effect and by attention."""
    harm = lost.harm
    sums = [order.cumsum(0) / harm.sum() for order in (harm.sort(descending=True).values, harm[lost.attended()])]
    for share in GRID:
        number = round(share * len(harm))
        by_effect, by_attention = (float(each[number - 1]) if number else 0.0 for each in sums)
        yield {"entries": share, "by_effect": by_effect, "by_attention": by_attention}


def parts(
    why: Attribution, lost: Lost, around: tuple[int, int], retrieval: Tensor | None
) -> Iterator[dict[str, str | float]]:
    """Shares of the harm and of the evicted entries, by kind of token, distance, layer and kind of head."""
    rows, heads, positions = lost.places.T
    prompt, length = len(why.prompt), why.effects.shape[-1]
    of_prompt = token_kinds.kinds(why.tokens[:prompt], around)
    groups = {
        "kind": (pd.Series(of_prompt + [token_kinds.RESPONSE] * (length - prompt)), positions),
        "distance": (pd.Series([distance(place, prompt) for place in range(length)]), positions),
        "layer": (pd.Series([str(layer) for layer in why.lm.layout.compressed]), rows),
    }
    if retrieval is not None:
        named = np.where(retrieval.flatten().numpy(), "retrieval", "other")
        groups["heads"] = (pd.Series(named), rows * retrieval.shape[1] + heads)
    harm = lost.harm / lost.harm.sum()
    for group, (labels, places) in groups.items():
        of_entry = labels.to_numpy()[places.numpy()]
        for part in np.unique(of_entry).tolist():
            mine = of_entry == part
            yield {"group": group, "part": part, "harm": float(harm.numpy()[mine].sum()), "entries": float(mine.mean())}


def distance(position: int, prompt: int) -> str:
    """The bin of a position by its distance from the prompt's end: "last 16", "17 to 64", and so on."""
    if position >= prompt:
        return token_kinds.RESPONSE
    if position < SINKS:
        return FIRST
    return bins()[int(np.searchsorted(DISTANCES, prompt - position))]


def bins() -> list[str]:
    """Names of the bins of distance, the nearest to the prompt's end first, without the first tokens."""
    between = [f"{low + 1} to {high}" for low, high in zip(DISTANCES, DISTANCES[1:], strict=False)]
    return [f"last {DISTANCES[0]}", *between, f"over {DISTANCES[-1]}"]


def keepers(lost: Lost, kept: Mapping[str, Tensor]) -> Iterator[dict[str, str | float]]:
    """How much of the costly entries' harm each policy keeps, and how many of all evicted entries."""
    costly = lost.costly()
    weights = lost.effect[costly] / lost.effect[costly].sum()
    rows, heads, positions = lost.places.T
    for keeper, of_keeper in kept.items():
        read = of_keeper[rows, heads, positions].double()
        yield {"keeper": keeper, "kept": float((weights * read[costly]).sum()), "chance": float(read.mean())}


# ---------------------------------------------------------------------------------------------------- findings


def lifts(parts: pd.DataFrame) -> pd.DataFrame:
    """`parts` with a column lift, and with the mean over the policies but the reference as policy "all"."""
    each = parts.assign(lift=parts["harm"] / parts["entries"])
    keys, numbers = [DOCUMENT, "budget", "group", "part"], ["harm", "entries", "lift"]
    means = (
        each[each["policy"] != REFERENCE].groupby(keys, sort=False).agg(dict.fromkeys(numbers, "mean")).reset_index()
    )
    means["policy"] = ALL
    return pd.concat([each, means], ignore_index=True)


def findings(measured: Measured) -> Findings:
    """Metrics of every policy at every budget, with intervals over documents; layers are in the tables alone."""
    cases = measured.cases
    found = Findings(cases)
    for keys, part in _by(cases, "policy", "budget"):
        found.add(HALF, part["half"] / part["evicted"], **keys)
        found.add(MOST, part["most"] / part["evicted"], **keys)
        found.add(FOUND, part["found"], **keys)
        found.add(RANK, part["rank"], **keys)
        found.add(COST, part["difference"], **keys)
        for order in ("effect", "attention"):
            found.add(REGAINED, part[f"regained_{order}"], order=order, **keys)
    for keys, part in _by(lifts(measured.parts), "group", "part", "policy", "budget"):
        if keys["group"] != "layer":
            found.add(LIFT, part["lift"], **keys)
    for keys, part in _by(measured.keepers, "policy", "keeper", "budget"):
        found.add(KEPT, part["kept"], **keys)
    return found


def _by(table: pd.DataFrame, *columns: str) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """The rows of each combination of these columns, by document."""
    groups: Any = table.set_index(DOCUMENT).groupby(list(columns), sort=False)
    for values, part in groups:
        yield dict(zip(columns, values, strict=True)), part


def in_words(found: Findings) -> str:
    """The extent of what was measured, and how much of the loss the effects leave unexplained at most, as text."""
    cases = found.table
    policies, budgets, documents = (cases[name].nunique() for name in ("policy", "budget", DOCUMENT))
    rest = (cases["unexplained"] / cases["difference"]).abs()
    return (
        f"{policies} policies, {budgets} budgets, {documents} documents; unexplained of the loss: "
        f"{rest.median():.1%} in the median"
    )
