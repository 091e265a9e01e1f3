"""A name becomes a language model: weights, tokenizer and the hash that a result carries in its signature.

`load` takes the default model's name, a local folder, a GGUF file, a hub id, or `random:SHAPE`. Nothing is fetched
from a hub unless the user names one, remote code is never run, and pickled weights are never read.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

import torch

from kvlab.core import hookable
from kvlab.core.onednn import fold_rows, use_onednn
from kvlab.errors import KvlabError, nearest
from kvlab.inputs import packs, shapes
from kvlab.inputs.models.catalogue import DEFAULT, MODELS, RANDOM_PREFIX
from kvlab.inputs.models.conversion import converted, pull
from kvlab.inputs.models.folder import ConversionReasons, known_depth, quietly, read_tokenizer, weight_files
from kvlab.inputs.models.hashes import remembered_sha256
from kvlab.inputs.models.lm import LM
from kvlab.lib import progress_bars
from kvlab.lib.devices import resolved
from kvlab.lib.files import expanded, first_line, parsed, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils.quantization_config import QuantizationConfigMixin


class Placing(TypedDict, total=False):
    """The arguments that `load` passes to transformers: the device of weights, and how they are quantised."""

    device_map: str | Mapping[str, Any]
    max_memory: Mapping[int | str, int | str]
    offload_folder: str | os.PathLike
    quantization_config: QuantizationConfigMixin | Mapping[str, Any]


# A caller in inference mode would get weights that no later backward pass can use.
@torch.inference_mode(False)
def load(
    name_or_path: str | os.PathLike = DEFAULT,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    *,
    onednn: bool | None = None,
    **placing: Unpack[Placing],
) -> LM:
    """Load a model by name, local folder, .gguf file, hub id (org/name), or `random:SHAPE`.

    device="auto" takes a GPU where there is one; dtype="auto" is float32 on a CPU and the checkpoint's own type on a
    GPU. A known model that is not there yet is pulled first. onednn=False leaves the model's linear layers as torch
    made them. True replaces the large ones with a class that multiplies by oneDNN. None does so where it is faster,
    unless KVLAB_ONEDNN says otherwise (`kvlab.core.onednn`). kvlab's own attention follows that variable only.

    `placing` goes to transformers. device_map, max_memory and offload_folder leave weights that do not fit the GPU on
    the CPU or on the disk. quantization_config quantises them: docs/models.md says what works. They need accelerate,
    and the package that quantises. Layers may lie on several GPUs: each keeps its entries where it computes.

    Raises KvlabError for an unknown name, and for a model that kvlab cannot hook, before its weights are read.
    """
    if not isinstance(name_or_path, str | os.PathLike) or not str(name_or_path).strip():
        raise KvlabError(
            f"a model has a name, such as {DEFAULT!r}, or a path, and not {name_or_path!r:.60}; {_what_exists()}"
        )
    name, settings = os.fspath(name_or_path), _settings(placing, device)
    if name in MODELS:
        return _from_folder(pull(name), name, device, dtype, onednn, settings)
    if name.startswith(RANDOM_PREFIX):
        if settings:
            raise KvlabError(f"{name} has no file of weights, so {' and '.join(settings)} cannot be had; leave it out")
        return random_lm(name.removeprefix(RANDOM_PREFIX), device=device, dtype=dtype, onednn=onednn)
    path = expanded(name)
    if os.path.isdir(path):
        return _from_folder(path, path.resolve().name, device, dtype, onednn, settings)
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise KvlabError(f"{name} is a file, but not a .gguf file; give that, or a folder in Hugging Face's format")
        sha256 = remembered_sha256([path])
        return _from_folder(converted(path, sha256), path.stem, device, dtype, onednn, settings, sha256)
    if re.fullmatch(r"[\w.-]*\w[\w.-]*/[\w.-]*\w[\w.-]*", name) and not name.startswith(".") and path.suffix != ".gguf":
        return _from_folder(_from_hub(name), name, device, dtype, onednn, settings)
    if os.sep in name or path.suffix == ".gguf":
        raise KvlabError(f"there is no folder or GGUF file {name}; {_what_exists()}")
    raise KvlabError(f"{nearest(name, MODELS, 'model')} ({_what_exists()})")


def tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a pulled model, or of a folder of that name here; None where there is neither. Fetches nothing.

    The name may come from a trace, and a trace leads nowhere else.
    """
    folder = MODELS[name].folder if name in MODELS else Path(name)
    if folder.name in ("", "..") or (name not in MODELS and folder.name != name):
        return None
    return read_tokenizer(folder) if os.path.isfile(folder / "tokenizer_config.json") else None


