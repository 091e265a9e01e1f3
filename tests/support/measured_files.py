"""Files of what is measured once for a model and looked up by policies: head scores, and CompilerKV's tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def head_scores(scores: Sequence[Sequence[float]], kv_heads: int) -> dict:
    """What a file of head scores holds; scores: `[layers][heads]`, by query head."""
    return dict(
        format="kvlab-heads-1",
        model="tensors",
        sha256="0" * 64,
        n_layers=len(scores),
        heads=len(scores[0]),
        kv_heads=kv_heads,
        contexts=[512],
        depths=[0.5],
        documents=["ferry@0"],
        seed=0,
        kvlab="0",
        scores=scores,
    )


def table_file(folder: Path, name: str = "tables", **content: object) -> str:
    """The path of a new file of tables; what `content` does not name is left out of it or null."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(dict(model="tensors", heads=None, risk=None) | content, default=np.ndarray.tolist))
    return str(path)
