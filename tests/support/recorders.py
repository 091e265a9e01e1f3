"""Stand-ins for TransformerLens and nnsight, which are not installed: what the docs use of them, on a given model.

Names, shapes and order are those of TransformerLens 4.3.0's bridge and of nnsight 0.8.1, with which the same lines ran.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def install(monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any]) -> None:
    """Let both be imported; a bridge boots `load().model`, whatever name it is asked for."""
    bridges, nnsight = ModuleType("transformer_lens.model_bridge"), ModuleType("nnsight")
    bridges.TransformerBridge = SimpleNamespace(boot_transformers=lambda name: Bridge(load().model))
    nnsight.NNsight, nnsight.save = Envoy, lambda value: value
    monkeypatch.setitem(sys.modules, "transformer_lens", ModuleType("transformer_lens"))
    monkeypatch.setitem(sys.modules, "transformer_lens.model_bridge", bridges)
    monkeypatch.setitem(sys.modules, "nnsight", nnsight)


def outputs(model: nn.Module, ids: Tensor) -> dict[nn.Module, tuple[int, Any]]:
    """What every module of a model gives, and when: the number of its call."""
    found: dict[nn.Module, tuple[int, Any]] = {}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        found[module] = len(found), output

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class Bridge:
    """`run_with_cache` of a model of Llama's kind: a cache of tensors `[batch, tokens, heads, head_dim]` by name."""

    def __init__(self, model: Any) -> None:
        self.model, self.cfg = model, SimpleNamespace(n_layers=model.config.num_hidden_layers)

    def run_with_cache(self, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        found = {module: output for module, (_, output) in outputs(self.model, ids).items()}
        cos, sin = found[self.model.model.rotary_emb]
        cache: dict[str, Tensor] = {}
        for number, layer in enumerate(self.model.model.layers):
            own, at = layer.self_attn, f"blocks.{number}.attn.hook_"
            for kind in "qkv":
                cache[at + kind] = found[getattr(own, f"{kind}_proj")].unflatten(-1, (-1, own.head_dim))
            turned = apply_rotary_pos_emb(cache[at + "q"], cache[at + "k"], cos, sin, unsqueeze_dim=2)
            cache[at + "rot_q"], cache[at + "rot_k"] = turned
        return found[self.model].logits, cache


class Envoy:
    """A module within `with model.trace(ids)`, where outputs must be asked for in the order in which they come."""

    def __init__(self, module: nn.Module, run: dict[str, Any] | None = None) -> None:
        self._module, self._run = module, {} if run is None else run

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._module, name)
        return Envoy(inner, self._run) if isinstance(inner, nn.Module) else inner

    def __iter__(self) -> Iterator[Envoy]:
        return (Envoy(inner, self._run) for inner in self._module)

    @contextlib.contextmanager
    def trace(self, ids: Tensor) -> Iterator[None]:
        self._run.update(found=outputs(self._module, ids), last=-1)
        yield
        self._run.clear()

    @property
    def output(self) -> Any:
        number, output = self._run["found"][self._module]
        assert number > self._run["last"], "asked for after a later one"
        self._run["last"] = number
        return output
