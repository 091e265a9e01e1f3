"""`kvlab lab`: starts JupyterLab on copies of the notebooks, and the MLflow UI, which ends when JupyterLab ends."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from kvlab.errors import KvlabError
from kvlab.lib import environment, extras
from kvlab.lib.files import parsed, replacing
from kvlab.workbench import project, ui
from kvlab.workbench.store import database

FOLDER = "lab"
MADE = ".copies.json"
HANGING_UP = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def copies(source: Path, target: Path) -> list[Path]:
    """Copy the notebooks of a folder into another, where JupyterLab may save whatever they show.

    A copy that its user has changed is left alone; any other is replaced if its original has changed. Returns the
    copies that were left alone although their originals have changed, too.
    """
    made = _made(target)
    behind = []
    for path in sorted(source.glob("*.ipynb")):
        copy, content = target / path.name, path.read_bytes()
        original = hashlib.sha256(content).hexdigest()
        if not copy.exists() or hashlib.sha256(copy.read_bytes()).hexdigest() in (made.get(path.name), original):
            with replacing(copy) as part:
                part.write_bytes(content)
            made[path.name] = original
        elif made.get(path.name) != original:
            behind.append(copy)
    with replacing(target / MADE) as part:
        part.write_text(json.dumps(made, indent=1), encoding="utf-8")
    return behind


def _made(target: Path) -> dict[str, str]:
    """notebook -> sha256 of its copy as it was made."""
    try:
        hashes = parsed((target / MADE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        hashes = None
    return hashes if isinstance(hashes, dict) else {}


def main(arguments: list[str] | None = None) -> int:
    """As `kvlab lab`, for Makefiles of workspaces that were made before that command came."""
    parser = argparse.ArgumentParser(prog="make lab")
    parser.add_argument("--port", type=int, default=ui.PORT)
    parser.add_argument("--in-place", action="store_true", help="open the notebooks themselves, not copies of them")
    options = parser.parse_args(arguments)
    return start(options.port, options.in_place)


def start(port: int = ui.PORT, in_place: bool = False) -> int:
    """Run JupyterLab and MLflow's UI until JupyterLab ends, by Ctrl-C or from its menu.

    Returns JupyterLab's exit code, or 0 where a signal has ended it.
    """
    extras.need(*extras.EXTRAS[extras.LAB])
    environment.configure()  # JupyterLab's kernels inherit it
    root, requested = project.root(), []
    opened = "notebooks" if in_place else f"{FOLDER}/00_quickstart.ipynb"
    for copy in [] if in_place else copies(root / "notebooks", root / FOLDER):
        print(
            f"{copy.relative_to(root)} has your changes and stays; its original in notebooks/ has changed since. "
            "Delete the copy to get the new one."
        )
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ip={ui.HOST}",
        "--ServerApp.answer_yes=True",
        f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url=/lab/tree/{opened}",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # without it JupyterLab refuses to start for root, as in a container
    # JupyterLab gets Ctrl-C as well, and ends; here it is only noted.
    signal.signal(signal.SIGINT, lambda *_: requested.append(signal.SIGINT))
    with ui.served(database.ensure_store(), port) as server:
        print(
            f"MLflow UI: {server.address}/#/experiments (ready in some seconds; it ends with JupyterLab; its log: "
            "mlruns/server.log)",
            flush=True,
        )
        jupyter = subprocess.Popen(command)

        def end(number: int, _: object) -> None:
            requested.append(number)
            jupyter.terminate()

        for number in HANGING_UP:
            signal.signal(number, end)
        code = jupyter.wait()
    return 0 if requested else code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvlabError as error:
        sys.exit(f"kvlab: {error}")
