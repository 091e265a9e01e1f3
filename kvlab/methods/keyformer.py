"""Keyformer (Adnan et al., 2024): H2O with Gumbel noise on the logits and a temperature that rises."""

from functools import lru_cache
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.softmax import Softmax
from kvlab.core.store import LayerStore
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.eviction import evict_lowest, part
from kvlab.methods._base.policy import Budget, Policy, top_and_last
from kvlab.methods._base.prompt import Prompt

BLOCK, CPU = 256, torch.device("cpu")


class Keyformer(Policy):
    """Keeps the key tokens and the most recent ones; a key token gathers softmax((logit + noise) / tau).

    Keyformer (Adnan et al. 2024), algorithm 1 and eq. 8-10: the score of a key sums softmax((logit + Gumbel noise) /
    tau) over every query so far. tau is `tau_start` in the prompt and rises linearly to `tau_end` over the decoding
    steps. After each step the lowest score older than the recent part leaves. Cost: a score for each entry and its
    noise for each query head. A second softmax at every step and one over the whole prompt, with all its queries
    (`capture(..., queries="all")`).

    Choices where the paper is silent: the noise is drawn once for each layer, query head and key position, and stays
    with the entry. Replays and live runs therefore agree. A GQA group's scores are summed and its heads share one set.
    The rise needs the number of new tokens; where it is unknown, or passed, tau is `tau_end`. While decoding the
    logarithms of the attended weights replace the logits: they differ by a constant, which the softmax removes. A
    model's learnt sinks take no part in a score.

    Parameters:
        budget: entries for each layer and KV head, key tokens and recent ones together.
        recent: share of the budget for the most recent tokens (0.5).
        tau_start, tau_end: temperature in the prompt (1) and at the last decoding step (2).
        seed: of the noise.
        noise: False scores without noise.
    """

    name: ClassVar[str] = "keyformer"
    summary: ClassVar[str] = "accumulated attention with Gumbel noise and recent tokens, while decoding"
    family: ClassVar[str] = "evicts or merges while decoding"
    kind: ClassVar[str] = "decoding"
    paper: ClassVar[Paper | None] = PAPERS["keyformer"]

    budget: Budget
    recent: Annotated[float, Field(gt=0, lt=1)] = 0.5
    tau_start: Annotated[float, Field(gt=0)] = 1.0
    tau_end: Annotated[float, Field(gt=0)] = 2.0
    seed: int = 0
    noise: bool = True

    @property
    def minimum(self) -> int:
        return 2

    @property
    def observes(self) -> None:
        return None

    def gumbel(self, layers: tuple[int, ...], heads: int, start: int, stop: int, device: torch.device = CPU) -> Tensor:
        """The noise of the key positions `start` .. `stop` - 1 in each of `layers`, `[rows, heads, stop - start]`."""
        blocks = range(start // BLOCK, -(-stop // BLOCK))
        drawn = {
            layer: torch.cat([_block(self.seed, layer, heads, block, device) for block in blocks], -1)
            for layer in set(layers)
        }
        return torch.stack([drawn[layer] for layer in layers])[..., start - blocks.start * BLOCK :][..., : stop - start]

    def scores(self, prompt: Prompt) -> Tensor:
        return prompt.share(("keyformer", self.tau_start, self.seed, self.noise), lambda: self._gathered(prompt))

    def _gathered(self, prompt: Prompt) -> Tensor:
        queries = prompt.window(prompt.length)
        heads, head_dim = queries.shape[1], queries.shape[3]
        softmax = Softmax.of(prompt.scaling)
        scaling = head_dim**-0.5 if softmax.factor is None else softmax.factor
        noise = self.gumbel(prompt.layers, heads, 0, prompt.length, queries.device) if self.noise else None
        rows = []
        for row in range(prompt.rows):
            q, k = attention.exact(queries[row]), attention.exact(prompt.keys[row])
            if softmax.softcap is not None:
                capped = Softmax(scaling, softmax.softcap)
                rows.append(self._summed(q, k, capped, None if noise is None else noise[row]))
                continue
            if noise is not None:
                # The noise enters as one more dimension of the keys, which every query weighs with 1.
                q = torch.cat([q, q.new_ones(*q.shape[:2], 1)], -1)
                k = k.repeat_interleave(heads // prompt.kv_heads, 0)
                k = torch.cat([k, noise[row, :, :, None].to(k.dtype) / scaling], -1)
            rows.append(attention.accumulate(q, k, scaling / self.tau_start))
        return attention.sum_over_group(torch.stack(rows), prompt.kv_heads)

    def _summed(self, queries: Tensor, keys: Tensor, capped: Softmax, noise: Tensor | None) -> Tensor:
        """One row's scores by query head, `[heads, length]`, where logits are capped: the noise comes after the cap."""
        heads, length, _ = queries.shape
        total = queries.new_zeros(heads, length)
        for start in range(0, length, BLOCK):
            stop = min(start + BLOCK, length)
            logits = attention.logits(queries[:, start:stop], keys[:, :stop], capped)
            if noise is not None:
                logits = logits + noise[:, None, :stop]
            attention.hide_later(logits)
            total[:, :stop] += (logits / self.tau_start).softmax(-1).sum(1)
        return total

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.with_last(self.scores(prompt), part(self.recent, budget))

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        recent = part(self.recent, budget)
        return top_and_last(self.scores(prompt), budget - recent, recent)

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        store.add_column("score", self.scores(prompt))
        store.numbers |= {"step": 0, "new_tokens": prompt.max_new_tokens, "noised": store.seen}
        if self.noise:
            heads = prompt.heads
            table = prompt.share(
                ("keyformer noise", self.seed),
                lambda: _by_slot(self.gumbel(prompt.layers, heads, 0, store.seen, prompt.keys.device), prompt.kv_heads),
            )
            where = store.positions.clamp_min(0)[..., None].expand(*store.positions.shape, table.shape[-1])
            store.add_column("noise", table if store.length == store.seen else table.gather(2, where))
        super().compress(store, prompt)

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        assert weights is not None, "a policy that weighs is given the attention weights"
        kv_heads = store.kv_heads
        store.numbers["step"] += 1
        logits = weights.log().unflatten(1, (kv_heads, -1))
        if self.noise:
            new = store.seen - store.numbers["noised"]
            store.numbers["noised"] = store.seen
            drawn = self.gumbel(store.layers, weights.shape[1], store.seen - new, store.seen, store.device)
            noise = store.column("noise")
            noise[:, :, store.length - new :] = _by_slot(drawn, kv_heads)
            logits = logits + noise.transpose(2, 3)
        score = store.column("score")
        score += (logits / self._tau(store)).softmax(-1).sum(2)
        evict_lowest(store, score, part(self.recent, store.budget))

    def _tau(self, store: LayerStore) -> float:
        step, steps = store.numbers["step"], store.numbers["new_tokens"]
        return self.tau_start + (self.tau_end - self.tau_start) * (step / steps if step < steps else 1)


def _by_slot(noise: Tensor, kv_heads: int) -> Tensor:
    """`[rows, heads, n]` in the layout of a column, `[rows, kv_heads, n, group]`."""
    return noise.unflatten(1, (kv_heads, -1)).transpose(2, 3)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _block(seed: int, layer: int, heads: int, block: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise of `BLOCK` key positions, `[heads, BLOCK]`, the same in whatever chunks it is asked for."""
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + layer) * 1_000_003 + block) % 2**63)
    # Drawn on the CPU, so that it is the same everywhere, and copied once for all steps of a block.
    return -torch.empty(heads, BLOCK, dtype=torch.float32).exponential_(generator=generator).log().to(device)
