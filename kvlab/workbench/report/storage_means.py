"""Means of a run of `evict_or_quantise`, and differences between two systems at the same bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations
from typing import TYPE_CHECKING, Any, cast

from kvlab.lib.intervals import summarise

if TYPE_CHECKING:
    import pandas

AS_IS = "as_is"
ASKED = {"policy", "storage", "budget", "measure", "value", "stored_bytes", "full_bytes"}
"""The columns of a run's table."""


def means(measured: pandas.DataFrame) -> Iterator[dict[str, Any]]:
    """Rows of `storing.measure`'s table, as means over documents with 95 % intervals.

    A row without `against` is one measure of a system. A row with it is a paired difference: the system's loss less
    that of the full cache in the storage `against`. The system is a policy whose entries are stored as they are, at the
    bytes of that cache. Or it is the full cache in a storage that takes no more bytes.
    """
    from kvlab.analyses.together import storing

    wholes: dict[tuple[str, str], dict[str, Any]] = {}
    for _, part in measured.groupby(["policy", "storage", "budget", "measure"], sort=False, dropna=False):
        budget = part["budget"].iloc[0]
        about = {name: part[name].iloc[0] for name in ("policy", "storage", "measure")}
        about["budget"] = "" if math.isnan(budget) else f"{budget:g}"
        row = _row(part, cast("pandas.Series", part["value"]), **about)
        if row["policy"] == "full":
            wholes[row["storage"], row["measure"]] = row
        yield row
    for found in storing.findings(measured, []).frame(storing.EVICT).to_dict("records"):
        numbers = {name: found[name] for name in ("policy", "value", "low", "high")}
        yield wholes[found["storage"], found["measure"]] | numbers | {"storage": AS_IS, "against": found["storage"]}
    yield from _full_against_full(measured)


def _full_against_full(measured: pandas.DataFrame) -> Iterator[dict[str, Any]]:
    every = measured[(measured["policy"] == "full") & (measured["storage"] != AS_IS)]
    for measure, alike in every.groupby("measure", sort=False):
        parts = {str(form): part.set_index("document") for form, part in alike.groupby("storage", sort=False)}
        for (against, theirs), (form, ours) in permutations(parts.items(), 2):
            if (ours["stored_bytes"] <= theirs["stored_bytes"]).to_numpy().all():
                about = {"policy": "full", "storage": form, "against": against, "measure": str(measure)}
                yield _row(ours, cast("pandas.Series", ours["value"] - theirs["value"]), **about)


def _row(part: pandas.DataFrame, values: pandas.Series, **about: str) -> dict[str, Any]:
    value, (low, high) = summarise(values)
    sizes = part["stored_bytes"]
    stored = {"stored": (sizes / part["full_bytes"]).mean(), "stored_bytes": sizes.mean()}
    return {"budget": "", "against": "", **about, **stored, "value": value, "low": low, "high": high, "n": len(values)}
