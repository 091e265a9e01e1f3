"""Calibrated transform coding, after KVTC (arXiv 2511.01815): the principal components of a head's keys and values.

A calibration has, for each layer and KV head, means of keys before RoPE and of values. It also has their principal
components, and the deviation along each. An entry is turned back by its position, and its components are rounded.
Components that vary more get more bits. Each bit goes where it saves most: an added bit counts as a quarter of the
error. The steps are those of the best uniform quantiser of a Gaussian (Max, 1960). Codes are packed, and bytes are
counted as DEFLATE writes them.

KVTC has one basis for all heads and layers together. Here heads evict entries apart, so that each has a basis of its
own. The first 4 tokens are left as they are, as in KVTC; the latest 128, which KVTC leaves as well, are not. Each key
and each value has a gain in a byte, the one with the smallest error.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvlab.core.entries import AsIs, Get, Rounded
from kvlab.core.rotation import Rotation
from kvlab.core.slots import EMPTY, KEYS, POSITIONS, VALUES
from kvlab.errors import KvlabError
from kvlab.lib.files import expanded, replacing, why

FORMAT = "kvlab-kvtc-1"
STEPS = (0.0, 1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
"""Best steps of a uniform quantiser for a Gaussian of deviation 1, by the bits of a code."""
GAINS = tuple(2 ** (half / 2) for half in range(-2, 10))
"""What a vector's steps may be multiplied by."""
LEVEL = 6
"""Of DEFLATE, zlib's default."""
SINKS = 4
"""First positions, whose entries stay as they are."""
FIRST = "first"
"""Which of the entries that stay as they are an entry is, from 1 on; 0 for none."""
TABLE = "table"
"""Which layer and head an entry is of: bookkeeping, as its position is, and not counted in its bytes."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """The calibration of one model's keys and values, by "keys" and "values".

    Attributes:
        model: its name.
        means, deviations: float32 `[layers, kv_heads, head_dim]`, deviations in descending order.
        bases: float32 `[layers, kv_heads, head_dim, head_dim]`, a component in each column.
        rotations: how each layer turns keys; None of one that turns in a way unknown to kvlab, whose keys are taken as
            they are.
    """

    model: str
    means: dict[str, Tensor]
    deviations: dict[str, Tensor]
    bases: dict[str, Tensor]
    rotations: tuple[Rotation | None, ...]

    @classmethod
    def learn(
        cls, model: str, keys: Tensor, values: Tensor, positions: Tensor, rotations: Sequence[Rotation | None]
    ) -> Calibration:
        """The calibration of keys after RoPE and values.

        Args:
            keys, values: `[layers, kv_heads, n, head_dim]`.
            positions: `[n]`.
        """
        means, deviations, bases = {}, {}, {}
        back = [
            x.float() if rotation is None else rotation.turned_back(x, positions)
            for x, rotation in zip(keys, rotations, strict=True)
        ]
        for name, x in ((KEYS, torch.stack(back)), (VALUES, values.float())):
            means[name] = x.mean(2)
            away = (x - means[name][:, :, None]).double()
            # Half precision is what the file holds.
            variances, found = torch.linalg.eigh(away.mT @ away / x.shape[2])
            bases[name] = found.flip(-1).half().float()
            deviations[name] = variances.flip(-1).clamp_min(1e-12).sqrt().float()
        return cls(model, means, deviations, bases, tuple(rotations))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, KV heads, channels of a head."""
        layers, kv_heads, head_dim = self.means[KEYS].shape
        return layers, kv_heads, head_dim

    def save(self, path: str | Path) -> Path:
        """Write a file in safetensors, bases in float16."""
        tensors = {}
        for name in (KEYS, VALUES):
            tensors |= {f"{name} mean": self.means[name], f"{name} deviation": self.deviations[name]}
            tensors[f"{name} basis"] = self.bases[name].half()
        turns = [None if rotation is None else asdict(rotation) for rotation in self.rotations]
        about = {"format": FORMAT, "model": self.model, "rotations": json.dumps(turns)}
        with replacing(path) as temporary:
            save_file({name: x.contiguous() for name, x in tensors.items()}, temporary, about)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file that `save` wrote; KvlabError where it is none."""
        path = expanded(path)
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - it is no dict
            if about.get("format") != FORMAT:
                raise KeyError("format")
            turns = [None if turn is None else _rotation(turn) for turn in json.loads(about["rotations"])]
            means, deviations, bases = (
                {name: tensors[f"{name} {kind}"] for name in (KEYS, VALUES)} for kind in ("mean", "deviation", "basis")
            )
            shape = means[KEYS].shape
            whole = all(x.shape == shape for x in (*means.values(), *deviations.values())) and len(shape) == 3
            if not whole or len(turns) != shape[0] or any(x.shape != (*shape, shape[2]) for x in bases.values()):
                raise KeyError("shape")
        except OSError as error:
            raise KvlabError(f"cannot read {path}: {why(error).lower()}") from None
        except (SafetensorError, KeyError, ValueError, TypeError):
            raise KvlabError(f"{path} is no calibration; `kvlab calibrate MODEL` writes one") from None
        return cls(about.get("model", ""), means, deviations, bases, tuple(turns))

    @cached_property
    def sha256(self) -> str:
        """The hash of all numbers."""
        parts = [x.numpy().tobytes() for each in (self.means, self.deviations, self.bases) for x in each.values()]
        return hashlib.sha256(b"".join([*parts, repr(self.rotations).encode()])).hexdigest()


def _rotation(turn: dict) -> Rotation:
    return Rotation(tuple(turn["frequencies"]), turn["factor"], turn["interleaved"], turn["offset"])


def allotted(deviations: Tensor, total: int) -> Tensor:
    """Bits of each component, int64 `[..., n]`, `total` in all: each goes where the error is largest by then."""
    variances, bits = deviations.double().square().clone(), torch.zeros(deviations.shape, dtype=torch.int64)
    for _ in range(total):
        best = variances.masked_fill(bits == len(STEPS) - 1, -1).argmax(-1, keepdim=True)
        bits.scatter_add_(-1, best, torch.ones_like(best))
        variances.scatter_(-1, best, variances.gather(-1, best) / 4)
    return bits


class Coder:
    """The quantiser of one head's keys or values.

    Args:
        mean, deviation: `[head_dim]`.
        basis: `[head_dim, head_dim]`.
        bits: of each component, int64 `[head_dim]`.
    """

    def __init__(self, mean: Tensor, basis: Tensor, deviation: Tensor, bits: Tensor):
        self.mean, self.basis = mean, basis
        self.steps = torch.tensor(STEPS)[bits] * deviation
        self.levels = 2**bits
        self.component = torch.arange(len(bits)).repeat_interleave(bits)
        self.bit = torch.cat([torch.arange(n) for n in bits.tolist()])

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, uint8 `[n, bytes]`, and which gain each has, uint8 `[n, 1]`, of vectors `[n, head_dim]`."""
        away = (x - self.mean) @ self.basis
        errors = [(self._rounded(self._codes(away, gain), gain) - away).square().sum(-1) for gain in GAINS]
        gains = torch.stack(errors, -1).argmin(-1, keepdim=True)
        codes = self._codes(away, torch.tensor(GAINS)[gains])
        bits = (codes[:, self.component] >> self.bit) & 1
        return (bits.unflatten(-1, (-1, 8)) << torch.arange(8)).sum(-1).to(torch.uint8), gains.to(torch.uint8)

    def unpack(self, packed: Tensor, gains: Tensor) -> Tensor:
        """The vectors, float32 `[n, head_dim]`."""
        bits = ((packed[..., None].long() >> torch.arange(8)) & 1).flatten(-2) << self.bit
        codes = torch.zeros(len(packed), len(self.steps), dtype=torch.int64).index_add_(1, self.component, bits)
        return self._rounded(codes, torch.tensor(GAINS)[gains.long()]) @ self.basis.T + self.mean

    def _codes(self, away: Tensor, gain: Tensor | float) -> Tensor:
        steps = (self.steps * gain).clamp_min(torch.finfo(torch.float32).tiny)
        return (away / steps + self.levels / 2).floor().clamp_min(0).minimum(self.levels - 1).long()

    def _rounded(self, codes: Tensor, gain: Tensor | float) -> Tensor:
        # Without a bit, a step is 0.
        return (codes - (self.levels - 1) / 2) * self.steps * gain


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def coders(calibration: Calibration, name: str, bits: float) -> list[Coder]:
    """Those of all layers and heads, one layer behind the other."""
    shape = calibration.shape
    parts = (table[name].flatten(0, 1) for table in (calibration.means, calibration.bases, calibration.deviations))
    means, bases, deviations = parts
    return [Coder(*each) for each in zip(means, bases, deviations, allotted(deviations, round(bits * shape[2])))]


