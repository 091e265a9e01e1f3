"""The limit of a budget: sets of entries chosen by what the response itself needs. References, not methods: they see
the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.attribution.attribute import integrated_effects, prefill, response_ids
from kvlab.attribution.path import Response
from kvlab.core.quantised import check_gradients
from kvlab.core.ranking import mark, top_positions
from kvlab.core.store import EMPTY
from kvlab.errors import KvlabError, whole
from kvlab.inputs.models import lm_of
from kvlab.methods import policy
from kvlab.methods._base.given_sets import GivenSets
from kvlab.traces.recording import prompt_ids

if TYPE_CHECKING:
    import pandas as pd

    from kvlab.inputs.corpus import Document
    from kvlab.inputs.models import LM
    from kvlab.traces.trace import Trace

SINKS, BASE = 4, 4
"""Of a small cache to begin with: at most `SINKS` first entries, and a share 1 / `BASE` of the budget of the newest."""


def oracle_attention(trace: Trace, budget: int) -> GivenSets:
    """The sets of the policy `oracle_attention` on a trace, as a policy that also runs live and can be attributed.

    Args:
        trace: with a response.
        budget: entries for each layer and KV head.

    Raises:
        KvlabError: a trace without a response.
    """
    oracle = policy("oracle_attention", budget=whole("budget", budget))
    sets = oracle.choose(trace.prompt.seen_by(oracle), budget)
    return GivenSets(budget=budget, sets=sets.cpu(), source=oracle.name, oracle=True)


@dataclass
class Limit:
    """The best sets that were found for a budget.

    Attributes:
        policy: these sets, to replay, run or attribute.
        loss: of the response with them, in nats.
        full_loss: with the full cache.
        rounds: one row for each candidate: sets (what it was made from), loss, kept (whether it was the best so far).
    """

    policy: GivenSets
    loss: float
    full_loss: float
    rounds: pd.DataFrame


def oracle_effect(
    lm: LM | torch.nn.Module,
    text: str | Document | Tensor | Sequence[int],
    budget: int,
    new_tokens: int = 32,
    *,
    response: str | Sequence[int] | Tensor | None = None,
    rounds: int = 6,
    points: int = 8,
    chat: str | bool = "auto",
) -> Limit:
    """Search for the sets that cost the response least, guided by the effects of entries.

    The search attributes a small cache of first and newest entries, and fills it up by effect. The gold sets of
    `oracle_attention` are a candidate, too. Each further round keeps the better half of the best sets, attributes from
    there, and fills up again. New sets replace the best ones only where the measured loss falls; after a round without
    such a fall, the next one keeps more. The search is greedy: a better set may exist.

    Args:
        lm, text, new_tokens, response, chat: as `kvlab.attribute` takes them.
        budget: entries for each layer and KV head.
        rounds: how many times the best sets are attributed again.
        points: on the line of each attribution.
    """
    import pandas as pd

    lm = lm_of(lm)
    ids, _ = prompt_ids(lm, text, chat)
    given = None if response is None else response_ids(lm, response)
    tokens = whole("new_tokens", new_tokens) if given is None else len(given)
    if tokens < 2:
        raise KvlabError("an oracle needs a response of two tokens or more")
    check_gradients(lm.model, "oracle_effect")
    made, _ = prefill(lm, [policy("full")], ids, given, tokens)
    budget = min(whole("budget", budget), len(ids))
    everything = torch.arange(len(ids)).expand(*_shape(made), -1)
    full = made.forward(_reads(made, everything), torch.ones(1, device=lm.device))
    full_loss = float(full.values[0])
    if budget == len(ids):
        kept = GivenSets(budget=budget, sets=everything, source="oracle_effect", oracle=True)
        return Limit(kept, full_loss, full_loss, pd.DataFrame())
    attention = torch.stack([line.attention.cpu() for line in full.lines])[..., : made.prompt]
    sinks, newest = min(SINKS, budget // BASE), budget // BASE
    small = torch.cat([torch.arange(sinks), torch.arange(len(ids) - newest, len(ids))]) if newest else torch.arange(1)
    effects = _effects(made, small.expand(*_shape(made), -1), points)
    scores = effects.index_fill(-1, small, torch.inf)
    best, best_loss, rows = torch.empty(0), torch.inf, []
    candidates = [("small cache", top_positions(scores, budget)), ("attention", top_positions(attention, budget))]
    for name, sets in candidates:
        loss = _loss(made, sets)
        rows.append({"sets": name, "loss": loss, "kept": loss < best_loss})
        best, best_loss = (sets, loss) if loss < best_loss else (best, best_loss)
    hold = 0.5
    for number in range(rounds):
        ranked = scores.gather(-1, best.clamp_min(0)).masked_fill(best == EMPTY, -torch.inf)
        held = best.gather(-1, ranked.topk(max(1, int(hold * budget)), -1).indices.sort(-1).values)
        fresh = _effects(made, held, points).scatter_(-1, held, torch.inf)
        sets = top_positions(fresh, budget)
        loss = _loss(made, sets)
        rows.append({"sets": f"round {number + 1}, {held.shape[-1]} kept", "loss": loss, "kept": loss < best_loss})
        if loss < best_loss:
            best, best_loss, scores = sets, loss, fresh
        else:
            hold = (1 + hold) / 2
    found = GivenSets(budget=budget, sets=best, source="oracle_effect", oracle=True)
    return Limit(found, best_loss, full_loss, pd.DataFrame(rows))


def _shape(made: Response) -> tuple[int, int]:
    return len(made.entries), len(made.entries[0][0])


def _reads(made: Response, sets: Tensor) -> list[Tensor]:
    """The entries that each step reads with the prompt cut to these sets `[layers, kv_heads, n]`; all else stays."""
    length = made.prompt + made.steps
    read = torch.zeros(*sets.shape[:2], length + 1, dtype=torch.bool)
    mark(read, sets)
    read[..., made.prompt :] = True
    return list(read[..., :-1, None].transpose(-1, -2).to(made.lm.device))


def _loss(made: Response, sets: Tensor) -> float:
    return float(made.forward(_reads(made, sets), torch.zeros(1, device=made.lm.device)).values[0])


def _effects(made: Response, sets: Tensor, points: int) -> Tensor:
    """Of the prompt's entries, `[layers, kv_heads, prompt]`; 0 for those in the sets."""
    effects, _ = integrated_effects(made, _reads(made, sets), points)
    return effects[..., : made.prompt].cpu()
