"""The tables of `kvlab eval` by kind and by turn."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.console import Console
from support.spread import students

from kvlab.evaluation import Answer, summary
from kvlab.workbench.figures import evaluation


def answers(mode, kind, by_policy):
    """Two contexts' scores by turn: policy -> scores."""
    return [
        Answer(
            key=f"{mode}{kind}{policy}{context}{turn}",
            task="turns",
            example=f"{mode}-{kind}-{context}-{turn}",
            policy=policy,
            budget=None if policy == "full" else 64,
            compress_at="context",
            prediction="",
            answers=["1"],
            scores={"score": score},
            metric="score",
            prompt_tokens=9,
            generated_tokens=2,
            prefill_seconds=0.1,
            seconds=0.1,
            kv_bytes=100,
            aux_bytes=0,
            marks={"kind": kind, "mode": mode, "turn": turn},
            signature="m|t|p|s|v",
        )
        for policy, scores in by_policy.items()
        for context in range(2)
        for turn, score in enumerate(scores, 1)
    ]


def shown(found):
    console = Console(width=100, record=True)
    evaluation.show_parts(found, console)
    return console.export_text()


FOUND = [
    *answers("chat", "kv", {"full": [1.0, 1.0], "snapkv": [1.0, 0.25]}),
    *answers("requests", "kv", {"full": [1.0, 1.0], "snapkv": [0.5, 0.5]}),
]


def test_each_mode_has_its_scores_by_turn():
    text = shown(FOUND)
    assert "score by turn, %: chat" in text and "score by turn, %: requests" in text
    rows = [re.findall(r"\d+\.\d", line) for line in text.splitlines() if "snapkv" in line]
    assert rows == [["100.0", "25.0"], ["50.0", "50.0"]]


def test_kinds_have_a_table_where_there_are_several_and_turns_need_not_be():
    other = answers("chat", "squad", {"full": [1.0], "snapkv": [0.0]})
    assert "score by kind" in shown([*FOUND, *other]) and "score by kind" not in shown(FOUND)
    plain = answers("chat", "kv", {"full": [1.0]})
    for answer in plain:
        answer.marks = {"kind": "kv"}
    assert not shown(plain).strip()


def test_turns_need_no_modes():
    """A task of one's own may ask several questions in one way."""
    alone = answers("chat", "kv", {"full": [1.0, 0.5]})
    for answer in alone:
        del answer.marks["mode"]
    (heading,) = [line.strip() for line in shown(alone).splitlines() if "score" in line]
    assert heading == "score by turn, %" and "50.0" in shown(alone)


def test_questions_over_one_context_are_one_repetition():
    """Of both modes, too: four answers on each of two contexts have the interval of two numbers."""
    scores = {"a": (0.5, 0.5, 0.6, 0.4), "b": (0.5, 0.6, 0.5, 0.44)}
    asked = [
        replace(
            FOUND[0], key=f"{context}{n}", example=f"{context}-{n}", scores={"score": score}, marks={"context": context}
        )
        for context, mine in scores.items()
        for n, score in enumerate(mine)
    ]
    (row,) = summary(asked).to_dict("records")
    assert row["n"] == 8 and row["score"] == pytest.approx(0.505)
    assert (row["low"], row["high"]) == pytest.approx(students((0.5, 0.51)), rel=1e-4)
