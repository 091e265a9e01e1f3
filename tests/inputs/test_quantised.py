"""Quantised weights: what `load` passes on, and what capture, replay, live runs and attribution make of them."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
from support.live_runs import generate, prompt, small
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import kvlab
from kvlab.attribution.oracle import oracle_effect
from kvlab.bench import meters
from kvlab.core import hookable, onednn, quantised
from kvlab.inputs import models
from kvlab.inputs.models.folder import ConversionReasons

POLICIES = ("snapkv", "h2o", "criticalkv", "kvzip", "expected_attention", "quest", "morphkv")
REFUSED = "needs gradients, and the quantised layer model.layers.1.self_attn.o_proj"


class Int8(torch.Tensor):
    """Integers and a scale for each row that look like a float32 weight, with as few operators as torchao's have."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    def dequantize(self):
        return self.numbers * self.scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, _context, _size, _stride):
        return Int8(**inner)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is functional.linear:
            return functional.linear(args[0], args[1].dequantize(), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(f"{func} of a quantised weight")


class Packed(nn.Module):
    """A linear layer with integers in a buffer and no weight of its own, as layers of GPTQ have."""

    def __init__(self, weight):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("numbers", weight.numbers)
        self.register_buffer("scale", weight.scale)

    def forward(self, x):
        return functional.linear(x, self.numbers * self.scale)


class WithoutGradient(Packed):
    def forward(self, x):
        return super().forward(x.detach())


class RoundedInputs(Packed):
    def forward(self, x):
        return super().forward((x * 64).round() / 64)


class Failing(Packed):
    def forward(self, x):
        if x.requires_grad:
            raise NotImplementedError("this kernel has no backward pass")
        return super().forward(x)


class Bent(Packed):
    def forward(self, x):
        return super().forward(x).square()


def rounded(weight: torch.Tensor) -> Int8:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return Int8((weight / scale).round().to(torch.int8), scale)


def changed(tiny, make):
    """The tiny model with each linear layer of its decoder made anew from its rounded weight."""
    model = copy.deepcopy(tiny("tiny-llama-gqa").model)
    for parent in [each for layer in model.model.layers for each in layer.modules()]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, make(child, rounded(child.weight.detach())))
    return model


def with_weight(layer, weight):
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


MAKERS = {"wrapper": with_weight, "packed": lambda layer, weight: Packed(weight)}


@pytest.fixture
def dense(tiny):
    """The model whose weights are the rounded numbers, as plain tensors."""
    return changed(tiny, lambda layer, weight: with_weight(layer, weight.dequantize()))


@pytest.fixture(params=MAKERS)
def packed(request, tiny):
    return changed(tiny, MAKERS[request.param])


def results(model, name):
    """What a policy does in a replay and live; capture asks for projections where the policy reads them."""
    trace = kvlab.capture(model, prompt(60), 4, policies=[small(name)], progress=False)
    replayed = kvlab.replay(trace, small(name))
    with kvlab.compress(model, small(name)) as session:
        out = generate(model, prompt(60), 6)
    return replayed.kept(1).tolist(), dict(replayed.summary), out.sequences.tolist(), session.kept(0).tolist()


@pytest.mark.parametrize("name", POLICIES)
def test_quantised_weights_give_what_the_same_numbers_give_as_plain_tensors(dense, packed, name):
    found, wanted = results(packed, name), results(dense, name)
    assert found[::2] == wanted[::2] and found[3] == wanted[3]
    assert found[1] == pytest.approx(wanted[1], rel=1e-4, nan_ok=True)


def test_projections_are_the_dequantised_weights(dense, packed):
    """An identity through each layer gives its matrix; the weights themselves are no tensor that a trace can hold."""
    modules = hookable.layers_of(packed)
    assert hookable.projections_of(modules) is None
    for found, layer in zip(hookable.required_projections(modules), dense.model.layers, strict=True):
        assert type(found) is torch.Tensor and torch.allclose(found, layer.self_attn.o_proj.weight, atol=1e-6)
    trace = kvlab.capture(packed, prompt(60), 2, policies=["criticalkv"], progress=False)
    assert trace.projections is not None and trace.model_projections is None


def test_replay_without_projections_says_what_to_capture(packed):
    trace = kvlab.capture(packed, prompt(60), 2, progress=False)
    with pytest.raises(kvlab.KvlabError, match=r"criticalkv needs the output projection .*policies=\['criticalkv'\]"):
        kvlab.replay(trace, small("criticalkv"))


