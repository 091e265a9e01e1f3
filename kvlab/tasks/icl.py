"""Many-shot classification: labelled examples fill the context, and one more item waits for its label."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from kvlab.inputs import corpus, packs
from kvlab.tasks.base import Example, Task
from kvlab.tasks.hay import sentences
from kvlab.tasks.making import Lengths, Several, fill, fit, piece_lengths, require_tokenizer, spread

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

_THINGS = ("pot", "boat", "scarf", "lamp", "chair", "kite", "bucket", "door", "ribbon", "wagon", "ladder", "drum")
_TRAITS = {
    "colour": ("red", "blue", "green", "yellow", "white", "black"),
    "size": ("tiny", "small", "large", "huge", "narrow", "wide"),
    "place": ("Rome", "Oslo", "Lima", "Cairo", "Kyoto", "Perth"),
}
_EXTRAS = ("old", "new", "heavy", "light", "plain", "clean", "strong", "soft")  # they do not decide the label
_NAMES: tuple[str, ...] = ("dax", "wug", "fep", "zim", "blick", "tova", "kern", "mool")
_SOURCES = {"speech": "sotu", "encyclopedia": "squad", "chat": "chitchat"}
_WORDS = 8, 30  # how long a sentence may be


class ManyShot(Task):
    """Many-shot classification (after Agarwal et al. 2024 and HELMET's ICL): what does the cache keep of many examples?

    As many shots as the length takes, labels by turns, then an item without its label. Kinds:

    - `rule`: things with a colour, a size, a place and up to three idle traits. One of the first three, drawn for each
      example, decides the label. Labels are made-up words, so only the shots tell the rule;
    - `topic`: sentences of SQuAD's articles, labelled with the article's title;
    - `source`: sentences of speeches, encyclopedia articles and chats, labelled so.

    `classes` is the number of labels (of `source` at most three); `trials` counts the examples for each kind and
    length. As in LongBench's few-shot tasks there is no chat template. Score: `score`, whether the first line of the
    prediction is the label, upper or lower case.
    """

    name: ClassVar[str] = "icl"
    summary: ClassVar[str] = "many-shot classification: a symbolic rule, an article's topic, a sentence's source"

    lengths: Lengths = (512, 1024, 2048)
    kinds: Several[Literal["rule", "topic", "source"]] = ("rule", "topic", "source")
    classes: int = Field(3, ge=2, le=6)
    trials: int = Field(5, ge=1)

    def examples(self, lm: LM, limit: int | None = None) -> Iterator[Example]:
        """See Task.examples; about 10 ms for each example of 2,048 tokens."""
        require_tokenizer(lm)
        for kind, length, trial in spread(
            product(self.kinds, self.lengths, range(self.trials)), limit, kind=lambda cell: cell[0]
        ):
            draw = Random(f"{self.seed} {kind} {length} {trial}")
            items = getattr(self, f"_{kind}")(draw, length)
            yield self._example(lm, items, draw, kind, length, trial)

    def score(self, example: Example, prediction: str) -> dict[str, float]:
        """`score`, see the class."""
        first, _, _ = prediction.strip().partition("\n")
        return {"score": float(first.strip(" .\"'").lower() == example.answers[0].lower())}

    def _example(
        self, lm: LM, items: dict[str, list[str]], draw: Random, kind: str, length: int, trial: int
    ) -> Example:
        """items: label -> texts, the first of which may be asked for and is not shown."""
        labels = list(items)
        answer = draw.choice(labels)
        question = items[answer][0]
        shots = []
        for row in zip(*(texts[1:] for texts in items.values()), strict=False):
            turn = list(zip(row, labels, strict=True))
            draw.shuffle(turn)
            shots += [f"Item: {text}\nLabel: {label}\n\n" for text, label in turn if text != question]
        lengths = piece_lengths(lm, shots)

        def build(room: int) -> Example:
            return Example(
                id=f"icl-{kind}-{length}-{trial}",
                context="".join(shots[i] for i in fill(lengths, room)),
                question=f"Item: {question}\nLabel:",
                answers=(answer,),
                max_new_tokens=12,
                chat=False,
                marks={"kind": kind, "length": length, "trial": trial, "all_classes": labels},
            )

        return fit(lm, build, length, f"{self.name} of kind {kind}")

    def _rule(self, draw: Random, length: int) -> dict[str, list[str]]:
        names, deciding = draw.sample(_NAMES, self.classes), draw.choice(list(_TRAITS))
        telling = dict(zip(names, draw.sample(_TRAITS[deciding], self.classes), strict=True))

        def item(name: str) -> str:
            traits = {trait: draw.choice(values) for trait, values in _TRAITS.items()}
            traits[deciding] = telling[name]
            extras = "".join(f"{word}, " for word in draw.sample(_EXTRAS, draw.randrange(4)))
            return f"a {extras}{traits['size']} {traits['colour']} {draw.choice(_THINGS)} from {traits['place']}"

        return {name: [item(name) for _ in range(length // 8)] for name in names}

    def _topic(self, draw: Random, length: int) -> dict[str, list[str]]:
        packs.pull("squad")
        titles = draw.sample(corpus.names("squad"), self.classes)
        return {title.partition("/")[2].replace("_", " "): self._lines([title], draw, length) for title in titles}

    def _source(self, draw: Random, length: int) -> dict[str, list[str]]:
        lines = {}
        for label in draw.sample(list(_SOURCES), min(self.classes, len(_SOURCES))):
            packs.pull(_SOURCES[label])
            names = corpus.names(_SOURCES[label])
            lines[label] = self._lines(draw.sample(names, min(40, len(names))), draw, length)
        return lines

    def _lines(self, names: list[str], draw: Random, length: int) -> list[str]:
        """Sentences of the documents, each once, shuffled, enough for `length` tokens."""
        lines: dict[str, None] = {}
        for name in names:
            shots = [
                sentence.removeprefix("A: ").removeprefix("B: ").strip()
                for line in corpus.document(name).text.split("\n")
                for sentence in sentences(line)
            ]
            lines |= dict.fromkeys(text for text in shots if _WORDS[0] <= len(text.split()) <= _WORDS[1])
            if len(lines) > length // 4:
                break
        return draw.sample(list(lines), len(lines))
