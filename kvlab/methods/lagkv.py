"""LagKV (Liang et al., 2025): tokens that stand out from the range of those that follow."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Scorer


class LagKV(Scorer):
    """Keeps sinks, the latest tokens, and of each partition those whose channels vary most by the next one's range.

    LagKV (Liang et al. 2025), eq. 5-9: after the sinks the prompt is cut into partitions of `lag` tokens. Each channel
    of a partition's keys and values is scaled by its minimum and maximum in the *next* partition. A token's score is
    the standard deviation over its scaled channels. A softmax over the partition follows, and a mean over keys and
    values. All partitions keep equally many. The last whole partition, which has no next one, and the tokens after it
    stay. Every generated token is also kept. Cost: no attention; one pass over keys and values.

    Choices: tokens compete across partitions by their rank within their own, as in kvpress. All partitions get the same
    share, and the first ones one more where it does not divide. Where the budget has no room for all of the latest
    tokens, the sinks and the most recent ones stay. A channel that is constant in the next partition counts as unscaled
    range 1.

    Parameters:
        budget: entries for each layer and KV head, sinks and the latest tokens included.
        sinks: first tokens that always stay (4 here; 16 in the paper's runs).
        lag: tokens of a partition (128).
    """

    name: ClassVar[str] = "lagkv"
    summary: ClassVar[str] = "sinks, latest tokens, and those that stand out from what follows them"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["lagkv"]

    sinks: Annotated[int, Field(ge=0)] = 4
    lag: Annotated[int, Field(ge=2)] = 128

    @property
    def minimum(self) -> int:
        return self.sinks + 1

    def scores(self, prompt: Prompt) -> Tensor:
        """The rank of each token within its partition, 0 to 1; infinity for sinks and the latest tokens."""
        return prompt.share(("lagkv", self.sinks, self.lag), lambda: self._ranked(prompt))

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        scores = self.scores(prompt)
        if budget >= int(scores[0, 0].isinf().sum()):
            return scores
        recency = torch.arange(prompt.length, device=scores.device, dtype=scores.dtype)
        recency[: self.sinks] = torch.inf
        return recency.expand_as(scores)

    def _ranked(self, prompt: Prompt) -> Tensor:
        partitions = max((prompt.length - self.sinks) // self.lag, 0)
        judged = max(partitions - 1, 0) * self.lag
        ranked = torch.full(prompt.keys.shape[:3], torch.inf, dtype=torch.float32, device=prompt.keys.device)
        if judged:
            end = self.sinks + judged
            keys, values = (x[:, :, self.sinks : end + self.lag] for x in (prompt.keys, prompt.values))
            best = ranking.ranks((self._standing_out(keys) + self._standing_out(values)) / 2).to(ranked.dtype)
            ranked[:, :, self.sinks : end] = (1 - (best + 1) / self.lag).flatten(2)
        return ranked

    def _standing_out(self, states: Tensor) -> Tensor:
        """Eq. 5-8 for whole partitions `[rows, kv_heads, n x lag, head_dim]`: `[rows, kv_heads, n - 1, lag]`."""
        parts = attention.exact(states).unflatten(2, (-1, self.lag))
        own, following = parts[:, :, :-1], parts[:, :, 1:]
        low, high = following.amin(-2, keepdim=True), following.amax(-2, keepdim=True)
        span = torch.where(high > low, high - low, 1.0)
        return ((own - low) / span).std(-1).softmax(-1)
