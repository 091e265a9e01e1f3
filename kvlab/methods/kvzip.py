"""KVzip (Kim et al., 2025): what the model needs to repeat its prompt stays."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import ranking
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.needs import Needs
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.repeating import Repetition


class KVzip(Policy):
    """Keeps the entries that the model attends to most while it repeats its prompt, over all layers and heads; prefill
    only.

    KVzip (Kim et al. 2025), sections 3.2-3.4: after the prompt the model is asked to repeat it. It is then fed the
    repetition in chunks of `chunk` tokens. An entry's score is the largest attention from any token of the pass and any
    query of the GQA group. The softmax is over the chunk, the sinks and the pass itself. The entries of all layers and
    heads compete for one budget. With `plus` (KVzip+, from "KVzap") attention is multiplied by |W_o v| and divided by
    the norm of the layer's input. Every generated token is also kept. Cost: a second pass over the prompt's tokens, on
    top of the whole prompt: two to three times the prefill. Heads hold different numbers of entries.

    Choices: the first `sinks` tokens stay in every head (the authors keep the system prompt, kvpress the first four).
    The prompt is repeated as it is, chat template included, and the wording of the instruction is kvlab's; without a
    tokenizer it is left out. Of equal scores the earlier position stays, then the earlier layer, then the earlier head.

    Parameters:
        budget: entries for each layer and KV head on average, sinks included.
        chunk: tokens that are repeated at once (2000).
        sinks: first tokens that stay in every head (4).
        plus: whether the size of values and hidden states counts.
    """

    name: ClassVar[str] = "kvzip"
    summary: ClassVar[str] = "what the model attends to when it repeats its prompt, over all layers and heads"
    family: ClassVar[str] = "recent tokens, or layers' and heads' shares"
    kind: ClassVar[str] = "allocation"
    paper: ClassVar[Paper | None] = PAPERS["kvzip"]

    budget: Budget
    chunk: Annotated[int, Field(ge=1)] = 2000
    sinks: Annotated[int, Field(ge=1)] = 4
    plus: bool = False

    @property
    def minimum(self) -> int:
        return self.sinks + 1

    @property
    def needs(self) -> Needs:
        return Needs(projection=self.plus, repetitions=(self.repetition,))

    @property
    def repetition(self) -> Repetition:
        return Repetition(self.chunk, self.sinks, self.plus)

    def scores(self, prompt: Prompt) -> Tensor:
        """The largest attention of the pass that repeats the prompt, `[rows, kv_heads, length]`."""
        return prompt.repeated(self, self.repetition)

    def survey(self, prompt: Prompt) -> Tensor:
        """Scores with infinity for the sinks."""
        scores = self.scores(prompt).clone()
        scores[..., : self.sinks] = torch.inf
        return scores

    def plan(self, surveys: Tensor, prompt: Prompt) -> Tensor:
        """Which entries stay, bool `[n_layers, batch, kv_heads, length]`."""
        layers, _, heads, length = surveys.shape
        # Positions first, so that of equal scores the earlier one comes first.
        together = surveys.permute(1, 3, 0, 2).flatten(1)
        best = ranking.top_positions(together, layers * heads * self.entries(prompt.length))
        chosen = torch.zeros_like(together, dtype=torch.bool).scatter(-1, best, True)
        return chosen.unflatten(1, (length, layers, heads)).permute(2, 0, 3, 1)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        assert prompt.plan is not None, "layers compete before any of them is compressed"
        return ranking.positions_of(prompt.plan)
