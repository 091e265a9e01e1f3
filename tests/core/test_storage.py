"""How keys and values are stored: every verb against plain loops over one head, entry by entry, and what rounding
promises."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import oracles
from support.oracles.core import Slot

import kvlab
from kvlab.core.kivi import pack_codes, rounded, unpack_codes
from kvlab.core.storage import STORAGES, Storage, keys_and_values, kivi, stored_as, turbo
from kvlab.core.store import LayerStore
from kvlab.core.turbo import codebook
from kvlab.errors import KvlabError

ROWS, HEADS, DIM = 2, 2, 16
GROUP, RESIDUAL = 4, 5
FORMS = {
    "as_is": (stored_as("as_is"), oracles.AsIs),
    "fp8": (stored_as("fp8"), oracles.Fp8),
    "int8": (stored_as("int8"), oracles.Int8),
    "kivi-4": (kivi(4, GROUP, RESIDUAL), lambda: oracles.Kivi(4, GROUP, RESIDUAL)),
    "kivi-2": (kivi(2, GROUP, RESIDUAL), lambda: oracles.Kivi(2, GROUP, RESIDUAL)),
    "nvfp4": (stored_as("nvfp4"), oracles.Nvfp4),
    "turbo-4": (stored_as("turbo-4"), lambda: oracles.Turbo(codebook(4, DIM), DIM)),
    "turbo-3": (turbo(3, seed=5), lambda: oracles.Turbo(codebook(3, DIM), DIM, seed=5)),
    "turbo-2 for products": (turbo(2, inner_product=True), lambda: oracles.Turbo(codebook(1, DIM), DIM, True)),
    "turbo-2/kivi-4": (
        keys_and_values("turbo-2", kivi(4, GROUP, RESIDUAL)),
        lambda: oracles.Pair(oracles.Turbo(codebook(2, DIM), DIM), oracles.Kivi(4, GROUP, RESIDUAL)),
    ),
    "kivi-2/int8": (
        keys_and_values(kivi(2, GROUP, RESIDUAL), "int8"),
        lambda: oracles.Pair(oracles.Kivi(2, GROUP, RESIDUAL), oracles.Int8()),
    ),
    "fp8/nvfp4": (stored_as("fp8/nvfp4"), lambda: oracles.Pair(oracles.Fp8(), oracles.Nvfp4())),
    "as_is/fp8": (stored_as("as_is/fp8"), lambda: oracles.Pair(oracles.AsIs(), oracles.Fp8())),
}
NORMS = 2**-11
"""By how much a norm in float16 may be off; it is summed in float32 here, and in float64 by the oracle."""
VERBS = ("append", "append", "several", "evict", "drop", "sink", "cut", "truncate", "merge", "reorder")


def fresh(n, seed, shape=(ROWS, HEADS), dim=DIM):
    """Keys and values whose channels and tokens differ in size and offset."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(*shape, 1, dim, generator=generator) * 4
    return [size * torch.randn(*shape, n, dim, generator=generator) + size.roll(1, -1) for _ in range(2)]


