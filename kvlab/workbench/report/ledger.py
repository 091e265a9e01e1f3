"""The claims ledger as data: for every claim and model the newest finished run that measured it, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.papers import many_claims
from kvlab.papers.stand_ins import Prediction, Predictions, prediction_of, weighed
from kvlab.workbench import project
from kvlab.workbench.report import runs, stand_ins
from kvlab.workbench.report.claim_mistakes import mistakes
from kvlab.workbench.report.ledger_models import Subject, subjects
from kvlab.workbench.report.provenance import Origin
from kvlab.workbench.store import database
from kvlab.workbench.store.findings_table import numbers

if TYPE_CHECKING:
    import pandas
    from mlflow.entities import Run


COLUMNS = [
    "id",
    "paper",
    "where",
    "claim",
    "metric",
    "paper_value",
    "value",
    "low",
    "high",
    "verdict",
    "model",
    "run_id",
    "kind",
    "finding",
    "power",
    "q",
    "genre_low",
    "genre_high",
    "machine",
    "why",
]
UNTESTED = "cannot be tested here"
STATES = (*papers.VERDICTS, UNTESTED)
"""The states of a claim: its verdict, or UNTESTED where no experiment here can measure it."""
WEAKEST = (
    papers.FAILS,
    papers.UNDECIDED,
    papers.WEAK,
    papers.DIRECTION,
    papers.HOLDS,
    papers.UNMEASURED,
    UNTESTED,
)
"""The states in the order in which they decide a finding of several claims. A claim that was not measured says nothing
of it."""
HOLDING = (papers.HOLDS, papers.DIRECTION, papers.WEAK)
"""The states in which the direction agrees; only "fails" says that it does not."""
GROUPS = ("findings", "questions", "checks", "recomputed", "timings")


def turns(states: Iterable[str]) -> bool:
    """Whether one of them holds and another fails; undecided speaks for neither."""
    found = set(states)
    return papers.FAILS in found and not found.isdisjoint(HOLDING)


def turns_by_either(shown: Mapping[str, str], alike: Mapping[str, str]) -> bool:
    """Whether one model holds and another fails, by both of two profiles.

    Args:
        shown: model -> its state by its own most thorough profile.
        alike: model -> its state by the most thorough profile that all models have.
    """
    firm = [{state, alike.get(model)} for model, state in shown.items()]
    return {papers.FAILS} in firm and any(states <= set(HOLDING) for states in firm)


@dataclass
class Entry:
    """A claim on a model: the verdict of our numbers on it, and their source.

    The source is a run of the store, or a kept ledger's record of one (`kept`); both are None where nothing was
    measured. `q` is that of its direction among all that were tested on the model by the profile (`set_q`); None for
    others. `verdict` is that of the claim's tests, and a ledger keeps it. `shown` also takes into account how well the
    claim's stand-in predicts answers on this model (`predictions`).
    """

    claim: papers.Claim
    verdict: papers.Verdict
    run: Run | None = None
    model: str = ""
    kept: Origin | None = None
    alike: Entry | None = field(default=None, repr=False, compare=False)
    q: float | None = field(default=None, repr=False, compare=False)
    predictions: Predictions = field(default_factory=dict, repr=False, compare=False)

    @property
    def shown(self) -> papers.Verdict:
        return weighed(self.claim, self.verdict, self.predictions)

    @property
    def weak(self) -> bool:
        """Whether a weak stand-in has changed the verdict of the claim's tests."""
        return self.shown.verdict != self.verdict.verdict

    @property
    def prediction(self) -> Prediction | None:
        """How well the claim's stand-in predicts answers on this model, where it has one and that was measured."""
        return prediction_of(self.claim, self.predictions)

    @property
    def compared(self) -> Entry:
        """The entry for a comparison of models: of the same profile on all of them."""
        return self.alike or self

    @property
    def measured(self) -> bool:
        return self.run is not None or self.kept is not None

    @property
    def origin(self) -> Origin:
        """Profile, signature, commit, machine and seconds of its run; all empty where nothing was measured."""
        return Origin.of(self.run) if self.run else self.kept or Origin()

    @property
    def state(self) -> str:
        return UNTESTED if self.claim.untested else self.shown.verdict

    @property
    def tested(self) -> str:
        """As `state`, by the claim's tests alone: what a run and a kept ledger are compared by."""
        return UNTESTED if self.claim.untested else self.verdict.verdict

    @property
    def full_only(self) -> bool:
        """Whether it has no number because only the full profile measures it."""
        verdict = self.verdict
        return self.claim.profile == "full" and verdict.verdict == papers.UNMEASURED and verdict.value is None

    @property
    def by_chance(self) -> bool:
        """Whether its direction is decided by itself, and does not survive among all that were tested."""
        return self.decided and self.q is not None and self.q >= many_claims.LEVEL

    @property
    def decided(self) -> bool:
        """Whether its direction has a q, and its tests decide it."""
        return self.q is not None and self.tested in many_claims.DECIDED

    @property
    def group(self) -> str:
        """How it is counted (`papers.Claim.group`)."""
        return self.claim.group


