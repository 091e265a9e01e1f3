"""The Triton kernel of `fused`: attention from one token of each sequence over entries where they are stored.

A program reads a share of the entries of one KV head, once for all query heads of its GQA group. It writes its output
and the logarithm of the sum under its softmax. Shares are added by these, as in flash-decoding (Dao et al., 2023).
The module can be imported without Triton, and does nothing then.
"""

# Types are checked where Triton is absent, too.
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any

try:
    import triton.language as tl
    from triton import jit
except ModuleNotFoundError:

    def jit(**_: Any) -> Any:
        return lambda function: function


@jit()
def _at(table, row, head, slot):
    """Pointers to slots of a head; a table is a tensor and the strides of a row, a head and a slot."""
    return table[0] + row * table[1] + head * table[2] + slot * table[3]


# These change at every step, and a kernel for each kind of number would be compiled while a model decodes.
@jit(do_not_specialize=["n", "share", "column", "columns"])
def attend(
    queries,  # [rows x kv_heads, GROUP, HEAD_DIM]
    slots,  # [rows x kv_heads, n]; not read unless SELECTED
    keys,  # tables, as those of `rounding`
    values,
    rounding,  # of PACKED: group numbers, steps and zeros of keys [groups, HEAD_DIM], steps and zeros of values
    starts,  # [rows x kv_heads] each: the head's first slot in the tables, what slots lie before those of the tables,
    before,  # and how many there are
    counts,
    outputs,  # [rows x kv_heads, GROUP, columns, HEAD_DIM]
    sums,  # [rows x kv_heads, GROUP, columns]
    kv_heads,
    n,
    share,
    column,  # of `outputs` and `sums`: the first program's
    columns,
    scale,
    GROUP: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    VALUE_GROUP: tl.constexpr,  # noqa: N803
    SELECTED: tl.constexpr,  # noqa: N803
    PACKED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program: `share` of `n` slots of one head."""
    number, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = number // kv_heads, number % kv_heads
    start, skipped, count = tl.load(starts + number), tl.load(before + number), tl.load(counts + number)
    # Blocks of a power of two hold a group and a head of any size.
    group, channels = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    channel = channels < HEAD_DIM
    inside = (group < GROUP) & channel
    query = tl.load(queries + (number * GROUP + group) * HEAD_DIM + channels, mask=inside, other=0.0)
    # Of a packed entry: byte i has channel i in its lower half, and channel i + HEAD_DIM / 2 in its upper half.
    element = channels % (HEAD_DIM // 2) if PACKED else channels
    shift = channels // (HEAD_DIM // 2) * 4

    most = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, share, BLOCK):
        index = split * share + first + tl.arange(0, BLOCK)
        slot = index.to(tl.int64)
        if SELECTED:
            slot = tl.load(slots + number * n + index, mask=index < n, other=-1) - skipped
        there = (index < n) & (slot >= 0) & (slot < count)
        slot += start
        wanted = there[:, None] & channel
        key = tl.load(_at(keys, row, head, slot)[:, None] + element, mask=wanted, other=0)
        value = tl.load(_at(values, row, head, slot)[:, None] + element, mask=wanted, other=0)
        if PACKED:
            of_key = tl.load(_at(rounding[0], row, head, slot), mask=there, other=0).to(tl.int64)[:, None]
            of_key = of_key * HEAD_DIM + channels
            step = tl.load(rounding[1] + of_key, mask=wanted, other=0.0).to(tl.float32)
            zero = tl.load(rounding[2] + of_key, mask=wanted, other=0.0).to(tl.float32)
            key = (((key >> shift) & 15).to(tl.float32) * step + zero).to(query.dtype)
            part = channels // VALUE_GROUP
            step = tl.load(_at(rounding[3], row, head, slot)[:, None] + part, mask=wanted, other=0.0).to(tl.float32)
            zero = tl.load(_at(rounding[4], row, head, slot)[:, None] + part, mask=wanted, other=0.0).to(tl.float32)
            value = (((value >> shift) & 15).to(tl.float32) * step + zero).to(query.dtype)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        logits = tl.where(there[None, :], logits, -1e30)
        larger = tl.maximum(most, tl.max(logits, 1))
        # A block without entries has its own largest logit, which none of them may take for theirs.
        weights = tl.where(there[None, :], tl.exp(logits - larger[:, None]), 0.0)
        shrunk = tl.exp(most - larger)
        total = total * shrunk + tl.sum(weights, 1)
        out = out * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        most = larger
    # A share without entries has zeros, and its sum outweighs nothing.
    divisor = tl.where(total > 0, total, 1.0)
    where = (number * GROUP + group) * columns + column + split
    tl.store(outputs + where * HEAD_DIM + channels, out / divisor[:, None], mask=inside)
    tl.store(sums + where, (most + tl.log(divisor))[:, None], mask=group < GROUP)
