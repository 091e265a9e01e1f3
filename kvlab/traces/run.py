"""Capture once, ask many questions: one forward pass records what attention saw, and a file keeps it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack, get_args, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.core import attention, hookable, hooks
from kvlab.core.adapter import StoreCache
from kvlab.core.hookable import layers_of
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError, whole
from kvlab.inputs.models import lm_of
from kvlab.lib import bars
from kvlab.methods import Policy, listed, policy, registry
from kvlab.traces.trace import Keep, Trace

if TYPE_CHECKING:
    import numpy as np

    from kvlab.inputs.corpus import Document
    from kvlab.inputs.models import LM

    OnePrompt: TypeAlias = str | Document | Tensor | np.ndarray | Sequence[int]
    # Lists by what they hold: a str is itself a sequence of str, and must not count as several prompts.
    SeveralPrompts: TypeAlias = (
        list[str] | list[Document] | list[str | Document] | list[Tensor] | list[list[int]] | tuple[OnePrompt, ...]
    )

# Logits are wide; the likelihoods of more tokens than this are not recorded, even where all queries are.
NLL_TOKENS = 256


# ---------------------------------------------------------------------------------------------------- capture


class _Recorder:
    """Keeps what one model's attention sees while it prefills and decodes."""

    def __init__(self, lm: LM, prompt: int, steps: int, window: int, extra: int, accumulate: bool):
        config = lm.model.config.get_text_config(decoder=True)
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        module = hookable.layers_of(lm.model)[0]
        head_dim = getattr(module, "head_dim", None) or config.hidden_size // self.heads
        make = dict(dtype=lm.dtype, device=lm.device)
        storage = (self.layers, 1, kv_heads, prompt + max(steps, extra), head_dim)
        self.keys, self.values = torch.empty(storage, **make), torch.empty(storage, **make)
        self.stores = [LayerStore.preallocated(k, v) for k, v in zip(self.keys, self.values, strict=True)]
        self.cache = StoreCache(self.stores)
        self.queries = torch.empty(self.layers, self.heads, window + steps, head_dim, **make)
        self.pre_queries = torch.empty_like(self.queries)
        self.accumulated = torch.zeros(self.layers, self.heads, prompt, device=lm.device) if accumulate else None
        self.scaling: float | None = None
        self.filled = 0
        self.accumulating = accumulate

    def __call__(self, call: hooks.Call) -> Tensor:
        n = min(call.queries.shape[2], self.queries.shape[2] - self.filled)
        new = slice(self.filled, self.filled + n)
        self.queries[call.layer, :, new] = call.queries[0, :, call.queries.shape[2] - n :]
        self.pre_queries[call.layer, :, new] = call.pre_rope[0, :, call.queries.shape[2] - n :]
        self.scaling = call.scaling
        if self.accumulating:
            self.accumulated[call.layer] = attention.accumulate(call.queries[0], call.keys[0], call.scaling)
        if call.layer == self.layers - 1:
            self.filled += n
        return call.attend()


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

    They see the whole prompt and, causally, those of their own trial; several trials share one forward pass.

    Args:
        ids, positions: int64 `[m]`, or `[trials, m]`.

    Returns:
        Post-RoPE and pre-RoPE queries, each `[layers, heads, m, head_dim]`, or `[trials, layers, heads, m, head_dim]`.
    """
    trials, m = ids.shape if ids.dim() == 2 else (1, len(ids))
    post, pre = {}, {}
    lengths = [layer.store.length for layer in cache.layers]
    trial = torch.arange(trials * m, device=lm.device) // m
    own = attention.last_visible(trials * m, trials * m, lm.device) & (trial[:, None] == trial[None])
    mask = torch.cat([own.new_ones(trials * m, lengths[0]), own], dim=1)

    def record(call: hooks.Call) -> Tensor:
        post[call.layer], pre[call.layer] = call.queries[0], call.pre_rope[0]
        return call.attend(mask)

    try:
        with hooks.hooked(lm.model, record):
            _forward(lm, ids.reshape(-1), cache, positions.reshape(-1))
    finally:
        for layer, length in zip(cache.layers, lengths, strict=True):
            layer.store.truncate(length)

    def stacked(found: dict[int, Tensor]) -> Tensor:
        rows = torch.stack([found[layer] for layer in range(len(lengths))])
        return rows if ids.dim() == 1 else rows.unflatten(2, (trials, m)).movedim(2, 0)

    return stacked(post), stacked(pre)


def prefilled(trace: Trace) -> StoreCache:
    """A cache that holds a trace's prompt, as after its prefill: pseudo-queries run on it without prefilling again."""
    pairs = zip(trace.prompt_keys, trace.prompt_values, strict=True)
    return StoreCache([LayerStore(keys[None], values[None]) for keys, values in pairs])


