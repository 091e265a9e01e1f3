"""Methods that score the prompt's tokens and keep the best, and methods around another one."""

from functools import cached_property, wraps
from types import FunctionType
from typing import Any

from pydantic import InstanceOf
from torch import Tensor

from kvlab.core import ranking
from kvlab.errors import KvlabError
from kvlab.methods._base.needs import VERBS, Needs
from kvlab.methods._base.policy import SCORERS, Budget, Policy
from kvlab.methods._base.prompt import Prompt


class Scorer(Policy):
    """Keeps the tokens of the prompt whose `importance` is largest. A subclass says with `scores` what that is."""

    budget: Budget

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.top_positions(self.importance(prompt, budget), budget)


OWN = frozenset(VERBS.values()) | {
    *("keep", "prefill", "plan", "compress", "evict_pending", "settle", "overhead_bytes", "discount_bytes"),
    *("needs", "stated_needs", "steps", "fits", "raised", "scores_tokens"),
}
"""What a wrapper does or derives itself. It chooses in a way of its own, and does nothing after the prefill."""


class Wrapper(Policy):
    """A method around another policy: whatever is not in `OWN` it answers as that one does, and needs what that one
    needs. An override point that is added to `Policy` is handed on as well.
    """

    @cached_property
    def _inner(self) -> Policy:
        """The policy around which it is; KvlabError for one that it cannot work with."""
        raise NotImplementedError

    @property
    def needs(self) -> Needs:
        return self._inner.needs.inputs


def _handed_on(name: str, point: FunctionType | property) -> Any:
    """An override point of `Policy` that answers as the policy inside does."""
    if isinstance(point, property):
        return property(lambda self: getattr(self._inner, name), doc=point.__doc__)

    @wraps(point)
    def call(self: Wrapper, *args: Any, **named: Any) -> Any:
        return getattr(self._inner, name)(*args, **named)

    return call


for _name, _point in vars(Policy).items():
    if isinstance(_point, FunctionType | property) and not _name.startswith("_") and _name not in OWN:
        setattr(Wrapper, _name, _handed_on(_name, _point))


class ScorerWrapper(Wrapper):
    """A method that takes the scores of another one and spends the budget in a way of its own; prefill only.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt; the scorer is given the same.
        scorer: a policy that scores tokens, by name (with its default parameters) or as an object.
    """

    budget: Budget
    scorer: str | InstanceOf[Policy] = "snapkv"

    @cached_property
    def _inner(self) -> Policy:
        """The scorer, with this budget."""
        return scorer_inside(self.name, self.scorer, self.budget)


def scorer_inside(name: str, scorer: str | Policy, budget: int | float) -> Policy:
    """The scorer of the wrapper `name`, with this budget; KvlabError for a policy that scores no tokens of one head."""
    # The names are those of all files of this folder, this one among them.
    from kvlab.methods import policy, registry

    kind = registry().get(scorer) if isinstance(scorer, str) else type(scorer)
    if kind is not None and not kind.scores_tokens():
        raise KvlabError(f"{name}: {kind.name} does not score tokens; {SCORERS}")
    inner = policy(scorer, budget=budget)
    if inner.needs.surveys:
        raise KvlabError(f"{name}: {inner.name} shares its budget among layers; take a scorer that does not")
    if getattr(inner, "sets", "group") == "head":
        raise KvlabError(f"{name}: {inner.name} keeps a set for each query head; give it sets='group'")
    return inner
