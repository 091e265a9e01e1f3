"""The results that the verbs of a policy must give.

They are checked after each call of a verb that a user has written. So a mistake becomes an error in one sentence and
not a wrong number. kvlab's own policies give the same; its tests check them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from kvlab.core.slots import EMPTY, described, fault
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError

if TYPE_CHECKING:
    from kvlab.methods._base.needs import Needs
    from kvlab.methods._base.prompt import Prompt


class Checked(Protocol):
    """The parts of a policy that the checks need."""

    name: ClassVar[str]

    @property
    def needs(self) -> Needs: ...

    @property
    def asked(self) -> int | float | None: ...

    @property
    def minimum(self) -> int: ...

    def entries(self, prompt_length: int) -> int: ...

    def raised(self, prompt_length: int) -> bool: ...


def checked(verb: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The verb of a class, with a check of what it gives."""
    check = CHECKS[verb]

    @wraps(function)
    def call(self: Checked, *args: Any, **named: Any) -> Any:
        if verb in GUARDED:
            store = args[0] if args else named["store"]
            before, store.guard = store.guard, f"{_name(self)}: {verb}"
            try:
                return function(self, *args, **named)
            finally:
                store.guard = before
        result = function(self, *args, **named)
        check(self, verb, result, *args, *named.values())
        return result

    return call


def check_stored_budget(policy: Checked, stores: Sequence[LayerStore]) -> None:
    """Raise KvlabError where a policy that chooses has left more entries than its budget.

    The entries are averaged over the layers and KV heads of all stores.
    """
    if not policy.needs.chooses:
        return
    counts = [count for store in stores for count in store.counts.flatten().tolist()]
    if not any(store.ragged or store.length < store.seen for store in stores):
        return  # a policy may keep the whole prompt, and evict or select later
    check_budget(policy, counts, [store.budget for store in stores for _ in range(store.rows * store.kv_heads)])


def check_budget(policy: Checked, counts: Sequence[int], budgets: Sequence[int]) -> None:
    """Raise KvlabError where a policy that chooses has kept more than its budget, on average over layers and heads.

    Args:
        counts: entries that each layer and KV head keeps.
        budgets: entries that each of them may keep.
    """
    kept, paid, n = sum(counts), sum(budgets), len(budgets)
    if kept > paid:
        raise KvlabError(
            f"{_name(policy)}: choose kept {kept / n:.4g} entries for each layer and KV head on average, more than the "
            f"budget of {paid / n:.4g}"
        )


def check_runs_live(policy: Checked) -> None:
    """Raise KvlabError for a policy that sees the response: a live run has not written it yet."""
    if policy.needs.response:
        raise KvlabError(
            f"{_name(policy)} sees the response, which a live run has not written yet; replay it on a trace "
            "(kvlab.replay), or run the sets of kvlab.attribution.oracle.oracle_attention(trace, budget)"
        )


def warned_of_raised(policies: Iterable[Checked], prompt_length: int) -> bool:
    """Warn once where policies at one fraction of a prompt come to different entries, since some need more; whether it
    did.
    """
    by_fraction: dict[int | float | None, list[Checked]] = {}
    for policy in policies:
        by_fraction.setdefault(policy.asked, []).append(policy)
    for asked, several in by_fraction.items():
        raised = [policy for policy in several if policy.raised(prompt_length)]
        if raised and len({policy.entries(prompt_length) for policy in several}) > 1:
            known = ", ".join(dict.fromkeys(f"{_name(p)} {p.entries(prompt_length)}" for p in several))
            warnings.warn(
                f"at budget {asked:g} of {prompt_length} tokens policies differ in entries ({known}), since "
                f"{_name(raised[0])} needs at least {raised[0].minimum}; compare them at a larger budget",
                stacklevel=3,
            )
            return True
    return False


def _name(policy: Checked) -> str:
    return policy.name or type(policy).__name__


