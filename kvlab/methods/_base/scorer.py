"""Methods that score the prompt's tokens and keep the best, and methods around another one."""

from functools import cached_property

from pydantic import InstanceOf
from torch import Tensor

from kvlab.core import ranking
from kvlab.errors import KvlabError
from kvlab.methods._base.needs import Needs
from kvlab.methods._base.policy import SCORERS, Budget, Policy
from kvlab.methods._base.prompt import Prompt


class Scorer(Policy):
    """Keeps the tokens of the prompt whose `importance` is largest. A subclass says with `scores` what that is."""

    budget: Budget

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.top_positions(self.importance(prompt, budget), budget)


class Around(Policy):
    """A method around another policy: it scores what that one scores, and needs what that one needs."""

    @cached_property
    def _inner(self) -> Policy:
        """The policy around which it is; KvlabError for one that it cannot work with."""
        raise NotImplementedError

    def scores(self, prompt: Prompt) -> Tensor:
        return self._inner.scores(prompt)

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        return self._inner.importance(prompt, budget)

    @property
    def minimum(self) -> int:
        return self._inner.minimum

    @property
    def needs(self) -> Needs:
        return self._inner.needs.inputs

    @property
    def from_files(self) -> str:
        return self._inner.from_files


class AroundScorer(Around):
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
        # The names are those of all files of this folder, this one among them.
        from kvlab.methods import policy, registry

        kind = registry().get(self.scorer) if isinstance(self.scorer, str) else type(self.scorer)
        if kind is not None and not kind.scores_tokens():
            raise KvlabError(f"{self.name}: {kind.name} does not score tokens; {SCORERS}")
        inner = policy(self.scorer, budget=self.budget)
        if inner.needs.surveys:
            raise KvlabError(f"{self.name}: {inner.name} shares its budget among layers; take a scorer that does not")
        if getattr(inner, "sets", "group") == "head":
            raise KvlabError(f"{self.name}: {inner.name} keeps a set for each query head; give it sets='group'")
        return inner
