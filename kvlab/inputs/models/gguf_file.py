"""Read a GGUF file's header: its metadata, its tensors, and the configuration that transformers makes of them.

gguf and transformers look at a vocabulary string by string, which takes half a minute and half a gigabyte each time.
Here only its length is read; the tokenizer has a reader of its own, which is quick.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from kvlab.inputs.models.folder import quietly

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class GGUF:
    """An opened file.

    Attributes:
        metadata: its keys and values; of a list of strings its length.
        tensors: by their names in the file, mapped into memory and not read yet.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, gguf.ReaderTensor]

    @property
    def architecture(self) -> str:
        return self.metadata["general.architecture"]

    @property
    def parameters(self) -> int:
        return sum(int(tensor.n_elements) for tensor in self.tensors.values())


def opened(path: Path) -> GGUF:
    """Read the header of a GGUF file. Raises whatever a damaged one makes of its readers."""
    try:
        from transformers.integrations.gguf import read_gguf_metadata  # pyright: ignore[reportPrivateImportUsage]

        metadata, _ = read_gguf_metadata(str(path))
    except ImportError:  # before transformers 5.18; gguf's own reader is slower
        metadata = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    return GGUF(path, metadata, {tensor.name: tensor for tensor in _WithoutLists(path).tensors})


class _WithoutLists(gguf.GGUFReader):
    """gguf's reader, which steps over lists instead of making two arrays for each of their strings."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray], list[int], list[gguf.GGUFValueType]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data: Any = self.data  # numpy calls it a buffer from Python 3.12 on
        kind, count = struct.unpack_from("<IQ", data, orig_offs)
        end = orig_offs + struct.calcsize("<IQ")
        if kind == gguf.GGUFValueType.STRING:
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", data, end)[0]
        else:
            end += count * np.dtype(self.gguf_scalar_to_np[gguf.GGUFValueType(kind)]).itemsize
        return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY]


def configuration(file: GGUF) -> PreTrainedConfig:
    """The configuration that transformers makes of the file's metadata.

    Where it would read the vocabulary for that, it gets a file with the same metadata and tensors' names and nothing
    else. Its newer reader, which knows a few architectures, steps over lists by itself.
    """
    if _has_newer_reader(file.architecture):
        return _read(file.path)
    own = f"{file.architecture}."
    own_values = {
        key: value for key, value in file.metadata.items() if key.startswith(own) or key.endswith("_token_id")
    }
    if TOKENS in file.metadata:
        own_values.setdefault(f"{own}vocab_size", file.metadata[TOKENS])
    with tempfile.TemporaryDirectory() as folder:
        header = Path(folder) / "header.gguf"
        writer = gguf.GGUFWriter(header, file.architecture)
        writer.add_name(str(file.metadata.get("general.name", "")))
        for key, value in own_values.items():
            writer.add_key_value(key, value, _kind(value))
        for name in file.tensors:
            writer.add_tensor(name, np.zeros(1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return _read(header)


def _has_newer_reader(architecture: str) -> bool:
    try:
        from transformers.integrations.gguf import GGUF_CONFIG_ARCHS  # pyright: ignore[reportPrivateImportUsage]
    except ImportError:  # before transformers 5.18
        return False
    return architecture in GGUF_CONFIG_ARCHS


def _read(path: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    with quietly():
        config = AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
    vars(config).pop("quantization_config", None)
    config.name_or_path = ""
    return config


def _kind(value: Any) -> gguf.GGUFValueType:
    """A type that holds what Python made of a value. Any will do: transformers makes Python's numbers of it again."""
    if isinstance(value, int) and not isinstance(value, bool):
        return gguf.GGUFValueType.INT64
    return gguf.GGUFValueType.get_type(value)
