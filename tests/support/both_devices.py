"""The same on the CPU and on a pretended GPU."""

from __future__ import annotations

import copy
import dataclasses

import pandas as pd
import torch

from kvlab.inputs import models
from support import pretend_gpu

TINY = dict(shape="tiny-llama-gqa", dtype="float32")


def on_gpu_like(made: models.LM) -> models.LM:
    """A copy of a model on the pretended GPU."""
    there = dataclasses.replace(made, model=copy.deepcopy(made.model))
    there.model.to(pretend_gpu.NAME)
    return there


def close(found, expected):
    torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3, equal_nan=True)


def same_tables(found: pd.DataFrame, expected: pd.DataFrame):
    pd.testing.assert_frame_equal(found, expected, check_exact=False, atol=1e-3, rtol=1e-3)
