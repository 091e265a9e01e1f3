"""The sentences of the notebooks on tasks, speed and all methods together, on made-up findings in both directions; and
that every notebook's stories are held to the length of one."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pandas as pd
import pytest
from support.paths import ROOT
from support.stories import around, called, counted, told, unmeasured

from kvlab.analyses.findings import Findings
from kvlab.analyses.speed import footprint, ratios
from kvlab.analyses.tasks import gains
from kvlab.analyses.together import equal_bytes, storing
from kvlab.render.stories import speed as of_speed
from kvlab.render.stories import tasks as of_tasks
from kvlab.render.stories import together as of_all


def test_every_story_that_a_notebook_tells_is_held_to_its_length():
    """`support.stories.told` counts sentences: each function that tells a figure goes through it in some test."""
    notebooks = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
        notebooks.append(ast.parse("\n".join("".join(cell["source"]) for cell in cells)))
    folders = (Path(__file__).parent, ROOT / "tests" / "analyses")
    tests = [ast.parse(path.read_text("utf-8")) for folder in folders for path in folder.glob("test_*.py")]
    tell = called(notebooks, "record")
    assert len(tell) > 60 and tell <= called(tests, "told")


@pytest.mark.parametrize(
    ("sentences", "count"),
    [(["One. Two (eq. 6 and 0.5).", "", "Three."], 3), (["Of 2.5 one; At 3."], 1)],
)
def test_sentences_are_counted_as_a_reader_counts_them(sentences, count):
    assert len(counted(sentences)) == count
    with pytest.raises(AssertionError):
        counted([*sentences, "No end"])
    with pytest.raises(AssertionError):
        told(sentences * 5)


def empty() -> Findings:
    return Findings(pd.DataFrame())


# --- tasks


def test_needles_and_questions_name_the_best_and_the_worst():
    found = empty()
    for policy, budget, hits, loss in (("snapkv", 128, 0.9, 0.2), ("h2o", 128, 0.3, 0.6), ("dapq", 256, 1.0, 0.0)):
        keys = {"policy": policy, "budget": budget}
        found.set(gains.AT_BUDGET, *around(hits), measure="hits", task="needle", **keys)
        found.set(gains.AT_BUDGET, *around(loss), measure="loss", task="qa", **keys)
    found.set(gains.WITHOUT_BUDGET, *around(0.9), measure="hits", task="needle", policy="full")
    text = told(of_tasks.needles(found))
    assert "With 128 entries snapkv finds 90 %" in text and "h2o 30 %" in text
    assert "RocketKV prints 99.0 % with 256 tokens of far longer prompts and DapQ prints 99.5 %" in text
    found.set(gains.AT_BUDGET, *around(0.4), measure="hits", task="needle", policy="dapq", budget=128)
    assert "DapQ prints 99.5 % with 256 tokens of far longer prompts and finds 40 % (39 to 41) here" in told(
        of_tasks.needles(found)
    )
    for full, told_of in ((1.0, "none finds"), (0.9, "1 finds"), (0.4, "2 find")):
        found.set(gains.WITHOUT_BUDGET, *around(full), measure="hits", task="needle", policy="full")
        text = told(of_tasks.needles(found))
        assert f"Of 3 policies {told_of} as many as the full cache" in text
    text = told(of_tasks.against_budget(found))
    assert "least with snapkv, 0.200" in text and "most with h2o, 0.600" in text
    assert "No policy" in unmeasured(of_tasks.needles(empty()))
    assert "No policy" in unmeasured(of_tasks.against_budget(empty()))


@pytest.mark.parametrize(("gain", "clear", "lost", "open_"), [(0.1, 1, 0, 0), (-0.1, 0, 1, 0), (0.001, 0, 0, 1)])
def test_claimed_gains_are_counted_by_what_their_intervals_say(gain, clear, lost, open_):
    found = empty()
    found.set(gains.GAIN, *around(gain), task="qa", better="zsmerge", other="h2o", budget=64)
    text = told(of_tasks.claimed(found))
    assert f"{clear} are clear here, {lost} are clearly losses, and {open_} cannot" in text
    assert ("Clear are zsmerge over h2o on questions" in text) is (clear == 1)
    assert ("Losses are zsmerge over h2o on questions" in text) is (lost == 1)
    asked = empty()
    asked.set(gains.GAIN, *around(gain), task="qa", better="zsmerge_question", other="h2o", budget=64)
    assert f"clear at {clear} of 1 budgets" in told(of_tasks.zsmerge_table_2(asked)), "the variant that the claims test"
    assert "None of the gains" in unmeasured(of_tasks.claimed(empty()))
    assert "did not meet" in unmeasured(of_tasks.zsmerge_table_2(empty()))


def test_tiny_budgets_and_identifiers_are_told_where_they_were_measured():
    assert "full profile only" in unmeasured(of_tasks.tiny_needles(empty()))
    assert "full profile only" in unmeasured(of_tasks.single_3(empty()))
    found = empty()
    for task, measure in (("tiny_needle", "hits"), ("single_3", "nll")):
        found.set(gains.WITHOUT_BUDGET, 0.9, measure=measure, task=task, policy="full")
    for budget, share in ((64, 0.8), (32, 0.2)):
        found.set(gains.AT_BUDGET, share, measure="hits", task="tiny_needle", policy="rocketkv", budget=budget)
    for budget, gain in ((80, 0.5), (160, -0.5), (320, 0.0)):
        ours = {"task": "single_3", "better": "dapq", "other": "snapkv", "budget": budget}
        found.set(gains.GAIN, *around(gain), **ours)
    text = told(of_tasks.tiny_needles(found))
    assert text.index("reads 64 tokens") < text.index("rocketkv 80 %") < text.index("reads 32 tokens")
    assert "rocketkv 20 %" in text and "full cache gets 90 %" in text
    text = told(of_tasks.single_3(found))
    assert "clearly ahead at 1 of 3" in text and "clearly behind at 1" in text and "0.500" in text
    assert "table 5 has it 58.2 points ahead" in text


@pytest.mark.parametrize(("cost", "says"), [(0.3, "costs"), (-0.3, "saves"), (0.001, "no clear amount")])
def test_a_question_held_back(cost, says):
    found = empty()
    found.set(gains.QUESTION_AWARE, *around(cost), task="needle", policy="snapkv", budget=128)
    assert says in told(of_tasks.question(found))
    assert "No policy" in unmeasured(of_tasks.question(empty()))


# --- speed


@pytest.mark.parametrize(
    ("gain", "says"),
    [(0.2, "a step is clearly faster"), (-0.2, "a step is clearly slower"), (0.001, "a step is not clearly different")],
)
def test_times_are_told_by_their_intervals_and_as_times(gain, says):
    found = empty()
    found.set(ratios.GAIN, *around(gain), policy="h2o", where="longest")
    found.set(ratios.GAIN, *around(-gain), policy="h2o", where="shortest")
    found.set(ratios.BATCH_GAIN, *around(gain), policy="h2o")
    found.set(ratios.FIRST_TOKEN, *around(gain), policy="compilerkv")
    found.set(ratios.ANSWER_SAVED, *around(gain), policy="h2o")
    text = told(of_speed.speed(found))
    assert says in text and text.count("clear") == 1 and "no findings" in text
    assert "up to 3.0 times the full cache's speed, ZSMerge's figure 3 2.25 and CompilerKV's table A1 1.78" in text
    assert {0.2: "grows by", -0.2: "falls by", 0.001: "no clear"}[gain] in told(of_speed.batches(found))
    assert "table 4 it grows by 22 %" in told(of_speed.batches(found))
    text = told(of_speed.first_token(found))
    assert {0.2: "later", -0.2: "earlier", 0.001: "no clearly different"}[gain] in text
    assert ("clearly quicker with h2o" in text) is (gain == 0.2) and "4.8 % later" in text
    assert "not measured" in unmeasured(of_speed.batches(empty()))


@pytest.mark.parametrize(
    ("ratio", "says"), [(0.4, "less time than"), (1.6, "more time than"), (1.001, "no clearly other time")]
)
def test_pseudo_queries_are_told_beside_generating(ratio, says):
    assert "No policy with pseudo-queries" in unmeasured(of_speed.pseudo(empty()))
    found = empty()
    found.set(ratios.PSEUDO_SHARE, 0.128, policy="dapq")
    found.set(ratios.PSEUDO_OVER_GENERATED, *around(ratio), policy="dapq")
    text = told(of_speed.pseudo(found))
    assert says in text and "12.8% longer" in text and "full profile only" in text and "no findings" in text
    found.set(ratios.PEAK_OVER_SNAPKV, *around(0.05), policy="dapq")
    text = told(of_speed.pseudo(found))
    assert "peak of memory is above SnapKV's (5.0 %" in text and "full profile only" not in text


def test_memory_names_the_least_and_what_it_is_of_everything():
    found = empty()
    for policy, share, saving in (("h2o", 0.1, 0.02), ("rocketkv", 0.4, 0.01)):
        found.set(ratios.STORED, share, policy=policy)
        found.set(ratios.MEMORY_SAVING, saving, policy=policy)
    text = told(of_speed.memory(found))
    assert "h2o stores 10%" in text and "at most 2.0% (h2o)" in text and "up to 31.4 %" in text
    printed = empty()
    printed.set(footprint.SMALLEST_SAVING, 0.05)
    printed.set(footprint.GROWTH_OVER_CACHE, 2.8)
    assert "5% of memory" in told(of_speed.printed(printed)) and "2.8 times" in told(of_speed.printed(printed))


# --- all together


def measured():
    rows = [
        {
            "policy": policy,
            "budget": budget,
            "document": document,
            "stored_bytes": size * budget,
            "read_bytes": size * budget,
            "full_bytes": 1000.0,
            **dict.fromkeys(equal_bytes.QUALITY, error / budget),
        }
        for policy, size, error in (("good", 1.0, 1.0), ("bad", 1.0, 3.0))
        for budget in (100, 200)
        for document in ("a", "b")
    ]
    return pd.DataFrame(rows)


def test_the_front_and_the_best_at_equal_bytes():
    text = told(of_all.pareto(measured(), "stored"))
    assert "1 of 2 policies" in text and "good" in text and "bad" not in text
    summary = equal_bytes.summary(equal_bytes.at_equal(measured(), "stored", 0.15))
    text = told(of_all.at_equal_bytes({"stored": summary}, {"stored": 0.15}))
    assert "good has the smallest output error" in text and "bad the largest" in text and "overlap" not in text
    assert text.endswith("Next: whether attention mass lost ranks them alike.")
    both = told(of_all.at_equal_bytes({"stored": summary, "read": summary}, {"stored": 0.15, "read": 0.1}, "mass_lost"))
    assert "good has the smallest mass lost" in both and both.endswith("Next: who finds needles.")
    wide = summary.assign(output_error_low=0.0, output_error_high=1.0)
    assert "bad overlap" in told(of_all.at_equal_bytes({"stored": wide}, {"stored": 0.15}))
    nowhere = equal_bytes.summary(equal_bytes.at_equal(measured(), "stored", 0.9))
    assert "no policy was measured" in told(of_all.at_equal_bytes({"stored": nowhere}, {"stored": 0.9}))


def test_needles_of_all_policies():
    found = empty()
    for policy, score in (("full", 1.0), ("a", 0.9), ("b", 0.9), ("c", 0.1)):
        found.set(equal_bytes.NEEDLE, score, policy=policy)
    text = told(of_all.needles(found))
    assert "with a and b (90%), fewest with c (10%); the full cache finds 100%" in text


def test_pairs_of_policy_and_storage_on_the_front():
    rows = [
        {
            "policy": policy,
            "storage": storage,
            "budget": budget,
            "document": document,
            "measure": measure,
            "stored_bytes": size,
            "full_bytes": 100.0,
            "value": value,
        }
        for policy, storage, budget, size, value in (
            ("full", "as_is", None, 100.0, 0.0),
            ("full", "int8", None, 52.0, 0.01),
            ("snapkv", "as_is", 0.6, 60.0, 0.2),
            ("snapkv", "kivi-4", 0.4, 16.0, 0.4),
        )
        for document in ("a", "b")
        for measure in ("kl", "output_error")
    ]
    text = told(of_all.evict_or_quantise(pd.DataFrame(rows)))
    assert "2 pairs of a policy and a storage, 1 of them the full cache" in text and "snapkv in kivi-4" in text
    assert "snapkv in as_is" not in text


@pytest.mark.parametrize(
    ("value", "evicting", "counted"),
    [
        (0.2, "evicting loses more than rounding to int8 (two, 0.200", "1 gain and 0 lose"),
        (-0.2, "evicting loses less than rounding to int8 (two, -0.200", "0 gain and 1 lose"),
        (0.0, "evicting is not told apart from rounding to int8 (two, 0 (", "0 gain and 0 lose"),
    ],
)
def test_evicting_rounding_or_both_at_equal_bytes(value, evicting, counted):
    found = empty()
    for policy, worse in (("one", 1.0), ("two", 0.0)):
        found.set(storing.EVICT, *around(value + worse), storage="int8", policy=policy, measure="kl")
    for other in ("int8", "kivi-4"):
        found.set(storing.BOTH, *around(value), storage="int8", policy="two", other=other, measure="kl")
    found.set(storing.BOTH_OR_EVICT, *around(value), share=0.25, policy="two", other="kivi-4", measure="kl")
    text = told(of_all.differences(found))
    assert evicting in text and counted in text and "(one," not in text
    assert "rounding alone to int8 (two in kivi-4, " in text and "two in int8" not in text