def prompt_ids(lm: LM, text_or_ids: Any, chat: str | bool = "auto") -> tuple[Tensor, str]:
    """Token ids `[tokens]` of a text, a `Document` or ids, and a name for them with a hash.

    Raises:
        KvlabError: nothing in it, not of one sequence, or ids that the model does not have.
    """
    from kvlab.inputs.corpus import Document

    if chat not in ("auto", True, False):
        raise KvlabError(f"chat={chat!r}: it is 'auto', True or False")
    if isinstance(text_or_ids, Path):
        raise KvlabError(f"{text_or_ids} is a path; give the text in it, as kvlab.document({str(text_or_ids)!r})")
    if isinstance(text_or_ids, str):
        if not text_or_ids.strip():
            raise KvlabError("the document is empty; it needs at least one token")
        text_or_ids = Document("text", text_or_ids)
    if isinstance(text_or_ids, Document):
        return lm.encode(text_or_ids.text, chat=chat)[0].cpu(), text_or_ids.signature
    ids = _checked(lm, text_or_ids, "prompt")
    return ids, f"ids@{hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:8]}"


def several(prompts: Any) -> bool:
    """Whether these are several prompts rather than one."""
    from kvlab.inputs.corpus import Document

    first = prompts[0] if isinstance(prompts, list | tuple) and prompts else 0
    return isinstance(first, str | Document | list | tuple) or getattr(first, "ndim", 0) > 0


def _checked(lm: LM, ids: Any, what: str) -> Tensor:
    """Token ids of one sequence as int64 `[tokens]`, or an error that says what is wrong with them."""
    try:
        ids = torch.as_tensor(ids).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise KvlabError(f"the {what} is a text, a Document or token ids, and not {type(ids).__name__}") from None
    if not ids.numel():
        raise KvlabError(f"the {what} is empty; it needs at least one token")
    if ids.is_floating_point() or ids.dim() > 2 or (ids.dim() == 2 and len(ids) > 1):
        raise KvlabError(
            f"the {what} is one sequence of whole token ids, [tokens] or [1, tokens], and not {ids.dtype} of shape "
            f"{tuple(ids.shape)}; capture several as a list"
        )
    if not ids.dim():
        raise KvlabError(f"the {what} is a text, a Document or token ids, and not the number {int(ids)}")
    ids, vocabulary = ids.reshape(-1).long(), lm.model.get_input_embeddings().num_embeddings
    beyond = ids[(ids < 0) | (ids >= vocabulary)]
    if len(beyond):
        raise KvlabError(f"the {what} has the token id {int(beyond[0])}, and {lm.name} knows 0 .. {vocabulary - 1}")
    return ids


@dataclass(frozen=True, eq=False)
class Plan:
    """What one capture runs and records: with the weights and the code, all that its numbers depend on.

    Attributes:
        ids: int64 `[prompt]`.
        document: the prompt's name, with a hash.
        new_tokens: length of the response.
        window: how many of the last prompt queries are kept.
        accumulate: whether the attention over all prompt queries is summed.
        likelihoods: of how many of the last prompt tokens.
        pseudo: token ids by the key that a policy asks for.
        response: token ids to feed instead of the greedy ones; None for these.
    """

    ids: Tensor
    document: str
    new_tokens: int
    window: int
    accumulate: bool
    likelihoods: int
    pseudo: dict[str, Tensor]
    response: Tensor | None

    @property
    def work(self) -> int:
        """Of all its forward passes, as `bars.layers` counts it."""
        return bars.work(len(self.ids), *map(len, self.pseudo.values()), *[1] * self.new_tokens)


