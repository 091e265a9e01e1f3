"""LAQ++ (Wang et al., 2025): what a drafted answer and the prompt's last tokens attend to."""

from typing import Annotated, ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.needs import Draft, Needs
from kvlab.methods._base.policy import Budget, Kernel, Policy, top_and_last
from kvlab.methods._base.prompt import Prompt
from kvlab.methods.snapkv_pp import SnapKVPlusPlus

CLUSTER = 7
"""Width of the pooling in the eviction before the draft."""


class LAQ(Policy):
    """Keeps the prompt tokens that a drafted answer and the prompt's last tokens attend to most; prefill only.

    Lookahead Q-Cache (Wang et al. 2025), LAQ++, with the defaults of the authors' code: SnapKV keeps `draft` entries of
    the prompt. The model drafts `answer` greedy tokens from these. The attention of their queries and of the last
    `window` prompt queries over the whole prompt is summed and max-pooled. The window and the top (budget - window)
    stay. The draft is dropped, and every generated token is kept. Cost: `answer` passes of up to `answer` tokens on top
    of the whole prompt, one token after the other.

    Choices: the group's heads are summed and share one set. Draft queries see the whole prompt and not each other. In
    the authors' code the i-th of n sees the prompt only up to its (n - i)-th last token. An end-of-text token does not
    end the draft. The authors give the draft the budget itself (`draft` equal to `budget`); a fixed size lets one trace
    serve all budgets.

    Parameters:
        budget: entries for each layer and KV head, the window included.
        window: last prompt tokens that observe and always stay (8); 0 for LAQ, where the draft observes alone.
        kernel: width of the pooling, odd (7).
        answer: tokens of the draft (8).
        draft: entries that the draft sees of the prompt, for each layer and KV head (256 in the authors' script).
        draft_window: last prompt tokens that choose these, and are among them (32).
    """

    name: ClassVar[str] = "laq"
    summary: ClassVar[str] = "attention of a short drafted answer and of the prompt's last tokens"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["laq"]

    budget: Budget
    window: Annotated[int, Field(ge=0)] = 8
    kernel: Kernel = 7
    answer: Annotated[int, Field(ge=1)] = 8
    draft: Budget = 256
    draft_window: Annotated[int, Field(ge=1)] = 32

    @model_validator(mode="after")
    def _room_for_the_draft(self) -> Self:
        if isinstance(self.draft, int) and self.draft <= self.draft_window:
            raise ValueError(f"draft {self.draft} must be above draft_window, which is {self.draft_window}")
        return self

    @property
    def minimum(self) -> int:
        return self.window + 1

    @property
    def observes(self) -> int:
        return max(self.window, self.draft_window)

    @property
    def reads_perplexity(self) -> int:
        # A live run then notes the logits after the prompt, which give the draft's first token.
        return 1

    @property
    def needs(self) -> Needs:
        key = f"draft/{self.answer}/{self.draft}/{self.draft_window}"
        return Needs(pseudo=Draft(key, self.answer, self._seen_by_the_draft))

    def _seen_by_the_draft(self, prompt: Prompt) -> Tensor:
        first = SnapKVPlusPlus(budget=self.draft, window=self.draft_window, kernel=CLUSTER)
        return first.prefill(prompt.seen_by(first))

    def scores(self, prompt: Prompt) -> Tensor:
        def summed() -> Tensor:
            rows = [
                attention.attention_over_prompt(q, k, prompt.softmax(row)).sum(-2)
                for row, (q, k) in enumerate(zip(prompt.pseudo(self), prompt.keys, strict=True))
            ]
            drafted = attention.sum_over_group(torch.stack(rows), prompt.kv_heads)
            return drafted + prompt.window_scores(self.window) if self.window else drafted

        pseudo = self.needs.pseudo
        assert pseudo is not None, "a draft is asked for"
        return prompt.share(("laq", pseudo.key, self.window), summed)

    def _pooled(self, prompt: Prompt) -> Tensor:
        scores, older = self.scores(prompt).clone(), prompt.length - self.window
        scores[..., :older] = F.max_pool1d(scores[..., :older], self.kernel, stride=1, padding=self.kernel // 2)
        return scores

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.with_last(self._pooled(prompt), self.window)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return top_and_last(self._pooled(prompt), budget - self.window, self.window)
