"""GPUs for machines that have none: `with present():` there is a device "pretend" that torch takes for an accelerator.

Its tensors are kept and computed with on the CPU, but it is as strange to the CPU as a real one, and stricter than any:
no operation takes tensors of both, but for what CUDA allows (copies, CPU indices into its tensors, single CPU numbers);
NumPy gets none of its tensors; it knows no float64, as Apple's GPUs; and it does not answer `is_cuda`, which is true of
one maker's GPUs only. Random numbers are drawn on it without a generator, or with none of the CPU's. With `present(2)`
there are two, as strange to each other as to the CPU.

What works here can still fail on a real GPU, for want of a kernel or of memory. What fails here fails there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.grad_mode import inference_mode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "pretend"
CPU = torch.device("cpu")
aten = torch.ops.aten

COPIES = {aten._to_copy, aten.copy_, aten.copy}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
TO_PYTHON = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}


class Here:
    """What this process knows of its pretended GPUs."""

    count = 0
    locked: ClassVar[WeakSet[torch.UntypedStorage]] = WeakSet()  # storages in page-locked memory


class Far(Tensor):
    """A tensor on the device: the outside of one on the CPU."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor, device: torch.device) -> Far:
        if inside.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"the pretended GPU has no {inside.dtype}")
        layout = dict(strides=inside.stride(), storage_offset=inside.storage_offset(), layout=inside.layout)
        found = torch.Tensor._make_wrapper_subclass(
            cls, inside.shape, dtype=inside.dtype, device=device, requires_grad=inside.requires_grad, **layout
        )
        found.inside = inside
        return found

    @property
    def is_cuda(self) -> bool:
        raise AssertionError("a GPU need not be CUDA's: ask for the type of the device")

    def numpy(self, *_: Any, **__: Any) -> None:
        raise TypeError("NumPy cannot read a tensor of the pretended GPU; copy it to the CPU first")

    __array__ = numpy

    def tolist(self) -> Any:
        return self.inside.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"Far({self.inside!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return computed(func, args, kwargs or {})


class Watch(TorchDispatchMode):
    """Sees the operations that no tensor of the device takes part in, such as those that make the first of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """One operation: refused as a GPU would, or computed on the CPU and put where its result belongs."""
    kind, tensors = func.overloadpacket, [*_tensors_in(args), *_tensors_in(kwargs.values())]
    far = any(isinstance(x, Far) for x in tensors)
    wanted = kwargs.get("device")
    if far:
        _refuse_mixtures(kind, args, tensors)
    if kind in (aten.is_pinned, aten._pin_memory):
        return _page_locked(kind, *args)
    place = next(x.device for x in tensors if isinstance(x, Far)) if far else CPU
    if wanted is not None:
        place = torch.device(wanted)
    goes_far = place.type == NAME
    generator = kwargs.get("generator")
    if goes_far and generator is not None:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{generator.device.type}'")
    inner = [_inside(x) for x in args]
    options = {name: _inside(x) for name, x in kwargs.items() if name != "pin_memory"}
    if wanted is not None:
        options["device"] = CPU
    found = func(*inner, **options)
    if inner and found is inner[0] and isinstance(found, Tensor):
        return args[0]  # changed in place
    if not goes_far or kind in TO_PYTHON:
        return found
    return _outside(found, torch.device(NAME, place.index or 0))


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors_in(x)


def _inside(x: Any) -> Any:
    if isinstance(x, Far):
        return x.inside
    return type(x)(map(_inside, x)) if type(x) in (list, tuple) else x


def _outside(x: Any, device: torch.device) -> Any:
    if isinstance(x, Tensor):
        return Far(x, device)
    return type(x)(_outside(each, device) for each in x) if type(x) in (list, tuple) else x


def _refuse_mixtures(kind: Any, args: tuple, tensors: list[Tensor]) -> None:
    near = any(not isinstance(x, Far) and x.dim() > 0 for x in tensors)
    indices_alone = kind in INDEXED and isinstance(args[0], Far)
    apart = len({x.device for x in tensors if isinstance(x, Far)}) > 1
    if kind not in COPIES and (apart or (near and not indices_alone)):
        shapes = ", ".join(f"{list(x.shape)} on {x.device}" for x in tensors)
        raise RuntimeError(f"Expected all tensors to be on the same device, but {kind} was given {shapes}")


def _page_locked(kind: Any, tensor: Tensor, *_: Any) -> bool | Tensor:
    if kind is aten.is_pinned:
        return not isinstance(tensor, Far) and tensor.untyped_storage() in Here.locked
    if isinstance(tensor, Far):
        raise RuntimeError(f"cannot pin '{NAME}' memory: only CPU tensors can be pinned")
    copy = tensor.clone(memory_format=torch.contiguous_format)
    Here.locked.add(copy.untyped_storage())
    return copy


def _register() -> None:
    """Tell torch of the device, once; it cannot be taken back, so outside `present` it is there but out of order."""
    hooks = type(
        "Hooks",
        (torch._C._acc.PrivateUse1Hooks,),
        {
            "is_available": lambda self: bool(Here.count),
            "is_built": lambda self: True,
            "has_primary_context": lambda self, index: index < Here.count,
        },
    )
    module = SimpleNamespace(
        is_available=lambda: bool(Here.count),
        device_count=lambda: Here.count,
        current_device=lambda: 0,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        empty_cache=lambda: None,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda *_: None,
        __name__=NAME,
    )
    backend_registration._setup_privateuseone_for_python_backend(NAME, module, hooks())


def _moved_after(make: Any) -> Any:
    """`torch.tensor` and `torch.as_tensor` bypass modes: what they make is moved where it is wanted."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        wanted = device or torch.empty(0).device  # that of a `with torch.device(...)`
        if isinstance(data, Tensor):
            found = make(data, *args, **kwargs)
            return found if device is None else found.to(device)
        return make(data, *args, device=CPU, **kwargs).to(wanted)

    return made


@contextmanager
def present(count: int = 1) -> Iterator[torch.device]:
    """The machine has a GPU, or so many, while the block runs; gives the device of the first.

    Inference mode is `no_grad` meanwhile, since what it makes cannot be wrapped.
    """
    gradients = []

    def enter(self: inference_mode) -> None:
        gradients.append(torch.is_grad_enabled())
        torch.set_grad_enabled(gradients[-1] and not self.mode)

    def leave(self: inference_mode, *exception: object) -> None:
        torch.set_grad_enabled(gradients.pop())

    with (
        mock.patch.object(inference_mode, "__enter__", enter),
        mock.patch.object(inference_mode, "__exit__", leave),
        mock.patch.object(torch, "tensor", _moved_after(torch.tensor)),
        mock.patch.object(torch, "as_tensor", _moved_after(torch.as_tensor)),
        mock.patch.object(torch.accelerator, "synchronize", lambda device=None: None),
        mock.patch.object(Here, "count", count),
        Watch(),
    ):
        yield torch.device(NAME, 0)


# At import, since autograd counts the devices once, in its first backward pass.
_register()
