"""Files: nothing half-written is left behind, and what cannot be read is said in one sentence."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvlab.errors import KvlabError


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark.

    Raises KvlabError where it cannot be read, or is no such text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise KvlabError(f"{path} is not UTF-8 text (byte {error.start} cannot be read); convert it") from error
    except OSError as error:
        raise KvlabError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error


def jsonl(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a JSONL file that hold something, with their numbers from 1. Raises KvlabError as `read_text`."""
    # Not splitlines: JSON allows U+2028 and its like inside a text, and they end no line of JSONL.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield number, line


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
