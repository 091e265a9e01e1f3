"""Made-up cells of needles, whose correlations are known."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd


def made(policies=6, documents=6, seed=0) -> pd.DataFrame:
    """Cells of needles in which the output error ranks policies perfectly, recall the wrong way round, and mass not."""
    draw = np.random.default_rng(seed)
    rows = []
    for document, budget, policy in itertools.product(range(documents), (64, 128), range(policies)):
        loss = policy + draw.random() / 2
        rows.append(
            {
                "document": f"sotu/{document}",
                "kind": "needle",
                "prompt": document,
                "policy": f"p{policy}",
                "budget": budget,
                "recall": loss,
                "window_recall": 0.5,
                "step_recall": draw.random(),
                "mass_lost": draw.random(),
                "output_error": np.exp(loss),
                "kl": loss,
                "nll": loss + document,
                "right": float(policy < 3),
                "nll_full": float(document),
                "right_full": 1.0,
            }
        )
    return pd.DataFrame(rows)