@dataclass
class Tally:
    """How many findings have which state, and how many claims of each other group.

    full_only: how many of the findings that are not measured wait for the full profile.
    """

    findings: Counter[str] = field(default_factory=Counter)
    questions: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    recomputed: Counter[str] = field(default_factory=Counter)
    timings: Counter[str] = field(default_factory=Counter)
    full_only: int = 0

    @classmethod
    def of(cls, judged: Iterable[Entry]) -> Tally:
        """Count these entries, of one model. A finding of several claims counts once, as its weakest claim stands."""
        counted = cls()
        facts: dict[tuple[str, str], list[Entry]] = {}
        for entry in judged:
            if entry.group == "findings":
                facts.setdefault(entry.claim.fact, []).append(entry)
            else:
                getattr(counted, entry.group)[entry.state] += 1
        for mine in facts.values():
            state = min((entry.state for entry in mine), key=WEAKEST.index)
            counted.findings[state] += 1
            counted.full_only += state == papers.UNMEASURED and any(entry.full_only for entry in mine)
        return counted

    def waiting(self, state: str) -> str:
        """How many of the findings in a state wait for the full profile: "2 need the full profile"; empty for none."""
        if state != papers.UNMEASURED or not self.full_only:
            return ""
        return f"{self.full_only} {'needs' if self.full_only == 1 else 'need'} the full profile"

    def met(self, group: str, states: Sequence[str] = (papers.HOLDS,)) -> str:
        """How many of a group's measured claims are in one of these states: "3 of 4"; empty for a group without any."""
        counted = getattr(self, group)
        measured = counted.total() - counted[papers.UNMEASURED] - counted[UNTESTED]
        return f"{sum(counted[state] for state in states)} of {measured}" if measured else ""

    @property
    def checks_missed(self) -> int:
        """How many checks do not hold: either our instrument is wrong there, or the paper's accounting."""
        return sum(self.checks[state] for state in (papers.FAILS, papers.DIRECTION, papers.UNDECIDED))


