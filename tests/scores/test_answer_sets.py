"""Sets of LongBench answers: what a folder holds, and two sets prompt by prompt."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvlab.errors import KvlabError
from kvlab.scores import answer_sets

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "morphkv_predictions"


def answer(pred: str, *right: str, **more: object) -> dict:
    return {"pred": pred, "answers": list(right or ("Paris",)), "all_classes": None, **more}


def write(path: Path, *records: dict) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_files_by_task_are_the_folder_s_own_set_and_others_name_theirs(tmp_path):
    folder = tmp_path / "mine"
    write(folder / "qasper.jsonl", answer("Paris"))
    write(folder / "2wikimqa.jsonl.gz", answer("Rome"), answer("Paris"))
    write(folder / "llama__snapkv__trec.jsonl", answer("x"))
    write(folder / "phi.jsonl.gz", answer("Paris", task="musique"), answer("Rome", task="qasper"))
    sets = answer_sets.read_sets(folder)
    assert {name: {task: len(found) for task, found in mine.items()} for name, mine in sets.items()} == {
        "mine": {"qasper": 1, "2wikimqa": 2},
        "llama__snapkv": {"trec": 1},
        "phi": {"qasper": 1, "musique": 1},
    }
    assert list(answer_sets.read_set(folder / "phi.jsonl.gz")[1]) == ["qasper", "musique"]
    with pytest.raises(KvlabError, match="holds 3 sets of answers"):
        answer_sets.read_set(folder)


def test_scores_of_a_set_and_their_mean(tmp_path):
    """Half of qasper is right and a quarter of musique: 50, 25, and 37.5 over both."""
    path = write(
        tmp_path / "all.jsonl",
        *(answer(pred, task="qasper") for pred in ("Paris", "Rome")),
        *(answer(pred, task="musique") for pred in ("Paris", "Rome", "Oslo", "Bonn")),
    )
    counted: list[str] = []
    points = answer_sets.score_set(answer_sets.read_set(path)[1], counted.append)
    rows = {row.task: row for row in answer_sets.summary(points)}
    assert {task: row.score for task, row in rows.items()} == {"qasper": 50, "musique": 25, "mean": 37.5}
    assert (rows["musique"].n, rows["mean"].n) == (4, 2) and counted == ["qasper"] * 2 + ["musique"] * 4
    assert 0 <= rows["mean"].low < 37.5 < rows["mean"].high <= 100


def test_pairs_are_matched_by_index_and_only_what_both_answer_counts():
    first = {"qasper": [answer("Paris", index=3), answer("Rome", "Rome", index=1), answer("x", index=9)]}
    second = {"qasper": [answer("Oslo", "Rome", index=1), answer("Paris", index=3)], "musique": [answer("Paris")]}
    one, mean = answer_sets.compare(first, second)
    assert (one.n, one.first, one.second, one.difference) == (2, 100, 50, 50)
    # Of two pairs, differences of 0 and 1: a resample has the mean 0, 50 or 100, and 0 and 100 each in a quarter.
    assert (one.low, one.high, one.verdict) == (0, 100, "open")
    assert (mean.task, mean.n, mean.difference) == ("mean", 1, 50)


def test_the_interval_is_that_of_paired_differences():
    """20 prompts, the first set right on 12 more: the differences have the mean 0.6 and the error 0.11."""
    right = [answer("Paris") for _ in range(20)]
    second = [answer("Paris" if number < 8 else "Rome") for number in range(20)]
    one = answer_sets.compare({"qasper": right}, {"qasper": second})[0]
    half = 1.96 * 100 * (0.6 * 0.4 / 20) ** 0.5
    assert (one.low, one.high) == pytest.approx((60 - half, 60 + half), abs=3) and one.verdict == "ahead"
    assert answer_sets.compare({"qasper": second}, {"qasper": right})[0].verdict == "behind"


@pytest.mark.parametrize(
    ("name", "record", "match"),
    [
        ("mine.jsonl", answer("x"), "the file's name is no LongBench task, and the line has no field 'task'"),
        ("mine.jsonl", answer("x", task="qaspr"), "did you mean 'qasper'"),
        ("mine.jsonl", answer("x", task=7), "no field 'task'"),
        ("qasper.jsonl", answer("x", task="trec"), "the line's task is 'trec', the file's is 'qasper'"),
        ("mine.txt", answer("x"), "holds no .jsonl or .jsonl.gz files"),
    ],
)
def test_a_folder_without_answers_is_refused(tmp_path, name, record, match):
    write(tmp_path / "folder" / name, record)
    with pytest.raises(KvlabError, match=match):
        answer_sets.read_sets(tmp_path / "folder")


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        ({"qasper": [answer("x")]}, {"musique": [answer("x")]}, "no task in common"),
        ({"qasper": [answer("x")]}, {"qasper": [answer("x")] * 2}, "1 answers in one set and 2 in the other"),
        ({"qasper": [answer("x", index=1)]}, {"qasper": [answer("x", index=2)]}, "no 'index' is in both"),
        ({"qasper": [answer("x", index=1)] * 2}, {"qasper": [answer("x", index=1)]}, "is missing or stands twice"),
        (
            {"qasper": [answer("x")]},
            {"qasper": [answer("x", "Rome")]},
            "predictions 1 and 1: the reference answers differ",
        ),
        ({"trec": [answer("x")]}, {"trec": [answer("x")]}, "trec, prediction 1: .* needs 'all_classes'"),
    ],
)
def test_sets_that_cannot_be_compared_are_refused(first, second, match):
    with pytest.raises(KvlabError, match=match):
        answer_sets.compare(first, second)


@pytest.mark.parametrize("data", [b"no gzip", gzip.compress(b"{}" * 100)[:-9]], ids=["other", "cut"])
def test_a_damaged_gzip_file_is_refused(tmp_path, data):
    path = tmp_path / "answers.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(KvlabError, match="is no whole gzip file"):
        answer_sets.read_sets(path)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published predictions are not there")
def test_the_authors_answers_of_phi_4_are_not_those_of_their_table():
    """Table 3 prints 22.6, 19.3, 6.2 and 64.3 for MorphKV with Phi-4."""
    read = {each: answer_sets.read_set(PUBLISHED / f"phi4__{each}.jsonl.gz")[1] for each in ("morphkv_2048", "snapkv")}
    tasks = ("2wikimqa", "hotpotqa", "musique", "passage_retrieval_en")
    rows = answer_sets.compare(*({task: found[task] for task in tasks} for found in read.values()))
    assert [round(row.first, 1) for row in rows[:-1]] == [21.0, 17.7, 5.2, 63.7]
    assert [round(row.second, 1) for row in rows[:-1]] == [22.3, 19.5, 5.2, 63.9]
    assert {row.verdict for row in rows} == {"open"}


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published predictions are not there")
def test_a_file_with_fewer_answers_is_compared_where_it_has_some():
    read = [answer_sets.read_set(PUBLISHED / f"llama3.1-8b-instruct__{each}.jsonl.gz")[1] for each in SETTINGS]
    task = "passage_retrieval_en"
    assert [len(found[task]) for found in read] == [200, 69]
    assert answer_sets.compare(*({task: found[task]} for found in read))[0].n == 69


SETTINGS = ("morphkv_2048", "snapkv")
