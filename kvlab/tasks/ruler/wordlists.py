"""RULER's aggregation tasks (section 3.3): the ten common words of a list, the three frequent words of a coded text."""

from __future__ import annotations

import string
from bisect import bisect_right
from collections import Counter
from random import Random

from scipy.special import zeta

from kvlab.errors import KvlabError
from kvlab.tasks.base import Example
from kvlab.tasks.making import fit, piece_lengths, words
from kvlab.tasks.ruler.material import Material

COMMON = 10
ALPHA = 2.0
NOISE = "..."
_LONG = 4096  # from here on RULER repeats words more often


def common(material: Material, kind: str, length: int, draw: Random) -> Example:
    """cwe: ten words occur in the list 30 times each, and the others 3 times (below 4,096 tokens 6 times and once).

    A worked example of 40 words with 10 and 3 repetitions (20 words with 3 and 1) comes first.
    """
    shown, often, seldom, shot_often, shot_seldom = (40, 30, 3, 10, 3) if length >= _LONG else (20, 6, 1, 3, 1)
    pool = draw.sample(words("noun", "adjective", "verb"), k=len(words("noun", "adjective", "verb")))
    example, known, others = pool[:shown], pool[shown : shown + COMMON], pool[shown + COMMON :]
    order = draw.random()

    def listed(frequent_words: list[str], rare_words: list[str], times: tuple[int, int]) -> str:
        entries = frequent_words * times[0] + rare_words * times[1]
        Random(f"{order} {len(entries)}").shuffle(entries)
        return (
            "A numbered list of words follows. Some of them come more often than the others; keep those in mind.\n"
            + _numbered(entries)
            + "\n"
        )

    question = f"Question: Which {COMMON} words come most often in this list?"
    prefix = f" Answer: The top {COMMON} words that appear most often in the list are:"
    worked = (
        listed(example[:COMMON], example[COMMON:], (shot_often, shot_seldom))
        + f"{question}{prefix} {_numbered(example[:COMMON])}\n\n"
    )

    def build(others_used: int) -> Example:
        return Example(
            id=kind,
            context=worked + listed(known, others[:others_used], (often, seldom)),
            question=question,
            prefix=prefix,
            answers=tuple(known),
            max_new_tokens=120,
        )

    return fit(material.lm, build, length, "ruler's cwe", slope=6.0 * seldom)


def _numbered(entries: list[str]) -> str:
    return " ".join(f"{number}. {entry}" for number, entry in enumerate(entries, 1))


def frequent(material: Material, kind: str, length: int, draw: Random) -> Example:
    """fwe: the word of rank k occurs N k^-2 / zeta(2) times in N words, rounded down; rank 1 is noise, 2 to 4 wanted.

    The vocabulary has length // 50 words of six letters. Several ranks grow at the same N, so a little more noise fills
    the length.
    """
    coded: dict[str, None] = {}
    while len(coded) < max(length // 50, 5):
        coded["".join(draw.choices(string.ascii_lowercase, k=6))] = None
    ranked, order = [NOISE, *list(coded)[1:]], draw.random()
    costs = piece_lengths(material.lm, [f" {word}" for word in ranked])
    shares = [rank**-ALPHA / zeta(ALPHA) for rank in range(1, len(ranked) + 1)]

    def cost(n: int) -> int:
        return sum(int(n * share) * tokens for share, tokens in zip(shares, costs, strict=True))

    def build(room: int) -> Example:
        n = max(0, bisect_right(range(4 * room + 1), room, key=cost) - 1)
        entries = [word for word, share in zip(ranked, shares, strict=True) for _ in range(int(n * share))]
        entries += [NOISE] * ((room - cost(n)) // costs[0])
        Random(f"{order} {n}").shuffle(entries)
        return Example(
            id=kind,
            context=f"A coded text follows. Count how often each coded word comes. {' '.join(entries)}\n",
            question="Question: Which three coded words come most often? Leave out the dots '...'; explain nothing.",
            prefix=" Answer: According to the coded text above, the three most frequently appeared words are:",
            answers=tuple(ranked[1:4]),
            max_new_tokens=50,
        )

    made = fit(material.lm, build, length, "ruler's fwe")
    counts = Counter(made.context.split())
    if counts[ranked[3]] <= counts[ranked[4]]:
        raise KvlabError(f"ruler's fwe: {length} tokens are too few for three words to be more frequent than others")
    return made
