"""KVzap (Jégou and Jeblick, 2026): a linear map of hidden states says which entries a repetition would look at."""

from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat, PrivateAttr, model_validator
from torch import Tensor

from kvlab.core import ranking
from kvlab.core.storage import alike
from kvlab.errors import KvlabError
from kvlab.lib.parameters import PathText
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.needs import Needs
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Scorer
from kvlab.methods._base.surrogates import Surrogate, shipped_for


class KVzap(Scorer):
    """Keeps the tokens whose hidden states promise the largest KVzip+ scores, and the latest ones; prefill only.

    "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning" (Jégou and Jeblick 2026): each layer has a surrogate. It maps
    the hidden states that enter the attention to the logarithms of the KV heads' KVzip+ scores. No token of the prompt
    is fed twice. With `at`, entries with a score below it leave, even within the budget. The latest `window` tokens
    stay. Every generated token is also kept. Cost: one product with the hidden states in each layer; the surrogate is
    trained once for a model.

    Choices: the surrogate is the authors' linear one, a ridge regression; they train a two-layer one as well. kvlab
    evicts when the prompt ends; the authors evict while decoding, too. The first `sinks` tokens stay, as in KVzip; the
    authors' code of KVzap forces none (`sinks=0`). KVzip+ scores rank the sink low in some heads of SmolLM2. Where the
    budget is small, the window takes at most half of what the sinks leave.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt; 1.0 leaves the choice to `at`.
        surrogate: file of a trained surrogate, or a model whose surrogate comes with kvlab (by default the model at
            hand).
        window: latest tokens that always stay (128).
        sinks: first tokens that always stay (4).
        at: the least score that stays, a natural logarithm; by default the budget alone decides.
    """

    name: ClassVar[str] = "kvzap"
    summary: ClassVar[str] = "KVzip+ scores that a linear map predicts from hidden states"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["kvzap"]

    surrogate: PathText | None = None
    window: Annotated[int, Field(ge=1)] = 128
    sinks: Annotated[int, Field(ge=0)] = 4
    at: FiniteFloat | None = None

    _given: Surrogate | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _read(self) -> Self:
        if self.surrogate is not None:
            self._given = Surrogate.load(self.surrogate)
        return self

    @property
    def from_files(self) -> str:
        return "" if self._given is None else self._given.content

    @property
    def needs(self) -> Needs:
        return Needs(hidden=True, origin=True)

    @property
    def minimum(self) -> int:
        return self.sinks + 1

    def fits(self, prompt_length: int) -> bool:
        """Whether nothing needs to be judged: a threshold judges a short prompt, too."""
        return self.at is None and super().fits(prompt_length)

    def scores(self, prompt: Prompt) -> Tensor:
        hidden, surrogate = prompt.hidden(self), self._of_model(prompt)
        return prompt.share(("kvzap", surrogate.content), lambda: surrogate.scores(hidden, prompt.layers))

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        window = min(self.window, -(-(budget - self.sinks) // 2), prompt.length)
        importance = ranking.with_last(self.scores(prompt), window)
        importance[..., : self.sinks] = torch.inf
        return importance

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        importance = self.importance(prompt, budget)
        best = ranking.top_positions(importance, budget)
        if self.at is None:
            return best
        return ranking.positions_of(ranking.marked(best, prompt.length) & (importance >= self.at))

    def _of_model(self, prompt: Prompt) -> Surrogate:
        return self.fitting(prompt.model(self), (prompt.n_layers, prompt.kv_heads, prompt.hidden(self).shape[-1]))

    def fitting(self, model: str, shape: tuple[int, int, int]) -> Surrogate:
        """The surrogate for a model.

        Args:
            model: its name, "" where it is unknown.
            shape: its layers, KV heads, and the width of its hidden states.

        Raises:
            KvlabError: there is none, or the one that was given is another model's.
        """
        here = f"{model or 'this model'} ({_in_words(shape)})"
        found = self._given or shipped_for(model, shape)
        if found is None:
            raise KvlabError(
                f"kvzap: no surrogate comes with kvlab for {here}; train one with `kvlab surrogate MODEL --out FILE` "
                "and give its file as surrogate="
            )
        if found.shape != shape:
            raise KvlabError(
                f"kvzap: the surrogate of {self.surrogate!r} is of {found.about.model or 'a model'} with "
                f"{_in_words(found.shape)}, and not of {here}; train one with `kvlab surrogate` (and pass keep() its "
                "layer= and n_layers=)"
            )
        if not alike(found.about.model, model):
            raise KvlabError(
                f"kvzap: the surrogate of {self.surrogate!r} was trained for the weights of {found.about.model}, and "
                f"this model is {model}; train one with `kvlab surrogate`"
            )
        return found


def _in_words(shape: tuple[int, int, int]) -> str:
    layers, heads, width = shape
    return f"{layers} layers of {heads} KV heads on hidden states of {width}"
