"""Two methods in turn: the second sees only what the first has left."""

import math
from functools import cached_property
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, InstanceOf, model_validator
from torch import Tensor

from kvlab.core.slots import EMPTY
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.methods._base.needs import Draft, Needs
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt

THROUGH = 0.5
"""Share of the entries that leave which the first evicts, unless something else says it."""
CHANNELS = "channels"
"""The kind of methods that drop a part of each key."""


class Chain(Policy):
    """Evicts with one method down to its budget, and with another from there down to the final one; prefill only.

    Not from a paper: kvpress applies methods in turn in the same way (ComposedPress). The second method scores only the
    entries that the first has left, with the last queries of the prompt. A method of channels (`think`) can be one of
    the two: the other spends the whole budget, and both act. Cost: that of both methods, the second on a shorter
    prompt.

    Choices: of the tokens whose queries the second looks at, some may have left; these queries still look at what
    stayed before them. Methods that act while decoding, or look at all layers first, are refused with the reason.

    Parameters:
        budget: entries for each layer and KV head in the end, or a fraction of the prompt.
        first, second: policies, by name or as objects ("snapkv", "keydiff"). The budget of the second is the chain's.
        through: share of the entries that leave which the first evicts; None for the budget of an object, or 0.5. The
            first leaves no fewer than the budget of the chain.
    """

    name: ClassVar[str] = "chain"
    summary: ClassVar[str] = "two methods in turn, the second on what the first has left"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"

    budget: Budget
    first: str | InstanceOf[Policy] = "snapkv"
    second: str | InstanceOf[Policy] = "keydiff"
    through: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        first, second = self._usual
        for method, reasons in (first, _reasons(first, False)), (second, _reasons(second, True)):
            why = next((reason for reason, holds in reasons if holds), None)
            if why is not None:
                raise KvlabError(f"{self.name}: {method.name} {why}; take another, such as 'snapkv' or 'keydiff'")
        if first.kind == second.kind == CHANNELS:
            raise KvlabError(f"{self.name}: {first.name} and {second.name} both drop channels; chain one of them alone")
        if first.needs.pseudo and second.needs.pseudo and first.needs.pseudo != second.needs.pseudo:
            raise KvlabError(f"{self.name}: {first.name} and {second.name} ask for different pseudo-tokens; take one")
        return self

    @cached_property
    def _usual(self) -> tuple[Policy, Policy]:
        """The two methods as they are asked what they need, the last one with a budget at that of the chain."""
        from kvlab.methods import has_budget, policy

        if has_budget(self.second):
            # The first is asked with a budget that fits every one of its parameters.
            own = isinstance(self.first, Policy) or not has_budget(self.first)
            return policy(self.first, **{} if own else {"budget": 1.0}), policy(self.second, budget=self.budget)
        if has_budget(self.first):
            return policy(self.first, budget=self.budget), policy(self.second)
        raise KvlabError(f"{self.name}: neither {self.first} nor {self.second} takes a budget; one of the two must")

    def methods(self, length: int) -> tuple[Policy, Policy]:
        """The two methods with their budgets for a prompt of `length` tokens."""
        from kvlab.methods import has_budget

        first, second = self._usual
        budget = self.entries(length)
        if not has_budget(second):
            return first.replace(budget=budget), second
        if has_budget(first):
            own = first.entries(length)
            if self.through is not None or isinstance(self.first, str):
                through = THROUGH if self.through is None else self.through
                own = max(length - math.floor(through * max(length - budget, 0)), first.minimum)
            first = first.replace(budget=max(own, budget))
        return first, second.replace(budget=budget)

    # ------------------------------------------------------------------ what it needs

    @property
    def minimum(self) -> int:
        from kvlab.methods import has_budget

        first, second = self._usual
        return second.minimum if has_budget(second) else first.minimum

    @property
    def needs(self) -> Needs:
        first, second = self._usual
        return first.needs | second.needs

    @property
    def from_files(self) -> str:
        return "".join(method.from_files for method in self._usual)

    def fits(self, prompt_length: int) -> bool:
        """Whether neither of the two changes anything."""
        return all(method.fits(prompt_length) for method in self.methods(prompt_length))

    # ------------------------------------------------------------------ the prefill

    def prefill(self, prompt: Prompt) -> Tensor:
        store = LayerStore(prompt.keys, prompt.values, prompt.positions)
        store.layers, store.seen = prompt.layers, prompt.seen
        self.compress(store, prompt)
        slots = torch.searchsorted(prompt.positions.contiguous(), store.positions.contiguous())
        return slots.masked_fill(store.positions == EMPTY, EMPTY)

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        first, second = self.methods(prompt.length)
        first.compress(store, prompt.seen_by(first))
        if store.ragged:
            raise KvlabError(
                f"{self.name}: {first.name} has left heads with different numbers of entries, which no second method "
                "can look at; make it the second"
            )
        if store.length < prompt.length or first.needs.rewrites:
            prompt = prompt.reduced_to(store)
        second.compress(store, prompt.seen_by(second))

    # ------------------------------------------------------------------ bytes

    def overhead_bytes(self, store: LayerStore) -> int | Tensor:
        return super().overhead_bytes(store) - self.discount_bytes(store)

    def discount_bytes(self, store: LayerStore) -> int | Tensor:
        return sum(method.discount_bytes(store) for method in self._usual)


def _reasons(method: Policy, second: bool) -> list[tuple[str, bool]]:
    """Why a method cannot be one of the two, and whether it is so."""
    needs = method.needs
    every_query = needs.every_query or needs.accumulated
    return [
        ("acts while decoding, and a chain ends with the prefill", needs.acts_while_decoding),
        ("looks at all layers before it compresses one", needs.surveys),
        ("keeps a set for each query head", getattr(method, "sets", "group") == "head"),
        ("has the model draft an answer to the whole prompt", isinstance(needs.pseudo, Draft)),
        ("changes the entries that it keeps", needs.rewrites and method.kind != CHANNELS),
        ("shares its budget among layers or heads, and must be the second", method.kind == "allocation" and not second),
        ("needs every query of the prompt, and must be the first", every_query and second),
        ("has the model repeat the whole prompt, and must be the first", bool(needs.repetitions) and second),
        ("needs the perplexity of the whole prompt, and must be the first", needs.perplexity > 0 and second),
        ("knows the response or the prompt's ids, and must be the first", (needs.response or needs.origin) and second),
    ]
