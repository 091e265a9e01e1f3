"""Capture once, ask many questions: one forward pass records what attention saw, and a file keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.core import attention, hookable, hooks
from kvlab.core.adapter import StoreCache, held_bytes, twin
from kvlab.core.rotation import Rotation, candidates
from kvlab.core.softmax import Softmax
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.inputs.models import lm_of
from kvlab.lib import bars
from kvlab.methods import Policy
from kvlab.methods.repeating import Part, Repetition
from kvlab.traces.recording import Options, Recording, check_keep, planned, several
from kvlab.traces.trace import Keep, Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.traces.recording import OnePrompt, SeveralPrompts


class _Recorder:
    """Keeps what one model's attention sees while it prefills and decodes."""

    def __init__(self, lm: LM, prompt: int, steps: int, window: int, extra: int, accumulate: bool):
        config, modules = hookable.text_config(lm.model), hookable.layers_of(lm.model)
        self.layers, self.heads = len(modules), config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        kv_heads = self.heads // getattr(modules[0], "num_key_value_groups", self.heads // kv_heads)
        head_dim = getattr(modules[0], "head_dim", None) or config.hidden_size // self.heads
        storage = (self.layers, 1, kv_heads, prompt + max(steps, extra), head_dim)
        self.keys, self.values = (torch.empty(storage, dtype=lm.dtype, device=lm.device) for _ in range(2))
        self.stores = [LayerStore.preallocated(k, v) for k, v in zip(self.keys, self.values, strict=True)]
        self.cache, self._model = StoreCache(self.stores, lm.model), lm.model
        shape = self.layers, self.heads, window + steps, head_dim
        self.queries = torch.empty(shape, dtype=lm.dtype, device=lm.device)
        self.pre_queries = torch.empty_like(self.queries)
        self.accumulated = torch.zeros(self.layers, self.heads, prompt, device=lm.device) if accumulate else None
        self.softmax = Softmax()
        self.rotations: dict[int, Rotation | None] = {}
        self._choices: list[Rotation] = []
        self.sinks: dict[int, Tensor] = {}
        self.filled = 0
        self.prefilling = True

    def __call__(self, call: hooks.Call) -> Tensor:
        n = min(call.queries.shape[2], self.queries.shape[2] - self.filled)
        new = slice(self.filled, self.filled + n)
        self.queries[call.place, :, new] = call.queries[0, :, call.queries.shape[2] - n :]
        assert call.pre_rope is not None, "queries before RoPE are asked for"
        self.pre_queries[call.place, :, new] = call.pre_rope[0, :, call.queries.shape[2] - n :]
        self.softmax = call.softmax
        if self.prefilling:
            # The tables may have been made anew for the length of this very prompt.
            self._choices = list(candidates(self._model)) if call.place == 0 else self._choices
            self.rotations[call.place] = call.rotation(self._choices)
        if call.sinks is not None:
            self.sinks[call.place] = call.sinks
        if self.accumulated is not None and self.prefilling:
            self.accumulated[call.place] = attention.accumulate(call.queries[0], call.keys[0], call.softmax)
        if call.place == self.layers - 1:
            self.filled += n
        return call.attend()

    def uncompressed_bytes(self) -> int:
        """What the layers left alone hold now."""
        return sum(map(held_bytes, self.cache.others.values()))

    def all_sinks(self) -> Tensor | None:
        """The sinks of all layers, `[layers, heads]`, minus infinity where a layer has none; None if none has any."""
        if not self.sinks:
            return None
        none = torch.full((self.heads,), -torch.inf, device=self.keys.device)
        return torch.stack([self.sinks.get(place, none).float() for place in range(self.layers)])


