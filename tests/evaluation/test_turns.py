"""Several questions over one context on a live model, against plain runs that do the same by hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import ClassVar

import pytest
import torch
from support.evaluating import wordy
from support.live_runs import SMALL

import kvlab
from kvlab import evaluation
from kvlab.errors import KvlabError
from kvlab.evaluation import conversing
from kvlab.tasks.base import Example, Task, Turn

EVERY = [kvlab.policy("full"), *(kvlab.policy(name, **parameters) for name, parameters in SMALL.items())]
# One of each way of working: windows, sums, pseudo-tokens, repetition, merging, a share for each layer, selection.
KINDS = ["full", "snapkv", "h2o", "dapq", "kvzip", "zsmerge", "pyramidkv", "quest", "morphkv"]
SOME = [policy for policy in EVERY if policy.name in KINDS]
CONTEXT = " ".join(f"w{3 + 7 * n % 250}" for n in range(60))
ASKED = tuple(Turn(f" w{n} w{n + 1} w{n + 2} w{n + 3}", (f"w{n}",)) for n in (20, 90, 150))
CHAT = Example("chat", CONTEXT, ASKED[0].question, ASKED[0].answers, 5, turns=ASKED)
REQUESTS = replace(CHAT, id="requests", branched=True)


class Questions(Task):
    """Both modes over one context."""

    name: ClassVar[str] = "questions"
    summary: ClassVar[str] = "for tests"

    def examples(self, lm, limit=None):
        yield from (CHAT, REQUESTS)

    def score(self, example, prediction):
        return {"score": float(example.answers[0] in prediction.split())}


@pytest.fixture(scope="module")
def words():
    return wordy()


def plain(made):
    return [{key: value for key, value in one.items() if "seconds" not in key} for one in made]


@pytest.mark.parametrize("at", ["prompt", "context"])
@pytest.mark.parametrize("example", [CHAT, REQUESTS], ids=["chat", "requests"])
def test_one_prefill_for_all_gives_what_one_for_each_gives(words, example, at):
    shared = list(conversing.answered(words, example, EVERY, at))
    for policy, made in [(policy, made) for policy, made in zip(EVERY, shared, strict=True) if policy in SOME]:
        (alone,) = conversing.answered(words, example, [policy], at)
        assert plain(made) == plain(alone), policy
    assert len(shared[0]) == 3 and len({made[2]["prediction"] for made in shared}) > 3


def chat_by_hand(words, policy, turns):
    """What a session's own generation says in each turn, and the bytes that it holds in the end."""
    past, said, cache = words.encode(CHAT.prompt), [], None
    with kvlab.compress(words, policy, turns=turns, max_new_tokens=23) as session:
        for turn in [None, *ASKED[1:]]:
            if turn is not None:
                past = torch.cat([past, words.encode(turn.question)], 1)
            out = words.model.generate(
                past, past_key_values=cache, max_new_tokens=5, do_sample=False, pad_token_id=0,
                return_dict_in_generate=True,
            )  # fmt: skip
            said.append(words.decode(out.sequences[0, past.shape[1] :]).split())
            past, cache = out.sequences, out.past_key_values
    return said, session.kv_bytes


@pytest.mark.parametrize("policy", SOME, ids=lambda policy: policy.name)
def test_a_chat_goes_on_as_by_hand(words, policy):
    """The whole past is fed again for the full cache; a session's own generation for the others."""
    (made,) = conversing.answered(words, CHAT, [policy], "prompt")
    said, kv_bytes = chat_by_hand(words, policy, "leave")
    assert [one["prediction"].split() for one in made] == said
    assert made[2]["kv_bytes"] == kv_bytes
    assert [one["prompt_tokens"] for one in made] == [64, 64 + 5 + 4, 64 + 2 * (5 + 4)]


def test_a_policy_that_chooses_anew_in_each_turn_does_so_in_a_chat(words):
    """RocketKV-MT masks again once a later question has been read, as a session that recompresses by hand does."""
    policy = kvlab.policy("rocketkv", turns="multi", **SMALL["rocketkv"])
    (made,) = conversing.answered(words, CHAT, [policy], "prompt")
    said, kv_bytes = chat_by_hand(words, policy, "recompress")
    assert [one["prediction"].split() for one in made] == said and made[2]["kv_bytes"] == kv_bytes
    (single,) = conversing.answered(words, CHAT, [kvlab.policy("rocketkv", **SMALL["rocketkv"])], "prompt")
    assert made[2]["kv_bytes"] > single[2]["kv_bytes"]
    assert [one["prediction"] for one in made] != [one["prediction"] for one in single]


