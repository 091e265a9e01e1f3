"""How kept entries are stored: plain loops over one KV head, number by number, written from the definitions.

KIVI is written from its paper (Liu et al. 2024, section 3 and algorithm 1); where that is silent, from the choices that
`docs/storage.md` states. Numbers are rounded in float32, as a cache would be; zeros and steps are float16.
"""

from __future__ import annotations

from contextlib import contextmanager

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
    """Each entry is rounded when it comes."""

    def __init__(self):
        self.known = set()

    def settled(self, slots, seen):
        slots = [slot if slot.position in self.known else self.merged(slot) for slot in slots]
        self.known |= {slot.position for slot in slots}
        return slots

    def merged(self, slot):
        return slot._replace(key=self.vector(slot.key, 0), value=self.vector(slot.value, 1))

    def forget(self, position):
        self.known.discard(position)


class Int8(OneByOne):
    """Each key and each value in 127 steps up and down, the step its largest magnitude / 127 in float16."""

    def vector(self, x, which):
        step = np.float32(half_above(np.float32(max(abs(np.float32(n)) for n in x)) / np.float32(127)))
        return np.array([float(np.float32(np.rint(np.float32(n) / step)) * step) if step else 0.0 for n in x])

    def bytes_of(self, slots):
        return sum(len(slot.key) + len(slot.value) + 2 * 2 for slot in slots)


def e4m3():
    """All finite numbers of 1 sign, 4 exponent and 3 mantissa bits that are not negative, smallest first: bias 7, and
    the largest code is no number.
    """
    codes = range(127)
    return [(c % 8 / 8 + (c >= 8)) * 2.0 ** (max(c // 8, 1) - 7) for c in codes]


class Fp8(OneByOne):
    """8-bit floats of everything over the largest magnitude of the head's prompt / 448."""

    NUMBERS = e4m3()
    scales = None

    def settled(self, slots, seen):
        if self.scales is None:
            parts = [[slot.key for slot in slots], [slot.value for slot in slots]]
            largest = [max(abs(np.float32(x)) for vector in vectors for x in vector) for vectors in parts]
            self.scales = [np.float32(x) / np.float32(448) for x in largest]
        return super().settled(slots, seen)

    def vector(self, x, which):
        return np.array([self.number(np.float32(n) / self.scales[which]) * float(self.scales[which]) for n in x])

    def number(self, x):
        size = min(abs(float(x)), 448.0)
        # Of two that are equally near, the one whose last bit is 0.
        best = min(range(127), key=lambda c: (abs(self.NUMBERS[c] - size), c % 2))
        return float(np.copysign(self.NUMBERS[best], x))

    def bytes_of(self, slots):
        return sum(len(slot.key) + len(slot.value) for slot in slots) + 2 * 4
