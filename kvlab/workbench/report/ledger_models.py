"""The models of the ledger: how large each is, what shape it has, and in which order they stand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvlab.workbench.store.tracking import NONE, PARAMETERS

if TYPE_CHECKING:
    from mlflow.entities import Run

    from kvlab.papers import Claim
    from kvlab.workbench.report.provenance import Origin

LACKING = {"tables": ("compilerkv", "neutral tables"), "heads": ("duoattention", "no measured head scores")}
"""Tag of a run, which is NONE where nothing comes with kvlab for its model -> the policy that went without, and a
remark."""

FILLED = "filled"


class Judged(Protocol):
    """The parts of a ledger's entry that this module reads; the entry itself needs its models."""

    @property
    def claim(self) -> Claim: ...
    @property
    def run(self) -> Run | None: ...
    @property
    def kept(self) -> Origin | None: ...
    @property
    def model(self) -> str: ...
    @property
    def group(self) -> str: ...


@dataclass(frozen=True)
class Subject:
    """A model that runs were made on.

    Attributes:
        name: the tag `model` of its runs.
        parameters: the number of its weights, by the catalogue or by its runs; None where neither tells.
        shape, dtype: in words, as its newest run tells; empty where it does not.
    """

    name: str
    parameters: int | None = None
    shape: str = ""
    dtype: str = ""

    @property
    def label(self) -> str:
        """Its name without hash, and without the folders of a path."""
        return self.name.split("@")[0].rstrip("/").rpartition("/")[2] or self.name

    @property
    def description(self) -> str:
        """Describe it in words; empty where nothing is known."""
        size = f"{self.size} parameters" if self.size else ""
        return "; ".join(part for part in (size, self.shape, self.dtype) if part)

    @property
    def size(self) -> str:
        """The number of its parameters in words: "135M", "1.5B"; empty where it is not known."""
        return "" if self.parameters is None else in_words(self.parameters)


def in_words(parameters: float) -> str:
    """A number of parameters as model cards have it, with two digits at least."""
    for unit, factor in (("K", 1e3), ("M", 1e6), ("B", 1e9)):
        if parameters < 999.5 * factor or unit == "B":
            count = parameters / factor
            return f"{count:.0f}{unit}" if count >= 9.95 else f"{count:.1f}{unit}".replace(".0", "")
    raise AssertionError("billions are the last unit")


def subjects(judged: Iterable[Judged]) -> list[Subject]:
    """The models that measured entries are about, the smallest first; those of unknown size last."""
    runs: dict[str, dict[str, Run]] = {}
    sizes: dict[str, int | None] = {}
    for entry in judged:
        if entry.run:
            runs.setdefault(entry.model, {})[entry.run.info.run_id] = entry.run
        elif entry.kept:
            runs.setdefault(entry.model, {})
            sizes[entry.model] = sizes.get(entry.model) or entry.kept.parameters
    every = [_subject(name, list(mine.values()), sizes.get(name)) for name, mine in runs.items()]
    return sorted(every, key=lambda subject: (subject.parameters or math.inf, subject.name))


def _subject(name: str, runs: list[Run], size: int | None) -> Subject:
    newest = sorted(runs, key=lambda run: run.info.end_time or 0, reverse=True)
    tags = [run.data.tags for run in newest]
    return Subject(name, _catalogued(name) or size or _tagged(tags), _first(tags, "shape"), _first(tags, "dtype"))


def remarks(entry: Judged) -> list[str]:
    """Remarks for a reader of an entry on the parts that its run went without."""
    if entry.kept:
        return list(entry.kept.remarks)
    if entry.run is None or entry.group == "recomputed":
        return []
    tags, claim = entry.run.data.tags, entry.claim
    about = " ".join([claim.id, claim.paper, *claim.metrics])
    lacked = [tag for tag, (policy, _) in LACKING.items() if tags.get(tag) == NONE and policy in about]
    # Sets that fill their budget go without those tables where they have weights learnt one head at a time.
    if FILLED in claim.metric and tags.get("alone", NONE) != NONE:
        lacked = [tag for tag in lacked if tag != "tables"]
    return [LACKING[tag][1] for tag in lacked]


def _first(tags: list[dict[str, str]], key: str) -> str:
    """The first value of a tag that any of the runs has."""
    return next((of_run[key] for of_run in tags if of_run.get(key)), "")


def _tagged(tags: list[dict[str, str]]) -> int | None:
    written = _first(tags, PARAMETERS)
    return int(written) if written.isdecimal() else None


def _catalogued(name: str) -> int | None:
    """The size of a known model as its makers give it.

    The loaded weights may be more. The published model may use its embedding twice, where a GGUF file has an output
    matrix of its own.
    """
    from kvlab.inputs.models import MODELS

    return getattr(MODELS.get(name.split("@")[0]), PARAMETERS, None)
