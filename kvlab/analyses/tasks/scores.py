"""Scores on tasks at small budgets, for all papers at once: needles, RULER and questions in LongBench's format.

After thousands of tokens a small model's answer is too often right or wrong by chance. The 0/1 scores of a few examples
cannot distinguish two policies. So the right answer is fed under every compressed cache (teacher forcing). One pass
gives two numbers: whether greedy decoding would have given the answer word for word, and its likelihood.

Likelihoods leave out the first two tokens of an answer, for all policies. The first comes from the prefill. At the
second, a policy that prunes at its first step (MorphKV) still reads the whole prompt. So the second says nothing about
the pruned cache.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from kvlab import evaluation
from kvlab.analyses.tasks.examples import Item
from kvlab.errors import KvlabError
from kvlab.lib import progress_bars
from kvlab.lib.batches import batches
from kvlab.live.decode_batch import TOGETHER
from kvlab.live.session import Session, compress
from kvlab.live.shared_findings import Memory
from kvlab.live.shared_prefill import shared_prefill
from kvlab.methods import Policy
from kvlab.methods.full import Full

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

SCORED_FROM = 2
"""The first scored token of an answer: 0 is predicted by the prefill, 1 by the first decoding step."""

# ---------------------------------------------------------------------------------------------------- one pass


@torch.inference_mode()
def forced(lm: LM, sessions: Sequence[Session], answer: Tensor, at_once: bool) -> Tensor:
    """Feed an answer under several caches whose prompts have ended, all in one batch.

    Args:
        answer: ids `[n]`.
        at_once: one forward pass for all tokens; for policies that do nothing while decoding the result is the same.

    Returns:
        float32 logits `[sessions, n - 1, vocabulary]` of the tokens from the second on.
    """
    tokens = answer[:-1].to(lm.device).expand(len(sessions), -1)
    with compress(lm.model, Full(), turns="leave") as together:
        past = together.join(sessions)
        rest = [
            lm.model(ids, past_key_values=past, use_cache=True).logits
            for ids in tokens.split(tokens.shape[1] if at_once else 1, dim=1)
        ]
    return torch.cat(rest, 1).float()


def follow(
    lm: LM, sessions: Sequence[Session], firsts: Sequence[Tensor], answer: Tensor, at_once: bool
) -> list[tuple[float, float, float]]:
    """Score an answer that is fed under several caches, as `forced` takes it.

    Args:
        firsts: for each session, logits `[vocabulary]` of the answer's first token, from the prompt.
        answer: ids `[n]`, n > SCORED_FROM.

    Returns:
        Three numbers for each session:
        - nll: the mean negative log-likelihood of the tokens from SCORED_FROM on, in nats.
        - score: 1 where every token, the first ones too, is the likeliest, so that greedy decoding gives this answer.
        - hits: the share of the tokens from SCORED_FROM on that are the likeliest after the right ones before them.
    """
    target = answer[1:].to(lm.device)
    results, scored = [], slice(SCORED_FROM - 1, None)
    for logits, first in zip(forced(lm, sessions, answer, at_once), firsts, strict=True):
        right = logits.argmax(-1) == target
        score = bool(right.all()) and int(first.argmax(-1)) == int(answer[0])
        nll, hits = F.cross_entropy(logits[scored], target[scored]), right[scored].float().mean()
        results.append((float(nll), float(score), float(hits)))
    return results


@torch.inference_mode()
def passes(lm: LM, item: Item, policies: Sequence[tuple[Policy, str]]) -> Iterator[dict[str, Any]]:
    """The right answer to one example under every policy, all from one prefill.

    Args:
        policies: policies, each with where it compresses: "prompt" (the question has been read) or "context".

    Yields:
        nll, score and hits (see `follow`), scored_tokens, prompt_tokens, and the stored bytes of keys and values at the
        end.

    Raises:
        KvlabError: an answer without a scored token.
    """
    at_context = any(at == "context" for _, at in policies)
    fed = evaluation.feed(lm, item.example, "context" if at_context else "prompt")
    tokenizer = lm.require_tokenizer("answers cannot be scored")
    answer = torch.tensor(tokenizer(item.answer, add_special_tokens=False)["input_ids"])
    if len(answer) <= SCORED_FROM:
        raise KvlabError(
            f"{item.example.id}: the answer {item.answer!r} has {len(answer)} tokens, and at least "
            f"{SCORED_FROM + 1} are needed, because the first {SCORED_FROM} are not scored"
        )
    results: dict[tuple[Policy, str], dict[str, Any]] = {}
    gathered = shared_prefill(lm.model, [policy for policy, _ in policies])
    with gathered:
        out = lm.model(fed.ids[:, : fed.context], use_cache=True, logits_to_keep=1)
    rest = fed.ids[:, fed.context :]
    prefilled = out.past_key_values
    for at in ("context", "prompt"):
        if at == "prompt" and rest.shape[1]:
            with gathered:
                out = lm.model(rest, past_key_values=prefilled, use_cache=True, logits_to_keep=1)
        prefilled.memory = Memory()
        at_point = [policy for policy, where in policies if where == at]
        for batch, at_once in _batches(at_point):
            sessions, firsts = [], []
            for policy in batch:
                with compress(
                    lm.model, policy, turns="leave", tokenizer=lm.tokenizer, max_new_tokens=item.example.max_new_tokens
                ) as session:
                    past, first = session.branch(prefilled), out.logits[0, -1]
                    session.end_prompt()
                    if at == "context":
                        first = lm.model(rest, past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1]
                sessions.append(session)
                firsts.append(first)
            continuations = follow(lm, sessions, firsts, answer, at_once)
            for policy, session, (nll, score, hits) in zip(batch, sessions, continuations, strict=True):
                results[policy, at] = {
                    "nll": nll,
                    "score": score,
                    "hits": hits,
                    "scored_tokens": len(answer) - SCORED_FROM,
                    "prompt_tokens": fed.ids.shape[1],
                    "kv_bytes": session.kv_bytes,
                }
    for key in policies:
        yield results[key]


def _batches(policies: Sequence[Policy]) -> Iterator[tuple[list[Policy], bool]]:
    """Batches of policies, each with whether its policies do nothing while decoding."""
    for static in (True, False):
        alike = [policy for policy in policies if policy.needs.acts_while_decoding != static]
        yield from ((batch, static) for batch in batches(alike, TOGETHER))


# ---------------------------------------------------------------------------------------------------- a whole run


def measure(
    lm: LM,
    plan: Sequence[tuple[Sequence[Item], Sequence[tuple[Policy, str]]]],
    path: str | Path | None = None,
) -> pd.DataFrame:
    """Every example of a plan under every policy it names, and under the full cache.

    Args:
        plan: items, and the policies they meet with where each compresses ("prompt" or "context").
        path: a JSONL file that keeps the results; a run that was cut off goes on from there.

    Returns:
        One row for each example, policy and place: task, document, example, policy, budget, compress_at, nll, score,
        hits, scored_tokens, prompt_tokens, kv_bytes.
    """
    known = kept(path)
    rows = []
    total = sum(len(items) for items, _ in plan)
    with (
        progress_bars.counting(total, "tasks", "example") as bar,
        nullcontext() if path is None else Path(path).open("a", encoding="utf-8") as file,
        warnings.catch_warnings(),
    ):
        # compilerkv and duoattention say at every prompt that they run without tables or head scores.
        warnings.simplefilter("ignore", UserWarning)
        for items, policies in plan:
            systems = list(dict.fromkeys([(Full(), "prompt"), *policies]))
            for item in items:
                keys = {pair: _key(lm, item, *pair) for pair in systems}
                missing = [pair for pair in systems if keys[pair] not in known]
                for pair, result in zip(missing, passes(lm, item, missing) if missing else (), strict=True):
                    known[keys[pair]] = result
                    if file is not None:
                        file.write(json.dumps({"key": keys[pair], **result}) + "\n")
                        file.flush()
                rows += [_row(item, *pair, known[keys[pair]]) for pair in systems]
                bar.update()
    return pd.DataFrame(rows)


def _row(item: Item, policy: Policy, at: str, result: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": item.task,
        "document": item.document,
        "example": item.example.id,
        "policy": policy.name,
        "budget": getattr(policy, "budget", None),
        "compress_at": at,
        **item.example.marks,
        **result,
    }


def _key(lm: LM, item: Item, policy: Policy, at: str) -> str:
    about = [
        lm.signature,
        str(lm.dtype),
        item.example.prompt,
        item.example.prefix,
        item.answer,
        item.example.max_new_tokens,
        str(policy),
        at,
        f"scored from {SCORED_FROM}",
    ]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]


def kept(path: str | Path | None) -> dict[str, dict[str, Any]]:
    """The results in the file; a half line at its end, left by a run that was cut off, is removed."""
    if path is None or not Path(path).exists():
        return {}
    content = Path(path).read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        Path(path).write_bytes(whole)
    lines = [json.loads(line) for line in whole.decode("utf-8").splitlines()]
    return {line.pop("key"): line for line in lines}
