"""What the tests of policies and storages at equal stored bytes share: losses that are made up."""

from __future__ import annotations

import pandas as pd

MIB = 2**20


def losses(**curves) -> pd.DataFrame:
    """curves: POLICY__STORAGE -> {document: [(stored MiB of 100, loss), ...]}; every measure has the same values."""
    return pd.DataFrame(
        [
            {
                "document": document,
                "policy": system.split("__")[0],
                "budget": None if system.startswith("full") else number,
                "storage": system.split("__")[1],
                "measure": measure,
                "value": loss,
                "stored_bytes": stored * MIB,
                "full_bytes": 100 * MIB,
            }
            for system, documents in curves.items()
            for document, points in documents.items()
            for number, (stored, loss) in enumerate(points)
            for measure in ("output_error", "kl", "needles_lost")
        ]
    )


FEW = losses(
    full__as_is={"a": [(100, 0.0)], "b": [(100, 0.0)]},
    full__rounded={"a": [(20, 0.1)], "b": [(40, 0.2)]},
    one__as_is={"a": [(10, 0.9), (40, 0.5)], "b": [(10, 0.9), (40, 0.5)]},
    two__as_is={"a": [(10, 0.8), (40, 0.2)], "b": [(10, 0.8), (40, 0.2)]},
    two__rounded={"a": [(5, 0.8), (20, 0.2), (80, 0.0)], "b": [(5, 0.8), (20, 0.2), (80, 0.0)]},
    small__as_is={"a": [(1, 0.9), (5, 0.8)], "b": [(1, 0.9), (5, 0.8)]},
)
