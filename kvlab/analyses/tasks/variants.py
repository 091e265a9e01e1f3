"""Policies with one setting changed, for scores on tasks: how far does a verdict depend on that setting?

They have names of their own in results, but are not policies of the package.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.store import LayerStore
from kvlab.methods import Policy
from kvlab.methods._base.policy import Kernel
from kvlab.methods._base.prompt import Prompt
from kvlab.methods.compilerkv import CompilerKV
from kvlab.methods.dapq import DapQ
from kvlab.methods.quest import Quest
from kvlab.methods.snapkv import SnapKV
from kvlab.methods.sparq import SparQ
from kvlab.methods.zsmerge import ZSMerge


class UnpooledSnapKV(SnapKV):
    """SnapKV whose scores are not pooled, as DapQ's are not (DapQ, eq. 5 and 6)."""

    name: ClassVar[str] = "snapkv_unpooled"
    summary: ClassVar[str] = "SnapKV without pooling"

    kernel: Kernel = 1


class PooledDapQ(DapQ):
    """DapQ whose scores are average-pooled as SnapKV's are."""

    name: ClassVar[str] = "dapq_pooled"
    summary: ClassVar[str] = "DapQ with SnapKV's pooling"

    kernel: Kernel = 7

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        pooled = F.avg_pool1d(self.scores(prompt), self.kernel, stride=1, padding=self.kernel // 2)
        return ranking.top_positions(pooled, budget)


class QuestionZSMerge(ZSMerge):
    """ZSMerge with the two residual slots of its table 2, and first scores that come from the question.

    In the paper the last 8 queries of a prompt are the question's; here a chat template follows them.

    Parameters:
        after: tokens after the question, whose queries start no scores (`planning.after_text`).
    """

    name: ClassVar[str] = "zsmerge_question"
    summary: ClassVar[str] = "ZSMerge with two slots and scores from the question"

    residual: int | float = 2
    after: Annotated[int, Field(ge=0)] = 0

    @property
    def observes(self) -> int:
        return self.window + self.after

    def scores(self, prompt: Prompt) -> Tensor:
        def of_question(rows: Tensor) -> Tensor:
            return self._decayed(rows[..., : rows.shape[-2] - self.after, :])

        return prompt.share(
            ("zsmerge", self.window, self.decay, self.after),
            lambda: attention.sum_over_group(prompt.window_attention(self.observes, of_question), prompt.kv_heads),
        )


class UnmergedZSMerge(ZSMerge):
    """ZSMerge without residual slots, which evicts plainly: with nothing merged no logit is changed."""

    name: ClassVar[str] = "zsmerge_unmerged"
    summary: ClassVar[str] = "ZSMerge that evicts instead of merging"

    residual: int | float = 0

    bias = Policy.bias


class FilledCompilerKV(CompilerKV):
    """CompilerKV that fills up to its budget, so that it stores as much as its rivals.

    A plan also gives it weights of heads that were learnt one head at a time, where there are some.
    """

    name: ClassVar[str] = "compilerkv_filled"
    summary: ClassVar[str] = "CompilerKV filled up to its budget"

    pad: Literal["none", "budget"] = "budget"


class TwinCompilerKV(FilledCompilerKV):
    """CompilerKV that differs from SnapKV in its utility alone, as the authors' runs pool their scores, too."""

    name: ClassVar[str] = "compilerkv_twin"
    summary: ClassVar[str] = "CompilerKV filled up, with SnapKV's pooling and kept window"

    kernel: Kernel = 7
    recent: Annotated[int, Field(ge=0)] = 32


class SpendingQuest(Quest):
    """Quest with the setting of RocketKV's comparison: it reads the first entries of the page that no longer fits."""

    name: ClassVar[str] = "quest_spending"
    summary: ClassVar[str] = "Quest that spends its budget"

    page: Annotated[int, Field(ge=1)] = 1
    last: Literal["whole", "cut"] = "cut"


class RoundedSparQ(SparQ):
    """SparQ whose d / c dimensions are rounded to the nearest number, as the large d of the papers' models allows.

    2 of 128 dimensions at a compression of 64 would be the one of 64 at 32 that is left when fractions are cut off.
    """

    name: ClassVar[str] = "sparq_rounded"
    summary: ClassVar[str] = "SparQ with a rounded number of dimensions"

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        budget, length = self.entries(prompt.length), prompt.length + prompt.max_new_tokens
        rank = min(store.head_dim, max(1, round(store.head_dim * budget / length)))
        SparQ(budget=self.budget, rank=rank).compress(store, prompt)


VARIANTS: dict[str, type[Policy]] = {
    variant.name: variant
    for variant in (
        UnpooledSnapKV,
        PooledDapQ,
        QuestionZSMerge,
        UnmergedZSMerge,
        FilledCompilerKV,
        TwinCompilerKV,
        SpendingQuest,
        RoundedSparQ,
    )
}
