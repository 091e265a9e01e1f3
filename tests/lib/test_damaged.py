"""Damaged files: whatever bytes a loader meets, it answers with one sentence and leaves nothing half-written."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import tiny_gguf
from support.longbench import record
from support.measured_files import head_scores
from support.replaying import trace

import kvlab
from kvlab import KvlabError, evaluation, papers
from kvlab.inputs import longbench_records, models
from kvlab.methods._base import lookup
from kvlab.scores import predictions
from kvlab.workbench import experiments

EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# A GGUF file is converted by another library on every try.
FEW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

RECORD = record("qasper", context="It was me.")


@st.composite
def damage(draw, longest=4000):
    """What happens to a file: the end is missing, bytes are others, or something is put in between."""
    kind = draw(st.sampled_from(["cut", "flip", "insert", "replace"]))
    return kind, draw(st.integers(0, longest)), draw(st.binary(min_size=1, max_size=12))


def damaged(content: bytes, how) -> bytes:
    kind, place, bytes_ = how
    place %= max(1, len(content))
    if kind == "cut":
        return content[:place]
    if kind == "insert":
        return content[:place] + bytes_ + content[place:]
    if kind == "replace":
        return bytes_ * (1 + place % 3)
    return content[:place] + bytes([content[place] ^ (bytes_[0] or 1)]) + content[place + 1 :] if content else bytes_


def loads_or_says_why(folder, load):
    """Loading works, or says in one line what is wrong; the folder holds what it held."""
    before = sorted(path.name for path in folder.iterdir())
    try:
        load()
    except KvlabError as error:
        assert str(error).strip() and "\n" not in str(error)
    assert sorted(path.name for path in folder.iterdir()) == before


class Originals(dict):
    """By file name; too long to be printed with a failing example."""

    def __repr__(self):
        return "Originals()"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """One good file of each kind."""
    folder = tmp_path_factory.mktemp("good")
    trace().save(folder / "trace.safetensors")
    tiny_gguf.write(folder / "tiny.gguf")
    grid = [[0.5, 0.25], [0.75, 1.0]]
    lookup.HeadScores(**head_scores(grid, 1)).save(folder / "heads.json")
    (folder / "decisions.json").write_text(json.dumps({"heads": grid, "risk": [[[0.1, 0.2]], [[0.3, 0.4]]]}))
    (folder / "records.jsonl").write_text("\n".join(json.dumps(RECORD) for _ in range(3)))
    (folder / "predictions.jsonl").write_text(
        "\n".join(json.dumps({"pred": "me", "answers": ["me"], "all_classes": None}) for _ in range(3))
    )
    (folder / "experiment.yaml").write_text(
        yaml.safe_dump(
            {"notebook": "notebooks/a.ipynb", "description": "d", "parameters": {"seed": 0}, "grid": {"x": [1, 2]}}
        )
    )
    claim = {
        "id": "a.b",
        "where": "table 1",
        "summary": "s",
        "metric": "m",
        "paper_value": 1.0,
        "experiment": "e",
        "direction": {"kind": "greater", "than": 0.0},
        "size": {"kind": "within", "of": "factor", "tolerance": 2},
    }
    (folder / "paper.yaml").write_text(yaml.safe_dump({"name": "a", "label": "A", "title": "T", "claims": [claim]}))
    return Originals({path.name: path.read_bytes() for path in folder.iterdir()})


def load_experiment(path):
    """As in a project: experiments are read by their names."""
    experiments.load("experiment")


LOADERS = {
    "trace.safetensors": kvlab.Trace.load,
    "heads.json": lambda path: lookup.read(path, lookup.HeadScores),
    "decisions.json": lambda path: lookup.read(path, lookup.DecisionTables),
    "records.jsonl": lambda path: list(longbench_records.read(path)),
    "predictions.jsonl": predictions.read_predictions,
    "paper.yaml": papers.load_file,
    "experiment.yaml": load_experiment,
}


@pytest.mark.parametrize("name", LOADERS)
@EXAMPLES
@given(how=damage())
def test_a_damaged_file_is_one_sentence(name, how, originals, tmp_path, monkeypatch):
    folder = tmp_path / "experiments"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("KVLAB_ROOT", str(tmp_path))
    path = folder / name
    path.write_bytes(damaged(originals[name], how))
    loads_or_says_why(folder, lambda: LOADERS[name](path))


@pytest.mark.parametrize("name", LOADERS)
def test_a_good_file_loads(name, originals, tmp_path, monkeypatch):
    """Or the damage above would test nothing."""
    (tmp_path / "experiments").mkdir()
    monkeypatch.setenv("KVLAB_ROOT", str(tmp_path))
    path = tmp_path / "experiments" / name
    path.write_bytes(originals[name])
    LOADERS[name](path)


@FEW
@given(how=damage(longest=60_000))
def test_a_damaged_gguf_file_loads_or_says_why(how, originals, tmp_path, monkeypatch, tmp_path_factory):
    # Damage that only changes a weight loads, and is converted.
    monkeypatch.setenv("KVLAB_HOME", str(tmp_path_factory.getbasetemp() / "home-of-damaged"))
    # A name of its own for each: the reader maps the file, which must not change under it.
    path = tmp_path / f"{abs(hash(how))}.gguf"
    path.write_bytes(damaged(originals["tiny.gguf"], how))
    loads_or_says_why(tmp_path, lambda: models.load(path))


@EXAMPLES
@given(tail=st.binary(max_size=60))
def test_answers_with_a_damaged_end_are_read_up_to_it(tail, tmp_path):
    """A run that was killed while it wrote leaves half a line, which the next one mends."""
    path = tmp_path / "answers.jsonl"
    path.write_bytes(tail)
    loads_or_says_why(tmp_path, lambda: evaluation.read(path))
