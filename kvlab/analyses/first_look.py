"""The quickstart's view of one replay: where and when attention is lost, and which tokens it went to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvlab.analyses.findings import Findings
from kvlab.errors import KvlabError
from kvlab.replays.reference import reference
from kvlab.replays.replay import Replay
from kvlab.replays.results import Replays

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.traces.trace import Trace


MEASURES = ("recall", "mass_lost", "output_error")

AT_BUDGET = "{measure}/{policy}"


@dataclass(frozen=True)
class LostQuery:
    """One query of one head, and how much of its attention was lost."""

    layer: int
    head: int
    step: int
    mass_lost: float

    def __str__(self) -> str:
        where = f"layer {self.layer}, head {self.head}, step {self.step}"
        return f"{where}: {self.mass_lost:.0%} of its attention is gone"


def in_words(result: Replay, full: Replay) -> str:
    """The three measures of a replay and the bytes that it stores, in a line each; full: the full cache's replay."""
    lines = [f"{measure:>13}: {result.summary[measure]:.3f}" for measure in MEASURES]
    stored, of = (replay.summary["stored_bytes"] / 2**20 for replay in (result, full))
    return "\n".join([*lines, f"{'stored':>13}: {stored:.1f} MiB of {of:.1f} MiB"])


def by_policy(results: Replays) -> Findings:
    """The three measures of each policy: the summary as table, and metrics `recall/snapkv` and so on."""
    findings = Findings(results.summary)
    for result in results:
        for measure in MEASURES:
            findings.set(AT_BUDGET, result.summary[measure], measure=measure, policy=result.policy.name)
    return findings


def lost_by_head(result: Replay) -> pd.DataFrame:
    """Attention mass lost, averaged over decoding steps: one row for each layer, one column for each query head."""
    return pd.DataFrame(result.mass_lost.mean(-1).numpy(), index=list(result.trace.layers))


def lost_by_step(results: Replays) -> pd.DataFrame:
    """Attention mass lost at each decoding step, averaged over layers and heads: policy, step, mass_lost."""
    frames = [
        pd.DataFrame({"step": range(1, r.trace.steps + 1), "mass_lost": r.mass_lost.mean((0, 1)).tolist()}).assign(
            policy=r.policy.name
        )
        for r in results
    ]
    return pd.concat(frames, ignore_index=True)


def story(result: Replay, results: Replays) -> list[str]:
    """Describe the picture: where one policy loses attention, and which of several loses least and most."""
    lost, by_head = result.mass_lost, lost_by_head(result).to_numpy()
    layer, head = divmod(int(by_head.argmax()), by_head.shape[1])
    most = np.sort(by_head.ravel())[::-1][: max(1, by_head.size // 10)]
    early, late = (float(part.mean()) for part in (lost[..., : lost.shape[-1] // 2], lost[..., lost.shape[-1] // 2 :]))
    ordered = sorted(results, key=lambda one: one.summary["mass_lost"])
    extremes = [f"{one.policy.name} ({one.summary['mass_lost']:.1%})" for one in (ordered[0], ordered[-1])]
    return [
        f"{result.policy.name} loses {result.summary['mass_lost']:.1%} of the response's attention, {early:.1%} in its "
        f"first half and {late:.1%} in its second.",
        f"Of all that is lost the worst tenth of the heads has {most.sum() / by_head.sum():.0%}; head {head} of layer "
        f"{result.trace.layers[layer]} loses {by_head[layer, head]:.0%} of its own.",
        f"Of {len(ordered)} policies {extremes[0]} loses least and {extremes[1]} most.",
        "This is one prompt, so no interval shows how sure the numbers are. No paper prints such numbers. Next, "
        "measure several texts: a list of traces gives intervals over them.",
    ]


def worst(result: Replay) -> LostQuery:
    """The layer, head and step whose query lost the most attention."""
    flat = int(result.mass_lost.argmax())
    _, heads, steps = result.mass_lost.shape
    row, head, step = flat // (heads * steps), flat // steps % heads, flat % steps
    return LostQuery(result.trace.layers[row], head, step + 1, float(result.mass_lost[row, head, step]))


def lost_tokens(
    lm: LM, trace: Trace, result: Replay, query: LostQuery, limit: int = 8, around: int = 4
) -> pd.DataFrame:
    """The tokens that a query attended to most among those it could no longer read, each within its surroundings.

    Raises:
        KvlabError: the trace does not know its tokens.
    """
    if trace.ids is None:
        raise KvlabError("this trace was made from tensors alone, so its tokens are not known")
    row = trace.layout.index(query.layer)
    weights = reference(trace).at(query.step)[row, query.head].to("cpu", copy=True)
    read = result.kept(query.layer, query.step)[query.head * trace.kv_heads // trace.heads]
    weights[read[read >= 0]] = 0
    best = weights.topk(min(limit, len(weights)))
    rows = []
    for share, position in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        context = trace.ids[max(0, position - around) : position + around + 1]
        rows.append(
            {
                "position": position,
                "token": lm.decode(trace.ids[position : position + 1]),
                "attention": share,
                "within": lm.decode(context).replace("\n", " "),
            }
        )
    return pd.DataFrame(rows).round({"attention": 4})
