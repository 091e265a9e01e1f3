"""Slow second implementations, one plain loop for each definition; see `core` for their shared conventions."""

from oracles.core import *  # noqa: F403
from oracles.eviction import *  # noqa: F403
from oracles.layers import *  # noqa: F403
from oracles.selection import *  # noqa: F403
