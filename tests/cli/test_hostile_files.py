"""Files and names that mean harm: no code of theirs runs, no path leads out, and each gets one sentence."""

from __future__ import annotations

import json
import os
import struct
import sys

import pytest
import safetensors.torch
import torch
from support.measured_files import head_scores
from support.refusals import one_sentence
from support.replaying import tensors

import kvlab
from kvlab import KvlabError, evaluation
from kvlab.compile import log
from kvlab.inputs import corpus, longbench_records, models
from kvlab.lib import files
from kvlab.methods._base import lookup
from kvlab.scores import predictions
from kvlab.workbench.experiments import content_key, inputs
from kvlab.workbench.experiments.notebooks import parameters_of

DEEP, LONG_NUMBER, HALF = "[" * 200_000, '{"a": ' + "9" * 5000 + "}", '{"a": "x\\ud800"}'


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
        with one_sentence():
            load()


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
    with one_sentence("line 1 is no answer"):
        evaluation.read(path)


# --- names ---


@pytest.mark.parametrize("name", ["a\0b.json", "x" * 5000, "~no-such-user/x.json", "."])
def test_names_that_no_file_has(name, tmp_path):
    for load in (
        lambda: list(longbench_records.read(name)),
        lambda: lookup.HeadScores.load(name),
        lambda: lookup.DecisionTables.load(name),
        lambda: models.load(name),
        lambda: corpus.document(name),
        lambda: predictions.read_predictions(name),
    ):
        with pytest.raises(KvlabError):
            load()
    assert content_key._fingerprint(name) is None
    if "/" not in name and name != ".":  # a folder that is there, and what may be a hub's
        with pytest.raises(KvlabError):
            inputs.prepare([{"model": name}])


def test_a_name_with_a_nul_is_not_written():
    queries, keys, values, _ = tensors()
    with one_sentence("cannot write"):
        kvlab.Trace.from_tensors(queries, keys, values, 48).save("a\0b")


def test_a_file_whose_name_is_no_text_is_refused(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")
    with open(path, "w") as file:
        file.write("a text")
    with one_sentence("rename it"):
        corpus.document(path)


def test_a_module_is_found_without_being_run():
    before = set(sys.modules)
    assert "MIMEText" in corpus.document("code/email.mime.text").text
    with one_sentence():
        corpus.document("code/antigravity.x")
    with one_sentence():
        corpus.document("code/email.../os")
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
        ({}, {"hidden": torch.zeros(2, 9, 8)}),
        ({}, {"pseudo/../../x": torch.zeros(2)}),
        ({}, {"evil": torch.ones(1)}),
    ],
)
def test_a_whole_file_whose_parts_do_not_fit_is_no_trace(header, parts, tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(GOOD, path, {"kvlab": json.dumps(HEADER)})
    assert kvlab.Trace.load(path).steps == 3
    safetensors.torch.save_file(GOOD | parts, path, {"kvlab": json.dumps(HEADER | header)})
    with one_sentence("is damaged or not a kvlab trace"):
        kvlab.Trace.load(path)


@pytest.mark.parametrize("text", [DEEP, '{"prompt_length": ' + "9" * 5000 + "}"], ids=["deep", "long number"])
def test_a_header_that_cannot_be_read(text, tmp_path):
    safetensors.torch.save_file(GOOD, tmp_path / "a", {"kvlab": text})
    with one_sentence("damaged"):
        kvlab.Trace.load(tmp_path / "a")


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
        with one_sentence("damaged"):
            kvlab.Trace.load(tmp_path / "a")


@pytest.mark.parametrize("scores", [[[-0.1, 0.5]], [[0.5, 1e300]]])
def test_scores_are_shares(scores, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(head_scores(scores, 1)))
    with one_sentence(r"scores\.0\.[01]"):
        lookup.HeadScores.load(tmp_path / "a.json")
