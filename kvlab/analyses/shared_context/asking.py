"""Several questions over one context, compressed knowing each of them, the first alone, or none.

The right answers are fed (teacher forcing), since only a few contexts are measured. The measure is the mean negative
log-likelihood of an answer's tokens, less that under the full cache. In a chat the earlier answers are the right ones,
too, and no mistake is passed on. The first token of an answer is left out everywhere. A cache compressed after the
question has not yet been used for it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from kvlab.analyses.findings import Findings
from kvlab.analyses.tasks.scores import forced
from kvlab.core.storage import AS_IS
from kvlab.errors import KvlabError
from kvlab.evaluation.answering import session_of
from kvlab.evaluation.conversing import asked, next_turn
from kvlab.lib import progress_bars
from kvlab.lib.batches import batches
from kvlab.live.decode_batch import TOGETHER
from kvlab.live.session import Session
from kvlab.live.shared_prefill import shared_prefill
from kvlab.methods import Policy
from kvlab.methods.full import Full
from kvlab.tasks.base import Example

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.live.cache import LiveCache

SCORED_FROM = 1
"""The first scored token of an answer."""

LOSS = "loss/{way}/{policy}/{budget:g}"
"""Log-likelihood of the right answers that the full cache has and the policy has not, nats a token."""
BY_TURN = "loss/{way}/{policy}/{budget:g}/turn_{turn}"
HITS = "hits/{way}/{policy}/{budget:g}"
"""Share of the answers' tokens that are the likeliest after the right ones before them."""
FULL_HITS = "hits/{way}/full"
UNKNOWN = "question_agnostic/{policy}/{budget:g}"
"""The cost of not knowing the question: the loss of `none` less that of `each`, paired by context."""
DECLINE = "decline/{policy}/{budget:g}"
"""How much more a chat loses over its later turns than over its first, paired by context."""
BETWEEN = "between/{way}/{left}/{right}/{budget:g}"
"""The loss of the policy `left` less that of `right`."""

Scored = list[tuple[float, float]]
"""NLL and share of hits, by turn; nan for an answer of one token, of which nothing is scored."""
UNSCORED = math.nan, math.nan


def measure(lm: LM, examples: Sequence[Example], policies: Sequence[Policy]) -> pd.DataFrame:
    """Ask every question of every context under every policy and the full cache, in all three ways.

    Args:
        examples: of the task `turns`, in its mode "requests".
        policies: those that evict at the end of a prompt and do nothing while decoding.

    Returns:
        One row for each, with columns context, kind, turn, way, policy, budget, nll, hits, loss. loss is nll less the
        full cache's. The last three are nan for an answer of one token, of which nothing is scored.

    Raises:
        KvlabError: a policy that acts while decoding, for which feeding an answer at once is something else.
    """
    for policy in policies:
        if policy.needs.acts_while_decoding:
            raise KvlabError(
                f"{policy.name} acts at every decoding step, and answers are fed at once here; leave it out"
            )
    systems, rows = [Full(), *(policy for policy in policies if policy.name != "full")], []
    with progress_bars.counting(len(examples), "contexts", "context") as bar:
        for example in examples:
            context = _Context(lm, example, systems)
            for way, score_answers in WAYS.items():
                for policy, scored in zip(systems, score_answers(context), strict=True):
                    marks = {"context": example.id, "kind": example.marks["kind"], "way": way, "policy": policy.name}
                    marks["budget"] = getattr(policy, "budget", None)
                    rows += [
                        {**marks, "turn": turn, "nll": nll, "hits": hits} for turn, (nll, hits) in enumerate(scored, 1)
                    ]
            bar.update()
    table = pd.DataFrame(rows)
    keys = ["context", "turn", "way"]
    full = table[table["policy"] == "full"].set_index(keys)["nll"]
    return table.assign(loss=table["nll"] - full.loc[list(table[keys].itertuples(index=False, name=None))].to_numpy())


# ---------------------------------------------------------------------------------------------------- three ways


