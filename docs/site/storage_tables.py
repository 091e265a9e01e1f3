"""Tables of docs/storage.md, from docs/ledger/storages: a storage's losses against other ways to the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

import pandas as pd
from claim_tables import table
from task_tables import NONE

from kvlab.workbench.report import csv_tables, leaderboard, storage_means
from kvlab.workbench.report.ledger_models import Subject

LOSSES = {"output_error": "output error", "kl": "KL"}
KIVI = ("kivi-4", "kivi-2")
INTERVAL = ["value", "low", "high"]
SOURCE = leaderboard.SOURCES[1]

Say = Callable[[pd.DataFrame], str]


def parts(kept: Path, order: Sequence[Subject]) -> dict[str, str]:
    """Name -> the table. A column is a model."""
    every = {
        subject.label: _read(path)
        for subject in order
        if (path := kept / SOURCE.folder / f"{subject.label}.csv").exists()
    }
    wholes = [_where(lines, policy="full", against="")["storage"] for lines in every.values()]
    forms = [form for form in pd.concat(wholes).unique() if form != storage_means.AS_IS]
    rotated = [form for form in forms if form not in KIVI]

    def of_models(head: Sequence[str], say: Say, rows: Iterable[tuple[Sequence[str], Mapping[str, str]]]) -> str:
        """A row is its left cells and the values that all its lines share; `say` writes a cell from these lines."""
        found = [(left, [_where(lines, **common) for lines in every.values()]) for left, common in rows]
        cells = [
            [*left, *(NONE if each.empty else say(each) for each in mine)]
            for left, mine in found
            if any(map(len, mine))
        ]
        return table([*head, *every], cells)

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
    found = pd.DataFrame(csv_tables.read(path, SOURCE.columns, SOURCE.what))
    return found.astype(dict.fromkeys(leaderboard.STORAGE_NUMBERS, float))


def _with_size(lines: pd.DataFrame) -> str:
    """The share of the full cache's bytes, and the loss."""
    stored, value, low, high = lines[["stored", *INTERVAL]].iloc[0]
    return f"{100 * stored:.0f} %: {value:.3f} ({low:.3f} to {high:.3f})"


def _least(lines: pd.DataFrame) -> str:
    """The policy that loses least."""
    best = lines.nsmallest(1, "value")
    return f"`{best['policy'].iloc[0]}` {_difference(best)}"


def _difference(lines: pd.DataFrame) -> str:
    """Bold where the interval leaves out zero."""
    value, low, high = lines[INTERVAL].iloc[0]
    shown = f"{value:+.3f} ({low:+.3f} to {high:+.3f})"
    return f"**{shown}**" if low > 0 or high < 0 else shown
