"""Tables and numbers of the claims that a page names, from the kept ledgers.

    <!-- claims -->                    a table of all claims named above this mark, since the last heading or table
    <!-- value CLAIM MODEL -->         the value on a model with its interval, inside a sentence

    <!-- other claims of PAPER -->    a table of the paper's claims that no table above shows, and what measures them

All end at `<!-- end -->`. A name between backticks names a claim; `NAME*` names all claims that begin so.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvlab import papers
from kvlab.papers.claim import within_tests
from kvlab.render.phrases import listed, number
from kvlab.render.sentences import WORTH, ours, phrase
from kvlab.workbench.report import model_agreement, model_trends, stability
from kvlab.workbench.report.ledger import UNTESTED, Entry
from kvlab.workbench.report.ledger_models import Subject

CLAIMS = re.compile(r"(<!-- claims -->\n).*?(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value ([\w.]+) ([\w.-]+) -->).*?(<!-- end -->)", re.DOTALL)
OTHER = re.compile(r"(<!-- other claims of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MADE = re.compile(r"<!-- (?:generated|claims|other|scores|value)\b.*?<!-- end -->", re.DOTALL)
HEADING = re.compile(r"^##+ .*$", re.MULTILINE)
NAME = re.compile(r"`([a-z]\w*\.\w[\w.]*\*?)`")
OF_THE_PAPER = ("recomputed", "example")
"""Kinds of claims that no model changes."""
DAGGER = "†"
OTHERS = (
    f"{DAGGER} Another number of the claim decides, alone or with this one. A table below has it where the claim fails "
    "or is undecided. `kvlab report --from docs/ledger` has all, under *The comparison*."
)
UNWEIGHED = "‡"
NOT_WEIGHED = (
    f"{UNWEIGHED} Nobody has measured on this model whether the measure predicts answers. So the verdict cannot be "
    "weakened by that."
)
BY_GENRE, FLIPS, WITHOUT_PARTS, BY_CHANCE = "§", "¶", "◇", "◆"
MARKS = {
    DAGGER: OTHERS,
    UNWEIGHED: NOT_WEIGHED,
    BY_GENRE: f"{BY_GENRE} Undecided if the documents of one kind of text count as one.",
    FLIPS: f"{FLIPS} The quick profile gave another verdict with another seed or with other texts.",
    WITHOUT_PARTS: (
        f"{WITHOUT_PARTS} This model has no learnt tables for CompilerKV and no head scores for DuoAttention, so "
        "neutral ones ran."
    ),
    BY_CHANCE: f"{BY_CHANCE} The weights of heads come from 40 prompts of kvlab, and are no better than chance.",
}
"""What marks in a cell mean."""
LACKING = ("claim", "not measured on", "because")
FULL_PROFILE = "Only the full profile measures it, and that has not run there."
NO_NUMBER = "No kept run has this number."
DECIDING = ("claim", "on", "verdict", "by which numbers (asked to exceed 0, if nothing else is said)")
REASONS = {
    papers.FAILS: re.compile(r"Direction missed: (.*?)(?:\. [A-Z]|\.?$)", re.DOTALL),
    papers.UNDECIDED: re.compile(r"Undecided: (.*?)(?:, where the direction turns|\. [A-Z]|\.?$)", re.DOTALL),
    papers.DIRECTION: re.compile(r"Size missed: (.*?)(?:\. [A-Z]|\.?$)", re.DOTALL),
}
"""The part of a reason that names the numbers that decide, by verdict."""
NUMBERS = (
    (re.compile(r"^(\S+)( = )"), r"`\1`\2"),
    (re.compile(r"^the interval \[(.*), (.*)\] of (\S+) contains"), r"`\3` from \1 to \2 contains"),
    (re.compile(r"^the interval of ([^\s,]+), (\S+) to ([^\s,]+),"), r"`\1` from \2 to \3,"),
)
PLACE = re.compile(r"^(figure|section|table|theorem|appendix)([\dA-Z].*)$")
"""A place as a claim's name has it: "section4_2"."""
KINDS = {
    "question": "*A question of ours.* ",
    "control": "*A check.* ",
    "identity": "*A check.* ",
    "timing": "*A timing.* ",
}
"""How a row begins whose claim is no finding."""
PRINTED = (
    *("printed/", "table3/", "figure9/logged/"),
    *("published/average_gap", "published/score_gap", "published/middle_less_rest"),
)
"""Metrics that follow from printed numbers, and from answers and logs that authors published."""
MOVES = ("findings", "questions")
"""The groups of claims that a longer profile may decide otherwise."""


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


