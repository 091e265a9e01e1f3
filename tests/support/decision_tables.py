"""Replays of CompilerKV on random tensors, with tables written for them; shared by its tests."""

from __future__ import annotations

import warnings

import numpy as np
import torch

import kvlab
from support import layer_budgets
from support.measured_files import table_file
from support.tensors import layer

SMALL = dict(window=16, utility_window=8)
ENTROPIES, PERPLEXITIES = (2, 10), (1, 100)


def model(seed, heads=8, kv_heads=2, prompt=60, layers=3, new=0, n=None):
    return layer(seed, heads, kv_heads, prompt=prompt, layers=layers, new=new, n=n)


def trace_of(tensors, prompt, perplexity=None):
    """`perplexity` of the last prompt tokens, whatever their number."""
    found = kvlab.Trace.from_tensors(*tensors, prompt)
    if perplexity is not None:
        found.nll = torch.full((prompt,), float(np.log(perplexity)))
    return found


def quietly(trace, **parameters):
    """Replay, without the warning that neutral tables give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return layer_budgets.kept_sets(kvlab.replay(trace, kvlab.policy("compilerkv", **parameters)))


def decided(tensors, prompt, **parameters):
    return layer_budgets.decided("compilerkv", tensors, prompt, **parameters)


def flat(layers, threshold, bins=(20, 4)):
    return np.full((layers, *bins), threshold).tolist()


def tables(folder, layers, heads, weights=None, risk=None, **more):
    """A table file; what is not given is neutral."""
    neutral = dict(heads=np.ones((layers, heads)), risk=flat(layers, 0.0), entropy=ENTROPIES, perplexity=PERPLEXITIES)
    given = dict(heads=weights, risk=risk, **more)
    return table_file(folder, **neutral | {name: table for name, table in given.items() if table is not None})
