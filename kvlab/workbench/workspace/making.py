"""`kvlab new`: a folder with the layout of a project, and one worked example or a copy of a paper's analyses in it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kvlab.errors import KvlabError, nearest
from kvlab.lib import workspace
from kvlab.lib.files import allowed, expanded, why
from kvlab.papers import registry
from kvlab.workbench import project
from kvlab.workbench.experiments import shipped
from kvlab.workbench.workspace.rendering import render, templates

FOLDERS = ("notebooks", "experiments", "papers/figures", "policies", "tasks", "tests", "mlruns")
EXAMPLE, WHEELS = "first_tokens", "wheels"
EXTRAS = ("lab", "workspace")
"""Those of kvlab's: what experiments and `make test` need as well."""


def new(folder: str | Path, paper: str | None = None, with_wheel: bool = False) -> Path:
    """Make a workspace, whole or not at all, and return its folder.

    Args:
        folder: must not exist yet; the folder that it is to lie in must.
        paper: one of kvlab's own, whose notebooks, experiments, claims and printed figures are copied; without one the
            workspace holds a small worked example.
        with_wheel: put a wheel of this kvlab into it, which its environment then installs: for a kvlab that is on no
            index.

    Raises:
        KvlabError: a folder that exists, lies in another workspace or cannot be made, an unknown paper, or no wheel.
    """
    target = Path(os.path.abspath(expanded(folder)))
    if not re.fullmatch(r"[\w.][\w. -]*", target.name) or not target.name.isprintable():
        raise KvlabError(f"{target.name!r} is no name for a workspace: use letters, digits, '_', '-' and '.'")
    if os.path.lexists(target):
        raise KvlabError(f"{target} exists already; name a folder that does not")
    if not target.parent.is_dir():
        raise KvlabError(f"there is no folder {target.parent} to make {target.name} in")
    if enclosing := next((above for above in target.parents if workspace.workspace(above)), None):
        raise KvlabError(
            f"{target} would lie in the workspace {enclosing}; make it outside, or add to that one (kvlab add)"
        )
    known = [known.name for known in registry.shipped()]
    if paper is not None and paper not in known:
        raise KvlabError(nearest(paper, known, "paper"))
    try:
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True
        ) as at:
            made = Path(at) / target.name
            _fill(made, paper, with_wheel)
            os.rename(made, target)
    except OSError as error:
        raise KvlabError(f"cannot make {target}: {why(error)}") from None
    return target


def _fill(folder: Path, paper: str | None, with_wheel: bool) -> None:
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
        (folder / name / ".gitkeep").touch()
    experiments = [EXAMPLE] if paper is None else _copy(folder, paper)
    values: dict[str, Any] = {
        "name": folder.name,
        "version": project.version(),
        "python": ".".join(map(str, sys.version_info[:2])),
        "pins": [_own_pin(_wheel(folder / WHEELS) if with_wheel else None), *_pins()],
        "on_no_index": not with_wheel and _is_local(_install_source()),
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
    (known,) = [known for known in registry.shipped() if known.name == paper]
    names = sorted({claim.experiment for claim in known.claims if claim.experiment})
    for name in names:
        for part, text in shipped.files_of(name).items():
            (folder / part).write_text(text, encoding="utf-8")
    claims = (registry.folder() / f"{paper}.yaml").read_text(encoding="utf-8")
    marked = re.sub(
        r"^name: .*$", r"\g<0>\nreplaces: true      # kvlab's own claims of this paper", claims, count=1, flags=re.M
    )
    (folder / "papers" / f"{paper}.yaml").write_text(marked, encoding="utf-8")
    for path in sorted((registry.folder() / "figures").glob(f"{paper}_*.csv")):
        shutil.copyfile(path, folder / "papers" / "figures" / path.name)
    return names


def _pins() -> list[str]:
    """The requirements of kvlab and the tests, in the versions that are installed here."""
    lines = importlib.metadata.requires("kvlab") or []
    names = {
        re.split(r"[^\w.\-]", line, maxsplit=1)[0]
        for line in lines
        if "extra ==" not in line or any(f"extra == '{extra}'" in line.replace('"', "'") for extra in EXTRAS)
    }
    pins = []
    for name in sorted(names, key=str.lower):
        try:
            # A local part such as +cpu is of one build, and no index has it.
            pins.append(f"{name}=={importlib.metadata.version(name).partition('+')[0]}")
        except importlib.metadata.PackageNotFoundError:
            pins.append(name)
    return pins


def _install_source() -> dict[str, Any] | None:
    """Where kvlab was installed from, as pip notes it; None where that is an index."""
    try:
        direct_url = importlib.metadata.distribution("kvlab").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        direct_url = None
    return json.loads(direct_url) if direct_url else None


def _is_local(source: dict[str, Any] | None) -> bool:
    return source is not None and source["url"].startswith("file:")


def _own_pin(wheel: Path | None) -> str:
    """kvlab, as a colleague's machine finds it too: the wheel in the workspace, a public address, or the version."""
    extras, source = ",".join(EXTRAS), _install_source()
    if wheel is not None:
        return f"./{wheel.parent.name}/{wheel.name}[{extras}]"
    if source is None or _is_local(source):
        return f"kvlab[{extras}]=={project.version()}"
    state = source.get("vcs_info")
    url = f"{state['vcs']}+{source['url']}@{state['commit_id']}" if state else source["url"]
    return f"kvlab[{extras}] @ {url}"


def _wheel(folder: Path) -> Path:
    """A wheel of this kvlab in `folder`: the one that it was installed from, or one of its checkout.

    Raises:
        KvlabError: it comes from an index, which has the wheel, or no wheel can be made.
    """
    source = _install_source()
    if not _is_local(source):
        raise KvlabError("an index or an address has this kvlab, so that its wheel is not needed; drop --with-wheel")
    assert source is not None, "a local one"
    checkout = Path(url2pathname(urlsplit(source["url"]).path))
    folder.mkdir(parents=True)
    if checkout.suffix == ".whl" and checkout.is_file():
        return Path(shutil.copy(checkout, folder))
    # With the build's own tool at hand nothing has to be fetched.
    options = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *options, "-w", str(folder), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True)
    made = sorted(folder.glob("kvlab-*.whl"))
    if done.returncode or not made:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise KvlabError(f"no wheel could be made of {checkout}: {last[:200]}")
    return made[0]
