"""Products by oneDNN: the same numbers to rounding, the same layers to whoever saves, moves or differentiates them."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import one_sentence
from torch.utils._python_dispatch import TorchDispatchMode

import kvlab
from kvlab.core import onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def on(monkeypatch):
    monkeypatch.setenv(onednn.SWITCH, "1")


def pair(inputs, outputs, bias=False, **kind):
    """A large layer of torch's, and the same one hastened."""
    plain = torch.nn.Linear(inputs, outputs, bias=bias, **kind)
    hastened = copy.deepcopy(plain)
    onednn.use_onednn(hastened)
    return plain, hastened


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    inputs=st.sampled_from([256, 300]),
    bias=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_gives_the_product_in_double_precision_to_rounding(shape, inputs, bias, strided, seed):
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setenv(onednn.SWITCH, "1")
        torch.manual_seed(seed)
        plain, hastened = pair(inputs, 300, bias)
        assert type(hastened) is onednn.OneDNNLinear
        given = torch.randn(*shape, 2 * inputs)[..., ::2] if strided else torch.randn(*shape, inputs)
        found, exact = hastened(given), plain.double()(given.double())
    assert found.shape == exact.shape and found.dtype == torch.float32
    # A sum of n rounded products is off by at most n units in the last place of the products' absolute sum.
    bound = given.double().abs() @ plain.weight.detach().abs().T + 1
    assert ((found.double() - exact).abs() <= inputs * 2**-24 * bound).all()


def test_gradients_of_inputs_are_torchs_where_weights_are_fixed(on):
    """And only inside the block: afterwards the weights are trained as before."""
    plain, hastened = pair(256, 300, bias=True)
    given = torch.randn(7, 256)
    found = {}
    for name, layer in (("plain", plain), ("hastened", hastened)):
        x = given.clone().requires_grad_()
        with onednn.input_gradients(layer):
            out = layer(x)
            (found[name],) = torch.autograd.grad(out.square().sum(), x)
        assert all(weight.requires_grad for weight in layer.parameters())
    torch.testing.assert_close(found["hastened"], found["plain"], rtol=1e-4, atol=1e-4)
    hastened(given).sum().backward()
    assert hastened.weight.grad is not None


