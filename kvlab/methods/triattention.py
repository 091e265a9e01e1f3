"""TriAttention (Mao et al., 2026): where queries around fixed centres would look, from now on."""

from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.rotation import mixed, paired
from kvlab.core.store import LayerStore
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.eviction import after_compression
from kvlab.methods._base.needs import Needs
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt

CENTRES, SPREADS, FREQUENCIES, INTERLEAVED = "centres", "spreads", "frequencies", "interleaved"


class TriAttention(Policy):
    """Keeps the entries that the mean query before RoPE would attend to from later positions, compressed every few
    steps.

    "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression" (Mao et al. 2026): a key's score has two
    terms. q_f and k_f are the pairs of channels that RoPE turns by the frequency w_f, as complex numbers. The first
    term of a key at distance d is sum_f |E q_f| |k_f| cos(w_f d + phase(E q_f, k_f)). It is averaged over the distances
    d + 1, d + 2, d + 4 ... d + `reach`. The second, sum_f (E|q_f| - |E q_f|) |k_f|, counts more the less the queries
    cluster around their mean. Scores of each query head are standardised, and the largest of the GQA group counts.
    Entries gather until the budget is full; then the best stay and leave room for `interval` new ones. Cost: two
    vectors for each query head, stored; at each compression two products of them with all keys.

    Choices: centres are those of the prompt's own queries (the paper calibrates on other texts, and finds that they
    hardly depend on the text). The prompt's entries compete with the others, and the budget counts all of them (the
    authors' code keeps the prompt by default). Each layer and head chooses for itself. Channels that RoPE leaves alone
    count with the product of their mean.

    Parameters:
        budget: entries for each layer and KV head, the room that a compression makes included.
        interval: tokens between two compressions; None for 128, or an eighth of the budget if that is less.
        reach: how far ahead queries are expected, a power of two (65536).
    """

    name: ClassVar[str] = "triattention"
    summary: ClassVar[str] = "entries that queries around their centre would look back to, while decoding"
    family: ClassVar[str] = "evicts or merges while decoding"
    kind: ClassVar[str] = "decoding"
    paper: ClassVar[Paper | None] = PAPERS["triattention"]
    weighs: ClassVar[bool] = False

    budget: Budget
    interval: Annotated[int, Field(ge=1)] | None = None
    reach: Annotated[int, Field(ge=1)] = 65536

    @property
    def minimum(self) -> int:
        return 1 + (self.interval or 1)

    @property
    def needs(self) -> Needs:
        return Needs(rotation=True, pre_queries=True)

    def scores(self, prompt: Prompt) -> Tensor:
        return prompt.share(
            ("triattention", self.reach), lambda: scored(prompt.keys, *self._calibrated(prompt), prompt.seen)
        )

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.top_positions(self.scores(prompt), after_compression(budget, self.interval))

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        centres, spreads, frequencies, interleaved = self._calibrated(prompt)
        store.memory |= {CENTRES: centres, SPREADS: spreads, FREQUENCIES: frequencies}
        store.numbers[INTERLEAVED] = interleaved
        super().compress(store, prompt)

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        if store.length > store.budget:
            centres, spreads, frequencies = (store.memory[name] for name in (CENTRES, SPREADS, FREQUENCIES))
            scores = scored(store.keys, centres, spreads, frequencies, store.numbers[INTERLEAVED], store.seen)
            store.evict(ranking.top_positions(scores, after_compression(store.budget, self.interval)), even=True)

    def _calibrated(self, prompt: Prompt) -> tuple[Tensor, Tensor, Tensor, int]:
        """Summarise the prompt's queries, as an estimate of those to come.

        Returns:
            Four values. The first is the queries' centre, turned by the mean of the distances ahead,
            `[rows, heads, head_dim]`. The second is how much larger their pairs are on average than the centre's,
            `[rows, heads, pairs]`. The third is the frequencies `[rows, pairs]`, zeros where a layer turns fewer pairs.
            The last is whether pairs are neighbours.
        """
        queries, rotations = prompt.pre_queries(self), prompt.rotation(self)
        pairs = max(len(rotation.frequencies) for rotation in rotations)
        interleaved = any(rotation.interleaved for rotation in rotations)
        ahead = 2 ** torch.arange(self.reach.bit_length(), device=queries.device)
        centres, spreads, frequencies = [], [], []
        for own, rotation in zip(queries, rotations, strict=True):
            own = attention.exact(own)
            centre = own.mean(1)
            centres.append(centre @ rotation.mean(ahead, own.shape[-1]).T)
            size = torch.hypot(*paired(own, len(rotation.frequencies), rotation.interleaved)).mean(1)
            off = size - torch.hypot(*paired(centre, len(rotation.frequencies), rotation.interleaved))
            blank = pairs - len(rotation.frequencies)
            spreads.append(F.pad(off * rotation.factor, (0, blank)))
            table = torch.tensor(rotation.frequencies, dtype=torch.float32, device=queries.device)
            frequencies.append(F.pad(table, (0, blank)))
        return torch.stack(centres), torch.stack(spreads), torch.stack(frequencies), int(interleaved)


def scored(
    keys: Tensor, centres: Tensor, spreads: Tensor, frequencies: Tensor, interleaved: int, position: int
) -> Tensor:
    """Scores of the keys `[rows, kv_heads, n, head_dim]` for what comes from `position` on, `[rows, kv_heads, n]`."""
    kv_heads, pairs, keys = keys.shape[1], frequencies.shape[-1], attention.exact(keys)
    angles = frequencies[:, None] * position
    turned = mixed(centres, angles.cos(), angles.sin(), bool(interleaved)).unflatten(1, (kv_heads, -1))
    sizes = torch.hypot(*paired(keys, pairs, bool(interleaved)))
    spread = spreads.unflatten(1, (kv_heads, -1))
    found = turned @ keys.transpose(-1, -2) + spread @ sizes.transpose(-1, -2)
    deviation = found.std(-1, correction=0, keepdim=True).clamp_min(1e-6)
    return ((found - found.mean(-1, keepdim=True)) / deviation).amax(2)
