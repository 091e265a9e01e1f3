"""LongGenBench (Wu et al., 2024): a long response of numbered entries, some of which must hold what was asked for."""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from kvlab.errors import KvlabError
from kvlab.lib.files import expanded, jsonl, parsed
from kvlab.lib.parameters import PathText
from kvlab.tasks.base import Example, Task
from kvlab.tasks.longgen_prompts import SHORT
from kvlab.tasks.making import piece_tokens

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

CHECKS = ("once", "range", "periodic")
SEPARATOR, END = "#*#", "*** finished"
_FILLERS = "a an the and or of in on at to for with by from my your his her our their featuring"
_FILLER = frozenset(_FILLERS.split())


class LongGen(Task):
    """LongGenBench's four kinds (diary, menu, skyscraper, city), from its JSONL or made here for small models.

    Without a `file`, kvlab makes prompts of the same four kinds that ask for `entries` short entries. Two or more
    things must be in one entry each (once). One thing must be in neighbouring entries (range), and one in entries at
    equal distances (periodic). The chat template is used where the model has one. The answer begins with the first
    entry's heading.

    Scores, each in [0, 1] (section 3 of the paper; MorphKV's table 2):
        completion: share of the wanted entries that are there, with a text.
        once, range, periodic: share of the checks that are met; those of a missing entry are not (the paper's STIC-2).
        accuracy: the mean of these three.
        accuracy_written: share of the checks that are met where the entry is there (STIC-1, pooled over the three; 0
            if no entry is).

    The paper lets a language model judge whether an entry holds what was asked for. Here an entry does if it has at
    least `share` of the words of the wanted phrase, without filler words, endings and text in brackets. This is cheap
    and always the same; its figures compare policies, not with the paper's.

    Attributes:
        file: LongGenBench's JSONL; None makes prompts.
        entries: entries of a made prompt.
        words: about how many words each of its entries should have.
        number: made prompts of each kind.
        new_tokens: the longest answer; shortened to what the model's context leaves. None for 8,192 (MorphKV's cap)
            with a file, else 1.5 times what `entries` and `words` ask for.
        share: of a phrase's words, for a check to be met.
        chat: whether to use the chat template.
    """

    name: ClassVar[str] = "longgen"
    summary: ClassVar[str] = "LongGenBench: long responses of numbered entries, each checked for its required content"
    metric: ClassVar[str] = "accuracy"

    file: PathText | None = None
    entries: int = Field(8, ge=6, le=1000)
    words: int = Field(20, ge=1)
    number: int = Field(10, ge=1)
    new_tokens: int | None = Field(None, ge=1)
    share: float = Field(0.75, gt=0, le=1)
    chat: bool = True

    def examples(self, lm: LM, limit: int | None = None) -> Iterator[Example]:
        """The examples of the kinds in turn, at most `limit`.

        Raises KvlabError for a file that is not LongGenBench's, and for a prompt that leaves no room for an answer.
        """
        examples = self._made() if self.file is None else _in_turn(read(self.file, self.chat))
        longest = self.new_tokens or (8192 if self.file else 50 + self.entries * (12 + 2 * self.words))
        for example in examples[:limit]:
            tokens = lm.encode(example.prompt, chat="auto" if self.chat else False).shape[1]
            tokens += len(piece_tokens(lm, [example.prefix])[0]) if example.prefix else 0
            if tokens >= lm.context_length:
                raise KvlabError(
                    f"{example.id} has {tokens} tokens, and {lm.name} takes {lm.context_length}: no room for an answer"
                )
            fields = vars(example) | {
                "max_new_tokens": min(longest, lm.context_length - tokens),
                "marks": example.marks | {"tokens": tokens},
            }
            yield Example(**fields)

    def score(self, example: Example, prediction: str) -> dict[str, float]:
        """Completion, accuracy of the three kinds of checks (a kind that was not asked for is left out), and means."""
        written = entries(example.prefix + prediction, example.marks["type"], example.marks["entries"])
        by_kind: dict[str, list[bool | None]] = {}
        for check in example.answers:
            kind, number, phrase = _check(check)
            entry = written.get(number)
            by_kind.setdefault(kind, []).append(None if entry is None else holds(entry, phrase, self.share))
        shares = {kind: sum(map(bool, by_kind[kind])) / len(by_kind[kind]) for kind in CHECKS if kind in by_kind}
        checks = [met for kind in by_kind.values() for met in kind if met is not None]
        return {
            "completion": len(written) / example.marks["entries"],
            **shares,
            "accuracy": sum(shares.values()) / len(shares) if shares else 0.0,
            "accuracy_written": sum(checks) / len(checks) if checks else 0.0,
        }

    def _made(self) -> list[Example]:
        return [self._make(kind, index) for index in range(self.number) for kind in SHORT]

    def _make(self, kind: str, index: int) -> Example:
        """A prompt whose demands fall on different entries."""
        rng, short = random.Random(f"{self.seed} {kind} {index} {self.entries}"), SHORT[kind]
        period = max(3, self.entries // 4)
        start = rng.randint(1, period)
        periodic = list(range(start, self.entries + 1, period))
        free = [entry for entry in range(1, self.entries + 1) if entry not in periodic]
        span = rng.randint(2, period - 1)
        first = rng.choice([entry for entry in free if set(range(entry, entry + span)) <= set(free)])
        between = range(first, first + span)
        free = [entry for entry in free if entry not in between]
        singles = sorted(rng.sample(free, min(len(free), len(short.once), max(2, self.entries // 5))))
        events = dict(zip(singles, rng.sample(short.once, len(singles)), strict=True))
        over, again = rng.choice(short.range), rng.choice(short.periodic)
        unit = short.type
        demands = [f"- {unit} {entry}: {event}." for entry, event in events.items()]
        demands.append(f"- From {unit} {first} to {unit} {between[-1]}: {over}.")
        demands.append(f"- Every {period} {short.units}, starting from {unit} {start}: {again}.")
        text = (
            f"{short.opening.format(entries=self.entries)}\n"
            + "\n".join(demands)
            + f"\nWrite all {self.entries} entries in order, about {self.words} words each. Begin every entry with "
            f"'{SEPARATOR} {unit} N:', N being its number, and mention in it what is planned for it. After "
            f"{unit} {self.entries} write '{END} ***'."
        )
        checks = [f"once {entry}: {event}" for entry, event in events.items()]
        checks += [f"range {entry}: {over}" for entry in between]
        checks += [f"periodic {entry}: {again}" for entry in periodic]
        return Example(
            f"{kind}/{self.entries}-{self.seed}-{index}",
            text,
            "",
            tuple(checks),
            1,
            self.chat,
            f"{SEPARATOR} {unit} 1:",
            {"kind": kind, "type": unit, "entries": self.entries},
        )


def entries(text: str, unit: str, number: int) -> dict[int, str]:
    """The entries 1 to `number` of a response, by number; of an entry written twice the last one counts.

    An entry follows the separator. It begins with its unit and number ("Week 3"), which are not part of it, and perhaps
    a bracket. An entry without words after these counts as missing.
    """
    texts = {}
    heading = re.compile(rf"\s*{re.escape(unit)}\s+(\d{{1,9}})\b\s*(\([^)]*\))?", re.IGNORECASE)
    for block in text.split(END)[0].split(SEPARATOR):
        match = heading.match(block)
        if match and 1 <= int(match[1]) <= number and re.search(r"\w", block[match.end() :]):
            texts[int(match[1])] = block[match.end(1) :].strip()
    return texts


def holds(entry: str, phrase: str, share: float = 0.75) -> bool:
    """Whether an entry has at least `share` of the phrase's words, whatever their endings and order."""
    stems = _stems(re.sub(r"\([^)]*\)", " ", phrase)) or _stems(phrase)
    return bool(stems) and len(stems & _stems(entry)) >= math.ceil(share * len(stems) - 1e-9)


def read(path: str | os.PathLike, chat: bool = True) -> list[Example]:
    """The examples of a LongGenBench JSONL file; raises KvlabError, with file and line number, for anything else.

    A line has the fields `prompt`, `type` (the word for an entry) and `number` (of entries). `checks_once`,
    `checks_range` and `checks_periodic` map the number of an entry to the text that it must hold. `prefix` is the first
    entry's heading, with which the prompt ends.
    """
    path, examples = expanded(path), []
    for line, text in jsonl(path):
        try:
            examples.append(_example(parsed(text), f"{path.stem}-{line}", chat))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{error} is missing" if isinstance(error, KeyError) else error
            raise KvlabError(f"{path}, line {line} is no record of LongGenBench: {problem}") from error
    if not examples:
        raise KvlabError(f"{path} is empty: there are no records of LongGenBench in it")
    return examples


def _example(record: dict[str, Any], name: str, chat: bool) -> Example:
    prefix, unit = str(record.get("prefix") or ""), record["type"]
    prompt = record["prompt"].rstrip()
    if prefix and prompt.endswith(prefix):  # it begins the answer, so it comes after the chat template
        prompt = prompt[: -len(prefix)].rstrip()
    checks = tuple(
        f"{kind} {int(number)}: {phrase}"
        for kind in CHECKS
        for number, phrase in (record.get(f"checks_{kind}") or {}).items()
    )
    kind = {short.type.lower(): kind for kind, short in SHORT.items()}.get(unit.lower(), unit)
    return Example(
        f"{kind}/{name}",
        prompt,
        "",
        checks,
        1,
        chat,
        prefix,
        {"kind": kind, "type": unit, "entries": int(record["number"])},
    )


def _in_turn(examples: list[Example]) -> list[Example]:
    """The first of each kind, then the second of each, and so on."""
    rank, seen = [], dict.fromkeys((example.marks["kind"] for example in examples), 0)
    for example in examples:
        rank.append(seen[example.marks["kind"]])
        seen[example.marks["kind"]] += 1
    return [example for _, _, example in sorted(zip(rank, range(len(examples)), examples, strict=True))]


def _check(answer: str) -> tuple[str, int, str]:
    parts = re.fullmatch(r"(\w+) (\d+): (.*)", answer, re.DOTALL)
    assert parts is not None, "answers are made by this module"
    kind, number, phrase = parts.groups()
    return kind, int(number), phrase


def _stems(text: str) -> set[str]:
    words = re.findall(r"[^\W\d_]+", re.sub(r"['’]s\b", "", text.lower()))
    return {_stem(word) for word in words if word not in _FILLER}


def _stem(word: str) -> str:
    for ending in ("ings", "ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) > len(ending) + 2:
            word = word.removesuffix(ending)
            break
    while len(word) > 3 and word[-1] in "yie":  # galleries, gallery
        word = word[:-1]
    return word
