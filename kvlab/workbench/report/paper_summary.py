"""A paper's claims and their verdicts in the ledger, in a few sentences, computed from the verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvlab import papers
from kvlab.render.phrases import listed, plural
from kvlab.render.sentences import sentence
from kvlab.workbench.report import model_trends
from kvlab.workbench.report.ledger import HOLDING, UNTESTED, WEAKEST, Entry, Tally, by_model, turns_by_either
from kvlab.workbench.report.ledger_models import Subject

NAMED = 3  # findings that a sentence names; the others are counted
OPEN = (papers.UNMEASURED, UNTESTED)


Standing = tuple[str, dict[str, str]]
"""A finding's name, and its state on each model that measured it."""


def standings(of_paper: Iterable[Entry]) -> list[Standing]:
    """Every finding, those with a name of their own first; the others are called by their place in the paper.

    On each model a finding stands as the weakest of its claims does.
    """
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    names: dict[tuple[str, str], str] = {}
    for entry in of_paper:
        if entry.group == "findings":
            names[entry.claim.fact] = entry.claim.finding or entry.claim.where
            of_models = found.setdefault(entry.claim.fact, {})
            if entry.state not in OPEN:
                of_models.setdefault(entry.model, []).append(entry.state)
    return [
        (names[fact], {model: min(states, key=WEAKEST.index) for model, states in found[fact].items()})
        for fact in sorted(found, key=lambda fact: names[fact] != fact[1])
    ]


def by_either(of_paper: Sequence[Entry]) -> list[tuple[str, dict[str, str], dict[str, str]]]:
    """Every finding with its states on each model, as in `standings`, and again by the profile that all models have."""
    alike = standings(entry.compared for entry in of_paper)
    return [(*shown, same) for shown, (_, same) in zip(standings(of_paper), alike, strict=True)]


def turning(of_paper: Sequence[Entry]) -> list[str]:
    """The findings that turn between models, by both profiles and with every stand-in weighed alike."""
    return [
        name
        for name, shown, alike in by_either(of_paper)
        if turns_by_either(_weighed_alike(shown, name, of_paper), alike)
    ]


def _weighed_alike(of_models: Mapping[str, str], name: str, of_paper: Sequence[Entry]) -> dict[str, str]:
    """The states of a finding by model, undecided where it fails by a stand-in that only other models weighed."""
    by_stand_in = [
        entry for entry in of_paper if entry.claim.fact[1] == name and entry.claim.stand_in and entry.measured
    ]
    weighed = {entry.model for entry in by_stand_in if entry.prediction}
    open_here = {entry.model for entry in by_stand_in} - weighed if weighed else set()
    return {
        model: papers.UNDECIDED if state == papers.FAILS and model in open_here else state
        for model, state in of_models.items()
    }


def digest(of_paper: Sequence[Entry], order: Sequence[Subject], says: str = "") -> list[str]:
    """The sentences on one paper, at most five; those with nothing to say are left out.

    They say, in this order:

    - what the paper claims;
    - how many findings have which verdict;
    - which findings hold and which fail on every model, or on all of at least two models that measured them;
    - which findings turn between models, or else are undecided on one of several;
    - how our numbers compare with the printed ones, and which way that goes with the model's size.

    With a single model, the fourth item is the findings that stay undecided.

    Args:
        of_paper: the entries of one paper, on all models.
        order: the models, the smallest first; none where nothing was measured.
        says: what the paper claims, in at most three sentences.
    """
    found = standings(of_paper)
    measured = [standing for standing in found if standing[1]]
    sentences = [
        says,
        *(
            [
                _counts(of_paper, order),
                _everywhere(measured, order),
                _open(measured, turning(of_paper), order),
                _printed(of_paper, order),
            ]
            if measured
            else [_unmeasured(len(found)), *_questions(of_paper, order)]
        ),
    ]
    return [sentence for sentence in sentences if sentence]


def quoted(of_paper: Iterable[Entry], model: str, names: Iterable[str]) -> list[str]:
    """A sentence on each of these findings that the model measured: on the weakest of its claims, as it stands."""
    return [sentence(entry.claim, entry.verdict, entry.weak) for entry in weakest(of_paper, model, names)]


def weakest(of_paper: Iterable[Entry], model: str, names: Iterable[str]) -> list[Entry]:
    """The weakest claim of each of these findings that the model measured."""
    found: dict[str, list[Entry]] = {}
    for entry in of_paper:
        if entry.model == model and entry.claim.kind in papers.SAMPLED and entry.state not in OPEN:
            found.setdefault(entry.claim.fact[1], []).append(entry)
    return [min(found[name], key=lambda entry: WEAKEST.index(entry.state)) for name in names if name in found]


def _unmeasured(count: int) -> str:
    if not count:
        return "It has no findings."
    if count == 1:
        return "Its only finding has not been measured yet."
    return f"None of its {count} findings has been measured yet."


def _questions(of_paper: Iterable[Entry], order: Sequence[Subject]) -> Iterator[str]:
    """Yield the answers to our questions on each model, for a paper without measured findings."""
    tallies = {model: Tally.of(mine).questions for model, mine in by_model(of_paper).items()}
    for subject in order:
        counted = tallies[subject.name]
        states = [state for state in papers.VERDICTS if counted[state] and state != papers.UNMEASURED]
        if states:
            total = sum(counted[state] for state in states)
            answers = listed([f"{counted[state]} {_verb(state, counted[state])}" for state in states])
            yield f"Of {total} {plural(total, 'question')} of ours on {subject.label}, {answers}."