def _refuse(policy: Checked, verb: str, result: object, right: str, why: str = "") -> None:
    raise KvlabError(f"{_name(policy)}: {verb} gave {described(result)}{why}; it gives {right}")


def _sets(policy: Checked, prompt: Prompt) -> int:
    return prompt.heads if getattr(policy, "sets", "group") == "head" else prompt.kv_heads


def _scores(policy: Checked, verb: str, result: Any, prompt: Prompt, budget: int | None = None) -> None:
    right = "a number for each token, float [rows, kv_heads, length]"
    shape = (prompt.rows, _sets(policy, prompt), prompt.length)
    if not isinstance(result, Tensor) or result.dtype is torch.bool or result.is_complex():
        _refuse(policy, verb, result, f"{right} = {list(shape)}")
    if result.shape != shape:
        by_head = result.shape == (prompt.rows, prompt.heads, prompt.length)
        hint = ": sum over a group by attention.sum_over_group(scores, prompt.kv_heads)" if by_head else ""
        _refuse(policy, verb, result, f"{right} = {list(shape)}{hint}")
    if bool(result.isnan().any()):
        _refuse(policy, verb, result, f"{right}, and infinity for what always stays", " with NaN")


def _positions(policy: Checked, verb: str, result: Any, prompt: Prompt, budget: int | None = None) -> None:
    budget = policy.entries(prompt.length) if budget is None else budget
    right = f"positions, int64 [rows, kv_heads, <= {budget}]"
    shape = prompt.rows, _sets(policy, prompt)
    _check_slots(policy, verb, result, right, shape, prompt.length)


def _slots(policy: Checked, verb: str, result: Any, store: LayerStore, *_: Any) -> None:
    if result is None:
        return
    bounded = policy.asked is not None and store.length > store.budget
    right = f"slots, int64 [rows, kv_heads, <= {store.budget if bounded else store.length}], or None for all"
    _check_slots(policy, verb, result, right, (store.rows, store.kv_heads), store.length)
    if bounded and int((result != EMPTY).sum()) > store.rows * store.kv_heads * store.budget:
        _refuse(policy, verb, result, right)


def _check_slots(policy: Checked, verb: str, result: Any, right: str, shape: tuple[int, int], length: int) -> None:
    right += ", ascending, -1 at the end where a head has fewer"
    fits = isinstance(result, Tensor) and result.dtype is torch.int64 and result.dim() == 3
    if not fits or result.shape[:2] != shape or not result.shape[2]:
        _refuse(policy, verb, result, right.replace("rows, kv_heads", f"{shape[0]}, {shape[1]}"))
    if wrong := fault(result, length):
        _refuse(policy, verb, result, right, f" with {wrong}")


def _survey(policy: Checked, verb: str, result: Any, prompt: Prompt, *_: Any) -> None:
    _check_rows(policy, verb, result, "numbers for each row, [rows, ...]", (prompt.rows,))


def _plan(policy: Checked, verb: str, result: Any, surveys: Tensor, *_: Any) -> None:
    _check_rows(policy, verb, result, "numbers for each layer and sequence, [n_layers, batch, ...]", surveys.shape[:2])


def _check_rows(policy: Checked, verb: str, result: Any, right: str, first: tuple[int, ...]) -> None:
    if not isinstance(result, Tensor) or result.shape[: len(first)] != first:
        _refuse(policy, verb, result, f"{right}, here [{', '.join(map(str, first))}, ...]")
    if bool(result.isnan().any()):
        _refuse(policy, verb, result, right, " with NaN")


def _nothing(*_: Any) -> None:
    """Check nothing: the store itself checks what these verbs do to it."""


GUARDED = ("compress", "evict_pending", "step")
CHECKS: dict[str, Callable[..., None]] = {
    "scores": _scores,
    "importance": _scores,
    "choose": _positions,
    "prefill": _positions,
    "select": _slots,
    "survey": _survey,
    "plan": _plan,
} | dict.fromkeys(GUARDED, _nothing)
