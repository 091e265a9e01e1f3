"""Scores of tasks as they are kept next to a ledger, in tasks/MODEL.csv, and the tables that a report shows of them."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from kvlab.render.phrases import listed
from kvlab.workbench.report import csv_tables
from kvlab.workbench.report.ledger_models import LACKING, Subject

FOLDER = "tasks"  # a folder of its own, so every CSV next to it is a ledger
KEY = ["task", "settings", "kind", "policy", "budget", "storage", "parameters", "compress_at", "mode", "turn"]
NUMBERS = ["n", "score", "low", "high", "difference", "difference_low", "difference_high", "kv_bytes", "seconds"]
LATER = KEY[-2:]  # files that were kept before there were turns do not have these columns
COLUMNS = ["model", *KEY, *NUMBERS, "commit", "machine", "version"]
FULL, PLAIN = "full", "as_is"  # the policy and the storage that all are compared with


def read(path: Path) -> list[dict[str, str]]:
    """The kept scores of a model; none where there is no such file.

    Raises:
        KvlabError: the file cannot be read, or lacks a column.
    """
    if not path.exists():
        return []
    lines = csv_tables.read(path, [name for name in COLUMNS if name not in LATER])
    return [dict.fromkeys(LATER, "") | line for line in lines]


@dataclass(frozen=True)
class Cell:
    """A mean score in percent, with its interval.

    Attributes:
        against_full: the interval of the difference from the full cache, in percentage points; None where it has none.
        full: the full cache's own mean over the same examples.
        n: the number of answers.
    """

    score: float
    low: float
    high: float
    description: str
    against_full: tuple[float, float] | None = None
    full: float | None = None
    n: int = 0

    @property
    def clear(self) -> int:
        """-1 or 1 where the difference from the full cache is clearly below or above none, else 0."""
        least, most = self.against_full or (0.0, 0.0)
        return int(least > 0) - int(most < 0)


@dataclass(frozen=True)
class ByTurn:
    """The scores of one mode of a task, turn by turn.

    Attributes:
        turns: the columns.
        rows: (policy with its budget, a cell for each turn, None where there is none), the full cache's first.
    """

    mode: str
    turns: list[str]
    rows: list[tuple[str, list[Cell | None]]]


@dataclass(frozen=True)
class Board:
    """The scores of one task with one set of parameters on one model, compressed at one moment.

    Attributes:
        prompts: their tokens and the document of the task, in words; empty where the task does not say.
        n: the number of answers of a score, except for the rows that say another number.
        full: the full cache's.
        budgets: the columns.
        rows: (policy, a cell for each budget, None where there is none), in the order of the mean score. Rows with
            fewer answers than others come last.
        by_turn: of each mode, where the task asks several questions over one context.
        fewer: a row that has fewer answers -> its name without that remark.
    """

    model: str
    task: str
    settings: str
    prompts: str
    compress_at: str
    n: int
    full: Cell | None
    budgets: list[str]
    rows: list[tuple[str, list[Cell | None]]]
    by_turn: list[ByTurn]
    fewer: Mapping[str, str] = field(default_factory=dict)

    @property
    def policies(self) -> int:
        """How many there are without the full cache; one may have several rows, with one setting each."""
        return len({name.split(",")[0] for name, _ in self.rows})


def boards(folder: Path) -> list[Board]:
    """The tables of a folder: of all kinds of examples and all turns together, and then by turn.

    Raises:
        KvlabError: a file cannot be read.
    """
    found: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for path in sorted((folder / FOLDER).glob("*.csv")):
        for line in read(path):
            if not line["kind"]:
                about = (*(line[name] for name in ("model", "task", "settings", "compress_at")),)
                found.setdefault(about, []).append(line)
    return [_board(about, lines) for about, lines in found.items()]


def _board(about: tuple[str, ...], every: Sequence[Mapping[str, str]]) -> Board:
    model, task, settings, compress_at = about
    lines = [line for line in every if not line["mode"] and not line["turn"]]
    fewer = _fewer(lines)
    plain = system_names(every)
    names = {one: f"{name}, {fewer[one]}" if one in fewer else name for one, name in plain.items()}
    cells = {(names[system(line)], line["budget"]): _cell(line) for line in lines}
    named = dict.fromkeys(name for name, _ in cells if name != FULL)
    budgets = sorted({budget for name, budget in cells if name != FULL}, key=lambda budget: float(budget or "inf"))
    rows = [(name, [cells.get((name, budget)) for budget in budgets]) for name in named]
    last = {names[one]: plain[one] for one in fewer}
    rows.sort(key=lambda row: (row[0] in last, -fmean(cell.score for cell in row[1] if cell)))
    full = next((cell for (name, _), cell in cells.items() if name == FULL), None)
    return Board(
        Subject(model.split()[0]).label,
        task,
        settings,
        prompts(settings),
        compress_at,
        max(int(line["n"]) for line in lines),
        full,
        budgets,
        rows,
        _by_turn([line for line in every if line["turn"]], names),
        last,
    )


def prompts(settings: str) -> str:
    """The tokens and the document of a task's prompts, in words; empty where its settings do not say."""
    given = _given(settings)
    try:
        lengths = ast.literal_eval(given.get("lengths") or given.get("length") or "()")
        every = [f"{length:,d}" for length in (lengths if isinstance(lengths, tuple | list) else [lengths])]
        document = ast.literal_eval(given.get("document", "''"))
        parts = [f"{listed(every)} tokens" if every else "", "document " + document if document else ""]
        return ", ".join(part for part in parts if part)
    except (ValueError, TypeError):
        return ""