def by_paper(judged: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Label of a paper -> its entries."""
    sorted_out: dict[str, list[Entry]] = {paper.label: [] for paper in papers.of_project()}
    labels = {paper.name: paper.label for paper in papers.of_project()}
    for entry in judged:
        sorted_out[labels[entry.claim.paper]].append(entry)
    return sorted_out


def entries(model: str | Sequence[str] | None = None, profile: str | None = None) -> list[Entry]:
    """Every claim with its verdict, once for each model that measured any: claim by claim, the smallest model first.

    A claim is judged on the newest finished run of its experiment on that model that has all metrics it needs. Failing
    that, it is judged on the newest run that has its own metric. Interactive runs do not count. Without a store nothing
    is measured: there is no error, and each claim has one entry, without a model.

    Args:
        model: only this one, or these (names, with or without their hash); all if there is none.
        profile: only runs of this profile.
    """
    tags = {"profile": _quotable(profile)} if profile else {}
    every, newest = claims(), runs.newest(measuring(), "model", **tags)
    wanted = names(model)
    known = sorted({name for found in newest.values() for name in found if is_one_of(name, wanted)})
    verdicts = {
        name: _judged(every, name, {of: found[name] for of, found in newest.items() if name in found}, tags)
        for name in known
    }
    stand_ins.weigh(chain.from_iterable(verdicts.values()), stand_ins.of_store())
    return side_by_side({name: mine for name, mine in verdicts.items() if any(entry.run for entry in mine)})


def _judged(
    every: Sequence[papers.Claim], model: str, newest: Mapping[str, Run], tags: Mapping[str, str]
) -> list[Entry]:
    """All claims on one model, whose last finished job in each experiment is `newest`."""
    found: dict[str, Entry] = {}
    connection = database.client()
    for experiment, last in newest.items():
        of_model = runs.Runs(connection, last, **tags)
        for claim in every:
            if claim.experiment == experiment:
                run = of_model.measuring(claim)
                # A run without the claim's metric measured nothing of it, but shows the judge the missing numbers.
                found[claim.id] = Entry(claim, papers.judge(claim, numbers(run or last)), run, model)
    judged = [found.get(claim.id) or Entry(claim, papers.judge(claim, {}), None, model) for claim in every]
    set_q(judged)
    return judged


def set_q(mine: Iterable[Entry]) -> None:
    """Give the entries of one model their `q`: the tests of a profile are those that all its entries make."""
    of_profiles: dict[str, list[Entry]] = {}
    for entry in mine:
        of_profiles.setdefault(entry.origin.profile, []).append(entry)
    for tested in of_profiles.values():
        found = many_claims.q_values([many_claims.p_value(entry.claim, entry.verdict) for entry in tested])
        for entry, q in zip(tested, found, strict=True):
            entry.q = q


def side_by_side(of_models: Mapping[str, Sequence[Entry]]) -> list[Entry]:
    """Join the entries of models (an entry for each claim) to one list: claim by claim, the smallest model first.

    Without any model, every claim has one unmeasured entry.
    """
    if not of_models:
        return [Entry(claim, papers.judge(claim, {})) for claim in claims()]
    order = [subject.name for subject in subjects(entry for mine in of_models.values() for entry in mine)]
    return [entry for row in zip(*(of_models[name] for name in order), strict=True) for entry in row]


def claims() -> list[papers.Claim]:
    """The claims that the project's ledger holds."""
    return [claim for paper in papers.of_project() for claim in paper.claims]


def finding(claim: papers.Claim) -> str:
    """The name of the finding that a claim belongs to; empty for a claim that is neither a finding nor a question."""
    return claim.fact[1] if claim.kind in papers.SAMPLED else ""


def measuring() -> set[str]:
    """The experiments that claims rest on."""
    return {claim.experiment for claim in claims() if claim.experiment}


def profiles() -> list[str]:
    """The profiles of the finished jobs that claims may rest on."""
    return sorted(set().union(*runs.newest(measuring(), "kvlab.profile").values()) - {""})


def names(model: str | Sequence[str] | None) -> set[str]:
    """Names without their hashes."""
    return {name.split("@")[0] for name in ([model] if isinstance(model, str) else model or ()) if name}


def is_one_of(model: str, wanted: Collection[str]) -> bool:
    """Whether a model is asked for: by its name, or by what a page calls it where that is a path; any is, for none."""
    return not wanted or not {*names(model), Subject(model).label}.isdisjoint(wanted)


def by_model(judged: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Model -> its entries, in the order of `entries`."""
    sorted_out: dict[str, list[Entry]] = {}
    for entry in judged:
        sorted_out.setdefault(entry.model, []).append(entry)
    return sorted_out


def refuse(model: str | Sequence[str] | None, profile: str | None) -> NoReturn:
    """Raise KvlabError that says why no run of these models and that profile measured a claim."""
    if mistaken := mistakes():
        raise KvlabError(mistaken[0])
    models = set().union(*runs.newest(measuring(), "model").values())
    if not models:
        project.checkout()
        tried = runs.trials(measuring())
        why = "only trials have finished (runs with -p)" if tried else "no experiment has finished yet"
        better = (
            "write its parameters into its YAML and run it without -p"
            if tried
            else "run one of `kvlab list experiments`"
        )
        raise KvlabError(f"{why}, so there is nothing to report; {better}, or all by `kvlab reproduce`")
    there = {
        "model": names(sorted(models)),
        "profile": set(profiles()),
    }
    asked = {name for name in names(model) if not any(is_one_of(known, {name}) for known in models)}
    for what, missing in (("profile", {profile} - there["profile"] if profile else set()), ("model", asked)):
        if missing:
            listed = ", ".join(sorted(there[what] - {""})) or "none"
            raise KvlabError(f"no run of the {what} {min(missing)!r} has finished; there are runs of: {listed}")
    raise KvlabError("none of these runs has measured a claim; run `kvlab reproduce` first")


def _quotable(text: str) -> str:
    if "'" in text:
        raise KvlabError(f"{text!r} is no profile: a name has no quotes")
    return text


def ledger(model: str | Sequence[str] | None = None, profile: str | None = None) -> pandas.DataFrame:
    """The ledger as a table with the columns `COLUMNS`; the numbers are floats, NaN where there is none."""
    return frame(entries(model, profile))


def frame(judged: Iterable[Entry]) -> pandas.DataFrame:
    """The table of these entries."""
    import pandas

    table = pandas.DataFrame([_row(entry) for entry in judged], columns=COLUMNS)
    numbers = ["paper_value", "value", "low", "high", "q", "genre_low", "genre_high"]
    return table.astype(dict.fromkeys(numbers, "float64"))


def _row(entry: Entry) -> dict[str, Any]:
    claim, verdict = entry.claim, entry.shown
    return {
        "id": claim.id,
        "paper": claim.paper,
        "where": claim.where,
        "claim": claim.summary,
        "metric": claim.metric,
        "paper_value": claim.paper_value,
        "value": verdict.value,
        "low": verdict.low,
        "high": verdict.high,
        "verdict": verdict.verdict,
        "model": entry.model,
        "run_id": entry.run.info.run_id if entry.run else "",
        "kind": claim.kind,
        "finding": finding(claim),
        "power": verdict.power,
        "q": entry.q,
        "genre_low": verdict.genre_low,
        "genre_high": verdict.genre_high,
        "machine": entry.origin.machine,
        "why": verdict.why,
    }
