"""Traces that several notebooks need, captured once: files in the user's cache, found by what they were made from."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from kvlab.core import onednn
from kvlab.errors import KvlabError
from kvlab.inputs import packs
from kvlab.inputs.models import lm_of
from kvlab.lib import progress_bars
from kvlab.lib.files import why
from kvlab.traces.recording import Options, Recording, check_keep, planned, several
from kvlab.traces.run import capture, move
from kvlab.traces.trace import FORMAT, Trace

if TYPE_CHECKING:
    import torch

    from kvlab.inputs.models import LM
    from kvlab.traces.recording import OnePrompt, SeveralPrompts

# A trace's numbers can depend on these files, not only on the weights and the plan. A change of any captures anew.
CODE = (
    "core/adapter.py",
    "core/attention.py",
    "core/dense_slots.py",
    "core/entries.py",
    "core/hookable.py",
    "core/hooks.py",
    "core/layout.py",
    "core/onednn.py",
    "core/rotation.py",
    "core/slots.py",
    "core/softmax.py",
    "core/store.py",
    "inputs/models/conversion.py",
    "inputs/models/folder.py",
    "inputs/models/lm.py",
    "inputs/models/loading.py",
    "inputs/shapes.py",
    "methods/_base/repeating.py",
    "traces/file_draft.py",
    "traces/files.py",
    "traces/passes.py",
    "traces/recorder.py",
    "traces/recording.py",
    "traces/run.py",
    "traces/trace.py",
)
LIBRARIES = ("torch", "transformers")
LIMIT_GB = 12.0
DAY = 86400  # seconds


def folder() -> Path:
    """Where shared traces lie; the least recently used go when they exceed `KVLAB_TRACES_GB` (12)."""
    return packs.home() / "traces"


@overload
def shared(
    lm: LM | torch.nn.Module,
    text_or_ids: OnePrompt,
    new_tokens: int = 64,
    window: int = 32,
    **options: Unpack[Options],
) -> Trace: ...
@overload
def shared(
    lm: LM | torch.nn.Module,
    text_or_ids: SeveralPrompts,
    new_tokens: int = 64,
    window: int = 32,
    **options: Unpack[Options],
) -> list[Trace]: ...
def shared(
    lm: LM | torch.nn.Module, text_or_ids: OnePrompt | SeveralPrompts, *args: Any, **options: Any
) -> Trace | list[Trace]:
    """Capture as `kvlab.capture` does, or read the trace from disk where the same model has recorded it before.

    Two calls share a file if they would run and record the same. Arguments may come by position or by name, and
    defaults may be left out or written. Policies may come by their names or by their needs. Processes that want the
    same trace at the same time wait for the one that captures it. A damaged file is captured again.

    Args:
        lm: from `kvlab.load` or `kvlab.random_lm`.
        text_or_ids: as `kvlab.capture` takes it; a list gives a list of traces.
        args, options: as `kvlab.capture` takes them, but for `into`.

    Raises:
        KvlabError: as `kvlab.capture`, where the cache folder cannot be written, and for a `KVLAB_TRACES_GB` that is no
            number, or a file of one's own.
    """
    bound = signature(capture).bind(lm_of(lm), text_or_ids, *args, **options)
    bound.apply_defaults()
    asked = {name: value for name, value in bound.arguments.items() if name not in ("progress", "into")}
    if bound.arguments["into"] is not None:
        raise KvlabError(f"shared traces have their files in {folder()}: leave into out, or use kvlab.capture")
    check_keep(asked["keep"])
    limit, progress = _limit(), bound.arguments["progress"]
    if several(text_or_ids, asked["response"]):
        return _each(list(text_or_ids), asked, limit, progress)
    return _one(asked, limit, progress)


def _each(prompts: list[Any], asked: dict[str, Any], limit: float, progress: bool | None) -> list[Trace]:
    """The traces of several prompts, in their order, with a bar (`progress` as in `capture`)."""
    from filelock import Timeout

    waiting, traces = deque(enumerate(prompts)), {}
    busy = 0  # how many in a row another process is capturing
    with progress_bars.counting(len(prompts), "capture", "doc", progress) as bar:
        while waiting:
            number, prompt = waiting.popleft()
            try:
                # Two processes that want the same documents share the work: each takes what the other has not begun.
                wait = 0 if busy <= len(waiting) else -1
                traces[number] = _one(asked | {"text_or_ids": prompt}, limit, progress, wait)
                busy = 0
                bar.update()
            except Timeout:
                waiting.append((number, prompt))
                busy += 1
    return [traces[number] for number in range(len(prompts))]


def _one(asked: dict[str, Any], limit_gb: float, progress: bool | None, wait: float = -1) -> Trace:
    """The trace of one prompt. `wait`: seconds for another process that captures it (-1: as long as it takes).

    Raises filelock.Timeout where it takes longer.
    """
    lm, keep = asked["lm"], asked["keep"]
    # Where a trace lies is no part of it.
    plan = planned(**{name: value for name, value in asked.items() if name != "keep"})
    path = folder() / f"{_key(lm, plan, str(asked['chat']))}.safetensors"
    with _locked(path, wait):
        if path.exists():
            try:
                trace = Trace.load(path)
                os.utime(path)
            except (KvlabError, FileNotFoundError):
                path.unlink(missing_ok=True)
            else:
                return move(trace, keep, lm.device)
        # A long trace is written straight into its file, and is never in memory as well.
        into = path if plan.chunk < len(plan.ids) else None
        trace = capture(**asked, into=into, progress=progress)
        if into is None:
            # The trace need not be in memory and in the file: twenty documents of 2,000 tokens are 5 GB.
            trace = move(Trace.load(trace.save(path)), keep, lm.device)
    prune(limit_gb)
    return trace


def prune(limit_gb: float | None = None) -> list[Path]:
    """Remove the least recently used traces until the rest fit into `limit_gb`; the newest always stays.

    A file that a killed process left half-written goes after a day. Raises KvlabError for a `KVLAB_TRACES_GB` that is
    no number of gigabytes.
    """
    limit = (_limit() if limit_gb is None else limit_gb) * 1e9
    found, gone = [], []
    # A trace that is being written has a hidden name, and counts once it is whole.
    for path in folder().glob("[!.]*.safetensors"):
        try:
            found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        except FileNotFoundError:  # another process prunes as well
            continue
    for left in folder().glob(".*.safetensors"):
        with suppress(FileNotFoundError):
            if left.stat().st_mtime < time.time() - DAY:
                left.unlink()
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found)[:-1]:
        if total <= limit:
            break
        path.unlink(missing_ok=True)
        total -= size
        gone.append(path)
    return gone


def _limit() -> float:
    value = os.environ.get("KVLAB_TRACES_GB", LIMIT_GB)
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise KvlabError(f"KVLAB_TRACES_GB must be a number of gigabytes, such as {LIMIT_GB:g}, and not {value!r}")
    return limit


@contextmanager
def _locked(path: Path, wait: float) -> Iterator[None]:
    """Hold a lock shared by all traces whose names begin alike.

    So lock files are few and none is ever removed: removing one while another process waits for it would let two in.
    """
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.parent / f".{path.name[:2]}.lock")
        lock.acquire(timeout=wait)
    except Timeout:
        raise
    except OSError as error:
        raise KvlabError(f"cannot keep traces in {path.parent}: {why(error)}") from None
    try:
        yield
    finally:
        lock.release()


def _key(lm: LM, plan: Recording, chat: str) -> str:
    """A name for what `plan` records of a model. `chat` changes no number, but belongs to a trace's signature."""
    plain = str(lm.dtype) == "torch.float32" and lm.device.type == "cpu"
    about = {
        "format": FORMAT,
        "code": _code(),
        "libraries": [version(name) for name in LIBRARIES],
        "model": [lm.sha256, lm.name, str(lm.dtype), lm.device.type],
        "multiplies": onednn.libraries(lm.model) if plain else None,
        "chat": chat,
        **{name: _plain(value) for name, value in vars(plan).items()},
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {getattr(name, "key", name): _plain(each) for name, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


@cache
def _code() -> str:
    package = Path(__file__).parents[1]
    return hashlib.sha256(b"".join((package / name).read_bytes() for name in CODE)).hexdigest()
