"""The reports of a live session: the numbers of its probes, step by step, and the content of its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvlab.core import hooks
from kvlab.core.storage import Storage
from kvlab.errors import KvlabError
from kvlab.instruments.probes import Probe, Seen, Shadow
from kvlab.instruments.records import Records
from kvlab.live.cache import LiveCache
from kvlab.live.row_groups import Group
from kvlab.methods import Policy
from kvlab.methods._base.clock import Step


class Reports:
    """Lets the probes of one session look at its decoding steps, and keeps what they ask for.

    Attributes:
        probes: those of the session.
        records: their numbers.
        needs_weights: whether a probe reads the attention weights, so that no fused kernel can be used.
        needs_pre_rope: whether a probe reads the queries before RoPE.
    """

    def __init__(self, policy: Policy, probes: Sequence[Probe], shadow_bytes: int, storage: Storage):
        self.probes = list(probes)
        self.records = Records(policy.name, policy.asked, storage=str(storage))
        self.needs_weights = any(probe.needs_weights for probe in self.probes)
        self.needs_pre_rope = any(probe.needs_pre_rope for probe in self.probes)
        self._needs_shadow = any(probe.needs_shadow for probe in self.probes)
        self._shadow_bytes = shadow_bytes
        self._prompts = 0

    def note_entries(self, cache: LiveCache) -> None:
        """Record the budget in entries for each sequence of a prompt that has just ended."""
        for group in cache.compressed[0].groups:
            if group.store.compressed:
                self.records.note_entries(group.numbers(cache.batch), group.store.budget)

    def begin(self, cache: LiveCache) -> None:
        """Number a prompt that ends, for the tables, and begin to copy what is stored of it, if a probe asks.

        Raises:
            KvlabError: entries are missing already that a probe compares with.
        """
        if not cache.number:
            self._prompts += 1
            cache.number = self._prompts
        if not self._needs_shadow:
            return
        for group in (group for layer in cache.compressed for group in layer.groups if group.shadow is None):
            if group.lossy or group.store.rounded:
                raise KvlabError(
                    "the cache passed in has evicted or rounded entries; leave out probes that compare with full "
                    "attention, or start them with the first prompt"
                )
            rows = group.store.rows
            group.shadow = Shadow.of(group.store, len(cache.compressed) * cache.batch / rows, self._shadow_bytes)

    def step_begins(self, cache: LiveCache) -> None:
        """Count a decoding step, and start its clock."""
        cache.steps += 1
        self.records.start(cache.number)

    def step_ended(self, cache: LiveCache) -> None:
        """Tell the probes that all layers have done the step, and how long it took."""
        seconds = self.records.stop()
        for probe in self.probes:
            probe.after_step(self.records, cache.steps, seconds)

    def look(
        self, cache: LiveCache, group: Group, call: hooks.Call, policy: Policy, queries: Tensor, attended: Step
    ) -> Seen:
        """Show the probes one group of one layer in one step, before the policy evicts; what they were shown."""
        pre_queries = None if call.pre_rope is None else group.of(call.pre_rope)
        new = group.of(call.keys), group.of(call.values)
        seen = Seen(policy, group.store, queries, attended, call.softmax, group.shadow, pre_queries, new=new)
        where = _coordinates(cache, group, call)
        for probe in self.probes:
            probe.look(seen, self.records, where)
        return seen

    def look_after(self, cache: LiveCache, group: Group, call: hooks.Call, seen: Seen) -> None:
        """Show the probes the same again, once the policy has updated, evicted or merged."""
        where = _coordinates(cache, group, call)
        for probe in self.probes:
            probe.look_after(seen, self.records, where)


def _coordinates(cache: LiveCache, group: Group, call: hooks.Call) -> dict[str, Any]:
    """The step, the layer and the sequences that a row of the tables belongs to."""
    return dict(step=cache.steps, layer=call.layer, rows=group.numbers(cache.batch))


def located(cache: LiveCache | None, layer: int, sequence: int) -> tuple[Group, int]:
    """The group of the model's layer `layer` that holds a sequence of the batch, and its row in that group.

    Raises:
        KvlabError: nothing is stored yet, there is no such layer or sequence, or no policy compresses that layer.
    """
    if cache is None or not cache.compressed[0].groups:
        raise KvlabError("nothing has been fed in this session yet")
    for group in cache.compressed[cache.layout.index(layer)].groups:
        rows = group.numbers(cache.batch)
        if sequence in rows:
            return group, rows.index(sequence)
    raise KvlabError(f"sequence {sequence} is outside this batch of {cache.batch}")
