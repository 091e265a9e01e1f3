"""Compare the answers of both sides to questions about needles, asked after the text was compressed.

Both sides get the same tokens. kvpress answers by its own pipeline.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from peers_methods import Method
from peers_process import Process
from peers_sets import counterpart, retained
from peers_tables import Table
from rich.progress import Progress

from kvlab.analyses.morphkv.sizes import of_model
from kvlab.evaluation.answering import answers, feed
from kvlab.inputs.models import LM
from kvlab.methods import Policy
from kvlab.methods.full import Full
from kvlab.tasks.base import Example
from kvlab.tasks.needle import Needle

FULL = "full cache"


@dataclass(frozen=True)
class Pair:
    """One example's answers by one method at one share that stays (1 for the full cache), and whether each is right.

    Attributes:
        ours, theirs: as the two come; None where the press ends in an error.
        alike: kvlab's, made like the press; None where that cannot be.
    """

    method: str
    keep: float
    ours: tuple[str, float]
    theirs: tuple[str, float] | None
    alike: tuple[str, float] | None = None


def asked(
    lm: LM, peer: Process, methods: dict[str, Method], lengths: list[int], ratios: list[float], bars: Progress
) -> list[Pair]:
    """Needles at five depths of a text of each length, with every method at every ratio, on both sides."""
    task = Needle(lengths=tuple(lengths), trials=1)
    examples = list(task.examples(lm))
    found, bar = [], bars.add_task("answers", total=len(examples))
    for example in examples:
        found += of_one(lm, peer, methods, task, example, ratios)
        bars.advance(bar)
    return found


def of_one(
    lm: LM, peer: Process, methods: dict[str, Method], task: Needle, example: Example, ratios: list[float]
) -> list[Pair]:
    fed = feed(lm, example, "context")
    context, question = fed.ids[0, : fed.context].tolist(), fed.ids[0, fed.context :].tolist()
    presses = {(name, keep): methods[name].told(keep) for name in methods for keep in ratios}
    policies: dict[tuple[str, float, bool], Policy] = {(FULL, 1.0, False): Full()}
    for (name, keep), mask in zip(presses, retained(peer, context, list(presses.values())), strict=True):
        policies[name, keep, False] = methods[name].as_it_comes(keep)
        if like := counterpart(methods[name], mask, len(context), of_model(lm).group):
            policies[name, keep, True] = like
    mine = zip(policies, answers(lm, example, list(policies.values()), "context"), strict=True)
    ours = {which: judged(task, example, one["prediction"]) for which, one in mine}
    told = peer.ask(
        "answers",
        context=context,
        question=question,
        presses=[None, *presses.values()],
        new_tokens=example.max_new_tokens,
    )
    return [
        Pair(
            *which,
            ours[*which, False],
            None if text is None else judged(task, example, text),
            ours.get((*which, True)),
        )
        for which, text in zip([(FULL, 1.0), *presses], told["answers"], strict=True)
    ]


def judged(task: Needle, example: Example, text: str) -> tuple[str, float]:
    return text.strip(), task.score(example, text)[task.metric]


def answers_table(pairs: Sequence[Pair], lengths: Sequence[int]) -> Table:
    """One line for each method and share: what each side found, and how many answers are the same word for word."""
    lines = []
    groups: dict[tuple[str, float], list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.method, pair.keep].append(pair)
    for (name, keep), some in groups.items():
        both = [(pair.ours, pair.theirs) for pair in some if pair.theirs]
        alike = [(pair.alike, pair.theirs) for pair in some if pair.alike and pair.theirs]
        theirs = found([other for _, other in both]) if both else "an error"
        own = found([pair.ours for pair in some])
        made = found([like for like, _ in alike]) if alike else ""
        lines.append((name, f"{keep:g}", own, theirs, same_words(both), made, same_words(alike)))
    header = ("method", "kept", "kvlab finds", "kvpress", "same words", "kvlab made alike", "same words")
    note = (
        "Needles whose question comes after the text was compressed, the same token ids on both sides; kvpress answers "
        "by its pipeline. Same words: answers that are equal, right or wrong, of all."
    )
    return Table(f"Answers: prompts of {', '.join(map(str, lengths))} tokens", header, lines, note)


def found(judged: Sequence[tuple[str, float]]) -> str:
    return f"{100 * statistics.fmean(score for _, score in judged):.0f} %"


def same_words(pairs: Sequence[tuple[tuple[str, float], tuple[str, float]]]) -> str:
    return f"{sum(one[0] == other[0] for one, other in pairs)} of {len(pairs)}" if pairs else ""
