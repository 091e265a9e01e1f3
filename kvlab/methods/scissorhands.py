"""Scissorhands (Liu et al., 2023): what was seldom important lately goes first."""

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.store import LayerStore
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.eviction import evict_lowest, part
from kvlab.methods._base.policy import Budget, Policy, top_and_last
from kvlab.methods._base.prompt import Prompt

WORD = 64


class Scissorhands(Policy):
    """Keeps the recent part and the older tokens that least often got less than average attention.

    Scissorhands (Liu et al. 2023), algorithm 2: count how often a token's attention fell below the average, over the
    last H queries. The average is 1/t for a query that attends to t entries. The highest count older than the recent
    part leaves. One leaves at each decoding step (m = 1 of the paper's algorithm, whose runs drop half of the buffer at
    once). Rows are compared as they were attended and never recomputed: a ring of H bits is kept with each entry. Cost:
    H bits and one count for each entry; the attention of H prompt queries.

    Choices where the paper is silent: attention is averaged over the GQA group before it is compared, and the group
    shares one set. A token has no count from queries before it. Of equal counts the earlier position stays.

    Parameters:
        budget: entries for each layer and KV head.
        recent: share of the budget for the most recent tokens, which always stay (0.5).
        history: H as a share of the budget (0.2: the paper's 400 steps at a budget of about 2048), at least one query.
    """

    name: ClassVar[str] = "scissorhands"
    summary: ClassVar[str] = "drops what was most often below average attention lately, while decoding"
    family: ClassVar[str] = "evicts or merges while decoding"
    kind: ClassVar[str] = "decoding"
    paper: ClassVar[Paper | None] = PAPERS["scissorhands"]

    budget: Budget
    recent: Annotated[float, Field(gt=0, lt=1)] = 0.5
    history: Annotated[float, Field(gt=0, le=1)] = 0.2

    @property
    def minimum(self) -> int:
        return 2

    @property
    def observes(self) -> int | None:
        return math.ceil(self.history * self.budget) if isinstance(self.budget, int) else None

    def _queries(self, budget: int) -> int:
        """H, the length of the history."""
        return max(1, int(self.history * budget))

    def scores(self, prompt: Prompt) -> Tensor:
        """How often a token was below average, negated."""
        history = self._queries(self.entries(prompt.length))
        return prompt.share(
            ("scissorhands", history), lambda: -_count(self._history(prompt, history)).to(torch.float32)
        )

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.with_last(self.scores(prompt), part(self.recent, budget))

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        recent = part(self.recent, budget)
        return top_and_last(self.scores(prompt), budget - recent, recent)

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        history = self._queries(self.entries(prompt.length))
        store.add_column("history", self._history(prompt, history))
        store.add_column("below", -self.scores(prompt).to(torch.int32))
        store.numbers["step"] = 0
        super().compress(store, prompt)

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        assert weights is not None, "a policy that weighs is given the attention weights"
        kv_heads = store.kv_heads
        below = weights.unflatten(1, (kv_heads, -1)).mean(2) < 1 / store.length
        # Bit e belongs to the query that is e places before the prompt's end. A later row replaces the oldest one, so
        # the ring runs backwards.
        history = self._queries(store.budget)
        store.numbers["step"] += 1
        ring = -store.numbers["step"] % history
        word, bit = store.column("history")[..., ring // WORD], ring % WORD
        changed = ((word >> bit) & 1) ^ below
        word ^= changed << bit
        count = store.column("below")
        count += torch.where(below, changed, -changed)
        evict_lowest(store, -count, part(self.recent, store.budget))

    def _history(self, prompt: Prompt, history: int) -> Tensor:
        """Which of the last queries gave a token less than average, as bits: int64 `[rows, kv_heads, length, words]`.

        Counted over all words, bit e belongs to the query that is e places before the prompt's end.
        """
        n = prompt.window(history).shape[2]
        words = [
            prompt.share(("scissorhands word", word, min(n - word * WORD, WORD)), lambda word=word: _word(prompt, word))
            for word in range(math.ceil(n / WORD))
        ]
        if n % WORD:
            words[-1] = words[-1] & ((1 << n % WORD) - 1)
        words += [torch.zeros_like(words[0])] * (math.ceil(history / WORD) - len(words))
        return torch.stack(words, -1)


def _word(prompt: Prompt, word: int) -> Tensor:
    """The bits of up to 64 known queries, counted back from the prompt's end, from query `word` * 64 on."""
    last = prompt.queries.shape[2] - word * WORD
    queries, length = prompt.queries[:, :, max(last - WORD, 0) : last], prompt.length - word * WORD
    n = queries.shape[2]
    average = 1 / torch.arange(length - n + 1, length + 1, dtype=torch.float32, device=queries.device)[:, None]
    shift = torch.arange(n - 1, -1, -1, device=queries.device)[:, None]
    hidden = ~attention.last_visible(n, n, queries.device)
    bits = torch.zeros(prompt.rows, prompt.kv_heads, prompt.length, dtype=torch.int64, device=queries.device)
    for row in range(prompt.rows):
        softmax = prompt.softmax(row)
        logits = attention.logits(queries[row], prompt.keys[row, :, :length], softmax)
        attention.hide_later(logits)
        below = softmax.shares(logits).unflatten(0, (prompt.kv_heads, -1)).mean(1) < average
        below[..., length - n :] &= ~hidden
        bits[row, :, :length] = (below << shift).sum(-2)
    return bits


def _count(words: Tensor) -> Tensor:
    """How many bits are set: int64 `[..., words]` -> `[...]`, by adding neighbours in ever larger fields."""
    words = words - ((words >> 1) & 0x5555555555555555)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((words * 0x0101010101010101) >> 56).sum(-1)
