"""Random eviction: the floor that a method must beat."""

from typing import ClassVar

import torch
from torch import Tensor

from kvlab.core import ranking
from kvlab.methods.base import Budget, Policy
from kvlab.methods.prompt import Prompt


class Random(Policy):
    """Keeps `budget` prompt positions drawn without replacement, for each layer and KV head anew; prefill only.

    Not from a paper. The draw depends on `seed`, the layer and the head, not on what shares the batch. Every generated
    token is kept besides. Cost: none.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt.
        seed: of the draw.
    """

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "prompt positions drawn at random (seeded)"
    family: ClassVar[str] = "reference"

    budget: Budget
    seed: int = 0

    def scores(self, prompt: Prompt) -> Tensor:
        def draw(layer: int) -> Tensor:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + layer)
            return torch.rand(prompt.kv_heads, prompt.length, generator=generator)

        return torch.stack([draw(layer) for layer in prompt.layers]).to(prompt.keys.device)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.top_positions(self.scores(prompt), budget)
