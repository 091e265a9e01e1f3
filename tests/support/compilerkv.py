"""What the tests of CompilerKV's analyses share: small random traces, tables that bite, and every analysis of them."""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path

import numpy as np
import torch

from kvlab.analyses.compilerkv import ablation, quality, theorem
from kvlab.analyses.findings import Findings
from kvlab.traces.trace import Trace
from support import oracles
from support.measured_files import table_file
from support.tensors import exact, layer, sets, with_attention

PROMPT, STEPS, LAYERS, HEADS, KV_HEADS = 600, 4, 3, 4, 2
BUDGETS, SHARE = (64, 128, 256), 0.12
SHARES = [0.07, SHARE]
CELLS = (20, 4)


def trace(seed, name, prompt=PROMPT):
    tensors = layer(seed, HEADS, KV_HEADS, prompt=prompt, new=STEPS, layers=LAYERS)
    accumulated = torch.rand(LAYERS, HEADS, prompt, generator=torch.Generator().manual_seed(seed))
    made = Trace.from_tensors(*tensors, prompt, accumulated=accumulated)
    made.nll = torch.full((prompt,), 1.5)
    made.meta["document"] = name
    return made


TRACES = [trace(seed, f"document {seed}") for seed in (1, 2, 3)]
RISK = np.random.default_rng(4).uniform(0.35, 0.55, (LAYERS, *CELLS)).round(3)
"""Thresholds that bite: between a third and three quarters of a layer's tokens pass, cell by cell."""
WEIGHTS = np.random.default_rng(5).uniform(0.2, 2, (LAYERS, HEADS)).round(3)


@functools.cache
def tables() -> str:
    """The file that holds both `WEIGHTS` and `RISK`."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return table_file(Path(folder.name), heads=WEIGHTS, risk=RISK)


@functools.cache
def analyses() -> dict[str, Findings]:
    """Every analysis of the notebook on `TRACES`, made once in a process."""
    return {
        "figure_2": quality.figure_2(TRACES, BUDGETS, tables()),
        "table_1": quality.table_1(TRACES, tables(), SHARE),
        "table_2": ablation.table_2(TRACES, tables(), 0.5),
        "steps": ablation.steps_to_snapkv(TRACES, SHARES),
        "theorem": theorem.theorem_4_1(TRACES, (64, 512), tables()),
    }


def kept(trace, policy):
    """What a policy keeps of a trace, layer by layer."""
    replay = quality.replayed(trace, policy)
    return [sets(replay.kept(index)) for index in range(LAYERS)]


def window_attention(trace, n=32):
    """Attention of the last n prompt queries, summed, in NumPy: `[layers, heads, prompt]`."""
    queries, keys = exact(trace.queries[:, :, : trace.prompt_length], trace.keys[:, :, : trace.prompt_length])
    total = np.zeros(queries.shape[:3])
    for row in range(LAYERS):
        for head in range(HEADS):
            for at in range(trace.prompt_length - n, trace.prompt_length):
                seen = keys[row, head * KV_HEADS // HEADS, : at + 1]
                total[row, head, : at + 1] += oracles.attention_weights(queries[row, head, at], seen)
    return total


def best(scores, n):
    """The n positions with the largest scores, ascending."""
    return sorted(np.argsort(-scores, kind="stable")[:n].tolist())


def lonely_head():
    """Three heads, of which the first alone attends to token 5, and both others to token 2."""
    length, size = 12, 13
    wanted = np.full((3, length, length), 0.0)
    for head, favourite in enumerate((5, 2, 2)):
        for row in range(length):
            wanted[head, row, : row + 1] = 0.1 / (row + 1)
            wanted[head, row, min(favourite, row)] += 0.9
    both = [with_attention(np.pad(rows, ((0, 1), (0, 1)), constant_values=1 / size)) for rows in wanted]
    queries = torch.tensor(np.stack([q[0] for q, _ in both]), dtype=torch.float32)[None]
    keys = torch.tensor(np.stack([k[0] for _, k in both]), dtype=torch.float32)[None]
    return Trace.from_tensors(queries, keys, torch.ones_like(keys), length)
