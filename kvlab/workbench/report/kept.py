"""Ledgers that are kept as data: a CSV for each model, in which every number says what it comes from.

A long profile runs over several days, so a ledger is kept in pieces: what a store has not measured stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab import papers
from kvlab.errors import KvlabError, nearest
from kvlab.lib.files import replacing, why
from kvlab.workbench.report import told
from kvlab.workbench.report.ledger import Entry, by_model, claims, entries, names, refuse, side_by_side
from kvlab.workbench.report.origins import Origin
from kvlab.workbench.report.subjects import Subject, remarks, subjects

if TYPE_CHECKING:
    import pandas

ORIGIN = ["profile", "signature", "commit", "machine", "seconds"]
LATER = ["parameters", "remarks"]  # ledgers that were kept without these are read, too
COLUMNS = ["claim", "finding", "verdict", "value", "low", "high", "power", "why", "model", *ORIGIN, *LATER]
NUMBERS = ("value", "low", "high")
THOROUGH = ("full", "gpu")
"""The profiles whose lines a quick one does not replace by itself."""

Line = dict[str, str]


@dataclass
class Kept:
    """What was kept of a model, and where.

    Attributes:
        path: the file.
        replaced: how many of its lines come from the store.
        stayed: how many measured lines are as they were kept before.
        dropped: the claims that it judged before and that no longer exist.
    """

    path: Path
    replaced: int = 0
    stayed: int = 0
    dropped: list[str] = field(default_factory=list)


def keep(folder: Path, model: str | Sequence[str] | None = None, profile: str | None = None) -> list[Kept]:
    """Write the ledger of every model as FOLDER/MODEL.csv, one line for each claim, whole or not at all.

    A claim that the store has not measured stays as FOLDER has it, with what it says of its run; one that it has
    measured is replaced. Without a `profile`, the full profile goes before the quick one, in the store and in FOLDER;
    with one, its runs replace what is kept, whatever that is. Lines of claims that no longer exist are dropped. What
    the runs told of their figures is kept in the same way, in FOLDER/stories/MODEL.csv (`told`).

    Columns: claim, finding, verdict, value, low, high, power, why, model; and of the run that they come from its
    profile, signature, commit (with `+changes` where files differed from it), machine and seconds, the number of the
    model's parameters, and remarks on what it went without.

    Raises:
        KvlabError: no run has measured a claim, the folder cannot be written, or what it has under the name of a model
            is no kept ledger or of another model.
    """
    sweeps = [entries(model, each) for each in ([profile] if profile else [None, *THOROUGH])]
    if not any(entry.run for entry in sweeps[0]):
        refuse(model, profile)
    files: dict[Path, str] = {}
    for name in by_model(sweeps[0]):
        path = folder / f"{Subject(name).label}.csv"
        lines = _lines(path).values() if path.exists() else ()
        if other := ({line["model"] for line in lines} | {files.setdefault(path, name)}) - {name}:
            raise KvlabError(f"{path} is of the model {min(other)!r}, not of {name!r}: keep one of them elsewhere")
    written = []
    for path, name in files.items():
        mine = [[entry for entry in judged if entry.model == name] for judged in sweeps]
        try:
            written.append(_merged(path, mine, bool(profile)))
            told.keep(folder, Subject(name).label, mine, lambda new, old: _goes_before(new, old, bool(profile)))
        except OSError as error:
            raise KvlabError(f"cannot keep the ledger in {folder}: {why(error)}") from error
    return written


def _merged(path: Path, sweeps: Iterable[Sequence[Entry]], chosen: bool) -> Kept:
    """Write a model's file; `chosen`: a profile was asked for."""
    before = _lines(path) if path.exists() else {}
    order = [claim.id for claim in claims()]
    lines = {claim: line for claim, line in before.items() if claim in order}
    for judged in sweeps:
        for entry, line in zip(judged, _new_lines(judged), strict=True):
            old = lines.get(entry.claim.id)
            if old is None or _replaces(entry, old, chosen):
                lines[entry.claim.id] = line
    with replacing(path) as part:
        _frame(lines[claim] for claim in order).to_csv(part, index=False)
    stayed = sum(_knows(line) and line is before.get(claim) for claim, line in lines.items())
    replaced = sum(_knows(line) for line in lines.values()) - stayed
    return Kept(path, replaced, stayed, sorted(before.keys() - lines.keys()))


def _replaces(entry: Entry, old: Line, chosen: bool) -> bool:
    """Whether the store's entry takes the place of a kept line."""
    if entry.run is None:
        return not _knows(old)
    # A run may lack numbers that a test needs; where it lacks none, "not measured" is what it found (`provided`).
    lacking = entry.verdict.verdict == papers.UNMEASURED and not entry.claim.metrics <= set(entry.run.data.metrics)
    if lacking and old["verdict"] != papers.UNMEASURED:
        return False
    return _goes_before(entry.profile, old["profile"], chosen)


