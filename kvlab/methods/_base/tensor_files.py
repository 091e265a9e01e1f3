"""Safetensors files that a policy's parameter names."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlab.errors import KvlabError
from kvlab.lib.files import expanded, why


def read(path: str | Path, title: str) -> tuple[dict[str, Tensor], dict[str, str], str]:
    """The tensors of a safetensors file by name, its metadata, and the hash of its content.

    Args:
        title: what it is a file of, with how one is made, for messages.

    Raises:
        KvlabError: there is no such file, or it is not in safetensors.
    """
    path = expanded(path)
    try:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, ValueError) as error:
        raise KvlabError(f"cannot read {path}: {why(error).lower()}") from None
    except SafetensorError:
        raise KvlabError(f"{path} is no file of {title}") from None
    return tensors, about, content
