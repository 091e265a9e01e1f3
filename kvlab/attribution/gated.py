"""One layer's attention on the line from a policy's output to the full cache's, and each entry's share of the gradient.

With a the softmax over all entries, f = sum a v the full cache's output and o the policy's, over what it reads,

    f - o = sum over the entries e that the policy does not read of a_e (v_e - o).

A gate g_e for each of them leads from the policy (all 0) to the full cache (all 1). o(g) = o + sum g_e a_e (v_e - o).
Where all gates are equal this is o + g (f - o), and the derivative of a loss L by one gate is a_e (v_e - o) . dL/do(g).
Both identities hold with learnt sinks too, which take their share and have no value.

A gate on the unnormalised weight, exp of the logit, would not do: a small gate lets a dominant entry back already.

Where entries are stored rounded, o is the policy's output if it read the same entries exactly. The line begins at o~,
its output. Let w be an entry's unnormalised weight, and p its share among those read. W is the sum of w over them,
sinks included; w~, v~ and W~ are the rounded ones. With o' = sum p v~, exact keys and rounded values,

    o' - o~ = sum over what is read of 2 (w_e - w~_e) / (W + W~) (v~_e - (o~ + o') / 2)      (keys),
    o - o' = sum over what is read of p_e (v_e - v~_e)                                       (values),

so that f - o~ is the sum of three parts, each a sum over entries. Entries that are not rounded have no part in the last
two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.core import onednn
from kvlab.core.attention import exact
from kvlab.core.softmax import Softmax

AT_ONCE = {"cpu": 1 << 20}
"""Attention weights that are computed at once, by type of device: as many as a processor's cache can take."""
ELSEWHERE = 1 << 26


@dataclass
class LayerReads:
    """A prompt's entries in one layer, and which of all entries each step of the response reads.

    Attributes:
        keys, values: of the prompt, `[kv_heads, prompt, head_dim]`.
        read: bool `[sets, steps or 1, prompt + steps]`, a set for each KV head or for each query head; True where the
            policy reads the entry. Entries that come after a step count for nothing.
        rounding: of entries that are stored rounded; None where all are exact.
    """

    keys: Tensor
    values: Tensor
    read: Tensor
    rounding: Rounding | None = None

    @property
    def prompt(self) -> int:
        return self.keys.shape[1]

    def of(self, kv_head: int) -> HeadReads:
        """The same of one KV head, its prompt split into what is read by any step and what by none."""
        kv_heads = len(self.keys)
        read = self.read.unflatten(0, (kv_heads, -1))[kv_head]  # [sets of this head, steps or 1, prompt + steps]
        some = read[..., : self.prompt].flatten(0, 1).any(0)
        first, last = some.nonzero()[:, 0], (~some).nonzero()[:, 0]
        columns = torch.cat([first, torch.arange(self.prompt, read.shape[-1], device=first.device)])
        keys, values = exact(self.keys[kv_head]), exact(self.values[kv_head])
        rounding = None if self.rounding is None else self.rounding.of(kv_head, columns, self)
        parts = keys[first], values[first], keys[last], values[last]
        return HeadReads(first, last, *parts, read[..., columns], rounding)


@dataclass
class Rounding:
    """How entries of one layer were stored rounded, when the policy ran.

    Attributes:
        keys, values: rounded, `[sets, prompt + steps, head_dim]`; anything for an entry that never was.
        new_keys, new_values: of the response as the model made them in that run, `[kv_heads, steps, head_dim]`.
        when: bool `[sets, steps, prompt + steps]`, whether a step found the entry rounded.
    """

    keys: Tensor
    values: Tensor
    new_keys: Tensor
    new_values: Tensor
    when: Tensor

    def of(self, kv_head: int, columns: Tensor, layer: LayerReads) -> HeadRounding:
        """The same of one KV head, for the entries `columns`."""
        kv_heads, found = len(layer.keys), []
        when = self.when.unflatten(0, (kv_heads, -1))[kv_head][..., columns]
        for stored, old, new in (
            (self.keys, layer.keys, self.new_keys),
            (self.values, layer.values, self.new_values),
        ):
            exactly = torch.cat([exact(old[kv_head]), exact(new[kv_head])])[columns]
            off = exact(stored.unflatten(0, (kv_heads, -1))[kv_head][:, columns]) - exactly
            found.append(off.masked_fill_(~when.any(1)[..., None], 0))
        off_keys, off_values = found
        return HeadRounding(off_keys, off_values, when)


@dataclass
class HeadRounding:
    """How far one KV head's rounded entries are off, `first` and the response.

    Attributes:
        keys, values: rounded less exact, `[sets, first + steps, head_dim]`; 0 for what is never rounded.
        when: bool `[sets, steps, first + steps]`.
    """

    keys: Tensor
    values: Tensor
    when: Tensor


