"""The harness's requests to a model, on a compressed cache: likelihoods and responses.

Every token whose likelihood counts, or that is generated, is a decoding step of its own. So a policy that evicts,
merges or selects at each step does so here as in a response. Each sequence is prefilled and compressed alone; those of
a batch share the steps (`rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from kvlab.core.storage import AS_IS, Storage
from kvlab.errors import KvlabError, whole
from kvlab.evaluation.answering import prefilled_for, stops
from kvlab.harness.rows import Following, Held, Known, Responding, known, limited, respond
from kvlab.lib.batches import batches
from kvlab.live.decode_batch import batch_size, decode_batch
from kvlab.live.session import Session, compress
from kvlab.live.shared_prefill import shared_prefill
from kvlab.methods import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import GenerationConfig

    from kvlab.inputs.models import LM


class Continued(NamedTuple):
    """A continuation and the context before it, of at least one token each.

    `compressed`: how many tokens of the context are compressed; None for all but the last.
    """

    context: Sequence[int]
    continuation: Sequence[int]
    compressed: int | None = None


class Asked(NamedTuple):
    """A prompt whose first `compressed` tokens are compressed before the rest is fed.

    If all tokens are compressed, the first token of the response comes from the prefill, as in `kvlab eval`.
    `over`: whether a response ends with these tokens.
    """

    prompt: Sequence[int]
    compressed: int
    over: Callable[[list[int]], bool]


class Reader:
    """Reads with one policy, one storage and one model.

    Args:
        batch: how many sequences go on together, at least 1. Where the model has layers that no policy compresses, each
            goes on alone.

    Raises:
        KvlabError: the model, the policy and the storage do not go together, or the batch is below 1.
    """

    def __init__(self, lm: LM, policy: Policy, storage: Storage = AS_IS, batch: int = 1):
        self.lm, self.policy, self.storage = lm, policy, storage
        self._compress(0)  # to refuse what cannot be, before anything runs
        if whole("batch", batch) < 1:
            raise KvlabError(f"a batch has at least one sequence, and not {batch}")
        self.batch = batch_size(lm, batch)
        self._prefilled: tuple[Tensor, Any, Tensor] | None = None

    def _compress(self, new_tokens: int) -> Session:
        options: dict[str, Any] = dict(tokenizer=self.lm.tokenizer, storage=self.storage, max_new_tokens=new_tokens)
        return compress(self.lm.model, self.policy, turns="leave", **options)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], dtype=torch.int64, device=self.lm.device)

    # ------------------------------------------------------------------ likelihoods

    def likelihoods(self, asked: Iterable[Continued]) -> Iterator[Known]:
        """Yield how likely each continuation is after a context whose beginning the policy has compressed.

        The last token of the context is fed after the compression. So the first token of the continuation, too, is
        predicted from the compressed cache. A context of one token is compressed whole: nothing else could be.
        """
        for batch in batches(asked, self.batch):
            rows = [self._following(*each) for each in batch]
            decode_batch(self.lm, rows)
            yield from (row.known for row in rows)

    @torch.inference_mode()
    def _following(self, context: Sequence[int], continuation: Sequence[int], compressed: int | None) -> Following:
        last = len(context) - 1
        split = max(1, last if compressed is None else min(compressed, last))
        past, logits = self._prefill(self._ids(context[:split]))
        with self._compress(len(continuation)) as session:
            own = session.branch(past)
            session.end_prompt()
            if split < last:
                rest = self._ids(context[split:last])
                self.lm.model(rest, past_key_values=own, use_cache=True, logits_to_keep=1)
        fed = [*context[max(last, 1) :], *continuation[:-1]]
        return Following(session, len(context), split, fed, continuation, None if last else logits)

    def _prefill(self, ids: Tensor) -> tuple[Any, Tensor]:
        """A cache of ids `[1, n]` to branch off, and the logits after the last id.

        The result of the last call is reused, since the choices of one question follow each other.
        """
        if self._prefilled is None or not torch.equal(self._prefilled[0], ids):
            self._prefilled = None  # its memory is free before the next one grows
            past, logits, _ = prefilled_for(self.lm, [(self.policy, self.storage)], ids)
            self._prefilled = ids, past, logits
        return self._prefilled[1:]

    def rolling(self, context: Sequence[int], text: Sequence[int], chunk: int) -> Known:
        """The likelihood of a text in chunks, each on a cache of all tokens before it, compressed for this chunk.

        After a context of one token, the first chunk has nothing before it that could be compressed. Its likelihood is
        the full cache's. Each chunk begins with the uncompressed cache again, as if it were a request of its own.

        Args:
            context, text: at least one token each.
            chunk: how many tokens are read after each compression, at least 2.
        """
        found: list[Known] = []
        for batch in batches(self._chunks([*context, *text], len(context) - 1, chunk), self.batch):
            rows = [each for each in batch if isinstance(each, Following)]
            decode_batch(self.lm, rows)
            found += [each.known if isinstance(each, Following) else each for each in batch]
        return Known(sum(each.logprob for each in found), all(each.greedy for each in found), found[-1].held)

    @torch.inference_mode()
    def _chunks(self, ids: Sequence[int], start: int, chunk: int) -> Iterator[Following | Known]:
        """Yield the chunks of a text from `start` on, each after a compressed cache; the prefill answers one at 0."""
        self._prefilled = None
        gathered, past, fed = shared_prefill(self.lm.model, [self.policy]), cast("Any", None), 0
        for place in range(start, len(ids) - 1, chunk):
            expected = ids[place + 1 : place + 1 + chunk]
            if place == 0:
                with gathered:
                    out = self.lm.model(self._ids(ids[: len(expected)]), use_cache=True)
                past, fed = out.past_key_values, len(expected)
                yield known(out.logits[0], expected, None)
                continue
            if fed < place:
                with gathered:
                    new = self._ids(ids[fed:place])
                    past = self.lm.model(new, past_key_values=past, use_cache=True, logits_to_keep=1).past_key_values
                fed = place
            with self._compress(len(expected)) as session:
                session.branch(past)
                session.end_prompt()
            yield Following(session, place + 1, place, ids[place : place + len(expected)], expected)

    # ------------------------------------------------------------------ responses

    def responses(self, asked: Iterable[Asked], how: GenerationConfig) -> Iterator[tuple[list[int], Held]]:
        """Responses by transformers' `generate`, without the model's end token.

        Args:
            how: with `max_new_tokens`.
        """
        for batch in batches(asked, self.batch):
            rows = [self.begun(each, how) for each in batch]
            respond(self.lm, rows, how)
            for row in rows:
                assert row.held is not None, "every row has ended"
                yield row.tokens, row.held

    @torch.inference_mode()
    def begun(self, asked: Asked, how: GenerationConfig) -> Responding:
        """A response with its first token, to go on with by `respond`."""
        prompt, compressed, over = asked
        ids = self._ids(prompt)
        begun: dict[str, Any] = {}
        with self._compress(how.max_new_tokens or 0) as session:
            if compressed < len(prompt):
                out = self.lm.model(ids[:, :compressed], use_cache=True, logits_to_keep=1)
                session.end_prompt()
                begun["past_key_values"] = out.past_key_values
            out = cast("Any", self.lm.model).generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=limited(how, 1), **begun
            )
            session.end_prompt()
        return Responding(session, prompt, compressed, int(out[0, -1]), stops(self.lm), over)
