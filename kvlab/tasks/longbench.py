"""LongBench (Bai et al., 2023): 21 real tasks in English, Chinese and code, from JSONL files in its format."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from kvlab import scores
from kvlab.errors import KvlabError
from kvlab.inputs import longbench_records, packs
from kvlab.inputs.tokens import token_spans
from kvlab.lib.files import first_line
from kvlab.lib.parameters import PathText
from kvlab.tasks.base import Example, Task
from kvlab.tasks.longbench_prompts import PROMPTS

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

HUB = ("THUDM/LongBench", "data.zip")
LEAST = 64
"""Fewer tokens than this for a prompt are refused."""


class LongBench(Task):
    """LongBench's records with its conventions: prompts, middle truncation, longest answers, metrics.

    A record has a context and an input, which go into `longbench_prompts`, or a ready `prompt`. In a ready prompt the
    question begins with the same words as in LongBench's own prompts. A prompt that is too long loses its middle: half
    of the tokens that fit stay at its start, and half at its end. It is cut between characters of the text, whereas
    LongBench decodes token ids. Six tasks (few-shot and code) go without the chat template. An answer to samsum ends
    with its first line, as in LongBench. The order is fixed, and `seed` changes nothing.

    Attributes:
        folder: a folder of .jsonl files, or one file.
        hub: fetch LongBench itself from the hub (114 MB, once, into the cache); nothing is fetched otherwise.
        tasks: names of the tasks wanted; empty for all that are there.
        length: longest prompt in tokens, chat template included; None for the model's context less the answer.
        longer: the treatment of longer prompts: "cut" in the middle, or "skip".
    """

    name: ClassVar[str] = "longbench"
    summary: ClassVar[str] = "LongBench's 21 tasks with its prompts, truncation and metrics; needs folder= or hub=true"

    folder: PathText | None = None
    hub: bool = False
    tasks: tuple[str, ...] = ()
    length: int | None = Field(None, ge=LEAST)
    longer: Literal["cut", "skip"] = "cut"

    @field_validator("tasks", mode="before")
    @classmethod
    def _names(cls, tasks: str | Iterable[str]) -> tuple[str, ...]:
        return tuple(part.strip() for part in tasks.split(",")) if isinstance(tasks, str) else tuple(tasks)

    def examples(self, lm: LM, limit: int | None = None) -> Iterator[Example]:
        """The examples of the tasks in turn, at most `limit`.

        Raises KvlabError where no data is named or can be fetched, a task is unknown or missing, or the model has no
        tokenizer.
        """
        made = {task: self._made(lm, task, records) for task, records in self._records().items()}
        waiting, yielded = _order(list(made), limit), 0
        while waiting:
            for task in list(waiting):
                if limit is not None and yielded >= limit:
                    return
                example = next(made[task], None)
                if example is None:
                    waiting.remove(task)
                    continue
                yielded += 1
                yield example
        if not yielded:
            raise KvlabError(
                f"longbench: every prompt is longer than {self.length or lm.context_length} tokens, and "
                "longer='skip' leaves them out"
            )

    def score(self, example: Example, prediction: str) -> dict[str, float]:
        """LongBench's metric of the example's task, the best over its answers."""
        return {
            "score": scores.score(example.marks["kind"], prediction, example.answers, example.marks.get("all_classes"))
        }

    def _records(self) -> dict[str, list[longbench_records.Record]]:
        """The records of each wanted task, in LongBench's order of tasks."""
        for task in self.tasks:
            scores.convention(task)
        if self.folder is None and not self.hub:
            raise KvlabError(
                "longbench needs data: folder=... names JSONL files in LongBench's format, and hub=true "
                "fetches LongBench from the hub"
            )
        records: dict[str, list[longbench_records.Record]] = {}
        for record in longbench_records.read(self.folder if self.folder is not None else fetch()):
            scores.convention(record.task)
            records.setdefault(record.task, []).append(record)
        missing = [task for task in self.tasks if task not in records]
        if missing:
            raise KvlabError(f"longbench: there are no records of {missing[0]}, only of {', '.join(sorted(records))}")
        return {task: records[task] for task in PROMPTS if task in records and (not self.tasks or task in self.tasks)}

    def _made(self, lm: LM, task: str, records: list[longbench_records.Record]) -> Iterator[Example]:
        rule, seen = scores.convention(task), set()
        room = min(self.length or lm.context_length, lm.context_length - rule.new_tokens)
        if room < LEAST:
            raise KvlabError(
                f"{lm.name} takes {lm.context_length} tokens: too few for a prompt of {task} and its "
                f"answer of up to {rule.new_tokens}"
            )
        for record in records:
            context, question = parts(record)
            tokens = _tokens(lm, context + question, rule.chat)
            if tokens > room:
                if self.longer == "skip":
                    continue
                context, question, tokens = _cut(lm, context, question, rule.chat, tokens, room)
            name = f"{task}/{record.id}" + (f"#{record.line}" if record.id in seen else "")
            seen.add(record.id)
            marks = {"kind": task, "tokens": tokens}
            if record.all_classes is not None:
                marks["all_classes"] = list(record.all_classes)
            until = "\n" if task == "samsum" else ""
            yield Example(name, context, question, record.answers, rule.new_tokens, rule.chat, until=until, marks=marks)