@dataclass
class HeadReads:
    """One KV head's entries: `first` are prompt positions that some step reads, `last` those that no step does.

    Attributes:
        read: bool `[sets or 1, steps or 1, first + steps]`, of what is in `first` and of the response.
        rounding: of the same entries; None where all are exact.
    """

    first: Tensor
    last: Tensor
    keys_first: Tensor
    values_first: Tensor
    keys_last: Tensor
    values_last: Tensor
    read: Tensor
    rounding: HeadRounding | None


@dataclass
class Stored:
    """How far the entries that some rows read are off: keys and values `[first + steps, head_dim]`, and `when`
    `[rows, first + steps]`, 1 where a row finds an entry rounded.
    """

    keys: Tensor
    values: Tensor
    when: Tensor


@dataclass
class Block:
    """Some rows (query heads x steps) of one point on the line and one KV head."""

    point: int
    rows: slice
    queries: Tensor  # [rows, head_dim], scaled
    keys: Tensor  # [first + steps, head_dim], of what some step reads with the response behind it
    values: Tensor
    visible: Tensor  # [rows, first + steps], causal
    read: Tensor  # the same, less what the policy does not read
    sinks: Tensor | None  # [rows, 1]
    stored: Stored | None  # None where all entries are exact

    def logits(self, head: HeadReads, softmax: Softmax) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the logits of the block's rows, capped where the model caps them.

        Returns:
            Three tensors. The first covers the response and the prompt entries that some step reads,
            `[rows, first + steps]`. The second covers the other prompt entries, `[rows, last]`. The third repeats the
            first with the keys as they are stored; it is None where all entries are exact.
        """
        first = onednn.by_transposed(self.queries, self.keys)
        last = onednn.by_transposed(self.queries, head.keys_last)
        if self.stored is None:
            return softmax.capped(first), softmax.capped(last), None
        stored = first + onednn.by_transposed(self.queries, self.stored.keys) * self.stored.when
        return softmax.capped(first), softmax.capped(last), softmax.capped(stored)


class Line:
    """The attention of one layer, on the line, for several points at once; it keeps what the backward pass finds.

    Args:
        layer: what the policy reads there.
        gates: `[points]`, where on the line each row of the batch stands.
        weights: `[points]`, what the gradient of each counts in the integral.

    Attributes:
        effects: `[kv_heads, prompt + steps]`, the integral's sum so far, of dL/dg: negative where losing the entry cost
            the response.
        rounding: `[2, kv_heads, prompt + steps]`, the same of rounded keys and of rounded values.
        attention: `[kv_heads, prompt + steps]`, the full cache's attention summed over the steps and the group's heads,
            at the points whose gate is 1.
    """

    def __init__(self, layer: LayerReads, gates: Tensor, weights: Tensor, softmax: Softmax):
        self.layer, self.gates, self.weights, self.softmax = layer, gates.tolist(), weights.tolist(), softmax
        kv_heads, length = len(layer.keys), layer.read.shape[-1]
        self.effects = exact(layer.keys).new_zeros(kv_heads, length)
        self.attention = torch.zeros_like(self.effects)
        self.rounding = self.effects.new_zeros(2, kv_heads, length)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The output `[points, heads, steps, head_dim]`, float32.

        Args:
            queries, keys, values: of the response, `[points, heads or kv_heads, steps, head_dim]`.
        """
        return _Attend.apply(exact(queries), exact(keys), exact(values), self)

    def blocks(self, head: HeadReads, h: int, queries: Tensor, keys: Tensor, values: Tensor) -> Iterator[Block]:
        """Rows that fit into memory at once; `queries` are scaled, `[points, kv_heads, group, steps, head_dim]`."""
        points, kv_heads, group, steps, _ = queries.shape
        length = len(head.first) + len(head.last) + steps
        some = max(1, AT_ONCE.get(queries.device.type, ELSEWHERE) // length)
        device = queries.device
        causal = torch.ones(steps, len(head.first) + steps, dtype=torch.bool, device=device)
        causal[:, len(head.first) :] = torch.ones(steps, steps, dtype=torch.bool, device=device).tril()
        visible = causal.expand(group, -1, -1).reshape(group * steps, -1)
        read = (head.read & causal).expand(group, -1, -1).reshape(group * steps, -1)
        sinks = self.softmax.group(h, kv_heads).sinks
        sinks = None if sinks is None else sinks.float().repeat_interleave(steps)[:, None]
        sets = 1 if head.rounding is None else len(head.rounding.keys)
        of_set = group * steps // sets
        for point in range(points):
            rows = queries[point, h].reshape(group * steps, -1)
            all_keys = torch.cat([head.keys_first, keys[point, h]])
            all_values = torch.cat([head.values_first, values[point, h]])
            for start in (begin for one in range(sets) for begin in range(one * of_set, (one + 1) * of_set, some)):
                part = slice(start, min(start + some, (start // of_set + 1) * of_set))
                yield Block(
                    point,
                    part,
                    rows[part],
                    all_keys,
                    all_values,
                    visible[part],
                    read[part],
                    None if sinks is None else sinks[part],
                    None if head.rounding is None else _stored(head.rounding, start // of_set, part, steps),
                )

    def heads(self) -> Iterator[tuple[int, HeadReads]]:
        for h in range(len(self.layer.keys)):
            yield h, self.layer.of(h)


def _stored(rounding: HeadRounding, one: int, rows: slice, steps: int) -> Stored:
    """Of the rows, which read the set `one`."""
    steps_of = torch.arange(rows.start, rows.stop, device=rounding.when.device) % steps
    keys, values = rounding.keys[one], rounding.values[one]
    return Stored(keys, values, rounding.when[one][steps_of].to(keys.dtype))


def _shaped(queries: Tensor, kv_heads: int, factor: float) -> Tensor:
    return (queries * factor).unflatten(1, (kv_heads, -1))


class _Attend(torch.autograd.Function):
    """o + g (f - o) and its gradients. Weights are computed anew in the backward pass, so that nothing of the size
    heads x steps x length outlives a block.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, line: Line) -> Tensor:
        softmax, kv_heads = line.softmax, keys.shape[1]
        shaped = _shaped(queries, kv_heads, softmax.scale(queries.shape[-1]))
        policy, full = shaped.new_empty(2, *shaped.shape)
        sums = shaped.new_empty(2, *shaped.shape[:-1])  # logarithms of the sums under both softmaxes
        for h, head in line.heads():
            for block in line.blocks(head, h, shaped, keys, values):
                first, last, stored = block.logits(head, softmax)
                first.masked_fill_(~block.visible, -torch.inf)
                of_read = (first if stored is None else stored).masked_fill(~block.read, -torch.inf)
                sum_read = _logsum(of_read, block.sinks)
                sum_full = torch.logaddexp(_logsum(first, block.sinks), _logsum(last, None))
                of_read.sub_(sum_read).exp_()
                o = _times(of_read, block.values)
                if block.stored is not None:
                    o += _times(of_read.mul_(block.stored.when), block.stored.values)
                first.sub_(sum_full).exp_()
                last.sub_(sum_full).exp_()
                f = _times(first, block.values) + _times(last, head.values_last)
                at = block.point, h
                for whole, part in ((policy, o), (full, f)):
                    whole[at].flatten(0, 1)[block.rows] = part
                for whole, part in zip(sums, (sum_read, sum_full), strict=True):
                    whole[at].flatten()[block.rows] = part[:, 0]
                if line.gates[block.point] == 1:
                    _add(line.attention[h], head, line.layer.prompt, first.sum(0), last.sum(0))
        gates = torch.tensor(line.gates, dtype=shaped.dtype, device=shaped.device).view(-1, 1, 1, 1, 1)
        ctx.save_for_backward(queries, keys, values, policy, full, sums)
        ctx.line = line
        return torch.lerp(policy, full, gates).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        queries, keys, values, policy, full, sums = ctx.saved_tensors
        line: Line = ctx.line
        softmax, kv_heads = line.softmax, keys.shape[1]
        factor = softmax.scale(queries.shape[-1])
        shaped = _shaped(queries, kv_heads, factor)
        gradient = gradients[0].unflatten(1, (kv_heads, -1))
        to_queries, to_keys, to_values = (
            shaped.new_empty(shaped.shape),
            torch.zeros_like(keys),
            torch.zeros_like(values),
        )
        steps = keys.shape[2]
        along = torch.stack([(gradient * policy).sum(-1), (gradient * full).sum(-1)])  # dL/do . o and dL/do . f
        for h, head in line.heads():
            for block in line.blocks(head, h, shaped, keys, values):
                at, g = (block.point, h), line.gates[block.point]
                out = gradient[at].flatten(0, 1)[block.rows]
                sum_read, sum_full = (each[at].flatten()[block.rows, None] for each in sums)
                of_policy, of_full = (each[at].flatten()[block.rows, None] for each in along)
                first, last, stored = block.logits(head, softmax)
                bend_first, bend_last = _slope(first, softmax), _slope(last, softmax)
                bend_read, of_exact = bend_first, of_policy
                shown_first = onednn.by_transposed(out, block.values)  # v . dL/do
                shown_last = onednn.by_transposed(out, head.values_last)
                shown_read, weight = shown_first, line.weights[block.point]
                if block.stored is None or stored is None:
                    read = (first - sum_read).masked_fill_(~block.read, -torch.inf).exp_()
                else:
                    bend_read = _slope(stored, softmax)
                    shown_read = shown_first + onednn.by_transposed(out, block.stored.values) * block.stored.when
                    stored.masked_fill_(~block.read, -torch.inf)
                    read = (stored - sum_read).exp_()
                    of_keys, of_values, of_exact = _rounding(
                        block, first, stored, sum_read, shown_first, shown_read, of_policy
                    )
                    _add(line.rounding[0, h], head, line.layer.prompt, weight * of_keys)
                    _add(line.rounding[1, h], head, line.layer.prompt, weight * of_values)
                first.masked_fill_(~block.visible, -torch.inf)
                first.sub_(sum_full).exp_()
                last.sub_(sum_full).exp_()
                # The derivative of an entry that the policy does not read is a (v - o) . dL/do.
                part_last = last * shown_last
                lost_last = part_last.sum(0) - (of_exact.T @ last)[0]
                lost_first = (first * (shown_first - of_exact)).masked_fill_(block.read, 0).sum(0)
                _add(line.effects[h], head, line.layer.prompt, weight * lost_first, weight * lost_last)
                mixed = g * first[:, -steps:] + (1 - g) * read[:, -steps:]
                slope = g * first * (shown_first - of_full)
                slope_read = (1 - g) * read * (shown_read - of_policy)
                slope_last = part_last.sub_(last.mul_(of_full)).mul_(g)
                if bend_first is not None and bend_read is not None and bend_last is not None:
                    slope, slope_read, slope_last = slope * bend_first, slope_read * bend_read, slope_last * bend_last
                slope += slope_read
                back = _times(slope, block.keys) + _times(slope_last, head.keys_last)
                if block.stored is not None:
                    back += _times(slope_read.mul_(block.stored.when), block.stored.keys)
                to_queries[at].flatten(0, 1)[block.rows] = back * factor
                to_keys[at] += slope[:, -steps:].T @ block.queries
                to_values[at] += mixed.T @ out
        return to_queries.flatten(1, 2), to_keys, to_values, None


def _rounding(
    block: Block,
    first: Tensor,
    stored: Tensor,
    sum_stored: Tensor,
    shown_exact: Tensor,
    shown_stored: Tensor,
    of_policy: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the parts that rounded keys and rounded values have in the gradient.

    Args:
        first, stored: exact and rounded logits, `[rows, first + steps]`; `stored` is -inf where nothing is read.
        sum_stored: the logarithm of the sum under the rounded softmax.
        shown_exact, shown_stored: v . dL/do of exact and of rounded values.
        of_policy: dL/do . o~, `[rows, 1]`.

    Returns:
        The parts of the keys and of the values, `[first + steps]` each. Then dL/do . o, `[rows, 1]`, of the output over
        the same entries if these were exact.
    """
    first = first.masked_fill(~block.read, -torch.inf)
    sum_exact = _logsum(first, block.sinks)
    share = (first - sum_exact).exp()
    of_exact, of_between = ((share * shown).sum(-1, keepdim=True) for shown in (shown_exact, shown_stored))
    middle = torch.logaddexp(sum_exact, sum_stored) - math.log(2)
    heavier = (first - middle).exp_() - (stored - middle).exp_()
    of_keys = (heavier * (shown_stored - (of_policy + of_between) / 2)).sum(0)
    return of_keys, (share * (shown_exact - shown_stored)).sum(0), of_exact


def _times(rows: Tensor, others: Tensor) -> Tensor:
    """`rows [r, n] @ others [n, m]`."""
    return onednn.by_transposed(rows, others.T)


def _logsum(logits: Tensor, sinks: Tensor | None) -> Tensor:
    found = logits.logsumexp(-1, keepdim=True)
    return found if sinks is None else torch.logaddexp(found, sinks)


def _slope(capped: Tensor, softmax: Softmax) -> Tensor | None:
    """The derivative of the soft cap, from its own output; None where there is none."""
    return None if softmax.softcap is None else 1 - (capped / softmax.softcap) ** 2


def _add(whole: Tensor, head: HeadReads, prompt: int, first: Tensor, last: Tensor | None = None) -> None:
    """Add to entries `[prompt + steps]` what was found of those in `first`, of the response, and of those in `last`."""
    n = len(head.first)
    whole.index_add_(0, head.first, first[:n])
    if last is not None:
        whole.index_add_(0, head.last, last)
    whole[prompt:] += first[n:]
