"""kvlab's Triton kernel under Triton's interpreter, on the CPU: the script of `tests/core/test_fused.py`.

It prints JSON. The interpreter must be chosen before Triton is imported, which is why the script is a process of its
own.
"""

from __future__ import annotations

import json
import random
import sys

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

import kvlab
from kvlab.core import fused, fused_kernels
from kvlab.core.softmax import Softmax
from kvlab.core.storage import Storage, kivi
from kvlab.core.store import EMPTY, LayerStore
from kvlab.inputs import models
from kvlab.methods._base import clock

SEEDS = 120


def right_bfloat16() -> None:
    """Have the interpreter round to bfloat16 and multiply it as a GPU does: 3.7.1 cuts bits off, and takes the bits of
    bfloat16 for whole numbers in a product.
    """
    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def cast_impl(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        near = torch.from_numpy(np.array(src.data, dtype=np.float32)).bfloat16()
        return interpreter.TensorHandle(near.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    def create_dot(self, a, b, *others):
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *others)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot


def drawn_slots(rng: random.Random, store: LayerStore) -> torch.Tensor:
    """Different entries of each head, fewer of some heads, and none of a few."""
    counts = store.counts
    n = rng.choice([1, 2, 5, 17, 64, min(150, store.length)])
    slots = torch.full((*counts.shape, n), EMPTY)
    for head, count in zip(slots.flatten(0, 1), counts.flatten().tolist(), strict=True):
        chosen = sorted(rng.sample(range(count), min(count, rng.choice([n, n, max(n // 3, 1), 0]))))
        head[: len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
    return slots


def drawn_store(rng: random.Random, packed: bool, dtype: torch.dtype) -> LayerStore:
    rows, kv_heads, head_dim = rng.choice([1, 1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([64, 128, 96])
    head_dim = head_dim if packed else rng.choice([head_dim, 20, 80])
    length = rng.choice([40, 70, 129, 300] if packed else [1, 7, 40, 129, 300])
    shape = rows, kv_heads, length + 9, head_dim
    if rng.random() < 0.3:
        # As some models make them: heads lie beside each other.
        keys, values = (torch.randn(rows, length + 9, kv_heads, head_dim).transpose(1, 2).to(dtype) for _ in range(2))
    else:
        keys, values = (torch.randn(shape).to(dtype) for _ in range(2))
    # An outlying channel, as keys have.
    keys[..., 3] *= 8
    store = LayerStore(keys[:, :, :length], values[:, :, :length])
    if packed:
        store.set_storage(kivi(4, residual=rng.choice([0, 8, 32])))
    if length > 1 and rng.random() < 0.5:
        fewer = [sorted(rng.sample(range(length), rng.randint(1, length))) for _ in range(rows * kv_heads)]
        keep = torch.full((rows * kv_heads, max(map(len, fewer))), EMPTY)
        for head, chosen in zip(keep, fewer, strict=True):
            head[: len(chosen)] = torch.tensor(chosen)
        store.evict(keep.view(rows, kv_heads, -1))
    for new in range(length, length + rng.choice([0, 3, 9])):
        store.append(keys[:, :, new : new + 1], values[:, :, new : new + 1])
        store.quantise_pending()
        if rng.random() < 0.3 and store.length > 8:
            store.drop(0)
    return store


def exact(store: LayerStore, queries: torch.Tensor, slots: torch.Tensor | None, scale: float) -> torch.Tensor:
    """The output in float64, entry by entry."""
    out = torch.zeros(queries.shape, dtype=torch.float64)
    group = queries.shape[1] // store.kv_heads
    for row in range(queries.shape[0]):
        keys, values, positions = store.row(row)
        for head in range(queries.shape[1]):
            of = head // group
            some = positions[of] >= 0 if slots is None else slots[row, of][slots[row, of] != EMPTY]
            key, value = keys[of][some].double(), values[of][some].double()
            weights = (key @ queries[row, head, 0].double() * scale).softmax(0)
            out[row, head, 0] = weights @ value
    return out


def case(seed: int) -> dict:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.bfloat16])
    packed = rng.random() < 0.5
    store = drawn_store(rng, packed, dtype)
    slots = drawn_slots(rng, store) if rng.random() < 0.6 else None
    queries = torch.randn(store.rows, store.kv_heads * rng.choice([1, 2, 3, 4, 7, 8]), 1, store.head_dim).to(dtype)
    scale = rng.choice([store.head_dim**-0.5, 0.3])
    fused.PROGRAMS = rng.choice([1, 4, 512])
    found = store.attend(queries, slots, scale)
    label = f"{seed}: {'kivi' if packed else 'as is'}, {list(queries.shape)}, {store.kv_heads} KV heads"
    label += f", {'all of ' if slots is None else f'{slots.shape[-1]} of '}{store.length}"
    # Nothing of KIVI's is rounded yet, or PyTorch reads all of it where it lies.
    due = bool(store.rounded_slots.any()) if packed else slots is not None or store.ragged
    here = {"label": label, "dtype": str(dtype), "due": due, "ran": found is not None}
    here |= {"packed": packed, "selected": slots is not None, "heads": [*queries.shape[:2], store.kv_heads]}
    here |= {"head_dim": store.head_dim, "ragged": store.ragged, "most": 0 if slots is None else slots.shape[-1]}
    if found is None:
        return here
    fused.wanted, on = (lambda device: False), fused.wanted
    by_torch = clock._fused(store, queries, slots, None, Softmax(scale))
    fused.wanted = on
    right = exact(store, queries, slots, scale)
    # Both are rounded to bfloat16 at last, perhaps to neighbours.
    rounding = by_torch.abs() * (2**-7 if dtype == torch.bfloat16 else 0)
    here["far"] = ((found - by_torch).abs() - rounding).max().item()
    for name, output in (("wrong", found), ("wrong by torch", by_torch)):
        here[name] = (output.double() - right).abs().max().item()
    return here


def generated(name: str, storage: str | Storage, parameters: dict) -> dict:
    """The logits of a live run with and without the kernel, and how many layers' steps the kernel did."""
    lm = models.random_lm("tiny-llama-gqa", head_dim=32)
    prompt, logits, steps, computed = torch.arange(3, 93)[None], [], [], fused._computed

    def counted(*given):
        steps[-1] += 1
        return computed(*given)

    fused._computed = counted
    for on in (False, True):
        fused.wanted = lambda device, on=on: on
        steps.append(0)
        with kvlab.compress(lm, kvlab.policy(name, **parameters), storage=storage):
            asked = dict(max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
            logits.append(torch.stack(lm.model.generate(prompt, **asked).logits))
    fused._computed = computed
    layers = lm.model.config.num_hidden_layers
    return {"policy": name, "steps": steps, "due": 5 * layers, "far": (logits[0] - logits[1]).abs().max().item()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    right_bfloat16()
    assert isinstance(fused_kernels.attend, interpreter.InterpretedFunction)
    fused.wanted = lambda device: True
    found = {"cases": [case(seed) for seed in range(SEEDS)]}
    small = dict(window=6, kernel=3)
    found["runs"] = [
        generated("rocketkv", "as_is", dict(budget=24, **small)),
        generated("adakv", "as_is", dict(budget=36)),
        generated("snapkv", kivi(4, residual=8), dict(budget=64, **small)),
        generated("rocketkv", kivi(4, residual=8), dict(budget=40, **small)),
    ]
    json.dump(found, sys.stdout)
