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
from kvlab.lib.batches import batches
from kvlab.live.decode_batch import batch_size, decode_batch
from kvlab.live.session import Session, compress
from kvlab.live.shared_prefill import shared_prefill
from kvlab.methods import Policy
from kvlab.tasks.base import Example
from kvlab.tasks.making import require_tokenizer

if TYPE_CHECKING:
    from kvlab.evaluation.planning import CompressAt, System
    from kvlab.inputs.models import LM
    from kvlab.live.cache import LiveCache


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


class Greedy:
    """Greedy tokens, up to the model's end token, the text `until` of an example, or its limit.

    Attributes:
        tokens: the answer.
        next: its last token, which is to be fed next; None once it has ended.
    """

    def __init__(self, lm: LM, example: Example, first: Tensor):
        self.tokens: list[int] = []
        self.next: int | None = None
        self._lm, self._example, self._ends = lm, example, stops(lm)
        self.accept_logits(first)

    def accept_logits(self, logits: Tensor) -> None:
        """Go on with the likeliest token of `[vocabulary]`."""
        token, example, self.next = int(logits.argmax(-1)), self._example, None
        if token in self._ends:
            return
        self.tokens.append(token)
        over = example.until and example.until in self._lm.decode(self.tokens).lstrip()
        if not over and len(self.tokens) < example.max_new_tokens:
            self.next = token


@torch.inference_mode()
def generated(lm: LM, past: Any, logits: Tensor, example: Example) -> list[int]:
    """An answer that goes on from a cache and the logits behind it."""
    said = Greedy(lm, example, logits)
    while said.next is not None:
        ids = torch.tensor([[said.next]], device=lm.device)
        said.accept_logits(lm.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1])
    return said.tokens


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

    The policies' caches are the rows of batches, which share their steps. `seconds` are those of an answer's own
    compression and its share of the steps.

    Args:
        wanted: policies, or pairs of a policy and a storage.
    """
    fed = feed(lm, example, compress_at)
    systems = [(each, AS_IS) if isinstance(each, Policy) else each for each in wanted]
    prefilled, logits, prefill_seconds = prefilled_for(lm, systems, fed.ids[:, : fed.context])
    for batch in batches(systems, batch_size(lm)):
        rows = [_Answer(lm, system, example, fed, prefilled, logits) for system in batch]
        start = time.perf_counter()
        decode_batch(lm, rows)
        each = (time.perf_counter() - start) / max(1, sum(row.steps for row in rows))
        for row in rows:
            yield row.describe(fed.ids.shape[1], prefill_seconds, each)


class _Answer(Greedy):
    """The answer under one policy, as a row of a batch (`kvlab.live.decode_batch`).

    Args:
        prefilled, logits: of the part of the prompt that is compressed.
    """

    def __init__(self, lm: LM, system: System, example: Example, fed: Fed, prefilled: LiveCache, logits: Tensor):
        start = time.perf_counter()
        with session_of(lm, system, example.max_new_tokens) as session:
            past = session.branch(prefilled)
            session.end_prompt()
            if fed.context < fed.ids.shape[1]:
                rest = fed.ids[:, fed.context :]
                logits = lm.model(rest, past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1]
        self.session, self.steps = session, 0
        self._beside = session.uncompressed_bytes
        super().__init__(lm, example, logits)
        self._seconds = time.perf_counter() - start

    def accept_logits(self, logits: Tensor) -> None:
        super().accept_logits(logits)
        self.steps += self.next is not None

    def end(self, running: Session) -> None:
        self._beside = running.uncompressed_bytes

    def describe(self, prompt_tokens: int, prefill_seconds: float, seconds_of_a_step: float) -> dict[str, Any]:
        seconds = self._seconds + self.steps * seconds_of_a_step
        found = answer_record(self._lm, self.session, self.tokens, prompt_tokens, prefill_seconds, seconds)
        return {**found, "uncompressed_bytes": self._beside}


def prefilled_for(lm: LM, systems: Sequence[System], ids: Tensor) -> tuple[Any, Tensor, float]:
    """The cache of a prompt `[1, tokens]` that all systems can branch off, its last logits, and the seconds it took."""
    start = time.perf_counter()
    with shared_prefill(lm.model, [policy for policy, _ in systems]):
        out = lm.model(ids, use_cache=True, logits_to_keep=1)
    return out.past_key_values, out.logits[0, -1], time.perf_counter() - start


def session_of(lm: LM, system: System, max_new_tokens: int) -> Session:
    """A session in which what follows the compressed prompt is stored whole. A policy that chooses anew in each turn
    does so once the turn's question has been read.
    """
    policy, storage = system
    turns = "recompress" if policy.renews else "leave"
    return compress(
        lm.model, policy, storage=storage, turns=turns, tokenizer=lm.tokenizer, max_new_tokens=max_new_tokens
    )


def answer_record(
    lm: LM, session: Session, tokens: list[int], prompt_tokens: int, prefill_seconds: float, seconds: float
) -> dict[str, Any]:
    """The record of an answer that took `seconds` after the shared prefill."""
    return {
        "prediction": lm.decode(tokens) if tokens else "",
        "prompt_tokens": prompt_tokens,
        "generated_tokens": len(tokens),
        "prefill_seconds": prefill_seconds,
        "seconds": seconds,
        "kv_bytes": session.kv_bytes,
        "aux_bytes": session.aux_bytes,
        "uncompressed_bytes": session.uncompressed_bytes,
    }
