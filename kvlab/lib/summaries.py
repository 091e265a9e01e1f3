"""Summaries of replays and of live runs: tables that print so that 80 columns show what a reader needs first."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pandas as pd

SHARE, BYTES = "{:.3f}".format, "{:.0f}".format
FORMATS: dict[str, Callable[[float], str]] = {
    "budget": "{:g}".format,  # entries, or a share of the prompt
    "entries": "{:.4g}".format,
    "recall": SHARE,
    "window_recall": SHARE,
    "step_recall": SHARE,
    "mass_lost": SHARE,
    "output_error": SHARE,
    "mass_gap_closed": SHARE,
    "error_gap_closed": SHARE,
    "stored_bytes": BYTES,
    "read_bytes": BYTES,
    "sink_share": SHARE,
    "agreement": SHARE,
    "kl": SHARE,
    "nll": SHARE,
    "nll_full": SHARE,
    "perplexity_ratio": SHARE,
    "nll_gap_closed": SHARE,
    "kl_gap_closed": SHARE,
}


class Means(dict):
    """Means by measure, which print one to a line."""

    def __repr__(self) -> str:
        return "\n".join(f"{name:<16} {FORMATS.get(name, str)(value):>12}" for name, value in self.items())


class Summary(pd.DataFrame):
    """A pandas table that prints as many of its first columns as fit into the terminal, and names the others below.

    pandas itself would leave out the middle columns, and let a signature push the numbers aside. A table of several
    documents prints the document first where it would not fit.
    """

    @property
    def _constructor(self) -> type[Summary]:
        return Summary

    def __repr__(self) -> str:
        plain, room = pd.DataFrame(self), shutil.get_terminal_size().columns
        text, left_out = _fitting(plain, room)
        notes = []
        if plain.columns.is_unique and "document" in list(plain.columns) and len(set(plain["document"])) > 1:
            if "document" in left_out:
                others = [name for name in plain.columns if name != "document"]
                text, left_out = _fitting(plain.reindex(columns=["document", *others]), room)
            notes = ["[means and intervals over the documents: .intervals of the replays]"]
        if left_out:
            notes.insert(0, f"[also: {', '.join(map(str, left_out))}]")
        return "\n".join([text, *notes])


def _fitting(plain: pd.DataFrame, room: int) -> tuple[str, list]:
    """The first columns that fit, as text, and the names of the others."""
    limits = {name: pd.get_option(f"display.{name}") for name in ("max_rows", "min_rows", "max_colwidth")}
    formats = {name: FORMATS[name] for name in plain.select_dtypes("float") if name in FORMATS}
    for shown in range(plain.shape[1], 0, -1):
        text = plain.iloc[:, :shown].to_string(formatters=formats, **limits)
        if len(text.partition("\n")[0]) <= room or shown == 1:
            return text, list(plain.columns[shown:])
    return repr(plain), []
