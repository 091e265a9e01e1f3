"""The end of a prompt in a live session: the inputs of the policy, and the compression of every layer.

A policy may ask for pseudo-queries: a pass of made-up tokens over the stored prompt computes them. It may also plan
over all layers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.core import hookable
from kvlab.core.hooks import Call, Handler
from kvlab.core.rotation import Rotation
from kvlab.core.storage import Storage
from kvlab.errors import KvlabError
from kvlab.lib.devices import outside_autocast
from kvlab.live import passes
from kvlab.live.attention_step import ACCUMULATED
from kvlab.live.cache import LiveCache
from kvlab.live.layer import LiveLayer
from kvlab.live.row_groups import Group
from kvlab.live.shared_findings import once, scores_of, tokens_of
from kvlab.methods import Policy, Prompt
from kvlab.methods._base import contract
from kvlab.methods._base.needs import Draft, PseudoTokens
from kvlab.traces.passes import drafted, entries_at, score_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Prefill:
    """Compresses the prompts of one session when they end.

    Args:
        model: makes the pseudo-queries.
        turns: as `compress` takes it.
        encode: the token ids of a text, for pseudo-tokens that are made from a sentence; None without a tokenizer.
        max_new_tokens: how long the response may grow; 0 where that is not known.
        storage: in what form what the policy keeps is stored.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        turns: str,
        encode: Callable[[str], Tensor] | None,
        max_new_tokens: int,
        storage: Storage,
    ):
        self._model, self._policy, self._turns, self._storage = model, policy, turns, storage
        self._encode, self._max_new_tokens = encode, max_new_tokens

    def end(self, cache: LiveCache) -> None:
        """Compress what a cache without padding holds, layer by layer, and mark its prompt as ended.

        Raises:
            KvlabError: the policy cannot work on this prompt.
        """
        policy = self._policy
        for number in range(len(cache.compressed[0].groups)):
            stores = [layer.groups[number].store for layer in cache.compressed]
            judged = any(self._judges(store.length) for store in stores)
            if any(store.ragged for store in stores) and not policy.takes_ragged:
                raise KvlabError(
                    f"{policy.name} left sequences or heads with different numbers of entries, which cannot be "
                    "one prompt again; store later turns whole (turns='leave')"
                )
            asked = policy.needs.pseudo if judged else None
            ids = self._pseudo_tokens(cache, number, asked) if isinstance(asked, PseudoTokens) else None
            pseudo = {} if ids is None else self._pseudo_queries(cache, number, ids)
            if isinstance(asked, Draft):
                pseudo = self._draft_queries(cache, number, asked)
            repeated = self._repeated(cache, number) if judged else []
            planned = self._planned(cache, number, repeated) if policy.needs.surveys and judged else []
            for index, layer in enumerate(cache.compressed):
                group = layer.groups[number]
                # The memory of a layer's prompt is freed before the next layer is compressed, unless it is shared.
                own = planned.pop(0) if planned else None
                prompt = own or self._prompt(cache, index, number, pseudo.get(index), repeated, ids)
                with outside_autocast(group.store.device):
                    policy.compress(group.store, prompt)
                # After the eviction: what is rounded are the entries that stay.
                group.store.set_storage(self._storage)
                group.kept = group.store.positions.clone()
                group.note_loss()
            contract.check_stored_budget(policy, stores)
        for layer in cache.compressed:
            layer.before_rope.forget()
            layer.hidden.forget()
            if self._turns == "leave" or policy.needs.queries is None:
                layer.forget()
        cache.ended, cache.ended_at, cache.memory = True, cache.seen, None

    def _prompt(
        self,
        cache: LiveCache,
        index: int,
        number: int,
        pseudo: Tensor | None = None,
        repeated: Sequence[dict[str, Tensor]] = (),
        ids: Tensor | None = None,
    ) -> Prompt:
        """The end of one layer's and one group's prefill, as the policy sees it.

        Args:
            pseudo: queries of the tokens `ids`.
        """
        layer = cache.compressed[index]
        group = layer.groups[number]
        store = group.store
        window, before = layer.observed.queries, layer.before_rope.queries
        # A policy knows how many heads there are even if it gets no queries.
        heads = hookable.text_config(self._model).num_attention_heads
        none = store.keys.new_empty(store.rows, heads, 0, store.head_dim)
        window = none if window is None else group.of(window)
        window = window[:, :, max(window.shape[2] - store.length, 0) :]
        self._check_window(window.shape[2], store.length)
        if self._policy.needs.pre_queries:
            before = store.keys[:, :, :0] if before is None else group.of(before)
            before = before[:, :, max(before.shape[2] - store.length, 0) :]
            self._check_all(before.shape[2], store.length)
        hidden = self._hidden(layer, group) if self._policy.needs.hidden else None
        accumulated = None
        if store.has_column(ACCUMULATED):
            accumulated = store.remove_column(ACCUMULATED).transpose(2, 3).flatten(1, 2)

        def perplexity(n: int) -> Tensor | None:
            return cache.likelihood.perplexity(min(n, store.seen - 1), group.rows)

        pseudo_tokens = None if ids is None else tokens_of(ids)
        return Prompt(
            window,
            store.keys,
            store.values,
            store.layers,
            len(cache.compressed),
            pseudo=pseudo,
            accumulated=accumulated,
            max_new_tokens=self._max_new_tokens,
            scaling=layer.softmax,
            perplexity=perplexity,
            projections=self._projections(cache, index, len(store.keys)),
            rotations=self._rotations(cache, index, number),
            pre_queries=before,
            hidden=hidden,
            repeated=repeated[index] if repeated else None,
            origin=partial(self._origin, cache, group),
            shared=once(cache.memory, ("shared", number, index, self._max_new_tokens, pseudo_tokens), dict),
            positions=store.positions,
            seen=store.seen,
            lossy=group.lossy,
        ).seen_by(self._policy)

    def _hidden(self, layer: LiveLayer, group: Group) -> Tensor:
        """Hidden states `[rows, length, width]` of a group's prompts in one layer.

        Raises:
            KvlabError: the policy looks at those of every token, and some were not fed inside the session.
        """
        states, length = layer.hidden.queries, group.store.length
        states = group.store.keys[:, :1, :0] if states is None else group.of(states)
        states = states[:, 0, max(states.shape[2] - length, 0) :]
        known = states.shape[1]
        if known < length and self._judges(length):
            raise KvlabError(
                f"{self._policy.name} needs the hidden states of all {length} tokens of its prompt, and the session "
                f"saw {known}; store later turns whole (turns='leave'), or begin anew"
            )
        return states

    def _origin(self, cache: LiveCache, group: Group) -> tuple[Tensor | None, str]:
        """The token ids of a group's sequences without their padding, and the model's name."""
        model = Path(self._model.config.name_or_path or "").name
        ids = group.of(torch.cat(cache.ids, 1)) if cache.ids else torch.empty(1, 0)
        return ids[:, -group.store.seen :] if ids.shape[1] >= group.store.seen else None, model

    def _rotations(self, cache: LiveCache, index: int, number: int) -> list[Rotation | None] | None:
        """How one layer turns each sequence of a group, from where its tokens were placed; None unless asked for."""
        if not self._policy.needs.rotation:
            return None
        rotation = cache.compressed[index].rotation
        ahead = once(cache.memory, ("offsets", number), lambda: cache.offsets(number, self._policy))
        return [None if rotation is None else replace(rotation, offset=offset) for offset in ahead]

    def _projections(self, cache: LiveCache, index: int, rows: int) -> list[Tensor] | None:
        """The output projection of one layer, for each of `rows` sequences, where the policy asks for it."""
        if not self._policy.needs.projection:
            return None
        return [*hookable.required_projections([cache.modules[index]])] * rows

    def _planned(self, cache: LiveCache, number: int, repeated: Sequence[dict[str, Tensor]]) -> list[Prompt]:
        """One group's prompt in each layer, with what the policy plans over all of them."""
        places = range(len(cache.compressed))
        prompts = [self._prompt(cache, index, number, repeated=repeated) for index in places]
        with outside_autocast(prompts[0].keys.device):
            surveys = [self._policy.survey(prompt) for prompt in prompts]
        # In a later turn layers hold different numbers of entries; what is not there scores least.
        widest = max(survey.shape[-1] for survey in surveys)
        surveys = [F.pad(survey, (0, widest - survey.shape[-1]), value=-torch.inf) for survey in surveys]
        longest = max(prompts, key=lambda prompt: prompt.length)
        # Some surveys are float64 on the CPU, which not every GPU knows: they are joined where the first lies.
        plan = self._policy.plan(torch.stack([each.to(surveys[0].device) for each in surveys]), longest)
        return [prompt.with_plan(layer.to(prompt.keys.device)) for prompt, layer in zip(prompts, plan, strict=True)]

    def _judges(self, length: int) -> bool:
        """Whether the policy looks at a prompt of this length, or keeps it whole unseen."""
        return self._policy.needs.steps or not self._policy.fits(length)

    def _check_window(self, known: int, length: int) -> None:
        """Raise KvlabError where the policy looks at more of the last queries than are `known`."""
        policy = self._policy
        need = policy.needs.window(length)
        if known >= need or not self._judges(length):
            return
        if policy.needs.queries is None:
            self._check_all(known, length)
        raise KvlabError(
            f"{policy.name} needs the last {need} queries, and only {known} were fed inside the session; feed the end "
            "of the prompt inside the session"
        )

    def _check_all(self, known: int, length: int) -> None:
        """Raise KvlabError where not all queries of a prompt are known to a policy that looks at each."""
        if known < length and self._judges(length):
            raise KvlabError(
                f"{self._policy.name} needs all {length} queries of its prompt, and the session saw {known}; store "
                "later turns whole (turns='leave'), or begin anew"
            )

    def _pseudo_tokens(self, cache: LiveCache, number: int, pseudo: PseudoTokens) -> Tensor:
        """The ids of one group's pseudo-tokens, `[rows, m]`."""
        prompts = passes.prompts(cache, number, f"{self._policy.name} makes pseudo-tokens")
        vocabulary = hookable.text_config(self._model).vocab_size
        encode = self._encode or _no_tokenizer
        return torch.stack([pseudo.tokens(row, vocabulary, encode) for row in prompts])

    def _pseudo_queries(self, cache: LiveCache, number: int, ids: Tensor) -> dict[int, Tensor]:
        """Post-RoPE queries `[rows, heads, m, head_dim]` of pseudo-tokens `ids`, by index of the layer."""

        def compute() -> dict[int, Tensor]:
            queries: dict[int, Tensor] = {}

            def record(call: Call) -> Tensor:
                queries[call.index] = call.queries
                return call.attend()

            passes.run(self._model, cache, number, ids, record, self._policy)
            return queries

        return once(cache.memory, ("pseudo", number, tokens_of(ids)), compute)

    def _draft_queries(self, cache: LiveCache, number: int, draft: Draft) -> dict[int, Tensor]:
        """Post-RoPE queries `[rows, heads, tokens, head_dim]` of one group's drafted answers, by index of the layer."""

        def feed(ids: Tensor, handler: Handler) -> Tensor:
            output = passes.run(self._model, cache, number, ids, handler, self._policy)
            return passes.next_ids(self._model, output)

        def compute() -> dict[int, Tensor]:
            first = cache.likelihood.next_ids(cache.compressed[0].groups[number].rows)
            if first is None:
                raise KvlabError(
                    f"{self._policy.name} drafts an answer and needs the logits after the prompt; feed the prompt's "
                    "end as input_ids to the model itself, inside the session"
                )
            seen = []
            for index in range(len(cache.compressed)):
                prompt = self._prompt(cache, index, number)
                seen.append(entries_at(draft.sees(prompt), prompt.keys, prompt.values))
            return dict(enumerate(drafted(feed, first, seen, draft.tokens)))

        return once(cache.memory, ("draft", number, draft), compute)

    def _repeated(self, cache: LiveCache, number: int) -> list[dict[str, Tensor]]:
        """Scores `[rows, kv_heads, length]` of the passes that repeat one group's prompts, layer by layer, by the key
        of the repetition.
        """

        def feed(ids: Tensor, handler: Handler) -> None:
            passes.run(self._model, cache, number, ids, handler, self._policy)

        found: list[dict[str, Tensor]] = [{} for _ in cache.compressed]
        for repetition in self._policy.needs.repetitions:
            if any(layer.groups[number].lossy for layer in cache.compressed):
                raise KvlabError(
                    f"{self._policy.name} has the model repeat its prompt, and an earlier turn has left a part of it; "
                    "store later turns whole (turns='leave')"
                )
            prompts = passes.prompts(cache, number, f"{self._policy.name} has the model repeat its prompt")
            fed = [repetition.parts(row, self._encode) for row in prompts]
            known = scores_of(repetition, prompts, fed)
            if known not in cache.repeated:
                cache.repeated[known] = score_parts(feed, cache.modules, repetition, fed)
            for by_key, own in zip(found, cache.repeated[known], strict=True):
                by_key[repetition.key] = own
        return found


def _no_tokenizer(text: str) -> Tensor:
    raise KvlabError("pseudo-tokens from a sentence need a tokenizer: compress(model, policy, tokenizer=...)")
