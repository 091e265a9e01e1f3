"""Ledgers that are kept as data: a CSV for each model, in which every number says what it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab import papers
from kvlab.errors import KvlabError, nearest
from kvlab.lib.files import replacing, why
from kvlab.workbench.report.ledger import Entry, by_model, claims, entries, refuse
from kvlab.workbench.report.subjects import Subject

if TYPE_CHECKING:
    import pandas

ORIGIN = ["profile", "signature", "commit", "machine", "seconds"]
COLUMNS = ["claim", "finding", "verdict", "value", "low", "high", "power", "why", "model", *ORIGIN]
NUMBERS = ("value", "low", "high")


def keep(folder: Path, model: str | Sequence[str] | None = None, profile: str | None = None) -> list[Path]:
    """Write the ledger of every model as FOLDER/MODEL.csv, one line for each claim, whole or not at all.

    Columns: claim, finding, verdict, value, low, high, power, why, model; and of the run that they come from its
    profile, signature, commit (with `+changes` where files differed from it), machine and seconds.

    Raises:
        KvlabError: no run has measured a claim, or the folder cannot be written.
    """
    judged = entries(model, profile)
    if not any(entry.run for entry in judged):
        refuse(model, profile)
    written = []
    for name, mine in by_model(judged).items():
        path = folder / f"{Subject(name).label}.csv"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as part:
                _table(mine).to_csv(part, index=False)
        except OSError as error:
            raise KvlabError(f"cannot keep the ledger in {folder}: {why(error)}") from error
        written.append(path)
    return written


def _table(judged: Sequence[Entry]) -> pandas.DataFrame:
    import pandas

    # A run that times nothing does not name the hardware; another of the same computer does.
    hardware = {entry.run.data.tags.get("kvlab.host"): entry.machine for entry in judged if entry.run and entry.machine}
    rows = []
    for entry in judged:
        verdict = entry.verdict
        row = {
            "claim": entry.claim.id,
            "finding": entry.claim.fact[1] if entry.claim.kind == "finding" else "",
            **verdict.model_dump(include={"verdict", "value", "low", "high", "power", "why"}),
            "model": entry.model,
        }
        if entry.run:
            tags, info = entry.run.data.tags, entry.run.info
            row |= {
                "profile": tags.get("kvlab.profile", ""),
                "signature": tags.get("signature", ""),
                "commit": tags.get("kvlab.commit", ""),
                "machine": entry.machine or hardware.get(tags.get("kvlab.host"), ""),
                "seconds": round((info.end_time - info.start_time) / 1000) if info.end_time else None,
            }
        rows.append(row)
    table = pandas.DataFrame(rows, columns=COLUMNS)
    return table.astype({"seconds": "Int64"})


def read(path: Path) -> list[Entry]:
    """The entries of a kept ledger, without their runs; claims that it does not know are not measured.

    Raises:
        KvlabError: the file is no kept ledger, or judges a claim that there is not.
    """
    import pandas

    try:
        table = pandas.read_csv(path, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise KvlabError(f"cannot read the kept ledger {path}: {error}") from error
    if missing := [name for name in COLUMNS if name not in table]:
        raise KvlabError(f"{path} is no kept ledger: it has no column {missing[0]!r}")
    known = {claim.id: claim for claim in claims()}
    if unknown := set(table["claim"]) - known.keys():
        raise KvlabError(f"{path}: {nearest(min(unknown), known, 'claim')}")
    judged = {}
    for row in table.to_dict("records"):
        numbers = {name: float(row[name]) if row[name] != "" else None for name in NUMBERS}
        verdict = papers.Verdict(verdict=row["verdict"], power=row["power"], why=row["why"], **numbers)
        judged[row["claim"]] = Entry(known[row["claim"]], verdict, None, str(row["model"]))
    return [judged.get(claim.id) or Entry(claim, papers.judge(claim, {})) for claim in known.values()]
