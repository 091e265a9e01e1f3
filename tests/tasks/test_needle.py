"""A number hidden in a text, asked for at its end, on the real model: what the full cache finds and others may lose.

The full cache's and the full budget's answers are asserted, and how much policies keep; what they find is recorded with
the test's report.
"""

import pytest
import torch
from support.texts import FERRY

import kvlab

NUMBER = "48213"
QUESTION = "\n\nWhat is the secret code?"


def prompt(lm, depth):
    sentences = "\n\n".join(FERRY.split("\n\n")[2:4]).split(". ")
    place = round(depth * len(sentences))
    text = ". ".join(sentences[:place]) + f". The secret code is {NUMBER}. " + ". ".join(sentences[place:])
    return lm.encode(text + QUESTION)


def answer(lm, ids):
    out = lm.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=lm.tokenizer.eos_token_id,
    )
    return lm.decode(out[0, ids.shape[1] :])


@pytest.mark.parametrize("depth", [0.5, 0.9])
def test_a_needle(lm, depth, record_property):
    ids = prompt(lm, depth)
    assert ids.shape[1] > 200
    plain = answer(lm, ids)
    assert NUMBER in plain
    for name in ("snapkv", "streamingllm"):
        with kvlab.compress(lm.model, kvlab.policy(name, budget=4000)):
            assert answer(lm, ids) == plain
    for name in ("streamingllm", "snapkv", "dapq"):
        for budget in (64, 128):
            with kvlab.compress(lm.model, kvlab.policy(name, budget=budget), tokenizer=lm.tokenizer) as session:
                found = answer(lm, ids)
            assert session.kept_after_prefill(29).shape[-1] == budget
            record_property(f"{name} {budget} at depth {depth}", found)
            print(f"{name:>13} {budget:4} depth {depth}: {found!r}")
