"""Compare a new ledger with a kept one: which verdicts flipped, and which values lie outside the kept interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.render.phrases import number
from kvlab.workbench.report import csv_tables
from kvlab.workbench.report.ledger import Entry, names

FILE = "differences.csv"
PRECISION = 1e-3
"""By which share a value without an interval may differ: sums in another order move the last digits."""
COLUMNS = [
    "claim",
    "model",
    "differs",
    "kept_verdict",
    "verdict",
    "kept_value",
    "kept_low",
    "kept_high",
    "value",
    "low",
    "high",
    "kept_profile",
    "profile",
    "kept_commit",
    "note",
]


@dataclass(frozen=True)
class Difference:
    """A claim on which the new numbers say something else than the kept ones: by verdict ("verdict"), or by value."""

    kept: Entry
    new: Entry
    differs: str

    @property
    def note(self) -> str:
        """The other changes: the model's weights, the profile, the signature; empty where nothing changed."""
        parts = []
        if self.kept.model != self.new.model:
            parts.append(f"other weights: {self.new.model}, kept {self.kept.model}")
        old, new = self.kept.origin, self.new.origin
        if old.profile != new.profile:
            parts.append(f"other profile: {new.profile or 'none'}, kept {old.profile or 'none'}")
        elif old.signature != new.signature:
            parts.append("other signature: texts, parameters, seed or version differ")
        return "; ".join(parts)

    def __str__(self) -> str:
        old, new = self.kept, self.new
        flipped = f"was {old.tested}, is {new.tested}; " if self.differs == "verdict" else ""
        note = f" ({self.note})" if self.note else ""
        return f"{new.claim.id} on {new.model}: {flipped}value {_value(new)}, kept {_value(old)}{note}"

    @property
    def row(self) -> dict[str, Any]:
        old, new = self.kept.verdict, self.new.verdict
        return {
            "claim": self.new.claim.id,
            "model": self.new.model,
            "differs": self.differs,
            **{f"kept_{name}": getattr(old, name) for name in ("verdict", "value", "low", "high")},
            **{name: getattr(new, name) for name in ("verdict", "value", "low", "high")},
            "kept_profile": self.kept.origin.profile,
            "profile": self.new.origin.profile,
            "kept_commit": self.kept.origin.commit,
            "note": self.note,
        }


@dataclass(frozen=True)
class Comparison:
    """Where two ledgers differ: flipped verdicts first; how many claims both measured, and how many only the kept one.

    Both counts are over claims and models, timings left out.
    """

    differences: list[Difference]
    compared: int
    missing: int

    def write(self, folder: Path) -> Path:
        """Write the differences as FOLDER/differences.csv, which has no line where there are none; returns its path."""
        path = folder / FILE
        csv_tables.write(path, [one.row for one in self.differences], COLUMNS)
        return path

    def __str__(self) -> str:
        flipped = sum(one.differs == "verdict" for one in self.differences)
        lines = [f"  {one}" for one in self.differences]
        head = (
            f"Of {self.compared} kept verdicts that were measured again, {flipped} flipped, and "
            f"{len(self.differences) - flipped} more have a value outside the kept interval"
        )
        rest = f"; {self.missing} were not measured again" if self.missing else ""
        return "\n".join([f"{head}{rest}.", *lines])


def compare(kept: Iterable[Entry], new: Iterable[Entry]) -> Comparison:
    """Compare new entries with kept ones of the same claim and model.

    A model is found by its name, whatever the hash of its weights. Of several kept profiles, the new entry's own is
    compared, else the first. Entries differ by their verdicts or by their values. Values differ where the new one lies
    outside the kept interval, if there is one, and has moved by more than the share PRECISION. Timings are left out:
    they vary with the machine.

    Raises:
        KvlabError: no claim was measured in both.
    """
    before, now = _by_name(kept), {key: mine[0] for key, mine in _by_name(new).items()}
    both = [(_of_profile(old, now[key].origin.profile), now[key]) for key, old in before.items() if key in now]
    if not both:
        there, here = ({model for _, model in found} for found in (before, now))
        raise KvlabError(f"nothing to compare: kept are {_listed(there)}, and measured here {_listed(here)}")
    found = [Difference(old, fresh, how) for old, fresh in both if (how := _differs(old, fresh))]
    found.sort(key=lambda one: one.differs != "verdict")
    return Comparison(found, len(both), len(before) - len(both))


def _by_name(judged: Iterable[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """(claim, model's name) -> its entries, for all that was measured and is no timing."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in judged:
        if entry.measured and entry.group != "timings" and entry.model:
            found.setdefault((entry.claim.id, min(names(entry.model))), []).append(entry)
    return found


def _of_profile(judged: Sequence[Entry], profile: str) -> Entry:
    return next((entry for entry in judged if entry.origin.profile == profile), judged[0])


def _differs(old: Entry, new: Entry) -> str:
    if old.tested != new.tested:
        return "verdict"
    before, value = old.verdict, new.verdict.value
    if before.value is None or value is None:
        return "" if before.value == value else "value"
    if before.low is not None and before.high is not None and before.low <= value <= before.high:
        return ""
    return "" if math.isclose(before.value, value, rel_tol=PRECISION, abs_tol=1e-9) else "value"


def _value(entry: Entry) -> str:
    verdict = entry.verdict
    ends = "" if verdict.low is None or verdict.high is None else f" [{number(verdict.low)}, {number(verdict.high)}]"
    return f"{number(verdict.value)}{ends}"


def _listed(models: Sequence[str] | set[str]) -> str:
    return ", ".join(sorted(models)) or "no models"
