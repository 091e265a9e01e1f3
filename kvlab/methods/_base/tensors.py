"""Tensors of one layer that a user hands to `Policy.keep`: whether they fit together."""

import torch
from torch import Tensor

from kvlab.errors import KvlabError


def check_shapes(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    pseudo: Tensor | None,
    accumulated: Tensor | None,
    projection: Tensor | None,
    pre_queries: Tensor | None,
    hidden: Tensor | None,
) -> None:
    """Refuse tensors of one layer that do not fit together, naming the one that is wrong."""
    shapes = {"queries": "[batch, heads, n, head_dim]", "keys": "[batch, kv_heads, length, head_dim]"}
    shapes |= {"values": shapes["keys"], "pseudo": "[batch, heads, m, head_dim]"}
    by_name = {"queries": queries, "keys": keys, "values": values, "pseudo": pseudo}
    for name, tensor in by_name.items():
        if name == "pseudo" and tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise KvlabError(f"{name} must be a tensor {shapes[name]}, and is a {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise KvlabError(f"{name} must be {shapes[name]}, and is {list(tensor.shape)}")
    batch, kv_heads, length, head_dim = keys.shape
    heads, n = queries.shape[1:3]
    if not length:
        raise KvlabError("keys hold no token; a prompt has at least one")
    if values.shape != keys.shape:
        raise KvlabError(f"values must have the shape of the keys, {list(keys.shape)}, and is {list(values.shape)}")
    for name in ("queries", "pseudo"):
        tensor = by_name[name]
        if tensor is not None and (tensor.shape[0], tensor.shape[3]) != (batch, head_dim):
            raise KvlabError(
                f"{name} must be {shapes[name]} with the keys' batch of {batch} and head_dim of {head_dim}, and is "
                f"{list(tensor.shape)}"
            )
    if not kv_heads or heads % kv_heads:
        raise KvlabError(f"queries have {heads} heads, which {kv_heads} KV heads cannot share evenly; use a multiple")
    if n > length:
        raise KvlabError(f"queries are those of the last {n} tokens, but keys hold {length}; give at most {length}")
    if pseudo is not None and pseudo.shape[1] != heads:
        raise KvlabError(f"pseudo must have the {heads} heads of the queries, and has {pseudo.shape[1]}")
    if accumulated is not None and tuple(accumulated.shape) != (batch, heads, length):
        raise KvlabError(
            f"accumulated must be [batch, heads, length] = {[batch, heads, length]}, and is {list(accumulated.shape)}"
        )
    if projection is not None and (projection.dim() != 2 or projection.shape[1] != heads * head_dim):
        raise KvlabError(
            f"projection must be [hidden, heads x head_dim] = [hidden, {heads * head_dim}], and is "
            f"{list(projection.shape)}"
        )
    if pre_queries is not None and tuple(pre_queries.shape) != (batch, heads, length, head_dim):
        raise KvlabError(
            f"pre_queries must be [batch, heads, length, head_dim] = {[batch, heads, length, head_dim]}, and is "
            f"{list(pre_queries.shape)}"
        )
    if hidden is not None and (hidden.dim() != 3 or tuple(hidden.shape[:2]) != (batch, length)):
        raise KvlabError(
            f"hidden must be [batch, length, width] = [{batch}, {length}, width], and is {list(hidden.shape)}"
        )
    more = {"accumulated": accumulated, "projection": projection, "pre_queries": pre_queries, "hidden": hidden}
    for name, tensor in (by_name | more).items():
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise KvlabError(f"{name} holds values that are not finite (NaN or infinity); they must all be numbers")
