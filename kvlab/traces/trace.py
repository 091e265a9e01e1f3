"""Attention's queries, keys and values of one prompt and its response, as tensors and as a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvlab.core.layout import Layout
from kvlab.core.rotation import Rotation
from kvlab.core.softmax import Softmax
from kvlab.errors import KvlabError
from kvlab.lib.devices import resolved
from kvlab.lib.files import parsed, replacing
from kvlab.lib.renamed import Renamed
from kvlab.methods._base.indexer_reads import IndexerReads
from kvlab.methods._base.prompt import Asks, Prompt
from kvlab.traces.checks import check, check_kinds
from kvlab.traces.files import BLANK, CHECKSUM, checksum, layout_of, pop_prefix, rotations_of, separate, write_checksum
from kvlab.traces.hook_names import named

T = TypeVar("T")

FORMAT = "kvlab-trace-2"
MIXED = "kvlab-trace-3"  # with what older versions do not know: a soft cap, sinks, layers left alone, projections
UNCHECKED = "kvlab-trace-1"  # written before traces had checksums
ANY_POLICY = "given"
Keep = Literal["device", "cpu", "pinned"]
"""Where a captured trace lies: where the model is (on the first of its devices), in the CPU's memory, or there in
page-locked memory.
"""


@dataclass(eq=False)
class Trace:
    """Attention's queries, keys and values of one prompt and its response: all on one device, only `ids` on the CPU.

    `layers` below are those that policies compress, one behind the other; `layout` tells which of the model's they are.

    Attributes:
        queries: `[layers, heads, n, head_dim]`, post-RoPE, of the last n tokens: the end of the prompt, then the
            response.
        keys, values: `[layers, kv_heads, prompt + response, head_dim]`.
        prompt_length: tokens of the prompt.
        pre_queries: as `queries`, before RoPE (after q-norm); None where not recorded.
        pseudo: `[layers, heads, m, head_dim]` pseudo-queries by the key that a policy asks for.
        accumulated: `[layers, heads, prompt]`, attention summed over all prompt queries; None where not asked for.
        hidden: `[layers, prompt, width]`, what enters each layer's attention; None where not asked for.
        ids: int64 `[prompt + response]` token ids.
        nll: `[n]`, what the model thought of the prompt's last n tokens: their negative log-likelihoods, in nats.
        scaling: factor of the logits.
        softcap: what they level off at; None where the model does not cap them.
        sinks: `[layers, heads]`, learnt logits of no key; None where the model has none.
        projections: `[layers, hidden, heads x head_dim]`, the output projections; None where not asked for.
        model_projections: the output projections as the model's own weights, while this process has them in memory. No
            file keeps them; None for a trace from elsewhere.
        repeated: `[layers, kv_heads, prompt]`, scores of passes that repeat the prompt, by the key of each repetition.
        rotations: how each layer turns queries and keys by their positions. None for a layer whose way kvlab does not
            know, and for all layers of a trace from elsewhere.
        layout: the layers of the model, all of them; None (at first) stands for a model whose layers are all recorded.
        latent: of latent attention, the channels of a key's rotary part. The value lies behind it; `values` repeat it
            with zeros in front. 0 where keys and values are apart.
        chosen: int64 `[layers, steps, k]`, positions that the model's sparse indexer chose at each step of the
            response. They are ascending, -1 padded. None where the model has no indexer. `indexer` is that choice as a
            policy.
        meta: model, document, chat, seed and versions, as they go into a signature.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    prompt_length: int
    pre_queries: Tensor | None = None
    pseudo: dict[str, Tensor] = field(default_factory=dict)
    accumulated: Tensor | None = None
    hidden: Tensor | None = None
    ids: Tensor | None = None
    nll: Tensor | None = None
    scaling: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    projections: Tensor | None = None
    model_projections: tuple[Tensor, ...] | None = field(default=None, repr=False)
    repeated: dict[str, Tensor] = field(default_factory=dict)
    rotations: tuple[Rotation | None, ...] | None = None
    layout: Layout = None  # type: ignore[reportAssignmentType]  # made from the tensors where it is not given
    latent: int = 0
    chosen: Tensor | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    _shared: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    lent = Renamed("model_projections")

    def __post_init__(self):
        self.layout = self.layout or Layout.whole(self.keys.shape[0] if self.keys.dim() else 0)

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
        softcap: float | None = None,
        sinks: Tensor | None = None,
        projections: Tensor | None = None,
        rotations: Sequence[Rotation] | None = None,
        pre_queries: Tensor | None = None,
        hidden: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Trace:
        """A trace from tensors that were captured elsewhere.

        Args:
            queries: `[layers, heads, n, head_dim]`, post-RoPE; they may cover only the last n tokens.
            keys, values: `[layers, kv_heads, tokens, head_dim]`.
            prompt_length: how many of the tokens are prompt.
            pseudo: `[layers, heads, m, head_dim]`, taken by any policy that needs pseudo-queries; or a dict by key.
            accumulated: `[layers, heads, prompt]`.
            scaling, softcap, sinks: what the model makes of its products; a plain softmax of them, scaled by
                1 / sqrt(head_dim), unless given. Sinks are `[layers, heads]`.
            projections: `[layers, hidden, heads x head_dim]`, for policies that look at projected values.
            rotations, pre_queries: how each layer turns by position, and the queries before that, of the shape of
                `queries`, for policies that look at these.
            hidden: `[layers, prompt, width]`, for policies that look at hidden states.
            ids: int64 `[tokens]`, the tokens themselves, which `kvlab.explore` shows.

        Raises:
            KvlabError: shapes that do not fit together.
        """
        check_kinds(queries=queries, keys=keys, values=values, **({} if ids is None else {"ids": ids}))
        pseudo = {ANY_POLICY: pseudo} if isinstance(pseudo, Tensor) else dict(pseudo or {})
        made = cls(
            queries,
            keys,
            values,
            prompt_length,
            pseudo=pseudo,
            accumulated=accumulated,
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
            projections=projections,
            rotations=None if rotations is None else tuple(rotations),
            pre_queries=pre_queries,
            hidden=hidden,
            ids=None if ids is None else ids.cpu(),
        )
        check(made)
        return made

    # ------------------------------------------------------------------ parts

    @property
    def device(self) -> torch.device:
        """Where it lies, and where replays of it are computed."""
        return self.keys.device

    @property
    def n_layers(self) -> int:
        """How many layers are recorded."""
        return self.keys.shape[0]

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the recorded layers in the model."""
        return self.layout.compressed

    @property
    def softmax(self) -> Softmax:
        """The model's softmax in the recorded layers, which are its rows."""
        return Softmax(self.scaling, self.softcap, self.sinks)

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
        """Decoding steps: the t-th decoding query has position prompt_length + t - 1."""
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

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles hold what was recorded; what replays and policies have computed from it is computed anew.
        return {name: value for name, value in vars(self).items() if name != "prompt"} | {"_shared": {}}

    @cached_property
    def prompt(self) -> Prompt:
        """The end of the prefill as policies see it, one row for each layer."""
        pre, before = self.pre_queries, self.queries.shape[2] - self.steps
        return Prompt(
            self.queries[:, :, :before],
            self.prompt_keys,
            self.prompt_values,
            tuple(range(self.n_layers)),
            self.n_layers,
            pseudo=partial(_pseudo_for, self.pseudo),
            accumulated=self.accumulated,
            max_new_tokens=self.steps,
            scaling=self.softmax,
            perplexity=partial(_perplexity, self.nll, self.prompt_length, self.n_layers),
            projections=self.model_projections if self.projections is None else list(self.projections),
            rotations=self.rotations,
            pre_queries=None if pre is None else pre[:, :, :before],
            hidden=self.hidden,
            repeated=self.repeated,
            response=self.response_queries if self.steps else None,
            origin=partial(_origin, self.ids, self.prompt_length, self.meta.get("model", "")),
        )

    def named(self, name: str, head: int | None = None, step: int | None = None) -> Tensor:
        """A tensor of one layer by TransformerLens' name of it, such as `blocks.3.attn.hook_pattern`, without a batch.

        Vectors are `[tokens, heads, head_dim]`, attention and its logits `[heads, queries, keys]`. Those of queries
        cover the last n tokens, as `queries` does. A head (of keys and values a KV head) and a step leave out their
        dimension. Step t, from 1, is that of the token at position prompt_length + t - 1.

        Raises:
            KvlabError: no such name, layer, head or step, or one that this trace did not record.
        """
        return named(self, name, head, step)

    @property
    def indexer(self) -> IndexerReads:
        """The entries that the model's sparse indexer reads at each step, as a policy to replay on this trace.

        Raises:
            KvlabError: no indexer, or no step of a response.
        """
        if self.chosen is None:
            raise KvlabError(
                "this trace holds no choice of a sparse indexer; capture a response of a model that has one, such as "
                "DeepSeek-V3.2"
            )
        return IndexerReads(budget=self.chosen.shape[-1], reads=self.chosen)

    def share(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return `compute()`, computed once for all that read this trace, and cached as long as the trace lives."""
        if key not in self._shared:
            self._shared[key] = compute()
        return self._shared[key]

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

    @property
    def uncompressed_bytes(self) -> int:
        """Bytes at the end of the layers that are not recorded, in a cache of one sequence; 0 where there are none."""
        return self.meta.get("uncompressed_bytes", 0)

    def __repr__(self) -> str:
        of = f" of {len(self.layout.sees)}" if self.layout.mixed else ""
        return (
            f"Trace({self.signature}, {self.prompt_length} + {self.steps} tokens, {self.n_layers}{of} layers, "
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
        target = resolved(device)
        if pinned and target.type != "cpu":
            raise KvlabError(f"pinned memory is the CPU's: use device='cpu', and not {str(target)!r}")
        if pinned and not torch.accelerator.is_available():
            raise KvlabError("memory is pinned for a GPU to copy from, and torch finds none here; leave pinned out")

        def moved(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or (tensor.device == target and (not pinned or tensor.is_pinned())):
                return tensor
            return tensor.to(target).pin_memory() if pinned else tensor.to(target)

        named = {name: getattr(self, name) for name in _TENSORS}
        there = {name: moved(tensor) for name, tensor in named.items()}
        if all(there[name] is tensor for name, tensor in named.items()):
            return self
        by_key = {name: {key: moved(each) for key, each in getattr(self, name).items()} for name in _BY_KEY}
        return replace(self, **there, **by_key)

    # ------------------------------------------------------------------ files

    def _tensors(self) -> dict[str, Tensor]:
        named = {"queries": self.queries, "keys": self.keys, "values": self.values}
        named |= {"pre_queries": self.pre_queries, "accumulated": self.accumulated, "ids": self.ids, "nll": self.nll}
        named |= {"sinks": self.sinks, "projections": self.projections, "chosen": self.chosen, "hidden": self.hidden}
        named |= {f"{name}/{key}": tensor for name in _BY_KEY for key, tensor in getattr(self, name).items()}
        return {key: tensor for key, tensor in named.items() if tensor is not None}

    def described(self) -> dict[str, str]:
        """The metadata in the header of a file, with blanks for the checksum."""
        header = {"format": FORMAT, "prompt_length": self.prompt_length, "scaling": self.scaling, "meta": self.meta}
        if self.rotations is not None:
            header |= {"rotations": [None if turn is None else asdict(turn) for turn in self.rotations]}
        more = self.projections is not None or self.hidden is not None or self.repeated
        if self.layout.mixed or not self.softmax.plain or more:
            header |= {"format": MIXED, "softcap": self.softcap, "layout": asdict(self.layout)}
        if self.latent:
            header |= {"latent": self.latent, "format": MIXED}
        return {"kvlab": json.dumps(header), CHECKSUM: BLANK}

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, with a checksum (CRC-32) of all its bytes; it has its name once it is whole."""
        path = Path(path)
        try:
            with replacing(path) as temporary:
                save_file(separate(self._tensors()), temporary, self.described())
                write_checksum(temporary)
        except SafetensorError as error:
            raise KvlabError(f"cannot write {path}: {error}") from None
        return path

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> Trace:
        """Read a file of `save`, from any device, onto `device`, and compare its checksum: a changed byte is an error.

        The whole file is read once in small pieces, in about half a second for 300 MB on one core. The tensors are
        mapped from it, and memory has them once. Files from before checksums are read unchecked.

        Raises:
            KvlabError: no such file, a damaged one, one that is no trace, or no such device here.
        """
        from safetensors import safe_open

        path, target = Path(path), resolved(device)
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
            header, recorded = parsed(metadata.get("kvlab", "{}")), metadata.get(CHECKSUM)
            if not isinstance(header, dict) or header.get("format") not in (FORMAT, MIXED, UNCHECKED):
                raise KvlabError(f"{path} is a safetensors file but no kvlab trace")
            # One byte can make the format another or the checksum vanish, but not both.
            if (header["format"] != UNCHECKED or recorded is not None) and checksum(path, recorded or BLANK)[
                0
            ] != recorded:
                raise KvlabError(f"{path} is damaged: its bytes are not those of its checksum; capture it again")
            tensors: dict[str, Any] = load_file(path)
            by_key: dict[str, Any] = {name: pop_prefix(tensors, f"{name}/") for name in _BY_KEY}
            made = cls(
                prompt_length=header["prompt_length"],
                scaling=header["scaling"],
                softcap=header.get("softcap"),
                # Without one it is made from the tensors.
                layout=layout_of(header.get("layout")),  # type: ignore[reportArgumentType]
                rotations=rotations_of(header.get("rotations")),
                latent=header.get("latent", 0),
                meta=header["meta"],
                **by_key,
                **tensors,
            )
        except FileNotFoundError:
            raise KvlabError(f"there is no trace at {path}") from None
        except (OSError, SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise KvlabError(
                f"{path} is damaged or not a kvlab trace ({type(error).__name__}); capture it again"
            ) from None
        try:
            check(made)
        except KvlabError as error:
            raise KvlabError(f"{path} is damaged or not a kvlab trace ({error}); capture it again") from None
        return made.to(target)


# The tensors that move with a trace; `_BY_KEY` names those by key.
_TENSORS = (
    "queries",
    "keys",
    "values",
    "pre_queries",
    "accumulated",
    "nll",
    "sinks",
    "projections",
    "chosen",
    "hidden",
)

_BY_KEY = ("pseudo", "repeated")


# The prompt stays with its trace: with methods of the trace in it both would stay until Python looks for circles.
def _perplexity(nll: Tensor | None, prompt_length: int, n_layers: int, n: int) -> Tensor | None:
    n = min(n, prompt_length - 1)
    if nll is None:
        return None
    if not 0 < n <= len(nll):
        raise KvlabError(
            f"the likelihood of the last {n} prompt tokens is needed and {len(nll)} are at hand; "
            f"capture with window={n}"
        )
    return nll[len(nll) - n :].mean().exp().expand(n_layers)


def _origin(ids: Tensor | None, prompt_length: int, model: str) -> tuple[Tensor | None, str]:
    return None if ids is None else ids[None, :prompt_length], model.partition("@")[0]


def _pseudo_for(pseudo: Mapping[str, Tensor], policy: Asks) -> Tensor | None:
    for_any = pseudo.get(ANY_POLICY)
    asked = policy.needs.pseudo
    return for_any if asked is None else pseudo.get(asked.key, for_any)


def opened(trace: Trace | str | Path) -> Trace:
    """A trace, or the one that was saved at that path. Raises KvlabError for anything else."""
    if isinstance(trace, Trace):
        return trace
    if isinstance(trace, str | Path):
        return Trace.load(trace)
    raise KvlabError(f"a trace is what kvlab.capture gives, or the path where one was saved, and not {trace!r:.60}")
