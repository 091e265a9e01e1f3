"""Claims: the models, and the loader of a paper's file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvlab.errors import KvlabError, nearest
from kvlab.lib import references, yaml_loader
from kvlab.lib.unknown_keys import first_problem, unknown_key
from kvlab.papers.tests import Combination, Condition, Covers, NotCompared, PrintsAs, Within

HOLDS: Final = "holds"
DIRECTION: Final = "holds in direction only"
WEAK: Final = "holds by a weak stand-in"
"""`stand_ins.weighed` makes this of both."""
FAILS: Final = "fails"
UNDECIDED: Final = "undecided"
UNMEASURED: Final = "not measured"
VERDICTS = (HOLDS, DIRECTION, WEAK, FAILS, UNDECIDED, UNMEASURED)
SAMPLED: Final = ("finding", "question")
"""The kinds that say something about a method, and that share findings."""
FULL_ONLY: Final = "full profile only"
NO_RUN: Final = "no run has measured"
"""The reason of a claim that is not measured because the quick profile leaves its numbers out."""
PHRASE_WORDS: Final = 25
StandIn = Literal["recall", "window_recall", "step_recall", "mass_lost", "output_error", "likelihood"]
"""The measures that replace scores of tasks, and whose worth `what_predicts_the_answer` measures."""
KINDS_DIFFER: Final = "Kinds of text differ"
CLUSTERED: Final = "Undecided when clustered by genre"
"""How a comparison begins to say that a mean is one of these texts more than of texts."""


class Scale(BaseModel):
    """A model of a paper, or several whose mean it prints: what it is called, and the number of its parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    parameters: int = Field(gt=0)


