"""The choices in a view of a trace: policies, budgets, and the query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.core.layout import listed
from kvlab.errors import KvlabError, whole
from kvlab.methods import Policy, has_budget, policy
from kvlab.render.explorer.query_view import Spot

if TYPE_CHECKING:
    from kvlab.traces.trace import Trace


def label(choice: str | Policy) -> str:
    """The name of a policy here: its own name, and for an object also the parameters that are not at their defaults."""
    if isinstance(choice, str):
        return choice
    fields = type(choice).model_fields
    own = ", ".join(f"{name}={value!r}" for name, value in choice if name != "budget" and value != fields[name].default)
    return f"{choice.name}({own})" if own else choice.name


def budget_of(choice: str | Policy, trace: Trace) -> int | None:
    """The budget of a policy given as an object, in entries; None for a name, and for a policy without a budget."""
    if not isinstance(choice, Policy) or "budget" not in type(choice).model_fields:
        return None
    return choice.entries(trace.prompt_length)


def default_budgets(trace: Trace, *chosen: str | Policy) -> list[int]:
    """Powers of two from the smallest budget that all chosen policies allow up to the prompt's length, and their own
    budgets.
    """
    lowest = max(minimum(choice) for choice in chosen)
    own = {budget for choice in chosen if (budget := budget_of(choice, trace)) is not None and budget >= lowest}
    stops = {2**k for k in range(4, 18) if lowest <= 2**k < trace.prompt_length} | own
    return sorted(stops) or [max(lowest, 1)]


def minimum(choice: str | Policy) -> int:
    return choice.minimum if isinstance(choice, Policy) else made(choice, 2**20).minimum


def made(name: str, budget: int) -> Policy:
    return policy(name, budget=budget) if has_budget(name) else policy(name)


def fits(trace: Trace, name: str, budget: int) -> bool:
    """Whether the trace holds what a policy needs (queries, pseudo-queries, accumulated attention)."""
    try:
        policy = made(name, max(budget, minimum(name)))
        needs = policy.needs
        has_pseudo = needs.pseudo is None or trace.prompt.pseudo(policy) is not None
        trace.prompt.check_inputs(policy)
    except KvlabError:  # also raised by a user's policy that cannot be made from a budget alone
        return False
    queries = trace.queries.shape[2] - trace.steps
    if queries < needs.window(trace.prompt_length) or (needs.accumulated and trace.accumulated is None):
        return False
    return has_pseudo and not (needs.perplexity and trace.nll is None)


def checked(trace: Trace, layer: int, head: int, step: int) -> Spot:
    layers = trace.layers
    if whole("layer", layer) not in layers and layers[0] < layer < layers[-1]:
        raise KvlabError(f"{listed(layers)} of the model are in this trace, and layer {layer} is not")
    numbers = []
    for name, value, low, high in (
        ("layer", layer, layers[0], layers[-1]),
        ("head", head, 0, trace.heads - 1),
        ("step", step, 1, trace.steps),
    ):
        if not low <= whole(name, value) <= high:
            raise KvlabError(f"{name} {value} is outside this trace, which has {low} .. {high}")
        numbers.append(whole(name, value))
    return Spot(*numbers)
