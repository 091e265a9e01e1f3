"""Scores at small budgets: what one teacher-forced pass says, examples, resuming, and paired gains by hand."""

import json
import uuid
from dataclasses import replace

import pandas as pd
import pytest
import torch
from support.longbench import record
from support.spread import students
from torch.nn import functional as F

import kvlab
from kvlab import evaluation, papers
from kvlab.analyses.tasks import examples, gains, longbench, planning, scores
from kvlab.analyses.tasks.examples import Item
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.tasks import Example
from kvlab.workbench import experiments

POLICIES = [kvlab.policy("full"), *(kvlab.policy(name, budget=64) for name in ("snapkv", "h2o", "rocketkv"))]


@pytest.fixture(scope="module")
def needle(lm) -> Item:
    return examples.needles(lm, ["sotu/1962"], length=170)[0]


@pytest.fixture(scope="module")
def greedy(lm, needle) -> dict:
    """What each policy says by itself, token by token."""
    example = replace(needle.example, max_new_tokens=6)
    found = evaluation.answers(lm, example, POLICIES, "prompt")
    return {method: made["prediction"] for method, made in zip(POLICIES, found, strict=True)}


def test_the_full_caches_likelihood_is_the_models_own(lm, needle):
    (found,) = scores.passes(lm, needle, [(POLICIES[0], "prompt")])
    prompt = evaluation.feed(lm, needle.example, "prompt").ids
    answer = lm.tokenizer(needle.answer, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = lm.model(torch.cat([prompt, answer], 1)).logits[0, prompt.shape[1] :]
    expected = F.cross_entropy(logits[1:-1].float(), answer[0, 2:])
    assert found["nll"] == pytest.approx(float(expected), abs=1e-3)
    assert found["hits"] == (logits[1:-1].argmax(-1) == answer[0, 2:]).float().mean()
    assert found["scored_tokens"] == answer.shape[1] - 2 == 4
    assert found["prompt_tokens"] == prompt.shape[1]


def test_the_score_is_whether_greedy_decoding_says_the_answer(lm, needle, greedy):
    wanted = [(method, "prompt") for method in greedy]
    judged = dict(zip(greedy, scores.passes(lm, needle, wanted), strict=True))
    for method, said in greedy.items():
        assert judged[method]["score"] == said.startswith(needle.answer), method
        own = Item("needle", "", needle.example, said)
        assert lm.decode(lm.tokenizer(said, add_special_tokens=False)["input_ids"]) == said
        (found,) = scores.passes(lm, own, [(method, "prompt")])
        assert (found["score"], found["hits"]) == (1.0, 1.0), method
    assert {found["score"] for found in judged.values()} == {0.0, 1.0}  # some keep the needle at this budget


def test_feeding_at_once_is_the_same_for_policies_that_rest_while_decoding(lm, needle, monkeypatch):
    resting = [(method, "prompt") for method in POLICIES[:2]]
    at_once = list(scores.passes(lm, needle, resting))
    for method in POLICIES[:2]:
        acting = replace(method.needs, selects=True)
        monkeypatch.setattr(type(method), "needs", property(lambda self, acting=acting: acting))
    for together, stepwise in zip(at_once, scores.passes(lm, needle, resting), strict=True):
        assert together["nll"] == pytest.approx(stepwise["nll"], abs=1e-3)


def test_where_nothing_is_evicted_the_question_may_come_later(lm, needle):
    wanted = [(POLICIES[0], "prompt"), (POLICIES[0], "context"), (POLICIES[1], "context"), (POLICIES[1], "prompt")]
    whole, later, unread, aware = scores.passes(lm, needle, wanted)
    assert later["nll"] == pytest.approx(whole["nll"], abs=1e-3)
    assert unread["nll"] != pytest.approx(aware["nll"], abs=1e-2)
    (alone,) = scores.passes(lm, needle, [(POLICIES[1], "prompt")])
    assert alone["nll"] == pytest.approx(aware["nll"], abs=1e-3)  # though its prompt came in two pieces


def test_an_answer_without_a_scored_token_is_refused(lm, needle):
    for answer, n in ((" the", 1), (" the cat", 2)):
        with pytest.raises(KvlabError, match=f"has {n} tokens, and at least 3 are needed"):
            next(scores.passes(lm, Item("needle", "", needle.example, answer), [(POLICIES[0], "prompt")]))


def test_what_morphkv_gains_from_the_prompt_it_reads_at_its_first_step_does_not_count(lm, needle, monkeypatch):
    """With the first decoding step alone its likelihood would be the full cache's, whatever its budget."""
    wanted = [(POLICIES[0], "prompt"), (kvlab.policy("morphkv", budget=64), "prompt")]
    ids = lm.tokenizer(needle.answer, add_special_tokens=False)["input_ids"]
    start = replace(needle, answer=lm.tokenizer.decode(ids[:2]))
    assert lm.tokenizer(start.answer, add_special_tokens=False)["input_ids"] == ids[:2]
    with monkeypatch.context() as patch:
        patch.setattr(scores, "SCORED_FROM", 1)
        full, pruned = scores.passes(lm, start, wanted)
    assert pruned["nll"] == pytest.approx(full["nll"], abs=1e-3)
    full, pruned = scores.passes(lm, needle, wanted)
    assert pruned["nll"] > full["nll"] + 0.1


# ---------------------------------------------------------------------------------------------------- a whole run


def test_a_run_prefills_once_and_goes_on_where_it_was_cut_off(lm, needle, tmp_path, monkeypatch):
    path = tmp_path / "answers.jsonl"
    prefills = []
    real = scores.shared_prefill
    monkeypatch.setattr(scores, "shared_prefill", lambda *args: prefills.append(1) or real(*args))
    wanted = [(method, "prompt") for method in POLICIES[1:3]]
    first = scores.measure(lm, [([needle], wanted)], path)
    assert len(prefills) == 1
    assert first["policy"].tolist() == ["full", "snapkv", "h2o"] and first["length"].tolist() == [170] * 3
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # killed while the last line was written
    second = scores.measure(lm, [([needle], wanted)], path)
    assert len(prefills) == 2 and len(path.read_bytes().splitlines()) == 3
    pd.testing.assert_frame_equal(first, second, rtol=1e-4)
    monkeypatch.setattr(scores, "passes", lambda *_: pytest.fail("everything is known"))
    pd.testing.assert_frame_equal(second, scores.measure(lm, [([needle], wanted)], path))
    assert {"key", "nll", "score"} <= set(json.loads(path.read_text().splitlines()[0]))


# ---------------------------------------------------------------------------------------------------- the examples


def test_examples_come_from_different_documents(lm):
    needles = examples.needles(lm, length=300)
    assert [item.document for item in needles] == list(examples.DOCUMENTS)
    assert [item.example.marks["depth"] for item in needles] == [0.1, 0.3, 0.5, 0.7, 0.9]
    keys = examples.multikey(lm, length=300)
    assert len({item.answer for item in [*needles, *keys]}) == 10
    for item in [*needles, *keys]:
        assert item.answer.strip() in item.example.context and item.answer.strip() not in item.example.question
        assert item.example.max_new_tokens == examples.NEW_TOKENS


def test_the_documents_of_a_set_have_depths_of_their_own(lm):
    items = examples.needles(lm, ["mixed/8"], length=170)
    assert [item.document for item in items] == corpus.named("mixed/8")
    assert [item.example.marks["depth"] for item in items] == pytest.approx(
        [0.1 + 0.8 * n / 7 for n in range(8)], abs=0.01
    )


def test_an_identifier_is_hidden_in_each_document(lm):
    items = examples.identifiers(lm, ["sotu/1962", "squad/Rhine"], length=300)
    assert [(item.task, item.document) for item in items] == [("single_3", "sotu/1962"), ("single_3", "squad/Rhine")]
    assert len({uuid.UUID(item.answer.strip()) for item in items}) == 2
    for item in items:
        assert item.answer.strip() in item.example.context and item.answer.strip() not in item.example.question
        tokens = len(lm.tokenizer(item.answer, add_special_tokens=False)["input_ids"])
        assert scores.SCORED_FROM < tokens <= item.example.max_new_tokens


def test_questions_stand_over_their_own_paragraph_in_longbenchs_format(lm):
    for item in examples.questions(lm, length=700, articles=examples.ARTICLES[:3]):
        assert item.answer in item.example.context and item.answer in item.example.answers
        assert item.example.question.rstrip().endswith("Answer:")
        assert item.example.marks["kind"] == "multifieldqa_en"
        assert 450 < item.example.marks["tokens"] <= 700
        scored = len(lm.tokenizer(item.answer, add_special_tokens=False)["input_ids"]) - scores.SCORED_FROM
        assert 4 <= scored <= examples.NEW_TOKENS - scores.SCORED_FROM


def test_a_paragraph_that_does_not_fit_is_refused(lm):
    with pytest.raises(KvlabError, match="does not fit"):
        examples.questions(lm, articles=["squad/Oxygen"], length=110)


def test_a_grid_has_a_needle_for_each_cell(lm):
    grid = examples.needle_grid(lm, [200, 300], [0.1, 0.9])
    assert [(i.example.marks["length"], i.example.marks["depth"]) for i in grid] == [
        (200, 0.1),
        (200, 0.9),
        (300, 0.1),
        (300, 0.9),
    ]


def test_a_plan_asks_each_document_and_article_and_says_where_policies_compress(reader):
    plan = planning.plan(
        reader,
        ["sotu/1962", "sotu/1975"],
        ["squad/Oxygen"],
        length=700,
        seed=0,
        needle={"snapkv": [64, 128]},
        ruler={"h2o": [64]},
        qa={"dapq": [64]},
        context_only={"snapkv": [64]},
    )
    met = [[(policy.name, getattr(policy, "budget", None), place) for policy, place in pairs] for _, pairs in plan]
    needle = [("snapkv", 64, "prompt"), ("snapkv", 128, "prompt"), ("snapkv", 64, "context")]
    assert met == [needle, [("h2o", 64, "prompt")], [("dapq", 64, "prompt")]]
    asked = planning.questions_table(plan)
    assert asked["task"].tolist() == ["needle"] * 2 + ["ruler"] * 2 + ["qa"]
    assert asked["document"].tolist() == ["sotu/1962", "sotu/1975"] * 2 + ["squad/Oxygen"]
    assert asked["asked"].str.endswith("?").sum() >= 3 and "Answer:" not in set(asked["asked"])
    assert asked["right answer"].tolist() == [item.answer.strip() for items, _ in plan for item in items]


def test_what_only_the_full_profile_asks_is_left_out_without_policies(reader):
    given = {"tiny_documents": ["sotu/1975"], "tiny_length": 400}
    assert planning.full_only(reader, ["sotu/1962"], 300, 0, **given, tiny_needle={}, identifier={}) == []
    plan = planning.full_only(
        reader, ["sotu/1962"], 300, 0, **given, tiny_needle={"sparq": [32]}, identifier={"dapq": [80]}
    )
    met = [
        (item.task, item.document, item.example.marks["length"], policy.name, place)
        for items, pairs in plan
        for item in items
        for policy, place in pairs
    ]
    assert met == [
        ("tiny_needle", "sotu/1975", 400, "sparq", "prompt"),
        ("single_3", "sotu/1962", 300, "dapq", "prompt"),
    ]
    same = {"tiny_documents": [], "tiny_length": 400, "tiny_needle": {"sparq": [32]}, "identifier": {}}
    ((items, _),) = planning.full_only(reader, ["sotu/1962"], 300, 0, **same)
    assert [item.document for item in items] == ["sotu/1962"]


def test_longbench_meets_its_policies_at_every_budget(reader, tmp_path, monkeypatch):
    for name in longbench.TASKS:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record(name)) + "\n")
    monkeypatch.setattr(longbench, "POLICIES", ("snapkv", "h2o"))
    scored = longbench.scored(reader, tmp_path, length=300, limit=1)
    met = set(zip(scored["policy"], scored["budget"].fillna(0), strict=True))
    assert met == {("full", 0), ("snapkv", 64), ("snapkv", 256), ("h2o", 64), ("h2o", 256)} and len(scored) == 5
    assert (scored["n"] == 1).all() and {"score", "low", "high", "difference"} <= set(scored)


