"""`kvlab new`: a folder with the layout of a project, and one worked example or a copy of a paper's analyses in it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError, nearest
from kvlab.lib.files import allowed, expanded, why
from kvlab.papers import shelf
from kvlab.workbench import project
from kvlab.workbench.workspace.rendering import render, templates

FOLDERS = ("notebooks", "experiments", "papers/figures", "policies", "tasks", "tests", "mlruns")
EXAMPLE = "first_tokens"
EXTRAS = ("notebooks", "workspace")
"""Those of kvlab's: what notebooks by hand and `make test` need besides."""


def new(folder: str | Path, paper: str | None = None) -> Path:
    """Make a workspace, whole or not at all, and return its folder.

    Args:
        folder: must not exist yet; the folder that it is to lie in must.
        paper: one of kvlab's own, whose notebooks, experiments, claims and printed figures are copied; without one the
            workspace holds a small worked example.

    Raises:
        KvlabError: a folder that exists or cannot be made, or an unknown paper.
    """
    target = Path(os.path.abspath(expanded(folder)))
    if not re.fullmatch(r"[\w.][\w. -]*", target.name) or not target.name.isprintable():
        raise KvlabError(f"{target.name!r} is no name for a workspace: use letters, digits, '_', '-' and '.'")
    if os.path.lexists(target):
        raise KvlabError(f"{target} exists already; name a folder that does not")
    if not target.parent.is_dir():
        raise KvlabError(f"there is no folder {target.parent} to make {target.name} in")
    known = [known.name for known in shelf.shipped()]
    if paper is not None and paper not in known:
        raise KvlabError(nearest(paper, known, "paper"))
    try:
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True
        ) as at:
            made = Path(at) / target.name
            _fill(made, paper)
            os.rename(made, target)
    except OSError as error:
        raise KvlabError(f"cannot make {target}: {why(error)}") from None
    return target


def _fill(folder: Path, paper: str | None) -> None:
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
        (folder / name / ".gitkeep").touch()
    experiments = [EXAMPLE] if paper is None else _copy(folder, paper)
    values: dict[str, Any] = {
        "name": folder.name,
        "version": project.version(),
        "python": ".".join(map(str, sys.version_info[:2])),
        "pins": _pins(),
        "paper": paper,
        "experiments": experiments,
    }
    for part in ("project", "example") if paper is None else ("project",):
        for template, name in templates(part):
            (folder / name).write_text(render(template, **values), encoding="utf-8")
    # A folder with files in it needs nothing else for git to keep it.
    for name in FOLDERS:
        if name != "mlruns" and any(path.name != ".gitkeep" for path in (folder / name).iterdir()):
            (folder / name / ".gitkeep").unlink()
    folder.chmod(allowed(0o777))


def _copy(folder: Path, paper: str) -> list[str]:
    """Copy what kvlab has of a paper; returns the names of its experiments."""
    (known,) = [known for known in shelf.shipped() if known.name == paper]
    names = sorted({claim.experiment for claim in known.claims if claim.experiment})
    shipped = _shipped()
    for name in names:
        text = (shipped / "experiments" / f"{name}.yaml").read_text(encoding="utf-8")
        (folder / "experiments" / f"{name}.yaml").write_text(text, encoding="utf-8")
        notebook = re.search(r"^notebook: (\S+)$", text, re.MULTILINE)
        assert notebook, f"{name}.yaml names no notebook"
        shutil.copyfile(shipped / notebook[1], folder / notebook[1])
    claims = (shelf.folder() / f"{paper}.yaml").read_text(encoding="utf-8")
    marked = re.sub(
        r"^name: .*$", r"\g<0>\nreplaces: true      # kvlab's own claims of this paper", claims, count=1, flags=re.M
    )
    (folder / "papers" / f"{paper}.yaml").write_text(marked, encoding="utf-8")
    for path in sorted((shelf.folder() / "figures").glob(f"{paper}_*.csv")):
        shutil.copyfile(path, folder / "papers" / "figures" / path.name)
    return names


def _shipped() -> Path:
    """The folder with kvlab's own `notebooks` and `experiments`: within the installed package, or the checkout."""
    here = Path(__file__).parent / "shipped"
    checkout = Path(__file__).parents[3]
    for folder in (here, checkout):
        if (folder / "notebooks").is_dir() and (folder / "experiments").is_dir():
            return folder
    raise KvlabError("this installation of kvlab has no notebooks to copy; install its wheel")


def _pins() -> list[str]:
    """kvlab, what it needs and what the tests need, in the versions that are installed here."""
    lines = importlib.metadata.requires("kvlab") or []
    names = {
        re.split(r"[^\w.\-]", line, maxsplit=1)[0]
        for line in lines
        if "extra ==" not in line or any(f"extra == '{extra}'" in line.replace('"', "'") for extra in EXTRAS)
    }
    pins = [_own_pin()]
    for name in sorted(names, key=str.lower):
        try:
            # A local part such as +cpu is of one build, and no index has it.
            pins.append(f"{name}=={importlib.metadata.version(name).partition('+')[0]}")
        except importlib.metadata.PackageNotFoundError:
            pins.append(name)
    return pins


def _own_pin() -> str:
    """kvlab, from where it was installed: an index by its version, or else the wheel, folder or commit itself."""
    wanted = f"kvlab[{','.join(EXTRAS)}]"
    try:
        told = importlib.metadata.distribution("kvlab").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        told = None
    if told is None:
        return f"{wanted}=={project.version()}"
    origin = json.loads(told)
    url, state = origin["url"], origin.get("vcs_info")
    return f"{wanted} @ {state['vcs']}+{url}@{state['commit_id']}" if state else f"{wanted} @ {url}"