def _goes_before(new: str, old: str, chosen: bool) -> bool:
    """Whether a run of the profile `new` replaces what was kept of one of the profile `old`."""
    return chosen or new in THOROUGH or old not in THOROUGH


def _knows(line: Line) -> bool:
    """Whether any run stands behind a line."""
    return any(line[name] for name in ORIGIN)


def _new_lines(judged: Sequence[Entry]) -> list[Line]:
    # A run of an earlier version names the hardware only if it times something; another of the same computer may.
    hardware = {entry.run.data.tags.get("kvlab.host"): entry.machine for entry in judged if entry.run and entry.machine}
    sizes = {subject.name: subject.parameters for subject in subjects(judged)}
    lines = []
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
                "profile": entry.profile,
                "signature": entry.signature,
                "commit": tags.get("kvlab.commit", ""),
                "machine": entry.machine or hardware.get(tags.get("kvlab.host"), ""),
                "seconds": round((info.end_time - info.start_time) / 1000) if info.end_time else None,
                "parameters": sizes[entry.model],
                "remarks": "; ".join(remarks(entry)),
            }
        lines.append({name: "" if row.get(name) is None else str(row[name]) for name in COLUMNS})
    return lines


def _frame(lines: Iterable[Line]) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame(lines, columns=COLUMNS)


def _lines(path: Path) -> dict[str, Line]:
    """Claim -> its line, as the file has it. Raises KvlabError where it is no kept ledger."""
    found = told.table(path, [name for name in COLUMNS if name not in LATER])
    lines = {line["claim"]: {**dict.fromkeys(LATER, ""), **line} for line in found}
    for line in lines.values():
        try:
            _verdict(line)
            _origin(line, path)
        except ValueError as error:
            raise KvlabError(
                f"{path} is no kept ledger: {line['claim']!r} has no readable numbers or verdict"
            ) from error
    return lines


def _verdict(line: Line) -> papers.Verdict:
    numbers = {name: float(line[name]) if line[name] else None for name in NUMBERS}
    return papers.Verdict.model_validate({**{name: line[name] for name in ("verdict", "power", "why")}, **numbers})


def read(path: Path) -> list[Entry]:
    """The entries of a kept ledger, without their runs; claims that it does not know are not measured.

    Raises:
        KvlabError: the file is no kept ledger, or judges a claim that there is not.
    """
    lines = _lines(path)
    known = {claim.id: claim for claim in claims()}
    if unknown := lines.keys() - known.keys():
        raise KvlabError(f"{path}: {nearest(min(unknown), known, 'claim')}")
    model = next((line["model"] for line in lines.values() if line["model"]), path.stem)
    return [_entry(claim, lines.get(name), model, path) for name, claim in known.items()]


def _entry(claim: papers.Claim, line: Line | None, model: str, path: Path) -> Entry:
    if line is None:
        return Entry(claim, papers.judge(claim, {}), None, model)
    return Entry(claim, _verdict(line), None, model, _origin(line, path) if _knows(line) else None)


def _origin(line: Line, path: Path) -> Origin:
    return Origin(
        **{name: line[name] for name in ("profile", "signature", "commit", "machine")},
        seconds=int(line["seconds"]) if line["seconds"] else None,
        parameters=int(line["parameters"]) if line["parameters"] else None,
        remarks=tuple(filter(None, line["remarks"].split("; "))),
        file=path,
    )


def kept(folder: Path, model: str | Sequence[str] | None = None, profile: str | None = None) -> list[Entry]:
    """The entries of all ledgers in a folder, in the order of `ledger.entries`.

    Args:
        folder: as `keep` wrote it.
        model: only this one, or these (names, with or without their hash); all if there is none.
        profile: only lines of this profile; the others count as not measured.

    Raises:
        KvlabError: there is no ledger, one cannot be read, two are of one model, or none is left.
    """
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise KvlabError(f"{folder} holds no kept ledger; `kvlab report --keep {folder}` makes one")
    found: dict[str, list[Entry]] = {}
    for path in paths:
        mine = read(path)
        if found.setdefault(mine[0].model, mine) is not mine:
            raise KvlabError(
                f"{path} is of the model {mine[0].model!r}, as another ledger in {folder}: take one of them away"
            )
    wanted = names(model)
    of_models = {
        name: [_of_profile(entry, profile) for entry in mine]
        for name, mine in found.items()
        if not wanted or wanted & names(name)
    }
    measured = {name: mine for name, mine in of_models.items() if any(entry.measured for entry in mine)}
    if not measured:
        there = ", ".join(sorted(_told(found)))
        raise KvlabError(f"{folder} keeps nothing of that model and profile; it has: {there}")
    return side_by_side(measured)


def _of_profile(entry: Entry, profile: str | None) -> Entry:
    if not profile or entry.profile == profile:
        return entry
    return replace(entry, verdict=papers.judge(entry.claim, {}), kept=None)


def _told(found: Mapping[str, Sequence[Entry]]) -> set[str]:
    return {
        f"{entry.model} ({entry.profile or 'no'} profile)" for mine in found.values() for entry in mine if entry.kept
    }
