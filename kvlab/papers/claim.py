"""Claims and printed figures: the models, the loader and the judge."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvlab.errors import KvlabError, nearest
from kvlab.lib import yamls
from kvlab.papers.conditions import Combination, Condition, Covers, Within

if TYPE_CHECKING:
    import pandas

HOLDS, DIRECTION, FAILS, UNMEASURED = "holds", "holds in direction only", "fails", "not measured"
VERDICTS = (HOLDS, DIRECTION, FAILS, UNMEASURED)


class Claim(BaseModel):
    """One sentence of a paper that a number can confirm or refute.

    kind: "finding" could come out otherwise; "control" checks the measurement itself; "identity" follows from
    arithmetic and cannot fail unless the code is wrong; "example" is a worked example; "recomputed" works out anew what
    the paper's own figures and formulas say, and no model runs for it.
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
    kind: Literal["finding", "control", "identity", "example", "recomputed"] = "finding"
    experiment: str | None = None
    stands_in: str = ""
    note: str = ""
    untested: str = ""
    figure: str = ""
    direction: Condition
    size: Condition

    @model_validator(mode="after")
    def _has_what_its_tests_need(self) -> Claim:
        for test in ("direction", "size"):
            if self.paper_value is None and _needs_paper_value(getattr(self, test)):
                raise ValueError(f"the test of {test} compares with the paper's value, but paper_value is null")
        return self

    @model_validator(mode="after")
    def _measured_or_excused(self) -> Claim:
        if self.experiment is None and not self.untested.strip():
            raise ValueError(f"no experiment measures {self.id}: say in `untested` why not, and what would test it")
        if self.experiment is not None and self.untested:
            raise ValueError(f"{self.id} has an `untested` reason, although {self.experiment} measures it")
        return self

    @property
    def metrics(self) -> set[str]:
        """Every metric that this claim and its tests read."""
        return {self.metric} | self.direction.needs(self.metric) | self.size.needs(self.metric)


def _needs_paper_value(test: Condition) -> bool:
    if isinstance(test, Combination):
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
    raw, lines = yamls.load(path)
    if not isinstance(raw, dict):
        raise KvlabError(f"{path.name}: a paper's file is a mapping with name, label, title and claims")
    defaults = {"paper": raw.get("name"), "experiment": raw.pop("experiment", None)}
    claimed = raw.get("claims") or []
    if isinstance(claimed, list):
        raw["claims"] = [{**defaults, **claim} if isinstance(claim, dict) else claim for claim in claimed]
    try:
        paper = Paper.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise KvlabError(f"{path.name}{lines.shown(first['loc'])}: {at}: {first['msg']}") from None
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
    return [
        claim
        for p in papers()
        for claim in p.claims
        if (paper is None or claim.paper == paper) and (experiment is None or claim.experiment == experiment)
    ]


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


def judge(
    claim: Claim, metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]] | None = None
) -> Verdict:
    """The verdict on `claim` from measured numbers.

    metrics: name -> value; intervals: name -> (low, high), else taken from the metrics NAME/low and NAME/high. A number
    that is not finite counts as missing. The verdict rests on the point estimates, but for tests that ask about the
    interval itself; where it contains the point at which the test of direction turns, `why` says so.
    """
    ends = {
        f"{name}/{end}": number
        for name, pair in (intervals or {}).items()
        for end, number in zip(("low", "high"), pair, strict=True)
    }
    known = {name: float(number) for name, number in {**metrics, **ends}.items() if math.isfinite(number)}
    fields = {
        "value": known.get(claim.metric),
        "low": known.get(f"{claim.metric}/low"),
        "high": known.get(f"{claim.metric}/high"),
    }
    absent = sorted(claim.metrics - known.keys())
    if absent:
        unmeasured = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        return Verdict(**fields, verdict=UNMEASURED, why=claim.untested or f"no run has measured {unmeasured}")

    value_of = known.__getitem__
    right_way, direction = claim.direction.check(claim.metric, value_of, claim.paper_value)
    right_size, size = claim.size.check(claim.metric, value_of, claim.paper_value)
    doubt = _doubt(claim, known)
    if not right_way:
        return Verdict(**fields, verdict=FAILS, why=f"Direction missed: {direction}{doubt}.")
    if not right_size:
        return Verdict(**fields, verdict=DIRECTION, why=f"Direction met: {direction}. Size missed: {size}{doubt}.")
    same = size == direction
    return Verdict(
        **fields,
        verdict=HOLDS,
        why=f"Direction met: {direction}" + ("" if same else f". Size met: {size}") + f"{doubt}.",
    )


def _doubt(claim: Claim, known: Mapping[str, float]) -> str:
    """A remark where the interval of what the direction is tested on contains the point at which the test turns."""
    tests = claim.direction.tests if claim.direction.kind == "all_of" else [claim.direction]
    for test in tests:
        turn = test.threshold(known.__getitem__, claim.paper_value)
        name = test.metric or claim.direction.metric or claim.metric
        low, high = known.get(f"{name}/low"), known.get(f"{name}/high")
        if turn is not None and low is not None and high is not None and low <= turn <= high:
            return (
                f". The interval [{low:.4g}, {high:.4g}] contains {turn:.4g}, where the direction turns: read the "
                "verdict with care"
            )
    return ""
