"""Models as people hold them: wrapped, adapted, compiled, offloaded, and under autocast."""

import copy
import json
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

import kvlab
from kvlab.core import hookable
from kvlab.methods import has_budget

IDS = torch.randint(3, 128, (1, 60), generator=torch.Generator().manual_seed(1))


class Adapted(nn.Module):
    """A linear layer with a low-rank change beside it, in the shape of peft's."""

    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base_layer, self.in_features = base, base.in_features
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.5)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(self.dropout(x)))


class Held(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


class Engine:
    """An object that is no module and has a model, as serving code does."""

    def __init__(self, model):
        self.model = model


def model():
    return kvlab.random_lm("tiny-llama-gqa", dtype="float32", vocab_size=128).model


def generated(model, policy="snapkv", through=None, **around):
    with kvlab.compress(model, kvlab.policy(policy, budget=40)) as session:
        tokens = (through or model).generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None)
    return tokens.tolist(), session.kept_after_prefill(1).tolist()


@pytest.mark.parametrize(
    "wrap", [Held, nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["own", "parallel", "compiled"]
)
def test_wrapper_gives_what_its_model_gives(wrap):
    plain = model()
    wrapper = wrap(plain)
    assert generated(wrapper, through=plain) == generated(plain)
    trace, own = kvlab.capture(wrapper, IDS[0], 2), kvlab.capture(plain, IDS[0], 2)
    assert torch.equal(trace.keys, own.keys)
    with kvlab.compress(wrapper, "full") as session:
        wrapper(IDS)
    assert session.kept(0).shape[-1] == 60


def test_object_with_a_model_and_one_process_of_distributed_training(tmp_path):
    plain = model()
    assert generated(Engine(plain), through=plain) == generated(plain)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        wrapper = nn.parallel.DistributedDataParallel(plain.requires_grad_(True))
        assert generated(wrapper, through=plain) == generated(plain)
        with kvlab.compress(wrapper, "full") as session:
            wrapper(IDS)
        assert session.kept(0).shape[-1] == 60
    finally:
        torch.distributed.destroy_process_group()


def test_adapters_folder_is_named_with_its_base(tmp_path):
    settings = {"peft_type": "LORA", "base_model_name_or_path": "some/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(kvlab.KvlabError, match=r"LoRA adapter.*some/base|LORA adapter.*some/base"):
        kvlab.load(tmp_path)


def test_wrapper_of_two_models_is_asked_for_one():
    both = nn.ModuleDict({"teacher": model(), "student": model()})
    with pytest.raises(kvlab.KvlabError, match=r"holds 2 models \(teacher, student\)"):
        kvlab.compress(both, "full")


@pytest.mark.parametrize("how", ["forward", "in place"])
def test_compiled_model_runs_uncompiled_inside(how):
    plain, compiled = model(), model()
    if how == "forward":
        compiled.forward = torch.compile(compiled.forward, backend="eager")
    else:
        compiled.compile(backend="eager")
    assert generated(compiled) == generated(plain)


def test_changed_attention_inside_is_one_sentence():
    plain = model()
    before = plain.config._attn_implementation
    with (
        kvlab.compress(plain, "full"),
        pytest.raises(kvlab.KvlabError, match="no layer of .* came by the session"),
    ):
        plain.set_attn_implementation("eager")
        plain(IDS)
    assert plain.config._attn_implementation == before


def test_adapter_on_output_projection_counts():
    adapted = model()
    merged = copy.deepcopy(adapted)
    for layer, other in zip(adapted.model.layers, merged.model.layers, strict=True):
        torch.manual_seed(0)
        attention = layer.self_attn
        made = attention.o_proj = Adapted(attention.o_proj)
        with torch.no_grad():
            for part in (made.a, made.b):
                nn.init.normal_(part.weight)
            other.self_attn.o_proj.weight += made.b.weight @ made.a.weight
    for each in (adapted, merged):
        each.train(False)
    (found,) = hookable.required_projections(hookable.layers_of(adapted)[:1])
    assert torch.allclose(found, merged.model.layers[0].self_attn.o_proj.weight, atol=1e-4)
    assert generated(adapted, "criticalkv") == generated(merged, "criticalkv")


def test_projection_that_is_not_linear_is_refused():
    plain = model()

    class Bent(nn.Linear):
        def forward(self, x):
            return super().forward(x).square()

    first = plain.model.layers[0].self_attn
    first.o_proj = Bent(first.o_proj.in_features, first.o_proj.out_features)
    with pytest.raises(kvlab.KvlabError, match="needs a linear output projection"):
        kvlab.compress(plain, kvlab.policy("criticalkv", budget=40))


def test_lora_of_peft_gives_what_its_merged_model_gives():
    peft = pytest.importorskip("peft", reason="peft is not installed here")
    settings = peft.LoraConfig(target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(model(), settings).eval()
    merged = copy.deepcopy(adapted).merge_and_unload()
    with kvlab.compress(adapted, kvlab.policy("criticalkv", budget=40)) as session:
        adapted.generate(input_ids=IDS, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert session.kept_after_prefill(1).tolist() == generated(merged, "criticalkv")[1]


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_weights_are_read(where, tmp_path):
    from accelerate import cpu_offload, disk_offload

    plain, away = model(), model()
    away = cpu_offload(away, "cpu") if where == "cpu" else disk_offload(away, tmp_path, execution_device="cpu")
    assert next(away.parameters()).is_meta
    assert generated(away, "criticalkv") == generated(plain, "criticalkv")
    names = ["criticalkv", "dapq"]
    found, wanted = (
        kvlab.replay(kvlab.capture(each, IDS[0], 4, policies=names), names, budgets=[40]).summary
        for each in (away, plain)
    )
    assert found.equals(wanted)


def test_other_model_of_one_configuration_goes_on():
    from transformers import LlamaForCausalLM

    config = model().config
    first, second = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    assert first.config is second.config
    wanted = second(IDS).logits
    with kvlab.compress(first, "full"):
        first(IDS)
        assert torch.equal(second(IDS).logits, wanted)
        first.config.pad_token_id = 7
    assert first.config is second.config is first.model.layers[0].self_attn.config
    assert first.config.pad_token_id == 7


@pytest.mark.parametrize("name", kvlab.policies())
def test_policies_under_autocast_and_default_dtypes(name):
    lm, budget = model(), {"budget": 40} if has_budget(name) else {}
    policy = kvlab.policy(name, **budget)

    def run():
        with kvlab.compress(lm, policy):
            tokens = lm.generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None).tolist()
        trace = kvlab.capture(lm, IDS[0], 4, policies=[policy])
        return tokens, kvlab.replay(trace, [policy]).summary

    tokens, summary = run()
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            again, other = run()
            assert again == tokens
            assert other.equals(summary)
    finally:
        torch.set_default_dtype(before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, other = run()
    assert other.equals(summary)


def test_full_cache_under_autocast_is_the_plain_model():
    lm = model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = lm(IDS).logits
        with kvlab.compress(lm, "full"):
            assert torch.equal(lm(IDS).logits.argmax(-1), wanted.argmax(-1))


def test_traces_and_replays_pickle_after_a_replay():
    trace = kvlab.capture(model(), IDS[0], 4)
    found = kvlab.replay(trace, kvlab.policy("snapkv", budget=40))
    for copied in (ForkingPickler.loads(ForkingPickler.dumps(found)), copy.deepcopy(found)):
        assert (
            copied.summary == found.summary if isinstance(found.summary, dict) else copied.summary.equals(found.summary)
        )
    again = ForkingPickler.loads(ForkingPickler.dumps(trace))
    assert torch.equal(kvlab.replay(again, found.policy).mass_lost, found.mass_lost)


def test_rkv_replays_prompts_shorter_than_its_window():
    trace = kvlab.capture(model(), IDS[0, :3], 1, policies=["rkv"])
    assert kvlab.replay(trace, kvlab.policy("rkv", budget=64)).recall.min() == 1
