"""CompilerKV's printed tables: which of their numbers follow from their rows."""

from __future__ import annotations

import csv
import itertools
from importlib.resources import files

import numpy as np
import pandas
import pytest

from kvlab import papers
from kvlab.analyses.compilerkv import printed as compilerkv_printed
from kvlab.analyses.compilerkv import quality
from kvlab.methods._base.lookup import DecisionTables


def printed():
    return papers.figure("compilerkv", "table1"), papers.figure("compilerkv", "appendix_table")


def rows_of(name):
    path = files("kvlab.papers") / "figures" / f"compilerkv_{name}.csv"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


@pytest.mark.parametrize(
    ("name", "methods", "wrong"),
    [
        (
            "table1",
            8,
            {
                (model, "ZigZagKV"): gap
                for model, gap in [
                    ("InternLM-2.5-7B-Chat-1M", 0.083),
                    ("LLaMA-3-8B-Instruct", 0.432),
                    ("Qwen2-7B-Instruct", 0.469),
                    ("Mistral-7B-Instruct-v0.2", 0.259),
                ]
            },
        ),
        (
            "appendix_table",
            7,
            {("LLaMA-3-8B-Instruct", "CompilerKV"): 0.011, ("Mistral-7B-Instruct-v0.2", "CompilerKV"): 0.047},
        ),
    ],
)
def test_printed_averages_are_those_of_their_rows_but_for_some(name, methods, wrong):
    """ZigZagKV's averages in table 1, and two of CompilerKV's own in the appendix, are higher than their rows."""
    scores = {}
    for row in rows_of(name):
        scores.setdefault((row["model"], row["method"]), {})[row["task"]] = float(row["score"])
    assert len(scores) == 4 * methods and all(len(row) == 17 for row in scores.values())
    for key, row in scores.items():
        gap = row["average"] - sum(score for task, score in row.items() if task != "average") / 16
        assert gap == pytest.approx(wrong.get(key, 0.0), abs=1e-3 if key in wrong else 0.0051), key


def test_the_full_cache_is_the_same_in_both_tables():
    """But for InternLM, whose row was typed twice in the paper with small differences."""
    first, second = (compilerkv_printed.wide(rows).xs("FullKV", level="method") for rows in printed())
    apart = (first[second.columns].loc[second.index] - second).abs().max(axis=1)
    assert (apart.drop("InternLM-2.5-7B-Chat-1M") == 0).all() and 0 < apart["InternLM-2.5-7B-Chat-1M"] < 0.1


def test_table_2_starts_from_table_1():
    whole = papers.figure("compilerkv", "table2").set_index("setting").loc["full"]
    averages = compilerkv_printed.wide(printed()[0])["average"]
    assert whole.to_dict() == averages.xs("CompilerKV", level="method").to_dict()
    settings = {"full", "no_head_table", "static_threshold", "raw_attention"}
    assert set(papers.figure("compilerkv", "table2")["setting"]) == settings


