"""`kvlab score ANSWERS`, and `--against` others: tables of at most 80 columns, or JSON."""

from __future__ import annotations

import json

import pytest
from support.commands import call, complaint

RIGHT = {"pred": "Paris", "answers": ["Paris"], "all_classes": None}
WRONG = {**RIGHT, "pred": "Rome"}


@pytest.fixture
def answers(tmp_path):
    """Two files: one right throughout, one in the first of four answers."""
    for name, found in (("good", [RIGHT] * 4), ("poor", [RIGHT, WRONG, WRONG, WRONG])):
        records = [{**each, "task": "qasper", "index": number} for number, each in enumerate(found)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return tmp_path


def test_a_folder_has_a_table_for_each_set(answers, capsys):
    code, out, err = call(capsys, "score", str(answers))
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and err == "" and max(map(len, out.splitlines())) <= 80
    assert [line[0] for line in lines] == ["good", "task", "qasper", "mean", "poor", "task", "qasper", "mean"]
    assert lines[2][1:3] == ["4", "100.00"] and lines[6][1:3] == ["4", "25.00"]


def test_two_sets_side_by_side(answers, capsys):
    code, out, _ = call(capsys, "score", str(answers / "poor.jsonl"), "--against", str(answers / "good.jsonl"))
    lines = out.splitlines()
    assert code == 0 and lines[:2] == ["A: poor", "B: good"] and max(map(len, lines)) <= 80
    assert lines[3].split()[:5] == ["qasper", "4", "25.00", "100.00", "-75.00"] and lines[3].endswith("behind")
    assert lines[-1] == "A is ahead on 0 of 1 tasks and behind on 1; 0 stay open."


def test_both_as_json(answers, capsys):
    one = json.loads(call(capsys, "score", str(answers / "poor.jsonl"), "--json")[1])
    assert one[0].items() >= {"answers": "poor", "task": "qasper", "n": 4, "score": 25}.items()
    assert one[1]["task"] == "mean" and one[1]["n"] == 1
    arguments = ("score", str(answers / "good.jsonl"), "--against", str(answers / "poor.jsonl"), "--json")
    first = json.loads(call(capsys, *arguments)[1])[0]
    assert first.items() >= {"answers": "good", "against": "poor", "difference": 75, "verdict": "ahead"}.items()
    assert first["low"] > 0


def test_mistakes(answers, capsys):
    good = str(answers / "good.jsonl")
    assert "there is no file or folder" in complaint(capsys, "score", str(answers / "none"))
    assert "2 sets of answers (good, poor)" in complaint(capsys, "score", good, "--against", str(answers))
    assert "leave out the name of the task" in complaint(capsys, "score", "qasper", good, "--against", good, code=2)
    assert "name the file of answers to qasper" in complaint(capsys, "score", "qasper", code=2)