def test_what_came_out_is_said_in_words():
    said = gains.in_words(gains.findings(TABLE))
    assert said == "16 answers from 4 prefills; NLL under the full cache: needle 0.20, qa 0.50"


# ---------------------------------------------------------------------------------------------------- paired gains


def rows(task: str, policy: str, budget: float | None, nll: list[float], score: list[float], at: str = "prompt"):
    """One row for each example, all with the same id as RULER's have, told apart by their documents."""
    return [
        {
            "task": task,
            "document": f"d{i}",
            "example": "same-id",
            "policy": policy,
            "budget": budget,
            "compress_at": at,
            "nll": n,
            "score": s,
            "hits": s / 2 + 0.5,
            "kv_bytes": 8_000 * (i + 1) if budget is None else 100 * budget,
        }
        for i, (n, s) in enumerate(zip(nll, score, strict=True))
    ]


TABLE = pd.DataFrame(
    [
        *rows("needle", "full", None, [0.1, 0.3], [1, 1]),
        *rows("needle", "dapq", 64, [1.0, 2.0], [1, 0]),
        *rows("needle", "snapkv", 64, [1.5, 1.5], [0, 0]),
        *rows("needle", "snapkv", 64, [2.5, 3.5], [0, 0], at="context"),
        *rows("qa", "full", None, [0.5, 0.5], [0, 1]),
        *rows("qa", "dapq", 64, [0.6, 0.8], [0, 1]),
        *rows("qa", "snapkv", 64, [1.0, 1.6], [0, 0]),
        *rows("qa", "h2o", 64, [3.0, 3.0], [0, 0]),
    ]
)


