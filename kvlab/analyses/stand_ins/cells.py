"""Every policy at every budget on every prompt: the stand-ins by replay, and the model's own answers.

A continuation is fed after each prompt. It is the full cache's own response to a request, or the right answer to a
needle or a question. A replay on the trace of both gives the stand-ins. A live run with the compressed cache gives the
outcomes. Both see the same tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from kvlab import evaluation
from kvlab.analyses.tasks.contenders import LEFT_OUT, contenders, named
from kvlab.analyses.tasks.examples import Item, needle_grid, questions
from kvlab.analyses.tasks.scores import SCORED_FROM, kept
from kvlab.analyses.texts import to_summarise, without_span
from kvlab.analyses.together import storing
from kvlab.core.storage import AS_IS
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.lib import progress_bars
from kvlab.methods import Policy
from kvlab.methods.full import Full
from kvlab.replays.run import replay
from kvlab.traces import shared
from kvlab.traces.recording import prompt_ids
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

REPLAYED = ("recall", "window_recall", "step_recall", "mass_lost", "output_error")
"""The stand-ins that a replay measures; recalls ask for as many tokens as the budget has entries."""

WHOLE = ("full", "think")
"""The policies that read every entry of the prompt: they have no budget of entries."""

RESPONSE = "response"


@dataclass(frozen=True)
class Prompt:
    """A prompt with the continuation that is fed.

    Attributes:
        kind: RESPONSE, or the task that the right answer belongs to.
        ids: `[length]`.
        continuation: ids of the right answer; None for the full cache's own response.
    """

    kind: str
    document: str
    ids: Tensor
    continuation: Tensor | None = None


def budgeted(names: Sequence[str] = ("all",), lm: LM | None = None) -> list[str]:
    """The policies that keep or read no more entries than a budget: "all" of them, "quick" for those that cost little,
    or by name.

    Args:
        lm: as `named` takes it.

    Raises:
        KvlabError: an unknown policy, or one that reads every entry.
    """
    every = [name for name in named(["all"], lm) if name not in WHOLE]
    sets = {"all": every, "quick": [name for name in every if name not in LEFT_OUT]}
    chosen = list(dict.fromkeys(each for name in names for each in sets.get(name, [name])))
    if whole := [name for name in chosen if name in WHOLE]:
        raise KvlabError(
            f"{whole[0]} reads every entry of the prompt; name policies that evict or select, such as snapkv"
        )
    return named(chosen)


def prompts(
    lm: LM,
    documents: Sequence[str],
    tokens: int,
    length: int,
    depths: Sequence[float] = (0.5,),
    articles: Sequence[str] = (),
    seed: int = 0,
) -> list[Prompt]:
    """A request to summarise each document, a needle in each, and a question on those that are among the articles.

    Args:
        tokens: length of the requests.
        length: of the prompts with needles and questions.
        depths: where the needles stand, in turns: one in each document.
    """
    found = []
    for number, name in enumerate(corpus.named(documents)):
        request = to_summarise(lm, corpus.document(name), tokens)
        found.append(Prompt(RESPONSE, name, prompt_ids(lm, request, "auto")[0].cpu()))
        depth = depths[number % len(depths)]
        found += [_of_item(lm, item) for item in needle_grid(lm, [length], [depth], name, seed + number)]
        if name in articles:
            found += [_of_item(lm, item) for item in questions(lm, [name], length, seed)]
    return found


def _of_item(lm: LM, item: Item) -> Prompt:
    tokenizer = lm.require_tokenizer("answers cannot be scored")
    answer = torch.tensor(tokenizer(item.answer, add_special_tokens=False)["input_ids"])
    ids = evaluation.feed(lm, item.example, "prompt").ids[0].cpu()
    return Prompt(item.task, without_span(item.document), ids, answer)


def measure(
    lm: LM,
    found: Sequence[Prompt],
    budgets: Sequence[int],
    names: Sequence[str],
    new_tokens: int = 32,
    heads: str | None = None,
    tables: str | None = None,
    path: str | Path | None = None,
) -> pd.DataFrame:
    """Measure the cells: each policy at each budget on each prompt.

    compilerkv fills up to its budget, as in `equal_bytes.measure`: cells are compared at one budget.

    Args:
        found: from `prompts`.
        new_tokens: of a response.
        path: a JSONL file that keeps the cells of each prompt; a run that was cut off goes on from there.

    Returns:
        One row for each, with columns document, kind, prompt (its number), policy, budget and the measures of
        `REPLAYED`. The live run gives more columns, over the tokens that `scores` scores:
        - kl: from the full cache.
        - nll, and nll_full with the full cache.
        - right, and right_full with the full cache: the share of the likeliest tokens that are those of the
          continuation.
    """
    every = contenders(budgets, heads, tables, names, pad="budget")
    file = None if path is None else Path(path)
    known = {key: line["cells"] for key, line in kept(file).items()}
    rows: list[dict[str, Any]] = []
    with progress_bars.counting(len(found), "cells", "prompt") as bar, warnings.catch_warnings():
        # compilerkv and duoattention say at every replay that they run without tables or head scores.
        warnings.simplefilter("ignore", UserWarning)
        for number, prompt in enumerate(found):
            key = _key(lm, prompt, every, new_tokens)
            if key not in known:
                known[key] = _cells(lm, prompt, every, new_tokens)
                if file is not None:
                    with file.open("a", encoding="utf-8") as out:
                        out.write(json.dumps({"key": key, "cells": known[key]}) + "\n")
            about = {"document": prompt.document, "kind": prompt.kind, "prompt": number}
            rows += [about | cell for cell in known[key]]
            bar.update()
    return pd.DataFrame(rows)


def _key(lm: LM, prompt: Prompt, every: Sequence[Policy], new_tokens: int) -> str:
    followed = None if prompt.continuation is None else prompt.continuation.tolist()
    about = [lm.signature, str(lm.dtype), prompt.ids.tolist(), followed, new_tokens, [str(policy) for policy in every]]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]


def _cells(lm: LM, prompt: Prompt, every: Sequence[Policy], new_tokens: int) -> list[dict[str, Any]]:
    steps = new_tokens if prompt.continuation is None else len(prompt.continuation)
    trace = shared.shared(lm, prompt.ids, steps, window=64, policies=list(every), response=prompt.continuation)
    live = outcomes(lm, trace, [Full(), *every])
    full = live.pop(Full())
    reference = {"nll_full": full["nll"], "right_full": full["right"]}
    rows = []
    for policy in every:
        replayed = replay(trace, policy)
        means = replayed.summary
        if replayed.kept_sets.shape[-1] == trace.prompt_length:
            means["recall"] = math.nan  # what a method keeps says nothing where it selects, or prunes at its first step
        marks = {"policy": policy.name, "budget": getattr(policy, "budget", None)}
        rows.append(marks | {name: means[name] for name in REPLAYED} | live[policy] | reference)
    return rows


def outcomes(lm: LM, trace: Trace, every: Sequence[Policy]) -> dict[Policy, dict[str, float]]:
    """The continuation of a trace fed under every policy, the full cache first: kl, nll and right of each.

    The first two tokens are not scored (`scores.SCORED_FROM`).
    """
    assert trace.ids is not None
    prompt, followed = trace.ids[None, : trace.prompt_length], trace.ids[trace.prompt_length :]
    systems = [storing.System(policy, storing.PLAIN, AS_IS) for policy in every]
    target, scored, full = followed[SCORED_FROM:], slice(SCORED_FROM - 1, None), None
    found = {}
    repeated = storing.repeated(lm, trace, prompt, systems)
    for system, logits, _ in storing.logits_of_systems(lm, prompt, followed, systems, repeated):
        chances = logits[scored].log_softmax(-1).cpu()
        full = chances if full is None else full
        found[system.policy] = {
            "kl": float(F.kl_div(chances, full, reduction="batchmean", log_target=True)),
            "nll": float(F.nll_loss(chances, target)),
            "right": float((chances.argmax(-1) == target).float().mean()),
        }
    return found
