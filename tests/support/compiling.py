"""What the tests of `kvlab compile` share: a short calibration on a random model."""

from __future__ import annotations

import numpy as np
import torch

import kvlab
from kvlab.compile import Settings
from kvlab.inputs.corpus import Document
from support.texts import FERRY

DOCUMENTS = [Document("ferry", FERRY), Document("ferry twice", FERRY[::-1] + "\n" + FERRY)]
SMALL = dict(
    budget=16,
    lengths=(60, 110),
    pool=7,
    contexts=4,
    samples=8,
    risk_samples=6,
    continuation=10,
    window=16,
    utility_window=8,
    thresholds=(0.0, 0.2, 0.4),
    bins=(6, 3),
    entropy=(3.9, 4.4),
    seed=1,
)


def settings(**changes) -> Settings:
    return Settings(**SMALL | changes)


def step_by_step(lm, context, policy):
    """Mean NLL of the continuation, one token at a time in a live session, and what was kept."""
    losses = []
    with torch.inference_mode(), kvlab.compress(lm.model, policy, turns="leave") as session:
        past = lm.model(context.ids[None], use_cache=True).past_key_values
        for now, then in zip(context.continuation[:-1], context.continuation[1:], strict=True):
            logits = lm.model(now.view(1, 1), past_key_values=past, use_cache=True).logits[0, -1]
            losses.append(-float(logits.double().log_softmax(-1)[then]))
        return np.mean(losses), [session.kept_after_prefill(layer)[None] for layer in range(lm.n_layers)]
