"""Former names of attributes, which still work and warn."""

from __future__ import annotations

import warnings
from typing import Any


def warn_renamed(owner: str, old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that `owner.old` is `owner.new` now; Python shows it once for each line that asks."""
    warnings.warn(f"{owner}.{old} is {owner}.{new} now", FutureWarning, stacklevel=stacklevel)


class Renamed:
    """An attribute under its former name: `old = Renamed("new")` in a class gives what `new` gives, and warns."""

    def __init__(self, new: str):
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._old = owner.__name__, name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warn_renamed(self._owner, self._old, self._new)
        return getattr(instance, self._new)
