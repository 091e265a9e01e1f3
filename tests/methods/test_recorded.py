"""Sets that other code has recorded: the file, what a policy makes of it, and the recorder that the docs hand out."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.benchmarks import imported
from support.live_runs import generate, prompt, small
from support.refusals import refusal

import kvlab

FILE = Path(__file__).parents[2] / "docs" / "record_sets.py"


@pytest.fixture(scope="module")
def record_sets():
    spec = importlib.util.spec_from_file_location("record_sets", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recorded(record_sets, tmp_path):
    """A function that writes what a policy keeps of a trace, its steps too where asked, and gives it as a policy."""

    def made(trace, policy, steps=False, **about):
        result = kvlab.replay(trace, policy)
        sets = [torch.stack([padded(result.stored(layer, t), 60) for layer in trace.layers]) for t in range(1, 7)]
        about = dict(ids=trace.ids[: trace.prompt_length], model="random:tiny-llama-gqa") | about
        after = torch.stack(sets) if steps else None
        record_sets.write(tmp_path / "sets.safetensors", result.kept_sets, steps=after, **about)
        return kvlab.policy("recorded", sets=str(tmp_path / "sets.safetensors")), result

    return made


def padded(sets, width):
    return torch.nn.functional.pad(sets, (0, width - sets.shape[1]), value=-1)


@pytest.fixture
def trace(tiny):
    return kvlab.capture(tiny("tiny-llama-gqa"), prompt(40)[0], 6, window=40, policies=["h2o", "adakv"])


@pytest.mark.parametrize("name", ["snapkv", "adakv", "keydiff"])
def test_recorded_sets_measure_as_the_policy_that_they_were_recorded_of(tiny, recorded, trace, name):
    policy, own = recorded(trace, small(name))
    found = kvlab.replay(trace, policy)
    assert torch.equal(found.mass_lost, own.mass_lost) and torch.equal(found.output_error, own.output_error)
    assert torch.equal(found.read_bytes, own.read_bytes) and found.entries == own.entries
    lm = tiny("tiny-llama-gqa")
    runs = []
    for each in (policy, small(name)):
        with kvlab.compress(lm.model, each) as session:
            runs.append((generate(lm.model, prompt(40), 6).logits, session.kv_bytes))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True)) and runs[0][1] == runs[1][1]
    ids = trace.ids[:40]
    mine, theirs = (kvlab.attribute(lm, each, ids, new_tokens=4).summary for each in (policy, small(name)))
    assert mine["difference"] == theirs["difference"]


@pytest.mark.parametrize("name", ["h2o", "morphkv", "streamingllm"])
def test_recorded_steps_evict_while_decoding(tiny, recorded, trace, name):
    policy, own = recorded(trace, small(name), steps=True)
    found = kvlab.replay(trace, policy)
    for step in range(1, 7):
        for layer in trace.layers:
            assert found.stored(layer, step).tolist() == own.stored(layer, step).tolist()
    assert torch.equal(found.mass_lost, own.mass_lost)
    lm = tiny("tiny-llama-gqa")
    with kvlab.compress(lm.model, policy) as session:
        generate(lm.model, prompt(40), 7)
        assert session.kept(0).tolist() == own.stored(0, 6).tolist()
        generate(lm.model, prompt(40), 9)  # steps beyond the recorded ones evict nothing
        assert session.kept(0).shape[1] == own.stored(0, 6).shape[1] + 2


def test_a_batch_of_one_prompt_takes_the_same_sets_in_each_row(tiny, recorded, trace):
    policy, _ = recorded(trace, small("snapkv"))
    lm = tiny("tiny-llama-gqa")
    with kvlab.compress(lm.model, policy):
        rows = generate(lm.model, prompt(40).repeat(2, 1), 6).sequences
    assert rows[0].tolist() == rows[1].tolist()
    assert "another prompt" in refusal(run, lm, policy, torch.cat([prompt(40), prompt(40, seed=1)]))


def run(lm, policy, ids):
    with kvlab.compress(lm.model, policy):
        return generate(lm.model, ids, 2)


def test_other_prompts_and_models_are_refused(tiny, recorded, trace, tmp_path):
    policy, _ = recorded(trace, small("snapkv"))
    lm = tiny("tiny-llama-gqa")
    for ids in (prompt(40, seed=1), prompt(39), prompt(8)):  # the last is shorter than the budget
        assert "another prompt" in refusal(run, lm, policy, ids)
        assert "another prompt" in refusal(kvlab.replay, kvlab.capture(lm, ids[0], 2), policy)
    assert "this model has" in refusal(run, tiny("tiny-llama-mqa"), policy, prompt(40))
    other, _ = recorded(trace, small("snapkv"), model="their/other-model")
    assert "any_model=True" in refusal(kvlab.replay, trace, other)
    kvlab.replay(trace, kvlab.policy("recorded", sets=other.sets, any_model=True))
    nameless, _ = recorded(trace, small("snapkv"), model="")
    kvlab.replay(trace, nameless)
    blind = kvlab.Trace.from_tensors(trace.queries, trace.keys, trace.values, trace.prompt_length)
    assert "token ids" in refusal(kvlab.replay, blind, policy)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ({"kept": torch.ones(2, 2, 3)}, "whole numbers [layers, kv_heads, n], and not float32 [2, 2, 3]"),
        ({"other": torch.ones(2)}, "and not nothing"),
        ({"kept": torch.tensor([[[0, 40]]])}, "positions outside 0 .. 39"),
        ({"kept": torch.tensor([[[3, 3]]])}, "positions twice"),
        ({"kept": torch.tensor([[[3, 1]]])}, "do not ascend"),
        ({"kept": torch.tensor([[[-1, -1]]])}, "a head keeps nothing"),
        ({"kept": torch.tensor([[[1]]]), "steps": torch.tensor([[[[41]]]])}, "after step 1"),
        ({"kept": torch.tensor([[[1]]]), "steps": torch.tensor([[[1]]])}, "[steps, 1, 1, n], and not int64 [1, 1, 1]"),
    ],
)
def test_a_file_that_is_not_right_says_why(tmp_path, sets, said):
    about = dict(format="kvlab-sets-1", prompt_tokens="40", prompt_sha256="0" * 64)
    save_file(sets, tmp_path / "sets.safetensors", metadata=about)
    assert said in refusal(kvlab.policy, "recorded", sets=str(tmp_path / "sets.safetensors"))


def test_what_is_no_file_of_sets_is_refused(tmp_path):
    file = tmp_path / "sets.safetensors"
    assert "no such file" in refusal(kvlab.policy, "recorded", sets=str(file))
    file.write_text("sets")
    assert "no file of retained sets" in refusal(kvlab.policy, "recorded", sets=str(file))
    save_file({"kept": torch.ones(1, 1, 1)}, file, metadata={"format": "another"})
    assert "'another' and not 'kvlab-sets-1'" in refusal(kvlab.policy, "recorded", sets=str(file))
    save_file({"kept": torch.ones(1, 1, 1)}, file, metadata={"format": "kvlab-sets-1"})
    assert "prompt_sha256" in refusal(kvlab.policy, "recorded", sets=str(file))


def test_steps_cannot_bring_back_what_was_evicted(tiny, record_sets, trace, tmp_path):
    kept, ids = torch.tensor([[[1, 2], [3, 4]]]).repeat(trace.n_layers, 1, 1), trace.ids[:40]
    record_sets.write(tmp_path / "a.safetensors", kept, ids, steps=kept[None] + 1)
    said = refusal(kvlab.replay, trace, kvlab.policy("recorded", sets=str(tmp_path / "a.safetensors")))
    assert "after step 1 that an earlier step has evicted" in said


def test_the_signature_names_what_chose_the_sets_and_changes_with_them(recorded, trace):
    first = str(recorded(trace, small("snapkv"), source="SnapKVPress")[0])
    assert first.startswith("SnapKVPress(budget=14, sets='sets.safetensors')@")
    assert str(recorded(trace, small("keydiff"), source="SnapKVPress")[0]) != first


# ---------------------------------------------------------------------- the recorder


class Press:
    """Evicts as kvpress does: hooks that cut each layer's keys once it has attended, or mark entries as masked."""

    def __init__(self, kept, how):
        self.kept, self.how = kept, how

    @contextlib.contextmanager
    def __call__(self, model):
        hooks = [layer.self_attn.register_forward_hook(self.cut, with_kwargs=True) for layer in model.model.layers]
        yield
        for hook in hooks:
            hook.remove()

    def cut(self, module, _, given, output):
        layer, kept = given["past_key_values"].layers[module.layer_idx], self.kept[module.layer_idx]
        if self.how == "masked":
            gone = torch.ones(layer.keys.shape[1:3], dtype=torch.bool).scatter(1, kept, False).nonzero().T
            module.masked_key_indices = (torch.zeros_like(gone[0]), *gone)
            return
        places = kept[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = layer.keys.gather(2, places), layer.values.gather(2, places)
        layer.keys = layer.keys * (2 if self.how == "changed" else 1)


@pytest.mark.parametrize("how", ["evicted", "masked", "changed"])
def test_the_recorder_finds_what_a_press_has_kept(tiny, record_sets, tmp_path, how):
    lm, ids = tiny("tiny-llama-gqa"), prompt(40)
    draw = torch.Generator().manual_seed(0)
    shape = lm.model.config.num_hidden_layers, lm.model.config.num_key_value_heads, 40
    kept = torch.rand(*shape, generator=draw).topk(9).indices.sort(-1).values
    if how == "changed":
        with pytest.raises(ValueError, match="keys were changed"):
            record_sets.record(lm.model, ids, Press(kept, how), tmp_path / "sets.safetensors")
        return
    record_sets.record(lm.model, ids, Press(kept, how), tmp_path / "sets.safetensors")
    policy = kvlab.policy("recorded", sets=str(tmp_path / "sets.safetensors"), any_model=True)
    assert torch.equal(kvlab.replay(kvlab.capture(lm, ids[0], 2), policy).kept_sets, kept)


@pytest.mark.long
def test_kvpress_records_the_sets_that_kvlab_keeps_too(monkeypatch, tmp_path):
    with imported(monkeypatch, "peers_process") as (process,):
        python = process.python_of(process.environment())
    if not python.is_file():
        pytest.skip("kvpress's environment is not made; python benchmarks/peers.py makes it")
    lm, ids = kvlab.load("smollm2-135m"), list(range(100, 500))
    shutil.copy(FILE, tmp_path)
    code = f"""
import json, torch, kvpress
from transformers import AutoModelForCausalLM
from record_sets import record
model = AutoModelForCausalLM.from_pretrained({lm.model.config.name_or_path!r}, dtype=torch.float32).eval()
record(model, torch.tensor({json.dumps(ids)}), kvpress.SnapKVPress(0.5), "sets.safetensors")
"""
    done = subprocess.run([python, "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trace = kvlab.capture(lm, torch.tensor(ids), 2, window=64)
    theirs = kvlab.replay(trace, kvlab.policy("recorded", sets=str(tmp_path / "sets.safetensors"))).kept_sets
    ours = kvlab.replay(trace, kvlab.policy("snapkv", budget=200, window=64, kernel=5)).kept_sets
    same = (theirs[..., None] == ours[..., None, :]).any(-1).double().mean()
    assert theirs.shape == ours.shape and same > 0.99, "up to what different kernels round differently"
