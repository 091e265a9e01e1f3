"""The harness's score of one of kvlab's tasks is that of `kvlab eval`, on the same examples under the same policy."""

from __future__ import annotations

import pytest
from support.harness import ANSWERS, evaluated, written

import kvlab
from kvlab import evaluation
from kvlab.harness.model import KvlabLM
from kvlab.tasks import task

# The answer is the first number of five digits; the harness's own filter and metric judge it, not the task's.
NUMBERS = (
    ANSWERS
    + """
filter_list:
  - name: number
    filter: [{{function: regex, regex_pattern: '\\b(\\d{{5}})\\b'}}, {{function: take_first}}]
"""
)


@pytest.mark.parametrize("at", ["prompt", "context"])
def test_needles_are_found_as_often_as_by_kvlab_eval(lm, tmp_path, at):
    """On the default model, at a budget at which it finds some of them and loses others."""
    needles, policy = task("needle", lengths=(256,), depths=(0.0, 0.3, 1.0)), kvlab.policy("snapkv", budget=128)
    mine = evaluation.run(lm, evaluation.plan(needles, [policy], compress_at=at), tmp_path / "answers.jsonl")
    scores = [answer.scores["exact"] for answer in mine if answer.policy == "snapkv"]
    examples = list(needles.examples(lm))
    records = [{"prompt": example.prompt, "answer": example.answers[0]} for example in examples]
    path = written(tmp_path, NUMBERS, "needles", records, new_tokens=examples[0].max_new_tokens)
    model = KvlabLM(lm, policy, compress_at=at, question="\n\nQuestion:" if at == "context" else None)
    found = evaluated(model, path, apply_chat_template=True)["results"]["kvlab_said"]
    assert found["exact_match,number"] == pytest.approx(sum(scores) / 3)
    assert 0 < sum(scores) < 3, "what is all alike would compare nothing"
