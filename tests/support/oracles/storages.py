"""How kept entries are stored: plain loops over one KV head, number by number, written from the definitions.

KIVI is written from its paper (Liu et al. 2024, section 3 and algorithm 1); where that is silent, from the choices that
`docs/storage.md` states. Numbers are rounded in float32, as a cache would be; zeros and steps are float16.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from support.oracles.core import STORAGE, AsIs


@contextmanager
def storing(make):
    """While the block runs, oracles of policies store what each KV head keeps in what `make()` gives."""
    token = STORAGE.set(make)
    try:
        yield
    finally:
        STORAGE.reset(token)


def half_below(x):
    """The largest float16 that is not above the float32 `x`."""
    half = np.float16(x)
    return half if np.float32(half) <= x else np.nextafter(half, np.float16(-np.inf))


def half_above(x):
    half = np.float16(x)
    return half if np.float32(half) >= x else np.nextafter(half, np.float16(np.inf))


def zero_and_step(numbers, bits):
    """Of one group: its minimum, and the range over the number of steps that codes of so many bits can count."""
    numbers = [np.float32(x) for x in numbers]
    zero = half_below(min(numbers))
    step = half_above((max(numbers) - np.float32(zero)) / np.float32(2**bits - 1))
    return np.float32(zero), np.float32(step)


def nearest_code(x, zero, step, bits):
    if step == 0:
        return 0
    return int(min(max(np.rint((np.float32(x) - zero) / step), 0), 2**bits - 1))


def through(x, zero, step, bits):
    """A number as it is read again."""
    return float(np.float32(nearest_code(x, zero, step, bits)) * step + zero)


class Kivi(AsIs):
    """One KV head under KIVI; an entry is known by its position."""

    def __init__(self, bits, group=32, residual=128):
        self.bits, self.group, self.residual = bits, group, residual
        self.groups = []  # (zeros, steps) of the channels of each group of keys
        self.group_of = {}  # position -> number of its group

    def settled(self, slots, seen):
        slots = list(slots)
        while True:
            waiting = []
            for i, slot in enumerate(slots):
                if slot.position in self.group_of:
                    continue
                if slot.position >= seen - self.residual:
                    break
                waiting.append(i)
            if len(waiting) < self.group:
                return slots
            self._leave(slots, waiting[: self.group])

    def _leave(self, slots, places):
        channels = range(len(slots[0].key))
        pairs = [zero_and_step([slots[i].key[c] for i in places], self.bits) for c in channels]
        self.groups.append(pairs)
        for i in places:
            key = [through(slots[i].key[c], *pairs[c], self.bits) for c in channels]
            slots[i] = slots[i]._replace(key=np.array(key), value=self.value(slots[i].value))
            self.group_of[slots[i].position] = len(self.groups) - 1

    def value(self, value):
        found = []
        for start in range(0, len(value), self.group):
            part = value[start : start + self.group]
            zero, step = zero_and_step(part, self.bits)
            found += [through(x, zero, step, self.bits) for x in part]
        return np.array(found)

    def merged(self, slot):
        """An entry whose key and value are new, where it had been rounded: by its own group, clipped."""
        if slot.position not in self.group_of:
            return slot
        pairs = self.groups[self.group_of[slot.position]]
        key = [through(x, *pair, self.bits) for x, pair in zip(slot.key, pairs)]
        return slot._replace(key=np.array(key), value=self.value(slot.value))

    def forget(self, position):
        self.group_of.pop(position, None)

    def bytes_of(self, slots):
        rounded = [slot for slot in slots if slot.position in self.group_of]
        exact = [slot for slot in slots if slot.position not in self.group_of]
        total = super().bytes_of(exact)
        for slot in rounded:
            total += (len(slot.key) + len(slot.value)) * self.bits / 8  # codes
            total += len(slot.value) / self.group * 2 * 2  # a zero and a step for each group of the value's channels
        alive = {self.group_of[slot.position] for slot in rounded}
        return total + sum(len(self.groups[number]) * 2 * 2 for number in alive)  # a zero and a step for each channel


class OneByOne(AsIs):
    """Each entry is rounded when it comes. A half of a pair has no other half: an empty vector."""

    def __init__(self):
        self.known = set()

    def settled(self, slots, seen):
        slots = [slot if slot.position in self.known else self.merged(slot) for slot in slots]
        self.known |= {slot.position for slot in slots}
        return slots

    def merged(self, slot):
        key, value = (self.vector(x, i) if len(x) else x for i, x in enumerate((slot.key, slot.value)))
        return slot._replace(key=key, value=value)

    def forget(self, position):
        self.known.discard(position)

    def bytes_of(self, slots):
        return sum(self.size(len(x)) for slot in slots for x in (slot.key, slot.value) if len(x))


class Int8(OneByOne):
    """Each key and each value in 127 steps up and down, the step its largest magnitude / 127 in float16."""

    def vector(self, x, which):
        step = np.float32(half_above(np.float32(max(abs(np.float32(n)) for n in x)) / np.float32(127)))
        return np.array([float(np.float32(np.rint(np.float32(n) / step)) * step) if step else 0.0 for n in x])

    def size(self, channels):
        return channels + 2


def e4m3():
    """All finite numbers of 1 sign, 4 exponent and 3 mantissa bits that are not negative, smallest first: bias 7, and
    the largest code is no number.
    """
    codes = range(127)
    return [(c % 8 / 8 + (c >= 8)) * 2.0 ** (max(c // 8, 1) - 7) for c in codes]


class Fp8(OneByOne):
    """8-bit floats of everything over the largest magnitude of the head's prompt / 448."""

    NUMBERS, LARGEST = e4m3(), 448
    scales = None

    def settled(self, slots, seen):
        if self.scales is None:
            parts = [[slot.key for slot in slots], [slot.value for slot in slots]]
            largest = [[abs(np.float32(x)) for vector in vectors for x in vector] for vectors in parts]
            self.scales = [np.float32(max(x)) / np.float32(self.LARGEST) if x else None for x in largest]
        return super().settled(slots, seen)

    def vector(self, x, which):
        return np.array([self.number(np.float32(n) / self.scales[which]) * float(self.scales[which]) for n in x])

    def number(self, x):
        size = min(abs(float(x)), 448.0)
        return float(np.copysign(nearest(self.NUMBERS, size), x))

    def size(self, channels):
        return channels

    def bytes_of(self, slots):
        return super().bytes_of(slots) + sum(4 for scale in self.scales if scale is not None)


