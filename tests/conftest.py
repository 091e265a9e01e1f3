"""Fixtures that all tests share: the real model once for each worker, and tiny random models of every family."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from texts import FERRY

import kvlab
from kvlab import models

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers with several threads each fight over the cores and are many times slower.
    torch.set_num_threads(1)

FAMILIES = [name for name in models.shapes.SHAPES if name.startswith("tiny-")]


@pytest.fixture(scope="session")
def lm() -> models.LM:
    """The default model, pulled into the user's cache if it is not there."""
    return models.load(models.DEFAULT, device="cpu")


@pytest.fixture(scope="session")
def browser():
    """One headless chromium for all tests of a worker: playwright allows no second at a time."""
    from browsing import launched

    with launched() as chromium:
        yield chromium


@pytest.fixture(scope="session")
def tiny():
    """tiny(name, **changes): a random float32 model of a family of the matrix, made once for each set of arguments."""

    @functools.cache
    def make(name: str = "tiny-llama-gqa", **changes) -> models.LM:
        return models.random_lm(name, device="cpu", dtype="float32", **changes)

    return make


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    """An empty KVLAB_HOME for this test alone."""
    home = tmp_path / "home"
    monkeypatch.setenv("KVLAB_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def trace(lm):
    """One capture of the real model, of a text of about 400 tokens with 24 more; nobody may change it."""
    return kvlab.capture(lm, FERRY, new_tokens=24, window=64)
