"""The cost of compressing before the question: scores of tasks with both times of compression, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvlab.render.phrases import listed
from kvlab.workbench.report.task_scores import Board, Cell

READ, HELD = "prompt", "context"
ENDS = (25, 50, 75, 100)


@dataclass(frozen=True)
class Both:
    """A score with the question read before the cache was compressed, and a score with it read only afterwards."""

    read: Cell
    held: Cell

    @property
    def n(self) -> int:
        """The number of answers of each score; the smaller one, if they differ."""
        return min(self.read.n, self.held.n)

    @property
    def ahead(self) -> float:
        """The lead of the score with the question read afterwards over the full cache's on the same prompts.

        Where the full cache's score is not known, it is the score itself.
        """
        return self.held.score - (self.held.full or 0)

    @property
    def clear(self) -> int:
        """-1 or 1 where clearly more or less is lost with the question read afterwards; else 0.

        It is clear where the intervals of the differences from the full cache, prompt by prompt, are apart.
        """
        if not (self.held.against_full and self.read.against_full):
            return 0
        (low, high), (least, most) = self.held.against_full, self.read.against_full
        return int(low > most) - int(high < least)


@dataclass(frozen=True)
class Moments:
    """One task with one set of parameters at one budget, on every model that answered it at both moments.

    Attributes:
        prompts: their tokens and the document of the task, in words; empty where the task does not say.
        models: the columns.
        n: the number of answers of most scores of each model.
        rows: (policy, its scores on each model, None where there are none). The order is by `Both.ahead`, the largest
            lead over the full cache first.
    """

    task: str
    prompts: str
    budget: str
    models: list[str]
    n: list[int]
    rows: list[tuple[str, list[Both | None]]]

    @property
    def ends(self) -> int:
        """The end of the axis, in percent: the first of `ENDS` that nothing drawn exceeds.

        It is the last of them where rounding puts a score of 100 beyond it.
        """
        every = [both for _, cells in self.rows for both in cells if both]
        largest = max(max(both.read.score, both.held.high, both.read.full or 0) for both in every)
        return next((end for end in ENDS if end >= largest), ENDS[-1])

    @property
    def losing(self) -> list[tuple[int, int]]:
        """How many policies clearly lose more with the question read afterwards, and of how many, on each model."""
        columns = zip(*(cells for _, cells in self.rows), strict=True)
        clear = [[both.clear for both in column if both] for column in columns]
        return [(mine.count(-1), len(mine)) for mine in clear]

    @property
    def description(self) -> str:
        parts = [f"{n} of {of} policies on {model}" for model, (n, of) in zip(self.models, self.losing, strict=True)]
        return f"clearly lower if compressed before the question: {listed(parts)}"


def moments(boards: Sequence[Board]) -> list[Moments]:
    """The boards that both moments have, a table for each budget; first those where most policies lose by it."""
    at = {(board.model, board.task, board.settings, board.compress_at): board for board in boards}
    found: dict[tuple[str, str, str], list[tuple[Board, Board]]] = {}
    for (model, task, settings, moment), read in at.items():
        held = at.get((model, task, settings, HELD))
        if moment == READ and held:
            for budget in read.budgets:
                if budget and budget in held.budgets:
                    found.setdefault((task, settings, budget), []).append((read, held))
    tables = [_moments(budget, pairs) for (_, _, budget), pairs in found.items()]
    return sorted(tables, key=lambda table: -max(n for n, _ in table.losing))


def _moments(budget: str, pairs: Sequence[tuple[Board, Board]]) -> Moments:
    scores = [[_at(board, budget) for board in pair] for pair in pairs]
    named = dict.fromkeys(name for read, held in scores for name in read if name in held)
    rows = [
        (name, [Both(read[name], held[name]) if name in read and name in held else None for read, held in scores])
        for name in named
    ]
    rows.sort(key=_by_score)
    first, models = pairs[0][0], [read.model for read, _ in pairs]
    n = [min(read.n, held.n) for read, held in pairs]
    return Moments(first.task, first.prompts, budget, models, n, rows)


def _by_score(row: tuple[str, list[Both | None]]) -> tuple[float, float]:
    """The key that sorts rows by their lead with the question read afterwards, then by the score with it read first."""
    found = [both for both in row[1] if both]
    return -fmean(both.ahead for both in found), -fmean(both.read.score for both in found)


def _at(board: Board, budget: str) -> dict[str, Cell]:
    """Policy -> its score on a board, at a budget or without one.

    The policy's name leaves out its number of answers, since models may have different numbers of them.
    """
    columns = [board.budgets.index(name) for name in (budget, "") if name in board.budgets]
    named = [(board.fewer.get(name, name), row) for name, row in board.rows]
    cells = {name: next((row[column] for column in columns if row[column]), None) for name, row in named}
    return {name: cell for name, cell in cells.items() if cell}
