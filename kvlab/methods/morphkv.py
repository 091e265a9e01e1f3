"""MorphKV: a constant-sized cache, refined at every decoding step by the attention of the recent tokens."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core.store import LayerStore
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base import profile
from kvlab.methods._base.eviction import evict_lowest
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt


class MorphKV(Policy):
    """Keeps the R most recent tokens and the C older ones that those attended to most, at every decoding step.

    MorphKV (Ghadia et al. 2025), algorithm 1 and eq. 4-7, with budget = C + R: the prefill evicts nothing. The first
    decoding query reads the whole prompt; then the cache shrinks to the budget. A step's window is its own token and
    the R - 1 before it. Their attention rows, over the entries then stored, are cached and never recomputed. Cost: R
    cached weights for each entry. The paper has no question after the compression: it would find the budget's entries,
    chosen by the prompt's own window.

    Choices: attention weights are summed over the GQA group before fusion (algorithm 1). The authors' code differs. For
    Llama it sums logits over the group and takes one softmax (`aggregation="logits"`); for other models it takes the
    largest weight in the group ("max"). In both a softmax counts the distant keys only (`renormalise=True`). With "max"
    it is the softmax of each query head, *before* the group's maximum; with "logits" that of the group. "sum" with
    renormalisation is in neither paper nor code and follows "max": each head first, then the sum. A head that looks
    mostly at the window then counts as much as the others. The authors' code also stores one entry more.

    Parameters:
        budget: entries for each layer and KV head, C + R.
        window: R (32 on LongBench, 200 on LongGenBench, 30 on LongWriter).
        fusion: how the window's rows are fused, "sum" (eq. 5) or "max" (eq. 6).
        aggregation: how a GQA group's heads are combined.
        renormalise: each softmax over the keys older than the window only; a row that had none when it was attended
            stays as it was.
    """

    name: ClassVar[str] = "morphkv"
    summary: ClassVar[str] = "recent tokens and the older ones they attend to, constant size while decoding"
    family: ClassVar[str] = "evicts or merges while decoding"
    kind: ClassVar[str] = "decoding"
    paper: ClassVar[Paper | None] = PAPERS["morphkv"]

    budget: Budget
    window: Annotated[int, Field(ge=1)] = 32
    fusion: Literal["sum", "max"] = "sum"
    aggregation: Literal["sum", "max", "logits"] = "sum"
    renormalise: bool = False

    @property
    def minimum(self) -> int:
        return self.window + 1

    @property
    def observes(self) -> int:
        return self.window

    def scores(self, prompt: Prompt) -> Tensor:
        return self._fuse(self._profile(prompt))

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        super().compress(store, prompt)
        profile.begin(store, self.window, self._profile(prompt))

    def evict_pending(self, store: LayerStore) -> None:
        # After tokens that were stored whole, whose rows nobody has seen, the next step's own row has to decide.
        if store.numbers["rows"] == store.seen and store.length > store.budget:
            evict_lowest(store, self._fuse(store.column(profile.PROFILE)), self.window)

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        assert weights is not None, "a policy that weighs is given the attention weights"
        row = self._aggregate(weights[:, :, None], store.positions.shape[1])[..., 0]
        rows = profile.follow(store, self.window, row)
        if store.length > store.budget:
            evict_lowest(store, self._fuse(rows), self.window)

    def _profile(self, prompt: Prompt) -> Tensor:
        """Rows of the window's tokens over the prompt, `[rows, kv_heads, length, n]`, the oldest first."""

        def rows() -> Tensor:
            return prompt.window_attention(self.window, lambda w: self._aggregate(w, prompt.kv_heads))

        return prompt.share(("morphkv", self.window, self.aggregation, self.renormalise), rows)

    def _aggregate(self, weights: Tensor, kv_heads: int) -> Tensor:
        """Attention rows `[..., heads, n, length]` combined over each group: `[..., kv_heads, length, n]`."""
        *batch, heads, n, length = weights.shape
        grouped = weights.view(*batch, kv_heads, heads // kv_heads, n, length)
        match self.aggregation:
            case "sum":
                rows = self._scaled(grouped).sum(-3)
            case "max":
                rows = self._scaled(grouped).amax(-3)
            case _:
                # A log-weight is its logit less a constant of the row, which the softmax takes away again.
                rows = self._scaled(grouped.log().sum(-3).softmax(-1))
        return rows.transpose(-1, -2)

    def _scaled(self, rows: Tensor) -> Tensor:
        """With `renormalise`, rows `[..., length]` as if the softmax had seen the distant keys only."""
        older = rows.shape[-1] - self.window
        if not self.renormalise or older <= 0:
            return rows
        return rows / rows[..., :older].sum(-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)

    def _fuse(self, rows: Tensor) -> Tensor:
        return rows.sum(-1) if self.fusion == "sum" else rows.amax(-1)
