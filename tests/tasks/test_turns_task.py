"""Several questions over one context: what is asked, where the answers stand, and scores; nothing here runs a model."""

from __future__ import annotations

import pytest
from support.example_checks import length

from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.tasks.base import Example, Turn
from kvlab.tasks.turns import Turns


@pytest.mark.parametrize("kind", ["squad", "kv", "needle"])
def test_every_answer_stands_in_the_context_and_none_in_a_question(lm, kind):
    task = Turns(lengths=(700,), kinds=(kind,), turns=4)
    made = list(task.examples(lm))
    assert len(made) == len({example.id for example in made}) == 4
    for example in made:
        assert 700 * 0.98 <= example.marks["tokens"] <= 700 and length(lm, example) == example.marks["tokens"]
        parts = example.parts
        assert [part.marks["turn"] for part in parts] == [1, 2, 3, 4] and len({part.question for part in parts}) == 4
        for part in parts:
            assert part.context == example.context and part.id == f"{example.id}-{part.marks['turn']}"
            assert any(answer in part.context for answer in part.answers)
            assert kind == "squad" or (part.answers[0] not in part.question and part.prefix)
            right = f"{part.prefix} {part.answers[0]}."
            assert task.score(part, part.answers[0] if kind == "squad" else right) == {"score": 1.0}


def test_both_modes_ask_the_same_and_a_seed_other_things(lm):
    task = Turns(lengths=(512,), kinds=("kv", "needle"), trials=1)
    chat, requests = (
        [example for example in task.examples(lm) if example.marks["mode"] == mode] for mode in ("chat", "requests")
    )
    assert [e.turns for e in chat] == [e.turns for e in requests] and [e.context for e in chat] == [
        e.context for e in requests
    ]
    assert not any(e.branched for e in chat) and all(e.branched for e in requests)
    again, other = (next(Turns(lengths=(512,), kinds=("kv",), seed=seed).examples(lm)) for seed in (0, 1))
    assert again == chat[0] and other.turns != chat[0].turns


def test_asked_lines_lie_evenly_among_the_others(lm):
    example = next(Turns(lengths=(600,), kinds=("kv",), modes=("chat",), turns=3).examples(lm))
    lines = example.context.partition("\n\n")[2].split("\n")
    places = sorted(lines.index(line) for turn in example.turns for line in lines if turn.answers[0] in line)
    assert [place / len(lines) for place in places] == pytest.approx([0.25, 0.5, 0.75], abs=0.05)


def test_paragraphs_of_questions_are_whole_and_different_where_they_fit(lm):
    example = next(Turns(lengths=(1200,), kinds=("squad",), turns=3).examples(lm))
    known = {question.question.strip(): question for question in corpus.questions(example.marks["document"])}
    asked = [known[turn.question.removeprefix("\n\nQuestion: ").strip()] for turn in example.turns]
    assert len({question.paragraph for question in asked}) == 3
    assert all(example.context.count(question.paragraph) == 1 for question in asked)


def test_a_limit_takes_equally_many_of_each_kind_and_mode(lm):
    made = list(Turns(lengths=(600,), trials=3).examples(lm, limit=6))
    assert sorted((e.marks["mode"], e.marks["kind"]) for e in made) == sorted(
        (mode, kind) for mode in ("chat", "requests") for kind in ("squad", "kv", "needle")
    )


@pytest.mark.parametrize(
    "kind, prediction, score",
    [
        ("kv", " 12345.", 1.0),
        ("kv", " 12,345", 1.0),
        ("kv", " 123456", 0.0),
        ("needle", "It is 54321", 0.0),
        ("squad", "the river Rhine\nand more", 0.8),
        ("squad", "", 0.0),
    ],
)
def test_scores(kind, prediction, score):
    answers = ("Rhine", "a Rhine river delta") if kind == "squad" else ("12345",)
    example = Example("id", "c", "q", answers, 8, marks={"kind": kind})
    assert Turns().score(example, prediction)["score"] == pytest.approx(score)


def test_one_question_is_its_own_part():
    example = Example("id", "c", "q", ("a",), 8)
    assert example.parts == (example,)
    assert [
        part.question for part in Example("i", "c", "q", ("a",), 8, turns=(Turn("x", ()), Turn("y", ()))).parts
    ] == [
        "x",
        "y",
    ]


def test_a_paragraph_gives_as_many_questions_as_it_has(lm):
    """Where only the shortest paragraphs fit, none is asked twice, so that there are enough."""
    for seed in range(6):
        for example in Turns(lengths=(180,), kinds=("squad",), modes=("chat",), turns=4, seed=seed).examples(lm):
            assert len({turn.question for turn in example.turns}) == 4


def test_too_few_questions_or_tokens_are_said(lm):
    with pytest.raises(KvlabError, match="too few"):
        list(Turns(lengths=(64,), kinds=("needle",)).examples(lm))
    with pytest.raises(KvlabError, match="turns"):
        Turns(turns=1)
    with pytest.raises(KvlabError, match="was made for"):
        list(Turns(lengths=(64_000,), kinds=("kv",)).examples(lm))
