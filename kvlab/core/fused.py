"""Attention from one token by kvlab's Triton kernel, which reads selected or 4-bit entries where they are stored.

PyTorch's way first writes copies: the selected entries, or all entries in the model's precision. The kernel runs where
KVLAB_TRITON is 1 and the entries are on a GPU. It has been tested under Triton's interpreter alone.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from kvlab.core.dense_slots import DenseSlots
from kvlab.core.entries import AsIs, Entries
from kvlab.core.kivi import GROUP, Kivi, PackedCodes
from kvlab.core.slots import KEYS, VALUES, firsts, on_device
from kvlab.errors import KvlabError
from kvlab.lib import extras

SWITCH = "KVLAB_TRITON"
BLOCK = 64
"""How many entries a program reads at once."""
PROGRAMS = 512
"""How many programs share the entries, where they are many: a few for each processor of a large GPU."""


def attend(entries: Entries, queries: Tensor, slots: Tensor | None, scale: float) -> Tensor | None:
    """Attend from one token of each sequence; None where the kernel does not run, which leaves the step to PyTorch.

    It reads entries as they are, of given slots or where heads differ in number, and those of KIVI in 4 bits.

    Args:
        queries: `[rows, heads, 1, head_dim]`.
        slots: `[rows, kv_heads, n]` int64, -1 for none; all entries if None.
        scale: factor of the logits.

    Returns:
        As `queries`; zeros for a head without entries.

    Raises:
        KvlabError: KVLAB_TRITON is neither 1 nor 0, or is 1 on a GPU's machine without Triton.
    """
    if not wanted(queries.device):
        return None
    parts = _parts(entries, slots)
    if not parts or not _takes(entries, queries, parts):
        return None
    rows, heads, _, head_dim = queries.shape
    kv_heads = entries.shape[1]
    group = heads // kv_heads
    asked = queries.reshape(rows * kv_heads, group, head_dim).contiguous()
    chosen = None if slots is None else slots.contiguous()
    lengths = [part.length if slots is None else slots.shape[-1] for part in parts]
    shares = [_share(n, rows * kv_heads) for n in lengths]
    splits = [math.ceil(n / share) for n, share in zip(lengths, shares, strict=True)]
    outputs = torch.empty(*asked.shape[:2], sum(splits), head_dim, dtype=torch.float32, device=queries.device)
    sums = outputs.new_empty(outputs.shape[:3])
    before, column = firsts(rows, kv_heads, 0, 0, queries.device), 0
    for part, n, share, split in zip(parts, lengths, shares, splits, strict=True):
        counts = on_device(part.counts, queries.device)
        _launch(part, (asked, chosen, before, counts, outputs, sums), (n, share, split, column), scale)
        before, column = counts, column + split
    return (sums.softmax(-1)[:, :, None] @ outputs).view(queries.shape).to(queries.dtype)


def wanted(device: torch.device) -> bool:
    """Whether the kernel may run on a device: see `attend`."""
    switch = os.environ.get(SWITCH, "0")
    if switch not in ("0", "1"):
        raise KvlabError(f"{SWITCH} is 1 (kvlab's Triton kernel on a GPU), 0 or unset (PyTorch), and not {switch!r}")
    if switch == "0" or (device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1"):
        return False
    extras.need("triton")
    return True


def _parts(entries: Entries, slots: Tensor | None) -> list[AsIs]:
    """The parts of the entries that the kernel reads, from the oldest on; none where PyTorch's way is as good."""
    if type(entries) is AsIs and (slots is not None or entries.ragged):
        return [entries]
    if isinstance(entries, Kivi) and entries.old.bits == 4 and entries.old.slots.total:
        return [entries.old, entries.new]
    return []


def _takes(entries: Entries, queries: Tensor, parts: list[AsIs]) -> bool:
    """Whether these are numbers and nothing else: nothing to differentiate, and of one precision."""
    keys_and_values = [part.slots.tensors[name] for part in parts for name in (KEYS, VALUES)]
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in [queries, *keys_and_values])
    even = queries.dtype == entries.dtype and all(x.stride(-1) == 1 for x in keys_and_values)
    return even and not differentiated and queries.shape[-1] == entries.head_dim


def _share(n: int, heads: int) -> int:
    """How many of `n` slots a program takes, in whole blocks."""
    return BLOCK * math.ceil(n / (BLOCK * max(PROGRAMS // heads, 1)))


def _launch(
    part: AsIs, tensors: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor], sizes: tuple[int, ...], scale: float
) -> None:
    """Have the programs of one part write their columns of `outputs` and `sums`."""
    from kvlab.core import fused_kernels  # Triton takes a second to import

    queries, slots, before, counts, outputs, sums = tensors
    n, share, splits, column = sizes
    if not splits:
        return
    rows, kv_heads = part.shape
    dense, packed = isinstance(part.slots, DenseSlots), isinstance(part, PackedCodes)
    rounding: tuple[Any, ...] = ()
    if packed:
        steps = _table(part, f"{VALUES} step"), _table(part, f"{VALUES} zero")
        rounding = _table(part, GROUP), part.steps, part.zeros, *steps
    group, head_dim = queries.shape[1:]
    with torch.cuda.device_of(queries):
        fused_kernels.attend[rows * kv_heads, splits](
            queries,
            queries if slots is None else slots,
            _table(part, KEYS),
            _table(part, VALUES),
            rounding,
            firsts(rows, kv_heads, 0, 0, queries.device) if dense else on_device(part.slots.starts, queries.device),
            before,
            counts,
            outputs,
            sums,
            kv_heads,
            n,
            share,
            column,
            outputs.shape[2],
            scale,
            GROUP=group,
            HEAD_DIM=head_dim,
            VALUE_GROUP=part.group if packed else head_dim,
            SELECTED=slots is not None,
            PACKED=packed,
            # The products of a GPU are of 16 rows or more.
            ROWS=max(16, 1 << (group - 1).bit_length()),
            WIDTH=max(16, 1 << (head_dim - 1).bit_length()),
            BLOCK=BLOCK,
        )


def _table(part: AsIs, name: str) -> tuple[Tensor, int, int, int]:
    """A tensor of slots, and the strides of a row, a head and a slot; heads of unequal numbers lie in one row."""
    if isinstance(part.slots, DenseSlots):
        view = part.slots.view(name)
        return view, *view.stride()[:3]
    return part.slots.tensors[name], 0, 0, part.slots.tensors[name].stride(0)
