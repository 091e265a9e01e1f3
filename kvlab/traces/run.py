"""Capture once, ask many questions: one forward pass records what attention saw, and a file keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, overload

import torch
from torch import Tensor

from kvlab.core import hookable, hooks
from kvlab.errors import KvlabError
from kvlab.inputs.models import lm_of
from kvlab.lib import progress_bars
from kvlab.lib.devices import CPU, outside_autocast
from kvlab.lib.files import replacing
from kvlab.methods import Policy
from kvlab.traces.file_draft import Draft
from kvlab.traces.passes import draft_queries, forward, prefill, pseudo_queries_by_key, repeat_scores
from kvlab.traces.recorder import Recorder, shapes
from kvlab.traces.recording import Options, Recording, check_keep, planned, several
from kvlab.traces.trace import Keep, Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.traces.recording import OnePrompt, SeveralPrompts


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
    into: str | Path | None = None,
    chunk: int | None = None,
    progress: bool | None = None,
) -> Trace | list[Trace]:
    """Run one prompt and its greedy response on the full cache, and record what attention saw.

    Args:
        lm: from `kvlab.load` or `kvlab.random_lm`, or a transformers model (which has no tokenizer: ids only).
        text_or_ids: a text, a `Document` or token ids; a list of texts or documents gives a list of traces. With
            `chat="auto"` a text becomes a user message where the model has a chat template.
        new_tokens: exact length of the response (EOS does not stop it). Its last token is fed too: there are as many
            decoding queries, at positions P .. P + new_tokens - 1.
        window: how many of the last prompt queries to keep.
        queries: "all" keeps every prompt query.
        accumulate: record the attention summed over all prompt queries (H2O-like policies).
        pseudo: policies whose pseudo-queries to record as well; `()` for none.
        policies: those that the trace is for. Whatever they need of `window`, `queries`, `accumulate` and `pseudo` is
            recorded, too.
        response: token ids to feed as the response instead of the greedy one (teacher forcing); `new_tokens` is then
            how many of them.
        keep: where the trace is stored and replayed. "device": where the model is; of a model that is split over
            several devices, on the first. "cpu" leaves the GPU's memory to the
            model (1,000 tokens of an 8B model take about 130 MB). "pinned" is the CPU's page-locked memory, from which
            `trace.to(lm.device)` is faster. With a model on the CPU all three are the same.
        into: a file for the trace, as `Trace.save` writes it. It is filled while the model runs (on a GPU: at the end)
            and gets its name once it is complete. The trace is then mapped from it, as by `Trace.load`, and takes
            memory only where it is read.
        chunk: how many tokens of the prompt are fed at once. It bounds the memory of a pass; the numbers are the same
            but for rounding. By default all tokens of a prompt of up to 4,096, and 1,024 of a longer one. Models whose
            rotations depend on the length of the input (dynamic NTK, LongRoPE) take it whole.
        progress: show a progress bar; by default after five seconds, on a terminal or in a notebook run by hand.

    Raises:
        KvlabError: an empty prompt, one too long for the model, a model that cannot be hooked, a file that cannot be
            written. Nothing has run by then.
    """
    check_keep(keep)
    lm, path = lm_of(lm), None if into is None else Path(into)
    if several(text_or_ids, response):
        if path is not None:
            raise KvlabError(f"{path} takes one trace, and not several; capture them one by one, each into its own")
        options = chat, queries, accumulate, pseudo, policies, None, chunk
        bar = progress_bars.each(text_or_ids, "capture", "doc", progress)
        # Each document also has a bar of its own, in `_recorded`.
        return [
            _recorded(lm, planned(lm, prompt, new_tokens, window, *options), chat, keep, None, progress)
            for prompt in bar
        ]
    options = chat, queries, accumulate, pseudo, policies, response, chunk
    plan = planned(lm, text_or_ids, new_tokens, window, *options)
    return _recorded(lm, plan, chat, keep, path, progress)


def _recorded(lm: LM, plan: Recording, chat: str | bool, keep: Keep, into: Path | None, progress: bool | None) -> Trace:
    """Record the trace of a plan, and move it where `keep` says."""
    bar = progress_bars.layers(hookable.layers_of(lm.model), plan.work, "prompt", progress)
    # A trace is of the model in its own type, whatever its caller casts.
    with bar, outside_autocast(lm.device):
        made = _in_memory(lm, plan, chat, keep) if into is None else _in_file(lm, plan, chat, keep, into)
        return move(made, keep, lm.device)


def _in_memory(lm: LM, plan: Recording, chat: str | bool, keep: Keep) -> Trace:
    wanted, places = shapes(lm, plan).items(), hookable.devices_of(lm.model)
    if {*places} == {lm.device}:
        whole = {name: torch.empty(shape, dtype=dtype, device=lm.device) for name, (shape, dtype) in wanted}
        return _run(lm, plan, chat, whole, lm.device)
    # Each layer's part lies with its layer until the model has run.
    by_layer = {
        name: [torch.empty(shape[1:], dtype=dtype, device=place) for place in places] for name, (shape, dtype) in wanted
    }
    return _run(lm, plan, chat, by_layer, lm.device if keep == "device" else CPU)


def _in_file(lm: LM, plan: Recording, chat: str | bool, keep: Keep, path: Path) -> Trace:
    """The trace mapped from a file, which was written while it came to be: by a model on the CPU layer by layer."""
    with replacing(path) as temporary:
        if {place.type for place in (lm.device, *hookable.devices_of(lm.model))} == {"cpu"}:
            wanted = shapes(lm, plan)
            layers, head_dim = wanted["keys"][0][0], wanted["keys"][0][-1]
            keys = [plan.document, *plan.pseudo, *(each.key for each in (*plan.drafts, *plan.repeats))]
            room = 8192 + layers * (32 * head_dim + 256) + 128 * lm.n_layers + 12 * sum(map(len, keys))
            draft = Draft(temporary, wanted, room)
            made = _run(lm, plan, chat, draft.tensors, CPU)
            draft.finish(made)
        else:
            made = _in_memory(lm, plan, chat, keep)
            made.save(temporary)
    return replace(Trace.load(path), model_projections=made.model_projections)


def _run(
    lm: LM, plan: Recording, chat: str | bool, tensors: Mapping[str, Tensor | list[Tensor]], place: torch.device
) -> Trace:
    """Prefill, pseudo-queries on top of it, and the response token by token.

    Args:
        tensors: what is recorded into.
        place: where the trace's tensors are joined, if the model's layers lie on several devices.
    """
    recorder = Recorder(lm, plan, tensors, place)
    with hooks.hooked(lm.model, recorder, hidden=plan.hidden):
        logits, nll = prefill(lm, plan.ids, recorder.cache, plan.chunk, plan.likelihoods)
    recorder.prefilling = False
    pseudo = pseudo_queries_by_key(lm, recorder.cache, plan.pseudo, len(plan.ids))
    first = logits.argmax(-1)
    if plan.drafts:
        seen = recorder.prompt()
        pseudo |= {each.key: draft_queries(lm, recorder.cache, seen, first, each) for each in plan.drafts}
    repeated = {each.key: repeat_scores(lm, recorder.cache, each, parts) for each, parts in plan.repeats.items()}
    fed = []
    with hooks.hooked(lm.model, recorder):
        for step in range(plan.new_tokens):
            fed.append(logits.argmax(-1).cpu() if plan.response is None else plan.response[step])
            logits = forward(lm, fed[-1][None], recorder.cache)[-1]

    from kvlab import __version__

    modules = hookable.layers_of(lm.model)
    model_projections = hookable.projections_of(modules)
    found = Trace(
        queries=recorder.whole("queries"),
        pre_queries=recorder.whole("pre_queries"),
        keys=recorder.whole("keys"),
        values=recorder.whole("values"),
        prompt_length=len(plan.ids),
        pseudo=pseudo,
        accumulated=recorder.whole("accumulated") if plan.accumulate else None,
        hidden=recorder.whole("hidden") if plan.hidden else None,
        ids=torch.cat([plan.ids, *[token[None] for token in fed]]),
        nll=nll,
        scaling=recorder.softmax.factor,
        softcap=recorder.softmax.softcap,
        sinks=recorder.sinks,
        projections=torch.stack([x.to(place) for x in hookable.required_projections(modules)])
        if plan.projection
        else None,
        model_projections=model_projections,
        repeated=repeated,
        rotations=tuple(recorder.rotations[index] for index in range(recorder.layers)),
        layout=hookable.layout_of(lm.model),
        latent=hookable.latent_of(modules[0]),
        chosen=recorder.chosen,
        meta={
            "model": lm.signature,
            "document": plan.document,
            "chat": str(chat),
            "response": "greedy" if plan.response is None else "given",
            "kvlab": __version__,
        }
        | ({"uncompressed_bytes": uncompressed} if (uncompressed := recorder.uncompressed_bytes) else {}),
    )
    return found.to(place)


def move(trace: Trace, keep: Keep, device: torch.device) -> Trace:
    """A trace of a model on `device` where `capture(..., keep=)` leaves it."""
    if keep == "device" or device.type == "cpu":
        return trace.to(device)
    return trace.to("cpu", pinned=keep == "pinned")