def test_a_loaded_model_says_the_same_whichever_library_multiplies(monkeypatch, lm):
    ids = torch.arange(300, 340)[None]
    logits = {}
    for switch, library in (("0", "torch"), ("1", "oneDNN")):
        monkeypatch.setenv(onednn.SWITCH, switch)
        loaded = kvlab.random_lm("smollm2-135m", layers=2)
        assert onednn.libraries(loaded.model) == dict.fromkeys(["layers", "attention"], library)
        assert loaded.model.lm_head.weight is loaded.model.get_input_embeddings().weight
        with torch.inference_mode():
            logits[library] = loaded.model(ids).logits
    torch.testing.assert_close(logits["oneDNN"], logits["torch"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("switch", ["0", "1"])
@pytest.mark.parametrize("name", ["random:smollm2-135m", "smollm2-135m"])
def test_who_loads_a_model_chooses_whatever_the_switch_says(monkeypatch, switch, name):
    monkeypatch.setenv(onednn.SWITCH, switch)
    lm = kvlab.load(name, device="cpu", dtype="float32", onednn=False)
    kinds = {type(module) for module in lm.model.modules() if isinstance(module, torch.nn.Linear)}
    assert kinds == {torch.nn.Linear}
    if name.startswith("random:"):
        chosen = kvlab.load(name, device="cpu", dtype="float32", onednn=True)
        assert onednn.libraries(chosen.model)["layers"] == "oneDNN"


def test_a_torch_without_onednn_is_said(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with one_sentence("onednn=True, but this torch was built without oneDNN"):
        kvlab.random_lm("tiny-llama-gqa", onednn=True)


class Products(TorchDispatchMode):
    """The shapes of what is multiplied by a matrix as tall as `rows`."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.seen = rows, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        matrices = [list(x.shape) for x in args if isinstance(x, torch.Tensor)]
        if any(self.rows in shape for shape in matrices) and func.overloadpacket.__name__ in ("mm", "bmm", "addmm"):
            self.seen.append(matrices[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("batch", "kept"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_the_last_rows_of_texts_meet_the_output_layer_as_one_matrix(batch, kept):
    lm = kvlab.random_lm("smollm2-135m", layers=1, dtype=torch.bfloat16)
    ids = torch.arange(batch * 40).view(batch, 40)
    with torch.no_grad():  # in inference mode torch does not say what a layer multiplies
        whole = lm.model(ids).logits[:, -kept:]
        with Products(lm.model.vocab_size) as multiplied:
            last = lm.model(ids, logits_to_keep=kept).logits
    assert multiplied.seen == [[batch * kept, lm.model.config.hidden_size]]
    torch.testing.assert_close(last, whole, rtol=2e-2, atol=2e-2)


def test_gradients_other_types_and_small_or_special_layers_are_torchs(on):
    plain, hastened = pair(256, 256)
    given = torch.randn(3, 256, requires_grad=True)
    hastened(given).square().sum().backward()
    expected = torch.autograd.grad(plain(given).square().sum(), given)[0]
    torch.testing.assert_close(given.grad, expected)
    plain, hastened = pair(256, 256, dtype=torch.bfloat16)
    given = torch.randn(3, 256, dtype=torch.bfloat16)
    assert torch.equal(hastened(given), plain(given))

    class Special(torch.nn.Linear):
        pass

    small, special = torch.nn.Linear(16, 16), Special(256, 256)
    onednn.use_onednn(torch.nn.Sequential(small, special))
    assert type(small) is torch.nn.Linear and type(special) is Special


def test_a_bias_that_alone_is_trained_gets_its_gradient(on):
    plain, hastened = pair(256, 256, bias=True)
    for layer in (plain, hastened):
        layer.weight.requires_grad_(False)
        layer(torch.ones(3, 256)).sum().backward()
    torch.testing.assert_close(hastened.bias.grad, plain.bias.grad)
    torch.testing.assert_close(hastened.bias.grad, torch.full((256,), 3.0))


def test_derivatives_forward_are_torchs(on):
    plain, hastened = pair(256, 256)
    given, direction = torch.randn(2, 3, 256)
    found, expected = (torch.func.jvp(layer, (given,), (direction,))[1] for layer in (hastened, plain))
    torch.testing.assert_close(found, expected)
    rows, others = torch.randn(3, 300, 64), torch.randn(3, 900, 64)
    tangent = torch.func.jvp(onednn.by_transposed, (rows, others), (rows, torch.zeros_like(others)))[1]
    torch.testing.assert_close(tangent, rows @ others.mT)


def test_autocast_casts_as_it_would(on):
    plain, hastened = pair(256, 256)
    given = torch.randn(3, 256)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(hastened(given), plain(given)) and hastened(given).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_weights_and_those_of_a_class_of_their_own_multiply_their_own_way(on):
    class Quantised(torch.Tensor):
        pass

    given = torch.randn(3, 256)
    for kind in (lambda w: w.to_sparse_csr(), lambda w: w.as_subclass(Quantised)):
        plain, hastened = pair(256, 256)
        for layer in (plain, hastened):
            layer.weight = torch.nn.Parameter(kind(plain.weight.detach()), requires_grad=False)
        with torch.no_grad():
            assert type(hastened(given)) is type(plain(given))
            torch.testing.assert_close(
                hastened(given).as_subclass(torch.Tensor), plain(given).as_subclass(torch.Tensor)
            )


def test_a_hastened_layer_is_saved_and_copied_as_before(on, tmp_path):
    plain, hastened = pair(256, 256)
    assert hastened.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(hastened.weight, plain.weight)
    again = copy.deepcopy(hastened).double()
    given = torch.randn(2, 256, dtype=torch.float64)
    assert torch.equal(again(given), plain.double()(given))


@pytest.mark.parametrize(
    ("capability", "maker", "faster"),
    [
        ("AVX512", "AuthenticAMD", True),
        ("AVX512_VNNI", "AuthenticAMD", True),
        ("AVX2", "AuthenticAMD", False),
        ("AVX512", "GenuineIntel", False),
        ("DEFAULT", "", False),
    ],
)
def test_it_is_chosen_where_mkl_leaves_half_of_the_processor_idle(monkeypatch, capability, maker, faster):
    monkeypatch.delenv(onednn.SWITCH, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(onednn, "_maker", lambda: maker)
    onednn._faster.cache_clear()
    try:
        assert onednn.wanted() is faster
    finally:
        onednn._faster.cache_clear()


def test_a_switch_that_means_nothing_is_refused(monkeypatch):
    monkeypatch.setenv(onednn.SWITCH, "yes")
    with one_sentence("KVLAB_ONEDNN is 1"):
        onednn.wanted()
    monkeypatch.setenv(onednn.SWITCH, "1")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with one_sentence("built without oneDNN"):
        onednn.wanted()


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_many_rows_are_those_of_torch(on, monkeypatch, batch, transposed):
    rows, others = torch.randn(*batch, 96, 64), torch.randn(*batch, 700, 64)
    if transposed:
        others = others.transpose(-1, -2).contiguous().transpose(-1, -2)
    exact = rows.double() @ others.double().transpose(-1, -2)
    calls, real = [], onednn.onednn
    monkeypatch.setattr(onednn, "onednn", lambda *given: calls.append(given) or real(*given))
    torch.testing.assert_close(onednn.by_transposed(rows, others).double(), exact, atol=1e-4, rtol=1e-4)
    assert len(calls) == math.prod(batch)
    for left in (
        (rows[..., :8, :], others),  # too few products to earn a kernel
        (rows.double(), others.double()),
        (rows.requires_grad_(), others),
        (rows.detach(), others[..., ::2, :].repeat_interleave(2, -2)[..., ::2, :]),  # strided
    ):
        expected = left[0] @ left[1].transpose(-1, -2)
        torch.testing.assert_close(onednn.by_transposed(*left), expected, atol=1e-5, rtol=1e-5)
    assert len(calls) == math.prod(batch)


@pytest.mark.parametrize("heads, r", [(3, 1), (3, 3), (2, 7), (1, 8)])
@pytest.mark.parametrize("n", [1, 40, 4000])
def test_a_steps_few_queries_against_all_keys(heads, r, n):
    rows, others = torch.randn(2, heads, r, 64), torch.randn(2, heads, n + 5, 64)[:, :, :n]
    exact = rows.double() @ others.double().mT
    found = onednn.by_transposed(rows, others)
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-4)
    assert found.is_contiguous()


MANY_LENGTHS = """
from kvlab.lib import environment
environment.configure()
import torch
from kvlab.core import onednn

def own():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

torch.set_num_threads(1)
rows, others, grown = torch.randn(8, 64), torch.randn(2000, 64), []
for number in range(1, 1001):
    onednn.onednn(rows, others[:number])
    if number in (600, 1000):
        grown.append(own())
print(grown[1] - grown[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("capacity, few", [(None, True), ("1024", False)])
def test_kernels_for_ever_new_lengths_do_not_fill_the_memory(capacity, few):
    limits = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    given = {} if capacity is None else dict.fromkeys(limits, capacity)
    clean = {name: value for name, value in os.environ.items() if name not in limits}
    command = [sys.executable, "-c", MANY_LENGTHS]
    done = subprocess.run(command, env=clean | given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    grown = float(done.stdout)
    assert grown < 20 if few else grown > 40, f"{grown:.0f} MiB more after 400 further lengths"
