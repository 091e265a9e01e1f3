"""Competition mathematics: the files' forms, the answers' equality, and what a long answer is scored by."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import call
from support.refusals import refusal

from kvlab import evaluation, tasks
from kvlab.tasks.competition import answer_of, boxed, equal, repetition

PROBLEMS = [
    {"problem": "What is $1/4 + 1/4$?", "answer": "\\frac{1}{2}", "level": 1, "unique_id": "made/1"},
    {"Question": "How many primes are below 10?", "Answer": 4, "ID": "made-2", "Level": 2},
    {"question": "What is 6 times 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42", "level": 1},
    {"problem": "Solve $x^2 = 9$.", "solution": "Both roots: \\boxed{3, \\boxed{-3}}.", "type": "Algebra"},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in PROBLEMS))
    return path


@pytest.fixture
def small(tiny):
    return tiny(tokenizer="smollm2-135m", max_position_embeddings=512)


@pytest.mark.parametrize(
    ("answer", "prediction", "right"),
    [
        ("\\frac{1}{2}", "so it is \\boxed{0.5}.", True),
        ("\\frac{1}{2}", "\\boxed{\\dfrac12}", True),
        ("\\frac{1}{2}", "\\boxed{0.51}", False),
        ("3\\sqrt{13}", "$\\boxed{\\sqrt{117}}$", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3, \\pi/2)}", True),
        ("1,-2", "\\boxed{-2, 1}", True),
        ("x \\in [-2,7]", "\\boxed{[-2,7]}", True),
        ("x \\in [-2,7]", "\\boxed{(-2,7)}", False),
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", True),
        ("11,\\! 111", "\\boxed{11111}", True),
        ("033", "the answer is 33.", True),
        ("204", "First I get 10, then 204", True),
        ("204", "I do not know", False),
        ("204", "", False),
        ("5", "\\boxed{5", False),
    ],
)
def test_answers_are_compared_as_formulas(answer, prediction, right):
    assert equal(answer, prediction) is right


def test_what_cannot_be_compared_in_time_is_wrong(monkeypatch):
    monkeypatch.setattr("kvlab.tasks.competition.SECONDS", 1)
    assert not equal("2", "\\boxed{9^{9^{9^{9}}}}")


@given(st.integers(-999, 999), st.integers(1, 60))
def test_a_fraction_equals_itself_expanded(top, times):
    expanded = f"\\boxed{{\\frac{{{top * times}}}{{{7 * times}}}}}"
    assert equal(f"\\frac{{{top}}}{{7}}", expanded) and not equal(f"\\frac{{{top + 1}}}{{7}}", expanded)


def test_the_last_box_counts_with_its_braces():
    assert boxed("\\boxed{1} or \\boxed{\\frac{a}{b}}.") == "\\frac{a}{b}"
    assert (boxed("none"), boxed("\\boxed{open {")) == ("", "")
    assert answer_of({"answer": 0}) == "0", "a zero is an answer"


def test_repetition_by_hand():
    text = "a b c d e f g h i a b c d e f g h"  # runs of eight: ten, of which the last equals the first
    assert repetition(text) == pytest.approx(0.1)
    assert repetition("a b c") == 0 and repetition("na " * 100) > 0.98


def test_the_public_forms_of_a_line_are_read(small, file):
    found = list(tasks.task("math", file=file).examples(small))
    assert [example.answers for example in found] == [("\\frac{1}{2}",), ("4",), ("42",), ("-3",)]
    assert [example.id for example in found] == ["math-made/1", "math-made-2", "math-3", "math-4"]
    assert [example.marks["kind"] for example in found] == ["1", "2", "1", "Algebra"]
    assert all("\\boxed{}" in example.prompt for example in found)
    room = [small.context_length - small.encode(example.prompt, chat="auto").shape[1] for example in found]
    assert [example.max_new_tokens for example in found] == room
    few = list(tasks.task("math", file=file, new_tokens=9).examples(small, limit=3))
    assert {example.marks["kind"] for example in few} == {"1", "2", "Algebra"} and few[0].max_new_tokens == 9


@pytest.mark.parametrize(
    ("task", "line", "said"),
    [
        ("math", "[1]", "line 1: a problem is a JSON object"),
        ("math", "{", "line 1: not valid JSON"),
        ("math", '{"text": "?", "answer": "1"}', "`problem` or `question`; it has text, answer"),
        ("math", '{"problem": "?", "solution": "no box"}', "no `answer`, and no \\boxed{}"),
        ("aime", '{"problem": "?", "answer": "1/2"}', "no whole number from 0 to 999; the task math takes any"),
        ("math", json.dumps({"problem": "word " * 600, "answer": "1"}), "tokens, and"),
    ],
)
def test_lines_that_are_not_right_are_refused(small, tmp_path, task, line, said):
    (tmp_path / "bad.jsonl").write_text(line + "\n")
    assert said in refusal(list, tasks.task(task, file=tmp_path / "bad.jsonl").examples(small))


def test_without_a_file_or_the_library_one_sentence(small, file, monkeypatch):
    assert "--data FILE" in refusal(list, tasks.task("aime").examples(small))
    monkeypatch.setattr("kvlab.lib.extras.is_installed", lambda module: module != "math_verify")
    assert "pip install 'kvlab[math]'" in refusal(list, tasks.task("math", file=file).examples(small))


def test_eval_shows_how_long_answers_are(small, file, project, capsys, monkeypatch):
    monkeypatch.setattr("kvlab.inputs.models.load", lambda *_: small)
    order = ["eval", "math", "--data", str(file), "--policies", "streamingllm", "--budgets", "16", "--limit", "2"]
    code, out, _ = call(capsys, *order, "-p", "new_tokens=40", "--no-log")
    assert code == 0 and "how long the answers are" in out
    answers = evaluation.read(project / "eval" / "math.jsonl")
    rows = evaluation.lengths(answers).set_index("policy")
    assert rows.loc["full", "tokens"] == sum(a.generated_tokens for a in answers if a.policy == "full") / 2
    tokens = rows["tokens"].to_dict()
    assert rows["longer"].to_dict()["streamingllm"] == tokens["streamingllm"] - tokens["full"]
    assert set(rows["unboxed"]) == {1.0}, "random weights write no box"
    code, _, err = call(capsys, "eval", "arithmetic", "--data", str(file))
    assert code != 0 and "reads no --data" in err
