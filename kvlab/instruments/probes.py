"""Instruments for live runs: what a decoding step loses against the full cache, step by step, layer by layer.

A probe looks at every layer of every decoding step, after attention and before the policy evicts. Some need the
attention weights; then no fused kernel is used. Some need the evicted entries; a shadow store keeps them on the CPU,
only if a probe asks.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.slots import on_cpu
from kvlab.core.softmax import Scaling, Softmax
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError, nearest
from kvlab.instruments import measures
from kvlab.instruments.records import Records
from kvlab.methods import Policy
from kvlab.methods._base.clock import Step

if TYPE_CHECKING:
    from kvlab.traces.trace import Trace


class Shadow:
    """The keys and values that a full cache would hold, of one layer of one group of sequences, on the CPU."""

    def __init__(self, store: LayerStore, shares: float, limit: int):
        self.store = store
        self._shares, self._limit = shares, limit
        self._check()

    @classmethod
    def of(cls, store: LayerStore, shares: float, limit: int) -> Shadow:
        """Of a store that holds its whole prompt.

        Args:
            shares: how many such stores all layers and sequences together come to.
            limit: bytes that all of them may take.

        Raises:
            KvlabError: they would take more.
        """
        # This copies even on a CPU: the store may evict in place, and memory that it frees must not stay in use here.
        copies = (tensor.to("cpu", copy=True) for tensor in (store.keys, store.values))
        return cls(LayerStore(*copies, latent=store.latent), shares, limit)

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.store.append(keys.cpu(), values.cpu())
        self._check()

    def _check(self) -> None:
        needed = self.store.kv_bytes * self._shares
        if needed > self._limit:
            raise KvlabError(
                f"a shadow of {self.store.length} tokens takes {needed / 2**30:.3g} GiB, more than shadow_bytes "
                "allows; raise that, or leave out the probes that need it"
            )


class Seen:
    """One layer at one decoding step, as probes see it; costly values are computed once, when first asked for.

    `read`, `output`, `full_weights` and `full_output` share a device: the CPU in a live run, with the shadow, and the
    trace's device in a replay. `new` is the step's own key and value as the model made them, `[rows, kv_heads, 1,
    head_dim]` each, in a live run.
    """

    def __init__(
        self,
        policy: Policy,
        store: LayerStore,
        queries: Tensor,
        step: Step,
        scaling: Scaling,
        shadow: Shadow | None = None,
        pre_queries: Tensor | None = None,
        full: tuple[Tensor, Tensor] | None = None,
        new: tuple[Tensor, Tensor] | None = None,
    ):
        self.policy, self.store, self.queries, self.step = policy, store, queries, step
        self.shadow, self.pre_queries, self.new = shadow, pre_queries, new
        self.softmax = Softmax.of(scaling)
        self.scaling = self.softmax.scaling
        self._device = torch.device("cpu")
        if full is not None:
            # A replay knows what the full cache does without a shadow of it.
            self.full_weights, self.full_output = full
            self._device = self.full_output.device

    @cached_property
    def read(self) -> Tensor:
        """Positions read, `[rows, kv_heads, n]`, -1 padded."""
        read = self.step.read(self.store)
        return on_cpu(read) if self._device.type == "cpu" else read

    @cached_property
    def output(self) -> Tensor:
        """The output of the step's attention, `[rows, heads, head_dim]`."""
        return self.step.output[:, :, 0].to(self._device)

    @cached_property
    def full_weights(self) -> Tensor:
        """Attention over everything that a full cache would hold, `[rows, heads, length]`."""
        return attention.weights(self.queries.cpu(), self._whole.keys, self.softmax.to("cpu"))[:, :, 0]

    @cached_property
    def sinks(self) -> Tensor | None:
        """The share of learnt sinks in the full cache's attention, `[rows, heads]`; None where there are none."""
        return None if self.softmax.sinks is None else measures.sink_share(self.full_weights)

    @cached_property
    def full_output(self) -> Tensor:
        """`[rows, heads, head_dim]`."""
        return attention.output(self.full_weights[:, :, None], self._whole.values)[:, :, 0]

    @property
    def _whole(self) -> LayerStore:
        """The entries of a full cache."""
        assert self.shadow is not None, "a probe that compares with the full cache says so in needs_shadow"
        return self.shadow.store


class Probe:
    """One instrument. Subclass it, override `look`, and pass an object wherever a name is taken."""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    needs_weights: ClassVar[bool] = False
    needs_shadow: ClassVar[bool] = False
    needs_pre_rope: ClassVar[bool] = False

    def look(self, seen: Seen, records: Records, where: dict[str, Any]) -> None:
        """One layer of one step; `where` has its step, layer and rows, to hand on to `records.add`."""

    def look_after(self, seen: Seen, records: Records, where: dict[str, Any]) -> None:
        """The same layer once the policy has updated, evicted or merged: `seen.store` is what the next step meets."""

    def after_step(self, records: Records, step: int, seconds: float) -> None:
        """A whole step of the model is done."""


class MassLost(Probe):
    """Share of the full attention that went to entries which the step did not read."""

    name, summary, needs_shadow = "mass_lost", "attention mass on what was not read", True

    def look(self, seen: Seen, records: Records, where: dict[str, Any]) -> None:
        records.add("mass_lost", measures.mass_lost(seen.full_weights, seen.read, seen.sinks), axis="head", **where)