def _settings(placing: Placing, device: str) -> dict[str, Any]:
    """Return the settings of `placing` for transformers.

    Raises KvlabError for an unknown argument, for a wrong `quantization_config`, and for two places.
    """
    known = Placing.__annotations__
    settings: dict[str, Any] = {name: value for name, value in placing.items() if value is not None}
    for name in settings:
        if name not in known:
            raise KvlabError(nearest(name, known, "argument of load"))
    if not settings:
        return {}
    if "quantization_config" in settings and not _as_dict(settings["quantization_config"]):
        raise KvlabError(
            "quantization_config is a configuration of transformers, such as BitsAndBytesConfig(load_in_8bit=True), "
            f"and not {settings['quantization_config']!r:.60}"
        )
    if "device_map" in settings and device != "auto":
        raise KvlabError(f"device={device!r} and device_map both say where the model lies; leave one of them out")
    # A quantised model lies on one device unless something else is said.
    return {"device_map": {"": resolved(device)}} | settings


def _as_dict(quantisation: object) -> dict[str, Any]:
    """The settings of a quantisation; none of what is no configuration."""
    if isinstance(quantisation, Mapping):
        return dict(quantisation)
    return getattr(quantisation, "to_dict", dict)()


@torch.inference_mode(False)
def random_lm(
    shape: str,
    layers: int | None = None,
    seed: int = 0,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    onednn: bool | None = None,
    **changes: object,
) -> LM:
    """A model of a known shape (`kvlab.inputs.shapes`) with random weights: for plumbing, tests and speed, not for
    findings.

    The weights follow from `seed` (torch's global generator is left as it was). `layers` cuts the depth (None: as
    published). `tokenizer` is a tokenizer, or the name of a model to borrow one from; the vocabulary is then large
    enough. `onednn` is as in `load`. `changes` are further arguments of the configuration. Raises KvlabError for an
    unknown shape or a depth below 1.
    """
    from transformers import AutoModelForCausalLM

    on = resolved(device)
    if isinstance(tokenizer, str):
        tokenizer = read_tokenizer(pull(tokenizer))
    config = shapes.config(shape, layers, **changes)
    if tokenizer is not None:
        config.vocab_size = max(config.vocab_size, len(tokenizer))
    kind = _dtype(dtype, on, torch.bfloat16)
    gpus, attention = [on] if on.type != "cpu" else [], _attention(config)
    with torch.random.fork_rng(devices=gpus, device_type=on.type), torch.device(on):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation=attention)
    recipe = json.dumps([shape, config.num_hidden_layers, seed, str(kind), config.vocab_size, changes], default=str)
    name = RANDOM_PREFIX + shape + ("" if layers is None else f"/{layers}")
    return _finish(model.to(on), tokenizer, name, hashlib.sha256(recipe.encode()).hexdigest(), onednn)


def _finish(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
    sha256: str,
    onednn: bool | None,
) -> LM:
    model.eval().requires_grad_(False)
    use_onednn(model, onednn)
    fold_rows(model.get_output_embeddings())
    return LM(model, tokenizer, name, sha256)


