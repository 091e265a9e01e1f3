"""A user's GGUF file: converted once, into what transformers' own reader makes of it, and found again by its hash."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import tiny_gguf
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

from kvlab.errors import KvlabError
from kvlab.inputs import models, packs, wheels
from kvlab.inputs.models import cached, conversion, gguf_file, weights
from kvlab.inputs.models.folder import weight_files

TYPES = gguf.GGMLQuantizationType
ARCHITECTURES = ("llama", "qwen2", "gemma3", "lfm2")


@pytest.fixture(autouse=True)
def home_of_its_own(own_home):
    return own_home


def converted(path) -> dict[str, torch.Tensor]:
    """The tensors of the file's folder in the cache."""
    folder = conversion.converted(path, wheels.file_sha256(path), progress=False)
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


def filled(path, folder) -> dict[str, torch.Tensor]:
    """As `converted`, for an architecture that the rest of kvlab may refuse."""
    folder.mkdir()
    conversion._convert(*conversion._read_skeleton(path), folder, "tiny", progress=False)
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


def read_by_transformers(path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    return dict(model.named_parameters())


@pytest.mark.parametrize("quantised", [None, TYPES.Q8_0, TYPES.Q5_0, TYPES.Q4_1, TYPES.BF16, TYPES.F16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_those_of_transformers_own_reader(tmp_path, architecture, quantised):
    if architecture == "lfm2" and quantised == TYPES.Q5_0:
        pytest.skip("transformers' reader of this architecture knows no Q5_0")
    path = tiny_gguf.write(tmp_path / "a.gguf", architecture=architecture, quantised=quantised, tied=quantised is None)
    ours, theirs = filled(path, tmp_path / "made"), read_by_transformers(path)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].to(tensor.dtype)), name
    kept = {tensor.dtype for tensor in ours.values()}
    # float16 holds every number that was one; of bfloat16's some are too small for it.
    assert kept <= {torch.float16, torch.bfloat16} and (quantised == TYPES.BF16 or kept == {torch.float16})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_configuration_is_that_of_transformers_own_reader(tmp_path, architecture):
    path = tiny_gguf.write(tmp_path / "a.gguf", architecture=architecture, tied=False)
    ours = gguf_file.configuration(gguf_file.opened(path)).to_dict()
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="a.gguf").to_dict()
    for config in (ours, theirs):
        config.pop("quantization_config", None)
        config.pop("_name_or_path")
    assert ours == theirs and ours["vocab_size"] == 260 and not ours["tie_word_embeddings"]


def test_a_vocabulary_is_counted_where_the_file_says_no_size(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf.GGUFWriter, "add_vocab_size", lambda *_: None)
    path = tiny_gguf.write(tmp_path / "a.gguf")
    monkeypatch.undo()
    file = gguf_file.opened(path)
    assert "llama.vocab_size" not in file.metadata and gguf_file.configuration(file).vocab_size == 260


def test_large_matrices_are_taken_apart_and_joined_again(tmp_path, monkeypatch):
    path = tiny_gguf.write(tmp_path / "a.gguf", quantised=TYPES.Q8_0, tied=False)
    whole = filled(path, tmp_path / "whole")
    monkeypatch.setattr(weights, "ROWS", 7 * tiny_gguf.HIDDEN)
    parts = filled(path, tmp_path / "parts")
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


def test_weights_that_need_several_files_load_like_those_in_one(tmp_path, monkeypatch):
    path = tiny_gguf.write(tmp_path / "a.gguf", quantised=TYPES.Q8_0, tied=False)
    single = models.load(path, device="cpu")
    shutil.rmtree(packs.home())
    monkeypatch.setattr(weights, "SHARD", 40_000)
    lm = models.load(path, device="cpu")
    (folder,) = (packs.home() / "models").glob("gguf-*")
    files = weight_files(folder)
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert (
        sum(file.stat().st_size for file in files)
        == json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    )
    ids = torch.arange(3, 40)[None]
    assert torch.equal(lm.model(ids).logits, single.model(ids).logits)


@pytest.mark.parametrize(
    ("numbers", "stored"),
    [
        ((1.0, 0.5, -3.25), torch.float16),
        ((1e-10, 1.0, 0.0), torch.float32),  # the nearest bfloat16 is 1.0004e-10
        ((2.0**-40, 1.0, 0.0), torch.bfloat16),
        ((70000.0, 1.0, 0.0), torch.float32),
        ((2.0**17, 1.0, 0.0), torch.bfloat16),
        ((1 / 3, 1.0, 0.0), torch.float32),
    ],
)
def test_unquantised_numbers_are_kept_exactly(tmp_path, numbers, stored):
    norm = converted(tiny_gguf.write(tmp_path / "a.gguf", norms=numbers))["model.norm.weight"]
    assert norm.dtype == stored and norm[:3].float().tolist() == np.float32(numbers).tolist()


def test_quantised_weights_beyond_float16_are_kept_in_float32(tmp_path):
    path = tiny_gguf.write(tmp_path / "a.gguf", quantised=TYPES.Q8_0, scale=20000.0)
    ours, theirs = converted(path), read_by_transformers(path)
    embeddings = ours["model.embed_tokens.weight"]
    assert embeddings.dtype == torch.float32 and embeddings.abs().max() > 65504
    assert torch.equal(embeddings, theirs["model.embed_tokens.weight"])


