"""Fixtures that all tests share: the real model once for each worker, and tiny random models of every family."""

from __future__ import annotations

import functools
import gc
import os
from pathlib import Path

import pytest
import torch
from support.labs import bare, made  # noqa: F401 - fixtures for all
from support.live_runs import prompt
from support.projects import project  # noqa: F401 - a fixture for all
from support.surrogates import shipped_or_random
from support.texts import FERRY

import kvlab
from kvlab.inputs import models
from kvlab.lib import environment

environment.configure()
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers with several threads each fight over the cores and are many times slower.
    torch.set_num_threads(1)

# Sweeps, servers, browsers, kills, environments, whole notebooks, every example of the docs: `make test-long`.
# A file's tests run one after the other, so these begin first: the last worker would be at them alone for minutes.
LONG = (
    "lib/test_never_lose.py",
    "workbench/test_wheel.py",
    "workbench/test_warm_start.py",
    "workbench/test_papermill.py",
    "workbench/test_lab.py",
    "project/test_site.py",
    "workbench/test_executors.py",
    "project/test_docs.py",
    "workbench/test_roundtrip.py",
    "workbench/test_notebooks_by_shape.py",
    "workbench/test_report_browser.py",
    "workbench/test_new_workspace.py",
    "workbench/test_sweep.py",
)

# Imports make hundreds of thousands of objects that stay: looking through them all again and again finds nothing.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the longest files and bring them to the front, each file's in their order."""
    rank = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
    for item in items:
        if item.path in rank:
            item.add_marker("long")


def pytest_collection_finish():
    """From here on garbage is collected, but what has been imported is left out of every search for it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def surrogates():
    """Tiny models have a surrogate for kvzap, as if it came with kvlab."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvlab.methods.kvzap.shipped_for", shipped_or_random)
        yield


@pytest.fixture(scope="session")
def lm() -> models.LM:
    """The default model, pulled into the user's cache if it is not there."""
    return models.load(models.DEFAULT, device="cpu")


@pytest.fixture(scope="session")
def browser():
    """One headless chromium for all tests of a worker: playwright allows no second at a time."""
    from support.browsing import launched

    with launched() as chromium:
        yield chromium


@pytest.fixture(scope="session")
def tiny():
    """tiny(name, **changes): a random float32 model of a family of the matrix, made once for each set of arguments."""

    @functools.cache
    def make(name: str = "tiny-llama-gqa", **changes) -> models.LM:
        return models.random_lm(name, device="cpu", dtype="float32", **changes)

    return make


@pytest.fixture(scope="session")
def reader(tiny):
    """A tiny random model that shares the default model's tokenizer."""
    return tiny("tiny-llama-gqa", tokenizer=models.DEFAULT)


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


@pytest.fixture(scope="session")
def traces(lm, trace):
    """That trace, and one of another document; nobody may change them."""
    return [trace, kvlab.capture(lm, FERRY[len(FERRY) // 2 :], new_tokens=24, window=64)]


@pytest.fixture(scope="session")
def random_traces(tiny):
    """Traces of two random prompts of 120 tokens on a tiny model, with all their queries; nobody may change them."""
    return [kvlab.capture(tiny(), prompt(120, seed), 20, queries="all", accumulate=True, pseudo=()) for seed in (1, 2)]
