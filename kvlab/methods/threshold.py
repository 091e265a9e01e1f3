"""No fixed budget: an entry leaves when its score falls under a threshold, a while after it came."""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, ClassVar, Self

from pydantic import Field, InstanceOf, model_validator
from torch import Tensor

from kvlab.core import ranking
from kvlab.core.slots import EMPTY
from kvlab.core.softmax import Scaling, Softmax
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.methods._base.policy import Policy, everything
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.rescoring import Rescoring, check_scores_anew
from kvlab.methods._base.scorer import scorer_inside


class Threshold(Rescoring):
    """Keeps every entry whose score is at least `at`, whatever their number, at the prefill and while decoding.

    Not from a paper: Dynamic Memory Sparsification (arXiv 2506.05345) trains a model to decide which entries leave, and
    evicts them a window of tokens later. Here a score and a threshold decide, as in kvpress (DMSPress). The latest
    `window` tokens always stay. At the end of the prefill, and every `interval` generated tokens, older entries are
    scored over what is stored, and those below `at` leave. There is no budget; the stored bytes are a result. Cost:
    the scorer's at each pass, head by head; its window of queries, stored.

    Choices: an entry is scored at every pass, and leaves once queries no longer look at it (kvpress scores an entry
    once). While decoding each KV head is scored by itself. Tokens that the scorer always keeps stay. Every scorer has a
    scale of its own; the default of `at` is of SnapKV's, for groups of three query heads.

    Parameters:
        at: the least score that stays, in the scorer's own numbers (0.02, for "snapkv").
        scorer: a policy that scores tokens at the prefill, by name or as an object ("snapkv").
        window: latest tokens that always stay (128, as in kvpress).
        interval: generated tokens between two passes (32).
    """

    name: ClassVar[str] = "threshold"
    summary: ClassVar[str] = "entries whose score is at least a threshold, while decoding; no budget"
    family: ClassVar[str] = "evicts or merges while decoding"
    kind: ClassVar[str] = "decoding"
    even: ClassVar[bool] = False

    at: float = 0.02
    scorer: str | InstanceOf[Policy] = "snapkv"
    window: Annotated[int, Field(ge=1)] = 128
    interval: Annotated[int, Field(ge=1)] = 32

    @model_validator(mode="after")
    def _scorer_fits(self) -> Self:
        # Without a budget nothing else asks for the scorer before a prompt has ended.
        _ = self._inner
        return self

    @cached_property
    def _inner(self) -> Policy:
        inner = scorer_inside(self.name, self.scorer, 1.0)
        check_scores_anew(self.name, inner)
        if (inner.needs.queries or 0) > self.window:
            raise KvlabError(
                f"{self.name}: window {self.window} is below the {inner.needs.queries} tokens whose queries "
                f"{inner.name} looks at; they must be stored"
            )
        return inner

    @property
    def asked(self) -> int | float | None:
        return None

    def entries(self, prompt_length: int) -> int:
        return prompt_length

    def prefill(self, prompt: Prompt) -> Tensor:
        return self.choose(prompt, prompt.length)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        if prompt.length <= self.window:
            return everything(prompt)
        return ranking.positions_of(self._stays(prompt))

    def _stays(self, prompt: Prompt) -> Tensor:
        """Which entries stay, bool `[rows, kv_heads, length]`."""
        return ranking.with_last(self.importance(prompt, prompt.length), self.window) >= self.at

    def _judged(self, store: LayerStore, scaling: Scaling) -> Tensor | None:
        stays = store.occupied.clone()
        for row, head, prompt in self._heads(store, scaling):
            if prompt.length > self.window:
                stays[row, head, : prompt.length] = self._stays(prompt)[0, 0]
        return None if stays.equal(store.occupied) else ranking.positions_of(stays)

    def _heads(self, store: LayerStore, scaling: Scaling) -> Iterator[tuple[int, int, Prompt]]:
        """Each row and KV head with what it stores, as a prompt of its own: heads hold different numbers of entries."""
        queries, softmax = self._latest(store).unflatten(1, (store.kv_heads, -1)), Softmax.of(scaling)
        for row, layer in enumerate(store.layers):
            for head, entries in enumerate(zip(*store.row(row), strict=True)):
                n = int((entries[2] != EMPTY).sum())
                keys, values, positions = (x[None, None, :n] for x in entries)
                prompt = Prompt(
                    queries[row, None, head],
                    keys,
                    values,
                    (layer,),
                    store.numbers["n_layers"],
                    scaling=softmax.row(row).group(head, store.kv_heads),
                    positions=positions,
                    seen=store.seen,
                    lossy=n < store.seen,
                )
                yield row, head, prompt.seen_by(self)
