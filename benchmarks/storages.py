"""Bits, distortion and the time of a read of each storage, and of keys rotated back against a rotated query.

\b
python benchmarks/storages.py
python benchmarks/storages.py --head-dim 128 --tokens 8000

Vectors are Gaussian, once as they are and once with one channel 20 times as large. Distortion is the squared error of
keys over their squares. Times are medians, and ratios to those of `as_is`, whose keys a read copies once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from common import run
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvlab.core.entries import AsIs
from kvlab.core.slots import KEYS
from kvlab.core.storage import STORAGES, Storage, keys_and_values, stored_as, turbo
from kvlab.core.store import LayerStore
from kvlab.core.turbo import Turbo, rotation

HEADS, OUTLIER = 4, 20
FORMS: list[Storage] = [
    *STORAGES.values(),
    turbo(4, inner_product=True),
    turbo(2, inner_product=True),
    keys_and_values("turbo-4", "turbo-2"),
    keys_and_values("turbo-4", "kivi-2"),
]


def median(call: Callable[[], object], repeats: int) -> float:
    """Seconds."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def stored(x: Tensor, form: Storage) -> LayerStore:
    store = LayerStore(x, x)
    store.set_storage(form)
    return store


def distortion(x: Tensor, form: Storage) -> float:
    keys = stored(x, form).keys
    return float((keys - x).square().sum() / x.square().sum())


def read(store: LayerStore) -> Tensor:
    return store.keys.clone() if store.storage.exact else store.keys


def both_ways(x: Tensor, repeats: int) -> tuple[float, float]:
    """Seconds of one query's products with keys in turbo-4: keys rotated back, and the query rotated."""
    positions = torch.arange(x.shape[2]).expand(x.shape[:3])
    entries = Turbo(AsIs.of(x, x, positions), 4, False, 0)
    query = torch.randn(*x.shape[:2], 1, x.shape[-1])
    turn = rotation(x.shape[-1], 0)
    keys = median(lambda: query @ entries.read(KEYS).transpose(-1, -2), repeats)
    queries = median(lambda: turn(query) @ entries.turned(KEYS, entries.slots.view).transpose(-1, -2), repeats)
    return keys, queries


def main(
    head_dim: Annotated[int, typer.Option("--head-dim", min=1, help="Channels of a head.")] = 64,
    tokens: Annotated[int, typer.Option("--tokens", min=200, help="Entries of each head.")] = 4000,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Reads that are timed.")] = 9,
) -> None:
    x = torch.randn(1, HEADS, tokens, head_dim, generator=torch.Generator().manual_seed(0))
    far = x.clone()
    far[..., 0] *= OUTLIER
    as_is = stored(x, stored_as("as_is"))
    plain = median(lambda: read(as_is), repeats)
    table = Table("storage", "bits a number", "distortion", "with a large channel", "read / as_is", box=box.SIMPLE)
    for form in FORMS:
        if form.exact:
            continue
        form.check(head_dim, x.device)
        store = stored(x, form)
        bits = 8 * store.kv_bytes / (2 * x.numel())
        seconds = median(lambda store=store: read(store), repeats)
        numbers = (f"{distortion(x, form):.5f}", f"{distortion(far, form):.5f}", f"{seconds / plain:.1f}")
        table.add_row(form.name, f"{bits:.2f}", *numbers)
    Console().print(table)
    keys, queries = both_ways(x, repeats)
    faster = "rotating the query" if queries < keys else "rotating the keys back"
    typer.echo(f"turbo-4, one query: {faster} is faster, by {max(keys, queries) / min(keys, queries):.1f} times.")


if __name__ == "__main__":
    run(main, __doc__)
