"""A policy inside transformers' own `generate()`: a cache that really shrinks.

`with compress(model, policy) as session:` swaps the attention of every layer and the cache of every forward pass.
While a prompt comes in, whole or in pieces, everything is stored. At the first single-token step the prompt has ended:
the policy compresses it, what it evicts is freed, and from then on every step goes by the same clock as a replay
(`decoding.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvlab.core import attention, hookable, hooks
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError, whole
from kvlab.inputs.models import LM, lm_of
from kvlab.instruments.probes import Probe, Records, Seen, Shadow, probe
from kvlab.live.cache import Group, LiveCache, LiveLayer
from kvlab.live.masks import masks_told
from kvlab.methods import Policy, Prompt, listed, policy
from kvlab.methods.clock import decode

if TYPE_CHECKING:
    import pandas as pd


ACCUMULATED = "accumulated"


class Session:
    """What `compress` hands to its block: what is stored now, and what the probes saw.

    Attributes:
        model, policy: as given.
        records: numbers of the probes; `table` is its tidy form.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        probes: Sequence[Probe],
        turns: str,
        encode: Callable[[str], Tensor] | None,
        shadow_bytes: int,
        max_new_tokens: int = 0,
    ):
        self.model, self.policy, self.turns = model, policy, turns
        self.probes = list(probes)
        self.records = Records(policy.name, getattr(policy, "budget", None))
        self._encode, self._shadow_bytes = encode, shadow_bytes
        self.max_new_tokens = max_new_tokens
        self._n_layers = len(hookable.layers_of(model))
        self._window = hooks.shortest_window(model)
        self._adopted: WeakKeyDictionary[Cache, LiveCache] = WeakKeyDictionary()
        self._cache: LiveCache | None = None
        self._pseudo: Pseudo | None = None
        self._weigh = any(p.needs_weights for p in self.probes)
        self._shadowed = any(p.needs_shadow for p in self.probes)
        self._scaling: float | None = None
        self._fed = 0
        self._told: tuple[Tensor | None, int | Tensor] = None, 0  # the ids fed, and how many logits were asked for
        self._prompts = 0
        self._passing = False  # whether a forward pass of the model is under way
        self._arguments = list(inspect.signature(model.forward).parameters)
        self._stack = ExitStack()

    # ------------------------------------------------------------------ entering and leaving

    def __enter__(self) -> Session:
        with ExitStack() as stack:
            pre_rope = any(p.needs_pre_rope for p in self.probes)
            stack.enter_context(hooks.hooked(self.model, self._attend, pre_rope))
            stack.enter_context(masks_told(self.model))
            stack.callback(self.model.register_forward_pre_hook(self._before, with_kwargs=True).remove)
            stack.callback(self.model.register_forward_hook(self._after).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._passing = False
        self._stack.close()

    def __deepcopy__(self, memo: dict) -> Session:
        # A copied cache (a prefix that several prompts share) goes on in the same session.
        return self

    def running(self, cache: LiveCache) -> bool:
        """Whether a forward pass on `cache` is under way."""
        return (self._passing or self._pseudo is not None) and self._cache is cache

    # ------------------------------------------------------------------ around a forward pass

    def _before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if self._pseudo is not None:
            return args, kwargs
        self._passing = False
        kwargs.update(zip(self._arguments, args, strict=False))
        if kwargs.get("use_cache") is False:
            raise KvlabError("use_cache=False leaves nothing to compress; drop it, or leave the kvlab session")
        cache = self._cache = self._adopt(kwargs.get("past_key_values"))
        kwargs["past_key_values"], kwargs["use_cache"] = cache, True
        tokens = kwargs.get("input_ids")
        self._fed = (tokens if tokens is not None else kwargs["inputs_embeds"]).shape[1]
        if self._window is not None and cache.seen + self._fed > self._window:
            hooks.check_length(self.model, cache.seen + self._fed)
        if self._fed == 1 and cache.seen and not cache.ended:
            self.end_prompt()
        elif self._fed > 1 and cache.ended and self.turns == "recompress":
            cache.ended = False
        if not cache.ended:
            cache.note_padding(kwargs.get("attention_mask"), self._fed)
        elif self._fed == 1:
            cache.steps += 1
            self.records.start(cache.number)
        if tokens is not None:
            cache.ids.append(tokens)
        if self.policy.reads_perplexity and "logits_to_keep" in self._arguments:
            asked = kwargs.get("logits_to_keep", 0)
            self._told = tokens, asked
            if isinstance(asked, int) and asked:
                kwargs["logits_to_keep"] = max(asked, self.policy.reads_perplexity + 1)
        self._passing = True
        return (), kwargs

    def _after(self, model: nn.Module, args: tuple, output: Any) -> None:
        if self._pseudo is not None:
            return
        self._passing = False
        self._note_likelihood(output)
        self._cache.seen += self._fed
        if self._cache.ended and self._fed == 1:
            seconds = self.records.stop()
            for one in self.probes:
                one.after_step(self.records, self._cache.steps, seconds)

    def _note_likelihood(self, output: Any) -> None:
        most = self.policy.reads_perplexity
        logits = getattr(output, "logits", None) if most else None
        if logits is None:
            return
        tokens, asked = self._told
        if isinstance(asked, int):
            self._cache.likelihood.add(tokens, logits[:, -(most + 1) :], most)
            if asked:
                output.logits = logits[:, -asked:]

    def _adopt(self, given: Cache | None) -> LiveCache:
        if given is None:
            return LiveCache(self, self._n_layers)
        if isinstance(given, LiveCache):
            if len(given.layers) != self._n_layers:
                raise KvlabError(f"the cache has {len(given.layers)} layers, and the model {self._n_layers}")
            if given.session is not self:
                if given.session.policy != self.policy:
                    given.start_over()
                given.session, given.number = self, 0
                if given.ended:
                    self._begin(given)
            return given
        if getattr(given, "offloading", False):
            raise KvlabError("an offloaded cache cannot be compressed; drop cache_implementation='offloaded'")
        if type(given) is not DynamicCache or not all(isinstance(layer, DynamicLayer) for layer in given.layers):
            raise KvlabError(
                f"a {type(given).__name__} cannot be compressed; hand over a DynamicCache, a cache that a kvlab "
                "session returned, or none"
            )
        if given not in self._adopted:
            self._adopted[given] = LiveCache.of(self, self._n_layers, given)
        return self._adopted[given]

    # ------------------------------------------------------------------ attention

    def _attend(self, call: hooks.Call) -> Tensor:
        # Storage that was made in inference mode can only be written to in inference mode; so all of it is.
        if torch.is_inference_mode_enabled():
            return self._attended(call)
        with torch.inference_mode():
            out = self._attended(call)
        return out.clone() if torch.is_grad_enabled() else out

    def _attended(self, call: hooks.Call) -> Tensor:
        if not self._passing and self._pseudo is None:
            raise KvlabError(f"inside a kvlab session call the {type(self.model).__name__} itself, not a part of it")
        layer = self._cache.layers[call.layer]
        self._scaling = call.scaling
        if self._pseudo is not None:
            return self._pseudo.attend(call, layer.groups[self._pseudo.group].store)
        if not layer.groups:
            store = LayerStore(call.keys, call.values)
            store.layers = (call.layer,) * len(call.keys)
            layer.groups = [Group(None, store)]
            layer.observe(call.queries, self.policy.observes)
            self._accumulate(store, call.queries, call.scaling, call.padding)
            return call.attend()
        if self._cache.ended and call.queries.shape[2] == 1:
            if self.turns == "recompress" and self.policy.observes is not None:
                layer.observe(call.queries, self.policy.observes)
            return self._each(layer, call, self._step)
        if not self._cache.ended:
            layer.observe(call.queries, self.policy.observes)
        return self._each(layer, call, self._feed)

    def _each(self, layer: LiveLayer, call: hooks.Call, attend: Callable[..., Tensor]) -> Tensor:
        if len(layer.groups) == 1:
            return attend(layer.groups[0], call, call.queries, call.keys, call.values)
        out = torch.empty_like(call.queries)
        for group in layer.groups:
            out[group.rows] = attend(group, call, *map(group.of, (call.queries, call.keys, call.values)))
        return out

    def _feed(self, group: Group, call: hooks.Call, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """More of a prompt, or a later turn, on top of what is stored."""
        store, policy = group.store, group.policy or self.policy
        store.append(keys, values)
        if group.shadow is not None:
            group.shadow.append(keys, values)
        bias = policy.bias(store) if store.budget is not None else None
        if bias is None and not store.ragged:
            padding = call.padding if group.padded else None
            self._accumulate(store, queries, call.scaling, padding)
            return attention.attend(queries, store.keys, store.values, call.scaling, padding)
        # Slots of one head lie in order of arrival, but heads may hold different numbers: compare positions instead.
        heads, n = queries.shape[1], queries.shape[2]
        now = torch.arange(store.seen - n, store.seen, device=queries.device)
        positions = attention.to_query_heads(store.positions, heads)[:, :, None]
        visible = (positions <= now[:, None]) & (positions >= 0)
        if bias is not None:
            bias = attention.to_query_heads(bias, heads)[:, :, None]
        weights = attention.weights(queries, store.keys, call.scaling, visible, bias)
        return attention.output(weights, store.values).to(queries.dtype)

    def _accumulate(self, store: LayerStore, queries: Tensor, scaling: float, padding: Tensor | None) -> None:
        """Add up the attention that a policy wants of every prompt query, in a column of the store's."""
        if not self.policy.accumulates or self._cache.ended:
            return
        if store.budget is None and store.length > queries.shape[2] and not store.has_column(ACCUMULATED):
            raise KvlabError(
                f"{self.policy.name} adds up the attention of every query of its prompt, and only "
                f"{queries.shape[2]} of {store.length} were fed inside the session; feed the whole prompt there"
            )
        kv_heads = store.keys.shape[1]
        gathered = attention.accumulate(queries, store.keys, scaling, padding=padding)
        gathered = gathered.unflatten(1, (kv_heads, -1)).transpose(2, 3)
        if store.has_column(ACCUMULATED):
            store.column(ACCUMULATED).add_(gathered)
        else:
            store.add_column(ACCUMULATED, gathered)

    def _step(self, group: Group, call: hooks.Call, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        store, policy = group.store, group.policy or self.policy
        attended = decode(policy, store, queries, keys, values, call.scaling, weigh=self._weigh)
        if attended.slots is not None:
            entries = int((attended.slots >= 0).sum())
        else:
            entries = int(store.counts.sum()) if store.ragged else store.entries
        group.bytes_read = entries * store.entry_bytes + policy.overhead_bytes(store)
        if self.probes:
            if group.shadow is not None:
                group.shadow.append(keys, values)
            pre_queries = None if call.pre_rope is None else group.of(call.pre_rope)
            seen = Seen(policy, store, queries, attended, call.scaling, group.shadow, pre_queries)
            where = dict(step=self._cache.steps, layer=call.layer, rows=group.numbers(self._cache.batch))
            for one in self.probes:
                one.look(seen, self.records, where)
        policy.step(store, attended.weights)
        group.lossy = group.lossy or store.length < store.seen
        for one in self.probes:
            one.look_after(seen, self.records, where)
        return attended.output

    # ------------------------------------------------------------------ the end of a prompt

    @torch.inference_mode()
    def end_prompt(self) -> None:
        """Compress now what has been fed. Called by itself at the first single-token step."""
        cache = self._cache
        if cache is None or not cache.seen:
            raise KvlabError("no prompt has been fed yet")
        if cache.ended:
            return
        cache.split_by_length()
        self._begin(cache)
        for number in range(len(cache.layers[0].groups)):
            stores = [layer.groups[number].store for layer in cache.layers]
            judged = any(self._judges(store.length) for store in stores)
            if any(store.ragged for store in stores) and not self.policy.takes_ragged:
                raise KvlabError(
                    f"{self.policy.name} left sequences or heads with different numbers of entries, which cannot be "
                    "one prompt again; store later turns whole (turns='leave')"
                )
            found = self._run_pseudo(cache, number) if judged and self.policy.pseudo_key else {}
            planned = self._planned(cache, number) if self.policy.surveys and judged else []
            for index, layer in enumerate(cache.layers):
                group = layer.groups[number]
                # What a layer's prompt holds on to is freed before the next layer is compressed.
                prompt = planned.pop(0) if planned else self._prompt(cache, index, number, found.get(index))
                self.policy.compress(group.store, prompt)
                group.kept = group.store.positions.clone()
                group.lossy = group.lossy or group.store.length < group.store.seen or group.store.merged
        for layer in cache.layers:
            if self.turns == "leave" or self.policy.observes is None:
                layer.forget()
        cache.ended = True

    def _prompt(self, cache: LiveCache, index: int, number: int, pseudo: Tensor | None = None) -> Prompt:
        """The end of one layer's and one group's prefill, as the policy sees it."""
        layer = cache.layers[index]
        group = layer.groups[number]
        store = group.store
        window = layer.observed
        window = store.keys[:, :, :0] if window is None else group.of(window)
        window = window[:, :, max(window.shape[2] - store.length, 0) :]
        self._check_window(window.shape[2], store.length)
        accumulated = None
        if store.has_column(ACCUMULATED):
            accumulated = store.remove_column(ACCUMULATED).transpose(2, 3).flatten(1, 2)

        def perplexity(n: int) -> Tensor | None:
            return cache.likelihood.perplexity(min(n, store.seen - 1), group.rows)

        prompt = Prompt(
            window,
            store.keys,
            store.values,
            store.layers,
            self._n_layers,
            pseudo,
            accumulated,
            self.max_new_tokens,
            self._scaling,
            perplexity,
        )
        prompt.lossy, prompt.seen = group.lossy, store.seen
        return prompt

    def _planned(self, cache: LiveCache, number: int) -> list[Prompt]:
        """One group's prompt in each layer, with what the policy plans over all of them."""
        prompts = [self._prompt(cache, index, number) for index in range(self._n_layers)]
        surveys = [self.policy.survey(prompt) for prompt in prompts]
        # In a later turn layers hold different numbers of entries; what is not there scores least.
        widest = max(survey.shape[-1] for survey in surveys)
        surveys = [F.pad(survey, (0, widest - survey.shape[-1]), value=-torch.inf) for survey in surveys]
        plan = self.policy.plan(torch.stack(surveys), max(prompts, key=lambda prompt: prompt.length))
        return [prompt.with_plan(layer) for prompt, layer in zip(prompts, plan, strict=True)]

    def _begin(self, cache: LiveCache) -> None:
        """Number a prompt for the tables, and begin to keep what is going to be evicted, if a probe asks."""
        if not cache.number:
            self._prompts += 1
            cache.number = self._prompts
        if not self._shadowed:
            return
        for group in (group for layer in cache.layers for group in layer.groups if group.shadow is None):
            if group.lossy:
                raise KvlabError(
                    "the cache handed in has lost entries already, so its full attention is not known; leave out the "
                    "probes that compare with it, or have them from the first prompt on"
                )
            rows = group.store.keys.shape[0]
            group.shadow = Shadow.of(group.store, self._n_layers * cache.batch / rows, self._shadow_bytes)

    def _judges(self, length: int) -> bool:
        """Whether the policy looks at a prompt of this length, or keeps it whole unseen."""
        return self.policy.steps or length > self.policy.entries(length)

    def _check_window(self, known: int, length: int) -> None:
        need = length if self.policy.observes is None else min(self.policy.observes, length)
        if known >= need or not self._judges(length):
            return
        if self.policy.observes is None:
            raise KvlabError(
                f"{self.policy.name} looks at every query of its prompt, and after an earlier turn or a cache that was "
                f"handed in only {known} of {length} are known; store later turns whole (turns='leave'), or begin anew"
            )
        raise KvlabError(
            f"{self.policy.name} looks at the last {need} queries, and only {known} were fed inside the session after "
            "the cache that was handed in; feed the end of the prompt there"
        )

    def _run_pseudo(self, cache: LiveCache, number: int) -> dict[int, Tensor]:
        """Post-RoPE pseudo-queries `[rows, heads, m, head_dim]` of one group, by layer."""
        if not cache.ids or sum(chunk.shape[1] for chunk in cache.ids) != cache.seen:
            raise KvlabError(
                f"{self.policy.name} makes pseudo-tokens from the prompt's token ids, and not all are known; feed the "
                "whole prompt as input_ids inside the session"
            )
        group = cache.layers[0].groups[number]
        length = group.store.seen
        prompts = group.of(torch.cat(cache.ids, 1))[:, cache.seen - length :].cpu()
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        encode = self._encode or _no_tokenizer
        ids = torch.stack([self.policy.pseudo_tokens(row, vocabulary, encode) for row in prompts])
        device = group.store.keys.device
        positions = torch.arange(length, length + ids.shape[1], device=device).expand_as(ids)
        self._pseudo = pseudo = Pseudo(number)
        try:
            self.model.base_model(
                input_ids=ids.to(device), position_ids=positions, past_key_values=cache, use_cache=True
            )
        finally:
            self._pseudo = None
            for layer in cache.layers:
                store = layer.groups[number].store
                store.truncate(store.length - (store.seen - length))
        return pseudo.found

    # ------------------------------------------------------------------ one prefill for several policies

    def branch(self, prefilled: LiveCache) -> LiveCache:
        """A cache of this session's that begins with what another one holds, before its prompt has ended.

        Nothing is copied until one of them changes: several policies can start from one prefill (see `gather`).

        Raises:
            KvlabError: its prompt has ended, so that its policy may have changed it.
        """
        groups = [group for layer in prefilled.layers for group in layer.groups]
        if prefilled.ended or any(group.lossy or group.kept is not None for group in groups):
            raise KvlabError("this prompt has been compressed already; branch off before it ends")
        self._cache = prefilled.branch(self, columns=[ACCUMULATED] if self.policy.accumulates else [])
        return self._cache

    def join(self, sessions: Sequence[Session]) -> LiveCache:
        """A cache of this session's in which the sequences of others go on as the rows of one batch, each under its own
        policy: reading the weights, which is most of the time of a step at batch 1, is then paid once for all of them.

        The entries stay those of the sessions that they come from, whose `kv_bytes` and `kept` tell of them. What the
        joined sequences are fed is never compressed again (`turns="leave"`).

        Args:
            sessions: of this model, left, with prompts that have ended, all of one length and none padded.

        Raises:
            KvlabError: sessions that are not like this, or none.
        """
        caches = [session._cache for session in sessions]
        if not caches or any(cache is None or not cache.ended for cache in caches):
            raise KvlabError("sessions are joined once their prompts have ended; see end_prompt")
        if any(
            cache.seen != caches[0].seen or cache.padding is not None or len(cache.layers[0].groups) != 1
            for cache in caches
        ):
            raise KvlabError(
                "sessions that are joined hold sequences of one length, without padding, and were not joined before"
            )
        if self.turns != "leave" or self.probes or any(session.probes for session in sessions):
            raise KvlabError("sessions are joined without probes, in one with turns='leave'")
        joined = LiveCache(self, self._n_layers)
        joined.seen, joined.ended = caches[0].seen, True
        for session, cache in zip(sessions, caches, strict=True):
            rows = torch.arange(cache.batch) + (joined.batch if joined.layers[0].groups else 0)
            for new, old in zip(joined.layers, cache.layers, strict=True):
                (group,) = old.groups
                own = rows.to(group.store.keys.device)
                new.groups.append(replace(group, rows=own, policy=group.policy or session.policy))
        self._cache = joined
        return joined

    # ------------------------------------------------------------------ what is there

    def _stores(self) -> list[LayerStore]:
        return [] if self._cache is None else [g.store for layer in self._cache.layers for g in layer.groups]

    def kept(self, layer: int, sequence: int = 0) -> Tensor:
        """Positions stored now, int64 `[kv_heads, n]`, -1 padded, of one sequence of the batch."""
        group, row = self._find(layer, sequence)
        return group.store.positions[row].to("cpu", copy=True)

    def kept_after_prefill(self, layer: int, sequence: int = 0) -> Tensor:
        """Positions that the policy kept of the prompt, int64 `[kv_heads, n]`, -1 padded."""
        group, row = self._find(layer, sequence)
        if group.kept is None:
            raise KvlabError("the prompt has not ended yet, so nothing was compressed; see end_prompt")
        return group.kept[row].cpu()

    def _find(self, layer: int, sequence: int) -> tuple[Group, int]:
        if self._cache is None or not self._cache.layers[0].groups:
            raise KvlabError("nothing has been fed in this session yet")
        if not 0 <= layer < self._n_layers:
            raise KvlabError(f"layer {layer} is outside 0 .. {self._n_layers - 1}")
        for group in self._cache.layers[layer].groups:
            rows = group.numbers(self._cache.batch)
            if sequence in rows:
                return group, rows.index(sequence)
        raise KvlabError(f"sequence {sequence} is outside this batch of {self._cache.batch}")

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that hold an entry, over all layers."""
        return sum(store.kv_bytes for store in self._stores())

    @property
    def aux_bytes(self) -> int:
        """Bytes that the policy keeps beside them (scores, profiles, fusion counts)."""
        return sum(store.aux_bytes for store in self._stores())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all storage, what is merely preallocated and the original positions included."""
        return sum(store.allocated_bytes for store in self._stores())

    @property
    def read_bytes(self) -> int:
        """Bytes that the last decoding step loaded; 0 before there was one."""
        return 0 if self._cache is None else sum(g.bytes_read for layer in self._cache.layers for g in layer.groups)

    @property
    def table(self) -> pd.DataFrame:
        """What the probes saw, tidy: policy, budget, sequence, layer, kv_head, head, step, measure, value."""
        return self.records.table

    @property
    def means(self) -> dict[str, float]:
        """Mean of every measure over sequences, layers, heads and steps."""
        return self.records.means


class Pseudo:
    """A pass of pseudo-tokens over one group's prompt."""

    def __init__(self, group: int):
        self.group = group
        self.found: dict[int, Tensor] = {}

    def attend(self, call: hooks.Call, store: LayerStore) -> Tensor:
        self.found[call.layer] = call.queries
        store.append(call.keys, call.values)
        return attention.attend(call.queries, store.keys, store.values, call.scaling)


def _no_tokenizer(text: str) -> Tensor:
    raise KvlabError("pseudo-tokens from a sentence need a tokenizer: compress(model, policy, tokenizer=...)")


def compress(
    model: nn.Module | LM,
    policy_or_name: Policy | str,
    probes: Sequence[Probe | str] = (),
    *,
    turns: Literal["recompress", "leave"] = "recompress",
    tokenizer: Any = None,
    shadow_bytes: int = 8 * 2**30,
    max_new_tokens: int = 0,
) -> Session:
    """Run `model` with a cache that `policy` compresses, as a context manager.

    ```python
    with kvlab.compress(lm.model, kvlab.policy("snapkv", budget=256), probes=["mass_lost"]) as session:
        lm.model.generate(ids, max_new_tokens=64)
    session.kv_bytes, session.kept(layer=10), session.table
    ```

    Args:
        model: a transformers decoder whose attention goes through the attention interface, or what `kvlab.load` gives.
        policy_or_name: a policy, or the name of one that needs no parameters.
        probes: what to record (`kvlab list probes`), by name or as objects.
        turns: what a prompt does that follows a response in the same cache: "recompress" takes all that is stored,
            the new turn included, as the prompt to compress; "leave" stores the new turn whole.
        tokenizer: needed by pseudo-tokens that are made from a sentence.
        shadow_bytes: how much evicted keys and values may take (on the CPU) for probes that compare with the full
            cache.
        max_new_tokens: how long the response may grow, for methods that depend on it (rocketkv, quest, sparq,
            hybrid, keyformer); 0 where it is not known.

    Raises:
        KvlabError: the model cannot be hooked, or an unknown probe; nothing has run by then.
    """
    if turns not in ("recompress", "leave"):
        raise KvlabError(f"turns={turns!r} is neither 'recompress' nor 'leave'")
    if not isinstance(model, nn.Module):
        model = lm_of(model)
    if isinstance(model, LM):
        model, tokenizer = model.model, model.tokenizer if tokenizer is None else tokenizer
    encode = None
    if tokenizer is not None:

        def encode(text: str) -> Tensor:
            return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)

    instruments = [probe(p) for p in listed(probes, "probes")]
    if whole("max_new_tokens", max_new_tokens) < 0:
        raise KvlabError(f"max_new_tokens must not be negative, and is {max_new_tokens}")
    return Session(model, policy(policy_or_name), instruments, turns, encode, shadow_bytes, max_new_tokens)
