"""The KV store's verbs against a plain list of entries for each head; what is borrowed; and transformers' cache."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from kvlab.core.adapter import StoreCache
from kvlab.core.store import LayerStore

ROWS, HEADS, DIM = 2, 3, 4
VERBS = ("append", "evict", "drop", "merge", "truncate", "column")


def fresh(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, HEADS, n, DIM, generator=generator, dtype=torch.float64) for _ in range(2)]


def padded(lists, width):
    rows = [[positions + [-1] * (width - len(positions)) for positions in row] for row in lists]
    return torch.tensor(rows, dtype=torch.int64).reshape(ROWS, HEADS, width)


class Twin:
    """A store beside its model, a list of entries (dicts) for each head; every verb is done to both and compared."""

    def __init__(self, n, kind, seed):
        self.random, self.given = random.Random(seed), fresh(n, seed)
        self.copies = [x.clone() for x in self.given]
        if kind == "borrowed":
            self.store = LayerStore(*self.given)
        else:
            room = [torch.full((ROWS, HEADS, 9, DIM), torch.nan, dtype=torch.float64) for _ in range(2)]
            self.store = LayerStore.preallocated(*room)
            self.store.append(*self.given)
        self.seen = n
        self.columns: list[str] = []
        self.heads = [
            [[self.entry(*(x[r, h, i] for x in self.given), i) for i in range(n)] for h in range(HEADS)]
            for r in range(ROWS)
        ]
        self.check()

    @staticmethod
    def entry(key, value, position):
        return dict(key=key.tolist(), value=value.tolist(), position=int(position), weight=1.0)

    @property
    def every(self):
        return [(r, h, self.heads[r][h]) for r in range(ROWS) for h in range(HEADS)]

    @property
    def fewest(self):
        return min(len(entries) for _, _, entries in self.every)

    def pick(self, count):
        """`count` different slots of each head that hold an entry."""
        return [[self.random.sample(range(len(self.heads[r][h])), count) for h in range(HEADS)] for r in range(ROWS)]

    def append(self):
        n = self.random.randint(1, 4)
        keys, values = fresh(n, self.random.randrange(2**31))
        gap = self.random.choice([None, 5])
        positions = None if gap is None else torch.arange(n) + self.seen + gap
        self.store.append(keys, values, positions)
        for r, h, entries in self.every:
            new = [self.entry(keys[r, h, i], values[r, h, i], self.seen + i + (gap or 0)) for i in range(n)]
            entries += [e | dict.fromkeys(self.columns, 0.0) for e in new]
        self.seen += n

    def evict(self):
        ragged = self.random.random() < 0.5
        most = self.fewest
        keep = [
            [
                sorted(
                    self.random.sample(
                        range(len(self.heads[r][h])),
                        self.random.randint(0, len(self.heads[r][h])) if ragged else most // 2,
                    )
                )
                for h in range(HEADS)
            ]
            for r in range(ROWS)
        ]
        self.store.evict(padded(keep, max(len(positions) for row in keep for positions in row) + ragged))
        for r, h, entries in self.every:
            entries[:] = [entries[i] for i in keep[r][h]]

    def drop(self):
        if self.fewest:
            slots = self.pick(1)
            self.store.drop(torch.tensor(slots)[..., 0])
            for r, h, entries in self.every:
                del entries[slots[r][h][0]]

    def merge(self):
        if self.fewest < 2:
            return
        chosen = self.pick(self.random.randint(2, min(4, self.fewest)))
        how = dict(zip(self.columns, ["max", "sum"], strict=False))
        slots = torch.tensor(chosen)
        self.store.merge(slots[..., 1:], slots[..., 0], how)
        for r, h, entries in self.every:
            parts = [entries[i] for i in chosen[r][h]]
            target, total = parts[0], sum(p["weight"] for p in parts)
            for name in ("key", "value"):
                target[name] = [sum(p[name][d] * p["weight"] for p in parts) / total for d in range(DIM)]
            target["weight"] = total
            for name, kind in how.items():
                target[name] = (max if kind == "max" else sum)([p[name] for p in parts])

    def truncate(self):
        longest = max(len(entries) for _, _, entries in self.every)
        n = self.random.randint(0, min(3, longest))
        self.store.truncate(longest - n)
        for _, _, entries in self.every:
            del entries[max(len(entries) - n, 0) :]
        self.seen -= n

    def column(self):
        name = f"column {len(self.columns)}"
        values = torch.rand(self.store.positions.shape, generator=torch.Generator().manual_seed(len(self.columns)))
        self.store.add_column(name, values)
        self.columns.append(name)
        for r, h, entries in self.every:
            for i, entry in enumerate(entries):
                entry[name] = float(values[r, h, i])

    def check(self):
        store = self.store
        lengths = [[len(entries) for entries in row] for row in self.heads]
        assert store.counts.tolist() == lengths and store.seen == self.seen
        assert store.keys.shape[2] == store.length == max(map(max, lengths))
        assert torch.isfinite(store.keys).all() and torch.isfinite(store.values).all(), "0 x NaN is NaN"
        assert torch.isfinite(store.fusion_counts.log()).all(), "a bias is their logarithm, empty slots included"
        for r, h, entries in self.every:
            n = len(entries)
            assert store.positions[r, h].tolist() == [e["position"] for e in entries] + [-1] * (store.length - n)
            for name, tensor in [
                ("key", store.keys),
                ("value", store.values),
                ("weight", store.fusion_counts),
                *((name, store.column(name)) for name in self.columns),
            ]:
                expected = torch.tensor([e[name] for e in entries], dtype=torch.float64)
                torch.testing.assert_close(
                    tensor[r, h, :n].double(),
                    expected.view(tensor[r, h, :n].shape),
                    atol=1e-6,
                    rtol=1e-6,
                    msg=lambda m, name=name: f"{name} of {r}, {h}: {m}",
                )
        entries = [e for _, _, some in self.every for e in some]
        assert store.kv_bytes == len(entries) * 2 * DIM * 8
        assert store.merged == any(e["weight"] != 1 for e in entries)
        assert store.aux_bytes == pytest.approx(4 * len(entries) * (len(self.columns) + store.merged), abs=1)
        assert all(torch.equal(a, b) for a, b in zip(self.given, self.copies, strict=True)), "borrowed tensors changed"


@settings(deadline=None)
@given(
    n=st.integers(1, 7),
    kind=st.sampled_from(["borrowed", "preallocated"]),
    seed=st.integers(0, 10**6),
    verbs=st.lists(st.sampled_from(VERBS), max_size=12),
)
def test_the_verbs_do_what_they_do_to_a_list(n, kind, seed, verbs):
    twin = Twin(n, kind, seed)
    for verb in verbs:
        getattr(twin, verb)()
        twin.check()


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.append(*fresh(1, 9)),
        lambda s: s.evict(torch.tensor([0, 2, 3]).expand(ROWS, HEADS, 3)),
        lambda s: s.drop(torch.ones(ROWS, HEADS, dtype=torch.int64)),
        lambda s: s.merge(torch.ones(ROWS, HEADS, 1, dtype=torch.int64), torch.zeros(ROWS, HEADS, dtype=torch.int64)),
    ],
)
def test_after_its_first_change_a_store_lives_apart_from_what_it_borrowed(change):
    keys, values = fresh(5)
    store = LayerStore(keys, values)
    assert store.keys.data_ptr() == keys.data_ptr(), "read in place until then"
    change(store)
    expected = store.keys.clone(), store.values.clone()
    keys.fill_(7), values.fill_(7)
    assert torch.equal(store.keys, expected[0]) and torch.equal(store.values, expected[1])


def test_pseudo_tokens_on_a_borrowed_store_come_and_go():
    keys, values = fresh(5)
    before = keys.clone()
    store = LayerStore(keys[:, :, :4], values[:, :, :4])
    store.append(*fresh(1, 1))
    store.truncate(4)
    store.append(*fresh(1, 2))
    assert torch.equal(keys, before), "the fifth entry was not the store's to write"
    assert torch.equal(store.keys[:, :, 4:], fresh(1, 2)[0]) and store.positions[0, 0].tolist() == [0, 1, 2, 3, 4]


def test_a_recording_is_read_in_place_until_an_entry_leaves():
    keys, values = fresh(9)
    before = keys.clone()
    store, expected = LayerStore.recorded(keys, values, 4), LayerStore(keys[:, :, :4], values[:, :, :4])
    store.append(keys[:, :, 4:5], values[:, :, 4:5])
    assert store.keys.data_ptr() == keys.data_ptr() and torch.equal(store.keys, keys[:, :, :5])
    expected.append(keys[:, :, 4:5], values[:, :, 4:5])
    for each in (store, expected):
        each.append(keys[:, :, 5:7], values[:, :, 5:7])
        each.evict(torch.tensor([0, 2, 5]).expand(ROWS, HEADS, -1))
        each.append(keys[:, :, 7:], values[:, :, 7:])
    assert store.positions[0, 0].tolist() == [0, 2, 5, 7, 8] and torch.equal(store.positions, expected.positions)
    assert torch.equal(store.keys, expected.keys) and torch.equal(store.values, expected.values)
    assert store.kv_bytes == expected.kv_bytes and torch.equal(keys, before)


def test_given_storage_is_filled_in_place_until_it_is_full():
    keys, values = fresh(6)
    storage = [torch.zeros(ROWS, HEADS, 4, DIM, dtype=torch.float64) for _ in range(2)]
    store = LayerStore.preallocated(*storage)
    assert (store.length, store.kv_bytes) == (0, 0)
    store.append(keys[:, :, :4], values[:, :, :4])
    assert torch.equal(storage[0], keys[:, :, :4]) and store.keys.data_ptr() == storage[0].data_ptr()
    store.append(keys[:, :, 4:], values[:, :, 4:])
    assert torch.equal(store.keys, keys) and torch.equal(storage[0], keys[:, :, :4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("apart", [False, True], ids=["whole", "apart"])
def test_a_slot_of_each_head_leaves_storage_of_any_kind(dtype, apart):
    keys, values = (x.to(dtype) for x in fresh(6))
    # Storage may be a part of something larger, whose heads do not lie side by side.
    room = [torch.zeros(ROWS, HEADS, 16, DIM, dtype=dtype)[:, :, :: 2 if apart else 1] for _ in range(2)]
    assert room[0].is_contiguous() != apart
    store = LayerStore.preallocated(*room)
    store.append(keys, values)
    flags = torch.arange(ROWS * HEADS * 6).view(ROWS, HEADS, 6) % 3 == 0
    store.add_column("flag", flags.clone())
    slots = torch.tensor([[0, 5, 2], [4, 1, 3]])
    store.drop(slots)
    assert store.length == 5
    for row in range(ROWS):
        for head in range(HEADS):
            rest = [slot for slot in range(6) if slot != slots[row, head]]
            assert store.positions[row, head].tolist() == rest
            for found, expected in ((store.keys, keys), (store.values, values), (store.column("flag"), flags)):
                assert torch.equal(found[row, head], expected[row, head, rest])


def test_a_column_of_another_size_and_a_wrong_truncation_are_refused():
    store = LayerStore(*fresh(5))
    with pytest.raises(ValueError, match=r"column 'score' is \(2, 3, 4\), the store \(2, 3, 5\)"):
        store.add_column("score", torch.zeros(ROWS, HEADS, 4))
    for length in (-1, 6):
        with pytest.raises(ValueError, match=f"5 slots cannot be truncated to {length}"):
            store.truncate(length)


def test_ragged_heads_forget_their_own_newest_entries():
    store = LayerStore(*fresh(4))
    keep = torch.tensor([0, 1, 3]).repeat(ROWS, HEADS, 1)
    keep[0, 1] = torch.tensor([2, -1, -1])
    store.evict(keep)
    before = store.positions.clone()
    store.append(*fresh(2, 5))
    assert store.positions[0, 1].tolist() == [2, 4, 5, -1, -1]
    store.truncate(3)
    assert torch.equal(store.positions, before) and store.seen == 4


# --- the adapter ---


def empty_cache(lm, capacity):
    config = lm.model.config
    rooms = torch.empty(lm.n_layers, 2, 1, config.num_key_value_heads, capacity, config.head_dim)
    return StoreCache([LayerStore.preallocated(*room) for room in rooms])


def test_transformers_generates_with_it_as_with_its_own_cache(tiny):
    lm = tiny()
    ids = torch.randint(3, 256, (1, 11), generator=torch.Generator().manual_seed(1))
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    ours, theirs = empty_cache(lm, 12), DynamicCache()
    assert torch.equal(
        lm.model.generate(ids, past_key_values=ours, **options),
        lm.model.generate(ids, past_key_values=theirs, **options),
    )
    assert ours.get_seq_length() == theirs.get_seq_length()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(mine.store.keys, other.keys)
        assert mine.store.positions[0, 0].tolist() == list(range(theirs.get_seq_length()))


def test_cropping_speaks_transformers_language(tiny):
    lm = tiny()
    ids = torch.randint(3, 256, (1, 11), generator=torch.Generator().manual_seed(1))
    ours, theirs = empty_cache(lm, 12), DynamicCache()
    with torch.no_grad():
        for cache in (ours, theirs):
            lm.model(ids, past_key_values=cache)
            cache.crop(-4)
            cache.crop(0)
        assert ours.get_seq_length() == theirs.get_seq_length() == 7
        found, expected = (lm.model(ids[:, 7:9], past_key_values=cache).logits for cache in (ours, theirs))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_assisted_decoding_which_crops_gives_the_same_text(tiny):
    lm, draft = tiny(), copy.deepcopy(tiny(seed=3).model)
    ids = torch.randint(3, 256, (1, 11), generator=torch.Generator().manual_seed(1))
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    found = lm.model.generate(ids, past_key_values=empty_cache(lm, 30), assistant_model=draft, **options)
    assert torch.equal(found, lm.model.generate(ids, **options))
