"""TurboQuant: the codebook against the conditions that define it, distortion against the paper, products without bias;
and 4-bit floats number by number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from support import oracles

from kvlab.core.kivi import unpack_codes
from kvlab.core.nvfp4 import LEVELS, nearest_codes
from kvlab.core.storage import STORAGES, stored_as, turbo
from kvlab.core.store import LayerStore
from kvlab.core.turbo import Rotation, codebook
from kvlab.errors import KvlabError

CPU = torch.device("cpu")
VECTORS = 4000


def density(head_dim):
    """Of one coordinate of a random unit vector (the paper's lemma 1)."""
    scale = math.exp(math.lgamma(head_dim / 2) - math.lgamma((head_dim - 1) / 2)) / math.sqrt(math.pi)
    return lambda x: scale * (1 - x * x) ** ((head_dim - 3) / 2)


def cells(levels):
    return list(zip([-1.0, *(levels[1:] + levels[:-1]) / 2], [*(levels[1:] + levels[:-1]) / 2, 1.0], strict=True))


def read(storage, keys):
    store = LayerStore(keys, keys)
    store.set_storage(stored_as(storage))
    return store


def unit_vectors(head_dim, seed=0):
    x = torch.randn(1, 1, VECTORS, head_dim, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_each_level_is_the_mean_of_its_cell(bits, head_dim):
    levels, f = codebook(bits, head_dim).double().numpy(), density(head_dim)
    for level, (low, high) in zip(levels, cells(levels), strict=True):
        mass, moment = (quad(lambda x, power=power: x**power * f(x), low, high)[0] for power in (0, 1))
        assert level == pytest.approx(moment / mass, abs=1e-5)


def test_levels_of_large_heads_are_those_of_a_gaussian():
    """The paper's section 3.1 gives them for 1 and 2 bits, times the root of the head size."""
    found = [codebook(bits, 4096) * 64 for bits in (1, 2)]
    assert found[0].tolist() == pytest.approx([-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)], abs=1e-3)
    assert found[1].tolist() == pytest.approx([-1.51, -0.453, 0.453, 1.51], abs=2e-3)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("bits", "printed"), [(2, 0.117), (3, 0.03), (4, 0.009)])
def test_distortion_is_the_papers(bits, printed, head_dim):
    """Theorem 1: at most sqrt(3) pi / 2 / 4^bits, and 0.36, 0.117, 0.03 and 0.009 for few bits; the paper cuts the last
    two to one digit, so these hold within that. Theorem 3: at least 1 / 4^bits.
    """
    keys = unit_vectors(head_dim)
    found = float((read(f"turbo-{bits}", keys).keys - keys).square().sum(-1).mean())
    assert 1 / 4**bits < found < math.sqrt(3) * math.pi / 2 / 4**bits
    assert abs(found - printed) < max(0.05 * printed, 0.005 if bits == 3 else 0.0005)
    # What the codebook promises: the error of a coordinate by its density, for all of them.
    levels, f = codebook(bits, head_dim).double().numpy(), density(head_dim)
    errors = (
        quad(lambda x, level=level: (x - level) ** 2 * f(x), *cell)[0]
        for level, cell in zip(levels, cells(levels), strict=True)
    )
    assert found == pytest.approx(head_dim * sum(errors), rel=0.05)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(("bits", "printed"), [(2, 0.56), (3, 0.18), (4, 0.047)])
def test_inner_products_have_no_bias(bits, printed, head_dim):
    """Theorem 2: the variant for inner products is unbiased, its error at most `printed` / head size. By algorithm 1,
    products with the vector itself are too small by the whole distortion.
    """
    keys = unit_vectors(head_dim)
    queries = unit_vectors(head_dim, 1)
    plain, right = read(f"turbo-{bits}", keys).keys, read(turbo(bits, inner_product=True), keys).keys
    shrunk = ((plain - keys) * keys).sum(-1)
    assert float(shrunk.mean()) == pytest.approx(-float((plain - keys).square().sum(-1).mean()), rel=0.1)
    off = ((right - keys) * keys).sum(-1)
    assert abs(float(off.mean())) < 0.1 * abs(float(shrunk.mean()))
    assert float(((right - keys) * queries).sum(-1).square().mean()) * head_dim < printed


@pytest.mark.parametrize("head_dim", [8, 64, 72, 80, 96, 128, 256])
def test_a_rotation_is_the_matrix_that_its_definition_gives(head_dim):
    x = torch.randn(7, head_dim, generator=torch.Generator().manual_seed(2))
    turned = Rotation(head_dim, 3)(x)
    np.testing.assert_allclose(turned, x.double().numpy() @ oracles.turn(head_dim, 3).T, atol=2e-5)
    torch.testing.assert_close(Rotation(head_dim, 3).back(turned), x, atol=2e-5, rtol=0)
    assert torch.equal(turned, Rotation(head_dim, 3)(x)) and not torch.equal(turned, Rotation(head_dim, 4)(x))
    assert torch.equal(turned[3:4], Rotation(head_dim, 3)(x[3:4])), "a vector is read the same in any batch"


