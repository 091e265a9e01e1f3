"""DapQ: pseudo-queries at the positions where the response will be."""

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.methods.base import Budget, Policy
from kvlab.methods.prompt import Prompt


class DapQ(Policy):
    """Keeps the prompt tokens that pseudo-tokens at the response's first positions attend to most; prefill only.

    DapQ, section 4: `window` pseudo-tokens run after the prompt at positions P .. P + window - 1 (eq. 4); their
    attention over the prompt's keys is summed (eq. 5) and its top `budget` are kept (eq. 6), nothing forced and nothing
    pooled; the pseudo-tokens are cropped off again. Every generated token is kept. Cost: `window` more tokens in the
    prefill.

    Choices where the paper is silent: the attention is a softmax over prompt keys alone; the group's heads are summed
    and share one set.

    Parameters:
        budget: entries for each layer and KV head.
        window: pseudo-tokens, N in the paper (32).
        content: what they say: "first_last" (`first` tokens of the prompt, then its last window - first), "scattered"
            (drawn from the prompt), "span" (a random span of it), "sentence" (`sentence`, repeated) or "vocabulary"
            (random token ids); the paper's figure 6a.
        first: tokens from the prompt's start under "first_last" (4 of 32 in the paper's settings).
        sentence: under "sentence".
        seed: of the random contents.
    """

    name: ClassVar[str] = "dapq"
    summary: ClassVar[str] = "attention of pseudo-queries at the response's positions"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"

    budget: Budget
    window: Annotated[int, Field(ge=1)] = 32
    content: Literal["first_last", "scattered", "span", "sentence", "vocabulary"] = "first_last"
    first: Annotated[int, Field(ge=0)] = 4
    sentence: str = "Sorry, I don't know. "
    seed: int = 0

    @property
    def pseudo_key(self) -> str:
        detail = {"first_last": self.first, "sentence": self.sentence}.get(self.content, self.seed)
        return f"{self.content}/{detail}/{self.window}"

    def pseudo_tokens(self, prompt: Tensor, vocabulary: int, encode: Callable[[str], Tensor]) -> Tensor:
        n, generator = self.window, torch.Generator().manual_seed(self.seed)
        match self.content:
            case "first_last":
                first = min(self.first, n)
                return torch.cat([prompt[:first], prompt[len(prompt) - min(n - first, len(prompt)) :]])
            case "scattered":
                return prompt[torch.randint(len(prompt), (n,), generator=generator)]
            case "span":
                start = int(torch.randint(max(1, len(prompt) - n + 1), (), generator=generator))
                return prompt[start : start + n]
            case "sentence":
                ids = encode(self.sentence)
                return ids.repeat(n // len(ids) + 1)[:n]
            case _:
                return torch.randint(vocabulary, (n,), generator=generator)

    def scores(self, prompt: Prompt) -> Tensor:
        def summed() -> Tensor:
            pseudo = prompt.pseudo(self)
            rows = [
                attention.attention_over_prompt(q, k, prompt.softmax(row)).sum(-2)
                for row, (q, k) in enumerate(zip(pseudo, prompt.keys, strict=True))
            ]
            return attention.sum_over_group(torch.stack(rows), prompt.kv_heads)

        return prompt.share(("pseudo", self.pseudo_key), summed)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.top_positions(self.scores(prompt), budget)
