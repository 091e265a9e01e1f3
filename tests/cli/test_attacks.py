"""Files and names that mean harm: no code of theirs runs, no path leads out, and each gets one sentence."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support import tiny_gguf
from support.commands import call
from support.projects import EXPERIMENT, cell, experiment, notebook, project  # noqa: F401
from support.replaying import tensors

import kvlab
from kvlab import KvlabError, evaluation
from kvlab.compile import log
from kvlab.inputs import corpus, longbench_records, models, packs
from kvlab.inputs.models import conversion
from kvlab.lib import files, yamls
from kvlab.methods import lookup
from kvlab.scores import predictions
from kvlab.workbench import experiments
from kvlab.workbench.experiments import content, inputs
from kvlab.workbench.experiments.notebooks import parameters_of
from kvlab.workbench.report import page
from kvlab.workbench.store import database, tracking

ROOT = Path(__file__).parents[2]
DEEP, LONG_NUMBER, HALF = "[" * 200_000, '{"a": ' + "9" * 5000 + "}", '{"a": "x\\ud800"}'


def refused(load, match=None):
    """That `load` ends in one line of ours."""
    with pytest.raises(KvlabError, match=match) as caught:
        load()
    assert "\n" not in str(caught.value)


def pickled(path):
    """A pickle that makes a folder where it is loaded, written by hand."""
    return b"cos\nmkdir\n(V" + os.fsencode(path) + b"\ntR."


# --- JSON ---


@pytest.mark.parametrize("text", [DEEP, LONG_NUMBER, HALF], ids=["deep", "long number", "half a character"])
def test_json_that_python_has_other_errors_for(text, tmp_path):
    with pytest.raises(json.JSONDecodeError):
        files.parsed(text)
    path = tmp_path / "a.json"
    path.write_text(text + "\n")
    for load in (
        lambda: list(longbench_records.read(path)),
        lambda: predictions.read_predictions(path),
        lambda: evaluation.read(path),
        lambda: log.Journal.open(path).__enter__(),
        lambda: lookup.read(path, lookup.HeadScores),
        lambda: lookup.read(path, lookup.DecisionTables),
        lambda: parameters_of(path),
    ):
        refused(load)


def test_whole_characters_of_two_escapes_pass():
    assert files.parsed('"\\ud83d\\ude00 \\\\ud800"') == "😀 \\ud800"


@pytest.mark.parametrize("change", [{"key": [1]}, {"scores": 1}, {"prompt_tokens": "many"}, {"extra": 1}, {"task": 5}])
def test_an_answer_of_wrong_types_is_refused(change, tmp_path):
    answer = {
        "key": "k",
        "task": "t",
        "example": "e",
        "policy": "p",
        "budget": 4,
        "compress_at": "prompt",
        "prediction": "",
        "answers": [],
        "scores": {"score": 1},
        "metric": "score",
        "prompt_tokens": 1,
        "generated_tokens": 1,
        "prefill_seconds": 1,
        "seconds": 1,
        "kv_bytes": 1,
        "aux_bytes": 1,
    }
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(answer) + "\n")
    (found,) = evaluation.read(path)
    assert type(found.budget) is int and found.scores == {"score": 1.0}
    path.write_text(json.dumps(answer | change) + "\n")
    refused(lambda: evaluation.read(path), "line 1 is no answer")


# --- names ---


@pytest.mark.parametrize("name", ["a\0b.json", "x" * 5000, "~no-such-user/x.json", "."])
def test_names_that_no_file_has(name, tmp_path):
    for load in (
        lambda: list(longbench_records.read(name)),
        lambda: lookup.HeadScores.load(name),
        lambda: lookup.DecisionTables.load(name),
        lambda: log.load(name),
        lambda: models.load(name),
        lambda: corpus.document(name),
        lambda: predictions.read_predictions(name),
    ):
        with pytest.raises(KvlabError):
            load()
    assert content._fingerprint(name) is None
    if "/" not in name and name != ".":  # a folder that is there, and what may be a hub's
        with pytest.raises(KvlabError):
            inputs.prepare([{"model": name}])


def test_a_name_with_a_nul_is_not_written():
    queries, keys, values, _ = tensors()
    refused(lambda: kvlab.Trace.from_tensors(queries, keys, values, 48).save("a\0b"), "cannot write")


def test_a_file_whose_name_is_no_text_is_refused(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")
    with open(path, "w") as file:
        file.write("a text")
    refused(lambda: corpus.document(path), "rename it")


def test_a_module_is_found_without_being_run():
    before = set(sys.modules)
    assert "MIMEText" in corpus.document("code/email.mime.text").text
    refused(lambda: corpus.document("code/antigravity.x"))
    refused(lambda: corpus.document("code/email.../os"))
    assert not {"antigravity"} & (set(sys.modules) - before)


# --- traces ---

GOOD = {"queries": torch.zeros(2, 4, 7, 8), "keys": torch.zeros(2, 2, 9, 8), "values": torch.zeros(2, 2, 9, 8)}
HEADER = {"format": "kvlab-trace-1", "prompt_length": 6, "scaling": None, "meta": {}}


@pytest.mark.parametrize(
    ("header", "parts"),
    [
        ({"prompt_length": "6"}, {}),
        ({"prompt_length": 0}, {}),
        ({"prompt_length": 6.5}, {}),
        ({"scaling": "x"}, {}),
        ({"scaling": float("nan")}, {}),
        ({"meta": [1]}, {}),
        ({"meta": None}, {}),
        ({"meta": {"model": {"a": 1}}}, {}),
        ({}, {"queries": torch.zeros(2, 4, 7)}),
        ({}, {"queries": torch.zeros(2, 3, 7, 8)}),
        ({}, {"values": torch.zeros(2, 2, 5, 8)}),
        ({}, {"keys": torch.zeros(2, 2, 9, 8, dtype=torch.int64)}),
        ({}, {"keys": torch.zeros(2, 0, 9, 8), "values": torch.zeros(2, 0, 9, 8)}),
        ({}, {"ids": torch.zeros(9)}),
        ({}, {"ids": torch.zeros(3, dtype=torch.int64)}),
        ({}, {"ids": torch.full((9,), -1)}),
        ({}, {"nll": torch.zeros(3, 3)}),
        ({}, {"pre_queries": torch.zeros(1, 1, 1, 1)}),
        ({}, {"accumulated": torch.zeros(2, 4, 9)}),
        ({}, {"pseudo/../../x": torch.zeros(2)}),
        ({}, {"evil": torch.ones(1)}),
    ],
)
def test_a_whole_file_whose_parts_do_not_fit_is_no_trace(header, parts, tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(GOOD, path, {"kvlab": json.dumps(HEADER)})
    assert kvlab.Trace.load(path).steps == 3
    safetensors.torch.save_file(GOOD | parts, path, {"kvlab": json.dumps(HEADER | header)})
    refused(lambda: kvlab.Trace.load(path), "is damaged or not a kvlab trace")


@pytest.mark.parametrize("text", [DEEP, '{"prompt_length": ' + "9" * 5000 + "}"], ids=["deep", "long number"])
def test_a_header_that_cannot_be_read(text, tmp_path):
    safetensors.torch.save_file(GOOD, tmp_path / "a", {"kvlab": text})
    refused(lambda: kvlab.Trace.load(tmp_path / "a"), "damaged")


@pytest.mark.parametrize(
    "tensors_",
    [
        {"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 64]}},
        {
            "a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
            "b": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
        },
    ],
)
def test_absurd_offsets_and_lengths(tensors_, tmp_path):
    header = json.dumps({"__metadata__": {"kvlab": json.dumps(HEADER)}, **tensors_}).encode()
    for content_ in (struct.pack("<Q", len(header)) + header + bytes(64), struct.pack("<Q", 2**63 - 1) + b"{}"):
        (tmp_path / "a").write_bytes(content_)
        refused(lambda: kvlab.Trace.load(tmp_path / "a"), "damaged")


@pytest.mark.parametrize("scores", [[[-0.1, 0.5]], [[0.5, 1e300]]])
def test_scores_are_shares(scores, tmp_path):
    about = {
        "model": "m",
        "sha256": "0",
        "n_layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "contexts": [1],
        "depths": [0.5],
        "seed": 0,
        "kvlab": "0",
        "scores": scores,
    }
    (tmp_path / "a.json").write_text(json.dumps(about))
    refused(lambda: lookup.HeadScores.load(tmp_path / "a.json"), r"scores\.0\.[01]")


def test_a_log_is_one_file_that_is_parquet(tmp_path):
    import pandas

    (tmp_path / "a.parquet").write_bytes(pickled(tmp_path / "ran"))
    refused(lambda: log.load(tmp_path / "a.parquet"), "is no log")
    refused(lambda: log.load(tmp_path), "no such file")
    pandas.DataFrame({"phase": [], "context": []}).to_parquet(tmp_path / "b.parquet")
    refused(lambda: log.load(tmp_path / "b.parquet"), "nothing in it")
    assert not (tmp_path / "ran").exists()


# --- models ---


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with a model of a few kilobytes, its tokenizer and template."""
    file = tiny_gguf.write(tmp_path_factory.mktemp("file") / "tiny.gguf")
    folder = tmp_path_factory.mktemp("good")
    conversion._convert(*conversion._looked_at(file), folder, "tiny", progress=False)
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
    refused(lambda: models.load(folder), "pickled ones are not read|is no index")


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"weight_map": []}', "\0", DEEP])
def test_an_index_that_is_none(folder, text):
    with_index(folder, "w.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    refused(lambda: models.load(folder), "is no index")


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
    refused(lambda: models.load(folder), "cannot load a model from")


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
    refused(lambda: lm.encode("hello"), "chat template of .* fails")
    assert not (tmp_path / "ran").exists() and lm.encode("hello", chat=False).numel()


def test_a_trace_cannot_lead_to_a_tokenizer_elsewhere(good, monkeypatch):
    monkeypatch.chdir(good.parent)
    assert models.tokenizer(good.name) is not None
    for name in (str(good), f"../{good.parent.name}/{good.name}", f"./{good.name}", "", ".", "..", "~", "a\0b"):
        assert models.tokenizer(name) is None
    monkeypatch.chdir(good)
    assert [models.tokenizer(name) for name in ("", ".", "..")] == [None] * 3


# --- YAML and notebooks ---


@pytest.mark.parametrize(
    "text",
    [
        "a: !!int ''",
        "a: !!bool maybe",
        "a: !!timestamp x",
        "a: 0x" + "f" * 5000,
        'a: "\\ud800"',
        'a: ["x\\ud800"]',
        "a: " + "1" * 600_000,
    ],
)
def test_yaml_that_its_reader_has_other_errors_for(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    refused(lambda: yamls.load(tmp_path / "a.yaml"), r"^a\.yaml")


@pytest.mark.parametrize(
    "content_",
    [
        b"[" * 200_000,
        b"[]",
        {"cells": 5},
        {"cells": [1]},
        {"cells": [{"metadata": None}]},
        {"cells": [{"metadata": {"tags": 5}}]},
        {"cells": [{"source": [1]}]},
        {
            "cells": [
                {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": "a = " + "-" * 100_000 + "1"}
            ]
        },
    ],
)
def test_a_notebook_that_is_none(content_, tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_bytes(content_ if isinstance(content_, bytes) else json.dumps(content_).encode())
    refused(lambda: parameters_of(path))
    refused(lambda: parameters_of(tmp_path), "missing")


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ("{things: !!pairs [a: /etc/passwd]}", "leaves the project"),
        ("{things: [{/etc/passwd: 1}]}", "leaves the project"),
        ("{name: texts/passwd}", "leaves the project"),
        ("{things: [{true: 1}]}", "a key is a text"),
        ("{things: !!set {a}}", "does not fit into JSON"),
        ("{name: !!binary aGVsbG8=}", "must be a text|does not fit"),
        ("{scale: .nan}", "no plain number"),
    ],
)
def test_parameters_of_a_yaml_arrive_as_they_are_or_not_at_all(project, parameters, match):  # noqa: F811
    notebook(project / "notebooks" / "toy.ipynb", cell("things = []\nname = 'x'\nscale = 0.5", "parameters"))
    (project / "texts").symlink_to("/etc")
    (project / "experiments" / f"{EXPERIMENT}.yaml").write_text(
        f"notebook: notebooks/toy.ipynb\ndescription: d\nparameters: {parameters}\n"
    )
    refused(lambda: experiments.jobs(EXPERIMENT), match)


def test_a_notebook_that_a_link_leads_to_stays_in_the_project_or_is_refused(project, tmp_path_factory):  # noqa: F811
    away = tmp_path_factory.mktemp("away") / "toy.ipynb"
    shutil.copy(project / "notebooks" / "toy.ipynb", away)
    (project / "notebooks" / "out.ipynb").symlink_to(away)
    (project / "notebooks" / "in.ipynb").symlink_to("toy.ipynb")
    experiment(project, notebook="notebooks/in.ipynb")
    assert experiments.jobs(EXPERIMENT)
    experiment(project, notebook="notebooks/out.ipynb")
    refused(lambda: experiments.load(EXPERIMENT), "leaves the project")


def test_a_grid_of_a_million_jobs_is_refused_at_once(project):  # noqa: F811
    experiment(project, grid={"seed": list(range(1000)), "reduction": [n / 1000 for n in range(1000)]})
    refused(lambda: experiments.jobs(EXPERIMENT), "1,000,000 jobs")


@pytest.mark.parametrize("value", ["9" * 5000, "2001-13-45", "!!bool x", "[" * 3000, "\udcff", "~no-such-user/x"])
def test_odd_texts_from_the_command_line(project, capsys, value):  # noqa: F811
    code, _, err = call(capsys, "run", EXPERIMENT, "-p", f"seed={value}")
    assert code == 1 and ("whole number" in err or "half a character" in err)
    assert err.count("\n") == 1 and len(err) < 400
    code, _, err = call(capsys, "eval", "needle", "-p", f"seed={value}", "--model", "random:tiny-llama-gqa")
    assert code in (1, 2) and err.count("\n") == 1 and "KVLAB_DEBUG" not in err


def test_half_a_character_reaches_no_notebook(project):  # noqa: F811
    refused(lambda: experiments.jobs(EXPERIMENT, overrides={"names": ["a\udcff"]}), "half a character")


# --- the command ---


def test_a_name_in_a_message_neither_breaks_the_line_nor_moves_the_cursor(capsys):
    code, out, err = call(capsys, "score", "qasper", "a\nb\x1b[2J\u202ec\udcff")
    assert (code, out) == (1, "")
    assert err == "kvlab: cannot read a b\\x1b[2J\\u202ec\\udcff: no such file or directory\n"


def test_brackets_in_names_are_no_markup(project, capsys):  # noqa: F811
    experiment(project, name="[red]odd[bold]", description="A [/b] and a \\[c].")
    code, out, _ = call(capsys, "list", "experiments")
    assert code == 0 and "[red]odd[bold]" in out and "A [/b] and a \\[c]." in out


def test_output_that_cannot_be_written(tmp_path):
    command = [sys.executable, "-m", "kvlab", "list", "packs"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "kvlab: No space left on device\n")


def test_a_command_whose_output_was_closed_and_whose_folder_is_gone(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    kvlab_ = f"{sys.executable} -m kvlab"
    order = f"cd {gone} && rmdir {gone} && {kvlab_} list packs >&- && {kvlab_} list experiments"
    done = subprocess.run(
        order, shell=True, text=True, capture_output=True, env=os.environ | {"PYTHONPATH": os.fspath(ROOT)}
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("kvlab: the folder that this runs in is gone")


def test_a_damaged_figure_is_named_with_its_run(project, tmp_path):  # noqa: F811
    run = tracking.create_run(database.client(), EXPERIMENT, {}, {"kvlab.kind": "job", "model": "toy"}, "toy")
    run.log({"reduction/0.20": 0.6})
    (tmp_path / "curve.png").write_bytes(b"\x89PNG\r\n\x1a\nno picture")
    run.client.log_artifact(run.id, str(tmp_path / "curve.png"), "figures")
    run.finish()
    refused(page.write, f"figures/curve.png of run {run.id} is damaged")
    assert not (project / "report").exists()


def test_answers_are_not_written_over_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "a.jsonl"):
        refused(lambda path=path: evaluation.run(None, None, path), "is a folder|cannot write")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
