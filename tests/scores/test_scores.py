"""LongBench's metrics: hand-made cases with their worked-out values, properties, and the published scores."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import scores
from kvlab.errors import KvlabError

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "longbench_predictions"
CLASSES = ["Date", "Other entity", "Other location", "Individual", "Date of birth", "Order, rank", "Order"]
ROUGE_ONE = 1 / (1 + 0.5e-8)  # the rouge package adds 1e-8 to precision + recall


def f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall)


QA_F1 = [
    ("Paris", "Paris", 1),
    ("paris.", "Paris", 1),
    ("The Eiffel Tower!", "eiffel tower", 1),
    ("an answer", "the answer", 1),
    ("Paris, in France", "Paris", f1(1 / 3, 1)),
    ("Paris", "Paris in France", f1(1, 1 / 3)),
    ("Rome", "Paris", 0),
    ("", "Paris", 0),
    ("Paris", "", 0),
    ("", "", 0),
    ("the", "a", 0),
    ("yes yes yes", "yes yes", f1(2 / 3, 1)),
    ("it's", "its", 1),
    ("well-known", "well known", 0),
    ("Ångström  unit", "ångström\nunit", 1),
    ("theatre", "atre", 0),
]
QA_F1_ZH = [
    ("北京", "北京", 1),
    ("北京。", "北京", 1),
    ("“北京”", "北京！", 1),
    ("北京大学", "上海", 0),
    ("", "北京", 0),
    ("北京", "", 0),
    ("。，！", "，", 0),
    ("", "", 0),
    ("我爱北京", "我爱北京", 1),
    ("我 爱 北京", "我爱北京", 1),
    ("我爱北京", "北京", f1(1 / 3, 1)),  # cut into 我, 爱, 北京
    ("北京", "我爱北京", f1(1, 1 / 3)),
    ("2012年", "2012年", 1),
    ("GDP增长", "gdp增长", 1),
    ("《红楼梦》", "红楼梦", f1(1 / 2, 1)),  # LongBench strips only the closing one of these two marks
]
ROUGE_L = [
    ("the cat sat on the mat", "the cat sat on the mat", ROUGE_ONE),
    ("", "the cat", 0),
    ("the cat", "", 0),
    ("", "", 0),
    ("...", "the cat", 0),
    ("the cat", ".", 0),
    ("a b c d", "x y", 0),
    ("a b c d", "a c", f1(1 / 2, 1)),
    ("a c", "a b c d", f1(1, 1 / 2)),
    ("c a", "a c", f1(1 / 2, 1 / 2)),  # order counts within a sentence
    ("c. a", "a. c", ROUGE_ONE),  # and not between sentences
    ("a a a a", "a", ROUGE_ONE),  # distinct words
    ("A b", "a b", f1(1 / 2, 1 / 2)),  # case counts
    ("a b\n c", "a b c", ROUGE_ONE),
    (" ", "a", 0),
]
ROUGE_L_ZH = [
    ("我爱北京", "我爱北京", ROUGE_ONE),
    ("", "我爱北京", 0),
    ("我爱北京", "", 0),
    ("", "", 0),
    ("北京", "我爱北京", f1(1, 1 / 3)),
    ("我爱北京", "北京", f1(1 / 3, 1)),
    ("上海", "北京", 0),
    ("北京。", "北京", f1(1 / 2, 1)),  # the Chinese full stop is a word
    ("北京我", "我北京", f1(1 / 2, 1 / 2)),
    ("北京北京", "北京", ROUGE_ONE),
    ("a b", "a b", ROUGE_ONE),
    (".", "北京", 0),
]
CLASSIFICATION = [
    ("Date", "Date", 1),
    ("It is a Date.", "Date", 1),
    ("date", "Date", 0),
    ("", "Date", 0),
    ("Date or Individual", "Date", 1 / 2),
    ("Date, Individual, Other entity", "Date", 1 / 3),
    ("Individual", "Date", 0),
    ("Date of birth", "Date of birth", 1),  # Date is a part of the right class and does not count
    ("Date of birth", "Date", 1 / 2),  # the other way round it does
    ("Order, rank", "Order, rank", 1),
    ("Order, rank", "Order", 1 / 2),
    ("no class at all", "Date", 0),
    ("Other", "Other entity", 0),
]
COUNT = [
    ("7", "7", 1),
    ("There are 7.", "7", 1),
    ("7 7 7", "7", 1),
    ("7 of 30", "7", 1 / 2),
    ("17", "7", 0),
    ("07", "7", 0),
    ("seven", "7", 0),
    ("", "7", 0),
    ("7", "", 0),
    ("7.5", "7", 1 / 2),
    ("1, 2, 3, 4", "4", 1 / 4),
    ("共有7段", "7", 1),
]
RETRIEVAL = [
    ("Paragraph 15", "Paragraph 15", 1),
    ("15", "Paragraph 15", 1),
    ("paragraph 15.", "Paragraph 15", 1),
    ("Paragraph 1", "Paragraph 15", 0),
    ("Paragraph 15 or 16", "Paragraph 15", 1 / 2),
    ("8. 8. Paragraph 8", "Paragraph 8", 1),
    ("Paragraph 15, 16, 17", "Paragraph 15", 1 / 3),
    ("Paragraph", "Paragraph 15", 0),
    ("", "Paragraph 15", 0),
    ("fifteen", "Paragraph 15", 0),
    ("Paragraph 015", "Paragraph 15", 0),
    ("段落15", "Paragraph 15", 1),
]
CODE = [
    ("return x", "return x", 1),
    ("\n\nreturn x\nmore", "return x", 1),
    ("# a comment\nreturn x", "return x", 1),
    ("// a comment\nreturn x", "return x", 1),
    ("```python\nreturn x\n```", "return x", 1),
    ("return y", "return x", 0.88),  # 2 x 7 / 16 = 0.875, and halves go to the even percent
    ("", "return x", 0),
    ("# only a comment", "return x", 0),
    ("# only a comment", "", 1),
    ("", "", 1),
    ("xyz", "abc", 0),
    ("    return x", "return x", 0.8),
    ("x = '#'\nreturn x", "return x", 1),  # a # inside a text counts as a comment too
    ("abcd", "bcda", 0.75),
    ("QWEa1b2c3d4", "a5b6c7d8QWE", 0.27),  # difflib's longest block QWE; an edit distance keeps abcd: 0.36
]


def cases(metric, table):
    return [pytest.param(metric, *case, id=f"{metric.__name__} {i}") for i, case in enumerate(table)]


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "expected"),
    [
        *cases(scores.qa_f1, QA_F1),
        *cases(scores.qa_f1_zh, QA_F1_ZH),
        *cases(scores.rouge_l, ROUGE_L),
        *cases(scores.rouge_l_zh, ROUGE_L_ZH),
        *cases(scores.count, COUNT),
        *cases(scores.retrieval, RETRIEVAL),
        *cases(scores.retrieval_zh, [(p, a.replace("Paragraph ", "段落"), e) for p, a, e in RETRIEVAL]),
        *cases(scores.code_similarity, CODE),
    ],
)
def test_worked_out_by_hand(metric, prediction, answer, expected):
    assert metric(prediction, answer) == pytest.approx(expected, abs=2e-8)


@pytest.mark.parametrize(("prediction", "answer", "expected"), CLASSIFICATION)
def test_classes_worked_out_by_hand(prediction, answer, expected):
    assert scores.classification(prediction, answer, CLASSES) == pytest.approx(expected)


def test_a_class_after_a_dropped_one_is_not_looked_at():
    """LongBench's script removes from the list that it walks over: of two parts in a row the second stays."""
    assert scores.classification("abc", "abc", ["a", "b", "abc"]) == 1 / 2
    assert scores.classification("abc", "abc", ["a", "abc", "b"]) == 1
    assert scores.classification("abc", "abc", ["abc", "a", "b"]) == 1 / 2