def test_gains_are_paired_by_example():
    found = gains.findings(TABLE)
    assert found.metrics["gain/needle/dapq_over_snapkv/64"] == pytest.approx(0.0)  # +0.5 and -0.5
    assert found.intervals["gain/needle/dapq_over_snapkv/64"] == pytest.approx(students((-0.5, 0.5)), rel=1e-4)
    assert found.metrics["gain/qa/dapq_over_snapkv/64"] == pytest.approx((0.4 + 0.8) / 2)
    assert found.metrics["score_gain/needle/dapq_over_snapkv/64"] == 0.5
    assert found.metrics["gain/all/dapq_over_snapkv/64"] == pytest.approx(0.3)
    assert found.metrics["gain/qa/dapq_over_h2o/64"] == pytest.approx(2.3)
    assert "gain/all/dapq_over_h2o/64" not in found.metrics  # h2o met one of the two tasks only
    assert "nll/all/h2o/64" not in found.metrics


def test_tasks_with_prompts_of_their_own_stand_apart_from_all():
    more = [*rows("single_3", "full", None, [0.2, 0.4], [1, 1]), *rows("single_3", "dapq", 80, [1.0, 1.0], [0, 0])]
    more += rows("single_3", "snapkv", 80, [2.0, 4.0], [0, 0])
    before, after = gains.findings(TABLE).metrics, gains.findings(pd.concat([TABLE, pd.DataFrame(more)])).metrics
    assert {name: after[name] for name in before} == before
    assert after["gain/single_3/dapq_over_snapkv/80"] == pytest.approx(2.0)
    assert after["nll/single_3/full"] == pytest.approx(0.3)
    alone = gains.findings(pd.DataFrame(more)).metrics
    assert alone and not any("/all/" in name for name in alone)


