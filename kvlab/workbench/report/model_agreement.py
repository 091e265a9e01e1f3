"""Findings sorted by their states across models: some hold on each one, some only on larger ones, some on none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab import papers
from kvlab.render.phrases import listed
from kvlab.workbench.report.ledger import HOLDING, Entry, by_paper, turns
from kvlab.workbench.report.ledger_models import Subject
from kvlab.workbench.report.paper_summary import by_either, turning

EVERY = "hold on every model that measured them, two at least, and at least in direction"
LARGER = "hold on larger models and fail on smaller ones"
SMALLER = "hold on smaller models and fail on larger ones"
MIXED = "hold here and fail there, in no order of size"
NONE = "fail on every model that measured them, two at least"
OPEN = "are undecided on a model at least, or turn only where models were not measured alike"
TURNING = (LARGER, SMALLER, MIXED)
KINDS = (EVERY, LARGER, SMALLER, MIXED, NONE, OPEN)


@dataclass(frozen=True)
class Finding:
    """A finding that several models measured; `stands`: the model's label -> its state, the smallest model first.

    everywhere: whether all models of the ledger measured it.
    """

    paper: str
    name: str
    stands: dict[str, str]
    everywhere: bool = True

    def __str__(self) -> str:
        if len(set(self.stands.values())) > 1:
            return (
                f"{self.paper}: {self.name} ({', '.join(f'{label}: {state}' for label, state in self.stands.items())})"
            )
        where = "" if self.everywhere else f" (measured on {listed(list(self.stands))})"
        return f"{self.paper}: {self.name}{where}"


def across(judged: Sequence[Entry], order: Sequence[Subject]) -> dict[str, list[Finding]]:
    """Kind (of `KINDS`, those without any left out) -> its findings, of those that at least two models measured.

    A finding has the state of its weakest claim, on each model by the most thorough profile. It counts as turning from
    one model to another only if it also turns by the most thorough profile that all of them have. It has an order of
    size only if both profiles give the same one. A model that leaves it undecided does not count for or against an
    order. Nor does one on which it fails by a stand-in that only another model weighed. Weighed on both, the failure
    could have become undecided.

    Args:
        judged: the entries of several models.
        order: the models, the smallest first.
    """
    sorted_out: dict[str, list[Finding]] = {kind: [] for kind in KINDS}
    labels = {subject.name: subject.label for subject in order}
    for paper, mine in by_paper(judged).items():
        turned = turning(mine)
        for name, of_models, alike in by_either(mine):
            of_models = {model: of_models[model] for model in labels if model in of_models}
            stands = {labels[model]: state for model, state in of_models.items()}
            if len(stands) > 1:
                kind = _kind(list(stands.values()))
                if kind in TURNING and name not in turned:
                    kind = OPEN
                if kind in TURNING and kind != _kind([alike[model] for model in labels if model in alike]):
                    kind = MIXED
                sorted_out[kind].append(Finding(paper, name, stands, len(stands) == len(labels)))
    return {kind: found for kind, found in sorted_out.items() if found}


def _kind(stands: Sequence[str]) -> str:
    decided = [state in HOLDING for state in stands if state != papers.UNDECIDED]
    if turns(stands):
        by_size = {(False, True): LARGER, (True, False): SMALLER}
        steps = [pair for pair in zip(decided, decided[1:], strict=False) if pair[0] != pair[1]]
        return by_size[steps[0]] if len(steps) == 1 else MIXED
    if len(decided) < len(stands):
        return OPEN
    return EVERY if decided[0] else NONE
