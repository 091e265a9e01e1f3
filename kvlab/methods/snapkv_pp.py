"""SnapKV++ (RocketKV's first stage): SnapKV with one set for each GQA group and wide max-pooling."""

from typing import Annotated, ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvlab.core import ranking
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.policy import Budget, Kernel, Policy, top_and_last
from kvlab.methods._base.prompt import Prompt


class SnapKVPlusPlus(Policy):
    """Keeps the observation window and the older tokens that it attends to most, in wide clusters; prefill only.

    RocketKV (Behnam et al. 2025), section 3.3 and algorithm 1: the last `window` queries' attention is summed over the
    window and the GQA group. Only then it is max-pooled, with a kernel that grows with the prompt. The window and the
    top (budget - window) stay. Every generated token is also kept. Cost: one window x prompt attention for each layer.

    Choices: the kernel is the small one below the threshold, as in the paper's text (its algorithm box has the two the
    other way round). Pooling makes equal scores common: the earlier position wins. In the published runs the last
    prompt token is the first decoding step, so their window ends one token earlier.

    Parameters:
        budget: entries for each layer and KV head, the window included.
        window: last prompt tokens that observe and always stay (32).
        kernel: width of the pooling, odd; None chooses by the prompt's length:
        short, long, threshold: `short` (63) below `threshold` prompt tokens (48k; 12k for LongChat), else `long` (511).
    """

    name: ClassVar[str] = "snapkv_pp"
    summary: ClassVar[str] = "SnapKV per GQA group with wide max-pooling: RocketKV's first stage"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["rocketkv"]

    budget: Budget
    window: Annotated[int, Field(ge=1)] = 32
    kernel: Kernel | None = None
    short: Kernel = 63
    long: Kernel = 511
    threshold: Annotated[int, Field(ge=0)] = 48000

    @property
    def minimum(self) -> int:
        return self.window + 1

    @property
    def observes(self) -> int:
        return self.window

    def scores(self, prompt: Prompt) -> Tensor:
        return prompt.window_scores(self.window)

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.with_last(self._pooled(prompt), self.window)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return top_and_last(self._pooled(prompt), budget - self.window, self.window)

    def _pooled(self, prompt: Prompt) -> Tensor:
        kernel = self.kernel or (self.short if prompt.length < self.threshold else self.long)
        older = prompt.length - self.window

        def pooled() -> Tensor:
            scores = self.scores(prompt).clone()
            scores[..., :older] = F.max_pool1d(scores[..., :older], kernel, stride=1, padding=kernel // 2)
            return scores

        return prompt.share(("snapkv_pp", type(self).scores, self.window, kernel), pooled)
