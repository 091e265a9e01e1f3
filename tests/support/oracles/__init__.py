"""Slow second implementations, one plain loop for each definition; see `core` for their shared conventions."""

from support.oracles.core import *  # noqa: F403
from support.oracles.eviction import *  # noqa: F403
from support.oracles.layers import *  # noqa: F403
from support.oracles.merging import *  # noqa: F403
from support.oracles.projected import *  # noqa: F403
from support.oracles.scorers import *  # noqa: F403
from support.oracles.selection import *  # noqa: F403
from support.oracles.storages import *  # noqa: F403
