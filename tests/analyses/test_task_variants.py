"""Policies with one setting changed: each is its policy but for that."""

import pytest

import kvlab
from kvlab import evaluation
from kvlab.analyses.tasks import contenders, examples, scores
from kvlab.analyses.tasks.examples import Item


@pytest.fixture(scope="module")
def needle(lm) -> Item:
    return examples.needles(lm, ["sotu/1962"], length=170)[0]


def test_variants_are_their_policies_with_one_setting_changed(lm, needle):
    wanted = {"snapkv_unpooled": [64], "dapq_pooled": [64], "compilerkv_filled": [64], "zsmerge_question": [64]}
    made = contenders.by_name(wanted, tables="smollm2-135m")
    assert [method.name for method in made] == list(wanted)
    unpooled, pooled, filled, question = made
    assert unpooled.model_dump() == kvlab.policy("snapkv", budget=64, kernel=1).model_dump()
    assert pooled.model_dump(exclude={"kernel"}) == kvlab.policy("dapq", budget=64).model_dump()
    padded = kvlab.policy("compilerkv", budget=64, tables="smollm2-135m", pad="budget")
    assert filled.model_dump() == padded.model_dump()
    assert question.model_dump() == kvlab.policy("zsmerge", budget=64, residual=2, window=16).model_dump()
    assert not set(wanted) & set(kvlab.policies())
    (spends,) = contenders.by_name({"quest_spending": [64]})
    assert spends.model_dump() == kvlab.policy("quest", budget=64, page=1, last="cut").model_dump()

    plain = pooled.replace(kernel=1), kvlab.policy("dapq", budget=64)
    same, as_published, other = scores.passes(lm, needle, [(method, "prompt") for method in (*plain, pooled)])
    assert same["nll"] == pytest.approx(as_published["nll"], abs=1e-4)
    assert other["nll"] != pytest.approx(as_published["nll"], abs=1e-3)


def test_rivals_at_tiny_budgets_are_those_of_rocketkvs_budgets(lm, needle):
    """SparQ's rank is rounded to what the paper's setting implies, instead of falling to 1."""
    (rounded,) = contenders.by_name({"sparq_rounded": [40]})
    length = evaluation.feed(lm, needle.example, "prompt").ids.shape[-1] + examples.NEW_TOKENS
    share = lm.model.config.head_dim * 40 / length
    assert round(share) > int(share) > 0, "a budget at which rounding shows"
    as_given = kvlab.policy("sparq", budget=40, rank=round(share)), kvlab.policy("sparq", budget=40)
    found, same, other = scores.passes(lm, needle, [(method, "prompt") for method in (rounded, *as_given)])
    assert found["nll"] == pytest.approx(same["nll"], abs=1e-5)
    assert found["nll"] != pytest.approx(other["nll"], abs=1e-4)
