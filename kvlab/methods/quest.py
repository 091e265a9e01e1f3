"""Quest (Tang et al., 2024): reads the pages whose keys could matter most to the step's query."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import attention
from kvlab.core.softmax import Scaling
from kvlab.core.store import LayerStore
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base import pages
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt


class Quest(Policy):
    """Keeps the whole cache and reads, at every decoding step, the pages with the largest bound on their logits.

    Quest (Tang et al. 2024), algorithm 1: consecutive entries form pages. A page stores the elementwise minimum and
    maximum of its keys. Its score for a query q is the sum over dimensions of max(q x min, q x max): no logit in the
    page is larger. Within the budget everything is read. Cost: two vectors for each page, stored, and loaded at every
    step.

    Choices: RocketKV's accounting (its appendix A.3), half of what is read finds and half attends. A page's two vectors
    weigh as much as one entry, so there are at most budget / 2 pages. Pages grow with the compression ratio, which
    counts the prompt and the announced new tokens. On GQA the scores are added over the group, as RocketKV's authors
    do, which shares one selection. Pages are read whole, best first, up to the first that no longer fits. If the best
    page exceeds the whole share, its first entries are read. The own entry is not forced. Of equal scores the earlier
    page is read. A sequence known to stay within the budget gets no pages.

    Parameters:
        budget: entries read at each step for each layer and KV head, finding included.
        page: entries of a page (16), or more where the budget is small.
        last: "whole" as above leaves a part of the budget unspent. "cut" reads the first entries of the page that no
            longer fits, as RocketKV's comparison does (its appendix A.3).
    """

    name: ClassVar[str] = "quest"
    summary: ClassVar[str] = "reads the pages with the largest bound on their logits, stores all"
    family: ClassVar[str] = "stores all, reads a selection"
    kind: ClassVar[str] = "selection"
    paper: ClassVar[Paper | None] = PAPERS["quest"]

    budget: Budget
    page: Annotated[int, Field(ge=1)] = 16
    last: Literal["whole", "cut"] = "whole"

    @property
    def minimum(self) -> int:
        return 2

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        super().compress(store, prompt)
        length = prompt.length + prompt.max_new_tokens
        # Half the budget pays for the two vectors of every page.
        most = max(1, store.budget * store.vectors // 4)
        pages.begin(store, max(self.page, -(-length // most)))
        if length > store.budget:
            pages.summaries(store)

    def select(self, store: LayerStore, queries: Tensor, scaling: Scaling) -> Tensor | None:
        if store.length <= store.budget:
            return None
        bounds = page_bounds(queries, pages.summaries(store))
        # A page's maximum and minimum are two vectors.
        finding = pages.number(store) * 2 // store.vectors
        return pages.read(store, bounds, max(1, min(store.budget // 2, store.budget - finding)), cut=self.last == "cut")

    def overhead_bytes(self, store: LayerStore) -> int:
        return store.memory["pages"].nbytes if store.length > store.budget else 0


def page_bounds(queries: Tensor, summaries: Tensor) -> Tensor:
    """Upper bounds on q . k of the keys in each page, summed over the group: `[rows, kv_heads, pages]`.

    Args:
        queries: `[rows, heads, 1, head_dim]`.
        summaries: `[rows, kv_heads, 2, head_dim, pages]`, maxima and minima.
    """
    grouped = attention.exact(queries[:, :, 0]).unflatten(1, (summaries.shape[1], -1))
    # max(q x min, q x max) is q x max where q is positive and q x min elsewhere; the group's queries add up first.
    both = torch.cat([grouped.clamp_min(0).sum(2), grouped.clamp_max(0).sum(2)], -1)
    return (both[:, :, None] @ attention.exact(summaries.flatten(2, 3)))[:, :, 0]
