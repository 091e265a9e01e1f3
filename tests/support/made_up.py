"""Findings of made-up numbers, for figures to draw."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import pandas

from kvlab.analyses.findings import Findings


def made_up(effects: Mapping[str, Mapping[str, Sequence[Hashable]]], table: pandas.DataFrame | None = None) -> Findings:
    """A random number between 0 and 1 with an interval around it at each combination of each effect's keys."""
    random, findings = np.random.default_rng(7), Findings(pandas.DataFrame() if table is None else table)
    for effect, axes in effects.items():
        for keys in itertools.product(*axes.values()):
            value = random.uniform(0.1, 0.9)
            findings.set(effect, value, (value - 0.05, value + 0.08), **dict(zip(axes, keys, strict=True)))
    return findings


def values(findings: Findings, effect: str, by: str, **keys: Hashable) -> dict:
    """The values of an effect at certain keys, by one other key."""
    frame = findings.frame(effect)
    part = frame[(frame[list(keys)] == pandas.Series(keys)).all(axis=1)]
    return dict(zip(part[by], part["value"], strict=True))
