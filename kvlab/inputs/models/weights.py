"""The tensors of a GGUF file become safetensors: one after the other, so that no more than a shard is in memory."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

from kvlab.errors import KvlabError
from kvlab.inputs.models.folder import quietly
from kvlab.lib.files import allowed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvlab.inputs.models.gguf_file import GGUF

SHARD = 300_000_000  # bytes, but for a single tensor that is larger
ROWS = 1 << 24  # so many elements of a large tensor are dequantised at a time
# No architecture moves the rows of these, so they can be dequantised in blocks of rows.
BY_ROWS = ("token_embd.weight", "output.weight")
UNQUANTISED = ("F64", "F32", "F16", "BF16")
# The types that are tried for an unquantised and for a quantised tensor.
EXACT = (torch.float16, torch.bfloat16, torch.float32)
ROUNDED = (torch.float16, torch.float32)


def convert(file: GGUF, skeleton: PreTrainedModel, folder: Path, bar: Any) -> torch.dtype:
    """Write the weights of `file` into `folder`, under the names that transformers gives them.

    A quantised tensor becomes float16, whose rounding (2^-11) is small against a step of the quantisation. An
    unquantised one takes the first of float16, bfloat16 and float32 that holds each of its numbers exactly.

    Args:
        skeleton: the model on the meta device, which knows names and shapes.
        bar: moves on by one for each element (`progress_bars.counting`).

    Returns:
        The type of most weights.

    Raises:
        KvlabError: the file lacks tensors, or has them in other shapes than its configuration says.
        OSError: they cannot be written.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.named_parameters()}
    tied = {"lm_head.weight"} if skeleton.config.get_text_config().tie_word_embeddings else set()
    shards, shard, held, dtypes = [], {}, 0, {}
    for name, tensor in _tensors(file, skeleton, bar):
        if name in tied or name not in shapes:
            continue
        if tuple(tensor.shape) != shapes[name]:
            raise KvlabError(
                f"cannot load a model from {file.path}: {name} has shape {list(tensor.shape)}, and its configuration "
                f"says {list(shapes[name])}"
            )
        if shard and held + tensor.nbytes > SHARD:
            shards.append(_written(shard, folder, len(shards)))
            shard, held = {}, 0
        shard[name] = tensor
        held += tensor.nbytes
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.numel()
    if shard:
        shards.append(_written(shard, folder, len(shards)))
    missing = sorted(shapes.keys() - tied - {name for names in shards for name in names})
    if missing:
        raise KvlabError(
            f"cannot load a model from {file.path}: {len(missing)} tensors are missing, such as {missing[0]}"
        )
    _named(shards, folder)
    return max(dtypes, key=lambda dtype: dtypes[dtype])


