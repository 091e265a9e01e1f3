"""The models and documents of jobs: fetched and checked before the first job starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from kvlab.errors import KvlabError, nearest
from kvlab.lib.files import expanded
from kvlab.workbench.experiments import content_key
from kvlab.workbench.experiments.parameter_values import texts


def prepare(parameters: Iterable[Mapping[str, Any]]) -> None:
    """Pull the models and check the documents that are named by the parameters `model`, `document` and `documents`.

    Raises KvlabError if one does not exist or cannot be fetched; nothing has been written by then.
    """
    models: set[str] = set()
    documents: set[str] = set()
    for values in parameters:
        models.update(texts(values.get("model")))
        documents.update(texts(values.get("document")), texts(values.get("documents")))
    for name in sorted(models):
        _model(name)
    for name in sorted(documents):
        _document(name)


def _model(name: str) -> None:
    """Pull a known model and convert a user's GGUF file, so that jobs side by side do not wait for each other."""
    from kvlab.inputs.models import MODELS
    from kvlab.inputs.models.hashes import remembered_sha256

    path = expanded(name)
    if name in MODELS:
        if not MODELS[name].folder.is_dir():  # else nothing needs torch
            from kvlab.inputs.models.conversion import pull

            pull(name)
    elif path.suffix == ".gguf" and path.is_file():
        if content_key.model_folder(name) is None:
            from kvlab.inputs.models.conversion import converted

            converted(path, remembered_sha256([path]))
    elif not name.startswith("random:") and not os.path.exists(path):
        # A name of a hub is OWNER/NAME; any other with a slash is a path.
        if "/" not in name:
            raise KvlabError(nearest(name, MODELS, "model"))
        if name.count("/") > 1 or name.startswith((".", "/", "~")):
            raise KvlabError(f"there is no folder or GGUF file {name}; name one, or a model of `kvlab list models`")


def _document(name: str) -> None:
    from kvlab.inputs import corpus

    corpus.documents(name)
