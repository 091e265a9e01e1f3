"""Content keys: jobs with the same key would give the same numbers, so a finished job need not run again."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvlab.inputs import packs
from kvlab.inputs.models import MODELS, cached
from kvlab.inputs.models.hashes import remembered_sha256
from kvlab.lib import workspace
from kvlab.lib.files import expanded, parsed, read_text
from kvlab.papers import OWN
from kvlab.workbench import project
from kvlab.workbench.experiments import notebooks

LIBRARIES = ("torch", "transformers", "numpy")
LOOKED_UP = ("alone", "heads", "tables")
"""Parameters that name measurements of a model in kvlab's folder of that name; AUTO: those of the job's own model."""
AUTO = "auto"
REACHES_TASKS = re.compile("task|evaluation|kvlab_workspace", re.IGNORECASE)
"""Text that a notebook or policy needs to reach a task of the workspace."""


def key(notebook: Path, parameters: Mapping[str, Any]) -> str:
    """The sha256 over everything that can change a job's numbers.

    That is the code of the notebook, the package and the workspace, and the versions of `LIBRARIES`. It is also the
    parameters, with the model and the files that they name.
    """
    facts = {
        "notebook": notebooks.measuring_code(notebook),
        "parameters": dict(sorted(parameters.items())),
        "inputs": {text: _fingerprint(text) for text in sorted(set(_texts(parameters.values())))},
        "looked_up": {name: _shipped(name, parameters) for name in LOOKED_UP if name in parameters},
        "kvlab": project.code_hash(),
        "workspace": workspace.code_hash(parts=_own_parts(notebook, parameters)),
        "libraries": _libraries(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _own_parts(notebook: Path, parameters: Mapping[str, Any]) -> list[str]:
    """The folders of the workspace whose code a job may run: `tasks` only where some text of the job reaches a task."""
    texts = itertools.chain(
        notebooks.code(notebook),
        _texts([dict(parameters)]),
        parameters,
        (read_text(path) for path in workspace.files("policies", "**/*.py")),
    )
    tasks = any(map(REACHES_TASKS.search, texts))
    return [part for part in workspace.CODE if tasks or part != "tasks"]


def _shipped(kind: str, parameters: Mapping[str, Any]) -> str | None:
    """The hash of the files that come with kvlab for the model, or under the name that is given; None without any.

    There is one, or one for each budget (`NAME-128.json`).
    """
    wanted = parameters[kind]
    name = str(parameters.get("model") if wanted == AUTO else wanted)
    folder, own = Path(__file__).resolve().parents[2] / "methods" / kind, re.compile(re.escape(name) + r"(-\d+)?\.json")
    found = sorted(path for path in folder.glob("*.json") if own.fullmatch(path.name))
    return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest() if found else None


def showing(notebook: Path) -> str:
    """A hash over what makes figures and sentences: the notebook's code, `kvlab.render`'s, and the papers' files."""
    own = [read_text(path) for path in workspace.files(OWN, "*.yaml")]
    facts = [project.showing_hash(), notebooks.code(notebook), own]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def key_now(notebook: Path, parameters: Mapping[str, Any]) -> str:
    """`key` with the code read again: somebody may have edited it since the sweep began."""
    project.code_hash.cache_clear()
    return key(notebook, parameters)


@functools.cache
def _libraries() -> list[str]:
    pins = []
    for name in LIBRARIES:
        try:
            pins.append(f"{name}=={version(name)}")
        except PackageNotFoundError:
            pins.append(f"{name} missing")
    return pins


def _texts(values: Iterable[Any]) -> Iterable[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _texts(value.values())
        elif isinstance(value, list):
            yield from _texts(value)


def _fingerprint(text: str) -> str | None:
    """The hash of what a parameter names: a pulled model, a file, or a model's folder; None for any other text."""
    if not text.strip() or len(text) > 500:
        return None
    if sha256 := model_hash(text):
        return sha256
    path = expanded(text)
    path = path if path.is_absolute() else project.root() / "notebooks" / path
    try:
        if path.is_file():
            now = path.stat()
            return _file_hash(path, now.st_size, now.st_mtime_ns)
        weights = sorted(path.glob("*.safetensors")) if path.is_dir() else []
        # Weights are large, so their names, sizes and times are hashed instead.
        return json.dumps([(w.name, w.stat().st_size, w.stat().st_mtime_ns) for w in weights]) if weights else None
    except OSError:
        return None


@functools.cache
def _file_hash(path: Path, size: int, changed: int) -> str:
    """The sha256 of a file. It is cached by size and time of change, because a sweep asks for it with every job."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_hash(name: str) -> str | None:
    """The sha256 of the weights of a pulled model; None if no model of that name was pulled."""
    if name not in MODELS:
        return None
    try:
        return parsed((MODELS[name].folder / packs.PROVENANCE).read_text(encoding="utf-8")).get("weights_sha256")
    except (OSError, ValueError, AttributeError):
        return None


def model_folder(name: str) -> Path | None:
    """The folder of a pulled model or of a GGUF file that was converted, or `name` itself if it is a folder.

    None for any other name.
    """
    if name in MODELS:
        return MODELS[name].folder if MODELS[name].folder.is_dir() else None
    path = expanded(name)
    if name and path.suffix == ".gguf" and path.is_file():
        converted = cached.own_folder(remembered_sha256([path]))
        return converted if converted.is_dir() else None
    return path if name and path.is_dir() else None
