"""Weights that are more than a tensor of numbers: quantised by torchao, by bitsandbytes, or by a layer of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvlab.errors import KvlabError
from kvlab.lib.devices import outside_autocast
from kvlab.lib.files import first_line

# Types of weights that a matrix can be read from.
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# How far rounded activations may take the slope of a layer from its gradient, as a share.
SLOPE = 0.05


def is_plain(weight: object) -> bool:
    """Whether a weight is a dense tensor of floating-point numbers, and no class that quantises them."""
    # A quantised tensor of torchao says that it is float32, and has few of the operators of one.
    if type(weight) not in (Tensor, nn.Parameter):
        return False
    assert isinstance(weight, Tensor), "both are tensors"
    return weight.layout is torch.strided and weight.dtype in FLOATS


def parts(weight: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a weight consists of: integers and scales of a quantised one, or the weight itself."""
    if not is_traceable_wrapper_subclass(weight):
        yield weight
        return
    names, _ = weight.__tensor_flatten__()
    for name in names:
        yield from parts(getattr(weight, name))


def stored_bytes(weight: Tensor) -> int:
    """Bytes of a weight as it is stored, with the scales that torchao or bitsandbytes' 4-bit types keep for it."""
    return sum(part.nbytes for part in parts(weight)) + sum(map(_tensor_bytes, _of_state(weight, "quant_state")))


def _of_state(owner: object, name: str) -> list[Any]:
    """Return the values in a 4-bit weight's state; its scales may have a state, too."""
    state = getattr(owner, name, None)
    return [] if state is None else [*vars(state).values(), *_of_state(state, "state2")]


def _tensor_bytes(value: object) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0


def check_gradients(model: nn.Module, asker: str) -> None:
    """Refuse a model with a quantised linear layer whose gradient is missing or wrong.

    Some kernels have no gradient, and torch does not say so: the gradient of the rest of the model comes back. So each
    such layer is called, and the slope that it has along one direction is compared with its gradient.

    Args:
        model: whose linear layers are looked at. Those with dense weights are not called.
        asker: subject of the sentence of refusal, such as "attribution".

    Raises:
        KvlabError: naming the first such layer, and what its weight is.
    """
    dtype = next((p.dtype for p in model.parameters() if is_plain(p)), torch.float32)
    for name, module in model.named_modules():
        width, own = getattr(module, "in_features", None), [*module.parameters(False), *module.buffers(False)]
        packed = next((tensor for tensor in own if not is_plain(tensor)), None)
        if packed is None or packed.is_meta or not isinstance(width, int):
            continue
        if why := _without_gradient(module, width, dtype, packed.device):
            kind = f"{type(module).__name__}, its weight a {type(packed).__name__}"
            raise KvlabError(
                f"{asker} needs gradients, and the quantised layer {name} ({kind}) {why} on {packed.device.type}; load "
                "the model without quantization_config, or with int8 weights alone"
            )


def _without_gradient(module: nn.Module, width: int, dtype: torch.dtype, place: torch.device) -> str | None:
    """Describe the fault in the gradient of a linear layer; None where it is right."""
    # Eighths of -4 .. 3 are the same in every type.
    row = (torch.arange(width, device=place) % 8 - 4) / 8
    with torch.inference_mode(False), outside_autocast(place):
        fed = torch.stack([row, row.flip(0)]).to(dtype)[None]
        # First without gradients: bitsandbytes lays out weights anew in the first such call, for a kernel without one.
        with torch.no_grad():
            slope = module(fed) - module(torch.zeros_like(fed))
        fed.requires_grad_()
        try:
            with torch.enable_grad():
                out = module(fed)
            if not out.requires_grad:
                return "passes none back"
            (gradient,) = torch.autograd.grad(out, fed, slope, allow_unused=True)
        # The kernels of every package fail in ways of their own.
        except (RuntimeError, NotImplementedError, AssertionError, TypeError, ValueError) as error:
            return f"cannot pass them back ({first_line(error)})"
        if gradient is None:
            return "passes none back"
        along, wanted = (gradient.float() * fed.detach().float()).sum(), slope.float().square().sum()
    return None if bool((along - wanted).abs() <= SLOPE * wanted) else "passes wrong ones back"
