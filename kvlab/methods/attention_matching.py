"""Attention matching (Zweiger et al., 2026): chosen keys, a fitted bias and fitted values stand in for the prompt."""

import math
from collections.abc import Callable
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import attention
from kvlab.core.softmax import Softmax
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Scorer

BIAS = "bias"


class AttentionMatching(Scorer):
    """Keeps the keys that reference queries attend to most, with a fitted bias and value for each; prefill only.

    "Fast KV Compaction via Attention Matching" (Zweiger et al. 2026), the variant of highest attention keys. Reference
    queries are those of the model as it reads the prompt a second time. For each KV head the keys with the largest root
    mean square of their attention stay. Each gets a bias. The sum of exp(logit + bias) over the kept keys then fits
    that over all keys (bounded least squares). Each gets a value: the attention output then fits that of the full cache
    (least squares). Every generated token is also kept. Cost: a second pass over the prompt, and two least-squares
    problems for each KV head.

    Choices: the prompt is read again without words in between (the authors write "Repeat the previous context"). All
    layers are fitted on the queries of the full cache, not one layer after the other. All heads have the same budget
    (the authors optimise it for each model). A query is scaled by its own largest logit, as in the authors' code.
    Bounds and steps are those of their configuration.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt.
        bound: the largest bias, and the lowest below zero (3).
        iterations: projected gradient steps after the clamped solution of the first problem (2).
    """

    name: ClassVar[str] = "attention_matching"
    summary: ClassVar[str] = "most attended keys with a fitted bias and fitted values"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "merging"
    paper: ClassVar[Paper | None] = PAPERS["attention_matching"]

    bound: Annotated[float, Field(ge=0)] = 3.0
    iterations: Annotated[int, Field(ge=0)] = 2

    @property
    def pseudo_key(self) -> str | None:
        return "again"

    def pseudo_tokens(self, prompt: Tensor, vocabulary: int, encode: Callable[[str], Tensor]) -> Tensor:
        return prompt

    def scores(self, prompt: Prompt) -> Tensor:
        """Root mean square over the reference queries of the attention to each token, `[rows, kv_heads, length]`."""

        def compute() -> Tensor:
            rows = enumerate(zip(prompt.pseudo(self), prompt.keys, strict=True))
            squares = [
                attention.attention_over_prompt(queries, keys, prompt.softmax(row)).square().mean(-2)
                for row, (queries, keys) in rows
            ]
            return torch.stack(squares).unflatten(1, (prompt.kv_heads, -1)).mean(2).sqrt()

        return prompt.share(("attention matching",), compute)

    def rewrite(self, store: LayerStore, prompt: Prompt) -> None:
        if self.fits(prompt.length):
            return
        if prompt.lossy:
            raise KvlabError(
                f"{self.name} has fitted the entries of an earlier turn, and cannot fit them again; store later turns "
                "whole (turns='leave')"
            )
        kept, pseudo = self.prefill(prompt), prompt.pseudo(self).unflatten(1, (prompt.kv_heads, -1))
        bias, values = torch.zeros_like(prompt.keys[..., 0], dtype=torch.float32), prompt.values.clone()
        for row in range(prompt.rows):
            for head, stays in enumerate(kept[row]):
                own = prompt.softmax(row).group(head, prompt.kv_heads)
                logits = attention.logits(pseudo[row, head], prompt.keys[row, head, None], own)
                fitted = self._fitted(logits, values[row, head], stays, own)
                bias[row, head, stays], values[row, head, stays] = fitted[0], fitted[1].to(values.dtype)
        store.rewrite_values(values)
        store.add_column(BIAS, bias)

    def _fitted(self, logits: Tensor, values: Tensor, stays: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """The bias `[kept]` and the values `[kept, head_dim]` of one KV head.

        Args:
            logits: of its reference queries, `[group, n, length]`.
            values: `[length, head_dim]`.
            stays: positions that are kept, `[kept]`.
        """
        largest = logits.amax(-1, keepdim=True)
        sums = (logits - largest).exp_().sum(-1)
        output = softmax.shares(logits) @ values.float()
        # On the CPU, since not every GPU has float64.
        some, own = logits[..., stays].cpu().double(), softmax.to("cpu")
        raised = (some - largest.cpu()).exp()
        bias = self._weights(raised.flatten(0, 1), sums.cpu().double().flatten()).log()
        weights = own.shares(some + bias)
        fitted = torch.linalg.lstsq(*_reduced(weights.flatten(0, 1), output.cpu().double().flatten(0, 1))).solution
        return bias.float().to(values.device), fitted.float().to(values.device)

    def _weights(self, raised: Tensor, total: Tensor) -> Tensor:
        """Weights `[kept]` within the bounds for which `raised` `[n, kept]` times them is close to `total` `[n]`."""
        low, high = math.exp(-self.bound), math.exp(self.bound)
        raised, total = _reduced(raised, total[:, None])
        weights = torch.linalg.lstsq(raised, total).solution.clamp(low, high)
        size = torch.linalg.matrix_norm(raised, 2).square()
        for _ in range(self.iterations):
            weights = (weights - raised.T @ (raised @ weights - total) / size).clamp(low, high)
        return weights[:, 0]

    def bias(self, store: LayerStore) -> Tensor | None:
        return store.column(BIAS) if store.has_column(BIAS) else None


def _reduced(matrix: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A least-squares problem with the same solution and gradient, of at most as many equations as unknowns.

    The pivoted factorisation inside `lstsq` and the singular values of `matrix_norm` take most of a fit's time on the
    tall original. A plain QR of both sides is one fast pass.

    Args:
        matrix: `[equations, unknowns]`.
        target: `[equations, columns]`.
    """
    unknowns = matrix.shape[1]
    r = torch.linalg.qr(torch.cat([matrix, target], 1), mode="r").R[:unknowns]
    return r[:, :unknowns], r[:, unknowns:]
