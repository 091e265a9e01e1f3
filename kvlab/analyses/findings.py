"""Findings of an analysis: rows of effects with their keys, and the metric names that follow from them."""

from __future__ import annotations

import string
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pandas as pd

from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.lib.intervals import bounded, interval, summarise
from kvlab.papers.verdict import BY_GENRE, GENRE

DOCUMENT = "document"  # the name of the index that says on which document a repetition was measured
LEAST = 2  # documents of a genre whose mean is worth a look
GENRES = 3  # for an interval over genres; that of two has one degree of freedom and leaves nearly everything open


@dataclass(frozen=True)
class Row:
    """One number: an effect at certain keys.

    Attributes:
        effect: the template of its metric's name, such as `"error/{variant}/{ratio:.2f}"`.
        keys: the values of the template's fields, with the types that they have in tables.
        low, high: the 95 % interval; None where the number has none.
        genres: the means over the documents of each genre, where there are several genres of two documents and more.
    """

    effect: str
    keys: Mapping[str, Hashable]
    value: float
    low: float | None = None
    high: float | None = None
    genres: Mapping[str, float] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        """The number's name in MLflow and in the claims. This is the only place where such names are made."""
        return self.effect.format(**self.keys)

    @property
    def by_genre(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean over genres, each of which counts once; None for fewer than `GENRES`."""
        return interval(self.genres.values()) if len(self.genres) >= GENRES else None


@dataclass
class Findings:
    """Findings of an analysis: a tidy table of the measurements, and a row for each number computed from it.

    An effect is written once, as a template, and its keys are given by name:

    ```python
    ERROR = "error/{variant}/{ratio:.2f}"
    findings.add(ERROR, errors, variant="merge", ratio=0.2)     # the metric error/merge/0.20, with its interval
    findings.frame(ERROR)                                       # columns variant, ratio, value, low, high
    ```
    """

    table: pd.DataFrame
    _rows: dict[str, Row] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order in which they were added."""
        return list(self._rows.values())

    def add(self, effect: str, repetitions: Iterable[float], /, **keys: Hashable) -> None:
        """The mean of repeated measurements (documents, examples, trials), with its 95 % interval.

        A series whose index has a level `document` also gives the mean of each genre, as `corpus.genre` tells them.
        """
        self._add(effect, repetitions, summarise, keys)

    def add_bounded(
        self, effect: str, repetitions: Iterable[float], ends: tuple[float, float], /, **keys: Hashable
    ) -> None:
        """`add`, of measurements that lie between two ends (scores): all alike, they are not certain (`bounded`)."""
        self._add(effect, repetitions, partial(bounded, least=ends[0], most=ends[1]), keys)

    def _add(
        self,
        effect: str,
        repetitions: Iterable[float],
        summary: Callable[[Iterable[float]], tuple[float, tuple[float, float]]],
        keys: Mapping[str, Hashable],
    ) -> None:
        values = repetitions if isinstance(repetitions, pd.Series) else list(repetitions)
        row = self.set(effect, *summary(values), **keys)
        self._rows[row.metric] = replace(row, genres=_by_genre(values))

    def add_difference(self, effect: str, left: pd.Series, right: pd.Series, /, **keys: Hashable) -> None:
        """The mean of `left - right`, paired by their index (documents, examples), with its interval.

        Raises:
            KvlabError: the two sides do not have the same index, or an entry of it occurs twice.
        """
        if set(left.index) != set(right.index):
            raise KvlabError(f"{effect.format(**keys)}: the two sides were measured on different documents")
        if not left.index.is_unique:
            twice = left.index[left.index.duplicated()][0]
            raise KvlabError(
                f"{effect.format(**keys)}: {twice!r} is measured twice; give each budget an effect of its own, or an "
                "index that tells the two apart"
            )
        self.add(effect, left - right, **keys)

    def set(self, effect: str, value: float, interval: tuple[float, float] | None = None, /, **keys: Hashable) -> Row:
        """A number that is not a mean over repetitions.

        Raises:
            KvlabError: the keys are not those that the effect names.
        """
        named = fields(effect)
        if set(named) != set(keys):
            raise KvlabError(f"the effect {effect!r} has the keys {sorted(named)}, and was given {sorted(keys)}")
        low, high = interval or (None, None)
        row = Row(effect, keys, float(value), low, high)
        # The same name again replaces the earlier row.
        self._rows[row.metric] = row
        return row

    def frame(self, effect: str) -> pd.DataFrame:
        """All rows of an effect: a column for each of its keys, then value, low, high."""
        columns = [*fields(effect), "value", "low", "high"]
        rows = [{**row.keys, "value": row.value, "low": row.low, "high": row.high} for row in self.of(effect)]
        return pd.DataFrame(rows, columns=columns)

    def of(self, effect: str, /, **keys: Hashable) -> list[Row]:
        """The rows of an effect that have these keys, in the order in which they were added."""
        return [
            row
            for row in self.rows
            if row.effect == effect and all(row.keys[key] == value for key, value in keys.items())
        ]

    def found(self, effect: str, /, **keys: Hashable) -> Row | None:
        """The row of an effect at certain keys; None where it was not measured."""
        return self._rows.get(effect.format(**keys))

    def row(self, effect: str, /, **keys: Hashable) -> Row:
        """The row of an effect at certain keys. Raises KvlabError if there is none."""
        row = self.found(effect, **keys)
        if row is None:
            raise KvlabError(f"no finding has the name {effect.format(**keys)}")
        return row

    @property
    def metrics(self) -> dict[str, float]:
        """Values by metric name; after each its means by genre, as METRIC/genre/GENRE, and the interval of these."""
        return {
            name: value
            for row in self.rows
            for name, value in [
                (row.metric, row.value),
                *((f"{row.metric}/{GENRE}/{genre}", mean) for genre, mean in row.genres.items()),
                *zip((f"{row.metric}/{end}" for end in BY_GENRE), row.by_genre or (), strict=False),
            ]
        }

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Intervals by metric name, of the numbers that have one."""
        return {row.metric: (row.low, row.high) for row in self.rows if row.low is not None and row.high is not None}

    def __or__(self, other: Findings) -> Findings:
        """The rows of both, with the left one's table; where both have a metric, the right one's row counts."""
        return Findings(self.table, self._rows | other._rows)


def estimates(groups: Iterable[tuple[Any, Iterable[float]]], keys: Sequence[str]) -> pd.DataFrame:
    """The mean of each group with its 95 % interval: columns `keys`, value, low, high.

    groups: labels (a tuple where there are several keys) and values, as pandas' `groupby` gives them.
    """
    rows = []
    for label, values in groups:
        value, (low, high) = summarise(values)
        rows.append([*(label if isinstance(label, tuple) else (label,)), value, low, high])
    return pd.DataFrame(rows, columns=[*keys, "value", "low", "high"])


def fields(effect: str) -> list[str]:
    """The keys that an effect's template names, in its order."""
    return [name for _, name, _, _ in string.Formatter().parse(effect) if name]


def _by_genre(repetitions: Iterable[float]) -> dict[str, float]:
    if not isinstance(repetitions, pd.Series) or DOCUMENT not in repetitions.index.names:
        return {}
    genres = repetitions.index.get_level_values(DOCUMENT).map(lambda name: corpus.genre(str(name)))
    groups: Any = repetitions.astype(float).groupby(genres)
    if groups.ngroups < 2 or groups.size().min() < LEAST:
        return {}
    return {str(genre): float(mean) for genre, mean in groups.mean().items()}
