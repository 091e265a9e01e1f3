"""The models and documents of jobs: fetched and checked before the first job starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from kvlab.errors import KvlabError, nearest
from kvlab.lib.files import expanded
from kvlab.workbench.experiments import content


def prepare(parameters: Iterable[Mapping[str, Any]]) -> None:
    """Pull the models and check the documents that are named by the parameters `model`, `document` and `documents`.

    Raises KvlabError if one does not exist or cannot be fetched; nothing has been written by then.
    """
    models: set[str] = set()
    documents: set[str] = set()
    for values in parameters:
        models.update(_texts(values.get("model")))
        documents.update(_texts(values.get("document")), _texts(values.get("documents")))
    for name in sorted(models):
        _model(name)
    for name in sorted(documents):
        _document(name)


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


def _model(name: str) -> None:
    if content.model_hash(name) or name.startswith("random:") or os.path.exists(expanded(name)):
        return
    from kvlab.inputs import models

    if name in models.MODELS:
        models.pull(name)
    elif "/" not in name:
        raise KvlabError(nearest(name, models.MODELS, "model"))


def _document(name: str) -> None:
    from kvlab.inputs import corpus

    corpus.document(name)
