"""Attention from one token by kvlab's Triton kernel, which reads selected or 4-bit entries where they are stored.

PyTorch's way first writes copies: the selected entries, or all entries in the model's precision. The kernel runs where
KVLAB_TRITON is 1 and the entries are on a GPU. It has been tested under Triton's interpreter on a CPU. It has never run
on a GPU.
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
from kvlab.core.packed_slots import PackedSlots
from kvlab.core.slots import KEYS, VALUES, firsts, on_device
from kvlab.errors import KvlabError
from kvlab.lib import extras

SWITCH = "KVLAB_TRITON"
STEP, ZERO = f"{VALUES} step", f"{VALUES} zero"
BLOCK = 1 << 14
"""Bytes of keys that a program reads at once: in float32 and for 128 channels they leave room for a second block."""
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
        KvlabError: on a GPU, where KVLAB_TRITON is neither 1 nor 0, or is 1 without Triton.
    """
    if not wanted(queries.device):
        return None
    parts = _parts(entries, slots)
    if not parts or not _takes(entries, queries, parts):
        return None
    return _computed(parts, queries, slots, scale)


def wanted(device: torch.device) -> bool:
    """Whether the kernel may run on a device: see `attend`."""
    if device.type != "cuda":
        return False
    switch = os.environ.get(SWITCH, "0")
    if switch not in ("0", "1"):
        raise KvlabError(f"{SWITCH} is 1 (kvlab's Triton kernel on a GPU), 0 or unset (PyTorch), and not {switch!r}")
    if switch == "1":
        extras.need("triton")
    return switch == "1"


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


def _computed(parts: list[AsIs], queries: Tensor, slots: Tensor | None, scale: float) -> Tensor:
    """The output, put together of shares that programs take of the entries."""
    from kvlab.core import fused_kernels  # Triton takes a second to import

    kernel: Any = fused_kernels.attend
    rows, heads, _, head_dim = queries.shape
    kv_heads, device = parts[0].shape[1], queries.device
    grouped = queries.reshape(rows * kv_heads, heads // kv_heads, head_dim).contiguous()
    width = _power(head_dim)
    block = min(128, max(16, BLOCK // (width * queries.element_size())))
    lengths = [part.length if slots is None else slots.shape[-1] for part in parts]
    # Whole blocks each.
    shares = [block * math.ceil(n / (block * max(PROGRAMS // len(grouped), 1))) for n in lengths]
    programs = [math.ceil(n / max(share, 1)) for n, share in zip(lengths, shares, strict=True)]
    outputs = torch.empty(*grouped.shape[:2], sum(programs), head_dim, dtype=torch.float32, device=device)
    sums = outputs.new_empty(outputs.shape[:3])
    none = before = firsts(rows, kv_heads, 0, 0, device)
    column = 0
    for part, n, share, some in zip(parts, lengths, shares, programs, strict=True):
        counts, rounding, value_group = on_device(part.counts, device), (), head_dim
        if isinstance(part, PackedCodes):
            rounding = _table(part, GROUP), part.steps, part.zeros, _table(part, STEP), _table(part, ZERO)
            value_group = part.group
        if some:
            with torch.cuda.device_of(queries):
                kernel[len(grouped), some](
                    grouped,
                    none if slots is None else slots.contiguous(),
                    _table(part, KEYS),
                    _table(part, VALUES),
                    rounding,
                    on_device(part.slots.starts, device) if isinstance(part.slots, PackedSlots) else none,
                    before,
                    counts,
                    outputs,
                    sums,
                    kv_heads,
                    n,
                    share,
                    column,
                    sum(programs),
                    scale,
                    GROUP=grouped.shape[1],
                    HEAD_DIM=head_dim,
                    VALUE_GROUP=value_group,
                    SELECTED=slots is not None,
                    PACKED=bool(rounding),
                    ROWS=_power(grouped.shape[1]),
                    WIDTH=width,
                    BLOCK=block,
                )
        before, column = counts, column + some
    return (sums.softmax(-1)[:, :, None] @ outputs).view(queries.shape).to(queries.dtype)


def _power(n: int) -> int:
    """The least power of two that is no less than `n` and 16, which is the least that a GPU's products take."""
    return max(16, 1 << (n - 1).bit_length())


def _table(part: AsIs, name: str) -> tuple[Tensor, int, int, int]:
    """A tensor of slots, and the strides of a row, a head and a slot; heads of unequal numbers lie in one row."""
    if isinstance(part.slots, DenseSlots):
        view = part.slots.view(name)
        row, head, slot = view.stride()[:3]
        return view, row, head, slot
    return part.slots.tensors[name], 0, 0, part.slots.tensors[name].stride(0)
