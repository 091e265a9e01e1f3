"""In what form the kept entries are stored, by name: apart from which are kept, which is the policy's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from kvlab.core.entries import AsIs, Entries, Fp8, Int8
from kvlab.core.kivi import Kivi
from kvlab.core.kvtc import Calibration, Transformed
from kvlab.core.nvfp4 import BLOCK, Nvfp4
from kvlab.core.pairs import Pair
from kvlab.core.turbo import Turbo
from kvlab.errors import KvlabError, nearest
from kvlab.lib.renamed import Renamed

AGAIN = "make a calibration of this one with `kvlab calibrate`"


def alike(one: str, other: str) -> bool:
    """Whether two names may be of one model: folders apart, one begins as the other does; an empty one may be any."""
    names = [Path(name).name.lower() for name in (one, other)]
    return names[0].startswith(names[1]) or names[1].startswith(names[0])


def _nothing(device: torch.device) -> None:
    pass


@dataclass(frozen=True)
class Storage:
    """In what form keys and values are stored.

    Attributes:
        name: with its parameters, where they are not the usual ones.
        summary: in a few words.
        convert: brings entries into this form.
        group: how many channels share a step, which must divide the head size; 1 where the form asks for nothing.
        attempt: does what a device must be able to do, and raises where it is not.
        tokens, newest: how many tokens are rounded together, and how many of the newest are not rounded.
        halves: the storages of keys and of values, where these differ.
        calibration: what it has learnt of one model's keys and values; `convert` is then given the layers of the rows.
    """

    name: str
    summary: str = field(compare=False)
    convert: Callable[..., Entries] = field(compare=False, repr=False)
    group: int = field(default=1, compare=False)
    attempt: Callable[[torch.device], object] = field(default=_nothing, compare=False, repr=False)
    tokens: int = field(default=1, compare=False)
    newest: int = field(default=0, compare=False)
    halves: tuple[Storage, ...] = field(default=(), compare=False, repr=False)
    calibration: Calibration | None = field(default=None, compare=False, repr=False)

    hold = Renamed("convert")

    def __str__(self) -> str:
        return self.name

    @property
    def exact(self) -> bool:
        """Whether what is read is what the model made."""
        return self.name == AS_IS.name

    @property
    def times(self) -> set[tuple[int, int]]:
        """When an entry is rounded: `tokens` and `newest`, of its key and of its value where these differ."""
        return {(half.tokens, half.newest) for half in self.halves or (self,) if not half.exact}

    def behind(self, policy: str) -> str:
        """A policy with the storage of what it keeps, as signatures name both; the plain one goes without saying."""
        return policy if self.exact else f"{policy}+{self.name}"

    def check_latent(self) -> None:
        """Raise KvlabError where entries of latent attention cannot have it."""
        if self.halves or self.calibration is not None:
            one = self.halves[0].name if self.halves else "turbo-4"
            raise KvlabError(
                f"{self.name} stores keys and values apart, and in latent attention a value is a part of its key; give "
                f"one storage, such as {one!r}"
            )

    def check(self, head_dim: int, device: torch.device, model: str = "") -> None:
        """Raise KvlabError where heads of this size, this device, or a model of this name cannot have it."""
        for half in self.halves:
            half.check(head_dim, device, model)
        learnt = self.calibration
        if learnt is not None and not alike(learnt.model, model):
            name = Path(model).name
            raise KvlabError(f"{self.name} was calibrated for {learnt.model}, and this model is {name}; {AGAIN}")
        if learnt is not None and learnt.shape[2] != head_dim:
            raise KvlabError(f"{self.name} is for heads of {learnt.shape[2]} channels, not of {head_dim}; {AGAIN}")
        if learnt is not None and device.type != "cpu":
            raise KvlabError(f"{self.name} works on a CPU alone; use 'turbo-2' on {device.type}")
        if head_dim % self.group:
            raise KvlabError(
                f"{self.name} rounds values in groups of {self.group} channels, which do not divide this model's head "
                f"size of {head_dim}; use 'int8' or 'fp8'"
            )
        try:
            self.attempt(device)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError):
            raise KvlabError(
                f"torch {torch.__version__} does not do on {device.type} what {self.name} needs; use 'int8' or 'kivi-4'"
            ) from None


def kivi(bits: int, group: int = 32, residual: int = 128) -> Storage:
    """KIVI with other parameters than those of its names, which are the paper's.

    Args:
        bits: 2 or 4, for each number.
        group: how many entries share the steps and zeros of their keys, and how many channels those of their values.
        residual: how many of the newest tokens stay as they are.

    Raises:
        KvlabError: bits, a group or a residual that cannot be.
    """
    if bits not in (2, 4) or group < 1 or group * bits % 8 or residual < 0:
        raise KvlabError(
            f"KIVI takes 2 or 4 bits, groups that fill whole bytes, and a residual of 0 tokens or more, not "
            f"bits={bits}, group={group}, residual={residual}"
        )
    usual = (group, residual) == (32, 128)
    name = f"kivi-{bits}" + ("" if usual else f"(group={group}, residual={residual})")
    summary = f"{bits} bits: keys per channel, values per token; the latest {residual} tokens as they are"
    return Storage(
        name, summary, partial(Kivi, bits=bits, group=group, residual=residual), group, tokens=group, newest=residual
    )


def turbo(bits: int, inner_product: bool = False, seed: int = 0) -> Storage:
    """TurboQuant with other parameters than those of its names.

    Args:
        bits: 2, 3 or 4, for each number.
        inner_product: whether one of the bits is the sign of a projected residual, which makes inner products unbiased.
        seed: of the rotation.

    Raises:
        KvlabError: bits that cannot be.
    """
    if bits not in (2, 3, 4):
        raise KvlabError(f"TurboQuant takes 2, 3 or 4 bits, not {bits}; 'int8' has 8")
    others = [f"inner_product={inner_product}"] * inner_product + [f"seed={seed}"] * bool(seed)
    name = f"turbo-{bits}" + (f"({', '.join(others)})" if others else "")
    summary = f"{bits} bits for each rotated channel" + ", one of them the residual's sign" * inner_product
    # So many channels fill whole bytes.
    group = 8 if inner_product or bits == 3 else 8 // bits
    convert = partial(Turbo, bits=bits, inner_product=inner_product, seed=seed)
    return Storage(name, summary + "; a norm for each key and each value", convert, group)


def kvtc(calibration: Calibration | str | Path, bits: float = 2) -> Storage:
    """Transform coding by what `kvlab calibrate` has learnt of one model; `kvtc-2:FILE` is its name.

    Args:
        calibration: or the file that holds it.
        bits: for each number on average, more than 0 and at most 8.

    Raises:
        KvlabError: no such file, or bits that do not fill whole bytes of a head.
    """
    learnt = calibration if isinstance(calibration, Calibration) else Calibration.load(calibration)
    head_dim = learnt.shape[2]
    if not 0 < bits <= 8 or bits * head_dim % 8:
        raise KvlabError(f"KVTC takes bits in (0, 8] that fill whole bytes of {head_dim} channels, not {bits}")
    name = f"kvtc-{bits:g}@{learnt.sha256[:8]}"
    summary = f"{bits:g} bits for each principal component on average, as calibrated; a gain for each key and value"
    convert = partial(Transformed, calibration=learnt, bits=bits)
    return Storage(name, summary, convert, calibration=learnt)


def _calibrated(name: str) -> Storage | None:
    """The storage that `kvtc-2:FILE` names; None for another name."""
    form, _, path = name.partition(":")
    if not form.startswith("kvtc"):
        return None
    try:
        bits = float(form.removeprefix("kvtc-"))
    except ValueError:
        bits = 0
    if not bits or not path:
        raise KvlabError(f"{name!r} names no calibration; write kvtc-2:FILE, with a file of `kvlab calibrate MODEL`")
    return kvtc(path, bits)


def keys_and_values(keys: str | Storage, values: str | Storage) -> Storage:
    """Keys in one storage and values in another, as the name `turbo-4/kivi-2` says it.

    Raises:
        KvlabError: an unknown name, with the nearest.
    """
    halves = stored_as(keys), stored_as(values)
    if halves[0] == halves[1]:
        return halves[0]
    for half in halves:
        if half.calibration is not None:
            raise KvlabError(f"{half.name} is calibrated for keys and values together, and no half of a pair")
        if half.halves:
            raise KvlabError(f"a half of a pair is one storage, such as 'turbo-4/kivi-2', and not {half.name!r}")
    convert = partial(Pair, keys=halves[0].convert, values=halves[1].convert)
    name = "/".join(half.name for half in halves)
    return Storage(name, f"keys in {halves[0]}, values in {halves[1]}", convert, halves=halves)


def _converts_to_fp8(device: torch.device) -> object:
    return (
        torch.ones(1, dtype=torch.float32, device=device)
        .to(torch.float8_e4m3fn)
        .view(torch.uint8)
        .view(torch.float8_e4m3fn)
        .float()
    )


def _unchanged(entries: Entries) -> Entries:
    return entries


AS_IS = Storage("as_is", "the model's own precision", _unchanged)
STORAGES = {
    storage.name: storage
    for storage in (
        AS_IS,
        Storage("fp8", "8-bit floats (e4m3), a scale for each head", Fp8, attempt=_converts_to_fp8),
        Storage("int8", "8 bits, a step for each key and each value", Int8),
        kivi(4),
        kivi(2),
        turbo(4),
        turbo(3),
        turbo(2),
        Storage(
            "nvfp4",
            "4-bit floats (e2m1), a scale in 8 bits for each 16 channels",
            Nvfp4,
            BLOCK,
            attempt=_converts_to_fp8,
        ),
    )
}


def storages() -> list[str]:
    """Names that `storage=` takes. Two of them, as in `turbo-4/kivi-2`, store keys and values apart.

    >>> storages()
    ['as_is', 'fp8', 'int8', 'kivi-4', 'kivi-2', 'turbo-4', 'turbo-3', 'turbo-2', 'nvfp4']
    """
    return list(STORAGES)


def converted(entries: AsIs, storage: Storage, layers: Sequence[int]) -> Entries:
    """Entries in the form of a storage.

    Args:
        layers: the layer of each row, among those that are compressed.
    """
    return storage.convert(entries) if storage.calibration is None else storage.convert(entries, layers)


def stored_as(wanted: str | Storage) -> Storage:
    """A storage by name, or the object itself. The name of a pair is that of the keys' storage, "/", the values'.

    Raises:
        KvlabError: an unknown name, with the nearest.
    """
    if isinstance(wanted, Storage):
        return wanted
    if not isinstance(wanted, str):
        raise KvlabError(f"a storage is a name, such as 'kivi-4', and not {wanted!r:.60}")
    calibrated = _calibrated(wanted)
    if calibrated is not None:
        return calibrated
    if wanted.count("/") == 1:
        for half, name in zip(("keys", "values"), wanted.split("/"), strict=True):
            if name not in STORAGES:
                raise KvlabError(nearest(name, STORAGES, f"storage of {half}"))
        return keys_and_values(*wanted.split("/"))
    if wanted not in STORAGES:
        raise KvlabError(nearest(wanted, STORAGES, "storage"))
    return STORAGES[wanted]
