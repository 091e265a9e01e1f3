"""Traces that several notebooks need, captured once: files in the user's cache, found by what they were made from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab import packs
from kvlab.errors import KvlabError
from kvlab.trace import FORMAT, Trace, capture, prompt_ids, several

if TYPE_CHECKING:
    from kvlab.models import LM

# What a trace's numbers can depend on besides the weights; a change of any of these files captures anew.
CODE = ("attention.py", "cache.py", "corpus.py", "decoding.py", "measures.py", "models.py", "shapes.py", "trace.py",
        "policies")
LIMIT_GB = 12.0


def folder() -> Path:
    """Where shared traces lie; the least recently used go when they exceed `KVLAB_TRACES_GB` (12)."""
    return packs.home() / "traces"


def shared(lm: LM, text_or_ids: Any, *args: Any, **options: Any) -> Trace | list[Trace]:
    """`kvlab.capture` with a memory: the same arguments on the same model are captured once and then read from disk.

    Processes that want the same trace at the same time wait for the one that captures it. A damaged file is captured
    again.

    Args:
        lm: from `kvlab.load` or `kvlab.random_lm`.
        text_or_ids: as `kvlab.capture` takes it; a list gives a list of traces.
        args, options: as `kvlab.capture` takes them.

    Raises:
        KvlabError: as `kvlab.capture`, and where the cache folder cannot be written.
    """
    if several(text_or_ids):
        from tqdm.auto import tqdm

        quiet = options.pop("progress", None) is False or len(text_or_ids) < 2
        bar = tqdm(text_or_ids, desc="capture", unit="doc", disable=quiet, leave=False)
        return [shared(lm, one, *args, **options) for one in bar]

    from filelock import FileLock

    name = _key(lm, text_or_ids, args, options)
    path = folder() / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if path.exists():
            try:
                trace = Trace.load(path)
                os.utime(path)
                return trace
            except KvlabError:
                path.unlink()
        trace = capture(lm, text_or_ids, *args, **options)
        trace.save(path)
    prune()
    return trace


def prune(limit_gb: float | None = None) -> list[Path]:
    """Remove the least recently used traces until the rest fit into `limit_gb`; the newest always stays."""
    if limit_gb is None:
        given = os.environ.get("KVLAB_TRACES_GB", LIMIT_GB)
        try:
            limit_gb = float(given)
        except ValueError:
            raise KvlabError(f"KVLAB_TRACES_GB must be a number of gigabytes, not {given!r}") from None
    found = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in folder().glob("*.safetensors"))
    total, gone = sum(size for _, size, _ in found), []
    for _, size, path in found[:-1]:
        if total <= limit_gb * 1e9:
            break
        path.unlink(missing_ok=True)
        total -= size
        gone.append(path)
    return gone


def _key(lm: LM, text_or_ids: Any, args: Sequence[Any], options: dict[str, Any]) -> str:
    ids, document = prompt_ids(lm, text_or_ids, options.get("chat", "auto"))
    about = {
        "format": FORMAT,
        "code": _code(),
        "model": [lm.sha256, lm.name, str(lm.dtype), lm.device.type],
        "document": document,
        "ids": ids.tolist(),
        "args": [_plain(each) for each in args],
        "options": {name: _plain(value) for name, value in sorted(options.items()) if name != "progress"},
    }
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


@cache
def _code() -> str:
    here = Path(__file__).parent
    files = sorted(file for name in CODE for file in ([here / name] if "." in name else (here / name).glob("*.py")))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
