"""The plan of an evaluation: tasks x policies x budgets, checked before anything is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from kvlab.core.storage import AS_IS, Storage, stored_as
from kvlab.errors import KvlabError
from kvlab.methods import Policy, has_budget, listed, policy
from kvlab.methods._base import contract
from kvlab.methods.full import Full
from kvlab.tasks.base import Task

if TYPE_CHECKING:
    from kvlab.inputs.models import LM


CompressAt = Literal["prompt", "context"]
"""After the whole prompt, or before its question comes."""
System: TypeAlias = tuple[Policy, Storage]
"""What keeps entries, and in what form."""
FULL = "full"


def require_moment(compress_at: str) -> None:
    """Raise KvlabError unless this is a moment to compress at."""
    if compress_at not in get_args(CompressAt):
        raise KvlabError(f"compress_at={compress_at!r} is neither 'prompt' nor 'context'")


@dataclass(frozen=True)
class Plan:
    """The plan of an evaluation: every example of a task with the full cache and with every policy.

    Attributes:
        policies: the full cache among them.
        compress_at: "prompt" compresses after the whole prompt (question-aware), "context" before the question comes.
        limit: how many examples; None for all.
        storages: the forms in which each policy's entries are stored.
    """

    task: Task
    policies: tuple[Policy, ...]
    compress_at: CompressAt = "prompt"
    limit: int | None = None
    storages: tuple[Storage, ...] = (AS_IS,)

    @property
    def systems(self) -> list[System]:
        """Every policy in every storage, behind the full cache as it is, which all are compared with."""
        return list(dict.fromkeys([(Full(), AS_IS), *itertools.product(self.policies, self.storages)]))

    def signature(self, lm: LM, policy: Policy, storage: Storage = AS_IS) -> str:
        """`model@sha dtype|task(params)|policy(params)|compress-at|kvlab version`: the prompt format is the task's, and
        behind the policy stands its storage, unless that is the plain one.
        """
        from kvlab import __version__

        dtype, stored = str(lm.dtype).removeprefix("torch."), storage.behind(str(policy))
        return f"{lm.signature} {dtype}|{self.task}|{stored}|compress at {self.compress_at}|kvlab {__version__}"


def plan(
    task: Task,
    policies: Sequence[Policy | str],
    budgets: Sequence[int | float] = (),
    compress_at: CompressAt = "prompt",
    limit: int | None = None,
    storage: str | Storage | Sequence[str | Storage] = "as_is",
) -> Plan:
    """A plan from names; the full cache always comes first: as it is, and then in each storage.

    Args:
        storage: the form in which kept entries are stored, one or several: every policy runs with each.

    Raises:
        KvlabError: an unknown policy or storage, a budget that a policy cannot work with, or no budget for one that
            needs it. Also a policy that sees the response.
    """
    wanted_storages = [storage] if isinstance(storage, str | Storage) else listed(storage, "storages")
    storages = tuple(dict.fromkeys(stored_as(form) for form in wanted_storages))
    if not storages:
        raise KvlabError("name at least one storage, such as 'as_is'")
    require_moment(compress_at)
    chosen: list[Policy] = [Full()]
    for wanted in policies:
        if isinstance(wanted, Policy) and not budgets:
            chosen.append(wanted)
        elif wanted == FULL or isinstance(wanted, Full):
            continue
        elif isinstance(wanted, str) and not has_budget(wanted):
            chosen.append(policy(wanted))
        elif not budgets:
            raise KvlabError(f"{wanted} needs a budget: entries for each head (256), or a share of the prompt (0.2)")
        else:
            chosen += [policy(wanted, budget=budget) for budget in budgets]
    for each in chosen:
        contract.check_runs_live(each)
    return Plan(task, tuple(dict.fromkeys(chosen)), compress_at, limit, storages)
