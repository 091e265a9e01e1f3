"""Ledgers that are kept as data: a CSV for each model, with the source of every number.

A long profile runs over several days, so a ledger is kept in pieces: lines that a store has not measured stay as they
were. A claim has a line for each profile that measured it. The most thorough one is shown. A new run of the quick
profile is compared with the kept one of the quick profile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NoReturn

from kvlab import papers
from kvlab.errors import KvlabError, nearest
from kvlab.lib.files import why
from kvlab.workbench.report import csv_tables, stand_ins
from kvlab.workbench.report.ledger import (
    Entry,
    by_model,
    claims,
    entries,
    finding,
    is_one_of,
    names,
    profiles,
    refuse,
    set_q,
    side_by_side,
)
from kvlab.workbench.report.ledger_models import Subject, remarks, subjects
from kvlab.workbench.report.provenance import Origin, thoroughness
from kvlab.workbench.store.findings_table import numbers

ORIGIN = ["profile", "signature", "commit", "machine", "seconds"]
LATER = [
    "parameters",
    "remarks",
    "genre_low",
    "genre_high",
    "metric",
]  # ledgers that were kept without these are read, too
COLUMNS = ["claim", "finding", "verdict", "value", "low", "high", "power", "why", "model", *ORIGIN, *LATER]
OWN = "kept"
NUMBERS = ("value", "low", "high", "genre_low", "genre_high")

Line = dict[str, str]
Lines = dict[tuple[str, str], Line]
"""(claim, profile) -> its line; the profile is empty where nothing was measured."""


@dataclass
class Kept:
    """The kept lines of a model, and their file.

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
    """Write the ledger of every model as FOLDER/MODEL.csv, a line for each claim and profile, whole or not at all.

    A line is replaced if the store has measured its claim by its profile. Else it stays as FOLDER has it, with its
    record of the run. Lines of claims that no longer exist are dropped. So are quick lines of claims that only the full
    profile measures. Lines of claims that no experiment measures any more lose their numbers.

    The columns are:

    - claim, finding, verdict, value, low, high, power, why, model;
    - the run's profile, signature, commit (with `+changes` where files differed from it), machine and seconds;
    - parameters, the number of the model's weights, and remarks on the parts that the run went without;
    - genre_low and genre_high, the interval over genres;
    - metric, the one that the claim asked for.

    Args:
        folder: of the ledger.
        model: only this one, or these (names, with or without their hash); all if there is none.
        profile: only runs of this profile; of all if there is none.

    Raises:
        KvlabError: no run has measured a claim, or the folder cannot be written. It is also raised where the file with
            a model's name is no kept ledger, or is of another model.
    """
    newest = entries(model, profile)
    if not any(entry.run for entry in newest):
        refuse(model, profile)
    sweeps = [newest, *(entries(model, each) for each in ([] if profile else profiles()))]
    files: dict[Path, str] = {}
    for name in by_model(newest):
        path = folder / f"{Subject(name).label}.csv"
        lines = _lines(path).values() if path.exists() else ()
        if other := ({line["model"] for line in lines} | {files.setdefault(path, name)}) - {name}:
            raise KvlabError(f"{path} is of the model {min(other)!r}, not of {name!r}: keep one of them elsewhere")
    written = []
    for path, name in files.items():
        mine = [[entry for entry in judged if entry.model == name] for judged in sweeps]
        try:
            written.append(_merged(path, mine))
        except OSError as error:
            raise KvlabError(f"cannot keep the ledger in {folder}: {why(error)}") from error
    return written


def _merged(path: Path, sweeps: Iterable[Sequence[Entry]]) -> Kept:
    """Write a model's file."""
    before = _lines(path) if path.exists() else {}
    findings = {claim.id: finding(claim) for claim in claims()}
    order = list(findings)
    known = {claim.id: claim for claim in claims()}
    lines = {key: line for key, line in before.items() if key[0] in known and _rests(known[key[0]], key[1])}
    untested = {name: claim.untested for name, claim in known.items() if claim.untested}
    for key in [key for key in lines if key[0] in untested and key[1]]:  # an experiment that measured it has ended
        unmeasured = {
            "claim": key[0],
            "verdict": papers.UNMEASURED,
            "why": untested[key[0]],
            "model": lines.pop(key)["model"],
        }
        lines[key[0], ""] = dict.fromkeys(COLUMNS, "") | unmeasured
    for judged in sweeps:
        for entry, line in zip(judged, _new_lines(judged), strict=True):
            key = line["claim"], line["profile"]
            # A run that tried knows better why a claim is not measured.
            if entry.run or key not in lines:
                lines[key] = line
    measured = {claim for claim, profile in lines if profile}
    lines = {key: line for key, line in lines.items() if key[1] or key[0] not in measured}
    sorted_lines = (lines[key] for key in sorted(lines, key=lambda key: (order.index(key[0]), thoroughness(key[1]))))
    # A line that stays has the name that its finding has today.
    csv_tables.write(path, ({**line, "finding": findings[line["claim"]]} for line in sorted_lines), COLUMNS)
    stayed = sum(_knows(line) and line is before.get(key) for key, line in lines.items())
    replaced = sum(_knows(line) for line in lines.values()) - stayed
    return Kept(path, replaced, stayed, sorted({claim for claim, _ in before} - set(order)))