def test_what_the_claims_of_the_full_profile_ask_for_is_there():
    """By the policies and budgets that the full profile gives these tasks."""
    job = experiments.jobs("tasks_at_small_budgets", "full")[0].parameters
    table = [row for task in gains.FULL_PROFILE_TASKS for row in rows(task, "full", None, [0.2, 0.4], [1, 1])]
    for task, asked in (("tiny_needle", job["tiny_needle"]), ("single_3", job["identifier"])):
        for number, (policy, budgets) in enumerate(asked.items()):
            table += [row for b in budgets for row in rows(task, policy, b, [0.3 + number, 0.9], [0, 1])]
    found = gains.findings(pd.DataFrame(table))
    names = set(found.metrics) | {f"{name}/{end}" for name in found.intervals for end in ("low", "high")}
    waiting = [claim for claim in papers.claims("tasks_at_small_budgets") if claim.profile == "full"]
    assert len(waiting) == 5 and not set().union(*(claim.metrics for claim in waiting)) - names
    assert len(corpus.named(job["tiny_documents"])) == 30


def test_a_gain_widens_from_the_largest_budget_to_the_smallest():
    table = pd.concat(
        [
            TABLE,
            pd.DataFrame(
                [*rows("qa", "dapq", 256, [0.5, 0.6], [0, 1]), *rows("qa", "snapkv", 256, [0.6, 0.6], [0, 0])]
            ),
        ]
    )
    found = gains.findings(table)
    assert found.metrics["widening/qa/dapq_over_snapkv"] == pytest.approx((0.4 - 0.1 + 0.8 - 0.0) / 2)
    assert found.intervals["widening/qa/dapq_over_snapkv"] == pytest.approx(students((0.3, 0.8)), rel=1e-4)
    assert "widening/needle/dapq_over_snapkv" not in found.metrics  # at one budget only


def test_scores_losses_and_what_is_retained():
    found = gains.findings(TABLE)
    assert (found.metrics["score/needle/dapq/64"], found.metrics["score/needle/full"]) == (0.5, 1.0)
    assert found.metrics["loss/needle/dapq/64"] == pytest.approx((0.9 + 1.7) / 2)
    assert found.metrics["loss/all/dapq/64"] == pytest.approx((0.9 + 1.7 + 0.1 + 0.3) / 4)
    assert found.metrics["stored/needle/dapq/64"] == pytest.approx((0.8 + 0.4) / 2), "example by example"
    assert found.metrics["retained/qa/dapq/64"] == pytest.approx(1.0)
    assert found.metrics["retained/qa/snapkv/64"] == pytest.approx(0.5 / 0.75)
    assert found.metrics["question_aware/needle/snapkv/64"] == pytest.approx((1.0 + 2.0) / 2)
    assert "question_aware/qa/snapkv/64" not in found.metrics


