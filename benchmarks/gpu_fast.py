"""Speed and memory of models of published shapes: the parts "fast" and "lab" of `gpu.py`."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import common
import torch
from gpu_journal import Item, Row, sentence

import kvlab
from kvlab.analyses.speed.footprint import LLAMA_2_13B
from kvlab.bench import clock, memory, meters, timing
from kvlab.core import fused
from kvlab.core.geometry import Geometry, geometry
from kvlab.core.storage import stored_as
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError, nearest
from kvlab.inputs import models
from kvlab.lib import devices, extras
from kvlab.methods._base.clock import attend

MIB = 2**20
WARM = 2048  # tokens of the run that is not counted
LONGEST = {"max_position_embeddings": 131072}
"""For shapes of short contexts: with random weights positions beyond them are as good."""


@dataclass(frozen=True)
class Size:
    """Lengths, budgets, rounds and other sizes for the measurements of one shape."""

    shape: str
    lengths: tuple[int, ...] = (16384, 32768, 98304)
    budgets: tuple[int, int] = (256, 512)
    rounds: int = 3
    steps: int = 32
    batches: tuple[tuple[str, int, int, int], ...] = (
        ("llama-2-7b", 1024, 4, 256),
        ("llama-2-7b", 1024, 8, 256),
        ("llama-2-7b", 55296, 1, 18432),
        ("llama-2-13b", 256, 2, 256),
        ("llama-2-13b", 2048, 2, 256),
    )
    """Shape, tokens of each prompt, prompts, and zsmerge's budget, as in ZSMerge's tables 1 and 4 and its figure 3. The
    tables do not state the budget."""
    generated: tuple[int, ...] = (1024, 12288)
    prompt: int = 1024
    captured: int = 32768
    attributed: int = 4096
    replayed: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    changes: dict[str, Any] = field(default_factory=dict)


_CHANGES: dict[str, dict[str, Any]] = {"llama-2-7b": LONGEST, "llama-2-13b": LONGEST | LLAMA_2_13B}
SIZES = {
    "llama-3.1-8b": Size("llama-3.1-8b"),
    # Their caches take four and six times as much for each token.
    "llama-2-7b": Size("llama-2-7b", lengths=(16384, 32768), captured=16384),
    "llama-2-13b": Size("llama-2-13b", lengths=(16384, 32768), captured=16384),
    "tiny": Size(
        "tiny",
        lengths=(64, 128),
        budgets=(40, 48),
        rounds=1,
        steps=2,
        batches=(("tiny", 64, 2, 40),),
        generated=(4, 8),
        prompt=64,
        captured=128,
        attributed=96,
        replayed=(40, 48),
    ),
}
REPLAYED = (
    "streamingllm",
    "snapkv",
    "h2o",
    "tova",
    "pyramidkv",
    "dapq",
    "morphkv",
    "zsmerge",
    "quest",
    "sparq",
    "rocketkv",
    "lagkv",
)


def size(shape: str) -> Size:
    """Raises KvlabError for another shape."""
    if shape not in SIZES:
        raise KvlabError(nearest(shape, SIZES, "shape of this benchmark"))
    return SIZES[shape]


@dataclass
class Model:
    """The model that was asked for last, with random weights made on the device in bfloat16; one at a time."""

    device: torch.device
    bandwidth: float = 0
    _shape: tuple[str, int | None] | None = None
    _lm: kvlab.LM | None = None

    def of(self, shape: str, layers: int | None = None) -> kvlab.LM:
        if self._lm is None or self._shape != (shape, layers):
            self._lm = None
            memory.tidy()
            self.bandwidth = self.bandwidth or meters.bandwidth(self.device)
            known = {"tiny": "tiny-llama-gqa", "llama-2-13b": "llama-2-7b"}.get(shape, shape)
            changes = _CHANGES.get(shape, {})
            self._lm = models.random_lm(known, layers, dtype="bfloat16", device=str(self.device), **changes)
            self._shape = shape, layers
        return self._lm


Counted = TypeVar("Counted")


def with_peak(lm: kvlab.LM, run: Callable[[], Counted]) -> tuple[Counted, int | None]:
    """Call `run`; return its result and its peak memory above the loaded model, None where torch does not count it."""
    if not devices.counts_peak(lm.device):
        return run(), None
    with memory.Peak(lm.device) as peak:
        found = run()
    return found, peak.bytes


def in_turns(
    lm: kvlab.LM,
    bandwidth: float,
    chosen: Sequence[timing.Contender],
    tokens: int,
    batch: int,
    steps: int,
    rounds: int,
    rows: list[Row],
) -> None:
    """The contenders in interleaved rounds, the full cache of transformers first; a row each of what there was time
    for. A contender that fails has its error in its row, and the others go on.
    """
    ids, _ = meters.prompt(lm, tokens, batch)
    samples: dict[timing.Contender, list[dict[str, float]]] = defaultdict(list)
    errors: dict[timing.Contender, str] = {}

    def tried(each: timing.Contender, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        try:
            return run()
        except Exception as error:
            errors[each] = sentence(error)
            return {}

    def counted(each: timing.Contender) -> dict[str, float]:
        numbers, peak = with_peak(lm, lambda: timing.generate(lm, ids, steps, each))
        return numbers if peak is None else numbers | {"peak_bytes": peak}

    try:
        for each in chosen:
            tried(each, lambda each=each: timing.generate(lm, ids[:, :WARM], 2, each))
        for _, each in clock.rounds(chosen, rounds):
            if each not in errors and (numbers := tried(each, lambda each=each: counted(each))):
                samples[each].append(numbers)
    finally:
        weights = meters.weight_bytes(lm.model)
        for each in chosen:
            row: Row = {"policy": each.name, "budget": getattr(each.policy, "budget", None)}
            row |= {"tokens": tokens, "batch": batch}
            if samples[each]:
                row |= summary(samples[each], samples[chosen[0]], weights, bandwidth)
            if samples[each] or each in errors:
                rows.append(row | ({"note": errors[each]} if each in errors else {}))


def summary(
    own: list[dict[str, float]], full: list[dict[str, float]], weights: float, bandwidth: float
) -> dict[str, float]:
    """Medians of the rounds, and ratios to the full cache's in the same rounds."""

    def median(name: str) -> float:
        return statistics.median(each[name] for each in own)

    def ratios(name: str) -> list[float]:
        pairs = list(zip(own, full, strict=False))
        return clock.ratios([mine[name] for mine, _ in pairs], [theirs[name] for _, theirs in pairs])

    read = own[-1]["read_bytes"] + own[-1]["uncompressed_bytes"]
    row = {
        "rounds": len(own),
        "tokens/s": median("tokens_per_second"),
        "ms a step": 1000 * median("time_per_output_token"),
        "bound, ms": 1000 * (weights + read) / bandwidth,
        "prompt, s": median("prompt_time"),
        "K and V, MiB": own[-1]["kv_bytes"] / MIB,
        "beside, MiB": own[-1]["aux_bytes"] / MIB,
    }
    if "peak_bytes" in own[-1]:
        row["peak, MiB"] = median("peak_bytes") / MIB
    if full:
        speeds = ratios("tokens_per_second")
        row |= {"speed-up": statistics.median(speeds), "least": min(speeds), "most": max(speeds)}
        row["prompt, ratio"] = statistics.median(ratios("prompt_time"))
        if "peak_bytes" in own[-1] and full[0]["peak_bytes"]:
            row["peak, ratio"] = statistics.median(ratios("peak_bytes"))
    return row


