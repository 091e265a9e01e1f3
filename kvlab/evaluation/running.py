"""A whole evaluation: every answer of a plan, on disk as soon as it is there.

Results are a JSONL file with one line for each example, policy and budget. A run that was cut off goes on where it
stopped. A line is recognised by its key. Half a line at the end of the file is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.core.hookable import head_dim_of, layers_of
from kvlab.errors import KvlabError
from kvlab.evaluation.conversing import answered
from kvlab.evaluation.planning import Plan, System
from kvlab.evaluation.records import Answer, read
from kvlab.lib.files import why
from kvlab.methods._base.contract import warned_of_raised
from kvlab.tasks.base import Example
from kvlab.tasks.making import require_tokenizer

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

Advance = Callable[[str, int, int], None]
"""Called with a label, how many answers are done and how many there will be."""


def run(lm: LM, wanted: Plan, path: str | Path, advance: Advance = lambda *_: None) -> list[Answer]:
    """Evaluate a plan. Every answer is appended to the JSONL at `path` as soon as it is there; answers in it are not
    run again.

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
            return _complete(lm, wanted, path, advance)
    except Timeout:
        raise KvlabError(f"another evaluation is writing {path}; wait for it, or name another file") from None


def _complete(lm: LM, wanted: Plan, path: Path, advance: Advance) -> list[Answer]:
    """All answers of the plan: those in the file are taken from it, missing ones are run and appended."""
    known = {answer.key: answer for answer in read(path, mend=True)}
    examples = list(wanted.task.examples(lm, wanted.limit))
    systems = wanted.systems
    _check(lm, systems)
    if examples:
        first = lm.encode(examples[0].prompt, chat="auto" if examples[0].chat else False)
        warned_of_raised((policy for policy, _ in systems), first.shape[-1])
    total, done = len(examples) * len(systems), 0
    signatures = {system: wanted.signature(lm, *system) for system in systems}
    complete: list[Answer] = []
    with path.open("a", encoding="utf-8") as file:
        for example in examples:
            parts = example.parts
            earlier = [[] if example.branched else [part.question for part in parts[:n]] for n in range(len(parts))]
            keys = {
                system: [_key(signatures[system], *asked) for asked in zip(parts, earlier, strict=True)]
                for system in systems
            }
            missing = [system for system in systems if any(key not in known for key in keys[system])]
            produced = zip(missing, answered(lm, example, missing, wanted.compress_at), strict=True) if missing else ()
            for system, made in produced:
                for part, key, one in zip(parts, keys[system], made, strict=True):
                    if key not in known:
                        known[key] = _answer(wanted, part, system, key, signatures[system], one)
                        file.write(json.dumps(asdict(known[key]), ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
                policy, storage = system
                advance(f"{example.id}, {storage.behind(policy.name)}", done + missing.index(system) + 1, total)
            complete += [known[key] for system in systems for key in keys[system]]
            done += len(systems)
            advance(example.id, done, total)
    return complete


def _check(lm: LM, systems: list[System]) -> None:
    """Raise KvlabError, before anything runs, where a storage is nothing for this model."""
    for storage in dict.fromkeys(storage for _, storage in systems):
        storage.check(head_dim_of(lm.model, layers_of(lm.model)[0]), lm.device)


def _answer(wanted: Plan, example: Example, system: System, key: str, signature: str, made: dict[str, Any]) -> Answer:
    policy, storage = system
    return Answer(
        key=key,
        task=wanted.task.name,
        example=example.id,
        policy=policy.name,
        budget=getattr(policy, "budget", None),
        storage=str(storage),
        compress_at=wanted.compress_at,
        answers=list(example.answers),
        scores=wanted.task.score(example, made["prediction"]),
        metric=wanted.task.metric,
        marks=dict(example.marks),
        signature=signature,
        **made,
    )


def _key(signature: str, example: Example, earlier: Sequence[str] = ()) -> str:
    asked = [signature, example.id, example.prompt, example.prefix, example.chat, example.max_new_tokens, example.until]
    text = json.dumps([*asked, *([earlier] if earlier else [])])
    return hashlib.sha256(text.encode()).hexdigest()[:24]
