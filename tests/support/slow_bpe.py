"""Byte-pair encoding with plain loops, written from llama.cpp's list of expressions and GPT-2's paper.

It is the second opinion on tokenizers that are made of GGUF files.
"""

from __future__ import annotations

import re
import unicodedata

import regex

from support.tiny_gguf import byte_letters

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
LLAMA3 = SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Name in `tokenizer.ggml.pre` -> expressions, each of which splits what those before it have left.
SPLITS = {
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "command-r": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "olmo": [GPT2],
    "qwen2": [QWEN2],
    "stablelm2": [QWEN2],
    "llama-bpe": [LLAMA3],
    "dbrx": [LLAMA3],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
}
COMPOSED = ("qwen2", "command-r", "olmo")  # their published tokenizers normalise to NFC
UNMERGED = ("llama-bpe",)  # a piece that is a token as it stands is one


def split(text: str, pre: str) -> list[str]:
    pieces = [text]
    for expression in SPLITS[pre]:
        pieces = [part for piece in pieces for part in _apart(piece, expression)]
    return pieces


def _apart(piece: str, expression: str) -> list[str]:
    """The matches in a piece, and what stands between them."""
    parts, end = [], 0
    for match in regex.finditer(expression, piece):
        parts += [piece[end : match.start()], match[0]]
        end = match.end()
    return [part for part in [*parts, piece[end:]] if part]


class SlowBPE:
    """A byte-level tokenizer: `encode(text)` gives ids."""

    def __init__(self, tokens: list[str], merges: list[str], pre: str, special: list[str]):
        self.ids = {token: number for number, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.pre, self.letters, self.known = pre, byte_letters(), {}
        self.special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def encode(self, text: str) -> list[int]:
        ids, end = [], 0
        for match in self.special.finditer(text):
            ids += [*self._plain(text[end : match.start()]), self.ids[match[0]]]
            end = match.end()
        return ids + self._plain(text[end:])

    def _plain(self, text: str) -> list[int]:
        text = unicodedata.normalize("NFC", text) if self.pre in COMPOSED else text
        return [self.ids[symbol] for piece in split(text, self.pre) for symbol in self._symbols(piece)]

    def _symbols(self, piece: str) -> tuple[str, ...]:
        if piece not in self.known:
            self.known[piece] = self._merged(piece)
        return self.known[piece]

    def _merged(self, piece: str) -> tuple[str, ...]:
        symbols = [self.letters[byte] for byte in piece.encode()]
        if self.pre in UNMERGED and "".join(symbols) in self.ids:
            return ("".join(symbols),)
        while pairs := [(rank, at) for at in range(len(symbols) - 1) if (rank := self._rank(symbols, at)) is not None]:
            _, at = min(pairs)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return tuple(symbols)

    def _rank(self, symbols: list[str], at: int) -> int | None:
        return self.ranks.get((symbols[at], symbols[at + 1]))


def learnt(text: str, count: int) -> list[str]:
    """So many merges of the commonest pairs in a text that is not split at all: splitting then decides what applies."""
    letters = byte_letters()
    symbols, merges = [letters[byte] for byte in text.encode()], []
    while len(merges) < count:
        pairs: dict[tuple[str, str], int] = {}
        for pair in zip(symbols, symbols[1:], strict=False):
            pairs[pair] = pairs.get(pair, 0) + 1
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(" ".join(best))
        joined, at = [], 0
        while at < len(symbols):
            if tuple(symbols[at : at + 2]) == best:
                joined.append("".join(best))
                at += 2
            else:
                joined.append(symbols[at])
                at += 1
        symbols = joined
    return merges


class SlowSentencePiece:
    """SentencePiece's BPE with byte fallback: whole tokens first, then the pair whose piece was learnt first.

    Args:
        ids: piece -> id; a piece writes a space as U+2581, and was learnt the earlier the smaller its id.
        whole: tokens that are taken as they stand wherever they occur, with spaces written as such.
    """

    def __init__(self, ids: dict[str, int], whole: list[str]):
        self.ids = ids
        self.whole = re.compile("|".join(map(re.escape, sorted(whole, key=len, reverse=True))))

    def encode(self, text: str) -> list[int]:
        ids, end = [], 0
        for match in self.whole.finditer(text):
            ids += [*self._plain(text[end : match.start()]), self._id(match[0])]
            end = match.end()
        return ids + self._plain(text[end:])

    def _id(self, token: str) -> int:
        return self.ids[token] if token in self.ids else self.ids[token.replace(" ", "\u2581")]

    def _plain(self, text: str) -> list[int]:
        symbols = list(text.replace(" ", "\u2581"))
        while pairs := [
            (self.ids[joined], at)
            for at in range(len(symbols) - 1)
            if (joined := symbols[at] + symbols[at + 1]) in self.ids
        ]:
            _, at = min(pairs)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return [number for symbol in symbols for number in self._bytes(symbol)]

    def _bytes(self, symbol: str) -> list[int]:
        known = self.ids.get(symbol)
        return [known] if known is not None else [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
