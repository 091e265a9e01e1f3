"""Whether what a trace holds fits together: asked of tensors from elsewhere, and of every file that is read."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from kvlab.errors import KvlabError


def check_kinds(**named: Any) -> None:
    """Raise KvlabError for what is given as a tensor and is none, such as an array."""
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise KvlabError(f"{name} must be a torch tensor (torch.as_tensor makes one), not {kind}")


def check(trace: Any) -> None:
    """Raise KvlabError for tensors of a `Trace` that do not fit together, and for what stands next to them."""
    queries, keys = trace.queries, trace.keys
    if not isinstance(trace.prompt_length, Integral):
        raise KvlabError(f"prompt_length is a whole number, and not {str(trace.prompt_length)[:40]!r}")
    for name in ("scaling", "softcap"):
        number = getattr(trace, name)
        if number is not None and not (isinstance(number, Real) and 0 < float(number) < math.inf):
            raise KvlabError(f"{name} is a number above 0, and not {str(number)[:40]!r}")
    if not isinstance(trace.meta, dict) or not all(
        isinstance(trace.meta.get(name, ""), str) for name in ("model", "document")
    ):
        raise KvlabError("meta holds texts by name")
    if queries.dim() != 4 or keys.dim() != 4 or keys.shape != trace.values.shape:
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
    if not isinstance(trace.latent, int) or not 0 <= trace.latent < head_dim or (trace.latent and keys.shape[1] > 1):
        raise KvlabError(f"latent attention has one KV head and a rotary part within it, and not {trace.latent!r:.40}")
    if len(trace.layout.compressed) != layers or not trace.layout.valid:
        raise KvlabError(f"{layers} layers are recorded, and the model's layers {list(trace.layout.compressed)} named")
    if not 0 < int(trace.prompt_length) <= tokens:
        raise KvlabError(f"prompt_length {trace.prompt_length} is not within 1 .. {tokens} tokens")
    if not trace.steps <= n <= tokens:
        raise KvlabError(f"{n} queries do not cover the response of {trace.steps} among {tokens} tokens")
    for found in trace.pseudo.values():
        if found.dim() != 4 or (*found.shape[:2], found.shape[3]) != (layers, heads, head_dim):
            raise KvlabError(f"pseudo-queries {tuple(found.shape)} are not [{layers}, {heads}, m, {head_dim}]")
    for scores in trace.repeated.values():
        if scores.shape != (layers, keys.shape[1], trace.prompt_length):
            raise KvlabError(f"scores of a repetition {tuple(scores.shape)} are not [layers, kv_heads, prompt]")
    wanted = {"accumulated": (layers, heads, trace.prompt_length), "pre_queries": queries.shape, "ids": (tokens,)}
    wanted["sinks"] = (layers, heads)
    for name, shape in wanted.items():
        found = getattr(trace, name)
        if found is not None and found.shape != shape:
            what = "accumulated attention" if name == "accumulated" else name
            raise KvlabError(f"{what} {tuple(found.shape)} is not {list(shape)}")
    if trace.rotations is not None and (
        len(trace.rotations) != layers or not all(turn is None or turn.fits(head_dim) for turn in trace.rotations)
    ):
        raise KvlabError(f"rotations are one for each of the {layers} layers, within heads of {head_dim}")
    found = trace.projections
    if found is not None and (found.dim() != 3 or found.shape[::2] != (layers, heads * head_dim)):
        raise KvlabError(f"projections {tuple(found.shape)} are not [{layers}, hidden, {heads * head_dim}]")
    found = trace.hidden
    if found is not None and (found.dim() != 3 or found.shape[:2] != (layers, trace.prompt_length)):
        raise KvlabError(f"hidden {tuple(found.shape)} is not [{layers}, {trace.prompt_length}, width]")
    if trace.nll is not None and (trace.nll.dim() != 1 or len(trace.nll) >= trace.prompt_length):
        raise KvlabError(f"nll {tuple(trace.nll.shape)} is not that of tokens of a prompt of {trace.prompt_length}")
    if (found := trace.chosen) is not None and (found.dim() != 3 or found.shape[:2] != (layers, trace.steps)):
        raise KvlabError(f"an indexer's choice {tuple(found.shape)} is not [{layers}, {trace.steps}, k]")
    for name, tensor in trace._tensors().items():
        if tensor.is_floating_point() == (name in ("ids", "chosen")):
            raise KvlabError(f"{name} cannot be of {tensor.dtype}")
        if name != "ids" and tensor.device != trace.device:
            raise KvlabError(f"{name} lies on {tensor.device} and the keys on {trace.device}; a trace lies on one")
    if trace.ids is not None and int(trace.ids.min()) < 0:
        raise KvlabError(f"{int(trace.ids.min())} is no token id")
