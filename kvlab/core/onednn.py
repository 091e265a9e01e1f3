"""A model's products with its weights, by the faster of the two libraries that torch brings for a CPU.

torch multiplies float32 matrices by Intel's MKL, which gives processors of other makers its kernels for AVX2, whatever
they can do. oneDNN, which torch brings as well, asks the processor. Where that has AVX-512 and is not Intel's, a
product takes half the time (`python benchmarks/products.py`). It sums in another order, so that last bits differ, as
they do between MKL's own kernels on two machines.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvlab.errors import KvlabError

SWITCH = "KVLAB_ONEDNN"
# oneDNN makes a kernel for each shape that it meets, which a product of small matrices does not earn again.
FEWEST_WEIGHTS = 1 << 16
FEWEST_PRODUCTS = 1 << 22
FEW_ROWS = 8


def onednn(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`rows [..., m] @ weight [n, m].T + bias [n]`, float32 on a CPU. Slow unless one of `weight`'s two dimensions is
    contiguous and the other's stride is its length.
    """
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def by_transposed(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """`rows [..., r, m] @ others [..., n, m].T`, by oneDNN where it is the faster: large, in float32, on such a CPU."""
    *batch, r, m = rows.shape
    n = others.shape[-2]
    if r <= FEW_ROWS and rows.is_cpu and others.stride(-1) == 1:
        # A step's few queries against all keys: up to twice as fast the other way round.
        return (others @ rows.transpose(-1, -2)).transpose(-1, -2).contiguous()
    if r * n * m < FEWEST_PRODUCTS or batch != list(others.shape[:-2]) or not _takes(rows, others):
        return rows @ others.transpose(-1, -2)
    if math.prod(batch) == 1:
        return onednn(rows.reshape(r, m), others.reshape(n, m)).view(*batch, r, n)
    out = rows.new_empty(*batch, r, n)
    for i in itertools.product(*map(range, batch)):
        out[i] = onednn(rows[i], others[i])
    return out


def plain(*tensors: torch.Tensor) -> bool:
    """Whether products of these are only numbers in float32 on a CPU: neither differentiated (either way), nor
    cast by autocast.
    """
    if torch.is_autocast_enabled("cpu") or torch.autograd.forward_ad._current_level >= 0:
        return False
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not differentiated and all(x.dtype == torch.float32 and x.is_cpu for x in tensors)


def _takes(rows: torch.Tensor, others: torch.Tensor) -> bool:
    whole = others.stride()[-2:] in ((others.shape[-1], 1), (1, others.shape[-2]))
    return whole and plain(rows, others) and wanted()


class OneDNNLinear(torch.nn.Linear):
    """A linear layer whose float32 products on a CPU are oneDNN's; all others are torch's: see `plain`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        # A class of its own, as quantised weights have, multiplies in a way of its own, and so does a sparse weight.
        dense = type(weight) is torch.nn.Parameter and weight.layout is torch.strided
        fixed = [weight] if bias is None else [weight, bias]
        if dense and plain(input, *fixed):
            return onednn(input, weight, bias)
        if dense and _inputs_alone.get() and plain(input.detach(), *fixed):
            return _Differentiable.apply(input, weight, bias)
        return super().forward(input)


_inputs_alone = contextvars.ContextVar("kvlab_inputs_alone", default=False)


@contextlib.contextmanager
def input_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Send gradients to the model's inputs and not to its weights, while the block runs.

    oneDNN computes the gradients of linear layers, too. None of them can be differentiated again.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    token = _inputs_alone.set(True)
    try:
        for weight in trained:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in trained:
            weight.requires_grad_(True)
        _inputs_alone.reset(token)


class _Differentiable(torch.autograd.Function):
    """A linear layer with fixed weights and the gradient of its input, both by oneDNN."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return onednn(input, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[reportIncompatibleMethodOverride]
        return onednn(gradients[0], ctx.saved_tensors[0].T), None, None


def use_onednn(model: torch.nn.Module, onednn: bool | None = None) -> None:
    """Have oneDNN multiply in the linear layers of `model`, in place.

    Weights stay the same objects in the same places: saving, moving and tying them work as before. But the layers get
    another class. Code that looks for exactly torch's own class does not find them.

    Args:
        onednn: True or False, whatever KVLAB_ONEDNN says; None asks `wanted`.

    Raises:
        KvlabError: as `wanted` does, and for True where torch has no oneDNN.
    """
    if onednn and not torch.backends.mkldnn.is_available():
        raise KvlabError("onednn=True, but this torch was built without oneDNN; leave it out")
    if not (wanted() if onednn is None else onednn):
        return
    for module in model.modules():
        # A subclass, such as one with quantised weights, multiplies in a way of its own; strided weights are slow.
        if type(module) is not torch.nn.Linear or type(module.weight) is not torch.nn.Parameter:
            continue
        if module.weight.numel() >= FEWEST_WEIGHTS and module.weight.is_contiguous():
            module.__class__ = OneDNNLinear


def fold_rows(head: torch.nn.Module | None) -> None:
    """Have a model's output layer multiply all bfloat16 rows that it is given as one matrix.

    torch does so where the strides of a batch say that its rows follow each other. It does not for the last rows of
    longer texts, `hidden[:, -n:]`, not even of a single text. The product then takes fifty times as long on a CPU.
    """
    if head is not None:
        head.register_forward_pre_hook(_folded)


def _folded(head: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.contiguous().flatten().view(x.shape) if x.dtype == torch.bfloat16 else x for x in inputs)


def libraries(model: torch.nn.Module) -> dict[str, str]:
    """Name the library that multiplies in float32 on a CPU, "oneDNN" or "torch".

    "layers" is the one in the linear layers of `model`, chosen when the model was loaded. "attention" is the one in
    kvlab's attention.
    """
    layers = any(isinstance(module, OneDNNLinear) for module in model.modules())
    return {name: "oneDNN" if so else "torch" for name, so in (("layers", layers), ("attention", wanted()))}


def wanted() -> bool:
    """Whether oneDNN multiplies: by KVLAB_ONEDNN (1 or 0), else where a processor of another maker than Intel has
    AVX-512.

    Raises KvlabError for another value of KVLAB_ONEDNN, and for a 1 where torch has no oneDNN.
    """
    there = torch.backends.mkldnn.is_available()
    match os.environ.get(SWITCH, ""):
        case "":
            return there and _faster()
        case "0":
            return False
        case "1" if there:
            return True
        case "1":
            raise KvlabError(f"{SWITCH}=1, but this torch was built without oneDNN; unset it")
        case value:
            raise KvlabError(f"{SWITCH} is 1 (oneDNN multiplies), 0 (torch's choice) or unset, and not {value!r}")


@functools.cache
def _faster() -> bool:
    if not torch.backends.mkl.is_available():
        return False
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512") and _maker() not in ("", "GenuineIntel")


def _maker() -> str:
    """The processor's maker as it names itself, such as "AuthenticAMD"; "" where that cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