@dataclass(frozen=True)
class Certainty:
    """Measurements of how sure a verdict is.

    Attributes:
        weighed: the labels of the models on which the worth of stand-ins was measured.
        flips: claims, with the label of a model, whose verdict was another one with another seed or with other texts.
    """

    weighed: Container[str] = ()
    flips: Container[tuple[str, str]] = ()

    def marked(self, entry: Entry, model: str) -> str:
        return cell(entry, model in self.weighed, (entry.claim.id, model) in self.flips)


def fill(text: str, every: Sequence[Entry], order: Sequence[Subject], certainty: Certainty = Certainty()) -> str:
    """A page with its tables of claims and its values as the ledgers have them.

    Raises:
        KeyError: a value is of a claim or of a model that is not kept.
    """
    rows: dict[str, dict[str, Entry]] = {}
    labels = {subject.name: subject.label for subject in order}
    for entry in every:
        rows.setdefault(entry.claim.id, {})[labels[entry.model]] = entry

    def value(found: re.Match[str]) -> str:
        return f"{found[1]}{ours(rows[found[2]][found[3]].verdict)}{found[4]}"

    def of_section(found: re.Match[str]) -> str:
        return f"{found[1]}\n{_claims(named(text[: found.start()], rows), rows, certainty)}\n\n{found[2]}"

    def of_paper(found: re.Match[str]) -> str:
        return f"{found[1]}\n{_others(found[2], shown, rows, certainty)}\n\n{found[3]}"

    shown = {name for mark in CLAIMS.finditer(text) for name in named(text[: mark.start()], rows)}
    return OTHER.sub(of_paper, VALUE.sub(value, CLAIMS.sub(of_section, text)))


def named(above: str, known: Iterable[str]) -> list[str]:
    """The claims that a text names since its last heading or table of claims, in its order, each once."""
    section = CLAIMS.split(HEADING.split(above)[-1])[-1]
    names = NAME.findall(MADE.sub("", section))
    return list(
        dict.fromkeys(
            claim
            for name in names
            for claim in known
            if claim == name or (name.endswith("*") and claim.startswith(name[:-1]))
        )
    )


def _claims(names: Sequence[str], rows: Mapping[str, Mapping[str, Entry]], certainty: Certainty) -> str:
    entries = {name: rows[name] for name in names}
    first = {name: next(iter(mine.values())) for name, mine in entries.items()}
    printed = [name for name in names if without_model(first[name].claim)]
    untested = [name for name in names if first[name].state == UNTESTED]
    measured = [name for name in names if name not in (*printed, *untested)]
    parts = []
    if measured:
        models = list(entries[measured[0]])
        cells = [[certainty.marked(entries[name][model], model) for model in models] for name in measured]
        lines = [[_first_cell(first[name]), *mine] for name, mine in zip(measured, cells, strict=True)]
        parts.append(table([f"claim, and what {models[0]} says", *models], lines))
        parts += [note for mark, note in MARKS.items() if any(mark in each for mine in cells for each in mine)]
        if deciding := [line for name in measured for line in _deciding(name, entries[name])]:
            parts.append(table(DECIDING, deciding))
        if lacking := [line for name in measured for line in _lacking(name, entries[name])]:
            parts.append(table(LACKING, lacking))
    if printed:
        lines = [
            [
                f"`{name}`<br>{KINDS.get(claim.kind, '')}{claim.where}: {says(entry)}",
                _printed(claim),
                ours(entry.verdict),
                entry.state,
            ]
            for name, claim, entry in ((name, first[name].claim, first[name]) for name in printed)
        ]
        parts.append(table(["claim without a model", "by the paper", "worked out", "verdict"], lines))
    if untested:
        lines = [
            [f"`{name}`<br>{_about(claim)}", _short(claim.untested)]
            for name, claim in ((name, first[name].claim) for name in untested)
        ]
        parts.append(table(["claim not tested here, and what it compares", "why"], lines))
    return "\n\n".join(parts)


