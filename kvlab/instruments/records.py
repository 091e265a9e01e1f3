"""The records of a run's probes: numbers by layer, head and step, and the positions that each step read."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kvlab.core.slots import on_cpu
from kvlab.errors import KvlabError
from kvlab.lib import extras
from kvlab.lib.files import replacing

if TYPE_CHECKING:
    import pandas as pd


class Records:
    """Numbers of the probes of one session, and their means.

    Rows are the sequences of a live run's batch, or the layers of a replay.
    """

    def __init__(self, policy: str, budget: int | float | None, rows: str = "sequence", storage: str = "as_is"):
        self._policy, self._budget, self._rows_are, self._storage = policy, budget, rows, storage
        self._rows: list[tuple[str, int, int | None, int, str | None, list[int], Tensor, dict[int, int]]] = []
        # The entries that the budget came to, by sequence. Rows refer to it: replace it, but never change it.
        self._entries: dict[int, int] = {}
        self._started, self._prompt = 0.0, 0
        self._positions: dict[tuple[int, int, int | None, int], Tensor] = {}  # by prompt, sequence, layer and step

    def note_entries(self, sequences: list[int], entries: int) -> None:
        """Record the budget for these sequences' prompt, in entries for each layer and KV head."""
        self._entries = self._entries | dict.fromkeys(sequences, entries)

    def start(self, prompt: int) -> None:
        """A decoding step begins, of the prompt with this number (from 1) in its session."""
        self._prompt = prompt
        self._started = time.perf_counter()

    def stop(self) -> float:
        return time.perf_counter() - self._started

    def add(
        self, measure: str, values: Tensor, *, step: int, layer: int | None, rows: list[int], axis: str | None
    ) -> None:
        """Values `[rows]`, or `[rows, heads]` with `axis` "head" or "kv_head"."""
        values = values.detach().float().cpu()
        self._rows.append((measure, self._prompt, layer, step, axis, rows, values, self._entries))

    def add_positions(self, positions: Tensor, *, step: int, layer: int | None, rows: list[int]) -> None:
        """Record the positions that a step read, `[rows, kv_heads, n]`, -1 padded."""
        for row, row_positions in zip(rows, on_cpu(positions), strict=True):
            self._positions[self._prompt, *self._sequence_and_layer(row, layer), step] = row_positions

    def positions(self, layer: int, step: int, sequence: int = 0, prompt: int | None = None) -> Tensor:
        """Positions that a step read, int64 `[kv_heads, n]`, -1 padded, as the probe `positions` wrote them down.

        Args:
            prompt: which of the session's, from 1; the last one unless given.

        Raises:
            KvlabError: nothing was written down there.
        """
        wanted = (self._prompt if prompt is None else prompt, sequence, layer, step)
        if wanted not in self._positions:
            raise KvlabError(
                f"no positions are known of prompt {wanted[0]}, sequence {sequence}, layer {layer}, step {step}; "
                "attach the probe 'positions', and count steps from 1"
            )
        return self._positions[wanted]

    def _sequence_and_layer(self, row: int, layer: int | None) -> tuple[int, int | None]:
        """Sequence and layer of a row."""
        return (row, layer) if self._rows_are == "sequence" else (0, row)

    def save(self, path: str | Path) -> Path:
        """Write `table` as one parquet file, under its name only once it is whole.

        Raises KvlabError where pyarrow is not installed.
        """
        extras.need("pyarrow")
        path = Path(path)
        with replacing(path) as part:
            self.table.to_parquet(part, index=False)
        return path

    @property
    def means(self) -> dict[str, float]:
        """Of every measure, over everything it was recorded for."""
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for measure, *_, values, _entries in self._rows:
            sums[measure] += float(values.sum())
            counts[measure] += values.numel()
        return {measure: total / counts[measure] for measure, total in sums.items()}

    @property
    def table(self) -> pd.DataFrame:
        """Tidy: policy, budget, entries (what the budget came to), storage, prompt, sequence, layer, kv_head, head,
        step, measure, value.
        """
        import pandas as pd

        whole = ["prompt", "sequence", "layer", "kv_head", "head", "step"]
        columns = ["policy", "budget", "entries", "storage", *whole, "measure", "value"]
        rows = []
        for measure, prompt, layer, step, axis, sequences, values, entries in self._rows:
            heads = range(values.shape[1]) if axis else [None]
            for sequence, per_head in zip(sequences, values.view(len(sequences), -1).tolist(), strict=True):
                for head, value in zip(heads, per_head, strict=True):
                    head_columns = (head, None) if axis == "kv_head" else (None, head)
                    where = self._sequence_and_layer(sequence, layer)
                    budget = self._budget, entries.get(where[0]), self._storage
                    rows.append((self._policy, *budget, prompt, *where, *head_columns, step, measure, value))
        table = pd.DataFrame(rows, columns=columns)
        return table.astype(dict.fromkeys(["entries", *whole], "Int64"))

    @property
    def reads(self) -> pd.DataFrame:
        """The entries that each step read, from the probe `positions`: one row for each entry.

        Columns: policy, budget, storage, prompt, sequence, layer, kv_head, step, position. Prompts and steps count from
        1, the others from 0. A position is that of the entry's token in its sequence; evictions before it do not change
        it.
        """
        import pandas as pd

        parts = []
        for (prompt, sequence, layer, step), positions in self._positions.items():
            kv_heads, slots = (positions >= 0).nonzero(as_tuple=True)
            found = {"kv_head": kv_heads.numpy(), "position": positions[kv_heads, slots].numpy()}
            parts.append(pd.DataFrame(found).assign(prompt=prompt, sequence=sequence, layer=layer, step=step))
        whole = ["prompt", "sequence", "layer", "kv_head", "step", "position"]
        table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=whole)
        table = table.assign(policy=self._policy, budget=self._budget, storage=self._storage)
        return table.reindex(columns=["policy", "budget", "storage", *whole]).astype(dict.fromkeys(whole, "Int64"))
