"""Hybrid attention (RocketKV's second stage): finds entries by pages and by a few dimensions at once."""

import math
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from kvlab.core.softmax import Scaling, Softmax
from kvlab.core.store import LayerStore
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base import dimensions, pages
from kvlab.methods._base.dimensions import affordable, largest_dimensions, logits, partial_queries, room, shares
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt


class Hybrid(Policy):
    """Keeps the whole cache and reads the top entries by a few dimensions of its pages' minima and maxima.

    RocketKV (Behnam et al. 2025), section 3.4 and algorithm 2, on a full cache: consecutive keys form pages. Only the r
    dimensions with the largest |q|, summed over the group, are loaded. In each, a page shows its maximum if the group's
    q sums to 0 or more, else its minimum. Partial logits from these, at SparQ's temperature, go through a softmax over
    the entries of the pages. The weights are averaged over the group, and the top k entries are read. Within the budget
    everything is read. Cost:
    two vectors for each page, stored; r dimensions of one of them loaded at every step.

    Choices (from the published code where the paper is silent): c is S / budget, where S counts the prompt and the
    announced new tokens. A page has ceil(sqrt(c)) entries, or 1 where that exceeds c, and r = int(d x page / c).
    Finding takes half of what is read, k = budget // 2 entries the other half. k is smaller where a given page or rank
    makes finding cost more. Beyond S the pages stay as they are, and r falls as the sequence grows. The last page read
    may be cut. Nothing forces sinks or the own entry. With mixed signs in a group the score is no upper bound. Pages of
    one entry are the keys themselves, and nothing is stored for them. Of equal scores the earlier position is read.

    Parameters:
        budget: entries read at each step for each layer and KV head, finding included.
        page: entries of a page; None for the rule above.
        rank: r; None for the rule above.
    """

    name: ClassVar[str] = "hybrid"
    summary: ClassVar[str] = "reads the top entries by a few dimensions of page minima and maxima, stores all"
    family: ClassVar[str] = "stores all, reads a selection"
    kind: ClassVar[str] = "selection"
    paper: ClassVar[Paper | None] = PAPERS["rocketkv"]

    budget: Budget
    page: Annotated[int, Field(ge=1)] | None = None
    rank: Annotated[int, Field(ge=1)] | None = None

    @property
    def minimum(self) -> int:
        return 2

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        super().compress(store, prompt)
        begin(store, prompt.length + prompt.max_new_tokens, self.page, self.rank)

    def select(self, store: LayerStore, queries: Tensor, scaling: Scaling) -> Tensor | None:
        return select(store, queries, scaling)

    def overhead_bytes(self, store: LayerStore) -> int:
        return overhead_bytes(store)


def begin(store: LayerStore, length: int, page: int | None = None, rank: int | None = None) -> None:
    """Split the compression of `length` entries to the budget evenly between pages and dimensions; compute the pages'
    summaries unless everything will be read.
    """
    compression = length / store.budget
    if page is None:
        page = math.ceil(math.sqrt(compression))
        page = page if page <= compression else 1
    pages.begin(store, page)
    dimensions.begin(store, length, rank)
    if compression > 1 and page > 1:
        pages.summaries(store)


def select(store: LayerStore, queries: Tensor, scaling: Scaling) -> Tensor | None:
    """The top slots (algorithm 2), `store.budget // 2` or as many as finding leaves, int64 `[rows, kv_heads, k]`; None
    within the budget.
    """
    if store.length <= store.budget:
        return None
    grouped = queries[:, :, 0].unflatten(1, (store.kv_heads, -1))
    page = store.numbers["page"]
    rank = affordable(store, page)
    dims = largest_dimensions(grouped, rank)
    part = partial_queries(grouped, dims, scaling)
    if page == 1:
        approximate = logits(part, dims, store.keys.transpose(2, 3))
    else:
        lowest = grouped.sum(2).gather(-1, dims) < 0
        approximate = logits(part, dims + lowest * grouped.shape[-1], pages.summaries(store).flatten(2, 3))
    sizes, logs = pages.sizes(store)
    # In the softmax a page counts once for each of its entries, and each entry gets its share.
    softmax = Softmax.of(scaling)
    scores = shares(softmax.capped(approximate) + logs, softmax).mean(2) / sizes
    return pages.read(store, scores, room(store, pages.number(store), rank), cut=True)


def overhead_bytes(store: LayerStore) -> int:
    """Bytes that finding loads: a few dimensions of one vector for each page."""
    if store.length <= store.budget:
        return 0
    page = store.numbers["page"]
    rank = affordable(store, page)
    if page == 1:
        return store.key_bytes * rank // store.head_dim
    return store.rows * store.kv_heads * pages.number(store) * rank * store.dtype.itemsize
