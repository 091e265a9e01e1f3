"""What tests of figures share."""

from support.headless import headless  # noqa: F401 - a fixture
