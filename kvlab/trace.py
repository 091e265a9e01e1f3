"""Capture once, ask many questions: one forward pass records what attention saw, and a file keeps it."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvlab import attention, bars
from kvlab.cache import LayerStore, StoreCache
from kvlab.devices import resolved
from kvlab.errors import KvlabError, whole
from kvlab.files import parsed, replacing
from kvlab.models import lm_of
from kvlab.policies import Policy, Prompt, listed, policy, registry

if TYPE_CHECKING:
    from kvlab.models import LM

FORMAT = "kvlab-trace-2"
UNCHECKED = "kvlab-trace-1"  # written before traces had checksums
CHECKSUM = "crc32"
BLANK = "0" * 8  # what stands for a file's checksum while that is taken
GIVEN = "given"
Keep = Literal["device", "cpu", "pinned"]
"""Where a captured trace lies: where the model is, in the CPU's memory, or there in page-locked memory."""
# Logits are wide; the likelihoods of more tokens than this are not recorded, even where all queries are.
NLL_TOKENS = 256


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

    def _pseudo_for(self, wanted: Policy) -> Tensor | None:
        return self.pseudo.get(wanted.pseudo_key, self.pseudo.get(GIVEN))

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


# ---------------------------------------------------------------------------------------------------- capture


class _Recorder:
    """Keeps what one model's attention sees while it prefills and decodes."""

    def __init__(self, lm: LM, prompt: int, steps: int, window: int, extra: int, accumulate: bool):
        config = lm.model.config.get_text_config(decoder=True)
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        module = attention.layers_of(lm.model)[0]
        head_dim = getattr(module, "head_dim", None) or config.hidden_size // self.heads
        make = dict(dtype=lm.dtype, device=lm.device)
        storage = (self.layers, 1, kv_heads, prompt + max(steps, extra), head_dim)
        self.keys, self.values = torch.empty(storage, **make), torch.empty(storage, **make)
        self.stores = [LayerStore.preallocated(k, v) for k, v in zip(self.keys, self.values, strict=True)]
        self.cache = StoreCache(self.stores)
        self.queries = torch.empty(self.layers, self.heads, window + steps, head_dim, **make)
        self.pre_queries = torch.empty_like(self.queries)
        self.accumulated = torch.zeros(self.layers, self.heads, prompt, device=lm.device) if accumulate else None
        self.scaling: float | None = None
        self.filled = 0
        self.accumulating = accumulate

    def __call__(self, call: attention.Call) -> Tensor:
        n = min(call.queries.shape[2], self.queries.shape[2] - self.filled)
        new = slice(self.filled, self.filled + n)
        self.queries[call.layer, :, new] = call.queries[0, :, call.queries.shape[2] - n :]
        self.pre_queries[call.layer, :, new] = call.pre_rope[0, :, call.queries.shape[2] - n :]
        self.scaling = call.scaling
        if self.accumulating:
            self.accumulated[call.layer] = attention.accumulate(call.queries[0], call.keys[0], call.scaling)
        if call.layer == self.layers - 1:
            self.filled += n
        return call.attend()


def _forward(lm: LM, ids: Tensor, cache: StoreCache, positions: Tensor | None = None, logits_of: int = 1) -> Tensor:
    """Logits of the last tokens, `[logits_of, vocabulary]`."""
    extra = {} if positions is None else {"position_ids": positions[None].to(lm.device)}
    out = lm.model(
        input_ids=ids[None].to(lm.device), past_key_values=cache, use_cache=True, logits_to_keep=logits_of, **extra
    )
    return out.logits[0, -logits_of:]


