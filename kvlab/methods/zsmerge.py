"""ZSMerge: recent tokens, tokens of high contribution, and a few slots into which the rest is merged."""

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.store import LayerStore
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.eviction import last_of_lowest
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt

TAKEN = "residual slots taken"


class ZSMerge(Policy):
    """Keeps three parts: proximity (the latest Bp), context (the Bc of largest score), residual (Br slots of merged
    tokens).

    ZSMerge, algorithm 1 and eq. 3-8: scores decay and gather attention (eq. 5). The token that leaves the proximity
    part joins the context. The context's lowest score moves to a free residual slot, or is merged into the one with the
    largest dot product (eq. 6-7). Logits of merged entries get alpha x log(count) (eq. 8). Of equal scores the earlier
    position stays. Cost: one score and one count for each entry.

    Choices: scores start from the last `window` prompt queries (appendix B); the group's attention is summed. At the
    end of the prefill contiguous runs of the evicted tokens, averaged, fill the residual slots, as in the authors'
    code. `initial="similarity"` merges them one by one as in decoding. A slot carries the position of its first token.
    In the authors' code the token leaving the proximity part always displaces the lowest of the others
    (`newcomer="displaces"`); algorithm 1 compares it too. Algorithm 1 scores by eq. 2, whose softmax has no bias, and
    attends by eq. 8: `scored="plain"`. With `"biased"` scores come from the attention itself. A query that attends much
    to merged slots then adds less to the other scores.

    Parameters:
        budget: entries for each layer and KV head, B = Bp + Bc + Br.
        proximity: Bp / B (0.5).
        residual: Br as a share of B - Bp, rounded down to at least one slot (0.02), or a number of slots; 0 is plain
            eviction.
        decay: lambda of eq. 5 (0.98).
        window: prompt queries that start the scores (8).
        alpha: strength of the logit bias, in [0, 1] (1).
        initial: how the residual slots are filled after the prefill.
        newcomer: whether the token that leaves the proximity part competes with the context.
        scored: whose attention the scores gather, that of eq. 8 as it was attended ("biased") or that of eq. 2 over the
            same entries ("plain").
        merged_score: score of a merged entry; it stays in its slot whatever its score, so no retained set depends on
            it.
    """

    name: ClassVar[str] = "zsmerge"
    summary: ClassVar[str] = "recent, high-contribution and merged entries, while decoding"
    family: ClassVar[str] = "evicts or merges while decoding"
    kind: ClassVar[str] = "merging"
    paper: ClassVar[Paper | None] = PAPERS["zsmerge"]

    budget: Budget
    proximity: Annotated[float, Field(gt=0, lt=1)] = 0.5
    residual: int | float = 0.02
    decay: Annotated[float, Field(ge=0, le=1)] = 0.98
    window: Annotated[int, Field(ge=1)] = 8
    alpha: Annotated[float, Field(ge=0, le=1)] = 1.0
    initial: Literal["runs", "similarity"] = "runs"
    newcomer: Literal["competes", "displaces"] = "competes"
    scored: Literal["biased", "plain"] = "biased"
    merged_score: Literal["max", "sum"] = "max"

    @field_validator("residual")
    @classmethod
    def _share_or_slots(cls, residual: int | float) -> int | float:
        if residual < 0 or (isinstance(residual, float) and residual >= 1):
            raise ValueError(f"residual {residual} is neither a number of slots nor a share in [0, 1)")
        return residual

    @property
    def minimum(self) -> int:
        """Room for at least one entry in every part."""
        # Enough for Bp >= 1, and for B - Bp to hold the residual slots and one more; at most one off, since Bp is
        # floored.
        slots = self.residual if isinstance(self.residual, int) else bool(self.residual)
        budget = max(math.ceil(1 / self.proximity), math.ceil((slots + 1) / (1 - self.proximity)) - 1)
        while min(self._parts(budget)[:2]) < 1:
            budget += 1
        return budget

    @property
    def observes(self) -> int:
        return self.window

    def _parts(self, budget: int) -> tuple[int, int, int]:
        """(Bp, Bc, Br) of a budget (eq. 3)."""
        recent = int(self.proximity * budget)
        residual = self.residual
        if isinstance(residual, float) and residual > 0:
            residual = max(1, int(residual * (budget - recent)))
        return recent, budget - recent - int(residual), int(residual)

    def scores(self, prompt: Prompt) -> Tensor:
        return prompt.share(
            ("zsmerge", self.window, self.decay),
            lambda: attention.sum_over_group(prompt.window_attention(self.window, self._decayed), prompt.kv_heads),
        )

    def _decayed(self, rows: Tensor) -> Tensor:
        """Attention `[..., queries, length]` summed over the queries, the older ones weighing less (eq. 5)."""
        age = torch.arange(rows.shape[-2] - 1, -1, -1, dtype=rows.dtype, device=rows.device)
        return (rows * (self.decay**age)[:, None]).sum(-2)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        kept, leaving = self._partition(prompt, budget)
        return torch.cat([kept, *(run[..., :1] for run in self._runs(leaving, budget))], -1).sort(-1).values

    def _partition(self, prompt: Prompt, budget: int) -> tuple[Tensor, Tensor]:
        """Positions that stay as they are, and those that leave for the residual part, both ascending."""
        recent, context, residual = self._parts(budget)
        older = max(prompt.length - recent, 0)
        order = self.scores(prompt)[..., :older].sort(dim=-1, descending=True, stable=True).indices
        latest = torch.arange(older, prompt.length, device=order.device).expand(
            *order.shape[:-1], prompt.length - older
        )
        kept = torch.cat([order[..., :context], latest], -1)
        leaving = order[..., context:] if residual else order[..., :0]
        return kept.sort(-1).values, leaving.sort(-1).values

    def _runs(self, leaving: Tensor, budget: int) -> list[Tensor]:
        """The leaving tokens as runs from which the residual slots start, `[rows, kv_heads, m]` each; the first token
        of a run gives the slot its position.
        """
        residual = self._parts(budget)[2]
        if self.initial == "similarity":
            return list(leaving[..., :residual].split(1, dim=-1)) if residual else []
        return [run for run in leaving.tensor_split(max(residual, 1), dim=-1) if run.shape[-1]]

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        store.budget = self.entries(prompt.length)
        kept, leaving = self._partition(prompt, store.budget)
        runs = self._runs(leaving, store.budget)
        store.add_column("score", self.scores(prompt))
        residual = torch.zeros(store.rows, store.kv_heads, store.length, dtype=torch.bool, device=kept.device)
        firsts = torch.cat([kept[..., :0], *(run[..., :1] for run in runs)], -1)
        if runs:
            for run in runs:
                if run.shape[-1] > 1:
                    store.merge(run[..., 1:], run[..., 0], {"score": self.merged_score})
            if self.initial == "similarity":
                for source in leaving[..., len(runs) :].split(1, dim=-1):
                    store.merge(source, _most_similar(store, firsts, source[..., 0]), {"score": self.merged_score})
            residual.scatter_(-1, firsts, True)
            kept = torch.cat([kept, firsts], -1).sort(-1).values
        store.add_column("residual", residual)
        store.numbers[TAKEN] = firsts.shape[-1]
        if kept.shape[-1] < prompt.length:
            store.evict(kept)

    def bias(self, store: LayerStore) -> Tensor | None:
        return self.alpha * store.fusion_counts.log() if self.alpha and store.may_be_merged else None

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        assert weights is not None, "a policy that weighs is given the attention weights"
        kv_heads = store.kv_heads
        if self.scored == "plain":
            weights = self._unbiased(store, weights)
        score = store.column("score")
        score.mul_(self.decay).add_(attention.sum_over_group(weights, kv_heads))

        # One token leaves at a step; more leave only after a turn of a chat that was stored whole.
        while self._one_leaves(store):
            pass

    def _unbiased(self, store: LayerStore, weights: Tensor) -> Tensor:
        """Weights of eq. 8 `[rows, heads, slots]` as eq. 2 would have given them: without the bias of the counts."""
        bias = self.bias(store)
        if bias is None:
            return weights
        plain = weights * (-attention.to_query_heads(bias, weights.shape[1])).exp()
        # The share of learnt sinks stays in the sum; without them it is 0.
        elsewhere = (1 - weights.sum(-1, keepdim=True)).clamp_min(0)
        return plain / (plain.sum(-1, keepdim=True) + elsewhere)

    def _one_leaves(self, store: LayerStore) -> bool:
        """Lines 7-18 of algorithm 1: whether the context part was over its budget and gave up a token."""
        recent, context, residual = self._parts(store.budget)
        older = store.length - recent
        is_residual = store.column("residual")
        slots_taken = store.numbers[TAKEN]
        if older - slots_taken <= context:
            return False
        contenders = store.column("score")[..., :older].masked_fill(is_residual[..., :older], torch.inf)
        if self.newcomer == "displaces" and older - slots_taken > 1:
            contenders[..., -1] = torch.inf
        leaves = last_of_lowest(contenders)
        if slots_taken < residual:
            is_residual.scatter_(-1, leaves[..., None], True)
            store.numbers[TAKEN] += 1
            return True
        if residual:
            firsts = ranking.top_positions(is_residual.float(), slots_taken)
            store.merge(leaves[..., None], _most_similar(store, firsts, leaves), {"score": self.merged_score})
        store.drop(leaves)
        return True


def _most_similar(store: LayerStore, candidates: Tensor, slot: Tensor) -> Tensor:
    """Of the slots `candidates` `[rows, kv_heads, n]`, the one whose key has the largest dot product with `slot`'s
    (eq. 6).
    """
    keys, _ = store.gather(torch.cat([slot[..., None], candidates], -1))
    query, keys = keys[:, :, :1].float(), keys[:, :, 1:].float()
    best = (keys @ query.transpose(-1, -2)).squeeze(-1).argmax(-1, keepdim=True)
    return candidates.gather(-1, best).squeeze(-1)