def test_attribution_is_that_of_the_same_numbers(dense, packed):
    found, wanted = (
        kvlab.attribute(model, small("snapkv"), prompt(60), 5, progress=False).costs for model in (packed, dense)
    )
    assert torch.allclose(found, wanted, atol=1e-4) and float(wanted.abs().max()) > 1e-2


@pytest.mark.parametrize(
    "kind, why",
    [
        (WithoutGradient, "passes none back on cpu"),
        (RoundedInputs, "passes wrong ones back on cpu"),
        (Failing, r"cannot pass them back \(this kernel has no backward pass\) on cpu"),
    ],
)
def test_attribution_refuses_a_layer_whose_gradient_is_missing_or_wrong(tiny, kind, why, monkeypatch):
    model = changed(tiny, MAKERS["packed"])
    attention = model.model.layers[1].self_attn
    attention.o_proj.__class__ = kind
    assert results(model, "snapkv"), "all but attribution runs"
    monkeypatch.setattr(model, "forward", lambda *_a, **_k: pytest.fail("the model ran"))
    for asker, run in (
        ("attribution", lambda: kvlab.attribute(model, small("snapkv"), prompt(60), 5)),
        ("oracle_effect", lambda: oracle_effect(model, prompt(60), 12, 5)),
    ):
        with pytest.raises(kvlab.KvlabError, match=rf"{asker} {REFUSED} \({kind.__name__}, .*\) {why}; load"):
            run()


def test_layers_that_are_not_quantised_are_not_called_for_their_gradient(tiny):
    class Router(nn.Linear):
        def forward(self, x):
            pytest.fail("a dense layer was called")

    model = copy.deepcopy(tiny("tiny-llama-gqa").model)
    model.model.layers[0].mlp.gate_proj = Router(64, 8)
    quantised.check_gradients(model, "attribution")


def test_projection_that_is_not_linear_is_refused_by_name(tiny):
    model = changed(tiny, MAKERS["packed"])
    model.model.layers[1].self_attn.o_proj.__class__ = Bent
    why = r"needs a linear output projection in each layer, and that of layer 1 is no linear map \(a Bent; quantised"
    for run in (
        lambda: kvlab.capture(model, prompt(60), 2, policies=["snapkv", "criticalkv"]),
        lambda: kvlab.compress(model, small("criticalkv")),
    ):
        with pytest.raises(kvlab.KvlabError, match=f"criticalkv {why}"):
            run()


