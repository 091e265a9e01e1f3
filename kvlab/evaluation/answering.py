"""One example on a live model: the prompt is fed once, and from there every policy generates its own answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from kvlab.core.storage import AS_IS
from kvlab.errors import KvlabError
from kvlab.live.gather import gather
from kvlab.live.session import Session, compress
from kvlab.methods import Policy
from kvlab.tasks.base import Example
from kvlab.tasks.making import require_tokenizer

if TYPE_CHECKING:
    from kvlab.evaluation.planning import CompressAt, System
    from kvlab.inputs.models import LM


@dataclass(frozen=True)
class Fed:
    """A prompt as ids `[1, tokens]`; the first `context` of them may be compressed before the rest is fed."""

    ids: Tensor
    context: int


def feed(lm: LM, example: Example, compress_at: CompressAt) -> Fed:
    """An example's prompt with its chat template and the beginning of its answer.

    Raises:
        KvlabError: too long for the model, or no question to hold back.
    """
    tokenizer = require_tokenizer(lm)
    ids = lm.encode(example.prompt, chat="auto" if example.chat else False)
    context = None
    if compress_at == "context":
        if not example.question:
            raise KvlabError(
                f"{example.id} has no separate question, so it can only be compressed after the whole prompt"
            )
        context = _tokens_of_context(lm, example)
    if example.prefix:
        prefix = tokenizer(example.prefix, add_special_tokens=False, return_tensors="pt").input_ids
        ids = torch.cat([ids, prefix.to(ids.device)], 1)
    if ids.shape[1] + example.max_new_tokens > lm.context_length:
        raise KvlabError(
            f"{example.id} has {ids.shape[1]} tokens and asks for {example.max_new_tokens} more, which is beyond the "
            f"{lm.context_length} that {lm.name} takes"
        )
    return Fed(ids, ids.shape[1] if context is None else context)


def _tokens_of_context(lm: LM, example: Example) -> int:
    """How many tokens lie wholly before the question."""
    text, tokenizer = example.prompt, require_tokenizer(lm)
    templated = example.chat and getattr(tokenizer, "chat_template", None)
    if templated:
        message = [{"role": "user", "content": text}]
        text = str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
    # A template may trim the text, so the question is searched for instead of counted from the front.
    question = example.question.rstrip()
    start = text.rfind(question)
    if start < 0:
        raise KvlabError(f"the chat template of {lm.name} changes the question of {example.id}, so it cannot be found")
    encoded = tokenizer(text, add_special_tokens=not templated, return_offsets_mapping=True, verbose=False)
    offsets = cast("list[tuple[int, int]]", encoded["offset_mapping"])
    return sum(1 for _, end in offsets if end <= start)


@torch.inference_mode()
def generated(lm: LM, past: Any, logits: Tensor, example: Example) -> list[int]:
    """Greedy tokens, up to the model's end token, the text `until` of the example, or the limit."""
    ends, tokens = stops(lm), []
    for step in range(example.max_new_tokens):
        token = int(logits.argmax(-1))
        if token in ends:
            break
        tokens.append(token)
        if example.until and example.until in lm.decode(tokens).lstrip():
            break
        if step < example.max_new_tokens - 1:
            ids = torch.tensor([[token]], device=lm.device)
            logits = lm.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1]
    return tokens


def stops(lm: LM) -> set[int]:
    """The tokens at which an answer of the model ends."""
    configured = getattr(lm.model.generation_config, "eos_token_id", None)
    tokens = configured if isinstance(configured, list) else [configured]
    return {token for token in [*tokens, getattr(lm.tokenizer, "eos_token_id", None)] if token is not None}


@torch.inference_mode()
def answers(
    lm: LM, example: Example, wanted: Sequence[Policy | System], compress_at: CompressAt
) -> Iterator[dict[str, Any]]:
    """Answer one example with every policy, from one prefill: prediction, tokens, seconds and bytes of each.

    Args:
        wanted: policies, or pairs of a policy and a storage.
    """
    fed = feed(lm, example, compress_at)
    systems = [(each, AS_IS) if isinstance(each, Policy) else each for each in wanted]
    prefilled, logits, prefill_seconds = prefilled_for(lm, systems, fed.ids[:, : fed.context])
    for system in systems:
        start = time.perf_counter()
        with session_of(lm, system, example.max_new_tokens) as session:
            past = session.branch(prefilled)
            first = logits
            if fed.context < fed.ids.shape[1]:
                session.end_prompt()
                rest = fed.ids[:, fed.context :]
                first = lm.model(rest, past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1]
            tokens = generated(lm, past, first, example)
            # The first decoding step ends the prompt, but an answer that ends at once has none.
            session.end_prompt()
            yield told(lm, session, tokens, fed.ids.shape[1], prefill_seconds, start)


def prefilled_for(lm: LM, systems: Sequence[System], ids: Tensor) -> tuple[Any, Tensor, float]:
    """The cache of a prompt `[1, tokens]` that all systems can branch off, its last logits, and the seconds it took."""
    start = time.perf_counter()
    with gather(lm.model, [policy for policy, _ in systems]):
        out = lm.model(ids, use_cache=True, logits_to_keep=1)
    return out.past_key_values, out.logits[0, -1], time.perf_counter() - start


def session_of(lm: LM, system: System, max_new_tokens: int) -> Session:
    """A session in which what follows the compressed prompt is stored whole."""
    policy, storage = system
    return compress(
        lm.model, policy, storage=storage, turns="leave", tokenizer=lm.tokenizer, max_new_tokens=max_new_tokens
    )


def told(
    lm: LM, session: Session, tokens: list[int], prompt_tokens: int, prefill_seconds: float, start: float
) -> dict[str, Any]:
    """What is written down of an answer whose generation began at the time `start`."""
    return {
        "prediction": lm.decode(tokens) if tokens else "",
        "prompt_tokens": prompt_tokens,
        "generated_tokens": len(tokens),
        "prefill_seconds": prefill_seconds,
        "seconds": time.perf_counter() - start,
        "kv_bytes": session.kv_bytes,
        "aux_bytes": session.aux_bytes,
        "uncompressed_bytes": session.uncompressed_bytes,
    }
