"""Tables of docs/storage.md, from docs/ledger/storages: what a storage loses, beside other ways to the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

import pandas as pd
from claim_tables import table

from kvlab.workbench.report import csv_tables, leaderboard, storage_means
from kvlab.workbench.report.ledger_models import Subject

LOSSES = {"output_error": "output error", "kl": "KL"}
KIVI = ("kivi-4", "kivi-2")
NONE = "–"

Say = Callable[[pd.DataFrame], str]


def parts(kept: Path, order: Sequence[Subject]) -> dict[str, str]:
    """Name -> the table. A column is a model."""
    every = {
        subject.label: _read(path) for subject in order if (path := kept / "storages" / f"{subject.label}.csv").exists()
    }
    wholes = [_where(lines, policy="full", against="")["storage"] for lines in every.values()]
    forms = [form for form in pd.concat(wholes).unique() if form != storage_means.AS_IS]
    rotated = [form for form in forms if form not in KIVI]

    def of_models(head: Sequence[str], say: Say, rows: Iterable[tuple[Sequence[str], Mapping[str, str]]]) -> str:
        """A row is what stands at its left, and what its lines have in common; `say` writes a cell of them."""
        cells = [(*left, *(say(_where(lines, **common)) for lines in every.values())) for left, common in rows]
        return table([*head, *every], [row for row in cells if set(row[len(head) :]) != {NONE}])

    wholly = {
        f"storage_{loss}": of_models(
            ["storage"],
            _with_size,
            (([f"`{form}`"], {"policy": "full", "storage": form, "against": "", "measure": loss}) for form in forms),
        )
        for loss in LOSSES
    }
    evicting = (
        ([f"`{form}`", LOSSES[loss]], {"storage": storage_means.AS_IS, "against": form, "measure": loss})
        for form, loss in product(forms, LOSSES)
    )
    instead = (
        (
            [f"`{form}`", f"`{kivi}`", LOSSES[loss]],
            {"policy": "full", "storage": form, "against": kivi, "measure": loss},
        )
        for kivi, form, loss in product(KIVI, rotated, LOSSES)
    )
    return wholly | {
        "storage_evicting": of_models(["bytes of the full cache in", "loss"], _least, evicting),
        "storage_rotated": of_models(["storage", "instead of", "loss"], _difference, instead),
    }


def _where(lines: pd.DataFrame, **common: str) -> pd.DataFrame:
    return lines[(lines[list(common)] == list(common.values())).all(axis=1)]


def _read(path: Path) -> pd.DataFrame:
    lines = csv_tables.read(path, leaderboard.STORAGE_COLUMNS, "table of storages")
    found = pd.DataFrame(lines)
    numbers = leaderboard.STORAGE_NUMBERS
    return found.assign(**{name: found[name].astype(float) for name in numbers})


def _with_size(lines: pd.DataFrame) -> str:
    """The share of the full cache's bytes, and the loss."""
    if lines.empty:
        return NONE
    value, low, high = (lines[name].iloc[0] for name in ("value", "low", "high"))
    return f"{100 * lines['stored'].iloc[0]:.0f} %: {value:.3f} ({low:.3f} to {high:.3f})"


def _least(lines: pd.DataFrame) -> str:
    """The policy that loses least."""
    if lines.empty:
        return NONE
    best = lines.nsmallest(1, "value")
    return f"`{best['policy'].iloc[0]}` {_difference(best)}"


def _difference(lines: pd.DataFrame) -> str:
    """Bold where the interval leaves out zero."""
    if lines.empty:
        return NONE
    value, low, high = (lines[name].iloc[0] for name in ("value", "low", "high"))
    shown = f"{value:+.3f} ({low:+.3f} to {high:+.3f})"
    return f"**{shown}**" if low > 0 or high < 0 else shown