def test_the_limit_of_recursion_is_left_as_it_was_and_a_sentence_of_any_length_is_scored():
    before, words = sys.getrecursionlimit(), " ".join(f"w{i}" for i in range(700))
    assert scores.rouge_l(words, words) == pytest.approx(1)
    assert sys.getrecursionlimit() == before


def test_jieba_says_nothing_and_leaves_no_cache(tmp_path):
    import os
    import subprocess

    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", "from kvlab import scores; print(scores.qa_f1_zh('北京', '北京'))"],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.stdout == "1.0\n" and "jieba" not in done.stderr and not list(tmp_path.iterdir())


# --- what holds for all texts ---

TEXT = st.text(max_size=40) | st.text(alphabet="ab .\n#`/的北京段落12", max_size=40)
PLAIN = [scores.qa_f1, scores.qa_f1_zh, scores.rouge_l, scores.rouge_l_zh, scores.count, scores.code_similarity]


@pytest.mark.parametrize("metric", PLAIN, ids=lambda metric: metric.__name__)
@settings(max_examples=100, deadline=None)
@given(prediction=TEXT, answer=TEXT)
def test_every_score_lies_between_0_and_1(metric, prediction, answer):
    assert 0 <= metric(prediction, answer) <= 1


@settings(max_examples=100, deadline=None)
@given(prediction=TEXT, number=st.integers(0, 10**6), classes=st.lists(st.text(min_size=1), min_size=1))
def test_and_so_do_those_of_retrieval_and_classes(prediction, number, classes):
    assert 0 <= scores.retrieval(prediction, f"Paragraph {number}") <= 1
    assert 0 <= scores.retrieval_zh(prediction, f"段落{number}") <= 1
    assert 0 <= scores.classification(prediction, classes[0], classes) <= 1


