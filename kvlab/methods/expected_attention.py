"""Expected Attention (Devoto et al., 2025): what queries that are yet to come can be expected to attend to."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import attention
from kvlab.core.rotation import Rotation
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.needs import Needs
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Scorer


class ExpectedAttention(Scorer):
    """Keeps the tokens that queries at the next positions would attend to, were they distributed as the prompt's;
    prefill only.

    "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution" (Devoto et al.
    2025), section 3: queries before RoPE are a Gaussian. Its mean mu and covariance Sigma are turned by the mean
    rotation of the next `future` positions. The expected attention of a key is exp(mu k / sqrt(d) + k Sigma k / 2d). It
    is normalised, averaged over the GQA group, and multiplied by the norm of the value. Every generated token is also
    kept. Cost: the queries of the whole prompt before RoPE, and one product of the keys with a head_dim x head_dim
    matrix for each query head.

    Choices: the first `sinks` tokens always stay; their queries and keys take no part, as in kvpress. A model's own
    factor of the logits replaces 1 / sqrt(d); soft caps and learnt sinks are left out.

    Parameters:
        budget: entries for each layer and KV head, sinks included, or a fraction of the prompt.
        future: how many positions after the prompt the queries are expected at (512).
        sinks: first tokens that always stay (4).
        covariance: whether the covariance counts, or the mean alone.
        value_norm: whether expected attention is multiplied by the norm of the value.
        epsilon: what is added to it before (0).
    """

    name: ClassVar[str] = "expected_attention"
    summary: ClassVar[str] = "prompt tokens that future queries can be expected to attend to"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["expected_attention"]

    future: Annotated[int, Field(ge=1)] = 512
    sinks: Annotated[int, Field(ge=0)] = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: Annotated[float, Field(ge=0)] = 0.0

    @property
    def minimum(self) -> int:
        return self.sinks + 1

    @property
    def needs(self) -> Needs:
        return Needs(rotation=True, pre_queries=True)

    def scores(self, prompt: Prompt) -> Tensor:
        """Expected attention of the tokens after the sinks, and zeros for these."""
        key = ("expected attention", self.future, self.sinks, self.covariance, self.value_norm, self.epsilon)
        return prompt.share(key, lambda: self._scored(prompt))

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        scores = self.scores(prompt).clone()
        scores[..., : self.sinks] = torch.inf
        return scores

    def _scored(self, prompt: Prompt) -> Tensor:
        scored = torch.zeros(prompt.keys.shape[:3], dtype=torch.float32, device=prompt.keys.device)
        queries, rotations = prompt.pre_queries(self), prompt.rotation(self)
        if prompt.length <= self.sinks:
            return scored
        for row, rotation in enumerate(rotations):
            factor = prompt.softmax(row).scale(queries.shape[-1])
            keys = attention.exact(prompt.keys[row, :, self.sinks :])
            logits = self._logits(attention.exact(queries[row, :, self.sinks :]), keys, rotation, factor)
            expected = logits.softmax(-1).unflatten(0, (prompt.kv_heads, -1)).mean(1)
            if self.value_norm:
                norms = attention.exact(prompt.values[row, :, self.sinks :]).norm(dim=-1)
                expected = (expected + self.epsilon) * norms
            scored[row, :, self.sinks :] = expected
        return scored

    def _logits(self, queries: Tensor, keys: Tensor, rotation: Rotation, factor: float) -> Tensor:
        """Logarithms of the expected attention before it is normalised, `[heads, n]`.

        Args:
            queries: before RoPE, `[heads, n, head_dim]`.
            keys: `[kv_heads, n, head_dim]`.
        """
        heads, n, head_dim = queries.shape
        first = n + self.sinks
        turn = rotation.mean(torch.arange(first, first + self.future, device=queries.device), head_dim)
        mean = queries.mean(1)
        logits = []
        # One head at a time, since each brings a matrix of its own to all keys of its group.
        for head, own in enumerate(keys.repeat_interleave(heads // len(keys), dim=0)):
            found = own @ (turn @ mean[head]) * factor
            if self.covariance:
                off = (queries[head] - mean[head]) @ turn.T
                found += ((own @ (off.T @ off / n)) * own).sum(-1) * factor**2 / 2
            logits.append(found)
        return torch.stack(logits)
