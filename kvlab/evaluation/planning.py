"""What an evaluation runs: tasks x policies x budgets, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvlab.errors import KvlabError
from kvlab.methods import Policy, has_budget, policy
from kvlab.methods.full import Full
from kvlab.tasks.base import Task

if TYPE_CHECKING:
    from kvlab.inputs.models import LM


CompressAt = Literal["prompt", "context"]
FULL = "full"


@dataclass(frozen=True)
class Plan:
    """What is evaluated: every example of a task with the full cache and with every policy.

    Attributes:
        compress_at: "prompt" compresses after the whole prompt (question-aware), "context" before the question comes.
        limit: how many examples; None for all.
    """

    task: Task
    policies: tuple[Policy, ...]
    compress_at: CompressAt = "prompt"
    limit: int | None = None

    def signature(self, lm: LM, policy: Policy) -> str:
        """`model@sha dtype|task(params)|policy(params)|compress-at|kvlab version`: the prompt format is the task's."""
        from kvlab import __version__

        dtype = str(lm.dtype).removeprefix("torch.")
        return f"{lm.signature} {dtype}|{self.task}|{policy}|compress at {self.compress_at}|kvlab {__version__}"


def plan(
    task: Task,
    policies: Sequence[Policy | str],
    budgets: Sequence[int | float] = (),
    compress_at: CompressAt = "prompt",
    limit: int | None = None,
) -> Plan:
    """A plan from names; the full cache always comes first.

    Raises:
        KvlabError: an unknown policy, a budget that it cannot work with, or none for a policy that needs one.
    """
    if compress_at not in ("prompt", "context"):
        raise KvlabError(f"compress_at={compress_at!r} is neither 'prompt' nor 'context'")
    found: list[Policy] = [Full()]
    for wanted in policies:
        if isinstance(wanted, Policy) and not budgets:
            found.append(wanted)
        elif wanted == FULL or isinstance(wanted, Full):
            continue
        elif isinstance(wanted, str) and not has_budget(wanted):
            found.append(policy(wanted))
        elif not budgets:
            raise KvlabError(f"{wanted} needs a budget: entries for each head (256), or a share of the prompt (0.2)")
        else:
            found += [policy(wanted, budget=budget) for budget in budgets]
    return Plan(task, tuple(dict.fromkeys(found)), compress_at, limit)