@torch.inference_mode()
def pseudo_queries(lm: LM, cache: StoreCache, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of tokens that run on top of a prefilled cache at any assigned positions, and are cropped off again.

    They see the whole prompt and, causally, those of their own trial; several trials share one forward pass.

    Args:
        ids, positions: int64 `[m]`, or `[trials, m]`.

    Returns:
        Post-RoPE and pre-RoPE queries, each `[layers, heads, m, head_dim]`, or `[trials, layers, heads, m, head_dim]`.
    """
    trials, m = ids.shape if ids.dim() == 2 else (1, len(ids))
    post, pre = {}, {}
    lengths = [layer.store.length for layer in cache.layers]
    trial = torch.arange(trials * m, device=lm.device) // m
    own = attention.last_visible(trials * m, trials * m, lm.device) & (trial[:, None] == trial[None])
    mask = torch.cat([own.new_ones(trials * m, lengths[0]), own], dim=1)

    def record(call: attention.Call) -> Tensor:
        post[call.layer], pre[call.layer] = call.queries[0], call.pre_rope[0]
        return call.attend(mask)

    try:
        with attention.hooked(lm.model, record):
            _forward(lm, ids.reshape(-1), cache, positions.reshape(-1))
    finally:
        for layer, length in zip(cache.layers, lengths, strict=True):
            layer.store.truncate(length)

    def stacked(found: dict[int, Tensor]) -> Tensor:
        rows = torch.stack([found[layer] for layer in range(len(lengths))])
        return rows if ids.dim() == 1 else rows.unflatten(2, (trials, m)).movedim(2, 0)

    return stacked(post), stacked(pre)


def prefilled(trace: Trace) -> StoreCache:
    """A cache that holds a trace's prompt, as after its prefill: pseudo-queries run on it without prefilling again."""
    pairs = zip(trace.prompt_keys, trace.prompt_values, strict=True)
    return StoreCache([LayerStore(keys[None], values[None]) for keys, values in pairs])


def prompt_ids(lm: LM, text_or_ids: Any, chat: str | bool = "auto") -> tuple[Tensor, str]:
    """Token ids `[tokens]` of a text, a `Document` or ids, and a name for them with a hash.

    Raises:
        KvlabError: nothing in it, not of one sequence, or ids that the model does not have.
    """
    from kvlab.corpus import Document

    if chat not in ("auto", True, False):
        raise KvlabError(f"chat={chat!r}: it is 'auto', True or False")
    if isinstance(text_or_ids, Path):
        raise KvlabError(f"{text_or_ids} is a path; give the text in it, as kvlab.document({str(text_or_ids)!r})")
    if isinstance(text_or_ids, str):
        if not text_or_ids.strip():
            raise KvlabError("the document is empty; it needs at least one token")
        text_or_ids = Document("text", text_or_ids)
    if isinstance(text_or_ids, Document):
        return lm.encode(text_or_ids.text, chat=chat)[0].cpu(), text_or_ids.signature
    ids = _checked(lm, text_or_ids, "prompt")
    return ids, f"ids@{hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:8]}"


def several(prompts: Any) -> bool:
    """Whether these are several prompts rather than one."""
    from kvlab.corpus import Document

    first = prompts[0] if isinstance(prompts, list | tuple) and prompts else 0
    return isinstance(first, str | Document | list | tuple) or getattr(first, "ndim", 0) > 0


def _checked(lm: LM, ids: Any, what: str) -> Tensor:
    """Token ids of one sequence as int64 `[tokens]`, or an error that says what is wrong with them."""
    try:
        ids = torch.as_tensor(ids).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise KvlabError(f"the {what} is a text, a Document or token ids, and not {type(ids).__name__}") from None
    if not ids.numel():
        raise KvlabError(f"the {what} is empty; it needs at least one token")
    if ids.is_floating_point() or ids.dim() > 2 or (ids.dim() == 2 and len(ids) > 1):
        raise KvlabError(
            f"the {what} is one sequence of whole token ids, [tokens] or [1, tokens], and not {ids.dtype} of shape "
            f"{tuple(ids.shape)}; capture several as a list"
        )
    if not ids.dim():
        raise KvlabError(f"the {what} is a text, a Document or token ids, and not the number {int(ids)}")
    ids, vocabulary = ids.reshape(-1).long(), lm.model.get_input_embeddings().num_embeddings
    beyond = ids[(ids < 0) | (ids >= vocabulary)]
    if len(beyond):
        raise KvlabError(f"the {what} has the token id {int(beyond[0])}, and {lm.name} knows 0 .. {vocabulary - 1}")
    return ids


@dataclass(frozen=True, eq=False)
class Plan:
    """What one capture runs and records: with the weights and the code, all that its numbers depend on.

    Attributes:
        ids: int64 `[prompt]`.
        document: the prompt's name, with a hash.
        new_tokens: length of the response.
        window: how many of the last prompt queries are kept.
        accumulate: whether the attention over all prompt queries is summed.
        likelihoods: of how many of the last prompt tokens.
        pseudo: token ids by the key that a policy asks for.
        response: token ids to feed instead of the greedy ones; None for these.
    """

    ids: Tensor
    document: str
    new_tokens: int
    window: int
    accumulate: bool
    likelihoods: int
    pseudo: dict[str, Tensor]
    response: Tensor | None

    @property
    def work(self) -> int:
        """Of all its forward passes, as `bars.layers` counts it."""
        return bars.work(len(self.ids), *map(len, self.pseudo.values()), *[1] * self.new_tokens)


def planned(
    lm: LM,
    text_or_ids: Any,
    new_tokens: int,
    window: int,
    chat: str | bool,
    queries: str | None,
    accumulate: bool,
    pseudo: Sequence[Policy | str],
    policies: Sequence[Policy | str],
    response: Tensor | Sequence[int] | None,
) -> Plan:
    """What `capture` does with these arguments, checked; nothing runs. Raises KvlabError as `capture` does."""
    new_tokens, window = whole("new_tokens", new_tokens), whole("window", window)
    if new_tokens < 0 or window < 0:
        raise KvlabError(f"new_tokens and window must not be negative, and are {new_tokens} and {window}")
    if queries not in (None, "all"):
        raise KvlabError(f"queries={queries!r}: it is 'all' for every prompt query, or left out for the last `window`")
    served = [_roomy(one) for one in listed(policies)]
    window = max([window, *(one.observes or 0 for one in served), *(one.reads_perplexity for one in served)])
    queries = "all" if any(one.observes is None for one in served) else queries
    accumulate = accumulate or any(one.accumulates for one in served)
    asking = [one for one in (*map(_roomy, listed(pseudo, "pseudo")), *served) if one.pseudo_key]
    ids, document = prompt_ids(lm, text_or_ids, chat)
    length = len(ids)
    if response is not None:
        response = _checked(lm, response, "response")[:new_tokens]
        new_tokens = len(response)
    extra = {
        p.pseudo_key: p.pseudo_tokens(ids, lm.model.config.get_text_config(decoder=True).vocab_size, _encoder(lm))
        for p in asking
    }
    longest = length + max([new_tokens, *map(len, extra.values())])
    if longest > lm.context_length:
        raise KvlabError(
            f"the prompt has {length} tokens and {longest - length} follow it, which is beyond the "
            f"{lm.context_length} that "
            f"{lm.name} takes; shorten the document (Document.window) or the response"
        )
    attention.check_length(lm.model, longest)
    window = length if queries == "all" else min(window, length)
    known = min(window, length - 1, max([NLL_TOKENS, *(one.reads_perplexity for one in served)]))
    return Plan(ids, document, new_tokens, window, accumulate, known, extra, response)


@torch.inference_mode()
def capture(
    lm: LM,
    text_or_ids: Any,
    new_tokens: int = 64,
    window: int = 32,
    *,
    chat: str | bool = "auto",
    queries: str | None = None,
    accumulate: bool = False,
    pseudo: Sequence[Policy | str] = ("dapq",),
    policies: Sequence[Policy | str] = (),
    response: Tensor | Sequence[int] | None = None,
    keep: Keep = "device",
    progress: bool | None = None,
) -> Trace | list[Trace]:
    """Run one prompt and its greedy response on the full cache, and record what attention saw.

    Args:
        lm: from `kvlab.load` or `kvlab.random_lm`, or a transformers model (which has no tokenizer: ids only).
        text_or_ids: a text or `Document` (with `chat="auto"` it becomes a user message where the model has a chat
            template), token ids (taken as they are), or a list of texts or documents, which gives a list of traces.
        new_tokens: length of the response, exactly (EOS is no stop); its last token is fed too, so there are as many
            decoding queries, at positions P .. P + new_tokens - 1.
        window: how many of the last prompt queries to keep.
        queries: "all" keeps every prompt query.
        accumulate: record the attention summed over all prompt queries (H2O-like policies).
        pseudo: policies whose pseudo-queries to record besides; `()` for none.
        policies: those that the trace is for: whatever they need of `window`, `queries`, `accumulate` and `pseudo` is
            recorded besides.
        response: token ids to feed as the response instead of the greedy one (teacher forcing); `new_tokens` is then
            how many of them.
        keep: where the trace lies in the end, and is replayed: "device", where the model is; "cpu", which leaves the
            GPU's memory to the model (1,000 tokens of an 8B model take about 130 MB); "pinned", the CPU's page-locked
            memory, from which `trace.to(lm.device)` is faster. With a model on the CPU all three are the same.
        progress: show a progress bar; by default after five seconds, on a terminal or in a notebook run by hand.

    Raises:
        KvlabError: an empty prompt, one that is too long for the model, or a model that cannot be hooked; nothing has
            run by then.
    """
    check_keep(keep)
    lm = lm_of(lm)
    if several(text_or_ids):
        if response is not None:
            raise KvlabError("one response cannot follow several documents; capture them one by one")
        options = dict(chat=chat, queries=queries, accumulate=accumulate, pseudo=pseudo, policies=policies, keep=keep)
        bar = bars.each(text_or_ids, "capture", "doc", progress)
        # What one document takes has a bar of its own, below.
        return [capture(lm, one, new_tokens, window, progress=progress, **options) for one in bar]

    plan = planned(lm, text_or_ids, new_tokens, window, chat, queries, accumulate, pseudo, policies, response)
    with bars.layers(attention.layers_of(lm.model), plan.work, "prompt", progress):
        return placed(_captured(lm, plan, chat), keep, lm.device)


def _captured(lm: LM, plan: Plan, chat: str | bool) -> Trace:
    ids, window, new_tokens, response, extra = plan.ids, plan.window, plan.new_tokens, plan.response, plan.pseudo
    length = len(ids)

    recorder = _Recorder(lm, length, new_tokens, window, max([0, *map(len, extra.values())]), plan.accumulate)
    # The prefill must not fill the rows that are meant for the response.
    rows = recorder.queries, recorder.pre_queries
    recorder.queries, recorder.pre_queries = (r[:, :, :window] for r in rows)
    with attention.hooked(lm.model, recorder):
        logits = _forward(lm, ids, recorder.cache, logits_of=plan.likelihoods + 1)
    nll = F.cross_entropy(logits[:-1].float(), ids[length - plan.likelihoods :].to(logits.device), reduction="none")
    logits = logits[-1]
    recorder.accumulating = False
    recorder.queries, recorder.pre_queries = rows

    found = {}
    for key, tokens in extra.items():
        found[key], _ = pseudo_queries(lm, recorder.cache, tokens, torch.arange(length, length + len(tokens)))
    fed = []
    with attention.hooked(lm.model, recorder):
        for step in range(new_tokens):
            fed.append(logits.argmax(-1).cpu() if response is None else response[step])
            logits = _forward(lm, fed[-1][None], recorder.cache)[-1]

    from kvlab import __version__

    stop = length + new_tokens
    return Trace(
        queries=rows[0],
        pre_queries=rows[1],
        keys=recorder.keys[:, 0, :, :stop],
        values=recorder.values[:, 0, :, :stop],
        prompt_length=length,
        pseudo=found,
        accumulated=recorder.accumulated,
        ids=torch.cat([ids, *[token[None] for token in fed]]),
        nll=nll,
        scaling=recorder.scaling,
        meta={
            "model": lm.signature,
            "document": plan.document,
            "chat": str(chat),
            "response": "greedy" if response is None else "given",
            "kvlab": __version__,
        },
    )


def placed(trace: Trace, keep: Keep, device: torch.device) -> Trace:
    """A trace of a model on `device` where `capture(..., keep=)` leaves it."""
    if keep == "device" or device.type == "cpu":
        return trace.to(device)
    return trace.to("cpu", pinned=keep == "pinned")


def check_keep(keep: str) -> None:
    if keep not in get_args(Keep):
        raise KvlabError(f"keep={keep!r} is none of {', '.join(map(repr, get_args(Keep)))}")


def _roomy(one: Policy | str) -> Policy:
    """A policy by name, with room for the whole prompt."""
    if isinstance(one, Policy):
        return one
    return policy(one, budget=1.0) if one not in registry() or "budget" in registry()[one].model_fields else policy(one)


def _encoder(lm: LM):
    def encode(text: str) -> Tensor:
        lm.require_tokenizer("pseudo-tokens cannot be made from a sentence")
        return torch.tensor(lm.tokenizer(text, add_special_tokens=False).input_ids)

    return encode
