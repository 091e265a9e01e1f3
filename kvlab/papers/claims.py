"""Claims and printed figures: the models, the loader and the judge."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvlab.errors import KvlabError, nearest
from kvlab.papers.conditions import AllOf, Condition, Covers, Missing, Within

if TYPE_CHECKING:
    import pandas

HOLDS, DIRECTION, FAILS, UNMEASURED = "holds", "holds in direction only", "fails", "not measured"
VERDICTS = (HOLDS, DIRECTION, FAILS, UNMEASURED)


class Claim(BaseModel):
    """One sentence of a paper that a number can confirm or refute.

    kind: "finding" could come out otherwise; "control" checks the measurement itself; "identity" follows from
    arithmetic and cannot fail unless the code is wrong; "example" is a worked example.
    stands_in says which measure replaces the paper's own where that cannot be taken here; empty where it is the same.
    untested says, of a claim that no experiment here can measure, why not and what would test it.
    figure is the name under which the experiment keeps the picture that shows it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    paper: str
    where: str
    summary: str
    metric: str
    paper_value: float | None
    unit: str = ""
    kind: Literal["finding", "control", "identity", "example"] = "finding"
    experiment: str | None = None
    stands_in: str = ""
    note: str = ""
    untested: str = ""
    figure: str = ""
    direction: Condition
    size: Condition

    @model_validator(mode="after")
    def _has_what_its_tests_need(self) -> Claim:
        for which in ("direction", "size"):
            if self.paper_value is None and _needs_paper_value(getattr(self, which)):
                raise ValueError(f"the test of {which} compares with the paper's value, but paper_value is null")
        return self

    @property
    def metrics(self) -> set[str]:
        """Every metric that this claim and its tests read."""
        return {self.metric} | self.direction.needs(self.metric) | self.size.needs(self.metric)


def _needs_paper_value(test: Condition) -> bool:
    if isinstance(test, AllOf):
        return any(_needs_paper_value(part) for part in test.tests)
    return isinstance(test, Within | Covers) and test.to is None


class Paper(BaseModel):
    """A paper: its short name, title, and the claims taken from it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    label: str
    title: str
    claims: list[Claim]


class Verdict(BaseModel):
    """What our numbers say to a claim: value with interval (None where absent), verdict, and the comparison made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float | None
    low: float | None = None
    high: float | None = None
    verdict: Literal["holds", "holds in direction only", "fails", "not measured"]
    why: str = Field(description="one or two sentences")


def load_file(path: str | Path) -> Paper:
    """A paper's claims from a YAML file; `paper` and `experiment` of a claim default to those of the file.

    Raises KvlabError, in one sentence, for YAML that does not parse, unknown keys and missing tests.
    """
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise KvlabError(f"{path.name}: a paper's file is a mapping with name, label, title and claims")
        defaults = {"paper": raw.get("name"), "experiment": raw.pop("experiment", None)}
        raw["claims"] = [{**defaults, **claim} for claim in raw.get("claims") or []]
        paper = Paper.model_validate(raw)
    except yaml.YAMLError as error:
        raise KvlabError(f"{path.name} is not valid YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise KvlabError(f"{path.name}: {at}: {first['msg']}") from None
    names = [claim.id for claim in paper.claims]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise KvlabError(f"{path.name}: the claim id {sorted(twice)[0]!r} occurs twice")
    return paper


@functools.cache
def papers() -> tuple[Paper, ...]:
    """All papers that kvlab knows claims of, by name."""
    folder = Path(str(files("kvlab.papers")))
    return tuple(load_file(path) for path in sorted(folder.glob("*.yaml")))


def claims(experiment: str | None = None, paper: str | None = None) -> list[Claim]:
    """The claims, of one experiment or one paper if named. An unknown paper raises KvlabError; an experiment of the
    user's own has no claims, which is no mistake."""
    known = [p.name for p in papers()]
    if paper is not None and paper not in known:
        raise KvlabError(nearest(paper, known, "paper"))
    return [claim for p in papers() for claim in p.claims
            if (paper is None or claim.paper == paper) and (experiment is None or claim.experiment == experiment)]


def figures() -> list[str]:
    """The printed tables and figures that are stored as data, as "paper/name"."""
    folder = Path(str(files("kvlab.papers"))) / "figures"
    return sorted(path.stem.replace("_", "/", 1) for path in folder.glob("*.csv"))


def figure(paper: str, name: str) -> pandas.DataFrame:
    """A table or figure as the paper prints it, tidy: figure("zsmerge", "figure4"). Raises KvlabError if unknown."""
    import pandas

    if f"{paper}/{name}" not in figures():
        raise KvlabError(nearest(f"{paper}/{name}", figures(), "figure"))
    path = Path(str(files("kvlab.papers"))) / "figures" / f"{paper}_{name}.csv"
    return pandas.read_csv(path, comment="#")


def judge(claim: Claim, metrics: Mapping[str, float],
          intervals: Mapping[str, tuple[float, float]] | None = None) -> Verdict:
    """The verdict on `claim` from measured numbers.

    metrics: name -> value; intervals: name -> (low, high), else taken from the metrics NAME/low and NAME/high.
    The verdict rests on the point estimates; where the interval of the claim's value contains the point at which its
    test of direction turns, `why` says so.
    """
    low, high = (intervals or {}).get(claim.metric, (metrics.get(f"{claim.metric}/low"),
                                                     metrics.get(f"{claim.metric}/high")))
    value = metrics.get(claim.metric)
    found = {"value": _finite(value), "low": _finite(low), "high": _finite(high)}
    absent = sorted(name for name in claim.metrics if _finite(metrics.get(name)) is None)
    if absent:
        some = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        return Verdict(**found, verdict=UNMEASURED, why=f"no run has measured {some}")

    def value_of(name: str) -> float:
        if name not in metrics:
            raise Missing(name)
        return float(metrics[name])

    right_way, direction = claim.direction.check(claim.metric, value_of, claim.paper_value)
    right_size, size = claim.size.check(claim.metric, value_of, claim.paper_value)
    turn = claim.direction.threshold(value_of, claim.paper_value)
    doubt = ""
    if turn is not None and claim.direction.metric is None and found["low"] is not None and found["high"] is not None:
        if found["low"] <= turn <= found["high"]:
            doubt = (f". The interval [{found['low']:.4g}, {found['high']:.4g}] contains {turn:.4g}, where the "
                     "direction turns: read the verdict with care")
    if not right_way:
        return Verdict(**found, verdict=FAILS, why=f"Direction missed: {direction}{doubt}.")
    if not right_size:
        return Verdict(**found, verdict=DIRECTION, why=f"Direction met: {direction}. Size missed: {size}{doubt}.")
    same = size == direction
    return Verdict(**found, verdict=HOLDS, why=f"Direction met: {direction}" + ("" if same else f". Size met: {size}")
                   + f"{doubt}.")


def _finite(number: float | None) -> float | None:
    return float(number) if number is not None and math.isfinite(number) else None
