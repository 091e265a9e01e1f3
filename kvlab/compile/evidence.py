"""From what weights do alone to tables: a weight other than 1 only where its gain is clear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from kvlab.compile.marginal import ActionEffects, MarginalSettings, Measured
from kvlab.core.geometry import geometry
from kvlab.lib.files import replacing
from kvlab.methods._base.lookup import DecisionTables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlab.inputs.models import LM


def chosen(gains: NDArray[np.floating], rest: int, level: float) -> NDArray[np.integer]:
    """The best action of each state among those whose gain over the neutral one is clear, else that: int `[states]`.

    Args:
        gains: `[contexts, states, actions]`, the reward less that of the neutral action `rest`.
        level: false discovery rate over all states and actions (one-sided t-tests over contexts; Benjamini and
            Hochberg 1995).
    """
    mean, others = gains.mean(0), [action for action in range(gains.shape[2]) if action != rest]
    if len(gains) < 2 or not others:
        return np.full(gains.shape[1], rest)
    clear = np.zeros(mean.shape, dtype=bool)
    p = p_of_gains(gains[:, :, others])
    clear[:, others] = stats.false_discovery_control(p.ravel()).reshape(p.shape) < level
    best = np.where(clear, mean, -np.inf)
    best[:, rest] = 0.0
    return best.argmax(1)


def p_of_gains(gains: NDArray[np.floating]) -> NDArray[np.floating]:
    """One-sided p of each gain `[contexts, ...]` being above 0, `[...]`; 1 where nothing ever changed."""
    mean, spread = gains.mean(0), gains.std(0, ddof=1) / np.sqrt(len(gains))
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(spread > 0, mean / spread, np.where(mean == 0, -np.inf, np.sign(mean) * np.inf))
    return stats.t.sf(t, len(gains) - 1)


def head_weights(found: ActionEffects, settings: MarginalSettings, layers: int) -> NDArray[np.floating]:
    """The weight of each KV head, `[layers, kv_heads]`."""
    best = chosen(-found.heads, settings.neutral, settings.level)
    return np.array(settings.weights)[best].reshape(layers, -1)


def tables(measured: Measured, budget: int) -> DecisionTables:
    """The weights of heads for one budget; there are no thresholds."""
    from kvlab import __version__

    lm, settings, found = measured.lm, measured.settings, measured.effects(budget)
    shape = geometry(lm.model.config)
    weights = head_weights(found, settings, found.heads.shape[1] // shape.kv_heads)
    about = {
        "format": "kvlab-compilerkv-1",
        "sha256": lm.sha256,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "kv_heads": shape.kv_heads,
        "kvlab": __version__,
        "learnt": "alone",
        "budget": budget,
        "settings": settings.model_dump(mode="json"),
        "documents": [_source(name) for name in measured.documents],
        "contexts": len(found.names),
    }
    return DecisionTables(model=lm.name, heads=np.repeat(weights, shape.group, 1).tolist(), risk=None, **about)


def _source(signature: str) -> str:
    """The document of a window, `sotu/1867@sha` of `sotu/1867[0:900]@sha`."""
    name, _, sha = signature.rpartition("@")
    return f"{name.partition('[')[0]}@{sha}"


def mapped(tables: DecisionTables, lm: LM) -> DecisionTables:
    """Tables learnt on one model, mapped to another by relative depth; they note where they were learnt."""
    shape = geometry(lm.model.config)
    sha = str(getattr(tables, "sha256", ""))
    about = {
        "model": lm.name,
        "sha256": lm.sha256,
        "mapped_from": f"{tables.model}@{sha[:8]}".rstrip("@"),
        "kv_heads": shape.kv_heads,
        "dtype": str(lm.dtype).removeprefix("torch."),
    }
    return tables.mapped(len(lm.layout.compressed), shape.heads).model_copy(update=about)


def write(tables: DecisionTables, path: str | Path) -> Path:
    """Write the JSON file, a line for each layer; under its name only once it is whole."""
    fields = tables.model_dump(mode="json")
    lines = []
    for name, value in fields.items():
        if name in ("heads", "risk") and value is not None:
            rows = ",\n".join(f"  {json.dumps(layer)}" for layer in value)
            lines.append(f" {json.dumps(name)}: [\n{rows}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    with replacing(path) as temporary:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return Path(path)
