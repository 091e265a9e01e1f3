"""Slow second implementations, one plain loop for each definition; see `core` for their shared conventions."""

from oracles.core import *  # noqa: F403
