"""The policies of a comparison, each with its other needs than a budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvlab.analyses import shipped_tables
from kvlab.analyses.tasks.variants import VARIANTS
from kvlab.errors import KvlabError, nearest
from kvlab.methods import Policy, has_budget, policies, policy

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

SETS: tuple[str, ...] = ("all", "quick")
"""Names that stand for several policies, for `named`."""

LEFT_OUT = (
    "attention_matching",
    "cake",
    "chain",
    "compactor",
    "criticaladakv",
    "criticalkv",
    "curdkv",
    "decoding",
    "kvcompose",
    "kvzap",
    "kvzip",
    "laq",
    "layered",
    "leverage",
    "merging",
    "qfilters",
    "rerotated",
    "simlayerkv",
    "think",
    "threshold",
    "triattention",
)
"""Policies that "quick" leaves out: they make traces larger or captures slower, or came when the others were enough."""


def named(names: Sequence[str] = ("quick",), lm: LM | None = None) -> list[str]:
    """Policies by name, where "all" stands for every one, and "quick" for those that cost little extra.

    Args:
        lm: a model that has to have what each policy of "all" cannot do without.

    Raises:
        KvlabError: an unknown name.
    """
    every = [name for name in policies() if lm is None or shipped_tables.served(lm, contender(name, 1.0))]
    sets = dict(zip(SETS, (every, [name for name in policies() if name not in LEFT_OUT]), strict=True))
    known = [*sets, *policies()]
    for name in names:
        if name not in known:
            raise KvlabError(nearest(name, known, "policy"))
    return list(dict.fromkeys(each for name in names for each in sets.get(name, [name])))


def contender(
    name: str,
    budget: float | None,
    heads: str | None = None,
    tables: str | None = None,
    pad: str | None = None,
    after: int = 0,
) -> Policy:
    """A policy at a budget; the budget is ignored for a policy without one (the full cache).

    Args:
        name: of a policy, or of one of `variants.VARIANTS`.
        heads: head scores for duoattention, the name of shipped ones or a file; None takes the first heads.
        tables: decision tables for compilerkv, a name or a file; None takes neutral ones.
        pad: whether compilerkv fills up to its budget ("budget") or not ("none"); None takes its default.
        after: tokens after the question of the prompts, for zsmerge_question.
    """
    own: dict[str, dict[str, float | str | None]] = {
        "duoattention": {"heads": heads},
        "compilerkv": {"tables": tables, "pad": pad},
        "compilerkv_filled": {"tables": tables},
        "compilerkv_twin": {"tables": tables},
        "zsmerge_question": {"after": after},
    }
    parameters: dict[str, float | str | None] = {
        k: value for k, value in own.get(name, {}).items() if value is not None
    }
    if name in VARIANTS:
        return VARIANTS[name](budget=budget, **parameters)
    if has_budget(name):
        parameters["budget"] = budget
    return policy(name, **parameters)


def contenders(
    budgets: Iterable[int | float],
    heads: str | None = None,
    tables: str | None = None,
    names: Sequence[str] | None = None,
    pad: str | None = None,
) -> list[Policy]:
    """Every policy (or the named ones) at every budget, each once. Raises KvlabError where there is none to compare."""
    chosen, budgets = policies() if names is None else names, list(budgets)
    if not chosen or not budgets:
        what = "policies, such as ['snapkv']" if not chosen else "budgets, such as [64]"
        raise KvlabError(f"nothing to compare: give some {what}")
    return list(dict.fromkeys(contender(name, budget, heads, tables, pad) for budget in budgets for name in chosen))


def by_name(
    budgets_of: Mapping[str, Sequence[int | float]],
    heads: str | None = None,
    tables: str | None = None,
    after: int = 0,
) -> list[Policy]:
    """Policies as a notebook names them: {"snapkv": [64, 128]}."""
    return [
        contender(name, budget, heads, tables, after=after)
        for name, budgets in budgets_of.items()
        for budget in budgets
    ]
