"""The result of one policy over one trace: the entries that it would keep, read and lose at every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.core.storage import Storage
from kvlab.core.store import EMPTY
from kvlab.errors import KvlabError, whole
from kvlab.instruments import measures
from kvlab.instruments.probes import Probe
from kvlab.instruments.records import Records
from kvlab.methods import Policy
from kvlab.replays.reference import Reference, reference
from kvlab.replays.tables import AXES, SINKS, tidy

if TYPE_CHECKING:
    import pandas as pd

    from kvlab.traces.trace import Trace


@dataclass(eq=False, repr=False)
class Replay:
    """The result of one policy over one trace; its tensors are on the CPU.

    Attributes:
        trace, policy, storage, probes: what was replayed. Tensors have the trace's layers, one behind the other. Tables
            and parameters give a layer's number in the model.
        budget: entries for each layer and KV head that the policy's budget came to.
        entries: entries kept after the prefill, on average over layers and KV heads. For a policy that evicts while it
            decodes or selects, it is the budget, or the prompt's length where that is within the budget.
        k: the size of the top that the recalls ask for.
        raised: whether a fractional budget had to be raised to what the method needs.
        records: numbers of the probes.
        mass_lost, output_error: `[layers, heads, steps]`.
        step_recall: `[layers, kv_heads, steps]`.
        recall, window_recall: `[layers, kv_heads]`.
        sink_share: `[layers, heads, steps]`, what learnt sinks take of the full cache's attention, which mass lost does
            not count; None where the model has none.
        stored_bytes, read_bytes: `[steps]`, summed over layers.
        kept_sets: positions after the prefill, `[layers, kv_heads, n]`, -1 padded; see `kept`.
        read_sets: those that each step reads; empty where it reads all that `kept_sets` and the response so far hold.
        stored_sets: those that are stored after each step, as `read_sets`; None for a step that stores everything,
            which on long prompts is much.
    """

    trace: Trace
    policy: Policy
    probes: list[Probe]
    storage: Storage
    budget: int
    entries: int | float
    k: int
    raised: bool
    records: Records
    mass_lost: Tensor
    output_error: Tensor
    step_recall: Tensor
    recall: Tensor
    window_recall: Tensor
    sink_share: Tensor | None
    stored_bytes: Tensor
    read_bytes: Tensor
    kept_sets: Tensor
    read_sets: list[Tensor]
    stored_sets: list[Tensor | None]

    @property
    def _reference(self) -> Reference:
        return reference(self.trace)

    def kept(self, layer: int, step: int = 0) -> Tensor:
        """Positions, int64 `[kv_heads, n]`, -1 padded: at step 0 the retained set after the prefill, at step t those
        that the t-th decoding query reads.

        Raises:
            KvlabError: a layer or a step outside this replay, or a layer that is not compressed.
        """
        index = self._index(layer, step)
        if step == 0:
            return self.kept_sets[index]
        return self.read_sets[step - 1][index] if self.read_sets else self._with_response(index, step)

    def stored(self, layer: int, step: int = 0) -> Tensor:
        """Positions stored after a step, int64 `[kv_heads, n]`, -1 padded."""
        index = self._index(layer, step)
        if step == 0:
            return self.kept_sets[index]
        stored = self.stored_sets[step - 1] if self.stored_sets else None
        return self._with_response(index, step) if stored is None else stored[index]

    def _index(self, layer: int, step: int) -> int:
        """The index of the model's layer `layer` among the trace's layers."""
        layer, step = whole("layer", layer), whole("step", step)
        layers = len(self.trace.layout.sees)
        if not 0 <= layer < layers or not 0 <= step <= self.trace.steps:
            raise KvlabError(
                f"layer {layer}, step {step} is outside this replay of {layers} layers and {self.trace.steps} steps"
            )
        return self.trace.layout.index(layer)

    def _with_response(self, index: int, step: int) -> Tensor:
        kept, prompt = self.kept_sets[index], self.trace.prompt_length
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
        """The names of the measures."""
        return [*AXES, *(SINKS if self.sink_share is not None else ())]

    @property
    def layers(self) -> pd.DataFrame:
        """One row for each layer of the model: layer, sees (what it looks at), compressed."""
        return self.trace.layout.table()

    @property
    def summary(self) -> dict[str, float]:
        """Entries, and means of every measure over layers, heads and steps; bytes are sums over layers."""
        from kvlab.lib.summaries import Means

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
        """Build a tidy table with one row for each value of a measure.

        Columns: policy, budget, entries (kept, or those of the budget), storage, layer, kv_head, head, step, measure,
        value. A value that is not of one head has none.
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
