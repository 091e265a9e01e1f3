"""DapQ: pseudo-queries at the positions where the response will be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from kvlab.core import attention
from kvlab.core.softmax import Softmax
from kvlab.errors import KvlabError
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.needs import NOTHING, Needs
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.repeating import Part, Repetition
from kvlab.methods._base.scorer import Scorer


class DapQ(Scorer):
    """Keeps the prompt tokens that pseudo-tokens at the response's first positions attend to most; prefill only.

    DapQ, section 4: `window` pseudo-tokens run after the prompt at positions P .. P + window - 1 (eq. 4). Their
    attention over the prompt's keys is summed (eq. 5), and the top `budget` are kept (eq. 6). Nothing is forced or
    pooled. The pseudo-tokens are cropped again. Every generated token is kept. Cost: `window` more tokens in the
    prefill.

    Choices where the paper is silent: the attention is a softmax over prompt keys only, unless `softmax="all"`. The
    group's heads are summed and share one set.

    Parameters:
        budget: entries for each layer and KV head.
        window: pseudo-tokens, N in the paper (32).
        content: what they say, as in the paper's figure 6a. "first_last": `first` tokens of the prompt, then its last
            window - first. "scattered": drawn from the prompt. "span": a random span of it. "sentence": `sentence`,
            repeated. "vocabulary": random token ids, as in figure 2a.
        first: tokens from the prompt's start under "first_last". Section 5.1 has 4 and 2 of 32 as examples. Table 4 has
            8 for LLaMA and 2 for Qwen.
        sentence: under "sentence".
        seed: of the random contents.
        softmax: "prompt" for one over the prompt's keys only: every pseudo-query weighs the same. "all" for the one of
            the pass itself: pseudo-tokens attend to each other too (section 6.2's mutual attention). Not with
            content="vocabulary".
    """

    name: ClassVar[str] = "dapq"
    summary: ClassVar[str] = "attention of pseudo-queries at the response's positions"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["dapq"]

    window: Annotated[int, Field(ge=1)] = 32
    content: Literal["first_last", "scattered", "span", "sentence", "vocabulary"] = "first_last"
    first: Annotated[int, Field(ge=0)] = 4
    sentence: str = "Sorry, I don't know. "
    seed: int = 0
    softmax: Literal["prompt", "all"] = "prompt"

    @model_validator(mode="after")
    def _knows_its_tokens(self) -> Self:
        if self.softmax == "all" and self.content == "vocabulary":
            raise ValueError('softmax="all" takes pseudo-tokens from the prompt or a sentence, not from the vocabulary')
        return self

    @property
    def pseudo_key(self) -> str | None:
        return self.tokens_key if self.softmax == "prompt" else None

    @property
    def needs(self) -> Needs:
        return NOTHING if self.softmax == "prompt" else Needs(repetitions=(self._pass,))

    @property
    def _pass(self) -> "PseudoPass":
        return PseudoPass(self.window, 0, False, self.replace(budget=1.0))

    @property
    def tokens_key(self) -> str:
        """A key that differs between settings with different pseudo-tokens."""
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
        if self.softmax == "all":
            return prompt.repeated(self, self._pass)

        def summed() -> Tensor:
            pseudo = prompt.pseudo(self)
            rows = [
                attention.attention_over_prompt(q, k, prompt.softmax(row)).sum(-2)
                for row, (q, k) in enumerate(zip(pseudo, prompt.keys, strict=True))
            ]
            return attention.sum_over_group(torch.stack(rows), prompt.kv_heads)

        return prompt.share(("pseudo", self.pseudo_key), summed)


@dataclass(frozen=True)
class PseudoPass(Repetition):
    """The pass of the pseudo-tokens, which attend to the prompt, to those of them that came before, and to themselves.

    Attributes:
        policy: whose pseudo-tokens they are.
    """

    policy: DapQ

    @property
    def key(self) -> str:
        return f"pseudo/{self.policy.tokens_key}"

    def parts(self, prompt: Tensor, encode: Callable[[str], Tensor] | None) -> list[Part]:
        """The pseudo-tokens, fed after the whole prompt `[length]`."""
        if encode is None and self.policy.content == "sentence":
            raise KvlabError("pseudo-tokens from a sentence need a tokenizer")
        ids = self.policy.pseudo_tokens(prompt, 0, encode or torch.as_tensor)
        return [Part(0, len(prompt), ids.to(prompt))]

    def scores(
        self,
        part: Part,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        softmax: Softmax,
        hidden: Tensor | None = None,
        projection: Tensor | None = None,
    ) -> Tensor:
        """Attention that the prompt gets in one layer, summed over pseudo-tokens and group: `[rows, kv_heads, length]`.

        Args:
            queries: `[rows, heads, m, head_dim]`.
            keys, values: of the prompt and then of the pass, `[rows, kv_heads, length + m, head_dim]`.
        """
        visible = attention.last_visible(queries.shape[2], keys.shape[2], keys.device)
        weights = attention.weights(queries, keys, softmax, visible)[..., : part.stop]
        return attention.sum_over_group(weights.sum(-2), keys.shape[1])
