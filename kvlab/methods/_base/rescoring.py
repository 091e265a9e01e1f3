"""Scores applied again while decoding: the latest queries are kept, and what is stored is shown to the scorer anew."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvlab.core import ranking
from kvlab.core.softmax import Scaling
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.methods._base.needs import Needs
from kvlab.methods._base.policy import Policy
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Wrapper

QUERIES, KEPT = "latest queries", "kept"
ANEW = "take one that scores what is stored, such as 'snapkv', 'knorm' or 'keydiff'"


class Rescoring(Wrapper):
    """A method around a scorer that judges what is stored again, every `interval` generated tokens.

    A pass happens in the step at which it is due. The step's own query observes, and attends to all stored entries.
    Then the entries that the pass does not keep leave. The tokens whose queries observe always stay.
    """

    weighs: ClassVar[bool] = False
    even: ClassVar[bool] = True
    """Whether a pass leaves every head equally many entries."""

    if TYPE_CHECKING:
        interval: int

    @property
    def stated_needs(self) -> Needs:
        # A step reads all that is stored: `select` only looks on.
        return replace(super().stated_needs, selects=False)

    @property
    def _observed(self) -> int:
        observed = self._inner.needs.queries
        assert observed is not None, "a scorer of every query is refused"
        return observed

    @property
    def minimum(self) -> int:
        return max(self._inner.minimum, self._observed + 1)

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.with_last(self._inner.importance(prompt, budget), self._observed)

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        n = min(self._observed, prompt.length)
        queries = prompt.keys.new_zeros(prompt.rows, prompt.heads, self._observed, prompt.keys.shape[3])
        if n:
            queries[:, :, self._ring(store, n)] = prompt.window(n)
        store.memory[QUERIES] = queries
        store.numbers |= {"n_layers": prompt.n_layers, "passed": store.seen}
        store.numbers |= {"oldest": store.seen - n, "latest": store.seen}
        super().compress(store, prompt)

    def select(self, store: LayerStore, queries: Tensor, scaling: Scaling) -> Tensor | None:
        self._note(store, queries)
        observed = min(self._observed, store.seen) <= store.seen - store.numbers["oldest"]
        if observed and store.seen - store.numbers["passed"] >= self.interval:
            store.numbers["passed"] = store.seen
            kept = self._judged(store, scaling)
            if kept is not None:
                store.scratch[KEPT] = kept
        return None

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        kept = store.scratch.pop(KEPT, None)
        if kept is not None:
            store.evict(kept, even=self.even)

    def _judged(self, store: LayerStore, scaling: Scaling) -> Tensor | None:
        """The slots that stay, int64 `[rows, kv_heads, n]`, -1 padded; None for all of them."""
        raise NotImplementedError

    def _note(self, store: LayerStore, queries: Tensor) -> None:
        """Keep the newest token's query `[rows, heads, 1, head_dim]` in the place of the oldest."""
        numbers, own = store.numbers, store.seen - 1
        if numbers["latest"] < own:
            # The queries of a turn that was stored whole are unknown.
            numbers["oldest"] = own
        # Tokens that were rejected have overwritten older ones.
        numbers["latest"] = store.seen
        numbers["oldest"] = max(numbers["oldest"], store.seen - self._observed)
        if self._observed:
            store.memory[QUERIES][:, :, own % self._observed] = queries[:, :, 0]

    def _latest(self, store: LayerStore) -> Tensor:
        """The latest queries in their order, `[rows, heads, n, head_dim]`."""
        n = min(self._observed, store.seen)
        return store.memory[QUERIES][:, :, self._ring(store, n)]

    def _ring(self, store: LayerStore, n: int) -> Tensor:
        """Where the queries of the last `n` tokens are kept, `[n]`."""
        return torch.arange(store.seen - n, store.seen, device=store.device) % max(self._observed, 1)


def check_scores_anew(name: str, inner: Policy) -> None:
    """Raise KvlabError for a scorer that cannot judge what is stored while decoding: one sentence says why."""
    needs = inner.needs
    why = next((reason for reason, holds in _reasons(inner, needs) if holds), None)
    if why is not None:
        raise KvlabError(f"{name}: {inner.name} {why}; {ANEW}")


def _reasons(inner: Policy, needs: Needs) -> list[tuple[str, bool]]:
    whole = isinstance(inner, Wrapper) and "importance" not in vars(type(inner))
    return [
        ("acts while decoding in a way of its own", needs.acts_while_decoding),
        ("sees the response", needs.response),
        ("is a reference and no score", inner.kind == "reference"),
        ("shares its budget among layers or heads", inner.kind == "allocation"),
        ("spends the budget in a way of its own", whole),
        ("looks at pseudo-tokens behind the prompt, which no decoding step runs", needs.pseudo is not None),
        ("has the model repeat its prompt, which no decoding step does", bool(needs.repetitions)),
        ("looks at every query of the prompt, and a response has others", needs.queries is None or needs.accumulated),
        ("looks at queries before RoPE, which no decoding step is shown", needs.pre_queries),
        ("looks at hidden states, which no decoding step is shown", needs.hidden),
        ("looks at the prompt's perplexity, which a response changes", needs.perplexity > 0),
        ("needs the output projections, which no decoding step is shown", needs.projection),
        ("needs the model's rotations, which no decoding step is shown", needs.rotation),
    ]