def test_a_model_alone_has_the_hash_of_its_integers_and_scales(tiny):
    one, same, other = (changed(tiny, with_weight) for _ in range(3))
    other.model.layers[0].mlp.up_proj.weight.numbers[0, 0] += 1
    hashes = [models.lm_of(model).sha256 for model in (one, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_bytes_are_those_that_are_stored(tiny, dense):
    packed = changed(tiny, with_weight)
    rows, numbers = (
        sum(weight.shape[0] * each for weight, each in ((w, 4) for w in linear_weights(dense))),
        sum(weight.numel() for weight in linear_weights(dense)),
    )
    assert meters.weight_bytes(dense) - meters.weight_bytes(packed) == 4 * numbers - (numbers + rows)

    class State:
        def __init__(self, **tensors):
            vars(self).update(tensors)

    weight = torch.zeros(64, 1, dtype=torch.uint8)
    weight.quant_state = State(absmax=torch.zeros(2), blocksize=64, state2=State(absmax=torch.zeros(1)))
    assert quantised.stored_bytes(weight) == 64 + 8 + 4


def linear_weights(model):
    layers = (each for layer in model.model.layers for each in layer.modules())
    return [each.weight for each in layers if isinstance(each, nn.Linear)]


def test_onednn_leaves_quantised_weights_alone(tiny, monkeypatch):
    monkeypatch.setattr(onednn, "FEWEST_WEIGHTS", 0)
    model = changed(tiny, with_weight)
    onednn.use_onednn(model, True)
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert type(model.lm_head) is onednn.OneDNNLinear


# ------------------------------------------------------------------------------------------------- what load passes on


@pytest.fixture
def folder(tmp_path, tiny):
    tiny().model.save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


@pytest.mark.parametrize("given", [BitsAndBytesConfig(load_in_8bit=True), {"quant_method": "x", "bits": 8}])
def test_arguments_go_to_transformers_together(folder, monkeypatch, given):
    asked, load = {}, AutoModelForCausalLM.from_pretrained

    def loading(*args, **kwargs):
        asked.update(kwargs)
        kwargs.pop("quantization_config", None)
        return load(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loading)
    plain = kvlab.load(folder)
    lm = kvlab.load(folder, device_map="auto", dtype="bfloat16", quantization_config=given)
    assert asked["quantization_config"] is given and asked["device_map"] == "auto"
    assert asked["dtype"] is lm.dtype is torch.bfloat16
    assert lm.sha256 != plain.sha256
    assert asked["trust_remote_code"] is False and asked["use_safetensors"] is True


@pytest.mark.parametrize("given", ["nf4", 4, {}])
def test_what_is_no_configuration_is_refused(folder, given):
    with pytest.raises(kvlab.KvlabError, match="quantization_config is a configuration of transformers, such as"):
        kvlab.load(folder, quantization_config=given)


def test_reason_of_a_failed_quantisation_is_in_the_message(folder, monkeypatch):
    from transformers import modeling_utils

    def failing(*_args, **_kwargs):
        modeling_utils.logger.warning("a report\nTraceback\nImportError: Requires mslk >= 1.0.0\nError: of weights")
        raise RuntimeError("look at the entries of the above report")

    before = modeling_utils.logger.level, modeling_utils.logger.propagate, list(modeling_utils.logger.handlers)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", failing)
    with pytest.raises(kvlab.KvlabError, match="cannot load a model from .*: Requires mslk >= 1.0.0$"):
        kvlab.load(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    assert before == (modeling_utils.logger.level, modeling_utils.logger.propagate, modeling_utils.logger.handlers)
    with ConversionReasons() as reasons:
        modeling_utils.logger.warning("nothing failed")
    assert reasons.reason is None


# -------------------------------------------------------------------------------------------------- the packages' own


def torchao(name):
    import torchao.quantization

    return TorchAoConfig(getattr(torchao.quantization, name)())


def dequantised(weight):
    if hasattr(weight, "dequantize") and weight.dtype in quantised.FLOATS:
        return weight.dequantize()
    from bitsandbytes import functional as bnb

    if weight.dtype == torch.uint8:
        return bnb.dequantize_4bit(weight.data, weight.quant_state).float()
    return weight.CB.float() * weight.SCB[:, None] / 127


def packages(*names):
    """One case for each; it is skipped where the package that quantises is not installed."""
    return [
        pytest.param(make, refused, id=name, marks=pytest.mark.skipif(not find_spec(package), reason=f"{why}{package}"))
        for name, package, make, refused in names
    ]


why = "the package that quantises is not installed here: pip install "
REAL = packages(
    ("torchao-int8", "torchao", lambda: torchao("Int8WeightOnlyConfig"), False),
    ("torchao-float8", "torchao", lambda: torchao("Float8WeightOnlyConfig"), False),
    ("torchao-int8-activations", "torchao", lambda: torchao("Int8DynamicActivationInt8WeightConfig"), True),
    ("bitsandbytes-int8", "bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True), False),
    # bitsandbytes has a kernel without a gradient for processors with AVX512-BF16, and no such kernel elsewhere.
    ("nf4", "bitsandbytes", lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), None),
)


@pytest.mark.parametrize("make, refused", REAL)
def test_a_model_that_a_package_quantised(folder, make, refused):
    lm = kvlab.load(folder, quantization_config=make(), device="cpu")
    modules = hookable.layers_of(lm.model)
    wanted = [dequantised(module.o_proj.weight) for module in modules]
    for found, weight in zip(hookable.required_projections(modules), wanted, strict=True):
        assert type(found) is torch.Tensor
        assert float((found - weight).norm()) <= 0.01 * float(weight.norm())
    for name in POLICIES:
        assert len(results(lm.model, name)[2][0]) == 66
    assert len(models.lm_of(lm.model).sha256) == 64
    assert meters.weight_bytes(lm.model) < 0.5 * meters.weight_bytes(kvlab.load(folder).model)
    try:
        made = kvlab.attribute(lm, small("snapkv"), prompt(60), 5, progress=False)
    except kvlab.KvlabError as error:
        assert refused is not False and "attribution needs gradients, and the quantised layer" in str(error)
    else:
        assert not refused and abs(made.summary["unexplained"]) <= 0.05 * made.summary["difference"]
