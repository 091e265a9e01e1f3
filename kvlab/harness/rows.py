"""Sequences on compressed caches, each in a session of its own, that go on as the rows of one batch.

The entries of each are counted as if it ran alone.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from kvlab.live.session import Session, compress
from kvlab.methods.full import Full

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from transformers import GenerationConfig

    from kvlab.inputs.models import LM


@dataclass(frozen=True)
class Held:
    """The content of the cache at the end of one request.

    Attributes:
        prompt_tokens: tokens that were read before the first likelihood or the first generated token.
        compressed_tokens: how many of these the policy compressed.
        stored_bytes: bytes of the stored keys and values, and of the policy's own data.
        read_bytes: bytes that the last decoding step loaded; 0 where there was none.
        uncompressed_bytes: bytes of the layers that no policy compresses.
    """

    prompt_tokens: int
    compressed_tokens: int
    stored_bytes: int
    read_bytes: int
    uncompressed_bytes: int


@dataclass(frozen=True)
class Known:
    """How likely tokens were: the sum of their log-likelihoods in nats, and whether each was the likeliest one.

    `held` is None where nothing was compressed.
    """

    logprob: float
    greedy: bool
    held: Held | None


def known(logits: Tensor, expected: Sequence[int], held: Held | None) -> Known:
    """Score n expected tokens by the logits `[n, vocabulary]` that predicted them."""
    sure, wanted = logits.float().log_softmax(-1), torch.tensor(expected, device=logits.device)
    logprob = float(sure.gather(-1, wanted[:, None]).double().sum())
    return Known(logprob, bool((logits.argmax(-1) == wanted).all()), held)


class Row:
    """A sequence whose prompt has ended.

    Args:
        session: holds its cache.
        prompt_tokens, compressed_tokens: as in `Held`.
    """

    def __init__(self, session: Session, prompt_tokens: int, compressed_tokens: int):
        self.session = session
        self.prompt_tokens, self.compressed_tokens = prompt_tokens, compressed_tokens
        self.held: Held | None = None
        self.next: int | None = None

    def end(self, running: Session | None = None) -> None:
        """Note the stored entries, once; `running`: the session in which the sequence has gone on."""
        if self.held is not None:
            return
        own = self.session
        # Layers that no policy compresses are the running session's, which then has this row alone.
        beside = (running or own).uncompressed_bytes
        stored = own.kv_bytes + own.aux_bytes
        self.held = Held(self.prompt_tokens, self.compressed_tokens, stored, own.read_bytes, beside)


# ---------------------------------------------------------------------------------------------------- likelihoods


class Following(Row):
    """A row that is fed given tokens (`kvlab.live.decode_batch`) and sums how likely the expected ones were.

    Args:
        fed: the tokens to feed.
        expected: the tokens whose likelihood counts. `first`, if given, predicts one; each fed token predicts one.
        first: logits `[vocabulary]` that the prompt has predicted already.
    """

    def __init__(
        self,
        session: Session,
        prompt_tokens: int,
        compressed_tokens: int,
        fed: Sequence[int],
        expected: Sequence[int],
        first: Tensor | None = None,
    ):
        super().__init__(session, prompt_tokens, compressed_tokens)
        self._fed, self._expected = iter(fed), iter(expected)
        self._logprob, self._greedy = 0.0, True
        if first is None:
            self.next = next(self._fed)
        else:
            self.accept_logits(first)
        if self.next is None:
            self.end()

    def accept_logits(self, logits: Tensor) -> None:
        one = known(logits[None], [next(self._expected)], None)
        self._logprob, self._greedy = self._logprob + one.logprob, self._greedy and one.greedy
        self.next = next(self._fed, None)

    @property
    def known(self) -> Known:
        return Known(self._logprob, self._greedy, self.held)


# ---------------------------------------------------------------------------------------------------- responses


class Responding(Row):
    """A row that generates.

    Args:
        prompt: its tokens, of which the first `compressed_tokens` were compressed.
        first: the first token of the response, which is not fed yet.
        ends: tokens that end a response, and are no part of it.
        over: whether a response ends with these tokens.
    """

    def __init__(
        self,
        session: Session,
        prompt: Sequence[int],
        compressed_tokens: int,
        first: int,
        ends: Container[int],
        over: Callable[[list[int]], bool],
    ):
        super().__init__(session, len(prompt), compressed_tokens)
        self.prompt, self.tokens = list(prompt), []
        self._ends, self._over = ends, over
        self.add(first)

    def add(self, token: int, running: Session | None = None) -> None:
        """Go on with one token more, unless the response has ended; `running` as in `end`."""
        if self.held is not None:
            return
        if token not in self._ends:
            self.tokens.append(token)
        if token in self._ends or self._over(self.tokens):
            self.end(running)


def limited(how: GenerationConfig, new_tokens: int) -> GenerationConfig:
    """The same generation, with this number of new tokens."""
    made = copy(how)
    made.max_new_tokens = new_tokens
    return made


@torch.inference_mode()
def respond(lm: LM, rows: Sequence[Responding], how: GenerationConfig) -> None:
    """Generate with transformers' `generate` until every row has ended, all rows in one batch.

    Args:
        how: the generation. Each row has the first of its `max_new_tokens` already.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    left, most = [row for row in rows if row.held is None], (how.max_new_tokens or 1) - 1
    if left and most:
        # The padding before a shorter row is masked. It repeats the row's own token, since penalties see the whole row.
        longest = max(row.prompt_tokens for row in left) + 1
        gaps = [longest - row.prompt_tokens - 1 for row in left]
        fed = [[row.prompt[0]] * gap + row.prompt + row.tokens for gap, row in zip(gaps, left, strict=True)]
        ids, before = torch.tensor(fed, device=lm.device), torch.tensor(gaps, device=lm.device)[:, None]
        with compress(lm.model, Full(), turns="leave") as together:

            class Ended(StoppingCriteria):
                def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
                    for row, token in zip(left, input_ids[:, -1].tolist(), strict=True):
                        row.add(token, together)
                    return torch.tensor([row.held is not None for row in left], device=input_ids.device)

            cast("Any", lm.model).generate(
                ids,
                attention_mask=(torch.arange(longest, device=lm.device) >= before).long(),
                generation_config=limited(how, most),
                past_key_values=together.join([row.session for row in left]),
                stopping_criteria=StoppingCriteriaList([Ended()]),
            )
            for row in left:
                row.end(together)
    for row in rows:
        row.end()
