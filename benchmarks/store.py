"""What one step of a store costs: append an entry to every head, and evict one again.

\b
python benchmarks/store.py
python benchmarks/store.py --rows 30 --entries 256

Microseconds of processor time for each step of one layer, the least and the median of several rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from kvlab.core.store import LayerStore


def main(
    entries: Annotated[int, typer.Option("--entries", min=16, help="Entries of each head.")] = 512,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Sequences, or layers of a replay.")] = 1,
    kv_heads: Annotated[int, typer.Option("--kv-heads", min=1)] = 3,
    head_dim: Annotated[int, typer.Option("--head-dim", min=1)] = 64,
    steps: Annotated[int, typer.Option("--steps", min=1)] = 300,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 9,
) -> None:
    """Time the verbs that policies call at every step."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    slots = torch.randint(entries, (steps, rows, kv_heads), generator=generator)
    kept = torch.arange(1, entries + 1).expand(rows, kv_heads, entries)
    new = [torch.randn(rows, kv_heads, 1, head_dim, generator=generator) for _ in range(2)]

    def fresh(column: bool = False) -> LayerStore:
        shape = rows, kv_heads, entries, head_dim
        store = LayerStore(*(torch.randn(shape, generator=generator) for _ in range(2)))
        if column:
            store.add_column("score", torch.zeros(shape[:3]))
        return store

    cases: dict[str, tuple[bool, Callable[[LayerStore, int], None] | None]] = {
        "append": (False, None),
        "append, drop the fifth": (False, lambda store, step: store.drop(4)),
        "append, drop one of each head": (False, lambda store, step: store.drop(slots[step])),
        "the same with a column": (True, lambda store, step: store.drop(slots[step])),
        "append, evict": (False, lambda store, step: store.evict(kept)),
    }
    for name, (column, leave) in cases.items():
        times = []
        for _ in range(repeats):
            with torch.inference_mode():
                store = fresh(column)
                start = time.process_time()
                for step in range(steps):
                    store.append(*new)
                    if leave is not None:
                        leave(store, step)
                times.append(1e6 * (time.process_time() - start) / steps)
        print(f"{name:<30} {min(times):8.1f} {statistics.median(times):8.1f}")


if __name__ == "__main__":
    typer.run(main)
