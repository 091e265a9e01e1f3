"""StreamingLLM (Xiao et al., 2023): attention sinks and a rolling window."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core.store import LayerStore
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt


class StreamingLLM(Policy):
    """Keeps the first `sinks` tokens and the most recent ones, at the prefill and at every decoding step.

    StreamingLLM (Xiao et al. 2023), section 3.2: attention sinks and a rolling window of the latest tokens stay. Sinks
    are the first tokens, which draw attention whatever they say. Each new token evicts the oldest of the window. Cost:
    none; it scores nothing.

    Choices: keys keep their own positions (the original renumbers them inside the cache).

    Parameters:
        budget: entries for each layer and KV head, sinks included.
        sinks: first tokens that always stay (4 in the paper).
    """

    name: ClassVar[str] = "streamingllm"
    summary: ClassVar[str] = "attention sinks and the most recent tokens, rolling"
    family: ClassVar[str] = "recent tokens, or layers' and heads' shares"
    kind: ClassVar[str] = "decoding"
    paper: ClassVar[Paper | None] = PAPERS["streamingllm"]

    by_position: ClassVar[bool] = True
    weighs: ClassVar[bool] = False

    budget: Budget
    sinks: Annotated[int, Field(ge=0)] = 4

    @property
    def minimum(self) -> int:
        return self.sinks + 1

    def scores(self, prompt: Prompt) -> Tensor:
        """Recency, with the sinks above everything: its top k are its retained set at budget k."""
        recency = torch.arange(prompt.length, dtype=torch.float32, device=prompt.keys.device)
        recency[: self.sinks] += prompt.length
        return recency.expand(prompt.rows, prompt.kv_heads, prompt.length)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        positions = torch.arange(prompt.length, device=prompt.keys.device)
        kept = torch.cat([positions[: self.sinks], positions[prompt.length - (budget - self.sinks) :]])
        return kept.expand(prompt.rows, prompt.kv_heads, budget)

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        while store.length > store.budget:
            store.drop(self.sinks)