def _deciding(name: str, of_models: Mapping[str, Entry]) -> list[list[str]]:
    """List the numbers that decided a claim where its table does not show them: claim, model, verdict, numbers.

    They are the numbers of its size where that is missed. They are those of its direction where another number decides,
    or where less would be better.
    """
    claim = next(iter(of_models.values())).claim
    hidden, less_is_better = others_decide(claim), claim.direction.side < 0
    lines = []
    for label, entry in of_models.items():
        verdict = entry.verdict.verdict
        asked = hidden or verdict == papers.DIRECTION or (less_is_better and verdict == papers.FAILS)
        if asked and verdict in REASONS and (found := REASONS[verdict].search(entry.verdict.why)):
            limits = _limits(claim) if verdict == papers.UNDECIDED else ""
            lines.append([f"`{name}`", label, _state(entry), _numbers(found[1]) + limits])
    return lines


def _limits(claim: papers.Claim) -> str:
    """The names of the other numbers that the tests of direction take for their limits."""
    tests = [claim.direction, *within_tests(claim.direction)]
    names = dict.fromkeys(f"`{test.than}`" for test in tests if isinstance(getattr(test, "than", None), str))
    return f" (limit: {' or '.join(names)})" if names else ""


def _lacking(name: str, of_models: Mapping[str, Entry]) -> list[list[str]]:
    """List why a claim is not measured on some models: claim, models, reason."""
    reasons: dict[str, list[str]] = {}
    for label, entry in of_models.items():
        if entry.state == papers.UNMEASURED:
            reasons.setdefault(_why_not(entry), []).append(label)
    return [[f"`{name}`", listed(labels), why] for why, labels in reasons.items()]


def _why_not(entry: Entry) -> str:
    claim, why = entry.claim, entry.verdict.why
    if why.startswith(papers.FULL_ONLY):
        return FULL_PROFILE
    if why.startswith(papers.NO_RUN):
        known = claim.why_lacking([claim.metric])
        return f"{known.rstrip('.')}." if known else NO_NUMBER
    return f"{_short(why.partition(' (no ')[0])}."


def _numbers(reason: str) -> str:
    """The numbers that decided a test, each on a line, without the usual limit."""
    lines = [each.removesuffix(", asked to exceed 0") for each in reason.split("; ")]
    for form, shown in NUMBERS:
        lines = [form.sub(shown, line) for line in lines]
    return "<br>".join(lines)


def _others(paper: str, shown: Container[str], rows: Mapping[str, Mapping[str, Entry]], certainty: Certainty) -> str:
    """How the claims of a paper are measured, and a table of those that its page does not show."""
    mine = {name: next(iter(of_models.values())).claim for name, of_models in rows.items()}
    mine = {name: claim for name, claim in mine.items() if claim.paper == paper}
    measuring = listed([f"`{name}`" for name in sorted({claim.experiment or "" for claim in mine.values()} - {""})])
    how = (
        f"The experiments {measuring} measure this paper's claims. `kvlab list claims --paper {paper} --json` names "
        "each claim's experiment and tests. `kvlab run NAME --model MODEL --profile full` runs one again."
    )
    others = _claims([name for name in mine if name not in shown], rows, certainty)
    return f"{how} {_profiles([rows[name] for name in mine])}\n\n{_places(mine)}\n\n{others}"


def _places(claims: Iterable[str]) -> str:
    """All claims of a paper by the place in it that their names have, each name without that."""
    found: dict[str, list[str]] = {}
    for name in sorted(claims, key=_in_order):
        place, _, rest = name.split(".", 1)[1].partition(".")
        found.setdefault(place, []).append(f"`{rest or place}`")
    return table(["all claims on", "by name"], [[PLACE.sub(_spelt, place), ", ".join(n)] for place, n in found.items()])


