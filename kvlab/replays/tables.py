"""The measures of a replay, by their axes, and its numbers as rows of a tidy table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    import pandas as pd

AXES: dict[str, tuple[str, ...]] = {
    "recall": ("layer", "kv_head"),
    "window_recall": ("layer", "kv_head"),
    "step_recall": ("layer", "kv_head", "step"),
    "mass_lost": ("layer", "head", "step"),
    "output_error": ("layer", "head", "step"),
    "stored_bytes": ("step",),
    "read_bytes": ("step",),
}
"""Every measure of a replay, and over what it has one number each."""


SINKS: dict[str, tuple[str, ...]] = {"sink_share": ("layer", "head", "step")}
"""What is measured in addition to where a model has learnt sinks."""


def tidy(name: str, values: Tensor, axes: tuple[str, ...], layers: Sequence[int]) -> pd.DataFrame:
    """One row for each number of `values`, whose dimensions are `axes`: layer, kv_head, head, step, measure, value.

    Args:
        layers: the numbers in the model of the layers in `values`.
    """
    import pandas as pd

    grid = np.indices(tuple(values.shape)).reshape(len(axes), -1) if values.numel() else np.empty((len(axes), 0), int)
    columns = dict(zip(axes, grid, strict=True))
    if "layer" in columns:
        columns["layer"] = np.asarray(layers)[columns["layer"]]
    if "step" in columns:
        columns["step"] = columns["step"] + 1
    frame = pd.DataFrame(
        {
            axis: pd.array(columns[axis] if axis in columns else [pd.NA] * grid.shape[1], dtype="Int64")
            for axis in ("layer", "kv_head", "head", "step")
        }
    )
    if "step" not in axes:
        frame["step"] = pd.array([0] * len(frame), dtype="Int64")
    return frame.assign(measure=name, value=values.reshape(-1).double().numpy())