def parts(record: longbench_records.Record) -> tuple[str, str]:
    """The context and the question of a record's prompt; joined they are the prompt.

    In a ready prompt the question begins at the last occurrence of the words that begin it in LongBench's prompts of
    that task. Without such an occurrence it is empty.
    """
    prompt = PROMPTS[record.task]
    if record.prompt is None:
        return prompt.before + record.context, prompt.question(record.input)
    at = record.prompt.rfind(prompt.starts)
    return (record.prompt[:at], record.prompt[at:]) if at > 0 else (record.prompt, "")


def fetch() -> Path:
    """The folder of LongBench's JSONL files, fetched from the hub once; raises KvlabError where that cannot be."""
    return packs.build_once(packs.home() / "longbench", _unpack, "fetching LongBench from the hub (114 MB)")


def _unpack(folder: Path) -> None:
    from huggingface_hub import hf_hub_download

    repository, file = HUB
    try:
        fetched = hf_hub_download(repository, file, repo_type="dataset")
        with zipfile.ZipFile(fetched) as archive:
            for task in PROMPTS:
                with archive.open(f"data/{task}.jsonl") as source, (folder / f"{task}.jsonl").open("wb") as target:
                    shutil.copyfileobj(source, target)
    except Exception as error:  # the hub's client raises a dozen unrelated kinds, all of which mean "cannot be had"
        first = first_line(error).rstrip(".")
        raise KvlabError(
            f"cannot get {file} of the dataset {repository} from the hub ({first}); give folder=... with "
            "LongBench's JSONL files instead"
        ) from error


def _order(tasks: list[str], limit: int | None) -> list[str]:
    """The tasks, reordered: the first `limit` are spread over all of them."""
    if limit is None or limit >= len(tasks):
        return tasks
    first = [tasks[i * len(tasks) // limit] for i in range(limit)]
    return first + [task for task in tasks if task not in first]


def _tokens(lm: LM, prompt: str, chat: bool) -> int:
    return lm.encode(prompt, chat="auto" if chat else False).shape[1]


def _cut(lm: LM, context: str, question: str, chat: bool, tokens: int, room: int) -> tuple[str, str, int]:
    """Context, question and tokens of a prompt without its middle, so that `room` tokens hold it."""
    text = context + question
    remedy = "longer='skip' leaves out the prompts that would have to be cut"
    spans = token_spans(lm.require_tokenizer("no prompt can be cut for it"), text, remedy)
    keep = len(spans) - (tokens - room)
    while keep > 1:
        head = spans[(keep + 1) // 2 - 1][1]
        tail = max(head, spans[len(spans) - keep // 2][0])  # two tokens may share one character
        split = len(context)
        shorter = text[: min(head, split)] + text[tail:split], text[split:head] + text[max(tail, split) :]
        now = _tokens(lm, "".join(shorter), chat)
        if now <= room:
            return *shorter, now
        keep -= now - room
    raise KvlabError(f"{room} tokens are too few for a prompt: {lm.name}'s chat template alone takes nearly as many")
