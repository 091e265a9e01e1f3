"""One policy over one trace: what it would keep, read and lose at every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.autocast import outside_autocast
from kvlab.core.storage import AS_IS, Storage
from kvlab.core.store import EMPTY, LayerStore
from kvlab.errors import KvlabError, whole
from kvlab.instruments import measures
from kvlab.instruments.probes import Probe, Seen
from kvlab.instruments.records import Records
from kvlab.methods import Policy, Prompt
from kvlab.methods._base import contract
from kvlab.methods._base.clock import attend, positions_read, take, weigh
from kvlab.replays.reference import reference
from kvlab.replays.step_reads import Reading, alike, losses, readings
from kvlab.replays.tables import AXES, SINKS, tidy

if TYPE_CHECKING:
    import pandas as pd

    from kvlab.traces.trace import Trace


class Replay:
    """One policy over one trace, computed where the trace lies; what comes out lies on the CPU.

    Attributes:
        trace, policy, storage: what was replayed. Layers in tensors are those that the trace holds, one behind the
            other; in tables, and wherever a layer is asked for, they have their numbers in the model.
        budget: entries for each layer and KV head that the policy's budget came to.
        entries: what a policy that evicts once, after the prefill, has kept, on average over layers and KV heads; of
            others the budget.
        k: the size of the top that the recalls ask for.
        raised: whether a fractional budget had to be raised to what the method needs.
        mass_lost, output_error: `[layers, heads, steps]`.
        step_recall: `[layers, kv_heads, steps]`.
        recall, window_recall: `[layers, kv_heads]`.
        sink_share: `[layers, heads, steps]`, what learnt sinks take of the full cache's attention, which mass lost does
            not count; None where the model has none.
        stored_bytes, read_bytes: `[steps]`, summed over layers.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        probes: Sequence[Probe] = (),
        storage: Storage = AS_IS,
        k: int | None = None,
    ):
        self.trace, self.policy, self.probes, self.storage = trace, policy, list(probes), storage
        storage.check(trace.keys.shape[-1], trace.device)
        self.budget = policy.entries(trace.prompt_length)
        self.k = self.budget if k is None else whole("k, the size of the top that recalls ask for,", k)
        if self.k < 1:
            raise KvlabError(f"recalls ask for the top k of at least one key, not for the top {k}")
        self.records = Records(policy.name, policy.asked, rows="layer", storage=str(storage))
        self.records.note_entries([0], self.budget)
        self.entries: int | float = self.budget
        self.raised = policy.raised(trace.prompt_length)
        self._reference = reference(trace)
        self._read: list[Tensor] = []
        self._stored: list[Tensor | None] = []  # None where everything is stored, which on long prompts is much
        shape = trace.n_layers, trace.heads, trace.steps
        self.mass_lost, self.output_error = (
            torch.zeros(shape, dtype=torch.float32, device=trace.device) for _ in range(2)
        )
        by_step = trace.n_layers, trace.kv_heads, trace.steps
        self.step_recall = torch.zeros(by_step, dtype=torch.float32, device=trace.device)
        self.stored_bytes, self.read_bytes = (torch.zeros(trace.steps, dtype=torch.float32) for _ in range(2))
        # A replay computes in the trace's own type, whatever its caller casts.
        with outside_autocast(trace.device):
            self._run()
        self.sink_share = None if self._reference.sinks is None else self._reference.sinks.cpu()
        # At the end and not step by step: every copy waits for the device.
        for name in ("mass_lost", "output_error", "step_recall", "recall", "window_recall", "_kept"):
            setattr(self, name, getattr(self, name).cpu())
        self._read = [sets.cpu() for sets in self._read]
        self._stored = [None if sets is None else sets.cpu() for sets in self._stored]

    # ------------------------------------------------------------------ the run

    @torch.inference_mode()
    def _run(self) -> None:
        trace = self.trace
        store = LayerStore.recorded(trace.keys, trace.values, trace.prompt_length)
        store.layers = trace.prompt.layers
        prompt = self._planned(trace.prompt.seen_by(self.policy))
        self.policy.compress(store, prompt)
        contract.check_spent(self.policy, [store])
        if self.policy.needs.chooses and not self.policy.needs.steps and not self.policy.fits(trace.prompt_length):
            entries = float(store.counts.float().mean())
            self.entries = int(entries) if entries.is_integer() else entries
        self._kept = store.positions.clone()
        store.hold(self.storage)
        k = min(self.k, trace.prompt_length)
        ranks = self._reference.gold_ranks
        self.recall = self._reference.share_found(ranks, self._kept, k)
        best = ranking.top_positions(self.policy.scores(prompt), k)
        self.window_recall = self._reference.share_found(ranks, best, k)
        if trace.steps == 0:
            # Without a response there is no gold set to recall.
            self.recall, self.window_recall = (torch.full_like(r, torch.nan) for r in (self.recall, self.window_recall))
        if self.policy.needs.acts_while_decoding or self.policy.needs.rewrites or store.merged or self.probes:
            self._decode(store)
        else:
            self._follow(store)
            if not self.storage.exact:
                self._follow_rounded(store)

    def _planned(self, prompt: Prompt) -> Prompt:
        """The prompt with what the policy plans for all layers together, where it does."""
        if not self.policy.needs.surveys or self.policy.fits(prompt.length):
            return prompt
        plan = self.policy.plan(self.policy.survey(prompt)[:, None], prompt)
        return prompt.with_plan(plan[:, 0])

    def _decode(self, store: LayerStore) -> None:
        """All decoding steps by the clock: append, attend, update, evict or merge."""
        recorded = []
        for step in range(1, self.trace.steps + 1):
            new = slice(self.trace.prompt_length + step - 1, self.trace.prompt_length + step)
            queries = self.trace.response_queries[:, :, step - 1 : step]
            entry = self.trace.keys[:, :, new], self.trace.values[:, :, new]
            slots = take(self.policy, store, queries, *entry, self.trace.softmax)
            self._read.append(positions_read(store, slots))
            self.read_bytes[step - 1] = store.bytes_of(slots) + self.policy.overhead_bytes(store)
            if self._as_recorded(store):
                recorded.append(step - 1)
                weighs = self.policy.weighs and self.policy.needs.steps
                weights = weigh(store, queries, slots, self.trace.softmax) if weighs else None
                self.policy.step(store, weights)
            else:
                self._attend(store, queries, slots, step)
            everything = store.length == store.seen and not store.ragged
            self._stored.append(None if everything else store.positions.clone())
            self.stored_bytes[step - 1] = store.kv_bytes + store.aux_bytes - self.policy.discount_bytes(store)
        for steps in alike(recorded, [read.shape[-1] for read in self._read]):
            self._measure(readings(steps, self._read[steps], self.trace.length))

    def _as_recorded(self, store: LayerStore) -> bool:
        """Whether what the model recorded tells all that a step attends to."""
        plain = self.policy.needs.attends_plainly and self.storage.exact and not store.merged
        return plain and not self.probes

    def _attend(self, store: LayerStore, queries: Tensor, slots: Tensor | None, step: int) -> None:
        """The rest of one decoding step, from attending on, measured on what is stored."""
        now, read = step - 1, self._read[-1]
        attended = attend(self.policy, store, queries, slots, self.trace.softmax, weigh=True)
        all_weights, full = self._reference.at(step), self._reference.outputs[:, :, now]
        sinks = None if self._reference.sinks is None else self._reference.sinks[:, :, now]
        self.mass_lost[:, :, now] = measures.mass_lost(all_weights, read, sinks)
        self.output_error[:, :, now] = measures.output_error(full, attended.output[:, :, 0])
        ranks, k = self._reference.step_ranks[:, :, now], min(self.k, self.trace.prompt_length + step)
        self.step_recall[:, :, now] = self._reference.share_found(ranks, read, k)

        seen = Seen(self.policy, store, queries, attended, self.trace.softmax, full=(all_weights, full))
        where = dict(step=step, layer=None, rows=list(self.trace.layers))
        for instrument in self.probes:
            instrument.look(seen, self.records, where)
        self.policy.step(store, attended.weights)
        for instrument in self.probes:
            instrument.look_after(seen, self.records, where)

    def _follow(self, store: LayerStore) -> None:
        """All steps at once, for a policy that does nothing after the prefill: every generated token stays."""
        trace, prompt = self.trace, self.trace.prompt_length
        if trace.steps == 0:
            return
        if self._kept.shape[2] == prompt and not store.ragged:
            self.step_recall.fill_(1)
        else:
            response = torch.arange(prompt, trace.length, device=trace.device).expand(self._kept.shape[1], -1)
            # Other layers may keep more: no need to look at a layer's padding.
            fewer = (kept[:, : int((kept != EMPTY).sum(-1).max())] for kept in self._kept)
            self._measure(Reading(slice(0, trace.steps), torch.cat([kept, response], -1)) for kept in fewer)
        entry = 2 * trace.keys.shape[-1] * trace.keys.element_size()
        generated = trace.n_layers * self._kept.shape[1] * torch.arange(1, trace.steps + 1)
        entries = int((self._kept != EMPTY).sum()) + generated
        self.stored_bytes = (entries * entry + store.aux_bytes).float()
        self.read_bytes = self.stored_bytes.clone()

    def _measure(self, readings: Iterable[Reading]) -> None:
        """Measure what each layer reads, one reading for each."""
        trace = self.trace
        k = torch.arange(trace.prompt_length + 1, trace.length + 1, device=trace.device).clamp_max(self.k)
        for layer, reading in enumerate(readings):
            lost = losses(self._reference, layer, reading, k)
            self.mass_lost[layer][:, reading.steps] = lost.mass
            self.output_error[layer][:, reading.steps] = lost.error
            self.step_recall[layer][:, reading.steps] = lost.recall

    def _follow_rounded(self, store: LayerStore) -> None:
        """What `_follow` cannot tell of a storage that rounds: outputs and bytes, of as many steps at once as leave all
        entries as they are.
        """
        trace, step = self.trace, 0
        while step < trace.steps:
            self._append(store, step, 1)
            store.settle()
            self.stored_bytes[step] = before = store.kv_bytes + store.aux_bytes
            more = min(store.calm, trace.steps - step - 1)
            if more:
                self._append(store, step + 1, more)
                grown = store.kv_bytes + store.aux_bytes - before
                self.stored_bytes[step + 1 : step + 1 + more] = (
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
                full = self._reference.outputs[layer, :, steps]
                self.output_error[layer, :, steps] = measures.output_error(full, attention.output(weights, values))
            step = steps.stop
        self.read_bytes = self.stored_bytes.clone()

    def _append(self, store: LayerStore, step: int, n: int) -> None:
        """The entries of `n` response tokens from `step` on, counted from 0."""
        new = slice(self.trace.prompt_length + step, self.trace.prompt_length + step + n)
        store.append(self.trace.keys[:, :, new], self.trace.values[:, :, new])

    # ------------------------------------------------------------------ what came out

    def kept(self, layer: int, step: int = 0) -> Tensor:
        """Positions, int64 `[kv_heads, n]`, -1 padded: at step 0 the retained set after the prefill, at step t those
        that the t-th decoding query reads.

        Raises:
            KvlabError: a layer or a step outside this replay, or a layer that is not compressed.
        """
        place = self._place(layer, step)
        if step == 0:
            return self._kept[place]
        return self._read[step - 1][place] if self._read else self._with_response(place, step)

    def stored(self, layer: int, step: int = 0) -> Tensor:
        """Positions stored after a step, int64 `[kv_heads, n]`, -1 padded."""
        place = self._place(layer, step)
        if step == 0:
            return self._kept[place]
        stored = self._stored[step - 1] if self._stored else None
        return self._with_response(place, step) if stored is None else stored[place]

    def _place(self, layer: int, step: int) -> int:
        """Where among the trace's layers the model's layer `layer` stands."""
        layer, step = whole("layer", layer), whole("step", step)
        layers = len(self.trace.layout.sees)
        if not 0 <= layer < layers or not 0 <= step <= self.trace.steps:
            raise KvlabError(
                f"layer {layer}, step {step} is outside this replay of {layers} layers and {self.trace.steps} steps"
            )
        return self.trace.layout.place(layer)

    def _with_response(self, place: int, step: int) -> Tensor:
        kept, prompt = self._kept[place], self.trace.prompt_length
        new = torch.arange(prompt, prompt + step).expand(kept.shape[0], step)
        both = torch.cat([kept, new], -1)
        padded = both.masked_fill(both == EMPTY, torch.iinfo(torch.int64).max).sort(-1).values
        return padded.masked_fill(padded == torch.iinfo(torch.int64).max, EMPTY)

    def lost(self, step: int) -> Tensor:
        """Full attention of the decoding query `step` (from 1) on keys that it does not read, zero on those that it
        does, `[layers, heads, prompt + step]`.
        """
        return measures.lost_weights(self._reference.at(step), self._reads(step))

    def _reads(self, step: int) -> Tensor:
        return torch.stack([self.kept(layer, step) for layer in self.trace.layers])

    @cached_property
    def concentrated_loss(self) -> Tensor:
        """`measures.concentrated_loss` of every decoding query, `[layers, heads, steps]`."""
        steps = range(1, self.trace.steps + 1)
        losses = [measures.concentrated_loss(self._reference.at(step), self._reads(step)) for step in steps]
        return torch.stack(losses, -1)

    @cached_property
    def full_norms(self) -> Tensor:
        """Norms of the full cache's outputs, `[layers, heads, steps]`: what `output_error` is relative to."""
        return self._reference.outputs.norm(dim=-1).cpu()

    @property
    def measures(self) -> list[str]:
        """What was measured, by name."""
        return [*AXES, *(SINKS if self.sink_share is not None else ())]

    @property
    def layers(self) -> pd.DataFrame:
        """One row for each layer of the model: layer, sees (what it looks at), compressed."""
        return self.trace.layout.table()

    @property
    def summary(self) -> dict[str, float]:
        """Entries, and means of every measure over layers, heads and steps; bytes are sums over layers."""
        from kvlab.replays.summaries import Means

        means = {name: getattr(self, name).float() for name in self.measures}
        found = {name: float(values.mean()) if values.numel() else float("nan") for name, values in means.items()}
        return Means({"entries": self.entries} | found)

    @property
    def signature(self) -> str:
        """`model@sha|document@sha|policy(params)|seed|kvlab version`; behind the policy stands its storage, as in
        `snapkv(budget=256)+kivi-4`, unless that is the plain one.
        """
        from kvlab import __version__

        stored = self.storage.behind(str(self.policy))
        return f"{self.trace.signature}|{stored}|{self.trace.meta.get('seed', 0)}|kvlab {__version__}"

    @cached_property
    def table(self) -> pd.DataFrame:
        """Tidy: policy, budget, entries (kept, or what the budget came to), storage, layer, kv_head, head, step,
        measure, value; what is not of one head has none.
        """
        import pandas as pd

        axes = AXES | SINKS
        parts = [tidy(name, getattr(self, name), axes[name], self.trace.layers) for name in self.measures]
        table = pd.concat(parts, ignore_index=True)
        group = self.trace.heads // self.trace.kv_heads
        table["kv_head"] = table["kv_head"].fillna(table["head"] // group)
        table.insert(0, "policy", pd.Categorical([self.policy.name] * len(table)))
        table.insert(1, "budget", self.policy.asked)
        table.insert(2, "entries", self.entries)
        table.insert(3, "storage", pd.Categorical([str(self.storage)] * len(table)))
        return table

    def __repr__(self) -> str:
        values = ", ".join(f"{k}={v:.4g}" for k, v in self.summary.items())
        return f"Replay({self.storage.behind(str(self.policy))}: {values})"
