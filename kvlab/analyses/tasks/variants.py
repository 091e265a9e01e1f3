"""Policies with one setting changed, for scores on tasks: how far does a verdict depend on that setting?

They have names of their own in results, but are not policies of the package.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from kvlab.core import ranking
from kvlab.methods import Policy
from kvlab.methods.base import Kernel
from kvlab.methods.compilerkv import CompilerKV
from kvlab.methods.dapq import DapQ
from kvlab.methods.prompt import Prompt
from kvlab.methods.snapkv import SnapKV
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

    In the paper the last 8 queries of a prompt are the question's; here a chat template adds 8 tokens after it.
    """

    name: ClassVar[str] = "zsmerge_question"
    summary: ClassVar[str] = "ZSMerge with two slots and scores from the question"

    residual: int | float = 2
    window: int = 16


class FilledCompilerKV(CompilerKV):
    """CompilerKV that fills up to its budget, so that it stores as much as its rivals."""

    name: ClassVar[str] = "compilerkv_filled"
    summary: ClassVar[str] = "CompilerKV filled up to its budget"

    pad: Literal["none", "budget"] = "budget"


VARIANTS: dict[str, type[Policy]] = {
    variant.name: variant for variant in (UnpooledSnapKV, PooledDapQ, QuestionZSMerge, FilledCompilerKV)
}
