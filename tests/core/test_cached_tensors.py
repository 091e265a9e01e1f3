"""Tensors in caches. A tensor of inference mode cannot be part of a later backward pass."""

from __future__ import annotations

import ast

import pytest
import torch
from support.paths import ROOT

import kvlab
from kvlab.core import turbo

OUTSIDE = "torch.inference_mode(False)"


def cached_functions():
    for path in sorted((ROOT / "kvlab").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                around = [ast.unparse(each) for each in node.decorator_list]
                made = ast.unparse(node.returns) if node.returns else ""
                shared = any(
                    each.startswith(("lru_cache", "functools.lru_cache", "functools.cache")) for each in around
                )
                if shared and ("Tensor" in made or made in ("Rotation", "list[Coder]")):
                    yield pytest.param(around, id=f"{path.relative_to(ROOT)}-{node.name}")


@pytest.mark.parametrize("around", cached_functions())
def test_a_cache_of_tensors_is_filled_outside_inference_mode(around):
    assert OUTSIDE in around


def test_an_attribution_can_follow_a_run_in_inference_mode():
    """The tables of a storage were made in that run."""
    for cache in (turbo.codebook, turbo.rotation, turbo.projection, turbo.on_device):
        cache.cache_clear()
    lm, ids = kvlab.random_lm("tiny-llama-gqa"), torch.arange(3, 43)
    with torch.inference_mode():
        kvlab.replay(kvlab.capture(lm, ids, new_tokens=2), "full", storage="turbo-4")
        assert not turbo.rotation(8, 0).signs.is_inference() and not turbo.codebook(4, 8).is_inference()
    assert kvlab.attribute(lm, kvlab.policy("streamingllm", budget=8), ids, storage="turbo-4").rounding is not None
