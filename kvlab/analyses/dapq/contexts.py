"""DapQ, figure 2 over context lengths: the same texts cut at 2k, 4k and 8k tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvlab.analyses.dapq import position
from kvlab.analyses.findings import Findings
from kvlab.errors import KvlabError
from kvlab.lib import progress_bars

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

MEASURES = ("spearman", "drop", "gap")

VALUE = "contexts/{measure}/{context}"
LONGEST_DECAYS_MORE = "contexts/longest_decays_more"


class Contexts(Findings):
    """Findings whose table is the curves of figure 2b.

    Attributes:
        cells: a row for each text and context: document, context, spearman, drop, gap.
        ends: the names of the shortest and of the longest context.
    """

    def __init__(self, curves: pd.DataFrame, cells: pd.DataFrame, ends: dict[str, str]):
        super().__init__(curves)
        self.cells, self.ends = cells, ends


def over_lengths(
    lm: LM,
    documents: Sequence[str],
    lengths: Sequence[int],
    trials: int = 100,
    parts: int = 8,
    n: int = 32,
    seed: int = 0,
) -> Contexts:
    """Measure figures 2a and 2b on every document, cut at every length; one prompt is in memory at a time.

    Args:
        lengths: tokens of the prompts, at least two.
        trials: of figure 2a, for each document, length and condition.
        parts, n: as `position.figure_2b` takes them.

    Returns:
        Table with columns document, context, start, offset, similarity. Metrics for each length (`contexts/drop/4k`)
        and for the ends (`shortest` and `longest`), with intervals over documents:
        - `spearman`: the rank correlation of similarity with the offset.
        - `drop`: the similarity at the right position less that at position 0.
        - `gap`: random content at the right position less the true content at random positions.
        `contexts/longest_decays_more` is the drop at the longest length less that at the shortest, paired.

    Raises:
        KvlabError: fewer than two lengths.
    """
    ordered = sorted(set(lengths))
    if len(ordered) < 2:
        raise KvlabError("contexts are compared with each other, so give two context lengths at least")
    curves, cells = [], []
    jobs = [(document, tokens) for document in documents for tokens in ordered]
    for number, (document, tokens) in enumerate(progress_bars.each(jobs, "contexts", "prompt")):
        (trace,) = position.of_length(lm, [document], tokens, n)
        about = {"document": position.plain_name(trace), "context": position.context_name(tokens)}
        curve = position.figure_2b(lm, [trace], parts, n)
        random = position.figure_2a(lm, [trace], trials, n, seed=seed + number)
        (spearman,), (drop,) = (curve.of(effect) for effect in (position.DECAY, position.DROP))
        gap = random.row(position.GAP_RANDOM, rope="post", left="dc_sp", right="sc_dp_m")
        curves.append(curve.table.assign(**about))
        cells.append(about | {"spearman": spearman.value, "drop": drop.value, "gap": gap.value})
    ends = {"shortest": position.context_name(ordered[0]), "longest": position.context_name(ordered[-1])}
    found = Contexts(pd.concat(curves, ignore_index=True), pd.DataFrame(cells), ends)
    for measure in MEASURES:
        wide = found.cells.pivot(index="document", columns="context", values=measure)
        named = {str(context): str(context) for context in wide} | ends
        for name, context in named.items():
            found.add(VALUE, wide[context], measure=measure, context=name)
        if measure == "drop":
            found.add_difference(LONGEST_DECAYS_MORE, *(wide.loc[:, ends[end]] for end in ("longest", "shortest")))
    return found
