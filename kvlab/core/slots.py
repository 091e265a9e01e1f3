"""Slots of a store: what stands for none, taking some of them out of a tensor, and what tensors of slots are called."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvlab.errors import KvlabError

EMPTY = -1
KEYS, VALUES, POSITIONS = "keys", "values", "positions"


def padded(slots: Tensor) -> bool:
    """Whether any of the slots may stand for none; on a GPU always, since to know it would mean to wait for it."""
    # A single reduction takes a third of the time of a comparison and `any`, and this is asked at every step.
    return slots.numel() > 0 and (not slots.is_cpu or int(slots.min()) < 0)


def on_cpu(slots: Tensor) -> Tensor:
    """Copy slots or positions `[..., n]` to the CPU.

    A copy from a GPU loses the last columns that are empty in every row. To count them earlier would have meant to wait
    for the GPU.
    """
    if slots.is_cpu:
        return slots
    here = slots.cpu()
    used = (here != EMPTY).flatten(0, -2).any(0).nonzero()
    return here[..., : int(used[-1]) + 1 if len(used) else 0]


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers of all heads, int64 `[heads]`, to be read. Numbers that grow alike are copied to a GPU once, since a copy
    waits for it.
    """
    first = numbers[0]
    return _apart(tuple(n - first for n in numbers), device) + first


# A later caller may differentiate with the cached tensor, which must not be an inference tensor then.
@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def _apart(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


def pick(tensor: Tensor, slots: Tensor) -> Tensor:
    """Slots `[rows, kv_heads, n]` of `[rows, kv_heads, slots, ...]`; where `slots` is -1, whatever lies first."""
    return Picking(slots)(tensor)


class Picking:
    """Takes the same slots `[rows, kv_heads, n]` out of one tensor after the other, as `pick` does.

    Tensors with the same layout in memory, such as keys and values, share an index.
    """

    def __init__(self, slots: Tensor):
        self._slots = slots.clamp_min(0)
        self._rows: dict[tuple[int, int], Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        slots = self._slots
        if tensor.dim() == 4 and tensor.shape[2] and tensor.is_cpu and _in_whole_slots(tensor):
            # On a CPU, taking whole rows of one flat table is several times faster than an expanded gather.
            row, head, slot, _ = tensor.stride()
            rows, heads, n, width = tensor.shape
            apart = row // slot, head // slot
            table = tensor.as_strided(((rows - 1) * apart[0] + (heads - 1) * apart[1] + n, width), (slot, 1))
            if apart not in self._rows:
                self._rows[apart] = (slots + firsts(rows, heads, *apart, tensor.device)).flatten()
            return table.index_select(0, self._rows[apart]).view(rows, heads, slots.shape[-1], width)
        index = slots.view(*slots.shape, *[1] * (tensor.dim() - 3)).expand(*slots.shape, *tensor.shape[3:])
        return tensor.gather(2, index)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def firsts(rows: int, heads: int, row: int, head: int, device: torch.device) -> Tensor:
    """Return the number of slots before each head's first one, int64 `[rows, heads, 1]`; only to be read.

    It is cached, since it stays the same until a store grows and every layer needs it at every step.

    Args:
        row, head: slots from one row, or from one head, to the next.
    """
    first = torch.arange(rows, device=device)[:, None] * row + torch.arange(heads, device=device) * head
    return first[..., None]


def _in_whole_slots(tensor: Tensor) -> bool:
    """Whether rows and heads lie whole numbers of slots apart, so that one index counts slots through all of them."""
    row, head, slot, element = tensor.stride()
    return element == 1 and slot >= tensor.shape[3] and row % slot == head % slot == 0


def blank(name: str) -> int:
    """The content of an empty slot of a tensor of this name: zeros for keys and values, since 0 x anything else may be
    NaN.
    """
    return EMPTY if name == POSITIONS else 0


def as_numpy(tensor: Tensor):
    """Return a view of a tensor on the CPU as a NumPy array.

    NumPy can move a stretch into one that overlaps it; PyTorch needs a copy for that.
    """
    # NumPy knows no bfloat16.
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def tight_capacity(n: int) -> int:
    """Room for `n` slots after an eviction: little more than what is there, since freeing memory was its purpose."""
    return n + max(4, n // 32)


def growing_capacity(n: int) -> int:
    """Room for `n` slots that will be more: growing by an eighth, appending costs amortised constant time."""
    return n + max(16, n // 8)


def fault(slots: Tensor, length: int) -> str:
    """The fault of slots `[rows, heads, n]` of `length`, ascending and -1 at the end; empty if there is none."""
    before, after = slots[..., :-1], slots[..., 1:]
    order = ((after > before) & (before >= 0)) | (after == EMPTY)
    inside = (slots >= EMPTY) & (slots < length)
    if bool(order.all() & inside.all()):
        return ""
    if not bool(inside.all()):
        return f"positions outside 0 .. {length - 1}"
    return "positions twice" if bool(((after == before) & (after >= 0)).any()) else "positions that do not ascend"


def check_kept(who: str | None, keep: Tensor, shape: Sequence[int], length: int) -> None:
    """Raise KvlabError where `who` keeps what are no slots of a store; nothing is checked without `who`."""
    if who is None:
        return
    right = f"evict takes the slots that stay, int64 [{shape[0]}, {shape[1]}, <= {length}], ascending, -1 at the end"
    fits = isinstance(keep, Tensor) and keep.dtype is torch.int64 and keep.dim() == 3
    wrong = fault(keep, length) if fits and keep.shape[:2] == tuple(shape[:2]) else described(keep)
    if wrong:
        raise KvlabError(f"{who} evicts by {wrong}; {right}")


def check_dropped(who: str | None, slot: Tensor | int, shape: Sequence[int], length: int) -> None:
    """Raise KvlabError where `who` drops what is no slot of each head of a store; nothing is checked without `who`."""
    if who is None:
        return
    each = torch.as_tensor(slot)
    fits = each.dtype is torch.int64 and (not each.dim() or each.shape == tuple(shape[:2]))
    if not fits or int(each.min()) < 0 or int(each.max()) >= length:
        wrong = f"slots outside 0 .. {length - 1}" if fits else described(slot)
        raise KvlabError(f"{who} drops {wrong}; drop takes one slot, or int64 [{shape[0]}, {shape[1]}]")


def described(value: object) -> str:
    """Describe something in a few words: `int64 [2, 2, 40]` for a tensor."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "nothing" if value is None else type(value).__name__
