"""Policies with one setting changed: each is its policy but for that."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.texts import FERRY

import kvlab
from kvlab import evaluation
from kvlab.analyses.compilerkv import quality
from kvlab.analyses.tasks import contenders, examples, planning, scores
from kvlab.analyses.tasks.examples import Item
from kvlab.analyses.tasks.variants import QuestionZSMerge
from kvlab.errors import KvlabError
from kvlab.methods._base.lookup import DecisionTables
from kvlab.methods.compilerkv import CompilerKV


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
    (twin,) = contenders.by_name({"compilerkv_twin": [64]}, tables="smollm2-135m")
    assert twin.model_dump() == quality.twin(padded, 64).model_dump()
    like = kvlab.policy("zsmerge", budget=64, residual=2)
    assert question.model_dump(exclude={"after"}) == like.model_dump() and question.after == 0
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


@pytest.mark.parametrize("prefix", [False, True], ids=["question", "question and a begun answer"])
def test_what_follows_the_text_of_a_prompt_is_counted(lm, needle, prefix):
    example = needle.example if prefix else replace(needle.example, prefix="")
    after = planning.after_text(lm, example)
    ids = evaluation.feed(lm, example, "prompt").ids[0]
    assert after > 4
    text, rest = (lm.tokenizer.decode(part) for part in (ids[:-after], ids[-after:]))
    assert text.endswith(example.prompt.strip()[-40:])
    assert rest.startswith("<|im_end|>") and rest.endswith("The secret code is" if prefix else "assistant\n")


def test_what_has_no_template_has_nothing_after_its_text(lm, needle):
    assert planning.after_text(lm, replace(needle.example, prefix="", chat=False)) == 0


def test_the_question_starts_zsmerges_scores_and_not_the_template_after_it(lm):
    trace = kvlab.capture(lm, FERRY, new_tokens=2)
    prompt = trace.prompt
    question = QuestionZSMerge(budget=32, after=5)
    assert question.observes == 8 + 5
    found = question.scores(prompt)
    rows = prompt.window_attention(13, lambda rows: rows)  # [rows, heads, 13, length]
    weights = [0.98 ** (7 - step) for step in range(8)]
    expected = sum(weight * rows[:, :, step] for step, weight in enumerate(weights))
    heads = rows.shape[1] // prompt.kv_heads
    expected = expected.unflatten(1, (prompt.kv_heads, heads)).sum(2)
    assert torch.allclose(found, expected, atol=1e-6)
    assert float(found[..., -5:].abs().max()) == 0, "the question does not see what comes after it"
    assert torch.allclose(QuestionZSMerge(budget=32).scores(prompt), kvlab.policy("zsmerge", budget=32).scores(prompt))


def test_a_plan_tells_zsmerge_where_the_question_of_each_task_ends(lm):
    asks = {"zsmerge_question": [64]}
    made = planning.plan(lm, ["sotu/1962"], ["squad/Oxygen"], 700, 0, needle=asks, ruler=asks, qa=asks, context_only={})
    ends = [policies[0][0].after for _, policies in made]
    assert ends == [planning.after_text(lm, items[0].example) for items, _ in made]
    assert ends[2] < ends[0], "the needle's answer is begun, the article's is not"


def learnt_alone(budget: int, seed: int, documents: tuple[str, ...] = ()) -> DecisionTables:
    weights = np.random.default_rng(seed).choice([0.25, 0.5, 1.0, 2.0], (30, 9)).tolist()
    about = {"learnt": "alone", "budget": budget, "documents": list(documents)}
    return DecisionTables.model_validate({"model": "smollm2-135m", "heads": weights, "risk": None, **about})


def test_filled_sets_have_the_weights_learnt_one_head_at_a_time_for_the_nearest_budget(lm):
    alone = {budget: learnt_alone(budget, budget) for budget in (64, 256)}
    asks = {"compilerkv": [100], "compilerkv_filled": [100, 200], "compilerkv_twin": [200]}
    made = planning.plan(
        lm, ["sotu/1962"], ["squad/Oxygen"], 700, 0,
        needle=asks, ruler=asks, qa=asks, context_only=asks, tables="smollm2-135m", per_head=alone,
    )  # fmt: skip
    joint = DecisionTables.load("smollm2-135m")
    for items, policies in made:
        assert items and len(policies) in (4, 8)  # needles are met twice
        for method, _ in policies:
            assert isinstance(method, CompilerKV)
            expected = joint if method.name == "compilerkv" else alone[64 if method.budget == 100 else 256]
            assert method.tables_in_use.heads == expected.heads
            assert method.pad == ("none" if method.name == "compilerkv" else "budget")


def test_filled_sets_are_those_of_a_file_with_these_weights(lm, needle, tmp_path):
    """Which a policy takes by another way; without such weights the tables of joint trials fill the sets."""
    alone = {64: learnt_alone(64, 3)}
    file = tmp_path / "weights.json"
    file.write_text(alone[64].model_dump_json())
    asks = {"compilerkv_filled": [64]}
    ((ours, _),), ((joint, _),) = (
        planning.plan(
            lm, ["sotu/1962"], ["squad/Oxygen"], 700, 0,
            needle=asks, ruler={}, qa={}, context_only={}, tables="smollm2-135m", per_head=weights,
        )[0][1]
        for weights in (alone, {})
    )  # fmt: skip
    by_file = kvlab.policy("compilerkv", budget=64, tables=str(file), pad="budget")
    found, same, other = (next(scores.passes(lm, needle, [(method, "prompt")])) for method in (ours, by_file, joint))
    assert found["nll"] == pytest.approx(same["nll"], abs=1e-6) and found["kv_bytes"] == other["kv_bytes"]
    assert found["nll"] != pytest.approx(other["nll"], abs=1e-4)


def test_texts_that_weights_were_learnt_from_may_be_asked_where_no_policy_has_them(lm):
    alone, asks = {64: learnt_alone(64, 1, ("sotu/1962@abc",))}, {"compilerkv": [64]}
    assert planning.plan(
        lm, ["sotu/1962"], ["squad/Oxygen"], 700, 0, needle=asks, ruler=asks, qa=asks, context_only={}, per_head=alone
    )


def test_a_plan_refuses_texts_that_weights_were_learnt_from(lm):
    asks = {"compilerkv_filled": [64]}
    for seen in ("sotu/1962", "squad/Oxygen"):
        with pytest.raises(KvlabError, match=f"learnt from {seen}"):
            planning.plan(
                lm, ["sotu/1962"], ["squad/Oxygen"], 700, 0,
                needle=asks, ruler=asks, qa=asks, context_only={}, per_head={64: learnt_alone(64, 1, (f"{seen}@abc",))},
            )  # fmt: skip
