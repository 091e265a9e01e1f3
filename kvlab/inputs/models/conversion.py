"""A GGUF file becomes a folder in Hugging Face's format, once, in the cache: a known model's or a user's own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvlab.core import hookable
from kvlab.errors import KvlabError, nearest
from kvlab.inputs import packs, wheels
from kvlab.inputs.models import cached, gguf_file, pretokenizers, sources, weights
from kvlab.inputs.models.catalogue import DEFAULT, MODELS
from kvlab.inputs.models.folder import known_depth, quietly, says_something, weight_files
from kvlab.lib import progress_bars
from kvlab.lib.files import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvlab.inputs.models.catalogue import KnownModel

# A folder also holds a tokenizer, which may have 40 MB.
TOKENIZER_BYTES = 40_000_000


def pull(name: str = DEFAULT, progress: bool = True, source: str = "wheels") -> Path:
    """Fetch and convert the model `name` unless it is there, and return its folder.

    Args:
        progress: False keeps silent.
        source: "wheels" or "hub", asked only for what is not in the cache.

    Raises:
        KvlabError: an unknown name or source, no network, a hash that does not match, or a full disk. A pull that fails
            or is killed leaves no model behind; what it has fetched stays for the next one.
    """
    if name not in MODELS:
        raise KvlabError(nearest(name, MODELS, "model to pull"))
    sources.check(source)
    model = MODELS[name]
    if not model.folder.is_dir() and model.terms and progress:
        print(f"{name}: {model.terms}", file=sys.stderr, flush=True)

    def build(stage: Path) -> None:
        whole = sources.obtain(model, source, progress)
        _convert(*_read_skeleton(whole), stage, name, progress)
        if not (stage / "tokenizer.json").is_file():
            raise KvlabError(f"{whole.name} has no tokenizer, and a model that kvlab knows by name has one")
        packs.write_provenance(
            stage, **_provenance(model, source), weights_sha256=wheels.file_sha256(*weight_files(stage))
        )

    label = f"pulling {name} (fetch, check, convert once)"
    folder = packs.build_once(model.folder, build, label, progress)
    shutil.rmtree(model.workspace, ignore_errors=True)
    return folder


def _provenance(model: KnownModel, source: str) -> dict[str, object]:
    """The text of the note next to the weights on their source."""
    carriers = {
        "wheels": {"packages": {f"{part.package}=={part.version}": part.sha256 for part in model.parts}},
        "hub": {"repository": model.hub.repository, "file": model.hub.file, "revision": model.hub.revision},
    }
    return {
        "name": model.name,
        "source": source,
        **carriers[source],
        "gguf_sha256": model.sha256,
        "licence": model.licence,
        **({"terms": model.terms} if model.terms else {}),
        "note": "Converted once from GGUF to safetensors.",
    }


def converted(path: Path, sha256: str, progress: bool = True) -> Path:
    """The folder of a user's GGUF file, which is made where there is none yet.

    Raises:
        KvlabError: the file is damaged or of an unknown architecture, or the disk is full. Or kvlab cannot look into
            its layers; this error comes before any weight is read.
    """
    target = cached.own_folder(sha256)
    if target.is_dir():
        return target
    file, skeleton = _read_skeleton(path)
    hookable.layers_of(skeleton)
    size = 2 * file.parameters + TOKENIZER_BYTES
    label = f"converting {path.name} (once, {packs.gigabytes(size)} in the cache)"

    def build(stage: Path) -> None:
        # Here, after what a killed conversion had left was removed and another one has ended.
        packs.check_room(size, label)
        _convert(file, skeleton, stage, path.stem, progress)
        packs.write_provenance(
            stage,
            name=f"{path.stem}@{sha256[:8]}",
            file=str(path.resolve()),
            gguf_sha256=sha256,
            note="Converted once from GGUF to safetensors.",
            weights_sha256=wheels.file_sha256(*weight_files(stage)),
        )

    return packs.build_once(target, build, label, progress)


def _read_skeleton(path: Path) -> tuple[gguf_file.GGUF, PreTrainedModel]:
    """A file's header, and its model without weights."""
    from transformers import AutoModelForCausalLM

    try:
        with quietly():
            file = gguf_file.opened(path)
            config = gguf_file.configuration(file)
            known_depth(config, path)
            with torch.device("meta"):
                return file, AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except KvlabError:
        raise
    except Exception as error:  # these readers trust every number in a file, so that a damaged one can raise anything
        raise _unreadable(path, error) from error


def _convert(file: gguf_file.GGUF, skeleton: PreTrainedModel, folder: Path, name: str, progress: bool) -> None:
    """Fill `folder` with tokenizer, configuration and weights.

    Raises KvlabError for a file that cannot be read, OSError for a disk that cannot be written.
    """
    try:
        with quietly():
            _fill(file, skeleton, folder, name, progress)
    except KvlabError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise _unreadable(file.path, error) from error


def _fill(file: gguf_file.GGUF, skeleton: PreTrainedModel, folder: Path, name: str, progress: bool) -> None:
    config, ending = skeleton.config, skeleton.generation_config
    if gguf_file.TOKENS in file.metadata:
        tokenizer = pretokenizers.read(file.path, file.metadata)
        if says_something(tokenizer):
            tokenizer.model_max_length = config.get_text_config().max_position_embeddings
            tokenizer.save_pretrained(folder)
            ending.eos_token_id = pretokenizers.ends(tokenizer, file.metadata)  # pyright: ignore
        del tokenizer  # a large vocabulary takes as much memory as a small model
    ending.save_pretrained(folder)
    shown = None if progress else False
    with progress_bars.counting(file.parameters, f"converting {name}", "weight", shown, unit_scale=True) as bar:
        config.dtype = weights.convert(file, skeleton, folder, bar)
    config.architectures = [type(skeleton).__name__]
    config.save_pretrained(folder)


def _unreadable(path: Path, error: Exception) -> KvlabError:
    return KvlabError(f"cannot load a model from {path}: {first_line(error)}")