def _rests(claim: papers.Claim, profile: str) -> bool:
    """Whether a claim may rest on a run of the profile. A quick line of a claim that asks for the full one is older."""
    return claim.profile != "full" or profile != "quick"


def _knows(line: Line) -> bool:
    """Whether a line comes from a run."""
    return any(line[name] for name in ORIGIN)


def _new_lines(judged: Sequence[Entry]) -> list[Line]:
    # A run of an earlier version names the hardware only if it times something; another of the same computer may.
    known = [(entry.run.data.tags.get("kvlab.host"), entry.origin.machine) for entry in judged if entry.run]
    hardware = {host: machine for host, machine in known if machine}
    sizes = {subject.name: subject.parameters for subject in subjects(judged)}
    lines = []
    for entry in judged:
        verdict = entry.verdict
        row = {
            "claim": entry.claim.id,
            "finding": finding(entry.claim),
            **verdict.model_dump(include={"verdict", "power", "why", *NUMBERS}),
            "model": entry.model,
        }
        if entry.run and not _lacking(entry):
            origin, host = entry.origin, entry.run.data.tags.get("kvlab.host")
            row |= {
                "profile": origin.profile,
                "signature": origin.signature,
                "commit": origin.commit,
                "machine": origin.machine or hardware.get(host, ""),
                "seconds": origin.seconds,
                "parameters": sizes[entry.model],
                "remarks": "; ".join(remarks(entry)),
                "metric": entry.claim.metric,
            }
        lines.append({name: "" if row.get(name) is None else str(row[name]) for name in COLUMNS})
    return lines


def _lacking(entry: Entry) -> bool:
    """Whether the run lacks numbers that the claim's tests need: it has measured nothing of it, then. Where it lacks
    none, "not measured" is what it found (`provided`).
    """
    assert entry.run is not None
    return entry.verdict.verdict == papers.UNMEASURED and not entry.claim.metrics <= numbers(entry.run).keys()


def _lines(path: Path) -> Lines:
    """A file's lines in its order. Raises KvlabError where it is no kept ledger."""
    found = csv_tables.read(path, [name for name in COLUMNS if name not in LATER])
    lines = {(line["claim"], line["profile"]): {**dict.fromkeys(LATER, ""), **line} for line in found}
    for line in lines.values():
        try:
            _verdict(line)
            _origin(line)
        except ValueError as error:
            raise KvlabError(
                f"{path} is no kept ledger: {line['claim']!r} has no readable numbers or verdict"
            ) from error
    return lines


def _of_claim(line: Line, claim: papers.Claim) -> Line:
    """A line without its numbers where they are of another metric than the one that the claim asks for today."""
    if line["metric"] in ("", claim.metric):
        return line
    why = f"Judged when the claim asked for {line['metric']}. {line['why']}"
    return line | dict.fromkeys(NUMBERS, "") | {"why": why}


def _verdict(line: Line) -> papers.Verdict:
    numbers = {name: float(line[name]) if line[name] else None for name in NUMBERS}
    return papers.Verdict.model_validate({**{name: line[name] for name in ("verdict", "power", "why")}, **numbers})


def read(path: Path, profile: str | None = None) -> list[Entry]:
    """The entries of a kept ledger, one for each claim, without their runs.

    They are of the most thorough profile that measured the claim. Claims without a line are not measured.

    Args:
        path: the file.
        profile: only lines of this profile; the others count as not measured.

    Raises:
        KvlabError: the file is no kept ledger, or judges a claim that there is not.
    """
    return _shown(_read(path), path.stem, profile)


def _shown(found: Sequence[Entry], label: str, profile: str | None) -> list[Entry]:
    """One of a file's entries for each claim; `label`: the model of a file without any line.

    A profile that measured the claim comes before one in which a condition of the claim was not met.
    """
    model = found[0].model if found else label
    of_claim: dict[str, Entry] = {}
    for entry in sorted(found, key=lambda entry: entry.verdict.verdict == papers.UNMEASURED):
        if not profile or entry.origin.profile in ("", profile):
            of_claim.setdefault(entry.claim.id, entry)
    return [of_claim.get(claim.id) or Entry(claim, papers.judge(claim, {}), None, model) for claim in claims()]