def _from_folder(
    folder: Path,
    name: str,
    device: str,
    dtype: str | torch.dtype,
    onednn: bool | None,
    settings: Mapping[str, Any],
    sha256: str | None = None,
) -> LM:
    """The model in a folder. `settings` go to transformers; `sha256` of its weights, where it is known."""
    from transformers import AutoConfig, AutoModelForCausalLM

    _check_whole(folder)
    on = resolved(device)
    local = {"local_files_only": True, "trust_remote_code": False}
    weights = weight_files(folder)
    # kvlab trusts the hash that a folder states only where it checked the folder when it was pulled.
    if folder in [model.folder for model in MODELS.values()]:
        sha256 = packs.read_provenance(folder).get("weights_sha256")
    sha256 = sha256 or remembered_sha256(weights)
    reasons = ConversionReasons()
    try:
        # The bar of `waiting` keeps the stderr from before the redirection.
        with progress_bars.waiting(f"loading {name}"), quietly(), contextlib.redirect_stderr(io.StringIO()):
            config = AutoConfig.from_pretrained(folder, **local)
            own = getattr(config, "dtype", None) or torch.float32
            known_depth(config, folder)
            # A configuration may name code on a hub for its attention, and files of weights that nobody looked at.
            config._attn_implementation, config.transformers_weights = "eager", None
            config._attn_implementation = attention = _attention(config)
            with reasons:
                loaded = AutoModelForCausalLM.from_pretrained(
                    folder,
                    output_loading_info=True,
                    dtype=_dtype(dtype, on, own),
                    attn_implementation=attention,
                    config=config,
                    use_safetensors=True,
                    **local,
                    **settings,
                )
            model, report = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
            tokenizer = read_tokenizer(folder)
    except KvlabError:
        raise
    # These readers trust every number in a file, so that a damaged one can raise anything.
    except Exception as error:
        raise KvlabError(f"cannot load a model from {folder}: {reasons.reason or first_line(error)}") from error
    if report["missing_keys"] or report["mismatched_keys"]:
        lacking = sorted(map(str, {*report["missing_keys"], *report["mismatched_keys"]}))
        raise KvlabError(
            f"the weights in {folder} do not fit its config.json: {len(lacking)} are missing or of another "
            f"size, such as {lacking[0]}"
        )
    if quantisation := settings.get("quantization_config"):
        # Other numbers than those of the file: results of the two are not the same model's.
        sha256 = hashlib.sha256(f"{sha256} {_as_dict(quantisation)}".encode()).hexdigest()
    # Quantised weights multiply in ways of their own, and what accelerate has placed stays there.
    onednn = False if settings else onednn
    # transformers wraps Module.to so that a checker sees no self.
    placed = model if settings else model.to(on)  # pyright: ignore[reportArgumentType]
    lm = _finish(placed, tokenizer, name, sha256, onednn)
    if min(lm.n_layers, lm.context_length) < 1:
        raise KvlabError(
            f"cannot load a model from {folder}: it has {lm.n_layers} layers and takes {lm.context_length} tokens"
        )
    return lm


def _check_whole(folder: Path) -> None:
    """Raise KvlabError for the folder of an adapter, which is only what a training has changed in another model."""
    settings = folder / "adapter_config.json"
    if not settings.is_file() or (folder / "config.json").is_file():
        return
    try:
        known = parsed(read_text(settings))
        kind, base = known.get("peft_type") or "PEFT", known.get("base_model_name_or_path")
    except (json.JSONDecodeError, AttributeError):
        kind, base = "PEFT", None
    kind = "LoRA" if kind == "LORA" else kind
    raise KvlabError(
        f"{folder} holds a {kind} adapter, not a model: load its base model ({base or 'not named there'}) with peft's "
        "PeftModel and pass that model, or save it after merge_and_unload()"
    )


def _attention(config: PreTrainedConfig) -> str:
    """Choose the attention implementation to load a model with.

    It is the fused one where that computes what the model asks for; it knows neither soft caps nor learnt sinks. Raises
    KvlabError for a model that kvlab cannot look into. The model's skeleton shows this before its weights are read.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    # Older versions of transformers say that Gemma 2 supports the fused one, which drops its cap.
    plain = all(hookable.softmax_of(module).plain for module in hookable.layers_of(skeleton))
    return "sdpa" if skeleton._supports_sdpa and plain else "eager"


def _from_hub(repository: str) -> Path:
    """The local snapshot of a hub repository that the user named; its files are fetched where they are missing."""
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(repository, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises a dozen unrelated kinds, all of which mean "cannot be had"
        with contextlib.suppress(Exception):
            return Path(snapshot_download(repository, allow_patterns=wanted, local_files_only=True))
        why = first_line(error).rstrip(".")
        raise KvlabError(f"cannot get {repository} from the hub ({why}); {_what_exists()}") from error


def _what_exists() -> str:
    pulled = [name for name, model in MODELS.items() if model.folder.is_dir()]
    fetched = [f"{name} (with kvlab pull)" for name in MODELS if name not in pulled]
    here = pulled + _hub_cache() + fetched
    return (
        f"there is {', '.join(here)}, {RANDOM_PREFIX}SHAPE (such as {RANDOM_PREFIX}tiny-llama-gqa), "
        "or any folder in Hugging Face's format or .gguf file"
    )


def _hub_cache() -> list[str]:
    from huggingface_hub import scan_cache_dir

    with contextlib.suppress(Exception):
        return sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
    return []


def _dtype(dtype: str | torch.dtype, on: torch.device, own: str | torch.dtype) -> torch.dtype:
    if dtype == "auto":
        dtype = torch.float32 if on.type == "cpu" else own
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise KvlabError(f"unknown dtype {dtype!r}; use 'auto', 'float32', 'bfloat16' or 'float16'")
    return found
