"""Nothing half-written is left behind: a file gets its name only once it is whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvlab.errors import KvlabError


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name beside `path` that takes its place when the block ends well, and vanishes otherwise.

    Raises KvlabError where the file cannot be written (a full disk, no permission).
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:40]}-", suffix=path.suffix)
        os.close(handle)
    except OSError as error:
        raise KvlabError(f"cannot write {path}: {error.strerror or error}") from None
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp's own mode hides the file from everybody else.
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise KvlabError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
