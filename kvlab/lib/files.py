"""Files: nothing half-written is left behind, and one sentence says why a file cannot be read."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.lib.addresses import without_password


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark; that of a gzip file if its name ends in `.gz`.

    Raises KvlabError where it cannot be read, or is no such text.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n")  # as a file that is read as text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise KvlabError(f"{path} is no whole gzip file: {error}") from error
    except UnicodeDecodeError as error:
        raise KvlabError(f"{path} is not UTF-8 text (byte {error.start} cannot be read); convert it") from error
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise KvlabError(f"cannot read {path}: {why(error).lower()}") from error


def expanded(name: str | os.PathLike) -> Path:
    """The path of that name, with the user's folder for `~`; the `~name` of an unknown user stays as it is."""
    return Path(os.path.expanduser(name))


def located(text: str) -> str:
    """The absolute path of the file or folder that a text on the command line names; any other text as it is. (A
    notebook would look for a relative path in its own folder. A folder needs a slash: without one it may be any word.)
    """
    path = os.path.expanduser(text)
    named = (
        bool(text)
        and len(text) < 500
        and "\0" not in text
        and (os.path.isfile(path) or ("/" in text and os.path.isdir(path)))
    )
    return os.path.realpath(path) if named else text


def writable(text: str) -> bool:
    """Whether a text can be written as UTF-8: names of files, and JSON's and YAML's escapes, may hold half a character
    (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def why(error: Exception) -> str:
    """Why the system refuses a file, in a few words."""
    return getattr(error, "strerror", None) or str(error)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, with the next one where it ends in a colon; its kind if it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return without_password(said) or type(error).__name__


def parsed(text: str) -> Any:
    """The data of a JSON text; all of it can be written as JSON again.

    Raises json.JSONDecodeError for everything that is wrong. (Python's reader raises other errors for deep nesting and
    for numbers of thousands of digits, and accepts half a character.)
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, 0) from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise json.JSONDecodeError("a number has thousands of digits", text, 0) from None
    half = re.search(r"\\u[dD][89a-fA-F]", text)
    if half and not writable(json.dumps(value, ensure_ascii=False)):
        raise json.JSONDecodeError("half a character (a lone surrogate)", text, half.start())
    return value


def jsonl(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a JSONL file that are not blank, with numbers from 1. Raises KvlabError as `read_text` does."""
    # Not splitlines: it would also split at U+2028 and the like, which JSON allows inside a text.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield number, line


def objects(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a JSONL file, with the numbers of their lines; `what` each is goes into the message.

    Raises:
        KvlabError: as `read_text`, and for a line that is no JSON or no object, with its number.
    """
    for number, line in jsonl(path):
        try:
            found = parsed(line)
        except json.JSONDecodeError as error:
            problem = f"not valid JSON ({error.msg} at column {error.colno})"
            raise KvlabError(f"{path}, line {number}: {problem}") from error
        if not isinstance(found, dict):
            raise KvlabError(f"{path}, line {number}: a {what} is a JSON object, not {brief(found)}")
        yield number, found


def digest(files: Iterable[tuple[str, Path]]) -> str:
    """sha256 over the names and contents of files, in the order given."""
    total = hashlib.sha256()
    for name, path in files:
        total.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def brief(value: Any) -> str:
    """The beginning of a value's JSON, for a message."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:40] + "..."


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# Reading the umask means changing it for a moment. This must not happen while other threads run.
UMASK = _umask()


def allowed(mode: int) -> int:
    """A file's mode without the bits that the umask at the program's start takes away."""
    return mode & ~UMASK


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary file next to `path`: it replaces `path` when the block ends well, and is deleted otherwise.

    Raises KvlabError where the file cannot be written (a full disk, no permission).
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:40]}-", suffix=path.suffix)
        os.close(handle)
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise KvlabError(f"cannot write {path}: {why(error)}") from None
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes a file that only its owner can read.
        temporary.chmod(allowed(0o666))
        os.replace(temporary, path)
    except OSError as error:
        raise KvlabError(f"cannot write {path}: {why(error)}") from None
    finally:
        temporary.unlink(missing_ok=True)
