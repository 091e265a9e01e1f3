"""What the tests of policies at equal bytes share: curves that are made up."""

from __future__ import annotations

import pandas as pd

MIB = 2**20


def table(**curves) -> pd.DataFrame:
    """curves: policy -> {document: [(stored MiB, read MiB, output error), ...]}; every other measure is the same."""
    rows = [
        {
            "document": document,
            "policy": policy,
            "budget": number,
            "stored_bytes": stored * MIB,
            "read_bytes": read * MIB,
            "full_bytes": 100 * MIB,
            "output_error": error,
            "mass_lost": error,
            "recall": 1 - error,
            "window_recall": 0.5,
            "step_recall": 0.5,
        }
        for policy, documents in curves.items()
        for document, points in documents.items()
        for number, (stored, read, error) in enumerate(points)
    ]
    return pd.DataFrame(rows)


FEW = table(
    keeps={"a": [(10, 10, 0.4), (40, 40, 0.2)], "b": [(10, 10, 0.6), (40, 40, 0.4)]},
    selects={"a": [(100, 10, 0.1), (100, 40, 0.0)], "b": [(100, 10, 0.2), (100, 40, 0.1)]},
    small={"a": [(2, 2, 0.9), (5, 5, 0.8)], "b": [(2, 2, 0.9), (5, 5, 0.8)]},
)
