"""Means of a run of `evict_or_quantise`, and what the same bytes cost in another way."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    that of the full cache in the storage `against`. The system is a policy as it is, at the bytes of that cache, or the
    full cache in a storage that takes no more bytes.
    """
    from kvlab.analyses.together.storing import read_off

    for _, part in measured.groupby(["policy", "storage", "budget", "measure"], sort=False, dropna=False):
        budget = part["budget"].iloc[0]
        about = {name: part[name].iloc[0] for name in ("policy", "storage", "measure")}
        about["budget"] = "" if math.isnan(budget) else f"{budget:g}"
        yield _row(part, _column(part, "value"), _column(part, "stored_bytes"), **about)
    policies = [name for name in measured["policy"].unique() if name != "full"]
    for measure in measured["measure"].unique():
        every = measured[(measured["policy"] == "full") & (measured["measure"] == measure)]
        wholes = {str(form): part.set_index("document") for form, part in every.groupby("storage", sort=False)}
        for against, theirs in wholes.items():
            if against == AS_IS:
                continue
            losses, sizes = _column(theirs, "value"), _column(theirs, "stored_bytes")
            for policy in policies:
                own = read_off(measured, policy, AS_IS, measure, sizes)
                if own is not None:
                    about = {"policy": policy, "storage": AS_IS, "against": against, "measure": measure}
                    yield _row(theirs, own - losses, sizes, **about)
            for form, ours in wholes.items():
                smaller = _column(ours, "stored_bytes")
                if form != against and bool((smaller <= sizes).to_numpy().all()):
                    about = {"policy": "full", "storage": form, "against": against, "measure": measure}
                    yield _row(theirs, _column(ours, "value") - losses, smaller, **about)


def _column(table: pandas.DataFrame, name: str) -> pandas.Series:
    return cast("pandas.Series", table[name])


def _row(part: pandas.DataFrame, values: pandas.Series, sizes: pandas.Series, **about: str) -> dict[str, Any]:
    value, (low, high) = summarise(values)
    stored = {"stored": (sizes / part["full_bytes"]).mean(), "stored_bytes": sizes.mean()}
    return {"budget": "", "against": "", **about, **stored, "value": value, "low": low, "high": high, "n": len(values)}
