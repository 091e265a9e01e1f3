"""The parts of a workspace that a job on another machine needs, as text: its mark, policies, tasks and papers."""

from __future__ import annotations

from pathlib import Path

from kvlab.errors import KvlabError
from kvlab.lib import workspace
from kvlab.lib.files import why
from kvlab.papers import registry

FOLDERS = (*workspace.CODE, registry.OWN)
MOST = 8 * 2**20
"""Bytes in all. A scheduler holds them for each job that is under way."""


def packed() -> dict[str, bytes]:
    """The files by their path within the workspace, such as "policies/ends.py"; none where there is no workspace.

    Raises:
        KvlabError: they are larger than MOST together, or one cannot be read.
    """
    folder = workspace.workspace()
    if folder is None:
        return {}
    paths = [path for part in FOLDERS for path in workspace.files(part, "**/*") if "__pycache__" not in path.parts]
    try:
        sizes = {path: path.stat().st_size for path in (folder / "pyproject.toml", *paths)}
        if sum(sizes.values()) > MOST:
            largest = max(sizes, key=lambda path: sizes[path])
            raise KvlabError(
                f"{folder}: {', '.join(FOLDERS)} hold {sum(sizes.values()) / 2**20:.1f} MiB, more than "
                f"{MOST / 2**20:g}; move large files such as {largest.relative_to(folder)} out of these folders, "
                "which each cluster job copies"
            )
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sizes}
    except OSError as error:
        raise KvlabError(f"cannot read {error.filename}: {why(error)}") from None


def unpack(files: dict[str, bytes], folder: Path) -> None:
    """Write the files that were packed into `folder`, which is a workspace from then on."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