@pytest.mark.parametrize("policy", SOME, ids=lambda policy: policy.name)
def test_a_request_is_answered_as_if_it_were_the_only_one(words, policy):
    """Whatever else is asked of the same compressed cache; and, compressed at the prompt, as the plain example is."""
    for at in ("context", "prompt"):
        (made,) = conversing.answered(words, REQUESTS, [policy], at)
        for one, part in zip(made, REQUESTS.parts, strict=True):
            (alone,) = evaluation.answers(words, part, [policy], at)
            assert plain([one]) == plain([alone])


def test_what_is_kept_knows_the_first_question_or_none(words):
    """A chat that is compressed before its questions keeps of the context what a request keeps."""
    policy, kept = kvlab.policy("snapkv", budget=14, window=4), {}
    for example, at in ((CHAT, "context"), (REQUESTS, "context"), (CHAT, "prompt")):
        (made,) = conversing.answered(words, example, [policy], at)
        kept[example.id, at] = made[0]
    assert plain([kept["chat", "context"]]) == plain([kept["requests", "context"]])
    assert kept["chat", "prompt"]["kv_bytes"] < kept["chat", "context"]["kv_bytes"], "its question is in the budget"


def test_a_run_writes_a_line_for_each_turn_and_goes_on_between_them(words, tmp_path):
    plan, path = evaluation.Plan(Questions(), (kvlab.policy("streamingllm", budget=10),)), tmp_path / "a.jsonl"
    whole = evaluation.run(words, plan, path)
    assert [(a.policy, a.marks["turn"]) for a in whole[:6]] == [
        (policy, turn) for policy in ("full", "streamingllm") for turn in (1, 2, 3)
    ]
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 12 == len({a.key for a in whole})
    path.write_text("".join(lines[:4]) + lines[4][:30])
    again = evaluation.run(words, plan, path)
    assert len(path.read_text().splitlines()) == 12

    def lasting(answers):
        return [{k: v for k, v in asdict(answer).items() if "seconds" not in k} for answer in answers]

    assert lasting(again) == lasting(whole) and [a.seconds for a in again[:4]] == [a.seconds for a in whole[:4]]
    rows = evaluation.summary(whole, by="turn")
    assert rows[rows.policy == "streamingllm"].turn.tolist() == [1, 2, 3] and (rows.n == 2).all()


def test_earlier_questions_of_a_chat_make_it_another_chat(words, tmp_path):
    plan, path = evaluation.Plan(Questions(), ()), tmp_path / "a.jsonl"
    keys = {answer.example: answer.key for answer in evaluation.run(words, plan, path)}

    class Others(Questions):
        def examples(self, lm, limit=None):
            turns = (Turn(" w5 w6", ("w5",)), *ASKED[1:])
            yield from (replace(example, turns=turns) for example in (CHAT, REQUESTS))

    other = {a.example: a.key for a in evaluation.run(words, evaluation.Plan(Others(), ()), tmp_path / "b.jsonl")}
    same = {name for name in keys if keys[name] == other[name]}
    assert same == {"requests-2", "requests-3"}


def test_between_turns_stands_what_the_template_puts_there(lm):
    ids = conversing.next_turn(lm, replace(CHAT, question="\n\nQuestion: Why?\n", prefix="It is"))
    said = lm.tokenizer.decode(ids[0])
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages.append({"role": "user", "content": "Question: Why?"})
    whole = lm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert whole.endswith(said.removesuffix("It is")) and said.startswith("<|im_end|>") and said.endswith("It is")


def test_a_chat_that_grows_beyond_the_context_is_refused_before_anything_runs(words):
    many = replace(CHAT, turns=ASKED * 80, max_new_tokens=5)
    with pytest.raises(KvlabError, match="with all of its turns"):
        next(conversing.answered(words, many, EVERY[:1], "prompt"))