def test_paper_values_of_claims_are_those_of_the_tables():
    gains = compilerkv_printed.gains(printed()[0])
    lost = compilerkv_printed.parts(papers.figure("compilerkv", "table2"))
    claims = {claim.id.split(".", 1)[1]: claim for claim in papers.claims(paper="compilerkv")}
    kinds = {"filled_over": "gain_filled/kept", "filled_recall_over": "gain_filled/recall"}
    for rival, (kind, metric) in itertools.product(quality.RIVALS, kinds.items()):
        claim = claims[f"table1.{kind}_{rival}"]
        assert claim.metric == f"{metric}/{rival}"
        assert claim.paper_value == pytest.approx(gains[quality.LABELS[rival]], abs=5e-5)
        assert claim.size.kind == "not_compared"
    for rival, (kind, measure) in itertools.product(
        ("snapkv", "dynamickv", "pyramidkv"), {"twin_over": "kept", "twin_recall_over": "recall"}.items()
    ):
        claim = claims[f"table1.{kind}_{rival}"]
        assert claim.metric == f"gain_twin/{measure}/{rival}" and claim.size.kind == "not_compared"
        assert claim.paper_value == pytest.approx(gains[quality.LABELS[rival]], abs=5e-5)
    named = {
        "head_table": ("kept", "no_head_table", "finding"),
        "risk_gating": ("kept", "static_threshold", "finding"),
        "error_stabilised_utility": ("error", "raw_attention", "finding"),
        "stabilised_utility": ("kept", "raw_attention", "question"),
        "recall_stabilised_utility": ("recall", "raw_attention", "question"),
    }
    for name, (measure, part, kind) in named.items():
        claim = claims[f"table2.{name}"]
        assert (claim.metric, claim.kind) == (f"ablation/{measure}/{part}", kind)
        assert claim.paper_value == pytest.approx(lost[part], abs=5e-5)
        assert claim.size.kind == "not_compared" and bool(claim.untested) == (part != "raw_attention")


def test_checks_on_a_table_worked_by_hand():
    rows = {
        "FullKV": (10, 30, 20, 20),
        "DynamicKV": (9, 20, 7, 12),
        "H2O": (4, 24, 8, 13),
        "CompilerKV": (11, 23, 8, 14),
    }
    tidy = pandas.DataFrame(
        [
            {"model": "m", "method": method, "task": task, "score": float(score)}
            for method, scores in rows.items()
            for task, score in zip(("a", "b", "c", "average"), scores, strict=True)
        ]
    )
    metrics = compilerkv_printed.checks(tidy, tidy).metrics
    assert metrics["printed/average_gap/H2O"] == 1.0 and metrics["printed/average_gap/CompilerKV"] == 0
    assert metrics["printed/smallest_lead"] == 14 - 12
    assert metrics["printed/wins"] == pytest.approx(1 / 3), "a tie is no win"
    assert metrics["printed/best_task_gain"] == 2.0 and metrics["printed/best_task_gain_over_dynamickv"] == 3.0
    assert metrics["printed/recovered/m"] == metrics["printed/recovered/mean"] == 14 / 20
    assert metrics["printed/gain/H2O/table1"] == pytest.approx(14 / 13 - 1)
    assert compilerkv_printed.retained(tidy)["H2O"] == 13 / 20


def test_the_appendix_has_its_own_gap_and_lead():
    rows = pandas.DataFrame(
        [
            {"model": model, "method": method, "task": task, "score": float(score)}
            for model, method, scores in (
                ("m", "FullKV", (10, 30, 20)),
                ("m", "DynamicKV", (9, 20, 14.5)),
                ("m", "CompilerKV", (11, 21, 16.25)),
                ("n", "FullKV", (10, 10, 10)),
                ("n", "DynamicKV", (5, 6, 5.5)),
                ("n", "CompilerKV", (6, 6, 6)),
            )
            for task, score in zip(("a", "b", "average"), scores, strict=True)
        ]
    )
    metrics = compilerkv_printed.checks(printed()[0], rows).metrics
    assert metrics["printed/appendix/average_gap"] == 0.25 and metrics["printed/appendix/smallest_lead"] == 0.5
    metrics = compilerkv_printed.checks(rows, printed()[1]).metrics
    assert metrics["printed/recovered/most"] == 0.8 and metrics["printed/recovered/least"] == 0.6


def test_published_scores_beside_printed_ones_by_hand():
    rows = pandas.DataFrame(
        [
            {"model": model, "method": method, "task": task, "score": float(score)}
            for model, scores in (("m", (10, 20, 15)), ("n", (1, 1, 1)))
            for method, by in (("FullKV", 2), ("CompilerKV", 1))
            for task, score in zip(("a", "b", "average"), (by * score for score in scores), strict=True)
        ]
    )
    theirs = pandas.DataFrame({"model": ["m", "m"], "task": ["b", "a"], "score": [24.0, 10.0]})
    found = compilerkv_printed.published_results(theirs, rows)
    assert found.metrics == {
        "published/average_gap": 2.0,
        "published/score_gap": 4.0,
        "published/same_scores": 0.5,
    }
    assert found.table.to_dict("records") == [{"model": "m", "published": 17.0, "printed": 15.0, "whole": 30.0}]


