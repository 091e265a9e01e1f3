"""The random trace that the tests of the replay share, and an explorer of it."""

from __future__ import annotations

import pytest
from support import replaying

import kvlab


@pytest.fixture(scope="module")
def trace():
    return replaying.trace()


@pytest.fixture
def explorer(trace):
    made = kvlab.explore(trace, "snapkv", "morphkv", budgets=[36, 40, 44])
    yield made
    made.close()
