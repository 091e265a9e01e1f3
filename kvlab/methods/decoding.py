"""A score at prefill applied again and again while decoding, so that a long response stays within the budget."""

from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from kvlab.core import ranking
from kvlab.core.softmax import Scaling
from kvlab.core.store import LayerStore
from kvlab.methods._base.policy import Policy
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.rescoring import Rescoring, check_scores_anew
from kvlab.methods._base.scorer import ScorerWrapper


class Decoding(Rescoring, ScorerWrapper):
    """Keeps the best entries by another's scores, at the prefill and every `interval` generated tokens anew.

    Not from a paper: kvpress runs its scores while decoding in the same way (DecodingPress, every 512 tokens). Every
    `interval` tokens all stored entries, of prompt and response, are scored like a prompt. The latest queries are the
    observation window, and the best entries stay. Between two passes generated tokens gather, so that the cache holds
    at most budget + interval entries. Cost: the scorer's at each pass; its window of queries, stored.

    Choices: the tokens whose queries observe always stay. After a turn that was stored whole, a pass waits until the
    scorer's window of queries has been seen. Scorers that need what only a prefill shows are refused with the reason.

    Parameters:
        budget: entries for each layer and KV head after each pass, or a fraction of the prompt.
        scorer: a policy that scores tokens at the prefill, by name or as an object ("snapkv").
        interval: generated tokens between two passes (128; kvpress has 512).
    """

    name: ClassVar[str] = "decoding"
    summary: ClassVar[str] = "another's scores, applied again while decoding"
    family: ClassVar[str] = "evicts or merges while decoding"
    kind: ClassVar[str] = "decoding"

    interval: Annotated[int, Field(ge=1)] = 128

    @cached_property
    def _inner(self) -> Policy:
        inner = super()._inner
        check_scores_anew(self.name, inner)
        return inner

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.top_positions(self.importance(prompt, budget), budget)

    def _judged(self, store: LayerStore, scaling: Scaling) -> Tensor | None:
        if store.length <= store.budget:
            return None
        prompt = Prompt(
            self._latest(store),
            store.keys,
            store.values,
            store.layers,
            store.numbers["n_layers"],
            scaling=scaling,
            positions=store.positions,
            seen=store.seen,
            lossy=store.length < store.seen,
        )
        return self.choose(prompt.seen_by(self), store.budget)