class Phrases(BaseModel):
    """The sentences for a claim's result, one for each way that its numbers can come out.

    Each is one sentence of at most `PHRASE_WORDS` words without numbers of ours. It has its subject first, the present
    tense, and a full stop. The renderer adds value, interval and unit.

    Attributes:
        met: where the test of direction is met.
        missed: where it is missed.
        undecided: where the interval contains the point at which the direction turns.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    met: str
    missed: str
    undecided: str

    @field_validator("met", "missed", "undecided")
    @classmethod
    def _one_short_sentence(cls, phrase: str) -> str:
        words = phrase.split()
        if not words or not phrase.endswith(".") or not phrase[0].isupper():
            raise ValueError("a phrase is a sentence: a capital first, a full stop last")
        if len(words) > PHRASE_WORDS:
            raise ValueError(f"a phrase has at most {PHRASE_WORDS} words; this one has {len(words)}: {phrase!r}")
        return phrase


class Claim(BaseModel):
    """One sentence of a paper that a number can confirm or refute.

    kind: "finding" could come out otherwise. "question" could, too, but it is ours: the paper does not state it, and it
    is no finding. "control" checks the measurement itself. "identity" follows from arithmetic and fails only if the
    code is wrong. "example" is a worked example. "recomputed" computes the paper's own figures and formulas again; no
    model runs for it. "timing" is decided by a clock, or by the peak of a process' memory.
    finding names the finding that this claim is part of. Claims on the same two contenders and the same texts share a
    name and count once. Their measures or budgets differ.
    stands_in says which measure replaces the paper's own where that cannot be taken here; empty where it is the same.
    A finding whose paper prints no number in the unit of that measure tests only the direction.
    stand_in names that measure, if it replaces scores of tasks and is one whose worth is measured (`stand_ins`).
    untested says, of a claim that no experiment here can measure, why not and what would test it.
    figure is the name under which the experiment keeps the picture that shows it.
    phrases say in words what its numbers say.
    profile is the least profile of the experiment that measures it.
    model is the paper's model that its number is of: in a file a name out of the paper's `models`, else their first.
    lacking says why a run of the experiment may leave metrics out, by the start of their names. Reasons are a model's
    shape, or tables that were never learnt. A paper's file says it once for all of its claims.
    provided is a test that must be met before the numbers count for the claim. For example, a table learnt from a log
    needs a log with a signal. Where it is not met, the claim is not measured.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    paper: str
    where: str
    summary: str
    metric: str
    paper_value: float | None
    unit: str = ""
    kind: Literal["finding", "question", "control", "identity", "example", "recomputed", "timing"] = "finding"
    finding: str = ""
    experiment: str | None = None
    stands_in: str = ""
    stand_in: StandIn | None = None
    note: str = ""
    untested: str = ""
    figure: str = ""
    phrases: Phrases | None = None
    profile: Literal["quick", "full"] = "quick"
    model: Scale | None = Field(None, repr=False)
    lacking: dict[str, str] = Field({}, repr=False)
    provided: Condition | None = None
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
        if self.experiment is None and self.profile != "quick":
            raise ValueError(f"{self.id} names a profile, although no experiment measures it")
        return self

    @model_validator(mode="after")
    def _counted_once(self) -> Claim:
        if self.finding and self.kind not in SAMPLED:
            raise ValueError(f"{self.id} names a finding, but it is of the kind {self.kind}: only findings share one")
        return self

    @model_validator(mode="after")
    def _says_what_stands_in(self) -> Claim:
        if self.stand_in and not self.stands_in:
            raise ValueError(f"{self.id} names a stand_in: say in `stands_in` what it replaces")
        return self

    @model_validator(mode="after")
    def _compares_what_can_be(self) -> Claim:
        parts = [self.direction, *within_tests(self.direction), *within_tests(self.size)]
        if any(isinstance(part, NotCompared) for part in parts):
            raise ValueError("not_compared replaces a test of size: only the size as a whole can be left out")
        sizes = [self.size, *within_tests(self.size)]
        if self.kind == "recomputed" and any(isinstance(part, Within) and part.of == "factor" for part in sizes):
            raise ValueError("a factor is no test of arithmetic: what is recomputed is judged by `prints_as`")
        return self

    @property
    def comparable(self) -> bool:
        """Whether our number may be compared with the paper's: they have one unit, and are of one comparison."""
        return not isinstance(self.size, NotCompared)

    @property
    def unit_is_papers(self) -> bool:
        """Whether `unit` is that of the paper's number alone, and ours has another."""
        return self.paper_value is not None and isinstance(self.size, NotCompared) and not self.size.same_unit

    @property
    def direction_alone(self) -> bool:
        """Whether the claim has another measure than the paper's: then only its direction counts, not its size."""
        return self.kind in SAMPLED and bool(self.stands_in) and self.paper_value is None

    @property
    def group(self) -> str:
        """How it is counted: as "findings", "questions", "checks", "recomputed" or "timings".

        Findings and questions say something about a method. Checks are controls, identities and examples, and are about
        the instrument. A recomputed claim is about the paper's own figures, and a timing about a machine.
        """
        of_kind = {"finding": "findings", "question": "questions", "recomputed": "recomputed", "timing": "timings"}
        return of_kind.get(self.kind, "checks")

    @property
    def fact(self) -> tuple[str, str]:
        """The key that it is counted under: its paper, and its finding or else its own id."""
        return self.paper, self.finding or self.id

    @property
    def metrics(self) -> set[str]:
        """Every metric that this claim and its tests read."""
        tests = [self.direction, self.size, *([self.provided] if self.provided else [])]
        return {self.metric}.union(*(test.needs(self.metric) for test in tests))

    def why_lacking(self, metrics: Iterable[str]) -> str | None:
        """The reason (`lacking`) for which a run may leave out one of these metrics; None where there is none."""
        names = tuple(metrics)
        return next((why for start, why in self.lacking.items() if any(name.startswith(start) for name in names)), None)


def within_tests(test: Condition) -> list[Condition]:
    """All tests within this one."""
    parts = test.tests if isinstance(test, Combination) else []
    return [inner for part in parts for inner in (part, *within_tests(part))]


def _needs_paper_value(test: Condition) -> bool:
    every = [test, *within_tests(test)]
    return any(isinstance(part, Within | Covers | PrintsAs) and part.to is None for part in every)


