"""A policy inside transformers' own `generate()`: a cache that really shrinks.

`with compress(model, policy) as session:` swaps the attention of every layer and the cache of every forward pass. While
a prompt comes in, whole or in pieces, everything is stored. Then the policy compresses it, evicted entries are freed,
and from then on every step goes by the same clock as a replay (`kvlab.methods._base.clock`). A prompt ends where
`generate` says so; outside `generate`, at the first single-token step.

This file holds the code around a forward pass. `attending` holds the work in a layer, `prefill` the end of a prompt,
and `reports` the session's numbers.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvlab.core import adapter, hookable, hooks
from kvlab.core.storage import AS_IS, Storage, stored_as
from kvlab.errors import KvlabError, whole
from kvlab.inputs.models import LM, lm_of
from kvlab.instruments.probes import Probe, probe
from kvlab.instruments.records import Records
from kvlab.live.attention_step import ACCUMULATED, Attending
from kvlab.live.cache import LiveCache
from kvlab.live.generate_hooks import Generations, generating
from kvlab.live.prefill import Prefill
from kvlab.live.reports import Reports, located
from kvlab.live.row_groups import Group
from kvlab.live.static_cache import static_cache
from kvlab.methods import Policy, listed, policy
from kvlab.methods._base import contract

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel


class NoGradient(torch.autograd.Function):
    """An attention output that refuses gradients: none goes back through it, and zero would be wrong."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise KvlabError("gradients do not go through a kvlab session; take them outside, with the full cache")