def _counts(of_paper: Iterable[Entry], order: Sequence[Subject]) -> str:
    tallies = {model: Tally.of(mine).findings for model, mine in by_model(of_paper).items()}
    total = sum(next(iter(tallies.values())).values())
    by_subject = []
    for subject in order:
        counted = tallies[subject.name]
        parts = [f"{counted[state]} {_verb(state, counted[state])}" for state in papers.VERDICTS[:-1] if counted[state]]
        by_subject.append(f"on {subject.label} {listed(parts) or 'none has been measured'}")
    return f"Of its {total} {plural(total, 'finding')}, {'; '.join(by_subject)}."


def _verb(state: str, count: int) -> str:
    words = "is undecided" if state == papers.UNDECIDED else state
    return words if count == 1 else words.replace("holds", "hold").replace("fails", "fail").replace("is ", "are ")


def _everywhere(measured: Iterable[Standing], order: Sequence[Subject]) -> str:
    """Which findings hold, and which fail, wherever they were measured."""
    found = list(measured)
    parts = [_alike(found, verb, wanted, order) for verb, wanted in (("hold", HOLDING), ("fail", (papers.FAILS,)))]
    return _sentence("; ".join(part for part in parts if part))


def _alike(measured: Iterable[Standing], verb: str, wanted: Sequence[str], order: Sequence[Subject]) -> str:
    """Which findings have one of the wanted states on every model.

    A finding that only one of several models measured is left out: it says nothing about models.
    """
    alike = [(name, mine) for name, mine in measured if set(mine.values()) <= set(wanted)]
    at_least = ", at least in direction" if wanted is HOLDING else ""
    everywhere = [name for name, mine in alike if len(mine) == len(order)]
    where = f" on {_all_of(len(order))}" if len(order) > 1 else ""
    parts = [f"these {verb}{where}{at_least}: {_some(everywhere)}"] if everywhere else []
    fewer = [f"{name} (on {listed(_labels(mine, order))})" for name, mine in alike if 1 < len(mine) < len(order)]
    if fewer:
        parts.append(f"these {verb} on each of the fewer models that measured them{at_least}: {_some(fewer)}")
    return "; ".join(parts)


def _labels(mine: Iterable[str], order: Sequence[Subject]) -> list[str]:
    measured = set(mine)
    return [subject.label for subject in order if subject.name in measured]


def _all_of(models: int) -> str:
    """ "both models", "all four models"."""
    words = {3: "three", 4: "four", 5: "five", 6: "six"}
    return "both models" if models == 2 else f"all {words.get(models, models)} models"


def _open(measured: Iterable[Standing], turned: Sequence[str], order: Sequence[Subject]) -> str:
    """Which hold on one model and fail on another, or else which are undecided; of one model, which stay undecided."""
    if len(order) == 1:
        return _sentence(_alike(measured, "stay undecided", (papers.UNDECIDED,), order))
    if turned:
        return f"These hold on some models and fail on others: {_some(turned)}."
    undecided = [name for name, mine in measured if len(mine) > 1 and papers.UNDECIDED in mine.values()]
    if not undecided:
        return ""
    return f"None clearly holds on one model and fails on another. Undecided on one at least: {_some(undecided)}."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _printed(of_paper: Sequence[Entry], order: Sequence[Subject]) -> str:
    """How ours compare with the printed numbers of the same unit, on the largest model, and its trend with size."""
    largest = order[-1]
    pairs = [
        (entry, paper)
        for entry in of_paper
        if entry.model == largest.name and entry.group == "findings" and entry.verdict.value is not None
        if (paper := model_trends.paper_value(entry.claim)) is not None
    ]
    if not pairs:
        return f"No number of {largest.label} has the unit of a printed one."
    inside = sum(_covers(entry, paper) for entry, paper in pairs)
    if len(pairs) == 1:
        numbers = f"the only printed number that ours can be compared with {'lies' if inside else 'does not lie'}"
    else:
        lie = "lies" if inside < 2 else "lie"
        numbers = f"{inside or 'none'} of {len(pairs)} printed numbers that ours can be compared with {lie}"
    text = f"On {largest.label} {numbers} inside our interval"
    ways = model_trends.trends(model_trends.rows(of_paper, order))
    if not ways:
        return f"{text}."
    parts = [f"{ways[way]} {said[ways[way] != 1]}" for way, said in model_trends.SAID.items() if ways[way]]
    total = ways.total()
    return f"{text}; of {total} {plural(total, 'finding')} with such a number, as models grow, {listed(parts)}."


def _covers(entry: Entry, paper: float) -> bool:
    low, high = entry.verdict.low, entry.verdict.high
    return low is not None and high is not None and low <= paper <= high


def _some(names: Iterable[str]) -> str:
    """The first names, and how many more there are; of several findings at one place, how many."""
    counted = Counter(names)
    parts = [name if count == 1 else f"{name} ({count} findings)" for name, count in counted.items()][:NAMED]
    more = counted.total() - sum(count for _, count in list(counted.items())[:NAMED])
    return "; ".join(parts) + (f"; and {more} more" if more else "")
