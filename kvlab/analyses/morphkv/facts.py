"""MorphKV, section 6.2: does a larger window of recent tokens keep an early fact for a late question?

The paper's example is the 96th floor of a building, whose instructions stood in the prompt. Here a short prompt tells a
code, a document goes on for many times the capacity, and then the code is asked for. One measure is how much less
likely the right code is than under the full cache. The other is how much of the code is still stored when the question
begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from kvlab.analyses.findings import Findings
from kvlab.analyses.morphkv.responses import teacher_forced
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.methods import Policy, policy

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.live.session import Session

THINGS = ("red door", "old safe", "north gate", "blue cabinet", "wine cellar", "tool shed", "glass case", "iron chest")
DIGITS = 5

WORSE = "facts/nats/{policy}"
STORED = "facts/stored/{policy}"
WIDE_AHEAD = "facts/nats/narrow_less_wide"
WIDE_STORES_MORE = "facts/stored/wide_less_narrow"
BEHIND = "facts/nats/{policy}_less_wide"
FULL = "facts/full_nats"
WIDE, NARROW = "morphkv", "morphkv_narrow"


@dataclass(frozen=True)
class PlantedFacts:
    """Texts of equal length that tell a code at their beginning and ask for it at their end.

    Attributes:
        ids: int64 `[documents, tokens]`.
        fact: for each text, the positions of the code in the text.
        answers: for each text, how many tokens at its end are the code.
        question: for each text, the position at which the question begins.
    """

    names: list[str]
    ids: Tensor
    fact: list[range]
    answers: list[int]
    question: list[int]


def plant_facts(lm: LM, documents: Sequence[str], length: int, seed: int = 0) -> PlantedFacts:
    """A text of `length` tokens from each document: `The code of the red door is 48213.`, the document's start, and the
    question, with its answer.

    Raises:
        KvlabError: a document is too short.
    """
    rows, facts, answers, question = [], [], [], []
    names = corpus.named(documents)
    for number, document in enumerate(corpus.documents(documents)):
        draw = Random(f"{seed} {document.name}")
        code = "".join(draw.choice("0123456789") for _ in range(DIGITS))
        thing = THINGS[number % len(THINGS)]
        before = lm.encode(f"Remember: the code of the {thing} is", chat=False)[0]
        answer, end = _encode(lm, f" {code}"), _encode(lm, ".\n\n")
        query = _encode(lm, f"\n\nQuestion: what is the code of the {thing}?\nAnswer: the code of the {thing} is")
        room = length - sum(map(len, (before, answer, end, query, answer)))
        text = _encode(lm, document.text)
        if not 0 < room <= len(text):
            raise KvlabError(
                f"{document.name} has {len(text)} tokens, and {room} are asked for between a fact and its question"
            )
        rows.append(torch.cat([before, answer, end, text[:room], query, answer]))
        facts.append(range(len(before), len(before) + len(answer)))
        answers.append(len(answer))
        question.append(length - len(query) - len(answer))
    return PlantedFacts(names, torch.stack(rows), facts, answers, question)


def _encode(lm: LM, text: str) -> Tensor:
    """Encode a text that is inside another, as int64 ids `[tokens]`: without the tokens that begin a text."""
    tokenizer = lm.require_tokenizer("a fact cannot be put into a text")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64, device=lm.device)


def early_facts(
    lm: LM, documents: Sequence[str], tokens: int, new_tokens: int, windows: Sequence[int], capacity: int, seed: int = 0
) -> Findings:
    """Put facts into the first of `tokens` tokens, and ask for them `new_tokens` later, under caches of constant size.

    Args:
        tokens: of the prompt, with the fact.
        new_tokens: of the text that is fed after it, question and answer included.
        windows: R of MorphKV, a narrow and a wide one; max fusion, as in table 6.
        capacity: entries, of H2O as well.

    Returns:
        Table with columns document, policy and:
        - nats: how much less likely a token of the right code is than under the full cache, as a mean.
        - stored: the share of the code's entries that are stored when the question begins, as a mean over layers and KV
          heads.
        Metrics, with intervals over documents:
        - `facts/nats/morphkv` (the wide window), `facts/nats/morphkv_narrow`, `facts/nats/h2o` and `facts/stored/...`.
        - `facts/full_nats`: the cost of a token of the right code under the full cache. A digit that is guessed costs
          log 10.
        - the paired differences `facts/nats/narrow_less_wide`, `facts/nats/h2o_less_wide` and
          `facts/stored/wide_less_narrow`.
    """
    narrow, wide = sorted(windows)
    policies = {
        WIDE: policy("morphkv", budget=capacity, window=wide, fusion="max"),
        NARROW: policy("morphkv", budget=capacity, window=narrow, fusion="max"),
        "h2o": policy("h2o", budget=capacity),
    }
    return measure(lm, plant_facts(lm, documents, tokens + new_tokens, seed), tokens, policies)


def measure(lm: LM, texts: PlantedFacts, prompt: int, policies: dict[str, Policy]) -> Findings:
    """`early_facts` of these texts, whose first `prompt` tokens are the prompt, under policies that act at every step.

    Raises:
        KvlabError: the prompt ends before the fact, or reaches into the question.
    """
    if not max(fact.stop for fact in texts.fact) < prompt < min(texts.question):
        raise KvlabError(
            f"a prompt of {prompt} tokens must end between the fact and its question: after "
            f"{max(fact.stop for fact in texts.fact)} and before {min(texts.question)}"
        )
    stored = {}

    def record(documents: range, step: int, sessions: Mapping[str, Session]) -> None:
        # After step t the cache has seen the prompt and t tokens more.
        for row, document in enumerate(documents):
            if prompt + step == texts.question[document]:
                fact = texts.fact[document]
                stored.update(
                    {(document, name): _stored_share(lm, session, row, fact) for name, session in sessions.items()}
                )

    table = teacher_forced(lm, texts.ids, prompt, policies, record).table
    gaps = table.loc[table["measure"] == "nll_gap"]
    rows = []
    for row, name in enumerate(texts.names):
        of_text = gaps.loc[gaps["document"] == row]
        last = of_text.loc[of_text["step"] > of_text["step"].max() - texts.answers[row]]
        nats = last.groupby("policy")["value"].mean()
        rows += [
            {"document": name, "policy": method, "nats": nats[method], "stored": stored[row, method]}
            for method in policies
        ]
    findings = Findings(pd.DataFrame(rows))
    by_policy: list[Any] = [
        {name: part.set_index("document")[of] for name, part in findings.table.groupby("policy")}
        for of in ("nats", "stored")
    ]
    nats, stored_shares = by_policy
    for method in policies:
        findings.add(WORSE, nats[method], policy=method)
        findings.add(STORED, stored_shares[method], policy=method)
        if method not in (WIDE, NARROW):
            findings.add_difference(BEHIND, nats[method], nats[WIDE], policy=method)
    findings.add(FULL, pd.Series(_full_nats(lm, texts), index=pd.Index(texts.names, name="document")))
    findings.add_difference(WIDE_AHEAD, nats[NARROW], nats[WIDE])
    findings.add_difference(WIDE_STORES_MORE, stored_shares[WIDE], stored_shares[NARROW])
    return findings


@torch.inference_mode()
def _full_nats(lm: LM, texts: PlantedFacts) -> list[float]:
    """For each text, the mean negative log-likelihood of a token of the code under the full cache, in nats."""
    most = max(texts.answers)
    logits = lm.model(texts.ids.to(lm.device), logits_to_keep=most + 1).logits[:, :-1].float()
    nats = -logits.log_softmax(-1).gather(-1, texts.ids[:, -most:, None].to(lm.device))[..., 0]
    return [float(row[-answer:].mean()) for row, answer in zip(nats, texts.answers, strict=True)]


def _stored_share(lm: LM, session: Session, row: int, fact: range) -> float:
    """Share of the entries of these positions that a session stores for one text, over layers and KV heads."""
    positions = torch.tensor(list(fact))
    shares = [
        torch.isin(positions, heads).float().mean()
        for layer in lm.layout.compressed
        for heads in session.kept(layer, row)
    ]
    return float(torch.stack(shares).mean())