def nearest(numbers, x):
    """Of two that are equally near, the one whose code is even."""
    return numbers[min(range(len(numbers)), key=lambda code: (abs(numbers[code] - x), code % 2))]


class Nvfp4(Fp8):
    """Blocks of 16: codes in e2m1 x a scale in e4m3 x the head's scale, its prompt's largest magnitude / (6 x 448)."""

    CODES, LARGEST = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], 6 * 448

    def vector(self, x, which):
        found, outer = [], self.scales[which]
        for start in range(0, len(x), 16):
            block = [np.float32(n) / outer for n in x[start : start + 16]]
            scale = np.float32(self.number(max(abs(n) for n in block) / np.float32(6)))
            for n in block:
                code = np.float32(nearest(self.CODES, abs(float(n / scale)))) if scale else np.float32(0)
                found.append(float(np.copysign(code * scale * outer, n)))
        return np.array(found)

    def size(self, channels):
        return channels / 2 + channels / 16


@lru_cache
def mean_coordinate(head_dim):
    """The mean magnitude of a coordinate of a random unit vector, by its density."""
    u = (np.arange(200_000) + 0.5) / 200_000
    density = (1 - u**2) ** ((head_dim - 3) / 2)
    return (u * density).sum() / density.sum()


@lru_cache
def turn(head_dim, seed):
    """TurboQuant's rotation as a matrix: signs, Hadamard blocks of the largest power of two, a mix of the blocks."""
    width = 1
    while head_dim % (2 * width) == 0:
        width *= 2
    blocks = head_dim // width
    random = np.random.RandomState(seed)
    signs = [random.choice([-1.0, 1.0]) for _ in range(head_dim)]
    mix, upper = np.linalg.qr(random.standard_normal((blocks, blocks)))
    found = np.zeros((head_dim, head_dim))
    for i, j in np.ndindex(head_dim, head_dim):
        together = bin(i % width & j % width).count("1")
        weight = mix[i // width, j // width] * np.sign(upper[j // width, j // width]) if blocks > 1 else 1
        found[i, j] = weight * (-1) ** together / np.sqrt(width) * signs[j]
    return found


class Turbo(OneByOne):
    """TurboQuant's algorithm 1, and 2 where `inner_product`; norms are float16.

    levels: of the codes, of one bit less where `inner_product`.
    """

    def __init__(self, levels, head_dim, inner_product=False, seed=0):
        super().__init__()
        self.levels, self.inner_product = [float(level) for level in levels], inner_product
        self.turn = turn(head_dim, seed)
        q, upper = np.linalg.qr(np.random.RandomState(seed).standard_normal((head_dim, head_dim)))
        self.project = np.round(q * np.sign(np.diag(upper)) * 2**14) / 2**14

    def vector(self, x, which):
        x = np.array([float(np.float32(n)) for n in x])
        norm = np.sqrt(sum(n * n for n in x))
        if not norm:
            return x
        turned = self.turn @ (x / norm)
        found = np.array([min(self.levels, key=lambda level: abs(level - n)) for n in turned])
        if self.inner_product:
            residual = turned - found
            signs = np.array([1.0 if n >= 0 else -1.0 for n in self.project @ residual])
            length = 1 / (len(x) * mean_coordinate(len(x)))
            found = found + self.project.T @ signs * length * float(np.float16(np.sqrt(residual @ residual)))
        return self.turn.T @ found * float(np.float16(norm))

    def size(self, channels):
        bits = np.log2(len(self.levels)) + self.inner_product
        return channels * bits / 8 + 2 + 2 * self.inner_product


class Pair(AsIs):
    """Keys in one storage and values in another: each sees entries without the other half."""

    def __init__(self, keys, values):
        self.of_keys, self.of_values = keys, values

    def apart(self, slots):
        none = np.array([])
        return [slot._replace(value=none) for slot in slots], [slot._replace(key=none) for slot in slots]

    def joined(self, keys, values):
        return [one._replace(value=other.value) for one, other in zip(keys, values, strict=True)]

    def settled(self, slots, seen):
        keys, values = self.apart(slots)
        return self.joined(self.of_keys.settled(keys, seen), self.of_values.settled(values, seen))

    def merged(self, slot):
        (key,), (value,) = self.apart([slot])
        return self.joined([self.of_keys.merged(key)], [self.of_values.merged(value)])[0]

    def forget(self, position):
        self.of_keys.forget(position)
        self.of_values.forget(position)

    def bytes_of(self, slots):
        keys, values = self.apart(slots)
        return self.of_keys.bytes_of(keys) + self.of_values.bytes_of(values)
