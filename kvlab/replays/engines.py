"""One policy replayed on one trace, by one of two engines: step by step, or all steps at once where it rests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.slots import on_cpu
from kvlab.core.storage import AS_IS, Storage
from kvlab.core.store import EMPTY, LayerStore
from kvlab.errors import KvlabError, whole
from kvlab.instruments import measures
from kvlab.instruments.probes import Probe, Seen
from kvlab.instruments.records import Records
from kvlab.lib.devices import outside_autocast
from kvlab.methods import Policy, Prompt
from kvlab.methods._base import contract
from kvlab.methods._base.clock import append_and_select, attend, positions_read, weigh
from kvlab.replays.reference import Reference, reference
from kvlab.replays.replay import Replay
from kvlab.replays.step_reads import Reading, losses, readings, similar_runs

if TYPE_CHECKING:
    from kvlab.traces.trace import Trace


@dataclass
class Run:
    """The replayed policy, and the results of its decoding steps so far, on the trace's device: see `Replay`."""

    trace: Trace
    policy: Policy
    probes: list[Probe]
    storage: Storage
    k: int
    records: Records
    reference: Reference
    mass_lost: Tensor
    output_error: Tensor
    step_recall: Tensor
    stored_bytes: Tensor
    read_bytes: Tensor
    read_sets: list[Tensor] = field(default_factory=list)
    stored_sets: list[Tensor | None] = field(default_factory=list)


def replay_one(
    trace: Trace,
    policy: Policy,
    probes: Sequence[Probe] = (),
    storage: Storage = AS_IS,
    k: int | None = None,
) -> Replay:
    """Replay one policy on one trace, computed where the trace lies.

    Args: as `kvlab.replay`.
    """
    if trace.latent:
        storage.check_latent()
    storage.check(trace.keys.shape[-1], trace.device, trace.meta.get("model", ""))
    budget = policy.entries(trace.prompt_length)
    k = budget if k is None else whole("k, the size of the top that recalls ask for,", k)
    if k < 1:
        raise KvlabError(f"recalls ask for the top k of at least one key, not for the top {k}")
    records = Records(policy.name, policy.asked, rows="layer", storage=str(storage))
    records.note_entries([0], budget)
    by_head, by_group = (
        torch.zeros(trace.n_layers, sets, trace.steps, dtype=torch.float32, device=trace.device)
        for sets in (trace.heads, trace.kv_heads)
    )
    run = Run(
        trace=trace,
        policy=policy,
        probes=list(probes),
        storage=storage,
        k=k,
        records=records,
        reference=reference(trace),
        mass_lost=by_head,
        output_error=by_head.clone(),
        step_recall=by_group,
        stored_bytes=torch.zeros(trace.steps, dtype=torch.float32),
        read_bytes=torch.zeros(trace.steps, dtype=torch.float32),
    )
    # A replay computes in the trace's own type, whatever its caller casts.
    with outside_autocast(trace.device):
        return _replayed(run, budget)


def _replayed(run: Run, budget: int) -> Replay:
    with torch.inference_mode():
        store, prompt = _compressed(run)
        entries = _entries(run, store, budget)
        kept = store.positions.clone()
        store.set_storage(run.storage)
        recall, window_recall = _recalls(run, kept, prompt)
        needs = run.policy.needs
        if needs.acts_while_decoding or needs.rewrites or store.merged or run.probes:
            step_by_step(run, store)
        else:
            all_steps(run, store, kept)
    sinks = run.reference.sinks
    # At the end and not step by step: every copy waits for the device.
    return Replay(
        trace=run.trace,
        policy=run.policy,
        probes=run.probes,
        storage=run.storage,
        budget=budget,
        entries=entries,
        k=run.k,
        raised=run.policy.raised(run.trace.prompt_length),
        records=run.records,
        mass_lost=run.mass_lost.cpu(),
        output_error=run.output_error.cpu(),
        step_recall=run.step_recall.cpu(),
        recall=recall.cpu(),
        window_recall=window_recall.cpu(),
        sink_share=None if sinks is None else sinks.cpu(),
        stored_bytes=run.stored_bytes,
        read_bytes=run.read_bytes,
        kept_sets=kept.cpu(),
        read_sets=[on_cpu(sets) for sets in run.read_sets],
        stored_sets=[None if sets is None else sets.cpu() for sets in run.stored_sets],
    )