def decoding(model: Model, given: Size, tokens: int, rounds: int, rows: list[Row]) -> None:
    lm = model.of(given.shape)
    small, large = given.budgets
    at = [("full", None), ("rocketkv", small), *((name, large) for name in ("rocketkv", "snapkv", "quest", "sparq"))]
    chosen = [timing.Contender()]
    chosen += [timing.Contender(kvlab.policy(name, **({"budget": limit} if limit else {}))) for name, limit in at]
    in_turns(lm, model.bandwidth, chosen, tokens, 1, given.steps, rounds, rows)


def switched(value: str) -> AbstractContextManager[object]:
    """KVLAB_TRITON in the block: 1 for kvlab's own kernel, 0 for PyTorch."""
    return mock.patch.dict(os.environ, {fused.SWITCH: value})


def kernel(model: Model, given: Size, rows: list[Row]) -> None:
    """Attention of one layer's step by kvlab's Triton kernel against PyTorch."""
    if model.device.type != "cuda":
        rows.append({"what": "kvlab's Triton kernel", "note": "not measured: no CUDA"})
        return
    extras.need("triton")
    shape = geometry(model.of(given.shape).model.config)
    for tokens in given.lengths:
        for storage, budget in (("as_is", given.budgets[1]), ("kivi-4", None), ("kivi-4", given.budgets[1])):
            rows.append(by_kernel(model.device, shape, tokens, storage, budget, given.rounds))