def test_one_outlying_channel_spoils_no_other():
    """What a rotation is for: theorem 1 holds for any vector, one with a channel a hundred times larger too."""
    keys = torch.randn(1, 1, 500, 64, generator=torch.Generator().manual_seed(4))
    keys[..., 5] *= 100
    error = float((read("turbo-4", keys).keys - keys).square().sum() / keys.square().sum())
    assert error < math.sqrt(3) * math.pi / 2 / 4**4


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("storage", "bits"),
    [("turbo-4", 4), ("turbo-3", 3), ("turbo-2", 2), ("nvfp4", 4.5), ("turbo-4/turbo-2", 3), ("turbo-4/as_is", 18)],
)
def test_bytes_by_hand(storage, bits, head_dim):
    store = read(storage, unit_vectors(head_dim))
    halves = storage.split("/") * (2 // len(storage.split("/")))
    norms = sum(2 for half in halves if "turbo" in half) * VECTORS
    scales = sum(4 for half in halves if half == "nvfp4")
    assert store.kv_bytes == 2 * VECTORS * head_dim * bits / 8 + norms + scales
    assert store.allocated_bytes <= store.kv_bytes + 2 * 8 * VECTORS, "codes are packed where they lie"
    halved = VECTORS * head_dim * (4 if storage[0] == "t" else bits) / 8
    if "/" in storage:
        assert store.key_bytes == halved + 2 * VECTORS


def test_numbers_go_to_the_nearest_4_bit_float():
    x = torch.linspace(-7, 7, 2801)
    codes = nearest_codes(x)
    found = [LEVELS[code & 7] * (-1 if code & 8 else 1) for code in codes.tolist()]
    for number, one in zip(x.tolist(), found, strict=True):
        assert abs(number - one) <= min(abs(number - level * sign) for level in LEVELS for sign in (1, -1)) + 1e-6
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert [LEVELS[code] for code in nearest_codes(ties).tolist()] == [0, 1, 1, 2, 2, 4, 4], "to the even code"


def test_a_block_of_nvfp4_does_not_see_its_neighbours():
    keys = torch.randn(1, 1, 40, 64, generator=torch.Generator().manual_seed(6))
    keys[..., :16] *= 200
    found = read("nvfp4", keys).keys
    # The furthest from a level, relative to the block's largest, is half the gap of 4 and 6; e4m3 adds a sixteenth.
    blocks = (found - keys).unflatten(-1, (-1, 16)).abs().amax(-1) / keys.unflatten(-1, (-1, 16)).abs().amax(-1)
    assert float(blocks.max()) < 1 / 6 + 1 / 16
    tiny = torch.zeros(1, 1, 3, 16)
    assert torch.equal(read("nvfp4", tiny).keys, tiny) and torch.equal(read("turbo-4", tiny).keys, tiny)


def test_codes_fill_their_bytes():
    store = read("turbo-3", unit_vectors(64))
    packed = store._entries.slots.tensors["keys"]
    assert packed.shape[-1] == 64 * 3 // 8 and packed.dtype == torch.uint8
    assert unpack_codes(packed, 3).unique().tolist() == list(range(8))


def test_what_cannot_be_is_refused():
    with pytest.raises(KvlabError, match="TurboQuant takes 2, 3 or 4 bits, not 5; 'int8' has 8"):
        turbo(5)
    with pytest.raises(KvlabError, match="unknown storage of keys 'turbo4'; did you mean 'turbo-4'"):
        stored_as("turbo4/kivi-2")
    with pytest.raises(KvlabError, match="unknown storage of values 'kivi-3'; did you mean"):
        stored_as("turbo-4/kivi-3")
    with pytest.raises(KvlabError, match="unknown storage 'turbo-4/kivi-2/int8'"):
        stored_as("turbo-4/kivi-2/int8")
    with pytest.raises(KvlabError, match="nvfp4 .*16 channels.* size of 72; use 'int8' or 'fp8'"):
        STORAGES["nvfp4"].check(72, CPU)
    with pytest.raises(KvlabError, match="kivi-2 .*32 channels.* size of 80; use 'int8' or 'fp8'"):
        stored_as("turbo-4/kivi-2").check(80, CPU)
    with pytest.raises(KvlabError, match="turbo-3 .*8 channels.* size of 36; use 'int8' or 'fp8'"):
        STORAGES["turbo-3"].check(36, CPU)
    for name in ("turbo-4", "turbo-3", "turbo-2", "nvfp4", "turbo-4/turbo-2"):
        stored_as(name).check(80, CPU)


def test_a_half_keeps_nothing_of_the_other_in_memory():
    store = read("turbo-2/int8", unit_vectors(64))
    halves = store._entries._keys, store._entries._values
    taken = sum(x.untyped_storage().nbytes() for half in halves for x in half.slots.tensors.values())
    assert taken <= store.allocated_bytes < VECTORS * 64 * 4, "less than either half in float32"


def test_a_pair_of_one_is_no_pair():
    assert stored_as("int8/int8") is STORAGES["int8"] and stored_as("as_is/as_is").exact
    assert not stored_as("as_is/int8").exact and str(stored_as("turbo-4/kivi-2")) == "turbo-4/kivi-2"
    assert str(turbo(4, inner_product=True)) == "turbo-4(inner_product=True)"
    assert turbo(4) == STORAGES["turbo-4"] != turbo(4, seed=1)