class SinkShare(Probe):
    """Share of the step's attention that the model's learnt sinks took, over what was read; 0 where it has none."""

    name, summary, needs_weights = "sink_share", "attention mass on learnt sinks", True

    def look(self, seen: Seen, records: Records, where: dict[str, Any]) -> None:
        assert seen.step.weights is not None, "needs_weights has them computed"
        share = measures.sink_share(seen.step.weights)
        share = torch.zeros_like(share) if seen.softmax.sinks is None else share
        records.add("sink_share", share, axis="head", **where)


class StepRecall(Probe):
    """Share of each step's own top-k among the positions that it read.

    Args:
        k: the policy's own budget unless given; recalls of policies with different budgets are compared at one k.
    """

    name, summary, needs_shadow = "step_recall", "share of the step's own top-k that was read", True

    def __init__(self, k: int | None = None):
        self.k = k

    def look(self, seen: Seen, records: Records, where: dict[str, Any]) -> None:
        scores = attention.sum_over_group(seen.full_weights, seen.read.shape[1])
        best = ranking.top_positions(scores, min(self.k or seen.store.budget, scores.shape[-1]))
        records.add("step_recall", measures.recall(seen.read, best), axis="kv_head", **where)


class OutputError(Probe):
    """Relative distance of the attention output from the full cache's, on the same queries."""

    name, summary, needs_shadow = "output_error", "relative error of the attention output", True

    def look(self, seen: Seen, records: Records, where: dict[str, Any]) -> None:
        error = measures.output_error(seen.full_output, seen.output)
        records.add("output_error", error, axis="head", **where)


class Entropy(Probe):
    """Entropy of the attention over what was read, in nats."""

    name, summary, needs_weights = "entropy", "entropy of the attention, in nats", True

    def look(self, seen: Seen, records: Records, where: dict[str, Any]) -> None:
        assert seen.step.weights is not None, "needs_weights has them computed"
        records.add("entropy", attention.entropy(seen.step.weights), axis="head", **where)


class Positions(Probe):
    """Which positions each step read: `session.records.positions(layer, step)`, int64 `[kv_heads, n]`, or all of them
    as the table `session.records.reads`.
    """

    name, summary = "positions", "the positions that each step read"

    def look(self, seen: Seen, records: Records, where: dict[str, Any]) -> None:
        records.add_positions(seen.read, **where)


class Bytes(Probe):
    """Bytes of each layer that a step loaded, and that were stored after it."""

    name, summary = "bytes", "stored and read bytes of each layer"

    def look(self, seen: Seen, records: Records, where: dict[str, Any]) -> None:
        store, slots = seen.store, seen.step.slots
        self._add("read_bytes", store.bytes_of(slots) + int(seen.policy.overhead_bytes(store)), records, where)

    def look_after(self, seen: Seen, records: Records, where: dict[str, Any]) -> None:
        stored = seen.store.kv_bytes + seen.store.aux_bytes - int(seen.policy.discount_bytes(seen.store))
        self._add("stored_bytes", stored, records, where)

    def _add(self, name: str, value: int, records: Records, where: dict[str, Any]) -> None:
        share = len(where["rows"])
        records.add(name, torch.full((share,), value / share, dtype=torch.float32), axis=None, **where)


class Seconds(Probe):
    """Seconds of each decoding step of the model."""

    name, summary = "time", "seconds of each decoding step"

    def after_step(self, records: Records, step: int, seconds: float) -> None:
        records.add("seconds", torch.tensor([seconds], dtype=torch.float32), step=step, layer=None, rows=[0], axis=None)


class QuerySimilarity(Probe):
    """Cosine of each decoding query with that of a reference run at the same step (DapQ table 1's measure).

    Args:
        reference: a trace of the same prompt.
    """

    name, summary, needs_pre_rope = "query_similarity", "cosine of the queries with a reference run's", True

    def __init__(self, reference: Trace):
        self.reference = reference

    def look(self, seen: Seen, records: Records, where: dict[str, Any]) -> None:
        if where["step"] > self.reference.steps:
            return
        now = where["step"] - 1
        pairs = [("query_similarity", self.reference.response_queries, seen.queries)]
        if self.reference.pre_queries is not None and seen.pre_queries is not None:
            pairs.append(("query_similarity_pre", self.reference.response_pre_queries, seen.pre_queries))
        for name, reference, queries in pairs:
            index = None if where["layer"] is None else self.reference.layout.index(where["layer"])
            true = reference[:, :, now] if index is None else reference[index : index + 1, :, now]
            records.add(name, measures.query_similarity(queries[:, :, 0].cpu(), true.cpu()), axis="head", **where)


PROBES: dict[str, type[Probe]] = {
    cls.name: cls
    for cls in (MassLost, SinkShare, StepRecall, OutputError, Entropy, Positions, Bytes, Seconds, QuerySimilarity)
}


def probe(wanted: Probe | str) -> Probe:
    """A probe by name, or the object itself.

    Raises:
        KvlabError: an unknown name, or a probe that cannot be made without a reference run.
    """
    if isinstance(wanted, Probe):
        return wanted
    if wanted not in PROBES:
        raise KvlabError(nearest(wanted, PROBES, "probe"))
    if wanted == QuerySimilarity.name:
        raise KvlabError(
            "query_similarity compares with a reference run: pass kvlab.instruments.probes.QuerySimilarity(trace)"
        )
    return PROBES[wanted]()