def planned(
    lm: LM,
    text_or_ids: Any,
    new_tokens: int,
    window: int,
    chat: str | bool,
    queries: str | None,
    accumulate: bool,
    pseudo: Sequence[Policy | str],
    policies: Sequence[Policy | str],
    response: Tensor | Sequence[int] | None,
) -> Plan:
    """What `capture` does with these arguments, checked; nothing runs. Raises KvlabError as `capture` does."""
    new_tokens, window = whole("new_tokens", new_tokens), whole("window", window)
    if new_tokens < 0 or window < 0:
        raise KvlabError(f"new_tokens and window must not be negative, and are {new_tokens} and {window}")
    if queries not in (None, "all"):
        raise KvlabError(f"queries={queries!r}: it is 'all' for every prompt query, or left out for the last `window`")
    served = [_roomy(one) for one in listed(policies)]
    window = max([window, *(one.observes or 0 for one in served), *(one.reads_perplexity for one in served)])
    queries = "all" if any(one.observes is None for one in served) else queries
    accumulate = accumulate or any(one.accumulates for one in served)
    asking = [one for one in (*map(_roomy, listed(pseudo, "pseudo")), *served) if one.pseudo_key]
    ids, document = prompt_ids(lm, text_or_ids, chat)
    length = len(ids)
    if response is not None:
        response = _checked(lm, response, "response")[:new_tokens]
        new_tokens = len(response)
    extra = {
        p.pseudo_key: p.pseudo_tokens(ids, lm.model.config.get_text_config(decoder=True).vocab_size, _encoder(lm))
        for p in asking
    }
    longest = length + max([new_tokens, *map(len, extra.values())])
    if longest > lm.context_length:
        raise KvlabError(
            f"the prompt has {length} tokens and {longest - length} follow it, which is beyond the "
            f"{lm.context_length} that "
            f"{lm.name} takes; shorten the document (Document.window) or the response"
        )
    hooks.check_length(lm.model, longest)
    window = length if queries == "all" else min(window, length)
    known = min(window, length - 1, max([NLL_TOKENS, *(one.reads_perplexity for one in served)]))
    return Plan(ids, document, new_tokens, window, accumulate, known, extra, response)


class Options(TypedDict, total=False):
    """What `capture` can be told by name; it says there what each means."""

    chat: str | bool
    queries: str | None
    accumulate: bool
    pseudo: Sequence[Policy | str]
    policies: Sequence[Policy | str]
    response: Tensor | Sequence[int] | None
    keep: Keep
    progress: bool | None


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
    if several(text_or_ids):
        if response is not None:
            raise KvlabError("one response cannot follow several documents; capture them one by one")
        options = dict(chat=chat, queries=queries, accumulate=accumulate, pseudo=pseudo, policies=policies, keep=keep)
        bar = bars.each(text_or_ids, "capture", "doc", progress)
        # What one document takes has a bar of its own, below.
        return [capture(lm, one, new_tokens, window, progress=progress, **options) for one in bar]

    plan = planned(lm, text_or_ids, new_tokens, window, chat, queries, accumulate, pseudo, policies, response)
    with bars.layers(layers_of(lm.model), plan.work, "prompt", progress):
        return placed(_captured(lm, plan, chat), keep, lm.device)


def _captured(lm: LM, plan: Plan, chat: str | bool) -> Trace:
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
    recorder.accumulating = False
    recorder.queries, recorder.pre_queries = rows

    found = {}
    for key, tokens in extra.items():
        found[key], _ = pseudo_queries(lm, recorder.cache, tokens, torch.arange(length, length + len(tokens)))
    fed = []
    with hooks.hooked(lm.model, recorder):
        for step in range(new_tokens):
            fed.append(logits.argmax(-1).cpu() if response is None else response[step])
            logits = _forward(lm, fed[-1][None], recorder.cache)[-1]

    from kvlab import __version__

    stop = length + new_tokens
    return Trace(
        queries=rows[0],
        pre_queries=rows[1],
        keys=recorder.keys[:, 0, :, :stop],
        values=recorder.values[:, 0, :, :stop],
        prompt_length=length,
        pseudo=found,
        accumulated=recorder.accumulated,
        ids=torch.cat([ids, *[token[None] for token in fed]]),
        nll=nll,
        scaling=recorder.scaling,
        meta={
            "model": lm.signature,
            "document": plan.document,
            "chat": str(chat),
            "response": "greedy" if response is None else "given",
            "kvlab": __version__,
        },
    )


def placed(trace: Trace, keep: Keep, device: torch.device) -> Trace:
    """A trace of a model on `device` where `capture(..., keep=)` leaves it."""
    if keep == "device" or device.type == "cpu":
        return trace.to(device)
    return trace.to("cpu", pinned=keep == "pinned")


def check_keep(keep: str) -> None:
    if keep not in get_args(Keep):
        raise KvlabError(f"keep={keep!r} is none of {', '.join(map(repr, get_args(Keep)))}")


def _roomy(one: Policy | str) -> Policy:
    """A policy by name, with room for the whole prompt."""
    if isinstance(one, Policy):
        return one
    return policy(one, budget=1.0) if one not in registry() or "budget" in registry()[one].model_fields else policy(one)


def _encoder(lm: LM):
    def encode(text: str) -> Tensor:
        lm.require_tokenizer("pseudo-tokens cannot be made from a sentence")
        return torch.tensor(lm.tokenizer(text, add_special_tokens=False).input_ids)

    return encode