def _read(path: Path) -> list[Entry]:
    """An entry for each line, a claim's most thorough one first."""
    lines = _lines(path)
    known = {claim.id: claim for claim in claims()}
    if unknown := {name for name, _ in lines} - known.keys():
        raise KvlabError(f"{path}: {nearest(min(unknown), known, 'claim')}")
    model = next((line["model"] for line in lines.values() if line["model"]), path.stem)
    found = [
        Entry(known[name], _verdict(_of_claim(line, known[name])), None, model, _origin(line) if _knows(line) else None)
        for (name, profile), line in sorted(lines.items(), key=lambda pair: thoroughness(pair[0][1]))
        if _rests(known[name], profile)
    ]
    set_q(found)
    stand_ins.weigh(found, stand_ins.read(path.parent))
    return found


def _origin(line: Line) -> Origin:
    return Origin(
        **{name: line[name] for name in ("profile", "signature", "commit", "machine")},
        seconds=int(line["seconds"]) if line["seconds"] else None,
        parameters=int(line["parameters"]) if line["parameters"] else None,
        remarks=tuple(filter(None, line["remarks"].split("; "))),
    )


def place(folder: Path | None) -> Path | None:
    """`folder`; for the name "kept" that of kvlab's own ledgers, which come with the wheel, unless a folder has it."""
    if folder is None or str(folder) != OWN or folder.exists():
        return folder
    here = Path(__file__).parent / "shipped"
    return here if here.is_dir() else Path(__file__).parents[3] / "docs" / "ledger"


def kept(folder: Path, model: str | Sequence[str] | None = None, profile: str | None = None) -> list[Entry]:
    """The entries of all ledgers in a folder, in the order of `ledger.entries`.

    Args:
        folder: as `keep` wrote it.
        model: only this one, or these (names, with or without their hash); all if there is none.
        profile: only lines of this profile; the others count as not measured. Else the most thorough ones.

    Raises:
        KvlabError: there is no ledger, one cannot be read, two are of one model, or none is left.
    """
    files = _files(folder, model)
    of_models = {name: _shown(found, name, profile) for name, found in files.items()}
    measured = {name: mine for name, mine in of_models.items() if any(entry.measured for entry in mine)}
    if not measured:
        _nothing(folder)
    if profile is None:
        _set_alike(measured, chain.from_iterable(files.values()))
    return side_by_side(measured)


def _set_alike(shown: Mapping[str, Sequence[Entry]], every: Iterable[Entry]) -> None:
    """Set `alike` of each entry: its model's entry by the most thorough profile that all models of its claim have."""
    measured: dict[str, dict[str, dict[str, Entry]]] = {}
    for entry in every:
        if entry.state != papers.UNMEASURED:
            measured.setdefault(entry.claim.id, {}).setdefault(entry.model, {})[entry.origin.profile] = entry
    for mine in shown.values():
        for entry in mine:
            of_models = measured.get(entry.claim.id, {})
            common = set.intersection(*(set(found) for found in of_models.values())) if of_models else set()
            if common and entry.model in of_models:
                entry.alike = of_models[entry.model][min(common, key=thoroughness)]


def every(folder: Path, model: str | Sequence[str] | None = None) -> list[Entry]:
    """All entries of a folder's ledgers, by model, claim and profile, a claim's most thorough one first.

    Args, Raises: as `kept`.
    """
    return _measured(folder, model) or _nothing(folder)


def _measured(folder: Path, model: str | Sequence[str] | None = None) -> list[Entry]:
    return [entry for found in _files(folder, model).values() for entry in found if entry.measured]


def _files(folder: Path, model: str | Sequence[str] | None) -> dict[str, list[Entry]]:
    """Model -> the entries of its ledger (`_read`), for those of these models that the folder has."""
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise KvlabError(f"{folder} holds no kept ledger; `kvlab report --keep {folder}` makes one")
    every: dict[str, list[Entry]] = {}
    for path in paths:
        found = _read(path)
        name = found[0].model if found else path.stem
        if every.setdefault(name, found) is not found:
            raise KvlabError(f"{path} is of the model {name!r}, as another ledger in {folder}: take one of them away")
    wanted = names(model)
    return {name: found for name, found in every.items() if is_one_of(name, wanted)}


def _nothing(folder: Path) -> NoReturn:
    there = {f"{entry.model} ({entry.origin.profile} profile)" for entry in _measured(folder)}
    raise KvlabError(
        f"{folder} keeps nothing of that model and profile; it has: {', '.join(sorted(there)) or 'nothing'}"
    )