def test_both_places_of_a_policy_stand_below_one_another():
    found = gains.question_read_or_not(TABLE)
    assert found["policy"].tolist() == ["snapkv at 64, question read", "snapkv at 64, question held back"]
    assert found["value"].tolist() == pytest.approx([1.5, 3.0])
    assert found.loc[0, ["low", "high"]].tolist() == [1.5, 1.5]
    assert found.loc[1, ["low", "high"]].tolist() == pytest.approx(students((2.5, 3.5)), rel=1e-4)


def test_scores_that_are_all_alike_are_not_certain():
    found = gains.findings(TABLE)
    low, high = found.intervals["score/needle/full"]
    assert low == pytest.approx(0.025**0.5) and high == 1.0  # two right of two, by Clopper and Pearson
    low, high = found.intervals["hits/needle/snapkv/64"]
    assert 0 < low < 0.5 < high < 1
    low, high = found.intervals["retained/qa/snapkv/64"]
    assert low < 0.5 / 0.75 < high <= 1 / 0.75
    low, high = found.intervals["score_gain/qa/dapq_over_h2o/64"]
    assert -1 <= low < 0.5 < high <= 1


def test_scores_have_means_by_kind_of_text():
    names = dict(zip(("d0", "d1", "d2", "d3"), ("sotu/1962", "sotu/1999", "squad/Oxygen", "squad/Rhine"), strict=True))
    table = pd.DataFrame(
        [
            *rows("needle", "full", None, [0.1, 0.3, 0.2, 0.2], [1, 1, 1, 1]),
            *rows("needle", "dapq", 64, [1.0, 2.0, 1.0, 1.0], [1, 0, 1, 1]),
            *rows("needle", "snapkv", 64, [1.5, 1.5, 3.0, 4.0], [0, 0, 0, 0]),
            *rows("needle", "snapkv", 64, [2.5, 2.5, 3.0, 4.0], [0, 0, 0, 0], at="context"),
        ]
    )
    found = gains.findings(table.assign(document=table["document"].map(names)))
    assert found.metrics["gain/needle/dapq_over_snapkv/64/genre/sotu"] == pytest.approx(0.0)
    assert found.metrics["gain/needle/dapq_over_snapkv/64/genre/squad"] == pytest.approx(2.5)
    assert found.metrics["score/needle/dapq/64/genre/sotu"] == 0.5
    assert found.metrics["question_aware/needle/snapkv/64/genre/squad"] == 0.0


def test_claimed_gains_that_were_not_measured_are_left_out():
    found = gains.claimed(gains.findings(TABLE))
    assert found["label"].tolist() == ["dapq over snapkv, qa, 64", "dapq over h2o, qa, 64"]
    assert set(found["paper"]) == {"DapQ, tables 2 to 9"}
    assert found["value"].tolist() == pytest.approx([0.6, 2.3])
    assert found.loc[0, ["low", "high"]].tolist() == pytest.approx(students((0.4, 0.8)), rel=1e-4)


def test_every_claimed_gain_is_among_the_pairs_that_are_measured():
    claimed = {(better, other) for comparisons in gains.CLAIMED.values() for _, better, other, _ in comparisons}
    assert claimed <= set(gains.PAIRS)


def test_levels_are_a_table_by_measure_task_and_policy():
    levels = gains.findings(TABLE).frame(gains.AT_BUDGET).query("measure == 'nll' and task == 'qa'")
    found = levels.set_index("policy")
    assert found["value"].to_dict() == pytest.approx({"dapq": 0.7, "snapkv": 1.3, "h2o": 3.0})
    assert found.loc["snapkv", ["low", "high"]].tolist() == pytest.approx(students((1.0, 1.6)), rel=1e-4)
    assert found["budget"].tolist() == [64, 64, 64]


def test_an_example_keeps_its_marks_in_the_table():
    item = Item("needle", "d", Example("id", "c", "q", ("1",), 4, marks={"depth": 0.5}), " 1")
    row = scores._row(item, POLICIES[1], "prompt", {"nll": 1.0})
    assert (row["depth"], row["budget"], row["policy"]) == (0.5, 64, "snapkv")
