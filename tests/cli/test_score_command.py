"""`kvlab score`: JSON on stdout, or one sentence on stderr and exit code 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import call, complaint, shell

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "longbench_predictions"
GOOD = {"pred": "Paris", "answers": ["Paris", "the city of Paris"], "all_classes": None}


def lines(folder: Path, *records: object) -> str:
    path = folder / "predictions.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n", encoding="utf-8")
    return str(path)


def test_a_score_is_json_on_stdout(tmp_path, capsys):
    path = lines(tmp_path, GOOD, GOOD | {"pred": "Rome", "length": 7}, "", GOOD | {"pred": ""})
    code, out, err = call(capsys, "score", "qasper", path)
    found = json.loads(out)
    assert code == 0 and err == "" and out.count("\n") == 1
    assert (found["task"], found["score"], found["n"], found["metric"]) == ("qasper", 33.33, 3, "qa_f1")
    assert 0 <= found["low"] <= found["score"] <= found["high"] <= 100


def test_a_byte_order_mark_and_a_line_separator_inside_a_text(tmp_path, capsys):
    path = tmp_path / "bom.jsonl"
    text = json.dumps(GOOD | {"pred": "Paris\u2028"}, ensure_ascii=False)
    path.write_text("\ufeff" + text + "\r\n", encoding="utf-8")
    code, out, _ = call(capsys, "score", "qasper", str(path))
    assert code == 0 and json.loads(out)["score"] == 100


def test_a_chinese_task_says_nothing_but_its_score(tmp_path):
    done = shell(
        "score", "multifieldqa_zh", lines(tmp_path, {"pred": "北京。", "answers": ["北京"], "all_classes": None})
    )
    assert done.returncode == 0 and done.stderr == "" and json.loads(done.stdout)["score"] == 100


def test_classes_are_each_line_s_own(tmp_path, capsys):
    path = lines(
        tmp_path,
        {"pred": "Date\nfood", "answers": ["Date"], "all_classes": ["Date", "Food"]},
        {"pred": "a, b", "answers": ["a"], "all_classes": ["a", "b"]},
    )
    assert json.loads(call(capsys, "score", "trec", path)[1])["score"] == 75


BAD_LINES = [
    ('{"pred": "x", ', "not valid JSON"),
    ("Paris", "not valid JSON"),
    ("[1, 2]", "a prediction is a JSON object, not [1, 2]"),
    ("null", "a prediction is a JSON object, not null"),
    ("[" * 100_000, "line 2: "),
    ('{"pred": ' + "1" * 5000 + "}", "line 2: "),
    ({"answers": ["x"]}, "'pred' must be a text, and is missing"),
    ({"pred": None, "answers": ["x"]}, "'pred' must be a text, and is null"),
    ({"pred": 7, "answers": ["x"]}, "'pred' must be a text, and is 7"),
    ({"pred": "x"}, "'answers' must be a list of texts, and is missing"),
    ({"pred": "x", "answers": "x"}, "'answers' must be a list of texts, and is \"x\""),
    ({"pred": "x", "answers": [1]}, "'answers' must be a list of texts, and is [1]"),
    (GOOD | {"all_classes": "Date"}, "'all_classes' must be a list of texts or null"),
]


@pytest.mark.parametrize(("line", "match"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_malformed_line_is_named(tmp_path, capsys, line, match):
    said = complaint(capsys, "score", "qasper", lines(tmp_path, GOOD, line))
    assert "line 2: " in said and match in said and len(said) < 400


@pytest.mark.parametrize(
    ("task", "records", "match"),
    [
        ("qaspr", [GOOD], "did you mean 'qasper'"),
        ("everything", [GOOD], "known are: 2wikimqa"),
        ("qasper", [""], "is empty"),
        ("trec", [GOOD], "needs 'all_classes'"),
        ("passage_retrieval_en", [GOOD], "'Paragraph N'"),
    ],
)
def test_other_mistakes(tmp_path, capsys, task, records, match):
    assert match in complaint(capsys, "score", task, lines(tmp_path, *records))


def test_files_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "latin.jsonl").write_bytes(b'{"pred": "caf\xe9"}\n')
    for name, match in (("none.jsonl", "no such file"), (".", "is a directory"), ("latin.jsonl", "not UTF-8")):
        assert match in complaint(capsys, "score", "qasper", str(tmp_path / name))
    assert call(capsys, "score", "qasper")[0] == 2


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published predictions are not there")
def test_a_published_file(capsys):
    name = "llama3.1-8b-instruct__snapkv__2wikimqa"
    official = json.loads((PUBLISHED / "official_scores.json").read_text())
    found = json.loads(call(capsys, "score", "2wikimqa", str(PUBLISHED / f"{name}.jsonl"))[1])
    assert found["score"] == official[name] and found["n"] == 200
