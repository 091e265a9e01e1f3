"""Speed and memory of policies against transformers' own full cache, in one process and in turns.

RocketKV figure 5, ZSMerge figure 3 and tables 1 and 4, CompilerKV table A1. All policies start from the same prompt.
Every round runs each of them once, odd rounds in reverse order, so that a drifting clock speed cancels; ratios are
taken within a round. Sequences of a batch have different prompts, and a policy decides for each of them.

On a GPU seconds are wall-clock time. On a CPU they are CPU time with one thread. On an idle machine this equals
wall-clock time. On a busy machine it leaves out the time of other processes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor
from transformers import DynamicCache

from kvlab.bench import clock, memory, meters, timing
from kvlab.core.adapter import copy_layer
from kvlab.core.hookable import text_config
from kvlab.core.quantised import stored_bytes
from kvlab.errors import KvlabError
from kvlab.lib import devices, progress_bars
from kvlab.live.session import compress
from kvlab.live.shared_prefill import shared_prefill
from kvlab.methods import Policy, policy
from kvlab.methods.dapq import DapQ

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.live.cache import LiveCache

FULL = "full"


def contenders(names: Sequence[str], budget: float) -> dict[str, Policy | None]:
    """`full` (transformers' own cache), then the named policies at one budget."""
    return {FULL: None} | {name: policy(name, budget=budget) for name in names}


def fitting(lm: LM, lengths: Sequence[int], steps: int) -> list[int]:
    """The `lengths` that leave room for `steps` and one more token in the model's context."""
    return [length for length in lengths if length + steps + 1 <= lm.context_length]


def loaded_bytes(lm: LM) -> int:
    """Bytes of all weights, with those of an input embedding that is not the output's."""
    return sum(stored_bytes(weight) for weight in lm.model.parameters())


def plain_cache(prefilled: LiveCache) -> DynamicCache:
    """The entries of a prefill as transformers' own cache; nothing is copied until a step adds to it."""
    layout = prefilled.layout
    cache = DynamicCache(config=text_config(prefilled.model)) if layout.mixed else DynamicCache()
    for number, layer in prefilled.others.items():
        cache.layers[number] = copy_layer(layer)
    for number, layer in zip(layout.compressed, prefilled.compressed, strict=True):
        (group,) = layer.groups
        cache.update(group.store.keys, group.store.values, number)
    return cache


@contextmanager
def _measuring(lm: LM, chosen: dict[str, Policy | None]) -> Iterator[None]:
    """One thread on a CPU; everything has run once before anything is timed."""
    with clock.one_thread(lm.device):
        ids, _ = meters.prompt(lm, min(64, lm.context_length // 2))
        for policy in chosen.values():
            with _session(lm, policy, 2):
                out = lm.model(ids, use_cache=True, logits_to_keep=1)
                _steps(lm, out.past_key_values, out.logits[:, -1:].argmax(-1), 2)
        yield


def _session(lm: LM, policy: Policy | None, steps: int) -> Any:
    if policy is None:
        return nullcontext()
    return compress(lm.model, policy, tokenizer=lm.tokenizer, max_new_tokens=steps)


def _steps(lm: LM, cache: Any, token: Tensor, steps: int) -> list[float]:
    """Seconds of each of `steps` greedy single-token passes."""
    times = [clock.busy(lm.device)]
    for _ in range(steps):
        out = lm.model(token, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        times.append(clock.busy(lm.device))
    return [after - before for before, after in pairwise(times)]


def _check(lm: LM, lengths: Sequence[int], batches: Sequence[int], steps: int, repeats: int) -> None:
    if min([*lengths, *batches, steps, repeats], default=0) < 1 or not lengths or not batches:
        raise KvlabError("lengths, batch sizes, steps and repeats are whole numbers of at least 1")
    if max(lengths) + steps + 1 > lm.context_length:
        raise KvlabError(f"{lm.name} takes {lm.context_length} tokens, fewer than {max(lengths)} and {steps + 1} more")


@torch.inference_mode()
def decoding(
    lm: LM,
    chosen: dict[str, Policy | None],
    lengths: Sequence[int],
    batches: Sequence[int] = (1,),
    steps: int = 16,
    repeats: int = 5,
    batched: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Time a decoding step and count stored bytes, by prompt length at batch 1, and by batch size at the shortest.

    One prefill serves all policies: each run branches off from it. The first step, in which a policy compresses, is not
    timed as a step.

    Args:
        chosen: from `contenders`.
        lengths: of the prompts, in tokens.
        batches: sequences at once; 1 is always measured.
        steps: decoding steps that are timed.
        repeats: rounds.
        batched: which of `chosen` to measure at batch sizes above 1 (None: all), in addition to the full cache.

    Returns:
        One row for each length, batch, policy and round, with columns of their names and:
        - seconds_per_step: the median over the steps.
        - first_step: seconds, compression included.
        - kv_bytes, and aux_bytes (the policy's auxiliary data).
        - read_bytes: of the last step.
        - peak_bytes: above the memory before. It is nan on a CPU, where it takes a process of its own: `kvlab bench
          memory`.
        A run that does not fit into a GPU's memory has nan.

    Raises:
        KvlabError: lengths that make no sense or exceed the model's context.
    """
    _check(lm, lengths, batches, steps, repeats)
    settings = [(length, 1) for length in sorted(lengths)] + [(min(lengths), n) for n in sorted(set(batches) - {1})]
    rows: list[dict[str, Any]] = []
    bar = progress_bars.counting(len(settings), "decoding", "setting")
    with bar, _measuring(lm, chosen):
        for length, batch in settings:
            taking_part = {
                name: policy
                for name, policy in chosen.items()
                if batch == 1 or batched is None or name == FULL or name in batched
            }
            rows += _decode_setting(lm, taking_part, length, batch, steps, repeats)
            bar.update()
    return pd.DataFrame(rows)


def _decode_setting(
    lm: LM, chosen: dict[str, Policy | None], length: int, batch: int, steps: int, repeats: int
) -> list[dict[str, Any]]:
    marks = {"length": length, "batch": batch}
    ids, _ = meters.prompt(lm, length, batch)
    try:
        with shared_prefill(lm.model, [policy for policy in chosen.values() if policy is not None]):
            out = lm.model(ids, use_cache=True, logits_to_keep=1)
    except torch.OutOfMemoryError:
        return [
            marks | {"policy": name, "round": turn} | _nothing() for turn, name in clock.rounds(list(chosen), repeats)
        ]
    prefilled, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    rows = []
    for turn, name in clock.rounds(list(chosen), repeats):
        try:
            measured = _decode(lm, chosen[name], prefilled, token, steps)
        except torch.OutOfMemoryError:
            measured = _nothing()
        rows.append(marks | {"policy": name, "round": turn} | measured)
    return rows


def _decode(lm: LM, policy: Policy | None, prefilled: LiveCache, token: Tensor, steps: int) -> dict[str, float]:
    counted = lm.device.type != "cpu" and devices.counts_peak(lm.device)
    with ExitStack() as opened:
        peak = opened.enter_context(memory.Peak(lm.device)) if counted else None
        session = opened.enter_context(_session(lm, policy, steps + 1))
        cache = plain_cache(prefilled) if session is None else session.branch(prefilled)
        first, *times = _steps(lm, cache, token, 1 + steps)
        stored = meters.stored(cache, session)
    return {
        "seconds_per_step": statistics.median(times),
        "first_step": first,
        "kv_bytes": stored["kv_bytes"],
        "aux_bytes": stored["aux_bytes"],
        "read_bytes": stored["read_bytes"],
        "peak_bytes": math.nan if peak is None else peak.bytes,
    }


def _nothing() -> dict[str, float]:
    names = ("seconds_per_step", "first_step", "kv_bytes", "aux_bytes", "read_bytes", "peak_bytes")
    return dict.fromkeys(names, math.nan)


@torch.inference_mode()
def first_tokens(lm: LM, chosen: dict[str, Policy | None], lengths: Sequence[int], repeats: int = 5) -> pd.DataFrame:
    """Time to the first token: each policy's own pass over the prompt, and the step that compresses.

    Returns:
        One row for each length, policy and round: seconds, prompt_seconds, step_seconds.
    """
    _check(lm, lengths, [1], 1, repeats)
    rows = []
    jobs = [(length, turn, name) for length in sorted(lengths) for turn, name in clock.rounds(list(chosen), repeats)]
    with _measuring(lm, chosen):
        for length, turn, name in progress_bars.each(jobs, "to first token", "run"):
            ids, _ = meters.prompt(lm, length)
            memory.tidy()
            try:
                if turn == 0 and lm.device.type != "cpu":
                    # A GPU chooses its kernels when it first meets a shape.
                    _first_token(lm, chosen[name], ids)
                prompt_seconds, step = _first_token(lm, chosen[name], ids)
            except torch.OutOfMemoryError:
                prompt_seconds = step = math.nan
            rows.append(
                {
                    "length": length,
                    "policy": name,
                    "round": turn,
                    "seconds": prompt_seconds + step,
                    "prompt_seconds": prompt_seconds,
                    "step_seconds": step,
                }
            )
    return pd.DataFrame(rows)


PEAKS = ("snapkv", "dapq")
"""Policies whose peak memory is compared: the one scores by queries of the prompt, the other by additional ones."""


def pseudo_windows(chosen: Mapping[str, Policy | None]) -> dict[str, int]:
    """How many pseudo-tokens each policy appends, for those that append some."""
    return {name: policy.window for name, policy in chosen.items() if isinstance(policy, DapQ)}


def peaks(lm: LM, model: str, budget: float, length: int, repeats: int) -> pd.DataFrame:
    """Measure the peak memory of a prompt and its first token, for the full cache and `PEAKS`.

    On a CPU each run has a process of its own.

    Args:
        model: the name by which a fresh process loads the model.
        length: of the prompt, in tokens.
        repeats: rounds; with none the table is empty.

    Returns:
        One row for each policy and round: policy, round, peak_bytes (above the loaded model). A run that does not fit
        into a GPU's memory has nan. The table is empty where the device does not count its peak.
    """
    chosen = contenders(PEAKS, budget)
    turns = clock.rounds(list(chosen), repeats if devices.counts_peak(lm.device) else 0)
    rows = []
    for turn, name in progress_bars.each(turns, "peak memory", "run"):
        try:
            peak = timing.peak_bytes(lm, timing.BenchmarkModel(model), timing.Contender(chosen[name]), length, 1, 1)
        except torch.OutOfMemoryError:
            peak = math.nan
        rows.append({"policy": name, "round": turn, "peak_bytes": peak})
    return pd.DataFrame(rows, columns=["policy", "round", "peak_bytes"])


def _first_token(lm: LM, policy: Policy | None, ids: Tensor) -> tuple[float, float]:
    with _session(lm, policy, 1):
        start = clock.busy(lm.device)
        out = lm.model(ids, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        prompt_seconds = clock.busy(lm.device) - start
        (step,) = _steps(lm, out.past_key_values, token, 1)
    return prompt_seconds, step
