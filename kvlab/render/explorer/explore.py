"""`kvlab.explore(trace)`: sliders over policy, budget, layer, head and step, and what the query there lost.

Where widgets do not run (a code host, a static export) the same picture is shown without sliders.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from kvlab.attribution.results import Attribution
from kvlab.errors import KvlabError, whole
from kvlab.methods import Policy, registry, unknown
from kvlab.render.explorer import choices
from kvlab.render.explorer.effects import Picture
from kvlab.render.explorer.explorer import Explorer
from kvlab.render.explorer.query_view import Spot
from kvlab.render.explorer.texts import texts
from kvlab.traces.trace import opened

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.traces.trace import Trace

LEFT, RIGHT = "snapkv", "dapq"


@overload
def explore(trace: Attribution) -> Picture: ...
@overload
def explore(
    trace: Trace | str | Path,
    left: str | Policy = LEFT,
    right: str | Policy = RIGHT,
    *,
    budgets: Sequence[int] | None = None,
    budget: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    step: int | None = None,
    lm: LM | None = None,
    effects: Attribution | None = None,
) -> Explorer: ...
def explore(
    trace: Trace | str | Path | Attribution,
    left: str | Policy = LEFT,
    right: str | Policy = RIGHT,
    *,
    budgets: Sequence[int] | None = None,
    budget: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    step: int | None = None,
    lm: LM | None = None,
    effects: Attribution | None = None,
) -> Explorer | Picture:
    """Explore a trace by hand in JupyterLab: two policies side by side, one query, and what it lost.

    Args:
        trace: with a response; or the path of one that was saved. A result of `kvlab.attribute` is shown as it is: the
            text coloured by the cost of losing each token. It allows none of the other arguments.
        left, right: two policies, by name or as objects (also policies of the user, or two variants of the same).
        budgets: the stops of the budget slider; by default powers of two below the prompt's length, and the budgets of
            policies given as objects.
        budget: the budget to begin with; by default that of a policy given as an object, else the middle stop.
        layer, head, step: the query to begin with (step from 1); by default the worst under `left`
            (`Explorer.worst`).
        lm: its tokenizer shows the text; by default that of the model which the trace names.
        effects: the result of `kvlab.attribute(lm, policy, trace)`. The text and a map of the heads, coloured by the
            cost of losing each token, are shown below.

    Raises:
        KvlabError: a trace without a response, or a policy that needs more than this trace has. Also two policies that
            differ only in their budgets, or a query outside the trace.
    """
    if isinstance(trace, Attribution):
        return Picture(trace)
    trace = opened(trace)
    if not trace.steps:
        raise KvlabError("there is no query to look at: this trace has no response; capture it with new_tokens=32")
    for choice in (left, right):
        if isinstance(choice, str) and choice not in registry():
            raise KvlabError(unknown(choice))
    if choices.label(left) == choices.label(right) and choices.budget_of(left, trace) != choices.budget_of(
        right, trace
    ):
        raise KvlabError(
            f"both sides are {choices.label(left)}, and the slider gives both the same budget: choose two "
            "policies that differ in something else"
        )
    if effects is not None and (trace.ids is None or not effects.is_of(trace.ids[: trace.prompt_length])):
        raise KvlabError("the effects are of another prompt than the trace; take kvlab.attribute(lm, policy, trace)")
    stops = (
        choices.default_budgets(trace, left, right)
        if budgets is None
        else sorted({whole("a budget", b) for b in budgets})
    )
    if budget is not None:
        stops = sorted({*stops, whole("a budget", budget)})
    if not stops or min(stops) < 1:
        raise KvlabError(f"budgets must be whole numbers of entries from 1 on, and are {stops}")
    likely = (budget, choices.budget_of(left, trace), choices.budget_of(right, trace), stops[len(stops) // 2])
    begin = next(int(stop) for stop in likely if stop in stops)
    explorer = Explorer(trace, left, right, stops, begin, Spot(0, 0, 1), texts(trace, lm), effects)
    first = explorer.worst()
    explorer.spot = choices.checked(
        trace,
        layer=first.layer if layer is None else layer,
        head=first.head if head is None else head,
        step=first.step if step is None else step,
    )
    explorer.replay(explorer.chosen[1], explorer.budget)
    return explorer
