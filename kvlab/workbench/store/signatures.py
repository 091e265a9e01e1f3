"""A run's signature, in one line: model, documents, settings, seed and version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvlab.errors import KvlabError
from kvlab.workbench import project
from kvlab.workbench.experiments import content_key

IDENTITY = ("model", "document", "documents", "seed")  # parameters that have their own place in a signature


def signature(experiment: str, parameters: Mapping[str, Any]) -> str:
    """`model@sha|document@sha|experiment(parameters)|seed|kvlab version`, without the parts that no parameter names."""
    others = {name: value for name, value in parameters.items() if name not in IDENTITY}
    settings = ", ".join(f"{name}={value!r}" for name, value in others.items())
    model, documents = parameters.get("model"), parameters.get("documents", parameters.get("document"))
    parts = [
        _signed(model, content_key.model_hash(model)) if isinstance(model, str) else "no model",
        _documents(documents),
        f"{experiment}({settings})",
        str(parameters.get("seed", 0)),
        f"kvlab {project.version()}",
    ]
    return "|".join(part for part in parts if part)


def documents(line: str) -> int:
    """How many documents a signature names."""
    return len(texts(line))


def texts(line: str) -> list[tuple[str, str]]:
    """The documents that a signature names, each with its hash; an empty hash where it has none."""
    parts = line.split("|")
    settings = next((place for place, part in enumerate(parts) if place and re.match(r"\w+\(", part)), 0)
    named = (part.partition("@") for part in parts[1].split()) if settings == 2 else ()
    return [(name, digest) for name, _, digest in named]


def _signed(name: str, sha256: str | None) -> str:
    return f"{name}@{sha256[:8]}" if sha256 else name


def _documents(names: object) -> str:
    """The documents with their hashes; only the name of a document that cannot be read, or that is an object."""
    from kvlab.inputs import corpus

    if not names:
        return ""
    shown = []
    for name in corpus.named([str(name) for name in names] if isinstance(names, (list, tuple)) else str(names)):
        try:
            shown.append(corpus.document(name).signature)
        except KvlabError:
            shown.append(name)
    return " ".join(shown)