class Paper(BaseModel):
    """A paper: its short name, title, and the claims taken from it.

    Attributes:
        title: by default that of the paper that kvlab knows by this name.
        says: what the paper claims, in at most three sentences of ours.
        models: name -> number of parameters of those that the quoted numbers are of, the main one first.
        replaces: whether a workspace's file replaces kvlab's own file of that name, as a copy to work on does.
        quoted: the findings that people quote, by their names (a claim's id where it is a finding of its own). `kvlab
            stability` measures their verdicts again with other seeds and other texts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    label: str
    title: str
    says: str = ""
    models: dict[str, int] = Field(default_factory=dict)
    replaces: bool = False
    quoted: list[str] = Field(default_factory=list)
    claims: list[Claim]

    @property
    def source(self) -> references.Paper | None:
        """Authors, year and addresses, as in `references.PAPERS`; None for a paper that kvlab does not know."""
        known = references.PAPERS.get(self.name)
        return known if known and known.title == self.title else None

    @model_validator(mode="after")
    def _mixes_no_kinds_in_a_finding(self) -> Paper:
        kinds: dict[str, str] = {}
        for claim in self.claims:
            if claim.finding and kinds.setdefault(claim.finding, claim.kind) != claim.kind:
                raise ValueError(
                    f"the finding {claim.finding!r} has claims of the kinds finding and question: part them"
                )
        return self

    @model_validator(mode="after")
    def _quotes_what_is_measured(self) -> Paper:
        measured = [claim.fact[1] for claim in self.claims if claim.kind in SAMPLED and not claim.untested]
        for place, name in enumerate(self.quoted):
            if name not in measured:
                raise ValueError(nearest(name, measured, "measured finding in `quoted`"))
            if name in self.quoted[:place]:
                raise ValueError(f"the finding {name!r} is quoted twice")
        return self


class Verdict(BaseModel):
    """The verdict of our numbers on a claim: value with interval (None where absent), verdict, and the comparison made.

    genre_low, genre_high: the interval whose unit is the genre, where there are three genres and more.
    power: whether an effect as large as the paper's would have been seen. Only an undecided claim with a comparable
    number of the paper has it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float | None
    low: float | None = None
    high: float | None = None
    genre_low: float | None = None
    genre_high: float | None = None
    verdict: Literal[
        "holds", "holds in direction only", "holds by a weak stand-in", "fails", "undecided", "not measured"
    ]
    power: Literal["", "seen", "not seen"] = ""
    why: str = Field(description="one or two sentences")

    @property
    def open_by_genre(self) -> bool:
        """Whether it is decided by the intervals over documents, and not by those over genres."""
        return CLUSTERED in self.why

    @property
    def of_these_texts(self) -> str:
        """The sentence that kinds of text differ by more than the effect itself; empty where they do not."""
        _, found, rest = self.why.partition(KINDS_DIFFER)
        return f"{found}{rest}"


def load_file(path: str | Path) -> Paper:
    """Load a paper's claims from a YAML file.

    `paper`, `experiment` and `lacking` of a claim default to those of the file, `model` to the first of its `models`.
    `title` defaults to that of the paper that kvlab knows by its name.

    Raises KvlabError, in one sentence, for YAML that does not parse, unknown keys and missing tests.
    """
    path = Path(path)
    raw, lines = yaml_loader.load(path)
    if not isinstance(raw, dict):
        raise KvlabError(f"{path.name}: a paper's file is a mapping with name, label, title and claims")
    defaults = {"paper": raw.get("name"), "experiment": raw.pop("experiment", None), "lacking": raw.pop("lacking", {})}
    known = references.PAPERS.get(raw["name"]) if isinstance(raw.get("name"), str) else None
    if known:
        raw.setdefault("title", known.title)
    claimed = raw.get("claims") or []
    models = raw.get("models")
    if isinstance(models, dict):
        models = raw["models"] = {name: _whole(number) for name, number in models.items()}
    if isinstance(claimed, list):
        raw["claims"] = [
            _sized({**defaults, **claim}, models if isinstance(models, dict) else {}, path)
            if isinstance(claim, dict)
            else claim
            for claim in claimed
        ]
    try:
        paper = Paper.model_validate(raw)
    except ValidationError as error:
        first = first_problem(error)
        at = ".".join(str(part) for part in first["loc"])
        unknown = first["type"] == "extra_forbidden"
        what = unknown_key(Paper, first["loc"]) if unknown else f"{at}: {first['msg']}"
        raise KvlabError(f"{path.name}{lines.shown(first['loc'])}: {what}") from None
    names = [claim.id for claim in paper.claims]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise KvlabError(f"{path.name}: the claim id {sorted(twice)[0]!r} occurs twice")
    return paper


def _whole(number: Any) -> Any:
    """8.0e9 as 8000000000: YAML reads what is written so as a float, or as a text where the sign of e is missing."""
    try:
        return int(float(number)) if isinstance(number, float | str) and float(number).is_integer() else number
    except (ValueError, OverflowError):
        return number


def _sized(claim: dict[str, Any], models: dict[str, Any], path: Path) -> dict[str, Any]:
    """The claim with its paper's model instead of that one's name."""
    name = claim.get("model", next(iter(models), None))
    if not isinstance(name, str):  # none is named, or what is there is no name
        return claim
    if name not in models:
        raise KvlabError(f"{path.name}: {nearest(str(name), models, 'model in `models`')}")
    return {**claim, "model": {"name": name, "parameters": models[name]}}
