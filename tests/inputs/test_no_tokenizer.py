"""A model that came without a tokenizer loads from every kind of place, reads ids, and refuses text in one sentence."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from support import tiny_gguf
from support.commands import call
from support.families import FAMILIES
from support.refusals import one_sentence
from support.texts import FERRY

import kvlab
from kvlab import KvlabError, evaluation, tasks
from kvlab import compile as compiling
from kvlab.analyses.dapq import position, recall
from kvlab.bench import meters
from kvlab.inputs import corpus, models
from kvlab.traces import retrieval_heads

IDS = list(range(3, 43))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """folder(shape): a model of that shape as transformers saves it, weights and configuration alone."""
    home = tmp_path_factory.mktemp("models")

    def made(shape: str = "tiny-qwen2", **options) -> Path:
        folder = home / f"{shape}{len(options)}"
        if not folder.exists():
            models.random_lm(shape, device="cpu", dtype="float32").model.save_pretrained(folder, **options)
        return folder

    return made


@pytest.fixture(scope="module")
def bare(folders):
    """Of a family for which transformers makes a tokenizer out of nothing, to which every text has no tokens."""
    return models.load(folders(), device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_any_family_loads_without_one(folders, family):
    lm = models.load(folders(family), device="cpu")
    assert lm.tokenizer is None
    assert kvlab.capture(lm, IDS, 3, 8).length == 43
    with pytest.raises(KvlabError, match=f"{family}0 has no tokenizer, so it takes token ids instead of text"):
        kvlab.capture(lm, FERRY)


def test_sharded_weights_load_without_one(folders):
    folder = folders("tiny-qwen2", max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert models.load(folder, device="cpu").tokenizer is None


def test_a_gguf_file_loads_without_one(tmp_path, own_home):
    with_one = models.load(tiny_gguf.write(tmp_path / "a.gguf"), device="cpu")
    lm = models.load(tiny_gguf.write(tmp_path / "b.gguf", tokenizer=False), device="cpu")
    assert with_one.tokenizer is not None and lm.tokenizer is None
    ids = torch.tensor([IDS])
    assert torch.equal(lm.model(ids).logits, with_one.model(ids).logits)
    with pytest.raises(KvlabError, match="b has no tokenizer"):
        lm.encode("text")


def test_a_hub_repository_loads_without_one(folders, tmp_path, monkeypatch):
    """As the hub's client keeps it: a snapshot of links to files whose names are hashes."""
    from huggingface_hub import constants

    revision = "0" * 40
    repository = tmp_path / "models--some--thing"
    snapshot = repository / "snapshots" / revision
    for part in (snapshot, repository / "blobs", repository / "refs"):
        part.mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    for number, file in enumerate(sorted(folders().iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(os.path.relpath(repository / "blobs" / str(number), snapshot))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for lm in (models.load("some/thing", device="cpu"), models.load(snapshot, device="cpu")):
        assert lm.tokenizer is None and kvlab.capture(lm, IDS, 2, 4).length == 42


def test_settings_of_a_tokenizer_without_its_vocabulary_are_none(folders, tmp_path):
    for family, kind in (("tiny-llama-gqa", "LlamaTokenizer"), ("tiny-qwen2", "Qwen2Tokenizer")):
        folder = shutil.copytree(folders(family), tmp_path / family)
        (folder / "tokenizer_config.json").write_text(f'{{"tokenizer_class": "{kind}"}}')
        assert models.load(folder, device="cpu").tokenizer is None


def test_a_damaged_tokenizer_is_not_none(folders, tmp_path):
    folder = shutil.copytree(folders("tiny-llama-gqa"), tmp_path / "damaged")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(KvlabError, match="cannot load a model from"):
        models.load(folder)


CALLS = {
    "encode": lambda lm: lm.encode("text"),
    "encode plain": lambda lm: lm.encode("text", chat=False),
    "decode": lambda lm: lm.decode([3, 4]),
    "window": lambda lm: corpus.Document("a", FERRY).window(lm, 20),
    "tokens": lambda lm: corpus.Document("a", FERRY).tokens(lm),
    "capture": lambda lm: kvlab.capture(lm, FERRY, 4),
    "capture document": lambda lm: kvlab.capture(lm, corpus.Document("a", FERRY), 4),
    "capture several": lambda lm: kvlab.capture(lm, [FERRY, FERRY], 4, progress=False),
    "sentence": lambda lm: kvlab.capture(lm, IDS, 4, pseudo=[kvlab.policy("dapq", budget=9, content="sentence")]),
    "fidelity": lambda lm: kvlab.fidelity(lm, kvlab.policy("snapkv", budget=40), FERRY, new_tokens=4),
    "closed": lambda lm: kvlab.closed_against_open(lm, kvlab.policy("snapkv", budget=40), FERRY, new_tokens=4),
    "heads": lambda lm: retrieval_heads.measure(lm, context=64, needles=1, hay=[corpus.Document("a", FERRY)]),
    "nonsense": lambda lm: position.nonsense(lm, 4),
    "pseudo": lambda lm: recall.with_pseudo(
        lm, kvlab.capture(lm, IDS, 4), [kvlab.policy("dapq", budget=9, content="sentence")]
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_way_to_give_it_text_is_one_sentence(bare, name):
    with one_sentence(r"^tiny-qwen20 has no tokenizer, so .*; to give it one, put its"):
        CALLS[name](bare)


def test_ids_do_everywhere(bare):
    policy = kvlab.policy("snapkv", budget=20, window=8)
    assert kvlab.fidelity(bare, policy, IDS, new_tokens=4).summary["agreement"] <= 1
    assert kvlab.closed_against_open(bare, policy, IDS, new_tokens=4)
    with kvlab.compress(bare.model, policy) as session:
        bare.model.generate(torch.tensor([IDS]), max_new_tokens=4, do_sample=False)
    assert session.kept(1).shape[-1] >= 20
    assert meters.prompt(bare, 30)[1] == "random ids"


@pytest.mark.parametrize("task", tasks.tasks())
def test_eval_refuses_at_once(bare, project, capsys, monkeypatch, task):
    """With a tokenizer that finds no token in any text, the search for an example of the wanted length never ended."""
    monkeypatch.setattr("kvlab.inputs.models.load", lambda *_: bare)
    monkeypatch.setattr(corpus.packs, "pull", lambda *_a, **_k: pytest.fail("texts were pulled"))
    more = ["-p", f"folder={project}"] if task == "longbench" else []
    code, out, err = call(capsys, "eval", task, "--policies", "snapkv", "--budgets", "64", "--limit", "1", *more)
    assert (code, out) == (1, "")
    assert "tiny-qwen20 has no tokenizer" in err.splitlines()[-1]
    assert not list((project / "eval").iterdir())


def test_tables_cannot_be_learnt_from_texts_without_one(bare):
    with pytest.raises(KvlabError, match="has no tokenizer"):
        compiling.measure(bare, compiling.MarginalSettings(), [])


def test_a_text_that_has_no_tokens(lm):
    quiet = models.LM(lm.model, lambda *_a, **_k: {"input_ids": []}, "deaf", "0" * 64)
    with pytest.raises(KvlabError, match="finds no token in this text"):
        kvlab.capture(quiet, "text")


def test_evaluate_leaves_nothing(bare, tmp_path):
    plan = evaluation.plan(tasks.task("needle"), ["snapkv"], [64])
    with pytest.raises(KvlabError, match="has no tokenizer"):
        evaluation.run(bare, plan, tmp_path / "new" / "a.jsonl")
    assert list((tmp_path / "new").iterdir()) == []