class Session:
    """The object that `compress` gives to its block: the stored entries, their bytes, and the probes' numbers.

    Attributes:
        model, policy, storage: as given.
        layout: which of the model's layers the policy compresses.
        records: numbers of the probes, whose tidy form is `table`, and, as `records.reads`, what each step read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        probes: Sequence[Probe],
        turns: str,
        encode: Callable[[str], Tensor] | None,
        shadow_bytes: int,
        max_new_tokens: int = 0,
        storage: Storage = AS_IS,
    ):
        self.model, self.policy, self.turns, self.storage = model, policy, turns, storage
        self._reports = Reports(policy, probes, shadow_bytes, storage)
        self._attending = Attending(model, policy, turns, self._reports)
        self._prefill = Prefill(model, policy, turns, encode, max_new_tokens, storage)
        hookable.check_attends_to_all(model)
        self.modules, self.layout = hookable.layers_of(model), hookable.layout_of(model)
        if policy.needs.projection:
            hookable.required_projections(self.modules, policy.name)
        if hookable.is_latent(self.modules[0]):
            storage.check_latent()
        name = getattr(model.config, "name_or_path", "")
        storage.check(hookable.head_dim_of(model, self.modules[0]), hookable.device_of(model), name or "")
        self._window = hooks.shortest_window(model)
        self._cache: LiveCache | None = None
        self._fed = 0
        self._last_logits: Tensor | None = None  # of a prompt, where drafts were fed with its end
        # One forward pass at a time, whichever thread it is in: a pass that failed is ended by the next of its thread.
        self._turn, self._passing_thread = threading.Lock(), 0
        self._generations = Generations()
        # The ids that are fed, and how many logits were asked for.
        self._logits_request: tuple[Tensor | None, int | Tensor] = None, 0
        self._passing = False  # whether a forward pass of the model is under way
        self._seen_by_a_layer = False  # whether a layer has attended in it
        self._arguments = list(inspect.signature(model.forward).parameters)
        self._stack = ExitStack()

    # ------------------------------------------------------------------ entering and leaving

    def __enter__(self) -> Session:
        with ExitStack() as stack:
            before_rope = self._reports.needs_pre_rope or self.policy.needs.before_rope
            stack.enter_context(hooks.hooked(self.model, self._attend, before_rope, self.policy.needs.hidden_in_passes))
            stack.enter_context(generating(self.model, self._generations))
            stack.callback(self.model.register_forward_pre_hook(self._before, with_kwargs=True).remove)
            stack.callback(self.model.register_forward_hook(self._after, always_call=True).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            # The caller can go on with a cache of its own, and nothing would compress its prompt any more.
            cache = self._cache
            whole = cache is not None and not (cache.failed or self._passing)
            if kind is None and cache is not None and whole and cache.from_caller and cache.seen:
                self.end_prompt()
        finally:
            self._leave()
            self._stack.close()

    def __deepcopy__(self, memo: dict) -> Session:
        raise KvlabError("a model cannot be copied inside its kvlab session; copy it before")

    def running(self, cache: LiveCache) -> bool:
        """Whether a forward pass on `cache` is under way."""
        return (self._passing or cache.own_pass is not None) and self._cache is cache

    # ------------------------------------------------------------------ around a forward pass

    def _before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Give a forward pass the session's cache, once a prompt that it finds ended is compressed."""
        self._enter()
        if self._cache is not None and self._cache.own_pass is not None:
            return args, kwargs
        self._passing, self._seen_by_a_layer, self._last_logits = False, False, None
        kwargs.update(zip(self._arguments, args, strict=False))
        self._check(kwargs)
        cache = self._cache = self._cache_for(kwargs.get("past_key_values"))
        kwargs["past_key_values"], kwargs["use_cache"] = cache, True
        if (call := self._generations.starting) is not None:
            call.cache, cache.prompt_end = cache, call.prompt_end
            cache.from_caller, cache.drafting = cache.from_caller and call.has_cache, call.drafting
            if call.drafting:
                self._check_drafts()
        tokens = kwargs.get("input_ids")
        fed = tokens if tokens is not None else kwargs["inputs_embeds"]
        self._fed = fed.shape[1]
        unplaced = kwargs.get("position_ids") is None and kwargs.get("attention_mask") is None
        if unplaced and (positions := cache.next_positions) is not None:
            kwargs["position_ids"] = positions[:, None] + torch.arange(self._fed, device=positions.device)
        if self._window is not None and cache.seen + self._fed > self._window:
            hooks.check_length(self.model, cache.seen + self._fed)
        left = None if cache.prompt_end is None else cache.prompt_end - cache.seen
        if left is not None and 0 < left < self._fed and not cache.drafting:
            left = None  # a mask that is not as long as the sequence tells nothing of its prompt
        elif left is not None and 0 < left < self._fed:
            kwargs = self._feed_prompt(kwargs, left)
            tokens, left = kwargs.get("input_ids"), 0
        self._begin_phase(cache, left)
        if not cache.ended:
            cache.note_padding(kwargs.get("attention_mask"), self._fed)
        elif self._fed == 1:
            self._reports.step_begins(cache)
        if tokens is not None:
            cache.ids.append(tokens)
        if self.policy.needs.positions:
            cache.note_positions(kwargs.get("position_ids"), self._fed, fed.device)
        if self.policy.needs.perplexity and "logits_to_keep" in self._arguments:
            asked = kwargs.get("logits_to_keep", 0)
            self._logits_request = tokens, asked
            if isinstance(asked, int) and asked:
                kwargs["logits_to_keep"] = max(asked, self.policy.needs.perplexity + 1)
        self._passing, cache.memory = True, None  # what was found out about the prompt holds no longer
        return (), kwargs

    def _begin_phase(self, cache: LiveCache, left: int | None) -> None:
        """Tell what a forward pass is: more of a prompt, of a later turn, or of a response.

        Args:
            left: how many tokens of the prompt that `generate` was given are still to come; None outside `generate`.
        """
        if left is None:
            if self._fed == 1 and cache.seen and not cache.ended:
                self.end_prompt()
            elif self._fed > 1 and cache.ended and self.turns == "recompress":
                cache.ended = False
        elif left <= 0:
            if not cache.ended:
                self.end_prompt()
            if self._fed > 1:
                self._check_drafts()
        elif self._fed > 1 and cache.ended and self.turns == "recompress":
            cache.ended = False

    def _feed_prompt(self, kwargs: dict[str, Any], left: int) -> dict[str, Any]:
        """Feed the end of a prompt that came together with drafted tokens, and give what is left to feed."""
        strange = [name for name in ("token_type_ids", "inputs_embeds") if kwargs.get(name) is not None]
        if strange or kwargs.get("output_hidden_states"):
            raise KvlabError("drafted tokens are fed as plain token ids in a kvlab session; leave out the assistant")
        first, rest = dict(kwargs), dict(kwargs)
        for name in ("input_ids", "position_ids"):
            if kwargs.get(name) is not None:
                first[name], rest[name] = kwargs[name][..., :left], kwargs[name][..., left:]
        if (mask := kwargs.get("attention_mask")) is not None:
            first["attention_mask"] = mask[:, : mask.shape[1] - self._fed + left]
        if "logits_to_keep" in self._arguments:
            first["logits_to_keep"] = 1
        drafted = self._fed - left
        logits = self.model(**first).logits[:, -1:]
        self._enter()
        # Layers that remember more than they need, to take drafts back, are brought to what they need by a crop.
        for layer in kwargs["past_key_values"].others.values():
            if getattr(layer, "record_past", False):
                layer.crop(0)
        self._fed, self._last_logits = drafted, logits
        return rest

    def _check(self, kwargs: dict[str, Any]) -> None:
        """Refuse what a forward pass cannot be asked for here."""
        if kwargs.get("use_cache") is False:
            raise KvlabError("use_cache=False leaves nothing to compress; drop it, or leave the kvlab session")
        asked = kwargs.get("output_attentions")
        if asked or (asked is None and getattr(self.model.config, "output_attentions", False)):
            raise KvlabError(
                "output_attentions=True is not served inside a kvlab session; record what you need of the weights with "
                "a probe (kvlab list probes), or capture a trace"
            )

    def _check_drafts(self) -> None:
        """Refuse drafted tokens where taking them back would not leave everything as it was."""
        why = None
        if self.policy.needs.acts_while_decoding:
            why = f"{self.policy.name} cannot take tokens back, since it acts on every one that it is fed"
        elif any(tokens > 1 for tokens, _ in self.storage.times):
            why = f"{self.storage.name} rounds several tokens together and cannot take single ones back"
        elif self._reports.probes:
            why = "probes look at single steps"
        if why is not None:
            raise KvlabError(f"{why}; generate without assistant_model and prompt_lookup_num_tokens")

    def _after(self, model: nn.Module, args: tuple, output: Any) -> None:
        """Note what a forward pass has fed, and tell the probes where it was a decoding step."""
        cache = self._cache
        if cache is not None and cache.own_pass is not None:
            return
        passed, self._passing = self._passing, False
        try:
            if cache is None or output is None or not passed:
                if cache is not None:
                    cache.failed = cache.failed or passed
                return
            if not self._seen_by_a_layer:
                cache.failed = True
                raise KvlabError(
                    f"no layer of {type(model).__name__} came by the session: set its attention implementation before "
                    "the block, and compile nothing inside it"
                )
            self._note_likelihood(cache, output)
            cache.seen += self._fed
            if cache.ended and self._fed == 1:
                self._reports.step_ended(cache)
            if self._last_logits is not None:
                output.logits = torch.cat([self._last_logits, output.logits], 1)
        finally:
            self._leave()

    def _enter(self) -> None:
        """Wait for the forward passes of other threads."""
        if self._passing_thread != threading.get_ident():
            self._turn.acquire()
            self._passing_thread = threading.get_ident()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """While the block runs, no other thread makes a forward pass."""
        entered = self._passing_thread != threading.get_ident()
        self._enter()
        try:
            yield
        finally:
            if entered:
                self._leave()

    def _leave(self) -> None:
        if self._passing_thread == threading.get_ident():
            self._passing_thread = 0
            self._turn.release()

    def _note_likelihood(self, cache: LiveCache, output: Any) -> None:
        most = self.policy.needs.perplexity
        logits = getattr(output, "logits", None) if most else None
        if logits is None:
            return
        tokens, asked = self._logits_request
        if isinstance(asked, int):
            cache.likelihood.add(tokens, logits[:, -(most + 1) :], most)
            if asked:
                output.logits = logits[:, -asked:]

    def _cache_for(self, cache: Cache | None) -> LiveCache:
        """The session's cache for the one that a forward pass was handed."""
        if cache is None:
            return LiveCache(self)
        if isinstance(cache, LiveCache):
            if cache.failed:
                raise KvlabError(
                    "a forward pass or a compression of this cache failed half-way; begin anew with another"
                )
            if len(cache.layers) != len(self.layout.sees):
                raise KvlabError(f"the cache has {len(cache.layers)} layers, and the model {len(self.layout.sees)}")
            if not cache.belongs_to(self):
                if cache.policy != self.policy:
                    cache.start_over()
                elif cache.ended:
                    cache.set_storage(self.storage)
                cache.belong(self)
                cache.number = 0
                if cache.ended:
                    self._reports.begin(cache)
            return cache
        if not isinstance(cache, Cache):
            raise KvlabError(
                f"past_key_values is a DynamicCache or None in a kvlab session, not a {type(cache).__name__}"
            )
        if getattr(cache, "offloading", False):
            raise KvlabError("an offloaded cache cannot be compressed; drop cache_implementation='offloaded'")
        compressed = [layer for number, layer in enumerate(cache.layers) if number in self.layout.compressed]
        if type(cache) is not DynamicCache or not all(isinstance(layer, DynamicLayer) for layer in compressed):
            raise KvlabError(
                f"a {type(cache).__name__} cannot be compressed; hand over a DynamicCache, a cache that a kvlab "
                "session returned, or none"
            )
        return LiveCache.of(self, cache)

    # ------------------------------------------------------------------ attention

    def _attend(self, call: hooks.Call) -> Tensor:
        # Storage that was made in inference mode can only be written to in inference mode; so all of it is.
        if torch.is_inference_mode_enabled():
            return self._attended(call)
        with torch.inference_mode():
            out = self._attended(call)
        return NoGradient.apply(out.clone(), call.queries, call.keys, call.values) if torch.is_grad_enabled() else out

    def _attended(self, call: hooks.Call) -> Tensor:
        cache = self._cache
        if cache is not None and cache.own_pass is not None:
            return cache.own_pass(call)
        if cache is None or not self._passing:
            raise KvlabError(f"inside a kvlab session call the {type(self.model).__name__} itself, not a part of it")
        self._seen_by_a_layer = True
        return self._attending.attend(cache, call)

    @torch.inference_mode()
    def end_prompt(self) -> None:
        """Compress the tokens fed so far.

        A session calls this itself: where `generate` begins its response, at a single-token step outside `generate`,
        and when the block ends with the caller's cache.
        """
        cache = self._cache
        if cache is None or not cache.seen:
            raise KvlabError("no prompt has been fed yet")
        if cache.ended:
            return
        with self._exclusive():
            cache.split_by_length()
            self._reports.begin(cache)
            try:
                self._prefill.end(cache)
            except BaseException:
                cache.failed = True
                raise
            self._reports.note_entries(cache)

    # ------------------------------------------------------------------ one prefill for several policies

    def branch(self, prefilled: LiveCache) -> LiveCache:
        """A cache of this session's that begins with what another one holds, before its prompt has ended.

        Nothing is copied until one of them changes: several policies can start from one prefill (see `shared_prefill`).

        Raises:
            KvlabError: its prompt has ended, so that its policy may have changed it.
        """
        groups = [group for layer in prefilled.compressed for group in layer.groups]
        if prefilled.ended or any(group.lossy or group.kept is not None for group in groups):
            raise KvlabError("this prompt has been compressed already; branch off before it ends")
        self._cache = prefilled.branch(self, columns=[ACCUMULATED] if self.policy.needs.accumulated else [])
        return self._cache

    def join(self, sessions: Sequence[Session]) -> LiveCache:
        """A cache of this session in which the sequences of others continue as rows of one batch, each under its own
        policy.

        Reading the weights, most of the time of a step at batch 1, then happens once for all of them.

        The entries stay those of the sessions that they come from, whose `kv_bytes`, `read_bytes` and `kept` tell of
        them. Later tokens are never compressed (`turns="leave"`). Each sequence continues at its own position;
        `generate` is given an attention mask, padded on the left to the longest.

        Args:
            sessions: of this model, left, their prompts ended, none padded; of one length if any layer is left alone.

        Raises:
            KvlabError: sessions that are not like this, or none.
        """
        caches = [session._cache for session in sessions if session._cache is not None and session._cache.ended]
        if not caches or len(caches) < len(sessions):
            raise KvlabError("sessions are joined once their prompts have ended; see end_prompt")
        if any(cache.padding is not None or len(cache.compressed[0].groups) != 1 for cache in caches):
            raise KvlabError("sessions that are joined hold sequences without padding, and were not joined before")
        lengths = sorted({n for cache in caches for n in (cache.seen, cache.compressed[0].groups[0].store.seen)})
        if self.layout.others and len(lengths) > 1:
            rule = "sessions of a model with layers that no policy compresses are joined once, and at one length"
            raise KvlabError(f"{rule}; these have {', '.join(map(str, lengths))} tokens")
        if self.turns != "leave" or any(session._reports.probes for session in (self, *sessions)):
            raise KvlabError("sessions are joined without probes, in one with turns='leave'")
        self._cache = LiveCache.joined(self, caches, [session.policy for session in sessions])
        return self._cache

    def static_cache(self, room: int) -> Cache:
        """The compressed prompt's entries as a cache of fixed size, for decoding outside of the session.

        Its steps have the same shapes, so `torch.compile` compiles them once. `generate` does that by itself on a GPU.
        The session's own entries stay.

        Args:
            room: how many tokens may be fed on top.

        Raises:
            KvlabError: no compressed prompt, a policy that acts at every step, or a storage that rounds. Also layers or
                heads with different numbers of entries, and layers that no policy compresses.
        """
        if self._cache is None:
            raise KvlabError("no prompt has been fed yet")
        return static_cache(self._cache, room)

    # ------------------------------------------------------------------ what is there

    def _groups(self) -> list[Group]:
        return [] if self._cache is None else [group for layer in self._cache.compressed for group in layer.groups]

    def kept(self, layer: int, sequence: int = 0) -> Tensor:
        """Positions stored now in the model's layer `layer`, int64 `[kv_heads, n]`, -1 padded, of one sequence of the
        batch. Raises KvlabError for a layer that no policy compresses (`layers` says which are).
        """
        group, row = located(self._cache, layer, sequence)
        return group.store.positions[row].to("cpu", copy=True)

    def kept_after_prefill(self, layer: int, sequence: int = 0) -> Tensor:
        """Positions that the policy kept of the prompt, int64 `[kv_heads, n]`, -1 padded; layers as in `kept`."""
        group, row = located(self._cache, layer, sequence)
        if group.kept is None:
            raise KvlabError("the prompt has not ended yet, so nothing was compressed; see end_prompt")
        return group.kept[row].cpu()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the entries' keys and values, as they are stored, over all layers that the policy compresses."""
        return sum(group.kv_bytes(self.policy) for group in self._groups())

    @property
    def aux_bytes(self) -> int:
        """Bytes that the policy keeps in addition (scores, profiles, fusion counts)."""
        return sum(group.store.aux_bytes for group in self._groups())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all storage of compressed layers, with what is merely preallocated and the original positions."""
        return sum(group.store.allocated_bytes for group in self._groups())

    @property
    def read_bytes(self) -> int:
        """Bytes that the last decoding step loaded; 0 before there was one."""
        return sum(group.store.bytes_read for group in self._groups())

    @property
    def uncompressed_bytes(self) -> int:
        """Bytes that the layers hold which no policy compresses: windows, chunks, convolutions, linear states. They are
        counted in none of the others; 0 where every layer is compressed.
        """
        return 0 if self._cache is None else sum(map(adapter.layer_bytes, self._cache.others.values()))

    @property
    def layers(self) -> pd.DataFrame:
        """One row for each layer of the model: layer, sees (what it looks at), compressed, bytes.

        bytes counts the stored keys and values, and the policy's own tensors.
        """
        bytes_of: dict[int, int] = {}
        if self._cache is not None:
            bytes_of = {number: adapter.layer_bytes(layer) for number, layer in self._cache.others.items()}
            for number, layer in zip(self.layout.compressed, self._cache.compressed, strict=True):
                bytes_of[number] = sum(group.kv_bytes(self.policy) + group.store.aux_bytes for group in layer.groups)
        return self.layout.table().assign(bytes=[bytes_of.get(number, 0) for number in range(len(self.layout.sees))])

    @property
    def probes(self) -> list[Probe]:
        return self._reports.probes

    @property
    def records(self) -> Records:
        return self._reports.records

    @property
    def table(self) -> pd.DataFrame:
        """The probes' numbers, tidy: policy, budget, entries, storage, prompt, sequence, layer, kv_head, head, step,
        measure, value.
        """
        return self.records.table

    @property
    def means(self) -> dict[str, float]:
        """Mean of every measure over sequences, layers, heads and steps."""
        return self.records.means


def compress(
    model: nn.Module | LM,
    policy_or_name: Policy | str,
    probes: Sequence[Probe | str] = (),
    *,
    turns: Literal["recompress", "leave"] = "recompress",
    tokenizer: Any = None,
    shadow_bytes: int = 8 * 2**30,
    max_new_tokens: int = 0,
    storage: str | Storage = "as_is",
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
        turns: how a later prompt in the same cache is treated. "recompress" compresses all stored entries with the new
            turn as one prompt; "leave" stores the new turn whole.
        tokenizer: needed by pseudo-tokens that are made from a sentence.
        shadow_bytes: how much evicted keys and values may take (on the CPU) for probes that compare with the full
            cache.
        max_new_tokens: how long the response may grow, for methods that depend on it (rocketkv, quest, sparq, hybrid,
            keyformer); 0 where it is not known.
        storage: the form of the kept entries (`kvlab list storages`), from the end of the prompt on.

    Raises:
        KvlabError: a policy that sees the response, a model that cannot be hooked, an unknown probe or storage. Also a
            storage that does not fit the model's head size or device. Nothing has run by then.
    """
    if turns not in ("recompress", "leave"):
        raise KvlabError(f"turns={turns!r} is neither 'recompress' nor 'leave'")
    if not isinstance(model, nn.Module | LM):
        model = lm_of(model)
    if isinstance(model, LM):
        model, tokenizer = model.model, model.tokenizer if tokenizer is None else tokenizer
    model = hookable.unwrapped(model)

    def encode(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.int64)

    method = policy(policy_or_name)
    contract.check_runs_live(method)
    instruments = [probe(p) for p in listed(probes, "probes")]
    if whole("max_new_tokens", max_new_tokens) < 0:
        raise KvlabError(f"max_new_tokens must not be negative, and is {max_new_tokens}")
    return Session(
        cast("PreTrainedModel", model),
        method,
        instruments,
        turns,
        None if tokenizer is None else encode,
        shadow_bytes,
        max_new_tokens,
        stored_as(storage),
    )