def _tensors(file: GGUF, skeleton: PreTrainedModel, bar: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under their names in transformers, in the order of the file."""
    from transformers import modeling_gguf_pytorch_utils as reading

    kind = reading.TENSOR_PROCESSORS.get(file.architecture, reading.TensorProcessor)
    one_by_one = (
        reading.TensorProcessor,
        reading.LlamaTensorProcessor,
        reading.Gemma2TensorProcessor,
        reading.NemotronTensorProcessor,
        reading.BloomTensorProcessor,
    )
    if kind not in one_by_one or _has_newer_reader(file.architecture):
        yield from _at_once(file, bar)
        return
    processor = kind(config=skeleton.config.to_dict())
    names = _names(file, skeleton) or reading.get_gguf_hf_weights_map(skeleton, processor)
    for name, tensor in file.tensors.items():
        if name in names:
            yield names[name], _tensor(tensor, processor)
        bar.update(int(tensor.n_elements))


def _has_newer_reader(architecture: str) -> bool:
    try:
        from transformers.integrations.gguf import is_gguf_arch_supported  # pyright: ignore[reportPrivateImportUsage]
    except ImportError:  # before transformers 5.18
        return False
    return is_gguf_arch_supported(architecture)


def _names(file: GGUF, skeleton: PreTrainedModel) -> dict[str, str] | None:
    """The names in the file as the model's own, by gguf's table; None where that lacks some.

    transformers' function asks the same table for each module anew, which takes it a quarter of a minute.
    """
    layers = skeleton.config.get_text_config().num_hidden_layers
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table, names = gguf.get_tensor_name_map(known[file.architecture], layers), {}
    for own, _ in skeleton.named_parameters():
        stem, dot, suffix = own.rpartition(".")
        name = table.get_name(stem)
        if name is None:
            return None
        names[f"{name}{dot}{suffix}"] = own
    return names


def _tensor(tensor: gguf.ReaderTensor, processor: Any) -> torch.Tensor:
    """One tensor, dequantised, as transformers arranges it, in the first type that is good enough."""
    exact = tensor.tensor_type.name in UNQUANTISED
    tried = (_dequantised(tensor, processor, dtype, exact) for dtype in (EXACT if exact else ROUNDED))
    return next(values for values in tried if values is not None)


def _dequantised(tensor: gguf.ReaderTensor, processor: Any, dtype: torch.dtype, exact: bool) -> torch.Tensor | None:
    """The tensor in that type, block of rows by block; None where `_as` says so of one."""
    whole = torch.empty(0)
    for start, rows in _rows(tensor):
        values = processor.process(
            weights=gguf.dequantize(rows, tensor.tensor_type), name=tensor.name, parsed_parameters={"tensors": {}}
        ).weights
        part = _as(torch.tensor(np.ascontiguousarray(values, dtype=np.float32)), dtype, exact)
        if part is None or len(rows) == len(tensor.data):
            return part
        if start == 0:
            whole = torch.empty((len(tensor.data), *part.shape[1:]), dtype=dtype)
        whole[start : start + len(part)] = part
    return whole


def _as(values: torch.Tensor, dtype: torch.dtype, exact: bool) -> torch.Tensor | None:
    """float32 numbers in another type; None where it does not hold each exactly, or, not `exact`, is too small."""
    narrow = values.to(dtype)
    fits = torch.equal(narrow.float(), values) if exact else bool(narrow.isfinite().all())
    return narrow if fits or dtype == torch.float32 else None


def _rows(tensor: gguf.ReaderTensor) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks of the tensor's rows, each with the number of its first; all at once where rows may not be parted."""
    data = tensor.data
    step = max(1, ROWS * len(data) // int(tensor.n_elements)) if tensor.name in BY_ROWS else len(data)
    for start in range(0, len(data), step):
        yield start, data[start : start + step]


def _at_once(file: GGUF, bar: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as transformers' own reader loads them, all at once, in float32.

    This is for architectures whose tensors that reader joins or rearranges in ways of its own.
    """
    from transformers import AutoModelForCausalLM

    options = {}
    with contextlib.suppress(ImportError):  # before transformers 5.18 weights are always dequantised
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    # The GGUF reader draws a bar that knows no switch.
    with quietly(), contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            file.path.parent,
            gguf_file=file.path.name,
            dtype=torch.float32,
            **options,
            local_files_only=True,
            trust_remote_code=False,
        )
    for name, tensor in model.named_parameters():
        exact = tensor.dim() == 1  # norms and biases are not quantised
        narrow = (_as(tensor.data, dtype, exact) for dtype in (EXACT if exact else ROUNDED))
        yield name, next(part for part in narrow if part is not None)
        bar.update(tensor.numel())


def _written(shard: dict[str, torch.Tensor], folder: Path, number: int) -> list[str]:
    """Write a shard under a name for the time being, and return the names of its tensors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = folder / f"shard-{number}.safetensors"
    try:
        save_file({name: tensor.contiguous() for name, tensor in shard.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it does not raise OSError for a full disk, and keeps the number in its text
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, str(error), str(folder)) from error
    path.chmod(allowed(0o666))
    return list(shard)


def _named(shards: list[list[str]], folder: Path) -> None:
    """Give the shards the names under which transformers looks for them, and an index where there are several."""
    if len(shards) == 1:
        (folder / "shard-0.safetensors").rename(folder / "model.safetensors")
        return
    index, total = {}, 0
    for number, names in enumerate(shards):
        path = folder / f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"shard-{number}.safetensors").rename(path)
        total += path.stat().st_size
        index |= dict.fromkeys(names, path.name)
    facts = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
