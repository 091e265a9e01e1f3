"""A policy over a trace: what it would keep, read and lose, without running the model again.

The replay is the open loop: every decoding step sees the queries, keys and values that the full cache produced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import TypeAlias, overload

from kvlab.core.storage import Storage, stored_as
from kvlab.errors import KvlabError
from kvlab.instruments.probes import Probe, probe
from kvlab.lib import progress_bars
from kvlab.methods import Policy, has_budget, listed, policy
from kvlab.methods._base.contract import warned_of_raised
from kvlab.replays.engines import replay_one
from kvlab.replays.replay import Replay
from kvlab.replays.results import Replays
from kvlab.traces.trace import Trace, opened

OneTrace: TypeAlias = Trace | str | Path
"""A trace, or the path of a file that holds one."""

# Lists by what they hold: a str is itself a sequence of str, and must not count as several.
SeveralTraces: TypeAlias = list[Trace] | list[str] | list[Path] | list[OneTrace] | tuple[OneTrace, ...]
"""A list or a tuple of traces, or of the paths of their files."""

SeveralPolicies: TypeAlias = Sequence[Policy] | list[str] | list[Policy | str] | tuple[Policy | str, ...]
"""A list or a tuple of policies, or of their names."""

SeveralStorages: TypeAlias = list[str] | list[Storage] | list[str | Storage] | tuple[str | Storage, ...]
"""A list or a tuple of storages, or of their names."""


@overload
def replay(
    trace: OneTrace,
    policies: Policy | str,
    budgets: None = None,
    progress: bool | None = None,
    probes: Sequence[Probe | str] = (),
    storage: str | Storage = "as_is",
    *,
    k: int | None = None,
) -> Replay: ...
@overload
def replay(
    trace: OneTrace | SeveralTraces,
    policies: Policy | str | SeveralPolicies,
    budgets: Sequence[int | float],
    progress: bool | None = None,
    probes: Sequence[Probe | str] = (),
    storage: str | Storage | SeveralStorages = "as_is",
    *,
    k: int | None = None,
) -> Replays: ...
@overload
def replay(
    trace: SeveralTraces,
    policies: Policy | str | SeveralPolicies,
    budgets: None = None,
    progress: bool | None = None,
    probes: Sequence[Probe | str] = (),
    storage: str | Storage | SeveralStorages = "as_is",
    *,
    k: int | None = None,
) -> Replays: ...
@overload
def replay(
    trace: OneTrace,
    policies: Policy | str,
    budgets: None = None,
    progress: bool | None = None,
    probes: Sequence[Probe | str] = (),
    *,
    storage: SeveralStorages,
    k: int | None = None,
) -> Replays: ...
@overload
def replay(
    trace: OneTrace,
    policies: SeveralPolicies,
    budgets: None = None,
    progress: bool | None = None,
    probes: Sequence[Probe | str] = (),
    storage: str | Storage | SeveralStorages = "as_is",
    *,
    k: int | None = None,
) -> Replays: ...
def replay(
    trace: OneTrace | SeveralTraces,
    policies: Policy | str | SeveralPolicies,
    budgets: Sequence[int | float] | None = None,
    progress: bool | None = None,
    probes: Sequence[Probe | str] = (),
    storage: str | Storage | SeveralStorages = "as_is",
    *,
    k: int | None = None,
) -> Replay | Replays:
    """Replay policies on traces.

    Args:
        trace: one, or the path of one that was saved, or a list of these.
        policies: one policy, or a list of policies and names. A name needs `budgets`.
        budgets: every policy that has a budget is replayed at each of them.
        progress: show a progress bar; by default after five seconds, on a terminal or in a notebook run by hand.
        probes: instruments in addition to the replay's own measures, as in a live run; their numbers are in `records`.
        storage: the form of the kept entries (`kvlab list storages`), one or a list; every policy is replayed with each
            of them.
        k: size of the top that `recall`, `window_recall` and `step_recall` ask for; each policy's own budget unless
            given. Recalls of policies with different budgets are compared at one k.

    Returns:
        One `Replay` for one trace, one storage and one policy without budgets, else `Replays`.

    Raises:
        KvlabError: the trace lacks what a policy needs (pseudo-queries, a longer window), or a budget is too small.
            Also a storage that is unknown or does not fit the head size or device.
    """
    one_form = isinstance(storage, str | Storage)
    forms = [stored_as(form) for form in ([storage] if one_form else listed(storage, "storages"))]
    single = one_form and not isinstance(trace, list | tuple) and isinstance(policies, Policy | str) and budgets is None
    traces = [opened(given) for given in (trace if isinstance(trace, list | tuple) else [trace])]
    objects = at_budgets(policies, budgets)
    if not traces or not objects or not forms:
        raise KvlabError("a replay needs at least one trace, one policy and one storage")
    instruments = [probe(instrument) for instrument in listed(probes, "probes")]
    if single:
        return replay_one(traces[0], objects[0], instruments, forms[0], k)

    for t, form in product(traces, forms):
        form.check(t.keys.shape[-1], t.device, t.meta.get("model", ""))
    for t in traces:
        if warned_of_raised(objects, t.prompt_length):
            break
    jobs = list(product(traces, objects, forms))
    return Replays(
        replay_one(t, p, instruments, form, k) for t, p, form in progress_bars.each(jobs, "replay", "policy", progress)
    )


def at_budgets(policies: Policy | str | SeveralPolicies, budgets: Sequence[int | float] | None) -> list[Policy]:
    """Policies from objects and names: those that have a budget at each of `budgets`, if there are some."""
    if budgets is not None and (isinstance(budgets, str) or not isinstance(budgets, Iterable) or not list(budgets)):
        raise KvlabError(f"budgets is a list of at least one, such as [128, 0.25], and not {budgets!r:.60}")
    objects: list[Policy] = []
    for method in listed(policies):
        if budgets is not None and has_budget(method):
            objects.extend(policy(method, budget=budget) for budget in budgets)
        else:
            objects.append(policy(method))
    return objects