WORDS = st.lists(
    st.sampled_from(["ferry", "piano", "harbour", "北京", "大学", "fog", "storm", "ledger", "7", "12"]),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(words=WORDS, number=st.integers(0, 10**6))
def test_the_reference_itself_scores_1(words, number):
    text = " ".join(words)
    for metric in (scores.qa_f1, scores.qa_f1_zh, scores.rouge_l, scores.rouge_l_zh, scores.code_similarity):
        assert metric(text, text) == pytest.approx(1, abs=1e-7), metric.__name__
    assert scores.count(str(number), str(number)) == 1
    assert scores.retrieval(f"Paragraph {number}", f"Paragraph {number}") == 1
    assert scores.retrieval_zh(f"段落{number}", f"段落{number}") == 1


@settings(max_examples=100, deadline=None)
@given(one=WORDS, other=WORDS)
def test_f1_knows_no_order(one, other):
    a, b = " ".join(one), " ".join(other)
    assert scores.qa_f1(a, b) == pytest.approx(scores.qa_f1(b, a))
    assert scores.qa_f1(a, b) == scores.qa_f1(" ".join(one[::-1]), b)


# --- tasks ---


def test_the_table_of_tasks():
    table = scores.LONGBENCH
    assert len(table) == 21
    assert [t for t in table if not table[t].chat] == ["trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"]
    assert [t for t in table if table[t].first_line] == ["trec", "triviaqa", "samsum", "lsht"]
    assert {t: table[t].new_tokens for t in table if table[t].new_tokens == 512}.keys() == {
        "gov_report",
        "qmsum",
        "multi_news",
        "vcsum",
    }
    assert {table[t].metric.__name__ for t in ("dureader", "vcsum")} == {"rouge_l_zh"}


def test_the_best_reference_counts():
    assert scores.score("qasper", "55", ["fifty-five", "55"]) == 1
    assert scores.score("qasper", "55", []) == 0


@pytest.mark.parametrize("task", scores.LONGBENCH)
def test_an_empty_answer_is_no_error(task):
    answer = {"passage_retrieval_en": "Paragraph 1", "passage_retrieval_zh": "段落1"}.get(task, "Date")
    assert scores.score(task, "", [answer], CLASSES) == 0


def test_only_the_first_line_of_four_tasks_counts():
    assert scores.score("triviaqa", "\n \n55\nPassage: more", ["55"]) == 1
    assert scores.score("trec", "Date\nIndividual", ["Date"], CLASSES) == 1
    assert scores.score("samsum", " Anne sleeps.\nDialogue: x", ["Anne sleeps."]) == pytest.approx(1)
    assert scores.score("hotpotqa", "55\nmore words", ["55"]) == pytest.approx(1 / 2)


def test_a_score_of_a_task_is_a_mean_in_percent():
    found = [
        {"pred": "yes", "answers": ["yes"], "all_classes": None},
        {"pred": "no", "answers": ["yes"]},
        {"pred": "", "answers": ["yes"]},
    ]
    assert scores.score_task("qasper", found) == 33.33
    assert scores.score_each("qasper", found) == [1, 0, 0]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: scores.score("qaspr", "", [""]), "did you mean 'qasper'"),
        (lambda: scores.score("trec", "Date", ["Date"]), "needs 'all_classes'"),
        (lambda: scores.score("passage_retrieval_en", "1", ["one"]), "'Paragraph N', and one is 'one'"),
        (lambda: scores.score("passage_retrieval_zh", "1", ["1"]), "'段落N', and one is '1'"),
        (lambda: scores.score_task("qasper", []), "no predictions"),
    ],
)
def test_mistakes(call, match):
    with pytest.raises(KvlabError, match=match):
        call()


# --- the published predictions ---

OFFICIAL = json.loads((PUBLISHED / "official_scores.json").read_text()) if PUBLISHED.is_dir() else {"none": None}


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published predictions are not there")
@pytest.mark.parametrize("name", OFFICIAL)
def test_published_predictions_get_their_published_scores(name):
    found = scores.read_predictions(PUBLISHED / f"{name}.jsonl")
    assert scores.score_task(name.rpartition("__")[2], found) == OFFICIAL[name]
