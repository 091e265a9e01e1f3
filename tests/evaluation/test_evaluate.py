"""Evaluations: one prefill for all policies, answers that survive being cut off, and paired differences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from scipy import stats
from support.evaluating import KILLED, POLICIES, Echo, wordy
from support.live_runs import SMALL
from support.spread import students

import kvlab
from kvlab import evaluation
from kvlab.errors import KvlabError
from kvlab.lib.intervals import bounded
from kvlab.live.shared_prefill import shared_prefill
from kvlab.methods._base.lookup import HeadScores
from kvlab.tasks.base import Example

EVERY = [kvlab.policy("full"), *(kvlab.policy(name, **parameters) for name, parameters in SMALL.items())]


@pytest.fixture(scope="module")
def words():
    return wordy()


@pytest.fixture(scope="module")
def example(words):
    return next(Echo(words=60).examples(words))


def timeless(found):
    return [{k: v for k, v in asdict(answer).items() if "seconds" not in k} for answer in found]


def without_times(made):
    return {k: v for k, v in made.items() if "seconds" not in k}


@pytest.mark.parametrize("at", ["prompt", "context"])
def test_one_prefill_for_all_gives_what_one_for_each_gives(words, example, at):
    shared = list(evaluation.answers(words, example, EVERY, at))
    for policy, made in zip(EVERY, shared, strict=True):
        (alone,) = evaluation.answers(words, example, [policy], at)
        assert without_times(made) == without_times(alone), policy
    assert len({made["prediction"] for made in shared}) > 3


@pytest.mark.parametrize("policy", EVERY, ids=str)
def test_an_answer_is_that_of_generate(words, example, policy):
    (made,) = evaluation.answers(words, example, [policy], "prompt")
    ids = words.encode(example.prompt)
    with kvlab.compress(words, policy, max_new_tokens=example.max_new_tokens) as session:
        out = words.model.generate(ids, max_new_tokens=example.max_new_tokens, do_sample=False, pad_token_id=0)
    assert made["prediction"].split() == words.decode(out[0, ids.shape[1] :]).split()
    assert (made["kv_bytes"], made["aux_bytes"]) == (session.kv_bytes, session.aux_bytes)
    assert made["prompt_tokens"] == 65 and made["generated_tokens"] == out.shape[1] - 65


def test_compressed_at_the_context_nothing_is_known_of_the_question(words, example):
    """What is kept of the context is the same for every question, and the question is stored whole."""
    other = replace(example, question=" w7 w8 w9 w10 w11")
    kept = []
    for asked in (example, other):
        fed = evaluation.feed(words, asked, "context")
        assert fed.context == 60 and fed.ids.shape == (1, 65)
        with shared_prefill(words.model, [POLICIES[1]]), torch.inference_mode():
            prefilled = words.model(fed.ids[:, :60]).past_key_values
        session = kvlab.compress(words.model, kvlab.policy("snapkv", budget=14, window=6), turns="leave")
        with session, pytest.raises(KvlabError, match="last 6 queries"):
            session.branch(prefilled)
            session.end_prompt()
        with kvlab.compress(words.model, POLICIES[1], turns="leave") as session, torch.inference_mode():
            past = session.branch(prefilled)
            session.end_prompt()
            kept.append(session.kept(1).tolist())
            words.model(fed.ids[:, 60:], past_key_values=past)
            assert session.kept(1).shape[1] == 12 + 5
            with pytest.raises(KvlabError, match="compressed already"):
                session.branch(past)
    assert kept[0] == kept[1]


def test_a_run_writes_every_answer_and_goes_on_where_it_stopped(words, tmp_path):
    plan = evaluation.Plan(Echo(n=4), (kvlab.policy("full"), *POLICIES))
    path, seen = tmp_path / "new" / "answers.jsonl", []
    whole = evaluation.run(words, plan, path, lambda what, done, total: seen.append((done, total)))
    assert seen[-1] == (16, 16) and len(path.read_text().splitlines()) == 16
    assert timeless(evaluation.read(path)) == timeless(whole)

    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:6]) + lines[6][:40])
    again = evaluation.run(words, plan, path)
    assert timeless(again) == timeless(whole) and timeless(evaluation.read(path)) == timeless(whole)
    assert [a.seconds for a in again[:6]] == [a.seconds for a in whole[:6]]

    other = evaluation.run(words, replace(plan, compress_at="context"), path)
    assert len(evaluation.read(path)) == 32 and {a.compress_at for a in other} == {"context"}
    more = evaluation.run(words, evaluation.Plan(Echo(n=5), plan.policies), path)
    assert len(more) == 20 and len(evaluation.read(path)) == 32 + 20, "another n is another task"


def test_killed_twenty_times_nothing_is_lost_and_nothing_done_twice(words, tmp_path):
    path = tmp_path / "answers.jsonl"
    variables = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    script = Path(__file__).parents[1] / "support" / "evaluating.py"
    done = subprocess.run([sys.executable, script, path, "20"], capture_output=True, text=True, env=variables)
    assert done.stdout.split() == ["20", "0"], done.stderr
    found = evaluation.read(path)
    assert timeless(found) == timeless(evaluation.run(words, KILLED, tmp_path / "uninterrupted.jsonl"))
    assert len({answer.key for answer in found}) == len(found) == 80 * len(KILLED.systems)


def test_differences_are_paired_by_example():
    def answer(example, policy, score):
        return evaluation.Answer(
            "",
            "t",
            example,
            policy,
            None if policy == "full" else 8,
            "prompt",
            "",
            [],
            {"f1": score},
            "f1",
            10,
            2,
            0.5,
            0.1,
            100,
            0,
        )

    found = [answer(f"e{n}", "full", full) for n, full in enumerate([1.0, 0.5, 0.0])]
    found += [answer(f"e{n}", "snapkv", score) for n, score in enumerate([0.75, 0.5, 0.25])]
    rows = evaluation.summary(found).set_index("policy")
    assert rows.loc["full", "score"] == rows.loc["snapkv", "score"] == 0.5
    assert rows.loc["snapkv", "difference"] == pytest.approx((-0.25 + 0 + 0.25) / 3)
    ends = rows.loc["snapkv", ["difference_low", "difference_high"]].tolist()
    assert ends == pytest.approx(students((-0.25, 0, 0.25)), rel=1e-4)
    assert rows.loc["full", "difference"] == 0 and (rows.n == 3).all()
    for answer_ in found:
        answer_.marks["kind"] = "early" if answer_.example == "e0" else "late"
    kinds = evaluation.summary(found, by="kind").set_index(["policy", "kind"])
    assert kinds.loc[("full", "early"), "score"] == 1 and kinds.loc[("full", "late"), "score"] == 0.25
    assert kinds.loc[("snapkv", "late"), "difference"] == 0.125 and kinds.loc[("snapkv", "late"), "n"] == 2
    # The interval of paired differences is narrower than those of the scores that it is made of.
    assert rows.loc["full", "high"] - rows.loc["full", "low"] > 0.5


def test_two_settings_of_a_policy_have_no_metric_in_common(words, tmp_path):
    settings = [kvlab.policy("snapkv", budget=40, window=window) for window in (4, 8)]
    found = evaluation.run(words, evaluation.plan(Echo(words=60), settings, limit=2), tmp_path / "sweep.jsonl")
    both = r"snapkv/40/score .* two numbers, of snapkv\(budget=40, window=4.* and of snapkv\(budget=40, window=8"
    with pytest.raises(KvlabError, match=both):
        evaluation.metrics(found)
    rows = evaluation.summary(found).set_index("parameters")
    for setting in settings:
        part = [answer for answer in found if answer.policy == "full" or str(setting) in answer.signature]
        assert evaluation.metrics(part)[0]["echo/snapkv/40/score"] == rows.loc[str(setting), "score"]


@pytest.mark.parametrize("n", [3, 10, 40])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_answers_that_are_all_alike_are_not_certain(n, share):
    """Ten right answers of ten do not say that the eleventh is: the interval is Clopper's and Pearson's."""
    mean, (low, high) = bounded([share] * n, 0.0, 1.0)
    exact = stats.binomtest(int(share * n), n).proportion_ci(0.95, "exact")
    assert mean == share and (low, high) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_differences_that_are_all_alike_may_turn_out_either_way():
    reach = stats.binomtest(0, 10).proportion_ci(0.95, "exact").high
    assert bounded([0.0] * 10, -1.0, 1.0)[1] == pytest.approx((-reach, reach))
    assert bounded([-1.0] * 10, -1.0, 1.0)[1] == pytest.approx((-1.0, -1.0 + 2 * reach))


def test_intervals_of_scores_stay_within_what_scores_can_be():
    mean, (low, high) = bounded([1.0] * 4 + [0.0], 0.0, 1.0)
    assert mean == 0.8 and high == 1.0 and low == pytest.approx(students([1.0] * 4 + [0.0])[0], rel=1e-4)


def test_an_answer_ends_where_the_example_says(words, example):
    (whole,) = evaluation.answers(words, example, [kvlab.policy("full")], "prompt")
    second = whole["prediction"].split()[1]
    (ended,) = evaluation.answers(words, replace(example, until=second), [kvlab.policy("full")], "prompt")
    place = whole["prediction"].split().index(second)
    assert ended["prediction"].split() == whole["prediction"].split()[: place + 1] and place < 5


@pytest.mark.parametrize(
    "made, message",
    [
        (lambda: evaluation.plan(Echo(), ["snapkv"]), "snapkv needs a budget"),
        (lambda: evaluation.plan(Echo(), ["snapkv"], [8]), "budget 8 is below"),
        (lambda: evaluation.plan(Echo(), ["snap"], [64]), "unknown policy 'snap'"),
        (lambda: evaluation.plan(Echo(), ["snapkv"], [64], "question"), "neither 'prompt' nor 'context'"),
        (lambda: Echo(m=3), "unknown parameter 'm'"),
        (lambda: Echo(n="many"), "echo: n: .*'many'"),
    ],
)
def test_a_plan_that_cannot_be(made, message):
    with pytest.raises(KvlabError, match=message):
        made()


def test_a_line_separator_inside_an_answer_is_no_line_of_its_own(words, tmp_path, monkeypatch):
    plan = evaluation.Plan(Echo(n=2), (kvlab.policy("full"),))
    decode = type(words).decode
    monkeypatch.setattr(type(words), "decode", lambda self, ids: decode(self, ids) + "\u2028end\x85\x0c")
    found = evaluation.run(words, plan, tmp_path / "answers.jsonl")
    assert timeless(evaluation.read(tmp_path / "answers.jsonl")) == timeless(found)
    assert found[0].prediction.endswith("\u2028end\x85\x0c")


def test_another_precision_and_another_table_are_other_answers(words, tmp_path):
    plan, signatures = evaluation.Plan(Echo(n=1), ()), set()
    for best in (0.1, 0.9):
        scores = HeadScores(
            model="m",
            sha256="0" * 64,
            n_layers=2,
            heads=4,
            kv_heads=2,
            contexts=(10,),
            depths=(0.5,),
            documents=("d@0",),
            seed=0,
            kvlab="0",
            scores=((best, 0.2, 0.3, 0.4),) * 2,
        )
        (tmp_path / "heads.json").write_text(scores.model_dump_json())
        duoattention = kvlab.policy("duoattention", budget=30, heads=str(tmp_path / "heads.json"))
        signatures.add(plan.signature(words, duoattention))
    assert len(signatures) == 2
    assert "float32|" in plan.signature(words, POLICIES[0])


def test_an_answer_of_one_token_has_a_compressed_cache(words, example):
    (made,) = evaluation.answers(
        words, replace(example, max_new_tokens=1), [kvlab.policy("streamingllm", budget=10)], "prompt"
    )
    assert made["kv_bytes"] == 10 * 2 * 2 * 2 * 16 * 4 and made["generated_tokens"] == 1


@pytest.mark.parametrize("prefix", [" w7", " w7 w8"])
def test_the_beginning_of_an_answer_belongs_to_the_prompt(words, example, prefix):
    fed = evaluation.feed(words, replace(example, prefix=prefix), "prompt")
    assert fed.context == fed.ids.shape[1] == 65 + len(prefix.split())


def test_what_cannot_be_evaluated_is_said(words, tmp_path):
    path = tmp_path / "answers.jsonl"
    blunt = Example("x-1", "w3 w4 w5", "", ("w3",), 4)
    with pytest.raises(KvlabError, match="x-1 has no separate question"):
        list(evaluation.answers(words, blunt, [kvlab.policy("full")], "context"))
    with pytest.raises(KvlabError, match="x-1 has 3 tokens and asks for 100000 more"):
        list(evaluation.answers(words, replace(blunt, max_new_tokens=100_000), [kvlab.policy("full")], "prompt"))
    path.write_text(json.dumps({"key": "a"}) + "\n")
    with pytest.raises(KvlabError, match="line 1 is no answer"):
        evaluation.run(words, KILLED, path)
    assert path.read_text() == json.dumps({"key": "a"}) + "\n"
    with FileLock(tmp_path / ".answers.jsonl.lock"), pytest.raises(KvlabError, match="another evaluation is writing"):
        evaluation.run(words, KILLED, path)
