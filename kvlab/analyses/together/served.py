"""Bytes of stored entries as a server in bfloat16 would count them, in whatever precision they were computed.

On a CPU models run in float32, whose keys and values take 4 bytes a number. Codes in 4 bits have the same size
everywhere. Against float32 they would look twice as small as against a server's bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kvlab.core.entries import AsIs
from kvlab.core.storage import Storage, keys_and_values, kivi, stored_as

NUMBER = 2
"""Bytes of a number in bfloat16."""
KIVI = {"kivi-4": 4, "kivi-2": 2}
GROUP = 32


class Served(AsIs):
    """Entries as they are, which count as if their numbers were in bfloat16."""

    def entry_bytes(self, *names: str) -> int:
        return super().entry_bytes(*names) * NUMBER // self.dtype.itemsize


def as_served(storage: str | Storage) -> Storage:
    """The same storage, where what it keeps in the model's precision counts 2 bytes a number; values do not change.

    Codes, scales, steps and zeros count as they do, and so does what a policy keeps with the entries.
    """
    form = stored_as(storage)
    # A store leaves entries alone that are in a storage of the same name.
    name = f"{form.name}, served in bfloat16"
    return replace(form, name=name, convert=lambda entries, *layers: form.convert(Served(entries.slots), *layers))


def forms(names: Sequence[str], head_dim: int) -> dict[str, Storage]:
    """Storages as served, by the names asked for.

    KIVI's groups of 32 are as large as they can be where 32 does not divide the head size.

    Raises:
        KvlabError: an unknown name, or a head size that no group divides.
    """
    group = math.gcd(GROUP, head_dim)

    def fitting(storage: Storage) -> Storage:
        if storage.halves:
            return keys_and_values(*map(fitting, storage.halves))
        return kivi(KIVI[storage.name], group=group) if storage.name in KIVI and group != GROUP else storage

    return {name: as_served(fitting(stored_as(name))) for name in names}
