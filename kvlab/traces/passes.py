"""Forward passes of a capture: the prompt, in chunks where it is long, and what runs on top and leaves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.core import attention, hookable, hooks
from kvlab.core.adapter import StoreCache
from kvlab.core.rotation import changes_within
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.methods._base.needs import Draft
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.repeating import Part, Repetition

if TYPE_CHECKING:
    from torch import nn

    from kvlab.inputs.models import LM
    from kvlab.traces.trace import Trace

# Prompts of more tokens than `WHOLE` are fed `CHUNK` at a time: enough of them for products at full speed.
WHOLE, CHUNK = 4096, 1024

Feed = Callable[[Tensor, hooks.Handler], None]
"""Runs tokens `[rows, m]` on top of prompts and leaves nothing of them. The handler's calls hold the keys and values of
the prompt, and behind them those of the pass.
"""

FeedAndChoose = Callable[[Tensor, hooks.Handler], Tensor]
"""As `Feed`, and gives the most likely next token of each row, `[rows]`."""


def forward(lm: LM, ids: Tensor, cache: StoreCache, positions: Tensor | None = None, logits_of: int = 1) -> Tensor:
    """Logits of the last tokens, `[logits_of, vocabulary]`."""
    extra = {} if positions is None else {"position_ids": positions[None].to(lm.device)}
    out = lm.model(
        input_ids=ids[None].to(lm.device), past_key_values=cache, use_cache=True, logits_to_keep=logits_of, **extra
    )
    return out.logits[0, -logits_of:]


def chunk_for(model: nn.Module, length: int) -> int:
    """How many tokens of a prompt are fed at once where nobody says: all of them up to `WHOLE`."""
    return length if length <= WHOLE or changes_within(model, length) else CHUNK


def prefill(lm: LM, ids: Tensor, cache: StoreCache, chunk: int, likelihoods: int = 0) -> tuple[Tensor, Tensor]:
    """Feed a prompt `[length]` in chunks; what a pass needs in addition to the cache is bounded by the chunk.

    Returns:
        Logits after its last token, `[vocabulary]`, and the negative log-likelihoods of its last tokens,
        `[likelihoods]`, in nats.
    """
    length, nll, rows = len(ids), [], torch.empty(0, dtype=torch.float32)
    first = length - 1 - likelihoods  # the first token whose logits are judged by the next
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        rows = forward(lm, ids[start:stop], cache, logits_of=max(stop - max(start, first), 1))
        judges = ids[max(start, first) + 1 : stop + 1].to(rows.device)
        nll.append(F.cross_entropy(rows[: len(judges)].float(), judges, reduction="none"))
    return rows[-1], torch.cat(nll)


@torch.inference_mode()
def pseudo_queries(lm: LM, cache: StoreCache, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of tokens that run on top of a prefilled cache at any assigned positions, and leave nothing in it.

    They see the whole prompt and, causally, those of their own trial. Several trials share one forward pass, with two
    exceptions. Some models have layers of which only one sequence can go on (windows, convolutions, linear states).
    Others have a sparse indexer that would choose among all trials.

    Args:
        ids, positions: int64 `[m]`, or `[trials, m]`.

    Returns:
        Post-RoPE and pre-RoPE queries, each `[layers, heads, m, head_dim]`, or `[trials, layers, heads, m, head_dim]`.
    """
    if ids.dim() == 2 and (cache.others or hookable.is_indexed(lm.model)):
        by_trial = [pseudo_queries(lm, cache, *trial) for trial in zip(ids, positions.expand_as(ids), strict=True)]
        return torch.stack([post for post, _ in by_trial]), torch.stack([pre for _, pre in by_trial])
    trials, m = ids.shape if ids.dim() == 2 else (1, len(ids))
    post, pre = {}, {}
    length = cache.stores[0].length
    trial = torch.arange(trials * m, device=lm.device) // m
    own = attention.last_visible(trials * m, trials * m, lm.device) & (trial[:, None] == trial[None])
    mask = torch.cat([own.new_ones(trials * m, length), own], dim=1)

    def record(call: hooks.Call) -> Tensor:
        assert call.pre_rope is not None, "queries before RoPE are asked for"
        post[call.index], pre[call.index] = call.queries[0], call.pre_rope[0]
        return call.attend(mask.to(call.queries.device))

    with hooks.hooked(lm.model, record):
        forward(lm, ids.reshape(-1), cache.transient(), positions.reshape(-1))

    def stacked(by_index: dict[int, Tensor]) -> Tensor:
        rows = torch.stack([by_index[index].to(lm.device) for index in range(len(cache.stores))])
        return rows if ids.dim() == 1 else rows.unflatten(2, (trials, m)).movedim(2, 0)

    return stacked(post), stacked(pre)


def pseudo_queries_by_key(lm: LM, cache: StoreCache, tokens: Mapping[str, Tensor], start: int) -> dict[str, Tensor]:
    """Post-RoPE queries of several runs of pseudo-tokens `[m]`, each at the positions start .. start + m - 1."""
    positions = {key: torch.arange(start, start + len(ids)) for key, ids in tokens.items()}
    return {key: pseudo_queries(lm, cache, ids, positions[key])[0] for key, ids in tokens.items()}


@torch.inference_mode()
def draft_queries(lm: LM, cache: StoreCache, prompt: Prompt, first: Tensor, draft: Draft) -> Tensor:
    """Post-RoPE queries `[layers, heads, tokens, head_dim]` of an answer that is drafted on top of a prefilled cache.

    It leaves nothing there.

    Args:
        prompt: what the cache holds, a row for each layer.
        first: the id of the answer's first token, `[]`.
    """

    def feed(ids: Tensor, handler: hooks.Handler) -> Tensor:
        with hooks.hooked(lm.model, handler, pre_rope=False):
            return forward(lm, ids[0], cache.transient()).argmax(-1)

    kept = zip(draft.sees(prompt), prompt.keys, prompt.values, strict=True)
    seen = [entries_at(*(x[None] for x in layer)) for layer in kept]
    return torch.cat([queries.to(first.device) for queries in drafted(feed, first.reshape(1), seen, draft.tokens)])


def entries_at(positions: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[rows, kv_heads, k, head_dim]` of the slots `positions` `[rows, kv_heads, k]`."""
    where = positions[..., None].expand(*positions.shape, keys.shape[-1])
    return keys.gather(2, where), values.gather(2, where)


def drafted(feed: FeedAndChoose, first: Tensor, seen: Sequence[tuple[Tensor, Tensor]], tokens: int) -> list[Tensor]:
    """Queries `[rows, heads, tokens, head_dim]` of a greedy answer, layer by layer: in a capture and live.

    Args:
        feed: runs the answer so far on top of the prompts.
        first: ids of the answers' first tokens, `[rows]`.
        seen: keys and values that the answer sees of the prompts, `[rows, kv_heads, k, head_dim]`, of each layer.
    """
    ids, queries = first[:, None], dict[int, Tensor]()

    def attend(call: hooks.Call) -> Tensor:
        queries[call.index], own = call.queries, call.queries.shape[2]
        entries = zip(seen[call.index], (call.keys, call.values), strict=True)
        keys, values = (torch.cat([kept.to(fed.device), fed[:, :, fed.shape[2] - own :]], 2) for kept, fed in entries)
        return replace(call, keys=keys, values=values, padding=None, chosen=None).attend()

    while True:
        following = feed(ids, attend)
        if ids.shape[1] == tokens:
            return [queries[index] for index in range(len(seen))]
        ids = torch.cat([ids, following.to(ids)[:, None]], 1)


@torch.inference_mode()
def repeat_scores(lm: LM, cache: StoreCache, repetition: Repetition, parts: Sequence[Part]) -> Tensor:
    """Scores of a prompt's tokens by what the model attends to when it repeats them, `[layers, kv_heads, prompt]`.

    Args:
        cache: that holds the prompt; what is fed leaves nothing in it.
    """

    def feed(ids: Tensor, handler: hooks.Handler) -> None:
        with hooks.hooked(lm.model, handler, pre_rope=False, hidden=repetition.plus):
            forward(lm, ids[0], cache.transient())

    scores = score_parts(feed, hookable.layers_of(lm.model), repetition, [parts])
    return torch.cat([each.to(lm.device) for each in scores])


def score_parts(
    feed: Feed, modules: Sequence[nn.Module], repetition: Repetition, parts: Sequence[Sequence[Part]]
) -> list[Tensor]:
    """Scores `[rows, kv_heads, prompt]` of the passes that repeat prompts, layer by layer: in a capture and live.

    Args:
        modules: the attention of the compressed layers.
        parts: of each row. Prompts of one length have parts at the same positions, with as many tokens.
    """
    projections = hookable.required_projections(modules) if repetition.plus else [None] * len(modules)
    by_part: list[dict[int, Tensor]] = []

    def score(call: hooks.Call) -> Tensor:
        states, weight = (call.queries, call.keys, call.values), projections[call.index]
        by_part[-1][call.index] = repetition.scores(part, *states, call.softmax, call.hidden, weight)
        return call.attend()

    for part, *others in zip(*parts, strict=True):
        by_part.append({})
        feed(torch.stack([each.ids for each in (part, *others)]), score)
    return [torch.cat([scores[index] for scores in by_part], -1) for index in range(len(modules))]


@torch.inference_mode()
def prefilled(trace: Trace, lm: LM | None = None) -> StoreCache:
    """A cache that holds a trace's prompt, as after its prefill: pseudo-queries run on it without prefilling again.

    Args:
        lm: the model, which has to prefill once more where a trace does not hold all of its layers.

    Raises:
        KvlabError: the trace holds a part of the layers, or lacks an indexer's keys, and no model or no tokens are
            given.
    """
    if trace.layout.mixed or trace.chosen is not None:
        if lm is None or trace.ids is None:
            what = "the compressed layers of its model" if trace.layout.mixed else "attention's keys, not the indexer's"
            raise KvlabError(
                f"this trace holds only {what}; to compute the missing ones, pass the model and a trace with token ids"
            )
        empty = trace.keys[:, None, :, :0]
        cache = StoreCache([LayerStore(keys, keys) for keys in empty], lm.model)
        with hooks.hooked(lm.model, hooks.Call.attend, pre_rope=False):
            prefill(lm, trace.ids[: trace.prompt_length], cache, chunk_for(lm.model, trace.prompt_length))
        return cache
    pairs = zip(trace.prompt_keys, trace.prompt_values, strict=True)
    return StoreCache([LayerStore(keys[None], values[None]) for keys, values in pairs], latent=trace.latent)
