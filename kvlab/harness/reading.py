"""What the harness asks of a model, on a compressed cache: likelihoods and responses, one sequence at a time.

Every token whose likelihood counts, or that is generated, is a decoding step of its own, so that a policy that evicts,
merges or selects at each step does so here as in a response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from kvlab.core.storage import AS_IS, Storage
from kvlab.evaluation.answering import prefilled_for, stops
from kvlab.live.gather import gather
from kvlab.live.session import Session, compress
from kvlab.methods import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import GenerationConfig

    from kvlab.inputs.models import LM


@dataclass(frozen=True)
class Held:
    """What the cache held in the end of one request.

    Attributes:
        prompt_tokens: what was read before the first likelihood or the first generated token.
        compressed_tokens: how many of these the policy compressed.
        stored_bytes: keys and values as they are stored, and what the policy keeps beside them.
        read_bytes: what the last decoding step loaded; 0 where there was none.
        uncompressed_bytes: of the layers that no policy compresses.
    """

    prompt_tokens: int
    compressed_tokens: int
    stored_bytes: int
    read_bytes: int
    uncompressed_bytes: int


def _held(session: Session, prompt_tokens: int, compressed_tokens: int) -> Held:
    stored = session.kv_bytes + session.aux_bytes
    return Held(prompt_tokens, compressed_tokens, stored, session.read_bytes, session.uncompressed_bytes)


@dataclass(frozen=True)
class Known:
    """How likely tokens were: the sum of their log-likelihoods in nats, and whether each was the likeliest one.

    `held` is None where nothing was compressed.
    """

    logprob: float
    greedy: bool
    held: Held | None


def _known(logits: Tensor, told: Sequence[int], held: Held | None) -> Known:
    """Of the logits `[n, vocabulary]` that predicted n tokens."""
    sure, wanted = logits.float().log_softmax(-1), torch.tensor(told, device=logits.device)
    logprob = float(sure.gather(-1, wanted[:, None]).double().sum())
    return Known(logprob, bool((logits.argmax(-1) == wanted).all()), held)


class Reader:
    """Reads with one policy, one storage and one model.

    Raises:
        KvlabError: a model, a policy and a storage that do not go together.
    """

    def __init__(self, lm: LM, policy: Policy, storage: Storage = AS_IS):
        self.lm, self.policy, self.storage = lm, policy, storage
        self._compress(0)  # to refuse what cannot be, before anything runs
        self._prefilled: tuple[Tensor, Any, Tensor] | None = None

    def _compress(self, new_tokens: int) -> Session:
        options: dict[str, Any] = dict(tokenizer=self.lm.tokenizer, storage=self.storage, max_new_tokens=new_tokens)
        return compress(self.lm.model, self.policy, turns="leave", **options)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], dtype=torch.int64, device=self.lm.device)

    def _feed(self, past: Any, ids: Tensor) -> Tensor:
        """The logits `[vocabulary]` behind the last of the ids `[1, n]`."""
        return self.lm.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1]

    @torch.inference_mode()
    def likelihood(self, context: Sequence[int], continuation: Sequence[int], compressed: int | None = None) -> Known:
        """How likely a continuation is after a context of which the policy has compressed the beginning.

        The last token of the context is fed after the compression, so that the first token of the continuation, too, is
        told by the compressed cache. (A context of one token is compressed whole: nothing would be left.)

        Args:
            context, continuation: at least one token each.
            compressed: how many tokens of the context are compressed; None for all but the last.
        """
        last = len(context) - 1
        split = max(1, last if compressed is None else min(compressed, last))
        past, logits = self._prefill(self._ids(context[:split]))
        with self._compress(len(continuation)) as session:
            own = session.branch(past)
            session.end_prompt()
            if split < last:
                self._feed(own, self._ids(context[split:last]))
            rows = [] if last else [logits]
            fed = [*context[max(last, 1) :], *continuation[:-1]]
            rows += [self._feed(own, self._ids([token])) for token in fed]
            return _known(torch.stack(rows), continuation, _held(session, len(context), split))

    def _prefill(self, ids: Tensor) -> tuple[Any, Tensor]:
        """A cache of ids `[1, n]` to branch off, and the logits behind the last; that of the last call is still known,
        since the choices of one question follow each other.
        """
        if self._prefilled is None or not torch.equal(self._prefilled[0], ids):
            self._prefilled = None  # its memory is free before the next one grows
            past, logits, _ = prefilled_for(self.lm, [(self.policy, self.storage)], ids)
            self._prefilled = ids, past, logits
        return self._prefilled[1:]

    @torch.inference_mode()
    def rolling(self, context: Sequence[int], text: Sequence[int], chunk: int) -> Known:
        """How likely a text is, in chunks: each on a cache of all that stands before it, compressed for this chunk.

        Behind a context of one token the first chunk has nothing before it that could be compressed: its likelihood is
        the full cache's. What one chunk compressed is whole again for the next, as if each were a request of its own.

        Args:
            context, text: at least one token each.
            chunk: how many tokens are read after each compression, at least 2.
        """
        self._prefilled = None
        ids, place, fed = [*context, *text], len(context) - 1, 0
        gathered, found = gather(self.lm.model, [self.policy]), []
        past: Any = None
        while place < len(ids) - 1:
            told = ids[place + 1 : place + 1 + chunk]
            with gathered:
                if place == 0:
                    out = self.lm.model(self._ids(ids[: len(told)]), use_cache=True)
                    past, fed = out.past_key_values, len(told)
                    found.append(_known(out.logits[0], told, None))
                elif fed < place:
                    new = self._ids(ids[fed:place])
                    past = self.lm.model(new, past_key_values=past, use_cache=True, logits_to_keep=1).past_key_values
                    fed = place
            if place:
                with self._compress(len(told)) as session:
                    own = session.branch(past)
                    session.end_prompt()
                    steps = ids[place : place + len(told)]
                    rows = [self._feed(own, self._ids([token])) for token in steps]
                    found.append(_known(torch.stack(rows), told, _held(session, place + 1, place)))
            place += len(told)
        return Known(sum(each.logprob for each in found), all(each.greedy for each in found), found[-1].held)

    @torch.inference_mode()
    def response(
        self, prompt: Sequence[int], how: GenerationConfig, over: Callable[[list[int]], bool], compressed: int
    ) -> tuple[list[int], Held]:
        """A response by transformers' `generate`, without the model's end token.

        Args:
            prompt: its first `compressed` tokens are compressed before the rest is fed; where these are all of them,
                the first token of the response is told by the prefill, as in `kvlab eval`.
            how: with `max_new_tokens`.
            over: whether a response ends with these tokens.
        """
        from transformers import StoppingCriteria, StoppingCriteriaList

        class Until(StoppingCriteria):
            def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
                rows = [over(row[len(prompt) :].tolist()) for row in input_ids]
                return torch.tensor(rows, dtype=torch.bool, device=input_ids.device)

        ids = self._ids(prompt)
        begun: dict[str, Any] = {}
        with self._compress(how.max_new_tokens or 0) as session:
            if compressed < len(prompt):
                out = self.lm.model(ids[:, :compressed], use_cache=True, logits_to_keep=1)
                session.end_prompt()
                begun["past_key_values"] = out.past_key_values
            out = cast("Any", self.lm.model).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=how,
                stopping_criteria=StoppingCriteriaList([Until()]),
                **begun,
            )
            # The first decoding step ends the prompt, but a response that ends at once has none.
            session.end_prompt()
            tokens: list[int] = out[0, len(prompt) :].tolist()
            ends = stops(self.lm)
            while tokens and tokens[-1] in ends:
                tokens.pop()
            return tokens, _held(session, len(prompt), compressed)