def _by_turn(lines: Sequence[Mapping[str, str]], names: Mapping[tuple[str, ...], str]) -> list[ByTurn]:
    found = []
    for mode in dict.fromkeys(line["mode"] for line in lines):
        mine = sorted((line for line in lines if line["mode"] == mode), key=lambda line: line["policy"] != FULL)
        at = [names[system(line)] + (f" at {line['budget']}" if line["budget"] else "") for line in mine]
        cells = {(name, line["turn"]): _cell(line) for name, line in zip(at, mine, strict=True)}
        turns = sorted({line["turn"] for line in mine}, key=int)
        named = dict.fromkeys(at)
        found.append(ByTurn(mode, turns, [(at, [cells.get((at, turn)) for turn in turns]) for at in named]))
    return found


def system_names(lines: Sequence[Mapping[str, str]]) -> dict[tuple[str, ...], str]:
    """The name of each system of a table: the policy, its missing parts, its differing settings, and its storage.

    Settings differ where the table has a policy with several of them.
    """
    systems = {system(line): _given(line["parameters"]) for line in lines}
    named = {}
    for one, given in systems.items():
        policy, storage, _ = one
        alike = [other for (name, *_), other in systems.items() if name == policy]
        parts = [policy]
        for parameter, value in given.items():
            lacking, words = LACKING.get(parameter, ("", ""))
            if lacking == policy and value == "None":
                parts.append(words)
            elif any(other.get(parameter) != value for other in alike):
                parts.append(f"{parameter}={value}")
        named[one] = ", ".join(parts if storage == PLAIN else [*parts, storage])
    return named


def _fewer(lines: Sequence[Mapping[str, str]]) -> dict[tuple[str, ...], str]:
    """The systems that have fewer answers than others, and how many: scores over other examples are no comparison."""
    counts: dict[tuple[str, ...], int] = {}
    for line in lines:
        one, n = system(line), int(line["n"])
        counts[one] = min(n, counts.get(one, n))
    most = max(counts.values(), default=0)
    return {one: f"{n} of {most} answers" for one, n in counts.items() if n < most and one[0] != FULL}


def system(line: Mapping[str, str]) -> tuple[str, ...]:
    """The policy, its storage, and its parameters but for the budget."""
    return line["policy"], line["storage"], repr(_given(line["parameters"]))


def _given(call: str) -> dict[str, str]:
    """The parameters of a policy or task as it names itself, but for the budget: `snapkv(budget=8, window=4)`."""
    try:
        # The hash of a file that was read follows the call.
        named = ast.parse(re.sub(r"\)@\w+$", ")", call), mode="eval").body
    except SyntaxError:
        return {}
    if not isinstance(named, ast.Call):
        return {}
    return {each.arg: ast.unparse(each.value) for each in named.keywords if each.arg and each.arg != "budget"}


def _cell(line: Mapping[str, str]) -> Cell:
    # Of a few answers the interval reaches further than scores do.
    score, low, high = (100 * min(max(float(line[name]), 0), 1) for name in ("score", "low", "high"))
    least, most = (float(line[name] or "nan") for name in ("difference_low", "difference_high"))
    description = (
        f"{line['parameters'] or line['policy']}: {score:.0f} % ({low:.0f} to {high:.0f}) of {line['n']} answers"
    )
    against_full = full = None
    if line["policy"] != FULL and not math.isnan(least):
        against_full, difference = (100 * least, 100 * most), 100 * float(line["difference"])
        description += f"; against the full cache {difference:+.0f} ({100 * least:+.0f} to {100 * most:+.0f})"
        full = score - difference
    return Cell(score, low, high, description, against_full, full, int(line["n"]))
