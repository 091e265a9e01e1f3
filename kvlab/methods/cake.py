"""CAKE (Qin et al., 2025): attention that changes counts; budgets follow how spread and how changing it is."""

from typing import Annotated, ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvlab.core import attention
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.budgets import share_out
from kvlab.methods._base.policy import Kernel
from kvlab.methods._base.prompt import Prompt
from kvlab.methods.snapkv import SnapKV

UNDER_LOG = 1e-10
"""What the authors add to a weight before its logarithm is taken."""


class Cake(SnapKV):
    """Keeps the window and the older tokens whose attention is high or changes much, with a layer's budget by its
    preference; prefill only.

    "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences" (Qin et al. 2025): each token has an
    average-pooled indicator. It is the mean of the window's attention plus `gamma` times its variance over the window's
    queries. A layer's preference is H^(1 / tau1) x V^(1 / tau2). H is the entropy and V the variance of the window's
    attention to older tokens. The layers share layers x (budget - window) entries in proportion, and each keeps its
    window. Every generated token is also kept. All layers are seen before any is compressed. Cost: SnapKV's, and the
    entropy and variance of the window's attention.

    Choices: as in the authors' code, H is summed over heads and queries, V over heads and tokens. The indicators of a
    GQA group are averaged. They tune tau1 (0.4 to 1.9) and tau2 (0.4 to 2.3) for each model and budget; the default 1
    is their script's. The cascade, which bounds memory in the prefill and ends at the same budgets, is left out.
    Entries beyond a short prompt's length go to the other layers in proportion.

    Parameters:
        budget: entries for each layer and KV head on average, the window included.
        window: last prompt tokens that observe and always stay (32).
        kernel: width of the pooling, odd (5).
        sets: "group" or "head", as SnapKV's.
        gamma: weight of the variance (200).
        tau1: temperature of the entropy (1).
        tau2: temperature of the variance (1).
    """

    name: ClassVar[str] = "cake"
    summary: ClassVar[str] = "attention's mean and variance, budgets by its entropy and variance"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "allocation"
    paper: ClassVar[Paper | None] = PAPERS["cake"]

    kernel: Kernel = 5
    gamma: Annotated[int | float, Field(ge=0)] = 200.0
    tau1: Annotated[int | float, Field(gt=0)] = 1.0
    tau2: Annotated[int | float, Field(gt=0)] = 1.0

    def scores(self, prompt: Prompt) -> Tensor:
        """The indicator of each token, `[rows, sets, length]`."""
        by_head = prompt.share(
            ("cake", self.window, self.gamma),
            lambda: prompt.window_attention(self.window, lambda rows: rows.mean(-2) + self.gamma * _variance(rows)),
        )
        if self.sets == "head":
            return by_head
        return attention.sum_over_group(by_head, prompt.kv_heads) / (prompt.heads // prompt.kv_heads)

    def pooled(self, prompt: Prompt) -> Tensor:
        older = self.scores(prompt)[..., : prompt.length - self.window]
        return F.avg_pool1d(older, self.kernel, stride=1, padding=self.kernel // 2)

    def survey(self, prompt: Prompt) -> Tensor:
        """Preference of each layer, float64 `[rows]`."""

        def prefer(rows: Tensor) -> Tensor:
            older = rows[..., : prompt.length - self.window].float()
            # On the CPU, since not every GPU has float64.
            spread = -(older * (older + UNDER_LOG).log()).sum().cpu().double()
            return spread ** (1 / self.tau1) * _variance(older).sum().cpu().double() ** (1 / self.tau2)

        key = ("cake preference", self.window, self.tau1, self.tau2)
        return prompt.share(key, lambda: prompt.window_attention(self.window, prefer))

    def plan(self, surveys: Tensor, prompt: Prompt) -> Tensor:
        """Budgets `[n_layers, batch]` from preferences of that shape."""
        spare = prompt.n_layers * (self.entries(prompt.length) - self.window)
        shares = share_out(surveys.clamp_min(0).T, spare, prompt.length - self.window)
        return (self.window + shares.T).to(prompt.keys.device)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        assert prompt.plan is not None, "its layers share a budget, which is planned first"
        return self.window_and_best(prompt, prompt.plan)


def _variance(rows: Tensor) -> Tensor:
    """Variance of attention `[..., n, length]` over its n queries, unbiased, `[..., length]`; 0 of one query."""
    return rows.var(-2, correction=min(1, rows.shape[-2] - 1))
