"""For methods that evict while decoding: how many entries stay, and which one goes."""

from torch import Tensor

from kvlab.core.store import LayerStore
from kvlab.methods._base.policy import top_and_last


def part(share: float, budget: int) -> int:
    """How many of `budget` entries are of one kind: `share` of them, rounded down, but one of each kind at least."""
    return min(max(1, int(share * budget)), budget - 1)


def evict_lowest(store: LayerStore, scores: Tensor, recent: int) -> None:
    """Evict down to the budget: the lowest `scores` `[rows, kv_heads, slots]` leave, but none of the `recent` newest
    entries; of equal scores the later leaves.

    One entry leaves at a step; more leave only after a turn of a chat that was stored whole.
    """
    leaving = store.length - store.budget
    if leaving == 1:
        store.drop(last_of_lowest(scores[..., : store.length - recent]))
    elif leaving > 1:
        store.evict(top_and_last(scores, store.budget - recent, recent), even=True)


def after_compression(budget: int, interval: int | None) -> int:
    """Entries that a compression leaves where one comes every `interval` steps: None for 128, or an eighth of the
    budget if that is less.
    """
    return budget - (interval or max(1, min(128, budget // 8)))


def last_of_lowest(scores: Tensor) -> Tensor:
    """Index of the lowest score, the last one among equals, so that the earlier position stays."""
    return scores.shape[-1] - 1 - scores.flip(-1).argmin(-1)
