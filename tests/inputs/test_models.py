"""Loading models: the real one, folders, random shapes, and every way to get a name wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import time

import pytest
import torch
from support import tiny_gguf
from support.refusals import one_sentence

from kvlab.errors import KvlabError
from kvlab.inputs import models, packs, shapes, wheels
from kvlab.inputs.models import conversion, loading

# --- the real model ---


def test_default_model_is_what_it_says(lm):
    config = lm.model.config
    assert (lm.n_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert lm.context_length == 8192
    assert (lm.dtype, lm.device.type, config._attn_implementation) == (torch.float32, "cpu", "sdpa")
    assert not lm.model.training and not any(p.requires_grad for p in lm.model.parameters())
    assert lm.signature == f"smollm2-135m@{lm.sha256[:8]}"


def test_default_models_hash_is_that_of_its_weights(lm):
    folder = models.MODELS[models.DEFAULT].folder
    assert lm.sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert not list(folder.glob("*.gguf")), "the GGUF file is of no use after the conversion"


def test_default_model_answers_a_chat_question(lm):
    ids = lm.encode("What is the capital of France? Answer in one sentence.")
    out = lm.model.generate(ids, max_new_tokens=16, do_sample=False)
    assert "Paris" in lm.decode(out[0, ids.shape[1] :])


def test_chat_template_wraps_only_when_it_should(lm):
    plain, chat = lm.encode("Hello", chat=False), lm.encode("Hello")
    assert lm.tokenizer.decode(plain[0]) == "Hello"
    text = lm.tokenizer.decode(chat[0])
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert torch.equal(chat, lm.encode("Hello", chat=True))
    assert "<|im_start|>" not in lm.decode(chat)


def test_numbers_are_split_into_digits_before_spaces_are_grouped(lm):
    # The published tokenizer does so; the one that a GGUF file gives makes two tokens of the blank line.
    pieces = [lm.tokenizer.decode([i]) for i in lm.encode("end.\n\n1962", chat=False)[0].tolist()]
    assert pieces == ["end", ".", "\n\n", "1", "9", "6", "2"]


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_an_empty_text_is_refused(lm, text):
    with pytest.raises(KvlabError, match="empty"):
        lm.encode(text)


# --- folders ---


@pytest.fixture
def folder(tmp_path, own_home):
    file = tiny_gguf.write(tmp_path / "tiny.gguf")
    made = conversion.converted(file, wheels.file_sha256(file), progress=False)
    copy = tmp_path / "my-model"
    shutil.copytree(made, copy)
    (copy / packs.PROVENANCE).unlink()
    return copy


def test_a_folder_loads_under_its_own_name_and_hash(folder):
    lm = models.load(folder, device="cpu")
    expected = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert (lm.name, lm.sha256) == ("my-model", expected)


def test_the_remembered_hash_follows_a_change_of_the_weights(folder):
    from safetensors.torch import load_file, save_file

    before = models.load(folder).sha256
    assert models.load(folder).sha256 == before
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 1
    time.sleep(0.02)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert models.load(folder).sha256 not in (before, "")


def test_a_folder_without_all_its_weights_is_refused(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KvlabError, match=r"1 are missing.*layers.1.self_attn.k_proj"):
        models.load(folder)


def test_pickled_weights_are_never_read(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(KvlabError, match="pickled weights are not read"):
        models.load(folder)


def test_remote_code_is_never_run(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(KvlabError, match="cannot load a model"):
        models.load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_folder_is_one_sentence(folder):
    (folder / "model.safetensors").write_bytes(b"not weights")
    with one_sentence("cannot load a model from"):
        models.load(folder)


# --- names ---


def test_an_unknown_name_offers_the_nearest_and_what_exists(own_home):
    with pytest.raises(KvlabError, match=r"did you mean 'smollm2-135m'\?.*random:SHAPE"):
        models.load("smolm2-135m")
    with pytest.raises(KvlabError, match=r"smollm2-135m \(with kvlab pull\)"):
        models.load("gpt-17")


def test_a_hub_id_offline_is_one_sentence(own_home, monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError("cannot reach the hub\nmany\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    told = r"cannot get some/model from the hub \(cannot reach the hub\).*smollm2"
    with one_sentence(told):
        models.load("some/model")


@pytest.mark.parametrize("name", ["./no/such", "/no/such", "weights.gguf", "a/b/c"])
def test_a_path_that_is_not_there_never_asks_a_hub(name, monkeypatch):
    monkeypatch.setattr(loading, "_from_hub", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(KvlabError, match="no folder or GGUF file"):
        models.load(name)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(KvlabError, match=r"not a .gguf file"):
        models.load(tmp_path / "weights.bin")


@pytest.mark.parametrize(
    ("wrong", "told"), [({"dtype": "float31"}, "float32"), ({"dtype": "int8"}, "float32"), ({"device": "tpu9"}, "cuda")]
)
def test_wrong_dtype_or_device_is_one_sentence(wrong, told):
    with pytest.raises(KvlabError, match=told):
        models.load("random:tiny-llama-gqa", **wrong)


# --- random weights ---


def test_random_weights_follow_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = models.random_lm("tiny-llama-gqa", seed=1)
    assert torch.equal(torch.rand(3), expected)
    same, other = models.random_lm("tiny-llama-gqa", seed=1), models.random_lm("tiny-llama-gqa", seed=2)
    ids = torch.arange(10, 30)[None]
    assert torch.equal(first.model(ids).logits, same.model(ids).logits)
    assert not torch.allclose(first.model(ids).logits, other.model(ids).logits)
    assert first.sha256 == same.sha256 != other.sha256


@pytest.mark.parametrize("name", [n for n in shapes.SHAPES if n.startswith("tiny-")])
def test_every_tiny_family_attends_unevenly(tiny, name):
    """At the usual initialisation they would attend uniformly, and no test on them could tell policies apart."""
    lm = tiny(name)
    ids = torch.randint(3, 256, (1, 64), generator=torch.Generator().manual_seed(0))
    lm.model.set_attn_implementation("eager")
    try:
        attention = torch.stack(lm.model(ids, output_attentions=True).attentions)
    finally:
        lm.model.set_attn_implementation("sdpa")
    assert attention.shape == (2, 1, 4, 64, 64)
    assert attention[..., -1, :].amax(-1).median() > 4 / 64


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("llama-3.1-8b", 8.030),
        ("llama-2-7b", 6.738),
        ("mistral-7b-v0.2", 7.242),
        ("qwen2.5-7b", 7.616),
        ("qwen3-8b", 8.191),
        ("phi-3-mini", 3.821),
        ("gemma-7b", 8.538),
        ("smollm2-135m", 0.1345),
    ],
)
def test_published_shapes_have_the_published_number_of_parameters(shape, billions):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shapes.config(shape))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=6e-4)


def test_layers_and_tokenizer_of_a_random_model(lm):
    made = models.random_lm("tiny-qwen3", layers=3, tokenizer=models.DEFAULT)
    assert made.n_layers == 3 and len(made.model.model.layers) == 3
    assert made.encode("Hello", chat=False).tolist() == lm.encode("Hello", chat=False).tolist()
    assert made.model(made.encode("Hello")).logits.shape[-1] == len(lm.tokenizer)


def test_random_models_say_what_is_missing():
    with pytest.raises(KvlabError, match="tiny-llama-gqa"):
        models.random_lm("tiny-lama-gqa")
    with pytest.raises(KvlabError, match="at least 1"):
        models.random_lm("tiny-llama-gqa", layers=0)
    with pytest.raises(KvlabError, match="no tokenizer"):
        models.random_lm("tiny-llama-gqa").encode("text")


def test_a_model_that_is_loaded_in_inference_mode_can_be_differentiated():
    with torch.inference_mode():
        made = [models.random_lm("tiny-llama-gqa"), loading.load("random:tiny-llama-gqa")]
    weights = [weight for lm in made for weight in (*lm.model.parameters(), *lm.model.buffers())]
    assert weights and not any(weight.is_inference() for weight in weights)
