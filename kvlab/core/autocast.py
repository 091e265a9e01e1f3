"""The caller's autocast: kvlab computes outside of it, where every tensor has the type that it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def outside_autocast(device: torch.device) -> Iterator[None]:
    """While the block runs, nothing is cast on this kind of device; a device that knows no autocast is left alone."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield
