"""The version of kvlab: the one place that says it; `pyproject.toml` reads it from here."""

__version__ = "0.2.0"
