"""Random eviction: the floor that a method must beat."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Scorer


class Random(Scorer):
    """Keeps `budget` prompt positions drawn without replacement, for each layer and KV head anew.

    Not from a paper: the draw depends on `seed`, the layer and the head, not on what shares the batch. Unless it goes
    on while decoding, every generated token is also kept. With `region="response"` the whole prompt stays, and
    generated tokens leave at random. Cost: none.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt.
        seed: of the draw.
        decode: at each decoding step one entry, drawn from all that are stored, leaves for each that came.
        sinks: so many first tokens always stay, as most methods keep them.
        region: what it draws from, "all" or "response"; the latter draws while decoding, and its budget must have room
            for the prompt.
    """

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "prompt positions drawn at random (seeded)"
    family: ClassVar[str] = "reference"
    kind: ClassVar[str] = "reference"

    seed: int = 0
    decode: bool = False
    sinks: int = Field(0, ge=0)
    region: Literal["all", "response"] = "all"

    weighs: ClassVar[bool] = False

    @property
    def minimum(self) -> int:
        return max(self.sinks, 1)

    def scores(self, prompt: Prompt) -> Tensor:
        def draw(layer: int) -> Tensor:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + layer)
            return torch.rand(prompt.kv_heads, prompt.length, generator=generator, dtype=torch.float32)

        return torch.stack([draw(layer) for layer in prompt.layers]).to(prompt.keys.device)

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        first = torch.arange(prompt.length, device=prompt.keys.device) < self.sinks
        return self.scores(prompt).masked_fill(first, torch.inf)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        if self.region == "response":
            raise KvlabError(
                f"random(region='response') keeps the whole prompt, and a budget of {budget} has no room for its "
                f"{prompt.length} tokens; give it more, or region='all'"
            )
        return super().choose(prompt, budget)

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        super().compress(store, prompt)
        store.numbers["first"] = prompt.length if self.region == "response" else self.sinks

    @property
    def steps(self) -> bool:
        return self.decode or self.region == "response"

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        while self.steps and store.length > store.budget:
            draws = [self._draw(layer, store) for layer in store.layers]
            store.drop(torch.stack(draws).to(store.device))

    def _draw(self, layer: int, store: LayerStore) -> Tensor:
        """A slot of each head, `[kv_heads]`; anew for each layer and each number of tokens seen and stored."""
        generator = torch.Generator().manual_seed(hash((self.seed, layer, store.seen, store.length)) % 2**62)
        first = store.numbers["first"]
        return torch.randint(first, store.length, (store.positions.shape[1],), generator=generator)
