"""Weights where `device_map` puts them, on the CPU and on the disk, and what quantises them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from support.live_runs import generate, prompt, small
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import kvlab

SPLIT = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
SPLIT |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}


@pytest.fixture
def folder(tmp_path, tiny):
    tiny().model.save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


@pytest.mark.parametrize("placed", [{"device_map": "auto"}, {"device_map": SPLIT}], ids=["auto", "split"])
@pytest.mark.parametrize("name", ["snapkv", "h2o", "criticalkv"])
def test_a_split_model_captures_replays_and_runs(folder, tmp_path, name, placed):
    whole, parts = kvlab.load(folder), kvlab.load(folder, **placed, offload_folder=tmp_path / "away")
    assert parts.device.type == "cpu" and parts.dtype is torch.float32 and parts.signature == whole.signature
    away = {key for key, weight in parts.model.named_parameters() if weight.is_meta}
    assert any(key.startswith("model.layers.0.") for key in away) == (placed["device_map"] is SPLIT)

    def run(lm):
        trace = kvlab.capture(lm, prompt(60), 4, policies=[small(name)], progress=False)
        result = kvlab.replay(trace, small(name))
        with kvlab.compress(lm.model, small(name)) as session:
            out = generate(lm.model, prompt(60), 6)
        return result.summary, result.kept(1).tolist(), out.sequences.tolist(), session.kept(0).tolist()

    assert run(parts) == run(whole)


def test_settings_go_to_transformers_and_into_the_signature(folder, monkeypatch):
    asked, load = [], AutoModelForCausalLM.from_pretrained

    def loading(*args, **kwargs):
        asked.append({name: kwargs.pop(name) for name in ("quantization_config", "max_memory") if name in kwargs})
        return load(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loading)
    plain = kvlab.load(folder)
    quantised = kvlab.load(folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True), max_memory={"cpu": "1GB"})
    assert asked[0] == {} and asked[1]["max_memory"] == {"cpu": "1GB"} and asked[1]["quantization_config"].load_in_4bit
    assert quantised.sha256 != plain.sha256
    other = kvlab.load(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    assert other.sha256 != quantised.sha256


def test_what_cannot_be_had_is_refused_with_the_reason(folder):
    for asked, why in (
        ({"device": "cpu", "device_map": "auto"}, "both say where the model lies"),
        ({"device_maps": "auto"}, "did you mean 'device_map'"),
        ({"device_map": SPLIT | {"lm_head": "nowhere"}}, "cannot load a model"),
    ):
        with pytest.raises(kvlab.KvlabError, match=why):
            kvlab.load(folder, **asked)
    with pytest.raises(kvlab.KvlabError, match="has no file of weights, so device_map cannot be had"):
        kvlab.load("random:tiny-llama-gqa", device_map="auto")


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed here")
def test_a_quantisation_that_is_not_installed_is_refused_with_the_reason(folder):
    with pytest.raises(kvlab.KvlabError, match="cannot load a model from .*bitsandbytes"):
        kvlab.load(folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