def by_kernel(
    device: torch.device, shape: Geometry, tokens: int, storage: str, budget: int | None, rounds: int, steps: int = 50
) -> Row:
    """Both ways in turns over entries of random numbers: `budget` selected ones of each head, or all."""
    size = 1, shape.kv_heads, tokens, shape.head_dim
    keys, values = (torch.randn(size, dtype=torch.bfloat16, device=device) for _ in range(2))
    queries = torch.randn(1, shape.heads, 1, shape.head_dim, dtype=torch.bfloat16, device=device)
    store, policy = LayerStore(keys, values), kvlab.policy("full")
    store.set_storage(stored_as(storage))
    slots = None
    if budget is not None:
        slots = torch.rand(size[:3], device=device).topk(budget).indices.sort(-1).values
    ways, outputs = {"PyTorch": "0", "kernel": "1"}, {}
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for name, switch in ways.items():
            with switched(switch):
                outputs[name] = attend(policy, store, queries, slots, None).output.float()
        for _, name in clock.rounds(list(ways), rounds):
            with switched(ways[name]):
                marks = clock.Marks(device)
                marks.mark()
                for _ in range(steps):
                    attend(policy, store, queries, slots, None)
                marks.mark()
                times[name] += marks.gaps()
    by_torch, own = outputs.values()
    row: Row = {"what": f"a layer's step, {storage}", "tokens": tokens, "selected": budget, "rounds": rounds}
    row |= {f"{name}, µs": 1e6 * statistics.median(each) / steps for name, each in times.items()}
    row["speed-up"] = statistics.median(clock.ratios(times["PyTorch"], times["kernel"]))
    row["largest difference"] = (by_torch - own).abs().max().item()
    # Both are rounded to bfloat16 on their way, and at last.
    return row | {"right": torch.allclose(by_torch, own, atol=4e-3, rtol=2**-7)}


def merging(model: Model, given: Size, shape: str, tokens: int, batch: int, budget: int, rows: list[Row]) -> None:
    lm = model.of(shape)
    chosen = timing.contenders(["zsmerge", "h2o"], [budget])
    in_turns(lm, model.bandwidth, chosen, tokens, batch, given.steps, given.rounds, rows)


def long_responses(model: Model, given: Size, rows: list[Row]) -> None:
    """Memory of one layer after long responses: what a cache holds is proportional to the layers."""
    lm = model.of(given.shape, 1)
    chosen = timing.contenders(["morphkv"], [given.budgets[1]])
    for new_tokens in given.generated:
        found: list[Row] = []
        try:
            in_turns(lm, model.bandwidth, chosen, given.prompt, 1, new_tokens, 1, found)
        finally:
            rows += [{"policy": row.pop("policy"), "new tokens": new_tokens} | row for row in found]


def capturing(model: Model, given: Size, rows: list[Row]) -> None:
    lm = model.of(given.shape)
    ids = common.prompt(lm, given.captured)
    runs = {
        "plain prefill": lambda: common.prefill(lm, ids),
        "capture": lambda: kvlab.capture(lm, ids[None], 1, progress=False),
        "capture, accumulate=True": lambda: kvlab.capture(lm, ids[None], 1, accumulate=True, progress=False),
    }
    _compared(lm, runs, given.captured, min(given.rounds, 2), rows)


