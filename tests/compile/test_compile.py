"""`kvlab compile`: tables for other models, the command, and what it no longer takes."""

from __future__ import annotations

import numpy as np
import pytest
from support.commands import call, complaint
from support.refusals import one_sentence
from support.tensors import layer

import kvlab
from kvlab import compile as compiling
from kvlab.errors import KvlabError
from kvlab.methods._base.lookup import DecisionTables
from kvlab.traces.trace import Trace


def test_mapping_by_depth():
    risk = [[[0.0, 0.2]], [[0.4, 0.2]]]
    two = DecisionTables(heads=[[1.0, 2.0], [0.5, 1.0]], risk=risk)
    assert two.mapped(2, 2) == two
    three = two.mapped(3, 2)
    assert np.allclose(three.heads, [[1, 2], [0.75, 1.5], [0.5, 1]])
    assert np.allclose(three.risk, [[[0, 0.2]], [[0.2, 0.2]], [[0.4, 0.2]]])
    assert two.mapped(2, 4).heads == [[1, 1, 2, 2], [0.5, 0.5, 1, 1]] and two.mapped(1, 1).heads == [[1.5]]
    with pytest.raises(KvlabError, match="at least 1 layer"):
        two.mapped(0, 4)
    with pytest.raises(KvlabError, match=r"nothing|neither"):
        DecisionTables(heads=None, risk=None).mapped(4, 4)


@pytest.mark.parametrize("layers", [3, 7, 30, 64])
def test_mapping_keeps_what_rises_with_depth_rising(layers):
    rng = np.random.default_rng(layers)
    risk = np.sort(rng.random((12, 4, 2)), 0)
    found = np.array(DecisionTables(heads=None, risk=risk.tolist()).mapped(layers, 9).risk)
    assert found.shape == (layers, 4, 2) and (np.diff(found, axis=0) >= 0).all()
    assert np.allclose(found[0], risk[0]) and np.allclose(found[-1], risk[-1])


def test_tables_of_another_shape_are_refused_with_the_way_out():
    trace = Trace.from_tensors(*layer(1, 4, 2, prompt=80, layers=2), 80)
    three = DecisionTables(heads=[[1.0, 1.0, 2.0, 2.0]] * 3, risk=None)
    with one_sentence("kvlab compile --from"):
        kvlab.replay(trace, kvlab.policy("compilerkv", budget=20, window=16, utility_window=8).using(three))


def test_a_map_is_written_as_a_file_of_the_other_model(capsys, monkeypatch, tmp_path, reader):
    monkeypatch.setattr("kvlab.inputs.models.load", lambda *_: reader)
    monkeypatch.chdir(tmp_path)
    compiling.write(DecisionTables(model="mine", heads=[[1.0, 2.0]], risk=[[[0.5]]]), tmp_path / "mine.json")
    code, out, _ = call(capsys, "compile", "--from", "mine.json", "--out", "mapped.json")
    mapped = DecisionTables.load(tmp_path / "mapped.json")
    assert code == 0 and out == "mapped.json\n" and (mapped.model, mapped.mapped_from) == (reader.name, "mine")
    assert mapped.heads == [[1.0, 1.0, 2.0, 2.0]] * 2 and mapped.risk == [[[0.5]]] * 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--budget", "0"], 2, "budget"),
        (["--contexts", "0"], 2, "contexts"),
        (["--out", "."], 1, "folder"),
        (["--out", "nowhere/x.json"], 1, "folder"),
        (["-p", "lenghts=[300]"], 1, "lengths"),
        (["--budget", "4000"], 1, "fits the budget"),
        (["--documents", "sotu/1888x"], 1, "sotu/1888"),
        (["--from", "smollm2-135"], 1, "smollm2-135m"),
        (["--model", "smollm2-135"], 1, "smollm2-135m"),
        (["--samples", "8"], 1, "leave out samples: `kvlab compile` no longer learns"),
        (["--risk-samples", "8"], 1, "leave out risk_samples: `kvlab compile` no longer learns"),
        (["--alpha", "1"], 1, "leave out alpha: `kvlab compile` no longer learns"),
        (["-p", "penalty=0.1"], 1, "leave out penalty: `kvlab compile` no longer learns"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, arguments, code, said):
    assert said in complaint(capsys, "compile", *arguments, code=code)


@pytest.mark.parametrize("name", ["learn", "Learnt", "load", "Samples", "Settings"])
def test_names_of_joint_trials_say_that_they_have_ended(name):
    with one_sentence(f"kvlab.compile.{name} was of joint trials, which have ended"):
        getattr(compiling, name)
    with pytest.raises(AttributeError, match="no attribute 'lern'"):
        _ = compiling.lern


def test_help_names_its_options(capsys):
    code, out, _ = call(capsys, "compile", "--help")
    assert code == 0 and all(option in out for option in ("--documents", "--budget", "--from", "Examples"))
    assert "--samples" not in out and "--alpha" not in out
