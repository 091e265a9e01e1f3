"""What attention saw of one prompt and its response, as tensors and as a file."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvlab.errors import KvlabError
from kvlab.lib.devices import resolved
from kvlab.lib.files import parsed, replacing
from kvlab.methods.prompt import Asks, Prompt

T = TypeVar("T")

FORMAT = "kvlab-trace-2"
UNCHECKED = "kvlab-trace-1"  # written before traces had checksums
CHECKSUM = "crc32"
BLANK = "0" * 8  # what stands for a file's checksum while that is taken
GIVEN = "given"
Keep = Literal["device", "cpu", "pinned"]
"""Where a captured trace lies: where the model is, in the CPU's memory, or there in page-locked memory."""


@dataclass(eq=False)
class Trace:
    """What attention saw of one prompt and its response: all on one device, but for `ids`, which are on the CPU.

    Attributes:
        queries: `[layers, heads, n, head_dim]`, post-RoPE, of the last n tokens: the end of the prompt, then the
            response.
        keys, values: `[layers, kv_heads, prompt + response, head_dim]`.
        prompt_length: tokens of the prompt.
        pre_queries: as `queries`, before RoPE (after q-norm); None where not recorded.
        pseudo: `[layers, heads, m, head_dim]` pseudo-queries by the key that a policy asks for.
        accumulated: `[layers, heads, prompt]`, attention summed over all prompt queries; None where not asked for.
        ids: int64 `[prompt + response]` token ids.
        nll: `[n]`, what the model thought of the prompt's last n tokens: their negative log-likelihoods, in nats.
        scaling: factor of the logits.
        meta: model, document, chat, seed and versions, as they go into a signature.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    prompt_length: int
    pre_queries: Tensor | None = None
    pseudo: dict[str, Tensor] = field(default_factory=dict)
    accumulated: Tensor | None = None
    ids: Tensor | None = None
    nll: Tensor | None = None
    scaling: float | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    _shared: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def from_tensors(
        cls,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        prompt_length: int,
        *,
        pseudo: Tensor | dict[str, Tensor] | None = None,
        accumulated: Tensor | None = None,
        scaling: float | None = None,
    ) -> Trace:
        """A trace from tensors that were captured elsewhere.

        Args:
            queries: `[layers, heads, n, head_dim]`, post-RoPE; they may cover only the last n tokens.
            keys, values: `[layers, kv_heads, tokens, head_dim]`.
            prompt_length: how many of the tokens are prompt.
            pseudo: `[layers, heads, m, head_dim]`, taken by any policy that needs pseudo-queries; or a dict by key.
            accumulated: `[layers, heads, prompt]`.

        Raises:
            KvlabError: shapes that do not fit together.
        """
        for name, given in {"queries": queries, "keys": keys, "values": values}.items():
            if not isinstance(given, Tensor):
                kind = type(given).__name__
                raise KvlabError(f"{name} must be a torch tensor (torch.as_tensor makes one), not {kind}")
        pseudo = {GIVEN: pseudo} if isinstance(pseudo, Tensor) else dict(pseudo or {})
        made = cls(queries, keys, values, prompt_length, pseudo=pseudo, accumulated=accumulated, scaling=scaling)
        made._check()
        return made

    def _check(self) -> None:
        """Raise KvlabError for tensors that do not fit together, and for what stands beside them."""
        queries, keys, scaling = self.queries, self.keys, self.scaling
        if not isinstance(self.prompt_length, Integral):
            raise KvlabError(f"prompt_length is a whole number, and not {str(self.prompt_length)[:40]!r}")
        if scaling is not None and not (isinstance(scaling, Real) and 0 < scaling < math.inf):
            raise KvlabError(f"scaling is a number above 0, and not {str(scaling)[:40]!r}")
        if not isinstance(self.meta, dict) or not all(
            isinstance(self.meta.get(name, ""), str) for name in ("model", "document")
        ):
            raise KvlabError("meta holds texts by name")
        if queries.dim() != 4 or keys.dim() != 4 or keys.shape != self.values.shape:
            raise KvlabError(
                "a trace needs queries [layers, heads, n, head_dim] and keys, values of one shape [layers, "
                "kv_heads, tokens, head_dim]"
            )
        (layers, heads, n, head_dim), tokens = queries.shape, keys.shape[2]
        if not min(layers, heads, head_dim, *keys.shape):
            raise KvlabError(f"queries {tuple(queries.shape)} or keys {tuple(keys.shape)} hold nothing")
        if layers != keys.shape[0] or heads % keys.shape[1] or head_dim != keys.shape[3]:
            raise KvlabError(
                f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} differ in layers, head size, or "
                f"heads per KV head"
            )
        if not 0 < self.prompt_length <= tokens:
            raise KvlabError(f"prompt_length {self.prompt_length} is not within 1 .. {tokens} tokens")
        if not self.steps <= n <= tokens:
            raise KvlabError(f"{n} queries do not cover the response of {self.steps} among {tokens} tokens")
        for found in self.pseudo.values():
            if found.dim() != 4 or (*found.shape[:2], found.shape[3]) != (layers, heads, head_dim):
                raise KvlabError(f"pseudo-queries {tuple(found.shape)} are not [{layers}, {heads}, m, {head_dim}]")
        wanted = {"accumulated": (layers, heads, self.prompt_length), "pre_queries": queries.shape, "ids": (tokens,)}
        for name, shape in wanted.items():
            found = getattr(self, name)
            if found is not None and found.shape != shape:
                what = "accumulated attention" if name == "accumulated" else name
                raise KvlabError(f"{what} {tuple(found.shape)} is not {list(shape)}")
        if self.nll is not None and (self.nll.dim() != 1 or len(self.nll) >= self.prompt_length):
            raise KvlabError(f"nll {tuple(self.nll.shape)} is not that of tokens of a prompt of {self.prompt_length}")
        for name, tensor in self._tensors().items():
            if tensor.is_floating_point() == (name == "ids"):
                raise KvlabError(f"{name} cannot be of {tensor.dtype}")
            if name != "ids" and tensor.device != self.device:
                raise KvlabError(f"{name} lies on {tensor.device} and the keys on {self.device}; a trace lies on one")
        if self.ids is not None and int(self.ids.min()) < 0:
            raise KvlabError(f"{int(self.ids.min())} is no token id")

    # ------------------------------------------------------------------ parts

    @property
    def device(self) -> torch.device:
        """Where it lies, and where replays of it are computed."""
        return self.keys.device

    @property
    def n_layers(self) -> int:
        return self.keys.shape[0]

    @property
    def heads(self) -> int:
        return self.queries.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def length(self) -> int:
        """Prompt and response together."""
        return self.keys.shape[2]

    @property
    def steps(self) -> int:
        """Decoding steps: the t-th decoding query stands at position prompt_length + t - 1."""
        return self.length - self.prompt_length

    @property
    def response_queries(self) -> Tensor:
        """`[layers, heads, steps, head_dim]`, post-RoPE."""
        return self.queries[:, :, self.queries.shape[2] - self.steps :]

    @property
    def response_pre_queries(self) -> Tensor:
        """`[layers, heads, steps, head_dim]`, before RoPE."""
        if self.pre_queries is None:
            raise KvlabError("this trace holds no pre-RoPE queries")
        return self.pre_queries[:, :, self.pre_queries.shape[2] - self.steps :]

    @property
    def prompt_keys(self) -> Tensor:
        return self.keys[:, :, : self.prompt_length]

    @property
    def prompt_values(self) -> Tensor:
        return self.values[:, :, : self.prompt_length]

    @cached_property
    def prompt(self) -> Prompt:
        """The end of the prefill as policies see it, one row for each layer."""
        return Prompt(
            self.queries[:, :, : self.queries.shape[2] - self.steps],
            self.prompt_keys,
            self.prompt_values,
            tuple(range(self.n_layers)),
            self.n_layers,
            self._pseudo_for,
            self.accumulated,
            self.steps,
            self.scaling,
            self._perplexity,
        )

    def share(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What `compute` gives, computed once for all that look at this trace, and kept as long as it."""
        if key not in self._shared:
            self._shared[key] = compute()
        return self._shared[key]

    def _perplexity(self, n: int) -> Tensor | None:
        n = min(n, self.prompt_length - 1)
        if self.nll is None:
            return None
        if not 0 < n <= len(self.nll):
            raise KvlabError(
                f"the likelihood of the last {n} prompt tokens is needed and {len(self.nll)} are at hand; "
                f"capture with window={n}"
            )
        return self.nll[len(self.nll) - n :].mean().exp().expand(self.n_layers)

    def _pseudo_for(self, policy: Asks) -> Tensor | None:
        given = self.pseudo.get(GIVEN)
        return given if policy.pseudo_key is None else self.pseudo.get(policy.pseudo_key, given)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._tensors().values())

    @property
    def document(self) -> str:
        """`document@sha`, or `tensors` for a trace that was not captured by kvlab."""
        return self.meta.get("document", "tensors")

    @property
    def signature(self) -> str:
        """`model@sha|document@sha`."""
        return f"{self.meta.get('model', 'tensors')}|{self.document}"

    def __repr__(self) -> str:
        return (
            f"Trace({self.signature}, {self.prompt_length} + {self.steps} tokens, {self.n_layers} layers, "
            f"{self.heads}/{self.kv_heads} heads, {self.nbytes / 2**20:.0f} MiB)"
        )

    # ------------------------------------------------------------------ where it lies

    def to(self, device: torch.device | str, pinned: bool = False) -> Trace:
        """The same trace on another device; itself if it lies there.

        Args:
            device: "cpu", "cuda", "cuda:1", "mps", ...
            pinned: on a CPU, in page-locked memory, from which a GPU copies several times faster.

        Raises:
            KvlabError: no such device here, or pinned memory that is not the CPU's.
        """
        place = resolved(device)
        if pinned and place.type != "cpu":
            raise KvlabError(f"pinned memory is the CPU's: use device='cpu', and not {str(place)!r}")
        if pinned and not torch.accelerator.is_available():
            raise KvlabError("memory is pinned for a GPU to copy from, and torch finds none here; leave pinned out")

        def moved(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or (tensor.device == place and (not pinned or tensor.is_pinned())):
                return tensor
            return tensor.to(place).pin_memory() if pinned else tensor.to(place)

        named = {name: getattr(self, name) for name in _TENSORS}
        there = {name: moved(tensor) for name, tensor in named.items()}
        if all(there[name] is tensor for name, tensor in named.items()):
            return self
        return replace(self, **there, pseudo={key: moved(tensor) for key, tensor in self.pseudo.items()})

    # ------------------------------------------------------------------ files

    def _tensors(self) -> dict[str, Tensor]:
        named = {"queries": self.queries, "keys": self.keys, "values": self.values}
        named |= {"pre_queries": self.pre_queries, "accumulated": self.accumulated, "ids": self.ids, "nll": self.nll}
        named |= {f"pseudo/{key}": tensor for key, tensor in self.pseudo.items()}
        return {key: tensor for key, tensor in named.items() if tensor is not None}

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, whose header holds the rest as JSON, and a checksum (CRC-32) of all its bytes;
        under its name only once it is whole.
        """
        path = Path(path)
        header = {"format": FORMAT, "prompt_length": self.prompt_length, "scaling": self.scaling, "meta": self.meta}
        try:
            with replacing(path) as temporary:
                save_file(_apart(self._tensors()), temporary, {"kvlab": json.dumps(header), CHECKSUM: BLANK})
                _sign(temporary)
        except SafetensorError as error:
            raise KvlabError(f"cannot write {path}: {error}") from None
        return path

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> Trace:
        """Read what `save` wrote, from whatever device, onto `device`, and hold it against its checksum: a byte that is
        not what was written is an error.

        The file is read through once in small pieces, in about half a second for 300 MB on one core; the tensors are
        mapped from it, so that memory holds them once. Files of before there were checksums are read unchecked.

        Raises:
            KvlabError: no such file, a damaged one, one that is no trace, or no such device here.
        """
        from safetensors import safe_open

        path, place = Path(path), resolved(device)
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
            header, told = parsed(metadata.get("kvlab", "{}")), metadata.get(CHECKSUM)
            if not isinstance(header, dict) or header.get("format") not in (FORMAT, UNCHECKED):
                raise KvlabError(f"{path} is a safetensors file but no kvlab trace")
            # One byte can make the format another or the checksum vanish, but not both.
            if (header["format"] == FORMAT or told is not None) and _checksum(path, told or BLANK)[0] != told:
                raise KvlabError(f"{path} is damaged: its bytes are not those of its checksum; capture it again")
            tensors = load_file(path)
            pseudo = {k.removeprefix("pseudo/"): tensors.pop(k) for k in list(tensors) if k.startswith("pseudo/")}
            made = cls(
                prompt_length=header["prompt_length"],
                scaling=header["scaling"],
                meta=header["meta"],
                pseudo=pseudo,
                **tensors,
            )
        except FileNotFoundError:
            raise KvlabError(f"there is no trace at {path}") from None
        except (OSError, SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise KvlabError(
                f"{path} is damaged or not a kvlab trace ({type(error).__name__}); capture it again"
            ) from None
        try:
            made._check()
        except KvlabError as error:
            raise KvlabError(f"{path} is damaged or not a kvlab trace ({error}); capture it again") from None
        return made.to(place)


# Those that move with a trace, besides the pseudo-queries.
_TENSORS = ("queries", "keys", "values", "pre_queries", "accumulated", "nll")


def _sign(path: Path) -> None:
    """Put a saved trace's checksum into its place in the header."""
    found, place = _checksum(path, BLANK)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(found.encode())


def _checksum(path: Path, told: str) -> tuple[str, int]:
    """The CRC-32 of a safetensors file, as if zeros stood where its header tells `told`, and that place."""
    piece = memoryview(bytearray(1 << 20))
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        file.seek(0)
        header = file.read(8 + size)
        # Within a text of the header these quotation marks would be escaped.
        key = f'"{CHECKSUM}":"'.encode()
        place = header.find(key + told.encode() + b'"') + len(key)
        found = zlib.crc32(header[:place] + BLANK.encode() + header[place + len(BLANK) :])
        while n := file.readinto(piece):
            found = zlib.crc32(piece[:n], found)
    return f"{found:08x}", place


def opened(given: Trace | str | Path) -> Trace:
    """A trace, or the one that was saved at that path. Raises KvlabError for anything else."""
    if isinstance(given, Trace):
        return given
    if isinstance(given, str | Path):
        return Trace.load(given)
    raise KvlabError(f"a trace is what kvlab.capture gives, or the path where one was saved, and not {given!r:.60}")


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, on the CPU, and no two in one piece of memory, which safetensors refuses."""
    found: dict[str, Tensor] = {}
    pieces: set[int] = set()
    for key, tensor in tensors.items():
        tensor = tensor.contiguous().cpu()
        piece = tensor.untyped_storage().data_ptr()
        found[key] = tensor.clone() if piece in pieces else tensor
        pieces.add(piece)
    return found
