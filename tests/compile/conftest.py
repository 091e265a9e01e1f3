"""What the tests of rewards and of the tables share."""

from __future__ import annotations

import pytest
from support.compiling import DOCUMENTS, settings

from kvlab.compile.contexts import pool


@pytest.fixture(scope="session")
def context(reader):
    """One of the contexts that a compilation with the tests' settings learns from."""
    return pool(reader, DOCUMENTS, settings())[1]