def _in_order(name: str) -> list[tuple[str, int]]:
    """Names with numbers in the order of their numbers: figure2 before figure10."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D+)(\d*)", name.split(".")[1])]


def _spelt(found: re.Match[str]) -> str:
    return f"{found[1]} {found[2].replace('_', '.')}"


def _profiles(of_paper: Iterable[Mapping[str, Entry]]) -> str:
    """Which of a paper's numbers are of the full profile, by model, experiment and claim."""
    full: dict[str, set[str]] = {}
    quick: dict[str, dict[str, list[str]]] = {}
    for of_models in of_paper:
        for label, entry in of_models.items():
            if entry.measured and not without_model(entry.claim):
                experiment = f"`{entry.claim.experiment}`"
                if entry.origin.profile == "full":
                    full.setdefault(label, set()).add(experiment)
                else:
                    quick.setdefault(label, {}).setdefault(experiment, []).append(f"`{entry.claim.id}`")
    parts = []
    for label, names in full.items():
        others = quick.get(label, {})
        rest = sorted(others.keys() - names)
        rest += [claim for name in sorted(others.keys() & names) for claim in others[name]]
        parts.append(
            f"On {label} all numbers{f' but those of {listed(rest)}' if rest else ''} are of the full profile."
        )
    return " ".join([*parts, f"All {'other ' if parts else ''}numbers are of the quick profile."])


def without_model(claim: papers.Claim) -> bool:
    """Whether no model changes its number: it works with what a paper prints."""
    return claim.kind in OF_THE_PAPER or claim.metric.startswith(PRINTED)


def says(entry: Entry) -> str:
    """The claim's sentence as the report says it, with the unit of our number; else what is compared."""
    claim, phrases = entry.claim, entry.claim.phrases
    if phrases is None or entry.state == papers.UNMEASURED:
        return _about(claim)
    said = f"{phrase(phrases, entry.verdict)}{WORTH if entry.weak else ''}."
    return said if claim.unit_is_papers or not claim.unit else f"{said} ({claim.unit})"


def _first_cell(entry: Entry) -> str:
    claim = entry.claim
    prints = ""
    if entry.group != "checks" and claim.paper_value is not None:
        unit = f" ({claim.unit})" if claim.unit else ""
        not_compared = "" if claim.comparable else f"{unit}, not compared"
        prints = f" By the paper ({claim.where}): {number(claim.paper_value)}{not_compared}."
    return f"`{claim.id}`<br>{KINDS.get(claim.kind, '')}{says(entry)}{prints}"


def _about(claim: papers.Claim) -> str:
    what = claim.finding or claim.where
    return what if claim.unit_is_papers or not claim.unit else f"{what} ({claim.unit})"


def _short(reason: str) -> str:
    """The first sentence of a reason, on one line."""
    return re.split(r"(?<=[.;])\s", " ".join(reason.split()))[0].rstrip(".;")


def _printed(claim: papers.Claim) -> str:
    return number(claim.paper_value) if claim.comparable else number(None)


def cell(entry: Entry, weighed: bool = True, flips: bool = False) -> str:
    """A claim's verdict and value on one model.

    Args:
        weighed: whether the worth of stand-ins was measured on it.
        flips: whether another seed or other texts gave another verdict.
    """
    if entry.state == papers.UNMEASURED:
        return entry.state
    unweighed = entry.claim.stand_in and not weighed and entry.state != papers.UNDECIDED
    marks = {
        DAGGER: others_decide(entry.claim),
        UNWEIGHED: unweighed,
        BY_GENRE: entry.verdict.open_by_genre,
        FLIPS: flips,
        WITHOUT_PARTS: bool(entry.origin.remarks),
        BY_CHANCE: weighed_by_chance(entry),
    }
    return f"{_state(entry)}{''.join(mark for mark, true in marks.items() if true)}<br>{ours(entry.verdict)}"


def weighed_by_chance(entry: Entry) -> bool:
    """Whether CompilerKV's sets had kvlab's tables of a model, whose training log has no signal."""
    claim = entry.claim
    learnt = claim.paper == "compilerkv" and claim.experiment == "compilerkv_budgets" and "filled" in claim.id
    return learnt and entry.measured and not entry.origin.remarks


