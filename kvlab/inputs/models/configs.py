"""The configuration of a model by its name, without its weights: read from the disk, and never fetched."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.inputs import shapes
from kvlab.inputs.models import cached
from kvlab.inputs.models.catalogue import MODELS, RANDOM_PREFIX
from kvlab.inputs.models.hashes import remembered_sha256
from kvlab.lib.files import expanded

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def config_of(name: str) -> PreTrainedConfig | None:
    """That of a pulled model, a folder, a GGUF file that was converted, a hub's model in its cache, or `random:SHAPE`.

    A model that is not on this machine has that of the published shape that its name contains; None without one.
    """
    from transformers import AutoConfig

    if name.startswith(RANDOM_PREFIX):
        return shapes.config(name.removeprefix(RANDOM_PREFIX))
    folder = _folder(name)
    if folder is not None:
        # A damaged file is reported by who loads the model.
        with contextlib.suppress(Exception):
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    alike = [shape for shape in shapes.SHAPES if shape in name.lower()]
    return shapes.config(max(alike, key=len)) if alike else None


def _folder(name: str) -> Path | None:
    """Where the model's config.json lies on this machine."""
    path = expanded(name)
    if name in MODELS:
        path = MODELS[name].folder
    elif path.suffix == ".gguf" and path.is_file():
        path = cached.own_folder(remembered_sha256([path]))
    elif not path.is_dir():
        path = _in_hub_cache(name)
    return path if path is not None and path.is_dir() else None


def _in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    with contextlib.suppress(Exception):  # a name that no hub can have
        found = try_to_load_from_cache(name, "config.json")
        return Path(found).parent if isinstance(found, str) else None
    return None