def test_the_published_results_are_of_all_tasks_of_table_1():
    theirs = papers.figure("compilerkv", "published_results")
    tasks = set(printed()[0]["task"]) - {"average"}
    assert all(set(rows["task"]) == tasks and len(rows) == 16 for _, rows in theirs.groupby("model"))
    assert set(theirs["model"]) < set(printed()[0]["model"])


def test_published_tables_by_hand():
    """Layer i has the weight i + 1 but for one head; thresholds rise with entropy in layer 0 alone."""
    weights = np.repeat(np.arange(1.0, 33)[:, None], 2, 1)
    weights[31, 1] = 0.5
    slopes = np.where(np.arange(32) == 0, 0.01, -0.02)
    risk = np.full((32, 4, 2), 0.5) + slopes[:, None, None] * np.arange(4)[None, :, None]
    risk[:, :, 1] -= np.where(np.arange(32) < 8, -0.1, 0.1)[:, None]
    tables = DecisionTables(heads=weights.tolist(), risk=risk.tolist(), entropy=(2.0, 10.0))
    found = compilerkv_printed.published_tables(tables).metrics
    rest = [*range(1, 13), *range(22, 32), (32 + 0.5) / 2]
    assert found["published/middle_less_rest"] == pytest.approx(17 - np.mean(rest))
    assert found["published/smallest_weight"] == pytest.approx(0.5 / weights.mean())
    assert found["published/entropy_slope"] == pytest.approx((0.01 - 31 * 0.02) / 32 / 2), "bins are two nats wide"
    assert found["published/falls_with_entropy"] == pytest.approx(31 / 32)
    assert found["published/high_less_low_perplexity"] == pytest.approx((8 * 0.1 - 24 * 0.1) / 32)
    assert found["published/falls_with_perplexity"] == 0.75


def test_points_lost_by_hand_and_as_the_text_rounds_them():
    rows = pandas.DataFrame({"setting": ["full", "no_gate"], "a": [41.0, 40.0], "b": [39.0, 38.5]})
    assert compilerkv_printed.points(rows).metrics == {
        "printed/points/no_gate": 0.75,
        "printed/least_points/no_gate": 0.5,
    }
    found = compilerkv_printed.points(papers.figure("compilerkv", "table2"))
    assert found.metrics["printed/points/static_threshold"] == pytest.approx(3.0125)
    assert found.metrics["printed/least_points/static_threshold"] == pytest.approx(2.85)
    assert len(found.table) == 3 * 4 and "3.01 points" in compilerkv_printed.points_in_words(found)


def test_thresholds_that_never_decide_cost_nothing_and_table_2_says_otherwise():
    (claim,) = [entry for entry in papers.claims(paper="compilerkv") if entry.id.endswith("appendixB.costs_nothing")]
    found = compilerkv_printed.points(papers.figure("compilerkv", "table2")).metrics
    assert claim.kind == "question" and papers.judge(claim, found).verdict == "fails"
    assert papers.judge(claim, {claim.metric: 0.04}).verdict == "holds"


def test_the_paper_s_share_of_a_prompt():
    lengths = papers.figure("compilerkv", "lengths")
    assert len(lengths) == 16 and set(lengths["task"]) == {row["task"] for row in rows_of("table1")} - {"average"}
    assert quality.paper_share(pandas.DataFrame({"length": [512, 1536]})) == 0.5
    assert quality.paper_share(lengths) == pytest.approx(512 * 16 / 118815)
