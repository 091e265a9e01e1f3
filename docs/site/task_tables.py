"""Tables of scores on tasks, from docs/ledger/tasks: those of docs/tasks.md, and a short one of some policies.

    <!-- scores POLICY POLICY -->       what these policies score with the question first and with the question later

It ends at `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from claim_tables import table

from kvlab.workbench.report import task_scores

SCORES = re.compile(r"(<!-- scores ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SMALL, HALF, LARGER = "smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
READ, LATER = "prompt", "context"
MOMENTS = (READ, LATER)
FIRST_TEXT, OTHER_TEXT = "document='sotu/1962'", "document='squad/Immune_system'"
NONE = "–"
SETTING = (
    "Needles' prompts have 1,000 to 4,000 tokens. Policies keep or read 512 entries of LongBench's, which have up to "
    "3,500. Of these the 0.5B read 60, and the 1.5B 30. On RULER policies have 100 of 1,000 tokens, "
    "with two examples for each of 13 tasks. A positive difference is a loss. It is bold where its interval excludes "
    "zero."
)

Line = Mapping[str, str]
Scores = dict[tuple[str, str, str], Line]
"""(policy, budget, moment) -> its line; the budget of a policy that takes none is empty."""


def parts(kept: Path) -> dict[str, str]:
    """Name -> the table of docs/tasks.md."""
    return {
        "needle_grid": _grid(_scores(kept, SMALL, "needle")),
        "needles": _needles(kept),
        "ruler": _ruler(kept),
        "longbench": _longbench(kept),
        "turns": _turns(kept),
    }


def fill(text: str, kept: Path) -> str:
    """A page with its short tables of scores."""
    return SCORES.sub(lambda found: f"{found[1]}\n{_short(kept, found[2].split())}\n\n{found[3]}", text)


def _scores(kept: Path, model: str, task: str, settings: str = "", n: str = "") -> Scores:
    """The means over all kinds of examples and all turns, of those over so many examples."""
    lines = [
        line
        for line in task_scores.read(kept / task_scores.FOLDER / f"{model}.csv")
        if line["task"] == task and settings in line["settings"] and n in ("", line["n"])
    ]
    plain = [line for line in lines if not (line["kind"] or line["mode"] or line["turn"])]
    names = task_scores.system_names(plain)
    return {(names[task_scores.system(line)], line["budget"], line["compress_at"]): line for line in plain}


def _at(scores: Scores, policy: str, budget: str, moment: str) -> Line | None:
    return scores.get((policy, budget, moment)) or scores.get((policy, "", moment))


def _percent(line: Line | None) -> str:
    if line is None:
        return NONE
    score, low, high = (100 * float(line[name]) for name in ("score", "low", "high"))
    return f"{score:.0f} ({low:.0f}-{high:.0f})"


def _less(line: Line | None) -> str:
    """How many points below the full cache; bold where the interval is above 0."""
    if line is None or not line["difference"] or line["policy"] == task_scores.FULL:
        return NONE
    less = [-100 * float(line[name]) + 0.0 for name in ("difference", "difference_high", "difference_low")]
    mean, low, high = (f"{value:.1f}".replace("-0.0", "0.0") for value in less)
    shown = f"{mean} ({low} to {high})"
    return f"**{shown}**" if less[1] > 0 else shown


def _found(line: Line | None) -> str:
    return NONE if line is None else f"{float(line['score']) * int(line['n']):.0f}"


def _policies(every: Iterable[Scores]) -> list[str]:
    """Their policies, the full cache first."""
    names = dict.fromkeys(policy for scores in every for policy, _, _ in scores)
    return sorted(names, key=lambda name: (name != task_scores.FULL, name))


def _called(policy: str) -> str:
    return "full cache" if policy == task_scores.FULL else policy


def _grid(scores: Scores) -> str:
    rows = [
        [
            _called(policy),
            *(_percent(_at(scores, policy, budget, READ)) for budget in ("128", "512")),
            _less(_at(scores, policy, "512", READ)),
        ]
        for policy in _policies([scores])
    ]
    return table(["found, %", "at 128", "at 512", "points below the full cache at 512"], rows)


def _needles(kept: Path) -> str:
    places = {
        "0.5B": _scores(kept, HALF, "needle", FIRST_TEXT),
        "0.5B, other text": _scores(kept, HALF, "needle", OTHER_TEXT),
        "1.5B": _scores(kept, LARGER, "needle", FIRST_TEXT),
    }
    columns = [(name, budget) for name in places for budget in ("128", "512")]

    def cell(policy: str, name: str, budget: str) -> str:
        return " / ".join(_found(_at(places[name], policy, budget, moment)) for moment in MOMENTS)

    def best(policy: str) -> float:
        lines = [_at(places["0.5B"], policy, "512", moment) for moment in (LATER, READ)]
        return -sum(float(line["score"]) * weight for line, weight in zip(lines, (100, 1), strict=True) if line)

    names = sorted(_policies(places.values()), key=best)
    rows = [[_called(policy), *(cell(policy, *column) for column in columns)] for policy in names]
    return table(["found of 15, question first / later", *(f"{name}, {budget}" for name, budget in columns)], rows)


def _ruler(kept: Path) -> str:
    models = {"0.5B": _scores(kept, HALF, "ruler"), "1.5B": _scores(kept, LARGER, "ruler")}

    def best(policy: str) -> float:
        line = _at(models["0.5B"], policy, "0.1", READ) or _at(models["1.5B"], policy, "0.1", READ)
        return -float(line["score"]) if line else 0.0

    rows = [
        [
            _called(policy),
            *(_percent(_at(scores, policy, "0.1", moment)) for scores in models.values() for moment in MOMENTS),
        ]
        for policy in sorted(_policies(models.values()), key=best)
    ]
    head = [f"{model}, {moment}" for model in models for moment in ("question first", "question later")]
    return table(["score, %", *head], rows)


def _longbench(kept: Path) -> str:
    of_prompts = {n: _scores(kept, HALF, "longbench", n=n) for n in ("60", "30")}
    larger = _scores(kept, LARGER, "longbench")

    def cells(scores: Scores, policy: str) -> list[str]:
        lines = [_at(scores, policy, "512", moment) for moment in MOMENTS]
        return [
            NONE if line is None else f"{100 * float(line['score']):.0f}" + (f"; {less}" if less != NONE else "")
            for line, less in zip(lines, map(_less, lines), strict=True)
        ]

    rows = []
    for n, scores in of_prompts.items():
        mine = sorted(_policies([scores]), key=lambda policy: -float(scores[_key(scores, policy)]["score"]))
        rows += [[_called(policy), n, *cells(scores, policy), *cells(larger, policy)] for policy in mine]
    head = ["0.5B, question first", "0.5B, question later", "1.5B, question first", "1.5B, question later"]
    return table(["score, %; points below the full cache", "prompts (0.5B)", *head], rows)


def _key(scores: Scores, policy: str) -> tuple[str, str, str]:
    return next(key for key in scores if key[0] == policy and key[2] == LATER)


def _turns(kept: Path) -> str:
    lines = task_scores.read(kept / task_scores.FOLDER / f"{SMALL}.csv")
    mine = [line for line in lines if line["task"] == "turns" and line["turn"] and not line["kind"]]
    turns = sorted({line["turn"] for line in mine}, key=int)
    cells = {(line["mode"], line["compress_at"], line["policy"], line["turn"]): _percent(line) for line in mine}
    told = {
        ("chat", READ): "chat, its first question read",
        ("requests", READ): "requests, each question read",
        ("chat", LATER): "chat, none read",
        ("requests", LATER): "requests, none read",
    }
    policies = sorted({line["policy"] for line in mine}, key=lambda name: (name != task_scores.FULL, name))
    rows = [
        [words if policy == policies[0] else "", _called(policy), *(cells[*place, policy, turn] for turn in turns)]
        for place, words in told.items()
        for policy in policies
    ]
    return table(["codes found, %", "", *(f"question {turn}" for turn in turns)], rows)


def _short(kept: Path, policies: Sequence[str]) -> str:
    needles = {model: _scores(kept, model, "needle", FIRST_TEXT) for model in (HALF, LARGER)}
    longbench, ruler = _scores(kept, HALF, "longbench", n="60"), _scores(kept, HALF, "ruler")
    larger = _scores(kept, LARGER, "longbench")

    def named(scores: Scores, policy: str) -> str:
        return next((name for name, _, _ in scores if name.split(",")[0] == policy), policy)

    rows = []
    for moment, words in ((READ, "question first"), (LATER, "question later")):
        for policy in policies:
            scored = [
                *(
                    _found(_at(scores, named(scores, policy), budget, moment))
                    for scores in needles.values()
                    for budget in ("128", "512")
                ),
                _percent(_at(ruler, named(ruler, policy), "0.1", moment)),
                _less(_at(longbench, named(longbench, policy), "512", moment)),
                _less(_at(larger, named(larger, policy), "512", moment)),
            ]
            rows.append([_called(policy), words, *scored])
    head = [
        *(f"needles of 15, {model}, {budget} entries" for model in ("0.5B", "1.5B") for budget in (128, 512)),
        "RULER, %, 0.5B",
        "points below the full cache, LongBench, 0.5B",
        "the same, 1.5B",
    ]
    return f"{table(['policy', '', *head], rows)}\n\n{SETTING}"