def test_a_file_is_converted_once_wherever_it_lies(tmp_path, monkeypatch, capfd):
    path = tiny_gguf.write(tmp_path / "mine.gguf")
    lm = models.load(path, device="cpu")
    said = capfd.readouterr()
    assert "converting mine.gguf (once, 40 MB in the cache) ..." in said.err and said.out == ""
    assert (lm.name, lm.sha256) == ("mine", wheels.file_sha256(path))
    (folder,) = (packs.home() / "models").glob("gguf-*")
    facts = packs.read_provenance(folder)
    assert (facts["name"], facts["file"]) == (f"mine@{lm.sha256[:8]}", str(path))
    monkeypatch.setattr(conversion, "_convert", lambda *a, **k: pytest.fail("converted again"))
    (tmp_path / "elsewhere").mkdir()
    again = models.load(shutil.copy(path, tmp_path / "elsewhere" / "other.gguf"), device="cpu")
    assert (again.name, again.sha256) == ("other", lm.sha256) and capfd.readouterr().err == ""
    ids = again.encode("One 12, two 34.")
    assert torch.equal(again.model(ids).logits, lm.model(ids).logits)


def test_a_changed_file_is_another_model(tmp_path):
    first = models.load(tiny_gguf.write(tmp_path / "a.gguf"), device="cpu")
    second = models.load(tiny_gguf.write(tmp_path / "a.gguf", seed=1), device="cpu")
    assert first.sha256 != second.sha256
    assert not torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)
    assert len(list((packs.home() / "models").glob("gguf-*"))) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"without": ("blk.1.attn_k.weight",)},
            "1 tensors are missing, such as model.layers.1.self_attn.k_proj.weight",
        ),
        ({"architecture": "mamba2"}, "architecture"),
    ],
)
def test_a_file_that_is_no_whole_model_leaves_nothing(tmp_path, options, told):
    path = tiny_gguf.write(tmp_path / "a.gguf", **options)
    with pytest.raises(KvlabError, match=f"cannot load a model from {path}: .*{told}") as error:
        models.load(path)
    assert "\n" not in str(error.value)
    assert not [path for path in (packs.home() / "models").glob("*") if path.is_dir()]


def test_tensors_of_another_shape_are_refused(tmp_path, monkeypatch):
    path = tiny_gguf.write(tmp_path / "a.gguf")
    monkeypatch.setattr(conversion.gguf_file, "configuration", lambda file: _wider(file, configuration))
    with pytest.raises(KvlabError, match=r"has shape \[64, 64\], and its configuration says \[128, 64\]"):
        models.load(path)


configuration = gguf_file.configuration


def _wider(file, make):
    config = make(file)
    config.head_dim *= 2
    return config


def test_what_kvlab_cannot_look_into_is_refused_before_a_weight_is_read(tmp_path, monkeypatch):
    def refuse(model):
        raise KvlabError("no layers to look into")

    monkeypatch.setattr(conversion.hookable, "layers_of", refuse)
    monkeypatch.setattr(weights, "convert", lambda *a: pytest.fail("weights were read"))
    with pytest.raises(KvlabError, match="no layers to look into"):
        models.load(tiny_gguf.write(tmp_path / "a.gguf"))


def test_a_disk_without_room_is_told_before_the_conversion(tmp_path, monkeypatch):
    path = tiny_gguf.write(tmp_path / "a.gguf")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(packs.shutil, "disk_usage", lambda place: usage._replace(free=10**7))
    with pytest.raises(KvlabError, match=r"converting a.gguf \(once, 40 MB in the cache\) needs 40 MB .* 10 MB are"):
        models.load(path)


def test_what_a_killed_conversion_left_does_not_take_the_room_of_the_next(tmp_path, own_home, monkeypatch):
    path = tiny_gguf.write(tmp_path / "a.gguf")
    target = cached.own_folder(hashlib.sha256(path.read_bytes()).hexdigest())
    stale = target.parent / f"{packs.STAGE_PREFIX}{target.name}-abcdefgh"
    stale.mkdir(parents=True)
    usage = shutil.disk_usage(tmp_path)
    # A disk that is full as long as the stage is there.
    monkeypatch.setattr(
        packs.shutil, "disk_usage", lambda place: usage._replace(free=10**7 if stale.exists() else 10**9)
    )
    assert models.load(path).n_layers > 0 and target.is_dir() and not stale.exists()


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path, own_home):
    own_home.write_text("not a folder")
    with pytest.raises(KvlabError, match="set KVLAB_HOME to a folder that you may write to"):
        models.load(tiny_gguf.write(tmp_path / "a.gguf"))


def test_a_way_of_splitting_that_is_not_known_is_told(tmp_path):
    with pytest.warns(UserWarning, match="b.gguf names the pre-tokenizer 'novel', which kvlab does not know"):
        models.load(tiny_gguf.write(tmp_path / "b.gguf", pre="novel"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models.load(tmp_path / "b.gguf")
