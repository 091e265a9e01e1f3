"""Made-up losses of two policies over the turns of two contexts."""

from __future__ import annotations

import pandas as pd

_OF = {  # by way: the losses of the turns, for each context
    "snapkv": {
        "each": ([0.1, 0.1], [0.3, 0.3]),
        "first": ([0.1, 0.5], [0.3, 0.9]),
        "none": ([0.7, 0.7], [1.1, 1.5]),
    },
    "keydiff": {
        "each": ([0.4, 0.4], [0.8, 0.8]),
        "first": ([0.4, 0.4], [0.8, 0.8]),
        "none": ([0.4, 0.4], [0.8, 0.8]),
    },
    "full": {way: ([0.0, 0.0], [0.0, 0.0]) for way in ("each", "first", "none")},
}

LOSSES = pd.DataFrame(
    [
        {
            "context": f"c{context}",
            "kind": "kv",
            "way": way,
            "policy": policy,
            "budget": None if policy == "full" else 64,
            "turn": turn,
            "nll": 0.5 + loss,
            "hits": 1.0 - loss / 10,
            "loss": loss,
        }
        for policy, ways in _OF.items()
        for way, contexts in ways.items()
        for context, losses in enumerate(contexts)
        for turn, loss in enumerate(losses, 1)
    ]
)