def _compressed(run: Run) -> tuple[LayerStore, Prompt]:
    """The trace's prompt as the policy leaves it, and as the policy saw it, with what it planned for all layers."""
    trace, policy = run.trace, run.policy
    store = LayerStore.recorded(trace.keys, trace.values, trace.prompt_length, trace.latent)
    store.layers = trace.prompt.layers
    prompt = trace.prompt.seen_by(policy)
    if policy.needs.surveys and not policy.fits(prompt.length):
        prompt = prompt.with_plan(policy.plan(policy.survey(prompt)[:, None], prompt)[:, 0])
    policy.compress(store, prompt)
    contract.check_stored_budget(policy, [store])
    return store, prompt


def _entries(run: Run, store: LayerStore, budget: int) -> int | float:
    """`Replay.entries`, of a store that the policy has compressed."""
    needs, bounded = run.policy.needs, run.policy.asked is not None
    if bounded and run.policy.fits(run.trace.prompt_length):
        return run.trace.prompt_length
    if not needs.chooses or (bounded and needs.steps):
        return budget
    mean = float(store.counts.float().mean())
    return int(mean) if mean.is_integer() else mean


def _recalls(run: Run, kept: Tensor, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """`recall` and `window_recall`, `[layers, kv_heads]`; NaN without a response, which leaves no gold set."""
    ranks, k = run.reference.gold_ranks, min(run.k, run.trace.prompt_length)
    best = ranking.top_positions(run.policy.scores(prompt), k)
    recall, window_recall = (run.reference.share_found(ranks, sets, k) for sets in (kept, best))
    if run.trace.steps == 0:
        return torch.full_like(recall, torch.nan), torch.full_like(window_recall, torch.nan)
    return recall, window_recall


# ------------------------------------------------------------------------------ step by step


def step_by_step(run: Run, store: LayerStore) -> None:
    """All decoding steps by the clock: append, attend, update, evict or merge."""
    trace, policy, recorded = run.trace, run.policy, []
    for step in range(1, trace.steps + 1):
        new = slice(trace.prompt_length + step - 1, trace.prompt_length + step)
        queries = trace.response_queries[:, :, step - 1 : step]
        slots = append_and_select(policy, store, queries, trace.keys[:, :, new], trace.values[:, :, new], trace.softmax)
        run.read_sets.append(positions_read(store, slots))
        run.read_bytes[step - 1] = store.bytes_of(slots) + policy.overhead_bytes(store)
        # Where the model recorded all that a step attends to, its losses are measured at the end.
        if policy.needs.attends_plainly and run.storage.exact and not store.merged and not run.probes:
            recorded.append(step - 1)
            weighs = policy.weighs and policy.needs.steps
            policy.step(store, weigh(store, queries, slots, trace.softmax) if weighs else None)
        else:
            _attend(run, store, queries, slots, step)
        everything = store.length == store.seen and not store.ragged
        run.stored_sets.append(None if everything else store.positions.clone())
        run.stored_bytes[step - 1] = store.kv_bytes + store.aux_bytes - policy.discount_bytes(store)
    for steps in similar_runs(recorded, [read.shape[-1] for read in run.read_sets]):
        _measure(run, readings(steps, run.read_sets[steps], trace.length))


def _attend(run: Run, store: LayerStore, queries: Tensor, slots: Tensor | None, step: int) -> None:
    """The rest of one decoding step, from attending on, measured on what is stored."""
    trace, side, now, read = run.trace, run.reference, step - 1, run.read_sets[-1]
    attended = attend(run.policy, store, queries, slots, trace.softmax, weigh=True)
    all_weights, full = side.at(step), side.outputs[:, :, now]
    sinks = None if side.sinks is None else side.sinks[:, :, now]
    run.mass_lost[:, :, now] = measures.mass_lost(all_weights, read, sinks)
    run.output_error[:, :, now] = measures.output_error(full, attended.output[:, :, 0])
    ranks, k = side.step_ranks[:, :, now], min(run.k, trace.prompt_length + step)
    run.step_recall[:, :, now] = side.share_found(ranks, read, k)

    seen = Seen(run.policy, store, queries, attended, trace.softmax, full=(all_weights, full))
    where = dict(step=step, layer=None, rows=list(trace.layers))
    for instrument in run.probes:
        instrument.look(seen, run.records, where)
    run.policy.step(store, attended.weights)
    for instrument in run.probes:
        instrument.look_after(seen, run.records, where)


# ------------------------------------------------------------------------------ all steps at once


def all_steps(run: Run, store: LayerStore, kept: Tensor) -> None:
    """All steps at once, for a policy that does nothing after the prefill: every generated token stays."""
    trace, prompt = run.trace, run.trace.prompt_length
    if trace.steps == 0:
        return
    if kept.shape[2] == prompt and not store.ragged:
        run.step_recall.fill_(1)
    else:
        response = torch.arange(prompt, trace.length, device=trace.device).expand(kept.shape[1], -1)
        # Other layers may keep more: no need to look at a layer's padding.
        fewer = (sets[:, : int((sets != EMPTY).sum(-1).max())] for sets in kept)
        _measure(run, (Reading(slice(0, trace.steps), torch.cat([sets, response], -1)) for sets in fewer))
    if run.storage.exact:
        entry = store.entry_bytes
        generated = trace.n_layers * kept.shape[1] * torch.arange(1, trace.steps + 1)
        entries = int((kept != EMPTY).sum()) + generated
        run.stored_bytes = (entries * entry + store.aux_bytes).float()
    else:
        _follow_rounded(run, store)
    run.read_bytes = run.stored_bytes.clone()


def _follow_rounded(run: Run, store: LayerStore) -> None:
    """Outputs and stored bytes of a storage that rounds, of as many steps at once as leave all entries as they are."""
    trace, step = run.trace, 0
    while step < trace.steps:
        _append(trace, store, step, 1)
        store.quantise_pending()
        run.stored_bytes[step] = before = store.kv_bytes + store.aux_bytes
        more = min(store.steps_until_quantised, trace.steps - step - 1)
        if more:
            _append(trace, store, step + 1, more)
            grown = store.kv_bytes + store.aux_bytes - before
            run.stored_bytes[step + 1 : step + 1 + more] = (
                before + grown * torch.arange(1, more + 1, dtype=torch.float32) / more
            )
        steps = slice(step, step + 1 + more)
        now = trace.prompt_length + torch.arange(steps.start, steps.stop, device=trace.device)
        for layer in range(trace.n_layers):
            keys, values, positions = store.row(layer)
            visible = attention.to_query_heads(positions, trace.heads)[:, None]
            visible = (visible != EMPTY) & (visible <= now[:, None])
            queries, softmax = trace.response_queries[layer, :, steps], trace.softmax.row(layer)
            weights = attention.weights(queries, keys, softmax, visible)
            full = run.reference.outputs[layer, :, steps]
            run.output_error[layer, :, steps] = measures.output_error(full, attention.output(weights, values))
        step = steps.stop


def _append(trace: Trace, store: LayerStore, step: int, n: int) -> None:
    """The entries of `n` response tokens from `step` on, counted from 0."""
    new = slice(trace.prompt_length + step, trace.prompt_length + step + n)
    store.append(trace.keys[:, :, new], trace.values[:, :, new])


def _measure(run: Run, found: Iterable[Reading]) -> None:
    """Measure what each layer reads, one reading for each."""
    trace = run.trace
    k = torch.arange(trace.prompt_length + 1, trace.length + 1, device=trace.device).clamp_max(run.k)
    for layer, reading in enumerate(found):
        lost = losses(run.reference, layer, reading, k)
        run.mass_lost[layer][:, reading.steps] = lost.mass
        run.output_error[layer][:, reading.steps] = lost.error
        run.step_recall[layer][:, reading.steps] = lost.recall
