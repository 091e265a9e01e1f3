"""Several questions over one context in three ways, against runs by hand, and what follows from made-up losses."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch
from support.refusals import one_sentence
from support.spread import students
from support.turning import LOSSES
from torch.nn import functional as F

import kvlab
from kvlab import evaluation
from kvlab.analyses.shared_context import asking
from kvlab.analyses.tasks import contenders
from kvlab.errors import KvlabError
from kvlab.evaluation import conversing
from kvlab.tasks.turns import Turns
from kvlab.workbench import experiments

POLICY = kvlab.policy("snapkv", budget=40)


@pytest.fixture(scope="module")
def measured(reader):
    (example,) = Turns(lengths=(300,), kinds=("kv",), modes=("requests",), turns=3, trials=1).examples(reader)
    return example, asking.measure(reader, [example], [POLICY])


def losses(table, way, policy):
    return table.query("way == @way and policy == @policy").sort_values("turn").nll.tolist()


def test_the_full_cache_gives_each_answer_its_likelihood_after_all_that_was_said(reader, measured):
    """One plain forward pass over all that stands before an answer; in a chat that is the earlier turns too."""
    example, table = measured
    fed = [evaluation.feed(reader, part, "prompt").ids for part in example.parts]
    answers = [reader.encode(f" {part.answers[0]}", chat=False) for part in example.parts]
    chat, expected = fed[0], {"each": [], "first": []}
    for number, (prompt, answer) in enumerate(zip(fed, answers, strict=True)):
        chat = torch.cat([chat, conversing.next_turn(reader, example.parts[number])], 1) if number else chat
        for way, before in (("each", prompt), ("first", chat)):
            with torch.no_grad():
                logits = reader.model(torch.cat([before, answer], 1)).logits[0, before.shape[1] : -1]
            expected[way].append(float(F.cross_entropy(logits, answer[0, 1:])))
        chat = torch.cat([chat, answer], 1)
    for way, right in (("each", expected["each"]), ("none", expected["each"]), ("first", expected["first"])):
        assert losses(table, way, "full") == pytest.approx(right, abs=1e-4), way
    assert (table[table.policy == "full"].loss == 0).all()


def test_a_policy_s_first_turn_of_a_chat_is_that_of_a_question_that_was_read(measured):
    _, table = measured
    each, first, none = (losses(table, way, "snapkv") for way in ("each", "first", "none"))
    assert first[0] == pytest.approx(each[0], abs=1e-5) and first[1] != pytest.approx(each[1], abs=1e-3)
    assert none[0] != pytest.approx(each[0], abs=1e-3)
    full = losses(table, "none", "full")
    loss = table.query("way == 'none' and policy == 'snapkv'").sort_values("turn").loss
    assert loss.tolist() == pytest.approx([ours - theirs for ours, theirs in zip(none, full, strict=True)])


def test_with_room_for_all_nothing_is_lost(reader, measured):
    table = asking.measure(reader, [measured[0]], [kvlab.policy("snapkv", budget=4000)])
    assert table.loss.abs().max() < 1e-4


def test_a_policy_that_acts_while_decoding_is_refused(reader, measured):
    with pytest.raises(KvlabError, match="h2o acts at every decoding step"):
        asking.measure(reader, [measured[0]], [kvlab.policy("h2o", budget=40)])


@pytest.mark.parametrize("profile", ["quick", "full", "gpu"])
def test_every_profile_names_policies_that_are_not_refused(profile):
    job = experiments.jobs("shared_context", profile)[0].parameters
    chosen = contenders.contenders(job["budgets"], names=job["policies"])
    assert chosen and not [policy.name for policy in chosen if policy.needs.acts_while_decoding]


@pytest.mark.parametrize(("budgets", "names", "lacking"), [([64], [], "policies"), ([], ["snapkv"], "budgets")])
def test_nothing_to_compare_is_one_sentence(budgets, names, lacking):
    with one_sentence(f"nothing to compare: give some {lacking}"):
        contenders.contenders(budgets, names=names)


def test_costs_and_declines_are_paired_by_context():
    found = asking.findings(LOSSES)
    assert found.metrics["loss/each/snapkv/64"] == pytest.approx(0.2)
    assert found.metrics["loss/none/snapkv/64/turn_2"] == pytest.approx(1.1)
    assert found.metrics["question_agnostic/snapkv/64"] == pytest.approx((0.6 + 1.0) / 2)
    assert found.intervals["question_agnostic/snapkv/64"] == pytest.approx(students((0.6, 1.0)), rel=1e-4)
    assert found.metrics["decline/snapkv/64"] == pytest.approx((0.4 + 0.6) / 2)
    assert found.intervals["decline/snapkv/64"] == pytest.approx(students((0.4, 0.6)), rel=1e-4)
    assert found.metrics["between/none/keydiff/snapkv/64"] == pytest.approx((-0.3 - 0.5) / 2)
    assert found.metrics["hits/none/full"] == 1.0


def test_an_answer_of_one_token_has_no_score(reader, measured):
    example = measured[0]
    turns = (replace(example.turns[0], answers=("the",), prefix=""), *example.turns[1:])
    assert reader.encode("the", chat=False).shape[1] == 1
    table = asking.measure(reader, [replace(example, turns=turns)], [POLICY])
    assert (table[["nll", "hits", "loss"]].isna().all(axis=1) == (table.turn == 1)).all()


def test_what_has_no_score_counts_nowhere():
    bare = LOSSES.copy()
    bare.loc[(bare.context == "c0") & (bare.turn == 1), ["nll", "hits", "loss"]] = float("nan")
    found = asking.findings(bare)
    assert found.metrics["loss/none/snapkv/64"] == pytest.approx((0.7 + (1.1 + 1.5) / 2) / 2)
    assert found.metrics["loss/none/snapkv/64/turn_1"] == pytest.approx(1.1)
    assert found.metrics["decline/snapkv/64"] == pytest.approx(0.6)
    assert found.metrics["hits/none/full"] == 1.0
    assert asking.in_words(bare).endswith("27 answers scored")
    none = asking.findings(bare[bare.context == "c0"])
    assert "decline/snapkv/64" not in none.metrics and "loss/first/snapkv/64/turn_1" not in none.metrics


def test_what_was_asked_is_said_in_words():
    assert asking.in_words(LOSSES) == "2 contexts, 2 questions on each, 36 answers scored"
    assert isinstance(LOSSES, pd.DataFrame)
