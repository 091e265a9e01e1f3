"""The hashes of files, remembered, since a large one takes a while to read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

from kvlab.errors import KvlabError
from kvlab.inputs import wheels
from kvlab.inputs.packs import home


def remembered_sha256(files: list[Path]) -> str:
    """The sha256 of the files' bytes, one after the other; remembered by path, size and time of change.

    Raises KvlabError where one is not there.
    """
    missing = [file for file in files if not os.path.isfile(file)]
    if missing:
        raise KvlabError(f"{missing[0]} is named in the model's index, but is not there")
    memo = _memo(files)
    with contextlib.suppress(OSError):
        known = memo.read_text(encoding="ascii").strip()
        if re.fullmatch(r"[0-9a-f]{64}", known):
            return known
    sha256 = wheels.file_sha256(*files)
    with contextlib.suppress(OSError):  # a memo only: a cache folder that cannot be written to does not stop a load
        memo.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memo.parent, delete=False) as stream:
            stream.write(sha256)
        os.replace(stream.name, memo)
    return sha256


def _memo(files: list[Path]) -> Path:
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return home() / "hashes" / hashlib.sha256(json.dumps(stats).encode()).hexdigest()
