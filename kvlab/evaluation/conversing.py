"""Several questions over one context, on a live model: the turns of one chat, and requests that share a cache."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlab.core.storage import AS_IS
from kvlab.errors import KvlabError
from kvlab.evaluation.answering import Fed, answer_record, answers, feed, generated, prefilled_for, session_of
from kvlab.live.shared_prefill import shared_prefill
from kvlab.methods import Policy
from kvlab.tasks.base import Example
from kvlab.tasks.making import require_tokenizer

if TYPE_CHECKING:
    from kvlab.evaluation.planning import CompressAt, System
    from kvlab.inputs.models import LM

# A made-up answer, with which kvlab finds the text between two turns; no template changes it.
_ANSWER = "AnswerOfTheModel"


def answered(
    lm: LM, example: Example, wanted: Sequence[Policy | System], compress_at: CompressAt
) -> Iterator[list[dict[str, Any]]]:
    """The answers to all questions of an example (`Example.parts`) with every policy, as `answers` has each."""
    systems = [(each, AS_IS) if isinstance(each, Policy) else each for each in wanted]
    if not example.turns:
        yield from ([made] for made in answers(lm, example, systems, compress_at))
    elif not example.branched:
        yield from _chat(lm, example, systems, compress_at)
    elif compress_at == "context":
        yield from _requests(lm, example, systems)
    else:
        yield from _requests_that_are_known(lm, example, systems)


# ---------------------------------------------------------------------------------------------------- one chat


def next_turn(lm: LM, part: Example) -> Tensor:
    """The ids `[1, tokens]` between the end of an answer and the beginning of the next, whose question `part` asks.

    Raises:
        KvlabError: a chat template that changes what was said in earlier turns.
    """
    tokenizer, text = require_tokenizer(lm), part.question
    if part.chat and getattr(tokenizer, "chat_template", None):
        said = ["first", _ANSWER, part.question.strip()]
        messages = [{"role": ("user", "assistant")[place % 2], "content": each} for place, each in enumerate(said)]
        whole = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        _, found, text = whole.partition(_ANSWER)
        if not found:
            raise KvlabError(f"the chat template of {lm.name} leaves out earlier answers, so a chat cannot go on")
    ids = tokenizer(text + part.prefix, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids
    return ids.to(lm.device)


@torch.inference_mode()
def _chat(
    lm: LM, example: Example, systems: Sequence[System], compress_at: CompressAt
) -> Iterator[list[dict[str, Any]]]:
    parts = example.parts
    fed, later = feed(lm, parts[0], compress_at), [next_turn(lm, part) for part in parts[1:]]
    longest = fed.ids.shape[1] + sum(ids.shape[1] for ids in later) + sum(part.max_new_tokens for part in parts)
    _check_length(lm, example, longest)
    prefilled, logits, seconds = prefilled_for(lm, systems, fed.ids[:, : fed.context])
    for system in systems:
        made: list[dict[str, Any]] = []
        with session_of(lm, system, longest - fed.context) as session:
            past, unfed = session.branch(prefilled), fed.ids[:, fed.context :]
            first = logits
            if unfed.shape[1]:
                session.end_prompt()
            for number, part in enumerate(parts):
                start = time.perf_counter()
                if number:
                    unfed = torch.cat([unfed, later[number - 1]], 1)
                if unfed.shape[1]:
                    first = lm.model(unfed, past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1]
                before = past.seen
                tokens = generated(lm, past, first, part)
                # The first decoding step ends the prompt, but an answer that ends at once has none.
                session.end_prompt()
                made.append(answer_record(lm, session, tokens, before, seconds, time.perf_counter() - start))
                unfed = torch.tensor([tokens[past.seen - before :]], dtype=torch.int64, device=lm.device)
        yield made


def _check_length(lm: LM, example: Example, longest: int) -> None:
    if longest > lm.context_length:
        raise KvlabError(
            f"{example.id} comes to {longest} tokens with all of its turns, which is beyond the {lm.context_length} "
            f"that {lm.name} takes"
        )


# ---------------------------------------------------------------------------------------------------- requests


@torch.inference_mode()
def _requests(lm: LM, example: Example, systems: Sequence[System]) -> Iterator[list[dict[str, Any]]]:
    """Compressed once, before any question; every question goes on from a copy."""
    parts, rests, context = asked(lm, example)
    prefilled, _, seconds = prefilled_for(lm, systems, context)
    for system in systems:
        made: list[dict[str, Any]] = []
        with session_of(lm, system, max(part.max_new_tokens for part in parts)) as session:
            past = session.branch(prefilled)
            session.end_prompt()
            for part, rest in zip(parts, rests, strict=True):
                start, own = time.perf_counter(), copy.deepcopy(past)
                first = lm.model(rest, past_key_values=own, use_cache=True, logits_to_keep=1).logits[0, -1]
                before = own.seen
                tokens = generated(lm, own, first, part)
                made.append(answer_record(lm, session, tokens, before, seconds, time.perf_counter() - start))
        yield made


@torch.inference_mode()
def _requests_that_are_known(lm: LM, example: Example, systems: Sequence[System]) -> Iterator[list[dict[str, Any]]]:
    """Compressed for each question anew, after it has been read; the context is prefilled once."""
    parts, rests, context = asked(lm, example)
    gathered = shared_prefill(lm.model, [policy for policy, _ in systems])
    start = time.perf_counter()
    with gathered:
        prefilled = lm.model(context, use_cache=True, logits_to_keep=1).past_key_values
    seconds, made = time.perf_counter() - start, [[] for _ in systems]
    for part, rest in zip(parts, rests, strict=True):
        with gathered:
            read = gathered.branch(prefilled)
            logits = lm.model(rest, past_key_values=read, use_cache=True, logits_to_keep=1).logits[0, -1]
        for system, answers_of in zip(systems, made, strict=True):
            start = time.perf_counter()
            with session_of(lm, system, part.max_new_tokens) as session:
                past = session.branch(read)
                before, tokens = past.seen, generated(lm, past, logits, part)
                session.end_prompt()
                answers_of.append(answer_record(lm, session, tokens, before, seconds, time.perf_counter() - start))
    yield from made


def asked(lm: LM, example: Example) -> tuple[tuple[Example, ...], list[Tensor], Tensor]:
    """The parts, the ids that each has after the context, and those of the context, `[1, tokens]` each.

    Raises:
        KvlabError: a question changes how the context before it is read.
    """
    parts = example.parts
    fed: list[Fed] = [feed(lm, part, "context") for part in parts]
    shared = min(each.context for each in fed)
    context = fed[0].ids[:, :shared]
    if any(not torch.equal(each.ids[:, :shared], context) for each in fed):
        raise KvlabError(f"the tokenizer of {lm.name} reads the context of {example.id} otherwise for each question")
    return parts, [each.ids[:, shared:] for each in fed], context
