"""kvlab's own experiments, within the installed package or the checkout: what a workspace can copy."""

from __future__ import annotations

import re
from pathlib import Path

from kvlab.errors import KvlabError


def names() -> list[str]:
    """The names of kvlab's own experiments."""
    return sorted(path.stem for path in (_folder() / "experiments").glob("*.yaml"))


def files_of(name: str) -> dict[str, str]:
    """The files of one of kvlab's own experiments, and what is in them: its own and that of its notebook."""
    path = f"experiments/{name}.yaml"
    text = (_folder() / path).read_text(encoding="utf-8")
    notebook = re.search(r"^notebook: (\S+)$", text, re.MULTILINE)
    assert notebook, f"{path} names no notebook"
    return {path: text, notebook[1]: (_folder() / notebook[1]).read_text(encoding="utf-8")}


def _folder() -> Path:
    """The folder with kvlab's own `notebooks` and `experiments`."""
    here = Path(__file__)
    for folder in (here.parents[1] / "workspace" / "shipped", here.parents[3]):
        if (folder / "notebooks").is_dir() and (folder / "experiments").is_dir():
            return folder
    raise KvlabError("this installation of kvlab has no notebooks to copy; install its wheel")