class _Context:
    """One context, prefilled once for all policies, and what is asked of it.

    Attributes:
        parts: an example for each question.
        questions: the ids `[1, tokens]` of each question, from the end of the context on.
        answers: those of the shortest right answers, `[1, n]`.
        gathered, prefilled: the session in which the context was fed, and its cache.
    """

    @torch.inference_mode()
    def __init__(self, lm: LM, example: Example, policies: Sequence[Policy]):
        self.lm, self.policies = lm, policies
        self.parts, self.questions, context = asked(lm, example)
        self.answers = [self._answer(part) for part in self.parts]
        self.gathered = shared_prefill(lm.model, policies)
        with self.gathered:
            self.prefilled = lm.model(context, use_cache=True, logits_to_keep=1).past_key_values

    def _answer(self, part: Example) -> Tensor:
        shortest = min(part.answers, key=len)
        tokenizer = self.lm.require_tokenizer("answers cannot be scored")
        text = f" {shortest}" if part.prefix else shortest
        return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids.to(self.lm.device)

    def read(self, question: Tensor) -> LiveCache:
        """A cache, not yet compressed, that holds the context and a question."""
        with self.gathered:
            cache = self.gathered.branch(self.prefilled)
            self.lm.model(question, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def session(self, policy: Policy) -> Session:
        return session_of(self.lm, (policy, AS_IS), self.parts[0].max_new_tokens)

    def compressed(self, policy: Policy, read: LiveCache) -> Session:
        """A session that goes on from `read`, compressed."""
        with self.session(policy) as session:
            session.branch(read)
            session.end_prompt()
        return session

    def logits(self, ids: Tensor, cache: LiveCache) -> Tensor:
        """Logits `[n, vocabulary]` of ids `[1, n]` that are fed on top of a cache."""
        return self.lm.model(ids, past_key_values=cache, use_cache=True).logits[0]


def _score(logits: Tensor, answer: Tensor) -> tuple[float, float]:
    """Of an answer `[1, n]`, and the logits `[n - 1, vocabulary]` from behind its first token on."""
    target = answer[0, SCORED_FROM:]
    if not len(target):
        return UNSCORED
    return float(F.cross_entropy(logits.float(), target)), float((logits.argmax(-1) == target).float().mean())


@torch.inference_mode()
def _each(context: _Context) -> list[Scored]:
    found: list[Scored] = [[] for _ in context.policies]
    for question, answer in zip(context.questions, context.answers, strict=True):
        if answer.shape[1] <= SCORED_FROM:
            for scored in found:
                scored.append(UNSCORED)
            continue
        read = context.read(question)
        for batch in batches(zip(context.policies, found, strict=True), TOGETHER):
            sessions = [context.compressed(policy, read) for policy, _ in batch]
            for (_, scored), logits in zip(batch, forced(context.lm, sessions, answer[0], at_once=True), strict=True):
                scored.append(_score(logits, answer))
    return found


@torch.inference_mode()
def _none(context: _Context) -> list[Scored]:
    found = []
    for policy in context.policies:
        with context.session(policy) as session:
            past, scored = session.branch(context.prefilled), []
            session.end_prompt()
            for question, answer in zip(context.questions, context.answers, strict=True):
                logits = context.logits(torch.cat([question, answer], 1), copy.deepcopy(past))
                scored.append(_score(logits[question.shape[1] : -1], answer))
        found.append(scored)
    return found


@torch.inference_mode()
def _first(context: _Context) -> list[Scored]:
    read = context.read(context.questions[0])
    between = [context.questions[0][:, :0], *(next_turn(context.lm, part) for part in context.parts[1:])]
    fed = torch.cat([ids for pair in zip(between, context.answers, strict=True) for ids in pair], 1)
    found = []
    for policy in context.policies:
        with context.session(policy) as session:
            past = session.branch(read)
            session.end_prompt()
            logits = context.logits(fed, past)
        scored, stop = [], 0
        for question, answer in zip(between, context.answers, strict=True):
            start = stop + question.shape[1]
            stop = start + answer.shape[1]
            scored.append(_score(logits[start : stop - 1], answer))
        found.append(scored)
    return found


WAYS: dict[str, Callable[[_Context], list[Scored]]] = {"each": _each, "first": _first, "none": _none}
"""The questions read when the cache is compressed: each one, the first one alone (a chat), or none (requests)."""


# ---------------------------------------------------------------------------------------------------- findings


def findings(table: pd.DataFrame) -> Findings:
    """Summarise losses by way and turn, the cost of an unknown question, and the decline over the turns of a chat.

    Intervals are over contexts, since questions over one context are not independent.

    table: of `measure`.
    """
    found, table = Findings(table), table.dropna(subset="nll")
    whole: Any = table[table["policy"] == "full"].groupby("way")
    for way, part in whole:
        found.add(FULL_HITS, part.groupby("context")["hits"].mean(), way=way)
    means: dict[tuple[str, float], dict[str, pd.Series]] = {}
    groups: Any = table.dropna(subset="budget").groupby(["policy", "budget", "way"], sort=False)
    for (policy, budget, way), part in groups:
        keys = {"way": way, "policy": policy, "budget": budget}
        losses: pd.Series = part.groupby("context")["loss"].mean()
        found.add(LOSS, losses, **keys)
        found.add(HITS, part.groupby("context")["hits"].mean(), **keys)
        for turn, of_turn in part.groupby("turn"):
            found.add(BY_TURN, of_turn.set_index("context")["loss"], turn=turn, **keys)
        means.setdefault((policy, budget), {})[way] = losses
        if way == "first":
            first = part[part["turn"] == 1].set_index("context")["loss"]
            later = part[part["turn"] > 1].groupby("context")["loss"].mean()
            both = first.index.intersection(later.index)
            if len(both):
                found.add_difference(DECLINE, later[both], first[both], policy=policy, budget=budget)
    for (policy, budget), ways in means.items():
        found.add_difference(UNKNOWN, ways["none"], ways["each"], policy=policy, budget=budget)
    _between(found, means)
    return found


def _between(found: Findings, means: dict[tuple[str, float], dict[str, pd.Series]]) -> None:
    """Each policy against the first one at the same budget."""
    first = next(iter(means), ("", 0.0))[0]
    for (policy, budget), ways in means.items():
        if policy != first and (first, budget) in means:
            for way, losses in ways.items():
                keys = {"way": way, "left": policy, "right": first, "budget": budget}
                found.add_difference(BETWEEN, losses, means[first, budget][way], **keys)


def in_words(table: pd.DataFrame) -> str:
    """How much was asked."""
    contexts, answers = table["context"].nunique(), table["nll"].notna().sum()
    return f"{contexts} contexts, {table['turn'].max()} questions on each, {answers} answers scored"