def _state(entry: Entry) -> str:
    by_tests = (
        f" ({entry.verdict.verdict} by a weak stand-in)" if entry.weak and entry.state == papers.UNDECIDED else ""
    )
    return f"{entry.state}{by_tests}"


def others_decide(claim: papers.Claim) -> bool:
    """Whether the direction reads another number than the one that a table shows, or its interval."""
    shown = {claim.metric, f"{claim.metric}/low", f"{claim.metric}/high"}
    return not claim.direction.needs(claim.metric) <= shown


# ------------------------------------------------------------------------------------- lists across models and profiles


def across(every: Sequence[Entry], order: Sequence[Subject], weighed: Container[str] = ()) -> str:
    """The names of the findings that stand alike on all models, or turn between them.

    Args:
        weighed: the labels of the models on which the worth of stand-ins was measured.
    """
    stand_ins = {entry.claim.finding for entry in every if entry.claim.stand_in}
    found = model_agreement.across(every, order)
    parts = []
    for kind in model_agreement.KINDS:
        by_paper: dict[str, list[str]] = {}
        for finding in found.get(kind, ()) if kind != model_agreement.OPEN else ():
            by_paper.setdefault(finding.paper, []).append(
                _standing(finding, kind, weighed if finding.name in stand_ins else finding.stands)
            )
        if by_paper:
            lines = [f"* {paper}: {'; '.join(names)}" for paper, names in by_paper.items()]
            parts.append("\n".join([f"These {kind}:", "", *lines]))
    if any(UNWEIGHED in part for part in parts):
        parts.append(NOT_WEIGHED)
    return "\n\n".join(parts)


def _standing(finding: model_agreement.Finding, kind: str, weighed: Container[str]) -> str:
    """Its name; with its states where it turns, and with its models where not all measured it."""
    if kind in model_agreement.TURNING:
        states = [
            f"{label}: {state}{'' if label in weighed or state == papers.UNDECIDED else UNWEIGHED}"
            for label, state in finding.stands.items()
        ]
        return f"{finding.name} ({', '.join(states)})"
    return finding.name if finding.everywhere else f"{finding.name} (on {listed(list(finding.stands))})"


def nearer(every: Sequence[Entry], order: Sequence[Subject]) -> str:
    """The claims on findings whose value comes nearer to the printed one, or moves away from it, as models grow."""
    rows = [row for row in model_trends.rows(every, order) if row.group == "findings"]
    ways = (model_trends.TOWARDS, model_trends.AWAY)
    lines = [
        [
            f"`{row.claim.id}`",
            _about(row.claim),
            _printed(row.claim),
            *(ours(entry.compared.verdict) for entry in row.entries),
            row.trend,
        ]
        for row in rows
        if row.trend in ways
    ]
    return table(["claim", "what is compared", "printed", *(each.label for each in order), "as models grow"], lines)


def moved(of_profiles: Mapping[str, Mapping[str, Mapping[str, Entry]]]) -> str:
    """The claims whose verdict is another one by the full profile, model by model.

    Args:
        of_profiles: model -> profile -> claim -> its entry.
    """
    changed: dict[tuple[str, str, str], list[str]] = {}
    for model, profiles in of_profiles.items():
        quick, full = profiles["quick"], profiles["full"]
        for name in quick.keys() & full.keys():
            states = quick[name].state, full[name].state
            if states[0] != states[1] and quick[name].group in MOVES:
                changed.setdefault((model, *states), []).append(f"`{name}`")
    lines = [(model, *states, ", ".join(sorted(names))) for (model, *states), names in sorted(changed.items())]
    return table(["model", "quick profile", "full profile", "claims"], lines)


def flipping(found: Iterable[stability.Stability]) -> str:
    """The quoted findings whose verdict flips with a seed or with texts."""
    lines = [
        [one.finding, one.count, ", ".join(dict.fromkeys(cell.verdict for cell in one.cells))]
        for one in found
        if one.flips
    ]
    return table(["finding", "runs that flip", "verdicts, the first run's first"], lines)