def _compared(lm: kvlab.LM, runs: dict[str, Callable[[], object]], tokens: int, rounds: int, rows: list[Row]) -> None:
    """The runs in turns, and a row each with the ratio to the first."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    peaks: dict[str, int | None] = {}
    common.prefill(lm, common.prompt(lm, min(tokens, WARM)))
    try:
        for _, name in clock.rounds(list(runs), rounds):
            spent, peaks[name] = with_peak(lm, partial(clock.seconds, lm.device, runs[name]))
            times[name].append(spent)
    finally:
        first = next(iter(times.values()))
        for name, own in times.items():
            if own:
                columns = common.time_columns(own[: len(first)], first[: len(own)])
                peak = peaks[name]
                row: Row = {"what": name, "tokens": tokens, "rounds": len(own), **columns}
                rows.append(row if peak is None else row | {"peak, MiB": peak / MIB})


def replaying(model: Model, given: Size, rows: list[Row]) -> None:
    """Replay every policy at every budget on one trace, against a prefill for each replay."""
    lm = model.of(given.shape)
    ids = common.prompt(lm, given.captured)
    policies = [kvlab.policy(name, budget=given.replayed[-1]) for name in REPLAYED]
    prefill = min(clock.seconds(lm.device, common.prefill, lm, ids) for _ in range(2))
    made: list[kvlab.Trace] = []
    needed = {"policies": policies, "pseudo": ["dapq"], "progress": False}
    captured = clock.seconds(lm.device, lambda: made.append(kvlab.capture(lm, ids[None], 4, **needed)))
    rows.append({"what": "capture", "replays": 0, "seconds": captured, "prefills": captured / prefill})
    total, count = captured, 0
    for each in policies:
        row: Row = {"what": each.name, "replays": len(given.replayed)}
        try:
            spent = clock.seconds(
                lm.device, lambda each=each: kvlab.replay(made[0], [each], budgets=given.replayed, progress=False)
            )
            total, count = total + spent, count + len(given.replayed)
            rows.append(row | {"seconds": spent, "prefills": spent / prefill})
        except Exception as error:
            rows.append(row | {"note": sentence(error)})
    share = {"prefills": total / prefill, "share of as many prefills": total / (count * prefill) if count else None}
    rows.append({"what": "all of it", "replays": count, "seconds": total} | share)


def attributing(model: Model, given: Size, rows: list[Row]) -> None:
    lm = model.of(given.shape)
    ids = common.prompt(lm, given.attributed)
    policy = kvlab.policy("snapkv", budget=given.budgets[1])
    runs = {
        "plain prefill": lambda: common.prefill(lm, ids),
        "attribute": lambda: kvlab.attribute(lm, policy, ids[None], 8, progress=False),
    }
    _compared(lm, runs, given.attributed, 1, rows)


def fast(model: Model, given: Size) -> list[Item]:
    items = []
    for number, tokens in enumerate(given.lengths):
        # The longest prompts take most, and run fewer rounds.
        run = partial(decoding, model, given, tokens, max(given.rounds - number, 1))
        items.append(Item("fast", given.shape, f"decoding after {tokens} tokens", run, 3 + number))
    items.append(Item("fast", f"{given.shape}, attention", "Triton kernel", partial(kernel, model, given)))
    long = partial(long_responses, model, given)
    items.append(Item("fast", f"{given.shape}, 1 layer", "memory over long responses", long, 2))
    for shape, tokens, batch, budget in given.batches:
        run = partial(merging, model, given, shape, tokens, batch, budget)
        items.append(Item("fast", shape, f"zsmerge, {batch} x {tokens} tokens", run, 1))
    return items


def lab(model: Model, given: Size) -> list[Item]:
    todo = {"capture": capturing, "replays": replaying, "attribution": attributing}
    return [Item("lab", given.shape, name, partial(run, model, given)) for name, run in todo.items()]
