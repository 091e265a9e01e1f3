"""ZigZagKV (Zhong et al., 2024): SnapKV with budgets that follow how widely each layer attends."""

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.budgets import share_out
from kvlab.methods._base.prompt import Prompt
from kvlab.methods.snapkv import SnapKV


class ZigZagKV(SnapKV):
    """Takes SnapKV's scores and window, with a layer's budget proportional to its uncertainty; prefill only.

    ZigZagKV (Zhong et al. 2024): a layer's uncertainty is the number of tokens that gather `mass` of the window's
    attention, averaged over query heads. Budgets are proportional to it, at least `floor` of the mean budget, and sum
    to layers x budget. Every generated token is also kept. All layers are seen before any is compressed. Cost:
    SnapKV's, and one sort of each head's attention.

    Choices where the paper is silent: the attention of the window's queries is summed and normalised before it is
    gathered. The window belongs to the budget, so no budget is smaller. Entries beyond a short prompt's length go to
    the other layers in proportion.

    Parameters:
        budget: entries for each layer and KV head on average, the window included.
        window, kernel, sets: SnapKV's (32, 7; "group").
        mass: share of the attention to gather (0.9).
        floor: smallest budget of a layer, as a share of the mean budget (0.1).
    """

    name: ClassVar[str] = "zigzagkv"
    summary: ClassVar[str] = "SnapKV with budgets by how many tokens hold 90 % of a layer's attention"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "allocation"
    paper: ClassVar[Paper | None] = PAPERS["zigzagkv"]

    mass: Annotated[float, Field(gt=0, lt=1)] = 0.9
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1

    def survey(self, prompt: Prompt) -> Tensor:
        """Uncertainty of each layer, `[rows]`."""

        def uncertainty() -> Tensor:
            attended = prompt.window_sums(self.window)
            gathered = (attended / attended.sum(-1, keepdim=True)).sort(-1, descending=True).values.cumsum(-1)
            return ((gathered < self.mass).sum(-1) + 1).cpu().double().mean(-1)

        return prompt.share(("zigzagkv", self.window, self.mass), uncertainty)

    def plan(self, surveys: Tensor, prompt: Prompt) -> Tensor:
        """Budgets `[n_layers, batch]` from uncertainties of that shape."""
        budget = self.entries(prompt.length)
        floor = min(max(self.window, int(self.floor * budget)), prompt.length)
        return share_out(surveys.T, prompt.n_layers * budget, prompt.length, floor).T.to(prompt.keys.device)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        assert prompt.plan is not None, "its layers share a budget, which is planned first"
        return self.window_and_best(prompt, prompt.plan)