class Transformed(Rounded):
    """Entries whose principal components are rounded.

    Args:
        entries: in the model's precision.
        layers: of each row.
        bits: for each number, on average over a head's components.
    """

    def __init__(self, entries: AsIs, layers: Sequence[int], calibration: Calibration, bits: float):
        self.calibration, self.bits = calibration, bits
        n_layers, kv_heads, head_dim = calibration.shape
        heads = entries.shape[1]
        if max(layers) >= n_layers or heads % kv_heads or entries.head_dim not in (0, head_dim):
            raise KvlabError(
                f"the calibration has {n_layers} layers of {kv_heads} KV heads of {head_dim} channels, the model "
                f"{heads} KV heads of {entries.head_dim}; make one with `kvlab calibrate`"
            )
        of_heads = torch.arange(kv_heads).repeat_interleave(heads // kv_heads)
        self.tables = (torch.tensor(layers)[:, None] * kv_heads + of_heads).int()
        self._positions = entries.read(POSITIONS)
        widths = zip((KEYS, VALUES), entries.widths, strict=True)
        self.exact = {name: torch.empty(0, width, dtype=entries.dtype) for name, width in widths}
        self._entry = {name: entries.entry_bytes(name) for name in (KEYS, VALUES)}
        super().__init__(entries)

    # ------------------------------------------------------------------ how entries are rounded

    def packed(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        first = (self._positions >= 0) & (self._positions < SINKS)
        known = len(self.exact[KEYS])
        number = torch.zeros(keys.shape[:3], dtype=torch.int32)
        number[first] = torch.arange(known + 1, known + 1 + int(first.sum()), dtype=torch.int32)
        for name, x in ((KEYS, keys), (VALUES, values)):
            self.exact[name] = torch.cat([self.exact[name], x[first]])
        tables = self.tables[..., None].expand(keys.shape[:3])
        return {**super().packed(keys, values), TABLE: tables, FIRST: number}

    def rounded(self, name: str, x: Tensor) -> dict[str, Tensor]:
        tables = self.tables[..., None].expand(x.shape[:3])
        n = round(self.bits * x.shape[-1]) // 8
        codes, gains = torch.empty(*x.shape[:3], n, dtype=torch.uint8), torch.empty(*x.shape[:3], 1, dtype=torch.uint8)
        for coder, where, rotation in self._each(name, tables):
            own = x[where].float()
            if rotation is not None:
                own = rotation.turned_back(own, self._positions[where])
            codes[where], gains[where] = coder.pack(own)
        return {name: codes, f"{name} gain": gains}

    def restored(self, name: str, get: Get, heads: slice | None = None) -> Tensor:
        codes, gains, tables, positions = (get(part) for part in (name, f"{name} gain", TABLE, POSITIONS))
        found = torch.empty(*codes.shape[:-1], self.calibration.shape[2], dtype=torch.float32)
        for coder, where, rotation in self._each(name, tables):
            own = coder.unpack(codes[where], gains[where])
            found[where] = own if rotation is None else rotation.turned(own, positions[where])
        number = get(FIRST).long()
        found[number > 0] = self.exact[name][number[number > 0] - 1].float()
        return found.masked_fill(positions[..., None] == EMPTY, 0).to(self.dtype)

    def rounded_slots(self) -> Tensor:
        return self.slots.view(FIRST) == 0

    def _each(self, name: str, tables: Tensor) -> Iterator[tuple[Coder, Tensor, Rotation | None]]:
        """The coder of each table, with its entries and, for keys, the rotation of its layer."""
        made = coders(self.calibration, name, self.bits)
        for table in tables.unique().tolist():
            layer = table // self.calibration.shape[1]
            yield made[table], tables == table, self.calibration.rotations[layer] if name == KEYS else None

    # ------------------------------------------------------------------ the verbs

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | int) -> None:
        self._positions = torch.as_tensor(positions).expand(keys.shape[:3])
        super().append(keys, values, positions)

    def put(self, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        self._positions = self.read(POSITIONS).gather(2, slot[..., None])
        super().put(slot, keys, values)

    def expand(self, repeats: int) -> None:
        super().expand(repeats)
        self.tables = self.tables.repeat_interleave(repeats, dim=1)

    def reorder(self, rows: Tensor) -> None:
        super().reorder(rows)
        self.tables = self.tables.index_select(0, rows)

    # ------------------------------------------------------------------ bytes

    @property
    def kv_bytes(self) -> int:
        return self._written(KEYS) + self._written(VALUES)

    @property
    def key_bytes(self) -> int:
        return self._written(KEYS)

    def bytes_of(self, slots: Tensor) -> int:
        return round(self.kv_bytes * int((slots >= 0).sum()) / max(self.slots.total, 1))

    @property
    def allocated_bytes(self) -> int:
        return super().allocated_bytes + sum(x.nbytes for x in self.exact.values())

    def _written(self, name: str) -> int:
        """Count the bytes of the keys or of the values.

        DEFLATE compresses codes and gains: the first byte of all entries, then the second, and so on. Where the packed
        bytes are fewer, these count. First tokens count as they are.
        """
        if not self.slots.total or not self.slots.tensors[name].shape[-1]:
            return 0
        codes, gains, number = (
            torch.cat([self.slots.of(self.slots.tensors[part], head) for head in range(len(self.counts))])
            for part in (name, f"{name} gain", FIRST)
        )
        packed = torch.cat([codes, gains], -1)[number == 0]
        written = len(zlib.compress(packed.T.contiguous().numpy().tobytes(), LEVEL))
        return min(packed.numel(), written) + int((number > 0).sum()) * self._entry[name]
