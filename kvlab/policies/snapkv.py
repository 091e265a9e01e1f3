"""SnapKV (Li et al., 2024): what the last prompt tokens attend to."""

from typing import Annotated, ClassVar

import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor

from kvlab.policies.base import Budget, Policy, Prompt, top_and_last


class SnapKV(Policy):
    """Keeps the observation window and the older tokens that it attends to most; prefill only.

    SnapKV, section 4 and listing 1: attention of the last `window` queries over all keys, causal inside the window,
    summed over the window; the window's own columns dropped; average-pooled with zeros as padding; top (budget -
    window). Every generated token is kept besides. Cost: one window x prompt attention for each layer.

    Choices where the paper is silent: on GQA the group's scores are summed and its heads share one set.

    Parameters:
        budget: entries for each layer and KV head, the window included.
        window: last prompt tokens that observe and always stay (32 in most published runs).
        kernel: width of the pooling, odd (7).
    """

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "pooled attention of an observation window at the prompt's end"

    budget: Budget
    window: Annotated[int, Field(ge=1)] = 32
    kernel: Annotated[int, Field(ge=1)] = 7

    @field_validator("kernel")
    @classmethod
    def _odd(cls, kernel: int) -> int:
        if kernel % 2 == 0:
            raise ValueError(f"kernel {kernel} is even; pooling that keeps the length needs an odd one")
        return kernel

    @property
    def minimum(self) -> int:
        return self.window + 1

    @property
    def observes(self) -> int:
        return self.window

    def scores(self, prompt: Prompt) -> Tensor:
        return prompt.window_scores(self.window)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        scores = self.scores(prompt)
        older = prompt.length - self.window
        scores = scores.clone()
        scores[..., :older] = F.avg_pool1d(scores[..., :older], self.kernel, stride=1, padding=self.kernel // 2)
        return top_and_last(scores, budget - self.window, self.window)