def _forward(lm: LM, ids: Tensor, cache: StoreCache, positions: Tensor | None = None, logits_of: int = 1) -> Tensor:
    """Logits of the last tokens, `[logits_of, vocabulary]`."""
    extra = {} if positions is None else {"position_ids": positions[None].to(lm.device)}
    out = lm.model(
        input_ids=ids[None].to(lm.device), past_key_values=cache, use_cache=True, logits_to_keep=logits_of, **extra
    )
    return out.logits[0, -logits_of:]


@torch.inference_mode()
def pseudo_queries(lm: LM, cache: StoreCache, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of tokens that run on top of a prefilled cache at any assigned positions, and are cropped off again.

    They see the whole prompt and, causally, those of their own trial; several trials share one forward pass, but for
    models with layers of which only one sequence can go on (windows, convolutions, linear states).

    Args:
        ids, positions: int64 `[m]`, or `[trials, m]`.

    Returns:
        Post-RoPE and pre-RoPE queries, each `[layers, heads, m, head_dim]`, or `[trials, layers, heads, m, head_dim]`.
    """
    if cache.others and ids.dim() == 2:
        alone = [pseudo_queries(lm, cache, *trial) for trial in zip(ids, positions.expand_as(ids), strict=True)]
        return torch.stack([post for post, _ in alone]), torch.stack([pre for _, pre in alone])
    trials, m = ids.shape if ids.dim() == 2 else (1, len(ids))
    post, pre = {}, {}
    lengths = [store.length for store in cache.stores]
    trial = torch.arange(trials * m, device=lm.device) // m
    own = attention.last_visible(trials * m, trials * m, lm.device) & (trial[:, None] == trial[None])
    mask = torch.cat([own.new_ones(trials * m, lengths[0]), own], dim=1)

    def record(call: hooks.Call) -> Tensor:
        assert call.pre_rope is not None, "queries before RoPE are asked for"
        post[call.place], pre[call.place] = call.queries[0], call.pre_rope[0]
        return call.attend(mask)

    before = list(cache.layers)
    try:
        for number, layer in cache.others.items():
            cache.layers[number] = twin(layer)
        with hooks.hooked(lm.model, record):
            _forward(lm, ids.reshape(-1), cache, positions.reshape(-1))
    finally:
        cache.layers[:] = before
        for store, length in zip(cache.stores, lengths, strict=True):
            store.truncate(length)

    def stacked(found: dict[int, Tensor]) -> Tensor:
        rows = torch.stack([found[place] for place in range(len(lengths))])
        return rows if ids.dim() == 1 else rows.unflatten(2, (trials, m)).movedim(2, 0)

    return stacked(post), stacked(pre)


def pseudo_queries_by_key(lm: LM, cache: StoreCache, tokens: Mapping[str, Tensor], start: int) -> dict[str, Tensor]:
    """Post-RoPE queries of several runs of pseudo-tokens `[m]`, each at the positions start .. start + m - 1."""
    places = {key: torch.arange(start, start + len(ids)) for key, ids in tokens.items()}
    return {key: pseudo_queries(lm, cache, ids, places[key])[0] for key, ids in tokens.items()}


@torch.inference_mode()
def repeat_scores(lm: LM, cache: StoreCache, repetition: Repetition, parts: Sequence[Part]) -> Tensor:
    """Scores of a prompt's tokens by what the model attends to when it repeats them, `[layers, kv_heads, prompt]`.

    Args:
        cache: that holds the prompt; what is fed goes to a branch of it.
    """
    modules, found = hookable.layers_of(lm.model), []
    projections = hookable.required_projections(modules) if repetition.plus else [None] * len(modules)
    for part in parts:
        branch, scores = cache.branch(), {}

        def score(call: hooks.Call, part: Part = part, scores: dict[int, Tensor] = scores) -> Tensor:
            states = call.queries, call.keys, call.values
            weight = projections[call.place]
            scores[call.place] = repetition.scores(part, *states, call.softmax, call.hidden, weight)[0]
            return call.attend()

        with hooks.hooked(lm.model, score, pre_rope=False, hidden=repetition.plus):
            _forward(lm, part.ids, branch)
        found.append(torch.stack([scores[place] for place in range(len(modules))]))
    return torch.cat(found, -1)


@torch.inference_mode()
def prefilled(trace: Trace, lm: LM | None = None) -> StoreCache:
    """A cache that holds a trace's prompt, as after its prefill: pseudo-queries run on it without prefilling again.

    Args:
        lm: the model, which has to prefill once more where a trace does not hold all of its layers.

    Raises:
        KvlabError: the trace holds a part of the layers, and no model or no tokens are given.
    """
    if trace.layout.mixed:
        if lm is None or trace.ids is None:
            raise KvlabError(
                "this trace holds only the layers of its model that are compressed; give the model too, and a trace "
                "that knows its tokens, to make again what the others held"
            )
        empty = trace.keys[:, None, :, :0]
        cache = StoreCache([LayerStore(keys, keys) for keys in empty], lm.model)
        with hooks.hooked(lm.model, hooks.Call.attend, pre_rope=False):
            _forward(lm, trace.ids[: trace.prompt_length], cache)
        return cache
    pairs = zip(trace.prompt_keys, trace.prompt_values, strict=True)
    return StoreCache([LayerStore(keys[None], values[None]) for keys, values in pairs])


@overload
def capture(
    lm: LM | torch.nn.Module,
    text_or_ids: OnePrompt,
    new_tokens: int = 64,
    window: int = 32,
    **options: Unpack[Options],
) -> Trace: ...
@overload
def capture(
    lm: LM | torch.nn.Module,
    text_or_ids: SeveralPrompts,
    new_tokens: int = 64,
    window: int = 32,
    **options: Unpack[Options],
) -> list[Trace]: ...
@torch.inference_mode()
def capture(
    lm: LM | torch.nn.Module,
    text_or_ids: OnePrompt | SeveralPrompts,
    new_tokens: int = 64,
    window: int = 32,
    *,
    chat: str | bool = "auto",
    queries: str | None = None,
    accumulate: bool = False,
    pseudo: Sequence[Policy | str] = ("dapq",),
    policies: Sequence[Policy | str] = (),
    response: Tensor | Sequence[int] | None = None,
    keep: Keep = "device",
    progress: bool | None = None,
) -> Trace | list[Trace]:
    """Run one prompt and its greedy response on the full cache, and record what attention saw.

    Args:
        lm: from `kvlab.load` or `kvlab.random_lm`, or a transformers model (which has no tokenizer: ids only).
        text_or_ids: a text or `Document` (with `chat="auto"` it becomes a user message where the model has a chat
            template), token ids (taken as they are), or a list of texts or documents, which gives a list of traces.
        new_tokens: length of the response, exactly (EOS is no stop); its last token is fed too, so there are as many
            decoding queries, at positions P .. P + new_tokens - 1.
        window: how many of the last prompt queries to keep.
        queries: "all" keeps every prompt query.
        accumulate: record the attention summed over all prompt queries (H2O-like policies).
        pseudo: policies whose pseudo-queries to record besides; `()` for none.
        policies: those that the trace is for: whatever they need of `window`, `queries`, `accumulate` and `pseudo` is
            recorded besides.
        response: token ids to feed as the response instead of the greedy one (teacher forcing); `new_tokens` is then
            how many of them.
        keep: where the trace lies in the end, and is replayed: "device", where the model is; "cpu", which leaves the
            GPU's memory to the model (1,000 tokens of an 8B model take about 130 MB); "pinned", the CPU's page-locked
            memory, from which `trace.to(lm.device)` is faster. With a model on the CPU all three are the same.
        progress: show a progress bar; by default after five seconds, on a terminal or in a notebook run by hand.

    Raises:
        KvlabError: an empty prompt, one that is too long for the model, or a model that cannot be hooked; nothing has
            run by then.
    """
    check_keep(keep)
    lm = lm_of(lm)
    if several(text_or_ids, response):
        options = chat, queries, accumulate, pseudo, policies, None
        bar = bars.each(text_or_ids, "capture", "doc", progress)
        # What one document takes has a bar of its own, in `_recorded`.
        return [
            _recorded(lm, planned(lm, prompt, new_tokens, window, *options), chat, keep, progress) for prompt in bar
        ]
    plan = planned(lm, text_or_ids, new_tokens, window, chat, queries, accumulate, pseudo, policies, response)
    return _recorded(lm, plan, chat, keep, progress)


def _recorded(lm: LM, plan: Recording, chat: str | bool, keep: Keep, progress: bool | None) -> Trace:
    """The trace of a plan: prefill, pseudo-queries on top of it, and the response token by token."""
    with bars.layers(hookable.layers_of(lm.model), plan.work, "prompt", progress):
        return placed(_run(lm, plan, chat), keep, lm.device)


def _run(lm: LM, plan: Recording, chat: str | bool) -> Trace:
    ids, window, new_tokens, response, extra = plan.ids, plan.window, plan.new_tokens, plan.response, plan.pseudo
    length = len(ids)

    recorder = _Recorder(lm, length, new_tokens, window, max([0, *map(len, extra.values())]), plan.accumulate)
    # The prefill must not fill the rows that are meant for the response.
    rows = recorder.queries, recorder.pre_queries
    recorder.queries, recorder.pre_queries = (r[:, :, :window] for r in rows)
    with hooks.hooked(lm.model, recorder):
        logits = _forward(lm, ids, recorder.cache, logits_of=plan.likelihoods + 1)
    nll = F.cross_entropy(logits[:-1].float(), ids[length - plan.likelihoods :].to(logits.device), reduction="none")
    logits = logits[-1]
    recorder.prefilling = False
    recorder.queries, recorder.pre_queries = rows

    pseudo = pseudo_queries_by_key(lm, recorder.cache, extra, length)
    asked = {repetition.key: repetition for repetition in plan.needs.repetitions}
    repeated = {key: repeat_scores(lm, recorder.cache, asked[key], parts) for key, parts in plan.repeats.items()}
    fed = []
    with hooks.hooked(lm.model, recorder):
        for step in range(new_tokens):
            fed.append(logits.argmax(-1).cpu() if response is None else response[step])
            logits = _forward(lm, fed[-1][None], recorder.cache)[-1]

    from kvlab import __version__

    stop, lent = length + new_tokens, hookable.projections_of(hookable.layers_of(lm.model))
    return Trace(
        queries=rows[0],
        pre_queries=rows[1],
        keys=recorder.keys[:, 0, :, :stop],
        values=recorder.values[:, 0, :, :stop],
        prompt_length=length,
        pseudo=pseudo,
        accumulated=recorder.accumulated,
        ids=torch.cat([ids, *[token[None] for token in fed]]),
        nll=nll,
        scaling=recorder.softmax.factor,
        softcap=recorder.softmax.softcap,
        sinks=recorder.all_sinks(),
        projections=torch.stack(lent) if lent and plan.needs.projection else None,
        lent=lent,
        repeated=repeated,
        rotations=tuple(recorder.rotations[place] for place in range(recorder.layers)),
        layout=hookable.layout_of(lm.model),
        meta={
            "model": lm.signature,
            "document": plan.document,
            "chat": str(chat),
            "response": "greedy" if response is None else "given",
            "kvlab": __version__,
        }
        | ({"uncompressed_bytes": held} if (held := recorder.uncompressed_bytes()) else {}),
    )


def placed(trace: Trace, keep: Keep, device: torch.device) -> Trace:
    """A trace of a model on `device` where `capture(..., keep=)` leaves it."""
    if keep == "device" or device.type == "cpu":
        return trace.to(device)
    return trace.to("cpu", pinned=keep == "pinned")
