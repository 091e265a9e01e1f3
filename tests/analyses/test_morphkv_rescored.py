"""MorphKV's table 3 from its authors' answers: the kept scores, by hand, and where they come from."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pandas as pd
import pytest

from kvlab import papers
from kvlab.analyses.morphkv import rescored

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "morphkv_predictions"


@pytest.fixture(scope="module")
def found():
    return rescored.table_3()


def test_snapkvs_cells_are_those_of_the_answers_and_some_of_morphkvs_are_not(found):
    """The table prints 22.6, 19.3, 6.2, 21.0 and 64.3 for Phi-4's 2WikiMQA, HotpotQA, MuSiQue, NarrativeQA and PRe."""
    assert found.metrics["table3/printed_from_predictions"] == pytest.approx(0.05)
    assert found.metrics["table3/printed_from_predictions/cells_off"] == 0
    phi = found.table.query("model == 'Phi4'").set_index("task")["morphkv"]
    tasks = ["2wikimqa", "hotpotqa", "musique", "narrativeqa", "passage_retrieval_en"]
    assert [round(phi[task], 1) for task in tasks] == [21.0, 17.7, 5.2, 20.2, 63.7]
    assert found.metrics["table3/morphkv_from_predictions"] == pytest.approx(22.6 - 21.01)
    assert found.metrics["table3/morphkv_from_predictions/cells_off"] > 5


def test_most_cells_are_open(found):
    """6 wins, 2 losses; one cell is over 69 of 200 prompts and does not count."""
    counted = {what: found.metrics[f"table3/pairs/{what}"] for what in ("cells", "ahead", "behind", "open")}
    assert counted == {"cells": 44, "ahead": 6, "behind": 2, "open": 36}
    assert found.metrics["table3/cells_of_fewer_prompts"] == 1
    short = found.table.query("pairs < n")
    assert short[["model", "task", "pairs", "n"]].values.tolist() == [["Llama", "passage_retrieval_en", 69, 200]]
    assert len(found.table) == found.metrics["table3/pairs_run/cells"] == 18 + 21 + 21


def test_what_the_table_leaves_out(found):
    trec = found.table.query("task == 'trec'")
    assert trec["over_snapkv"].tolist() == pytest.approx([-15.5, -14.5, -14.5]) and (trec["high"] < -5).all()
    assert found.metrics["table3/over_snapkv/trec/most"] == pytest.approx(-14.5)
    report = found.table.query("task == 'gov_report'").set_index("model")
    assert report["over_snapkv"][["Llama", "Mistral"]].tolist() == pytest.approx([1.71, 1.93], abs=0.005)
    assert (report["low"][["Llama", "Mistral"]] > 0).all() and not trec["printed"].any()
    for model, mean in {"Mistral": -0.87, "Phi4": -0.98}.items():
        assert found.metrics[f"table3/over_snapkv/mean_of_run/{model}"] == pytest.approx(mean, abs=0.01)


def test_verdicts(found):
    verdicts = {
        claim.id.removeprefix("morphkv.table3."): papers.judge(claim, found.metrics).verdict
        for claim in papers.claims(paper="morphkv")
        if claim.metrics <= set(found.metrics)
    }
    assert verdicts == {
        "predictions": "holds",
        "predictions_morphkv": "fails",
        "same_prompts": "fails",
        "clearly_higher": "fails",
        "not_behind": "holds",
        "all_run": "holds",
        "mean_of_run": "fails",
        "gov_report": "holds",
        "trec": "fails",
        "beyond_full": "holds",
        "beyond_full_answers": "fails",
    }


def test_answers_become_rows(tmp_path):
    """Two prompts: MorphKV answers both right, SnapKV the first alone, of a model that has no name in the table."""
    for setting, preds in (("snapkv", ["Paris", "Oslo"]), ("morphkv_2048", ["Paris", "Rome"])):
        records = [
            {"task": "qasper", "index": at, "pred": pred, "answers": [right], "all_classes": None}
            for at, (pred, right) in enumerate(zip(preds, ["Paris", "Rome"], strict=True))
        ]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"toy__{setting}.jsonl").write_text(text)
    table = rescored.scored(tmp_path).set_index(["setting", "task"])
    assert table.loc["snapkv", "score"].to_dict() == {"qasper": 50, "mean": 50}
    assert table.loc[("morphkv_2048", "qasper"), ["model", "n", "score", "pairs", "over_snapkv"]].tolist() == [
        "toy", 2, 100, 2, 50
    ]  # fmt: skip
    assert table.loc["snapkv", "pairs"].isna().all()


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published answers are not there")
def test_the_kept_scores_are_those_of_the_answers(tmp_path):
    """Of one model's quick tasks; all of them take ten minutes."""
    kept = papers.figure("morphkv", "rescored").set_index(["model", "setting", "task"])
    tasks = ("trec", "musique", "passage_count")
    for setting in ("snapkv", "morphkv_2048"):
        name = f"phi4__{setting}.jsonl"
        lines = gzip.decompress((PUBLISHED / f"{name}.gz").read_bytes()).decode().splitlines(keepends=True)
        (tmp_path / name).write_text("".join(line for line in lines if json.loads(line)["task"] in tasks))
    again = rescored.scored(tmp_path).query("task != 'mean'").set_index(["model", "setting", "task"])
    columns = ["n", "score", "pairs", "over_snapkv", "low", "high"]
    assert len(again) == 6
    pd.testing.assert_frame_equal(again[columns].astype(float), kept.loc[again.index, columns].astype(float))
