"""Workspaces for tests: the smallest one, and the one that `kvlab new` makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlab.workbench.workspace import new

POLICY = '''from typing import ClassVar

import torch

import kvlab
from kvlab.methods import Budget


class {cls}(kvlab.Policy):
    """Keeps the prompt's first tokens."""

    name: ClassVar[str] = "{name}"
    budget: Budget

    def choose(self, prompt, budget):
        return torch.arange(budget).expand(prompt.rows, prompt.kv_heads, budget)
'''


def policy(folder: Path, file: str, name: str, cls: str = "First") -> Path:
    """Write a policy into the workspace, and return its file."""
    path = folder / "policies" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(POLICY.format(cls=cls, name=name), encoding="utf-8")
    return path


@pytest.fixture
def bare(tmp_path, monkeypatch) -> Path:
    """The working directory is a workspace with nothing in it."""
    monkeypatch.delenv("KVLAB_ROOT", raising=False)
    folder = tmp_path / "bare"
    (folder / "experiments").mkdir(parents=True)
    (folder / "pyproject.toml").write_text("[tool.kvlab]\nworkspace = true\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def made(tmp_path, monkeypatch) -> Path:
    """The working directory is a workspace that `kvlab new` has made."""
    monkeypatch.delenv("KVLAB_ROOT", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = new(tmp_path / "my-lab")
    monkeypatch.chdir(folder)
    return folder
