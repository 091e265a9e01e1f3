"""Items in batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in their order, `size` at once; none is asked for before its batch is."""
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch
