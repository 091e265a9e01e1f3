"""What may be chosen in a view of a trace: policies, budgets, and the query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.core.layout import listed
from kvlab.errors import KvlabError, whole
from kvlab.methods import Policy, has_budget, policy
from kvlab.workbench.explorer.look import Spot

if TYPE_CHECKING:
    from kvlab.traces.trace import Trace


def label(one: str | Policy) -> str:
    """What a policy is called here: its name, and where it is an object, the parameters that it was given besides."""
    if isinstance(one, str):
        return one
    fields = type(one).model_fields
    own = ", ".join(f"{name}={value!r}" for name, value in one if name != "budget" and value != fields[name].default)
    return f"{one.name}({own})" if own else one.name


def given(one: str | Policy, trace: Trace) -> int | None:
    """The entries that a policy was given as an object; None for a name, and for one that has no budget."""
    if not isinstance(one, Policy) or "budget" not in type(one).model_fields:
        return None
    return one.entries(trace.prompt_length)


def default_budgets(trace: Trace, *chosen: str | Policy) -> list[int]:
    """Powers of two from the least that the chosen policies work with up to the prompt's length, and their own
    budgets.
    """
    lowest = max(minimum(one) for one in chosen)
    own = {budget for one in chosen if (budget := given(one, trace)) is not None and budget >= lowest}
    stops = {2**k for k in range(4, 18) if lowest <= 2**k < trace.prompt_length} | own
    return sorted(stops) or [max(lowest, 1)]


def minimum(one: str | Policy) -> int:
    return one.minimum if isinstance(one, Policy) else made(one, 2**20).minimum


def made(name: str, budget: int) -> Policy:
    return policy(name, budget=budget) if has_budget(name) else policy(name)


def fits(trace: Trace, name: str, budget: int) -> bool:
    """Whether the trace holds what a policy needs (queries, pseudo-queries, accumulated attention)."""
    try:
        one = made(name, max(budget, minimum(name)))
        held = not one.pseudo_key or trace.prompt.pseudo(one) is not None
        trace.prompt.answers(one)
    except KvlabError:  # also of somebody's policy that cannot be made from a budget alone
        return False
    queries = trace.queries.shape[2] - trace.steps
    needed = trace.prompt_length if one.observes is None else min(one.observes, trace.prompt_length)
    if queries < needed or (one.accumulates and trace.accumulated is None):
        return False
    return held and not (one.reads_perplexity and trace.nll is None)


def checked(trace: Trace, layer: int, head: int, step: int) -> Spot:
    layers = trace.layers
    if whole("layer", layer) not in layers and layers[0] < layer < layers[-1]:
        raise KvlabError(f"{listed(layers)} of the model are in this trace, and layer {layer} is not")
    found = []
    for name, value, low, high in (
        ("layer", layer, layers[0], layers[-1]),
        ("head", head, 0, trace.heads - 1),
        ("step", step, 1, trace.steps),
    ):
        if not low <= whole(name, value) <= high:
            raise KvlabError(f"{name} {value} is outside this trace, which has {low} .. {high}")
        found.append(whole(name, value))
    return Spot(*found)
