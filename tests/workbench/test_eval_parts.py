"""The tables of `kvlab eval` by kind and by turn."""

from __future__ import annotations

import re

from rich.console import Console

from kvlab.evaluation import Answer
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


FOUND = [
    *answers("chat", "kv", {"full": [1.0, 1.0], "snapkv": [1.0, 0.25]}),
    *answers("requests", "kv", {"full": [1.0, 1.0], "snapkv": [0.5, 0.5]}),
]


def test_each_mode_has_its_scores_by_turn():
    assert {title: by for title, (by, _) in evaluation.parted(FOUND).items()} == {
        "score by turn, %: chat": "turn",
        "score by turn, %: requests": "turn",
    }
    console = Console(width=100, record=True)
    evaluation.show_parts(FOUND, console)
    text = console.export_text()
    assert "score by turn, %: chat" in text and "score by turn, %: requests" in text
    rows = [re.findall(r"\d+\.\d", line) for line in text.splitlines() if "snapkv" in line]
    assert rows == [["100.0", "25.0"], ["50.0", "50.0"]]


def test_kinds_have_a_table_where_there_are_several_and_turns_need_not_be():
    other = answers("chat", "squad", {"full": [1.0], "snapkv": [0.0]})
    assert next(iter(evaluation.parted([*FOUND, *other]).items()))[1][0] == "kind"
    plain = answers("chat", "kv", {"full": [1.0]})
    for answer in plain:
        answer.marks = {"kind": "kv"}
    assert evaluation.parted(plain) == {}
