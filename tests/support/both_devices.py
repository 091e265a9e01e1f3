"""The same on the CPU and on a pretended GPU."""

from __future__ import annotations

import copy
import dataclasses

import pandas as pd
import torch

import kvlab
from kvlab.inputs import models
from support import pretend_gpu
from support.live_runs import prompt, small

TINY = dict(shape="tiny-llama-gqa", dtype="float32")
NAMES = sorted(kvlab.policies())
PROBES = ["mass_lost", "step_recall", "output_error", "entropy", "positions", "bytes"]


def captured(lm: models.LM, **options) -> kvlab.Trace:
    """A trace with all that any policy needs."""
    needed = dict(queries="all", accumulate=True, pseudo=[small("dapq")], policies=[small(name) for name in NAMES])
    return kvlab.capture(lm, prompt(60), 8, **needed, **options)


def on_gpu_like(made: models.LM) -> models.LM:
    """A copy of a model on the pretended GPU."""
    there = dataclasses.replace(made, model=copy.deepcopy(made.model))
    there.model.to(pretend_gpu.NAME)
    return there


def close(found, expected):
    torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3, equal_nan=True)


def same_tables(found: pd.DataFrame, expected: pd.DataFrame):
    pd.testing.assert_frame_equal(found, expected, check_exact=False, atol=1e-3, rtol=1e-3)
