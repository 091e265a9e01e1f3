"""How near a prediction comes to one reference answer, from the two texts alone: LongBench's metrics, in [0, 1] each.

The metrics follow those of LongBench's published numbers, oddities included, so that scores compare with them. The code
names each oddity (Bai et al., 2023, LongBench, table 1 and the authors' published scripts). Chinese is cut into words
by jieba, and ROUGE-L comes from the `rouge` package, because LongBench's numbers do.
"""

from __future__ import annotations

import difflib
import functools
import re
import string
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvlab.errors import KvlabError

# LongBench strips these from Chinese words. Of the marks around titles, only the closing one is among them. Of the
# full-width forms, the full stop is missing.
_CHINESE_PUNCTUATION = frozenset(
    string.punctuation
    + "".join(chr(ord(sign) + 0xFEE0) for sign in string.punctuation if sign != ".")
    + "｟｠｡｢｣､"
    + "、。〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿"
    + "–—‘’‛“”„‟…‧﹏"
)
_NO_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)


def qa_f1(prediction: str, answer: str) -> float:
    """F1 over words, after lower-casing and removing ASCII punctuation and the articles a, an and the.

    0 where no word is shared, so also where nothing is left of the answer.
    """
    return _f1(_english_words(prediction), _english_words(answer))


def qa_f1_zh(prediction: str, answer: str) -> float:
    """F1 over the words that jieba cuts, lower-cased and without Chinese and ASCII punctuation."""
    return _f1(_chinese_words(prediction), _chinese_words(answer))


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L's F as the `rouge` package has it: by sentences, over distinct words; 0 where one text is empty.

    Equal texts score 5e-9 below 1 (the package's guard against a division by zero). Sentences of about a thousand words
    overflow the stack of LongBench's own script, which then counts 0; here they are scored like any other.
    """
    if not prediction.strip(".") or not answer.strip("."):
        return 0.0
    with _deep_stack(len(prediction) + len(answer)):
        return _rouge().get_scores(prediction, answer)[0]["rouge-l"]["f"]


def rouge_l_zh(prediction: str, answer: str) -> float:
    """ROUGE-L's F over the words that jieba cuts, punctuation included."""
    return rouge_l(" ".join(_cut(prediction)), " ".join(_cut(answer)))


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 / the number of classes that the prediction names, if `answer` is among them, else 0.

    A class whose name is a part of the right one's does not count. But the class after one that was just dropped is not
    looked at, as in LongBench's script.
    """
    named = [name for name in classes if name in prediction]
    at = 0
    while at < len(named):
        if named[at] in answer and named[at] != answer:
            del named[at]
        at += 1
    return 1 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """The share of the numbers in the prediction that are the answer."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """The share of the numbers in the prediction that are the N of the answer "Paragraph N"."""
    return count(prediction, _number_after("Paragraph ", answer))


def retrieval_zh(prediction: str, answer: str) -> float:
    """The share of the numbers in the prediction that are the N of the answer "段落N"."""
    return count(prediction, _number_after("段落", answer))


def code_similarity(prediction: str, answer: str) -> float:
    """The likeness, in whole percent, of the answer and the prediction's first line without a backtick, # or //.

    It is fuzzywuzzy's ratio as it comes without python-Levenshtein: difflib's, rounded to an integer. (An edit distance
    gives other numbers, rapidfuzz's too, so the standard library stands here and not that.)
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def _f1(words: Sequence[str], reference: Sequence[str]) -> float:
    shared = sum((Counter(words) & Counter(reference)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(words), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def _english_words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_NO_ASCII_PUNCTUATION)).split()


def _chinese_words(text: str) -> list[str]:
    bare = ("".join(sign for sign in word.lower() if sign not in _CHINESE_PUNCTUATION) for word in _cut(text))
    return [word for word in ("".join(part.split()) for part in bare) if word]


def _number_after(name: str, answer: str) -> str:
    match = re.search(name + r"(\d+)", answer)
    if not match:
        raise KvlabError(f"a reference answer of paragraph retrieval is {name + 'N'!r}, and one is {answer[:40]!r}")
    return match[1]


@contextmanager
def _deep_stack(extra: int) -> Iterator[None]:
    """Room for `extra` more calls: the rouge package walks back through its table by recursion."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + extra)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@functools.cache
def _rouge() -> Any:
    from rouge import Rouge

    return Rouge(metrics=["rouge-l"], stats=["f"])


def _cut(text: str) -> list[str]:
    return list(_jieba().cut(text, cut_all=False))


@functools.cache
def _jieba() -> Any:
    """jieba with its own dictionary, read anew in each process (a second), so that it leaves no cache anywhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was written for older Pythons
        import jieba
    cutter = jieba.Tokenizer()
    cutter.FREQ, cutter.total = cutter.gen_pfdict(cutter.get_dict_file())
    cutter.initialized = True
    return cutter