class Twin:
    """A store beside a list of slots and an oracle's storage for each head; every verb is done to both."""

    def __init__(self, n, form, seed):
        self.random = random.Random(seed)
        self.tolerance = 2 * NORMS if "turbo" in form else 1e-6
        self.has_ties = "turbo" in form
        storage, make = FORMS[form]
        keys, values = fresh(n, seed)
        self.given = keys.clone(), values.clone()
        self.borrowed = keys, values
        self.store, self.seen = LayerStore(keys, values), n
        self.store.set_storage(storage)
        self.storages = [[make() for _ in range(HEADS)] for _ in range(ROWS)]
        self.heads = [[self.slots(keys[r, h], values[r, h], 0) for h in range(HEADS)] for r in range(ROWS)]
        self.settle()

    @staticmethod
    def slots(keys, values, first):
        pairs = zip(keys.numpy(), values.numpy())
        return [Slot(first + i, key, value) for i, (key, value) in enumerate(pairs)]

    def settle(self):
        for r, h, slots in self.every:
            slots[:] = self.storages[r][h].settled(slots, self.seen)

    @property
    def every(self):
        return [(r, h, self.heads[r][h]) for r in range(ROWS) for h in range(HEADS)]

    @property
    def fewest(self):
        return min(len(slots) for _, _, slots in self.every)

    def any_of_each(self, count):
        return [[self.random.sample(range(len(self.heads[r][h])), count) for h in range(HEADS)] for r in range(ROWS)]

    def append(self, n=1):
        keys, values = fresh(n, self.random.randrange(2**31))
        self.store.append(keys, values)
        for r, h, slots in self.every:
            slots += self.slots(keys[r, h], values[r, h], self.seen)
        self.seen += n
        self.store.quantise_pending()
        self.settle()

    def several(self):
        self.append(self.random.randint(2, 12))

    def evict(self):
        ragged = self.random.random() < 0.5
        sizes = [self.random.randint(0, len(slots)) if ragged else self.fewest // 2 for _, _, slots in self.every]
        keep = [sorted(self.random.sample(range(len(s)), n)) for (_, _, s), n in zip(self.every, sizes, strict=True)]
        width = max(sizes) + ragged
        rows = torch.tensor([one + [-1] * (width - len(one)) for one in keep], dtype=torch.int64)
        self.store.evict(rows.view(ROWS, HEADS, width))
        for (_, _, slots), one in zip(self.every, keep, strict=True):
            slots[:] = [slots[i] for i in one]

    def drop(self):
        if self.fewest:
            chosen = self.any_of_each(1)
            self.store.drop(torch.tensor(chosen)[..., 0])
            for r, h, slots in self.every:
                del slots[chosen[r][h][0]]

    def sink(self):
        if self.fewest > 2:
            self.store.drop(2)
            for _, _, slots in self.every:
                del slots[2]

    def cut(self):
        first = self.random.randint(0, self.fewest)
        n = [[self.random.randint(0, len(self.heads[r][h]) - first) for h in range(HEADS)] for r in range(ROWS)]
        self.store.cut(first, torch.tensor(n))
        for r, h, slots in self.every:
            del slots[first : first + n[r][h]]

    def truncate(self):
        n = self.random.randint(0, min(9, self.store.length))
        self.store.truncate(self.store.length - n)
        for r, h, slots in self.every:
            # Positions come again, those of what was evicted meanwhile, too.
            gone = {slot.position for slot in slots[max(len(slots) - n, 0) :]} | set(range(self.seen - n, self.seen))
            for position in gone:
                self.storages[r][h].forget(position)
            del slots[max(len(slots) - n, 0) :]
        self.seen -= n

    def merge(self):
        if self.fewest < 2:
            return
        chosen = torch.tensor(self.any_of_each(2))
        self.store.merge(chosen[..., 1:], chosen[..., 0])
        for r, h, slots in self.every:
            into, other = (slots[i] for i in chosen[r, h].tolist())
            total = np.float32(into.weight + other.weight)
            key, value = (
                (np.float32(a) * np.float32(into.weight) + np.float32(b) * np.float32(other.weight)) / total
                for a, b in ((into.key, other.key), (into.value, other.value))
            )
            made = self.storages[r][h].merged(into._replace(key=key, value=value))
            at = int(chosen[r, h, 0])
            if self.has_ties:
                made = made._replace(
                    key=self.as_near(made.key, self.store.keys[r, h, at].numpy(), key),
                    value=self.as_near(made.value, self.store.values[r, h, at].numpy(), value),
                )
            slots[at] = made._replace(weight=float(total))

    @staticmethod
    def as_near(made, found, exact):
        """What the store holds, if it is as near: the mean of two neighbouring levels lies on the border of both."""
        mine, its = (float(np.linalg.norm(each - exact)) for each in (made, found))
        return found.copy() if abs(mine - its) <= 1e-3 * float(np.linalg.norm(exact)) else made

    def reorder(self):
        self.store.reorder(torch.tensor([1, 0]))
        self.heads, self.storages = self.heads[::-1], self.storages[::-1]

    def check(self):
        store, longest = self.store, max(len(slots) for _, _, slots in self.every)
        assert (store.length, store.seen) == (longest, self.seen)
        assert store.counts.tolist() == [[len(slots) for slots in row] for row in self.heads]
        keys, values, positions = store.keys, store.values, store.positions
        runs = {place: (k, v) for heads, ks, vs in store.runs() for place, k, v in self.places(heads, ks, vs)}
        for r, h, slots in self.every:
            n = len(slots)
            assert positions[r, h].tolist() == [slot.position for slot in slots] + [-1] * (longest - n)
            for found, part in ((keys, "key"), (values, "value")):
                expected = np.array([getattr(slot, part) for slot in slots]).reshape(n, DIM)
                np.testing.assert_allclose(
                    found[r, h, :n], expected, rtol=self.tolerance, atol=4 * self.tolerance, err_msg=f"{part} {r} {h}"
                )
                assert not found[r, h, n:].any(), "an empty slot holds zeros"
            for run, whole in zip(runs[r * HEADS + h], (keys, values), strict=True):
                assert torch.equal(run, whole[r, h, :n])
            row = store.row(r)
            assert all(torch.equal(a, b[r]) for a, b in zip(row, (keys, values, positions), strict=True))
        sizes = [self.storages[r][h].bytes_of(slots) for r, h, slots in self.every]
        assert store.kv_bytes == sum(sizes) and store.bytes_of(None) == store.kv_bytes
        everything = torch.arange(longest).where(positions >= 0, -1)
        assert store.bytes_of(everything) == store.kv_bytes
        if longest:
            for some, whole in zip(store.gather(everything), (keys, values), strict=True):
                assert torch.equal(some[positions >= 0], whole[positions >= 0])
            for some, whole in zip(store.since(longest // 2), (keys, values), strict=True):
                assert torch.equal(some, whole[:, :, longest // 2 :])
        assert store.key_bytes < store.kv_bytes or not store.kv_bytes
        assert all(map(torch.equal, self.borrowed, self.given)), "borrowed tensors changed"

    @staticmethod
    def places(heads, keys, values):
        return [(place, keys[i], values[i]) for i, place in enumerate(range(heads.start, heads.stop))]


@settings(deadline=None, max_examples=100)
@given(
    n=st.integers(1, 30),
    form=st.sampled_from(list(FORMS)),
    seed=st.integers(0, 10**6),
    verbs=st.lists(st.sampled_from(VERBS), max_size=10),
)
@example(
    n=3, form="kivi-4", seed=1, verbs=["append"] * 2 + ["merge"] + ["append"] * 4 + ["truncate", "append", "several"]
)
@example(n=11, form="turbo-3", seed=0, verbs=["append", "truncate", "append", "evict", "merge"])
def test_the_verbs_do_what_they_do_to_a_list(n, form, seed, verbs):
    twin = Twin(n, form, seed)
    twin.check()
    for verb in verbs:
        getattr(twin, verb)()
        twin.check()


@pytest.mark.parametrize("form", FORMS)
def test_many_steps_with_an_eviction_at_each(form):
    twin = Twin(24, form, seed=5)
    for step in range(60):
        twin.append()
        if step % 3:
            twin.drop()
        if step % 10 == 9:
            twin.check()
    twin.check()
    twin.truncate()
    twin.several()
    twin.check()


# ------------------------------------------------------------------------------------------- what rounding promises

# Below 1e-38 float32 itself has fewer and fewer digits, and a third of its smallest number is 0.
numbers = st.floats(-3e4, 3e4, width=32, allow_subnormal=False)


@settings(deadline=None)
@given(bits=st.sampled_from([2, 4]), group=st.lists(numbers, min_size=1, max_size=12))
def test_no_number_is_off_by_more_than_half_a_step(bits, group):
    x = torch.tensor(group)
    codes, step, zero = rounded(x, bits, 0)
    found = codes.double() * step.double() + zero.double()
    assert codes.max() < 2**bits and step.dtype == zero.dtype == torch.float16
    # What float32 itself adds when the number is scaled.
    slack = 2**-20 * x.double().abs().max()
    assert ((found - x.double()).abs() <= step.double() / 2 + slack).all()


@settings(deadline=None)
@given(vector=st.lists(numbers, min_size=DIM, max_size=DIM))
def test_int8_and_fp8_are_as_near_as_their_steps(vector):
    keys = torch.tensor(vector).view(1, 1, 1, DIM)
    for form, furthest in (
        ("int8", keys.abs().max() / 127 * 0.502 + 1e-7),
        ("fp8", keys.abs() / 16 + keys.abs().max() / 2**18),
    ):
        store = LayerStore(keys, keys)
        store.set_storage(stored_as(form))
        assert ((store.keys - keys).abs() <= furthest).all(), form


@settings(deadline=None)
@given(bits=st.sampled_from([1, 2, 3, 4]), seed=st.integers(0, 10**6), width=st.integers(1, 6))
def test_packing_loses_nothing(bits, seed, width):
    codes = torch.randint(2**bits, (3, 8 * width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, width * bits) and torch.equal(unpack_codes(packed, bits), codes)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("n", [100, 128, 159, 160, 700])
def test_the_newest_are_exact_and_the_others_in_groups(bits, n):
    keys, values = fresh(n, 0, (1, 2), 64)
    store = LayerStore(keys, values)
    store.set_storage(STORAGES[f"kivi-{bits}"])
    left = max(n - 128, 0) // 32 * 32
    assert torch.equal(store.keys[:, :, left:], keys[:, :, left:])
    assert torch.equal(store.values[:, :, left:], values[:, :, left:])
    # Codes, zeros and steps of the keys' groups, those of the values, and float32 for the rest: by hand.
    rounded_bytes = left * (2 * 64 * bits // 8 + 2 * 4) + left // 32 * 64 * 4
    assert store.kv_bytes == 2 * (rounded_bytes + (n - left) * 2 * 64 * 4)
    if left:
        error = (store.keys - keys)[:, :, :left].abs().unflatten(2, (-1, 32))
        steps = keys[:, :, :left].unflatten(2, (-1, 32))
        steps = (steps.amax(3, keepdim=True) - steps.amin(3, keepdim=True)) / (2**bits - 1)
        # A float16 step is a little longer, and more so where zero is large beside it.
        assert (error <= 0.501 * steps + 2**-10 * keys.abs().max() / (2**bits - 1)).all()
        assert (error.amax(3) > 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_store_knows_which_slots_are_rounded(form):
    """By what they hold: a rounded key differs from the one that came, an exact one does not."""
    keys, values = fresh(40, 5)
    store = LayerStore(keys, values)
    store.set_storage(FORMS[form][0])
    heads = torch.arange(HEADS).expand(ROWS, -1)
    store.cut(3, heads)  # heads then hold different numbers of entries
    positions = store.positions.clamp_min(0)[..., None].expand(-1, -1, -1, keys.shape[-1])
    differs = (store.keys != keys.gather(2, positions)).any(-1) & store.occupied
    differs |= (store.values != values.gather(2, positions)).any(-1) & store.occupied
    assert torch.equal(store.rounded_slots & store.occupied, differs)
    assert bool(differs.any()) == (form != "as_is")


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), bits=st.sampled_from([2, 4]))
def test_an_eviction_changes_nothing_of_what_survives(seed, bits):
    generator = torch.Generator().manual_seed(seed)
    store = LayerStore(*fresh(40, seed))
    store.set_storage(kivi(bits, GROUP, RESIDUAL))
    for _ in range(4):
        keys, values, positions = store.keys, store.values, store.positions
        keep = torch.rand(ROWS, HEADS, store.length, generator=generator) < 0.7
        keep &= positions >= 0
        order = (~keep).long().sort(stable=True, dim=-1).indices
        slots = order.masked_fill(torch.arange(store.length) >= keep.sum(-1, keepdim=True), -1)
        store.evict(slots)
        for r in range(ROWS):
            for h in range(HEADS):
                n = int(keep[r, h].sum())
                for found, before in ((store.keys, keys), (store.values, values), (store.positions, positions)):
                    assert torch.equal(found[r, h, :n], before[r, h][keep[r, h]])


def test_groups_live_as_long_as_an_entry_refers_to_them():
    store = LayerStore(*fresh(4 * GROUP + RESIDUAL, 0, (1, 1)))
    store.set_storage(kivi(4, GROUP, RESIDUAL))
    group, entry, exact = DIM * 4, DIM + DIM // GROUP * 4, 2 * DIM * 4
    assert store.kv_bytes == 4 * group + 4 * GROUP * entry + RESIDUAL * exact
    store.evict(torch.tensor([0, 5, 6, 12, 18, 20]).view(1, 1, -1))
    assert store.kv_bytes == 3 * group + 4 * entry + 2 * exact, "the third group has lost its last entry"
    store.drop(0)
    assert store.kv_bytes == 2 * group + 3 * entry + 2 * exact
    assert store.bytes_of(torch.tensor([0, 1, -1]).view(1, 1, -1)) == group + 2 * entry
    assert store.bytes_of(torch.tensor([2, 4]).view(1, 1, -1)) == group + entry + exact


@pytest.mark.parametrize("lie", ["alike", "apart", "behind a start"])
def test_taken_slots_may_be_padded_and_keys_and_values_may_lie_differently(lie):
    keys, values = fresh(40, 3)
    if lie == "apart":
        values = values.transpose(1, 2).contiguous().transpose(1, 2)
    store = LayerStore(keys, values)
    if lie == "behind a start":
        store.drop(0)
        keys, values = keys[:, :, 1:], values[:, :, 1:]
    slots = torch.tensor([[[0, 3, 38], [2, -1, -1]], [[5, 6, -1], [38, -1, -1]]])
    for found, whole in zip(store.gather(slots), (keys, values), strict=True):
        for r, h, n in (slots >= 0).nonzero().tolist():
            assert torch.equal(found[r, h, n], whole[r, h, slots[r, h, n]])
        assert found.isfinite().all(), "what stands for an empty slot is weighed by zero, which no NaN bears"


def test_memory_is_freed_when_the_prompt_is_rounded():
    store = LayerStore(*fresh(4000, 0, (1, 2), 64))
    before = store.allocated_bytes
    store.set_storage(STORAGES["kivi-2"])
    assert store.positions.dtype == torch.int64
    assert store.allocated_bytes < 1.25 * store.kv_bytes < before / 5


def test_beams_share_groups_and_part_ways():
    store = LayerStore(*fresh(60, 1, (1, 2)))
    store.set_storage(kivi(4, GROUP, RESIDUAL))
    keys = store.keys
    store.reorder(torch.tensor([0, 0, 0]))
    assert torch.equal(store.keys, keys.expand(3, -1, -1, -1))
    new = fresh(1, 2, (3, 2))
    for _ in range(9):
        store.append(*new)
        store.quantise_pending()
    assert torch.equal(store.keys[:, :, :50], keys[:, :, :50].expand(3, -1, -1, -1))
    store.expand(4)
    assert torch.equal(store.keys[0, :2, :50], keys[0, :1, :50].expand(2, -1, -1))


@pytest.mark.parametrize("form", FORMS)
def test_one_form_after_another(form):
    """Another session may take a cache over."""
    keys, values = fresh(30, 3)
    store = LayerStore(keys, values)
    store.set_storage(stored_as("int8"))
    read = store.keys.clone(), store.values.clone()
    expected = LayerStore(*read)
    expected.set_storage(FORMS[form][0])
    store.set_storage(FORMS[form][0])
    assert torch.equal(store.keys, expected.keys) and torch.equal(store.values, expected.values)
    again = copy.deepcopy(store)
    store.set_storage(FORMS[form][0])
    assert torch.equal(store.keys, again.keys), "nothing is rounded twice"


# ---------------------------------------------------------------------------------------------------------- refusals


def test_storages_by_name():
    assert kvlab.storages() == [*"as_is fp8 int8 kivi-4 kivi-2 turbo-4 turbo-3 turbo-2 nvfp4".split()]
    with pytest.raises(KvlabError, match=r"unknown storage 'kivi4'; did you mean 'kivi-4'"):
        stored_as("kivi4")
    with pytest.raises(KvlabError, match=r"a storage is a name, such as 'kivi-4', and not 4"):
        stored_as(4)
    with pytest.raises(KvlabError, match="KIVI takes 2 or 4 bits.* not bits=3, group=32, residual=128"):
        kivi(3)
    assert str(kivi(2, group=16)) == "kivi-2(group=16, residual=128)" and kivi(4) == STORAGES["kivi-4"]


def test_a_group_divides_the_head_size():
    with pytest.raises(
        KvlabError, match="groups of 32 channels, which do not divide .* size of 80; use 'int8' or 'fp8'"
    ):
        STORAGES["kivi-4"].check(80, torch.device("cpu"))
    for storage in STORAGES.values():
        storage.check(64, torch.device("cpu"))


def test_what_a_device_cannot_do():
    def fails(device):
        raise TypeError(
            "Trying to convert Float8_e4m3fn to the MPS backend but it does not have support for that dtype."
        )

    one = Storage("fp8", "", lambda entries: entries, attempt=fails)
    with pytest.raises(KvlabError, match=r"torch .* does not do on cpu what fp8 needs; use 'int8' or 'kivi-4'"):
        one.check(64, torch.device("cpu"))
