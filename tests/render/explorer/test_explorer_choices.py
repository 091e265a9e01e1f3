"""Which policies, budgets and places can be explored: those of a user too, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from support.exploring import (
    shown_by,
)
from support.replaying import LAYERS, PROMPT, STEPS, tensors

import kvlab
from kvlab import KvlabError, Trace
from kvlab.methods.streamingllm import StreamingLLM
from kvlab.render.explorer import choices


class EveryOther(StreamingLLM):
    """A user's own: what streamingllm keeps, under another name; it fails where the budget is 13."""

    name = "every_other"

    def compress(self, store, prompt):
        if self.budget == 13:
            raise ZeroDivisionError("<b>thirteen</b>")
        super().compress(store, prompt)


def test_a_policy_of_the_users_own_is_explored_at_its_own_budget(trace):
    explorer = kvlab.explore(trace, EveryOther(budget=11), "streamingllm")
    try:
        assert explorer.budget == 11 and {11, 16, 32} == set(explorer.budgets)
        assert explorer.names[0] == "every_other" and explorer.panel is not None
        assert "every_other, budget 11" in explorer.html()
        own, named = explorer.looks()
        assert own.read.equal(named.read)
        explorer.show(budget=16, left="full")
        explorer.show(left="every_other")
        assert int(explorer.looks()[0].read.sum()) == 16 + 1
    finally:
        explorer.close()


def test_an_oracle_is_explored_where_it_is_asked_for(trace):
    with_oracle, without = kvlab.explore(trace, "oracle_attention", "full"), kvlab.explore(trace, "snapkv", "full")
    try:
        assert "oracle_attention" in with_oracle.names and "oracle_attention" not in without.names
        assert set(with_oracle.names) - {"oracle_attention"} == set(without.names)
    finally:
        with_oracle.close()
        without.close()


def test_what_fails_within_a_users_policy_is_said_and_goes_to_the_log(trace):
    explorer = kvlab.explore(trace, EveryOther(budget=11), "full", budgets=[11, 13])
    try:
        explorer.panel  # noqa: B018
        before = shown_by(explorer)
        with pytest.raises(ZeroDivisionError):
            explorer._controls["budget"].value = 13
        assert "ZeroDivisionError: &lt;b&gt;thirteen" in explorer._message.value
        assert shown_by(explorer) == before and explorer._controls["budget"].value == explorer.budget == 11
    finally:
        explorer.close()


def test_a_named_policy_that_needs_more_than_a_budget_is_not_offered(trace, monkeypatch):
    made = choices.made

    def refuse(name, budget):
        if name == "quest":
            raise KvlabError("quest: parameter 'page' is missing")
        return made(name, budget)

    monkeypatch.setattr(choices, "made", refuse)
    names = kvlab.explore(trace, "snapkv", "full", budgets=[36]).names
    assert "quest" not in names and "sparq" in names


def test_two_variants_of_one_policy_stand_side_by_side(trace):
    plain, wide = kvlab.policy("snapkv", budget=36), kvlab.policy("snapkv", budget=36, sets="head")
    explorer = kvlab.explore(trace, plain, wide)
    try:
        assert explorer.chosen == ["snapkv", "snapkv(sets='head')"] and explorer.budget == 36
        assert [look.result.policy for look in explorer.looks()] == [plain, wide]
        assert "snapkv(sets=&#x27;head&#x27;), budget 36" in explorer.html()
    finally:
        explorer.close()
    with pytest.raises(KvlabError, match="both sides are snapkv"):
        kvlab.explore(trace, plain, plain.replace(budget=40))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(layer=LAYERS), rf"layer {LAYERS} is outside this trace, which has 0 .. {LAYERS - 1}"),
        (dict(step=0), rf"step 0 is outside this trace, which has 1 .. {STEPS}"),
        (dict(head=-1), r"head -1 is outside"),
        (dict(budget=37), r"budgets of this view are 36, 40, 44"),
        (dict(left="snapvk"), r"snapvk.*snapkv"),
        (dict(colour="red"), r"colour"),
        (dict(layer="1"), r"layer must be a whole number, and is '1'"),
        (dict(step=1.5), r"step must be a whole number"),
    ],
)
def test_a_place_that_is_not_there_is_one_sentence_and_changes_nothing(explorer, changes, sentence):
    before = explorer.html()
    with pytest.raises(KvlabError, match=sentence):
        explorer.show(**changes)
    assert explorer.html() == before


def test_budgets_are_whole_numbers(trace):
    with pytest.raises(KvlabError, match=r"a budget must be a whole number, and is 0\.25"):
        kvlab.explore(trace, budgets=[0.25])
    with pytest.raises(KvlabError, match="from 1 on, and are \\[0, 40\\]"):
        kvlab.explore(trace, budgets=[40, 0])
    explorer = kvlab.explore(trace, "snapkv", "full", budgets=np.array([40, 36]), layer=np.int64(1))
    assert explorer.budgets == [36, 40] and type(explorer.spot.layer) is int
    explorer = kvlab.explore(trace, "snapkv", "full", budget=37)
    assert explorer.budget == 37 and 37 in explorer.budgets and "snapkv, budget 37" in explorer.html()


def test_a_trace_without_a_response_or_pseudo_queries(trace):
    queries, keys, values, _ = tensors()
    bare = Trace.from_tensors(queries[:, :, :PROMPT], keys[:, :, :PROMPT], values[:, :, :PROMPT], PROMPT)
    with pytest.raises(KvlabError, match="no response"):
        kvlab.explore(bare)
    poor = Trace.from_tensors(queries, keys, values, PROMPT)
    with pytest.raises(KvlabError, match="pseudo"):
        kvlab.explore(poor, "snapkv", "dapq", budgets=[40])
    assert "dapq" not in kvlab.explore(poor, "snapkv", "morphkv", budgets=[40]).names
    assert "h2o" not in kvlab.explore(trace, "snapkv", "morphkv", budgets=[40]).names
    assert "dapq" in kvlab.explore(trace, "snapkv", "morphkv", budgets=[40]).names
