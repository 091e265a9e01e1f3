"""Folders of models that mean harm: no pickle is read, no code of theirs runs, and no path leads out."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import safetensors.torch
import torch
from support import tiny_gguf
from support.refusals import one_sentence

from kvlab.inputs import models, packs
from kvlab.inputs.models import conversion


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with a model of a few kilobytes, its tokenizer and template."""
    file = tiny_gguf.write(tmp_path_factory.mktemp("file") / "tiny.gguf")
    folder = tmp_path_factory.mktemp("good")
    conversion._convert(*conversion._read_skeleton(file), folder, "tiny", progress=False)
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_index(folder, file):
    """Let an index name `file` as that of all weights."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    os.rename(folder / "model.safetensors", folder / "w.safetensors")
    torch.save(weights, folder / "w.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_an_index_names_safetensors_files_beside_it(folder):
    with_index(folder, "w.safetensors")
    assert models.load(folder).n_layers == tiny_gguf.LAYERS


@pytest.mark.parametrize("file", ["w.bin", "../w.safetensors", "/etc/passwd", ".", 5, None, {}])
def test_an_index_that_names_pickles_or_leads_out(folder, file):
    with_index(folder, file)
    shutil.copy(folder / "w.safetensors", folder.parent)
    with one_sentence("pickled ones are not read|is no index"):
        models.load(folder)


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"weight_map": []}', "\0", "[" * 200_000])
def test_an_index_that_is_none(folder, text):
    with_index(folder, "w.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    with one_sentence("is no index"):
        models.load(folder)


def test_a_configuration_cannot_have_other_weights_read(folder):
    """Whose hash would not be that in the signature; and they might be pickled."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    torch.save({name: torch.zeros_like(tensor) for name, tensor in weights.items()}, folder / "evil.bin")
    (folder / "evil.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "evil.bin")})
    )
    rewrite(folder / "config.json", transformers_weights="evil.safetensors.index.json")
    found = models.load(folder).model.get_input_embeddings().weight
    assert torch.equal(found, weights["model.embed_tokens.weight"].float())


def test_a_configuration_cannot_name_code_on_a_hub(folder):
    rewrite(folder / "config.json", _attn_implementation="someone/attention")
    assert models.load(folder).model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 0},
        {"num_hidden_layers": "2"},
        {"num_attention_heads": 0},
        {"num_hidden_layers": 2**31 - 1},
        {"max_position_embeddings": -5},
        {"model_type": ["llama"]},
        {"dtype": "float7"},
        {"quantization_config": 5},
        {"pad_token_id": 10**9},
    ],
)
def test_a_configuration_that_no_model_has(folder, changes):
    rewrite(folder / "config.json", **changes)
    with one_sentence("cannot load a model from"):
        models.load(folder)


def test_a_folder_is_not_believed_what_it_says_of_its_hash(folder):
    honest = models.load(folder).sha256
    for lie in ({"weights_sha256": "0" * 64}, {"weights_sha256": 5}, [1]):
        packs_note = folder / packs.PROVENANCE
        packs_note.write_text(json.dumps(lie))
        assert models.load(folder).sha256 == honest


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{{ a.b.c }}",
        "{{ raise_exception('x\ny') }}",
        "{{ 1 / 0 }}",
        "{{ cycler.__init__.__globals__.os.mkdir('ran') }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_fails_is_one_sentence(good, template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lm = models.load(good)
    lm.tokenizer.chat_template = template
    with one_sentence("chat template of .* fails"):
        lm.encode("hello")
    assert not (tmp_path / "ran").exists() and lm.encode("hello", chat=False).numel()


def test_a_trace_cannot_lead_to_a_tokenizer_elsewhere(good, monkeypatch):
    monkeypatch.chdir(good.parent)
    assert models.tokenizer(good.name) is not None
    for name in (str(good), f"../{good.parent.name}/{good.name}", f"./{good.name}", "", ".", "..", "~", "a\0b"):
        assert models.tokenizer(name) is None
    monkeypatch.chdir(good)
    assert [models.tokenizer(name) for name in ("", ".", "..")] == [None] * 3
