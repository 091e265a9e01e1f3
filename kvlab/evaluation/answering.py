"""Tasks x policies x budgets on a live model: one prefill for each prompt, every answer on disk as soon as it is there.

Results are a JSONL file with one line for each example, policy and budget. A run that was cut off goes on where it
stopped: a line is recognised by its key, and half a line at the end of the file is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlab.errors import KvlabError
from kvlab.evaluation.records import Answer, read
from kvlab.lib.files import why
from kvlab.live.gather import gather
from kvlab.live.session import compress
from kvlab.methods import Policy
from kvlab.tasks.base import Example
from kvlab.tasks.making import require_tokenizer

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

if TYPE_CHECKING:
    from kvlab.evaluation.planning import CompressAt, Plan


# ---------------------------------------------------------------------------------------------------- one example


@dataclass(frozen=True)
class Fed:
    """A prompt as the model is fed it: ids `[1, tokens]`, of which the first `context` may be compressed before the
    rest comes.
    """

    ids: Tensor
    context: int


def feed(lm: LM, example: Example, compress_at: CompressAt) -> Fed:
    """An example's prompt with its chat template and the beginning of its answer.

    Raises:
        KvlabError: too long for the model, or no question to hold back.
    """
    ids = lm.encode(example.prompt, chat="auto" if example.chat else False)
    context = None
    if compress_at == "context":
        if not example.question:
            raise KvlabError(
                f"{example.id} does not tell its context from its question, so it can only be compressed at the prompt"
            )
        context = _tokens_of_context(lm, example)
    if example.prefix:
        ids = torch.cat(
            [ids, lm.tokenizer(example.prefix, add_special_tokens=False, return_tensors="pt").input_ids.to(ids.device)],
            1,
        )
    if ids.shape[1] + example.max_new_tokens > lm.context_length:
        raise KvlabError(
            f"{example.id} has {ids.shape[1]} tokens and asks for {example.max_new_tokens} more, which is beyond the "
            f"{lm.context_length} that {lm.name} takes"
        )
    return Fed(ids, ids.shape[1] if context is None else context)


def _tokens_of_context(lm: LM, example: Example) -> int:
    """How many tokens lie wholly before the question."""
    text = example.prompt
    templated = example.chat and getattr(lm.tokenizer, "chat_template", None)
    if templated:
        text = lm.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
    # Templates trim what they are given, so the question is looked for, and not counted from the front.
    question = example.question.rstrip()
    start = text.rfind(question)
    if start < 0:
        raise KvlabError(f"the chat template of {lm.name} changes the question of {example.id}, so it cannot be found")
    offsets = lm.tokenizer(text, add_special_tokens=not templated, return_offsets_mapping=True, verbose=False)[
        "offset_mapping"
    ]
    return sum(1 for _, end in offsets if end <= start)


@torch.inference_mode()
def _generate(lm: LM, past: Any, logits: Tensor, example: Example) -> list[int]:
    """Greedy tokens until the model or the example ends, or the limit comes."""
    stops, tokens = _stops(lm), []
    for step in range(example.max_new_tokens):
        token = int(logits.argmax(-1))
        if token in stops:
            break
        tokens.append(token)
        if example.until and example.until in lm.decode(tokens).lstrip():
            break
        if step < example.max_new_tokens - 1:
            ids = torch.tensor([[token]], device=lm.device)
            logits = lm.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1]
    return tokens


def _stops(lm: LM) -> set[int]:
    configured = getattr(lm.model.generation_config, "eos_token_id", None)
    found = configured if isinstance(configured, list) else [configured]
    return {one for one in [*found, getattr(lm.tokenizer, "eos_token_id", None)] if one is not None}


@torch.inference_mode()
def answers(lm: LM, example: Example, wanted: Sequence[Policy], compress_at: CompressAt) -> Iterator[dict[str, Any]]:
    """Answer one example with every policy, from one prefill: prediction, tokens, seconds and bytes of each."""
    fed = feed(lm, example, compress_at)
    start = time.perf_counter()
    with gather(lm.model, wanted):
        out = lm.model(fed.ids[:, : fed.context], use_cache=True, logits_to_keep=1)
        prefilled, logits = out.past_key_values, out.logits[0, -1]
    prefill_seconds = time.perf_counter() - start
    for one in wanted:
        start = time.perf_counter()
        with compress(
            lm.model, one, turns="leave", tokenizer=lm.tokenizer, max_new_tokens=example.max_new_tokens
        ) as session:
            past = session.branch(prefilled)
            first = logits
            if fed.context < fed.ids.shape[1]:
                session.end_prompt()
                rest = fed.ids[:, fed.context :]
                first = lm.model(rest, past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1]
            tokens = _generate(lm, past, first, example)
            # An answer that ends at once never had a decoding step, which would have ended the prompt.
            session.end_prompt()
            yield {
                "prediction": lm.decode(tokens) if tokens else "",
                "prompt_tokens": fed.ids.shape[1],
                "generated_tokens": len(tokens),
                "prefill_seconds": prefill_seconds,
                "seconds": time.perf_counter() - start,
                "kv_bytes": session.kv_bytes,
                "aux_bytes": session.aux_bytes,
            }


# ---------------------------------------------------------------------------------------------------- a whole run


def run(
    lm: LM, wanted: Plan, path: str | Path, advance: Callable[[str, int, int], None] = lambda *_: None
) -> list[Answer]:
    """Evaluate, appending every answer to the JSONL at `path` as soon as it is there; what is in it is not run again.

    Args:
        advance: called with a label, how many answers are done and how many there will be.

    Returns:
        The answers of this plan, in the order of examples and policies.

    Raises:
        KvlabError: a model without tokenizer, or a file that cannot be written; nothing has run by then.
    """
    from filelock import FileLock, Timeout

    path = Path(path)
    if os.path.isdir(path):
        raise KvlabError(f"{path} is a folder; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvlabError(f"cannot write {path}: {why(error)}") from None
    require_tokenizer(lm)
    try:
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=0):
            return _run(lm, wanted, path, advance)
    except Timeout:
        raise KvlabError(f"another evaluation is writing {path}; wait for it, or name another file") from None


def _run(lm: LM, wanted: Plan, path: Path, advance: Callable[[str, int, int], None]) -> list[Answer]:
    known = {answer.key: answer for answer in read(path, mend=True)}
    examples = list(wanted.task.examples(lm, wanted.limit))
    total, done = len(examples) * len(wanted.policies), 0
    signatures = {one: wanted.signature(lm, one) for one in wanted.policies}
    found: list[Answer] = []
    with path.open("a", encoding="utf-8") as file:
        for example in examples:
            keys = {one: _key(signatures[one], example) for one in wanted.policies}
            missing = [one for one in wanted.policies if keys[one] not in known]
            produced = zip(missing, answers(lm, example, missing, wanted.compress_at), strict=True) if missing else ()
            for one, made in produced:
                answer = _answer(wanted, example, one, keys[one], signatures[one], made)
                known[answer.key] = answer
                file.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
                advance(f"{example.id}, {one.name}", done + missing.index(one) + 1, total)
            found += [known[keys[one]] for one in wanted.policies]
            done += len(wanted.policies)
            advance(example.id, done, total)
    return found


def _answer(wanted: Plan, example: Example, one: Policy, key: str, signature: str, made: dict[str, Any]) -> Answer:
    return Answer(
        key=key,
        task=wanted.task.name,
        example=example.id,
        policy=one.name,
        budget=getattr(one, "budget", None),
        compress_at=wanted.compress_at,
        answers=list(example.answers),
        scores=wanted.task.score(example, made["prediction"]),
        metric=wanted.task.metric,
        marks=dict(example.marks),
        signature=signature,
        **made,
    )


def _key(signature: str, example: Example) -> str:
    text = json.dumps(
        [signature, example.id, example.prompt, example.prefix, example.chat, example.max_new_tokens, example.until]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:24]
