"""What the tests of the harness share."""

import datasets
import pytest


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    """The data sets' cache in a folder of this test's, and no question to any hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
