"""What predicts the answer: cells by replay and by the model itself, and the correlations of made-up cells."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.spread import students
from support.stand_ins import made

import kvlab
from kvlab.analyses.stand_ins import cells, correlations
from kvlab.errors import KvlabError
from kvlab.papers.stand_ins import ACROSS, DOCUMENTS

NAMES = ["snapkv", "h2o", "morphkv"]


@pytest.fixture(scope="module")
def measured(reader):
    prompts = cells.prompts(reader, ["squad/Oxygen"], 200, 300, [0.5], ["squad/Oxygen"])
    return prompts, cells.measure(reader, prompts, [40, 64], NAMES, new_tokens=6)


def test_every_policy_meets_every_prompt(measured):
    prompts, table = measured
    assert [prompt.kind for prompt in prompts] == ["response", "needle", "qa"]
    assert len(table) == 3 * 2 * len(NAMES) and not table.drop(columns="recall").isna().any(axis=None)
    assert set(table[table["recall"].isna()]["policy"]) == {"morphkv"}, "it keeps the whole prompt after the prefill"


def test_the_live_run_is_that_of_fidelity(measured, reader):
    """Along the response, without its first two tokens."""
    prompts, table = measured
    found = kvlab.fidelity(reader, kvlab.policy("h2o", budget=40), prompts[0].ids, new_tokens=6).table
    means = found.query("step > 2").groupby("measure")["value"].mean()
    cell = table.query("policy == 'h2o' and budget == 40 and kind == 'response'").iloc[0]
    for ours, theirs in {"kl": "kl", "nll": "nll", "nll_full": "nll_full", "right": "agreement"}.items():
        assert cell[ours] == pytest.approx(means[theirs], rel=1e-3, abs=1e-5), ours


def test_a_run_that_was_cut_off_goes_on(measured, reader, tmp_path, monkeypatch):
    prompts, table = measured
    path = tmp_path / "cells.jsonl"
    cells.measure(reader, prompts[:2], [40, 64], NAMES, new_tokens=6, path=path)
    path.write_text(path.read_text() + '{"key": "cut o')
    whole = cells.measure(reader, prompts, [40, 64], NAMES, new_tokens=6, path=path)
    pd.testing.assert_frame_equal(whole, table)
    monkeypatch.setattr(cells, "_cells", None)
    pd.testing.assert_frame_equal(cells.measure(reader, prompts, [40, 64], NAMES, new_tokens=6, path=path), table)


def test_what_reads_the_whole_prompt_is_refused():
    assert (
        "think" not in cells.budgeted()
        and {"random", "quest"} <= set(cells.budgeted())
        and "kvzip" not in cells.budgeted(["quick"])
    )
    with pytest.raises(KvlabError, match="think reads every entry"):
        cells.budgeted(["snapkv", "think"])
    with pytest.raises(KvlabError, match="did you mean 'snapkv'"):
        cells.budgeted(["snapkw"])


def test_the_correlations_of_made_up_cells():
    table = made()
    found = correlations.findings(table)
    assert found.row(ACROSS, stand_in="output_error", outcome="answer").value == pytest.approx(1)
    assert found.row(ACROSS, stand_in="recall", outcome="answer").value == pytest.approx(-1)
    assert found.found(ACROSS, stand_in="window_recall", outcome="answer") is None, "all policies are equal by it"
    assert not found.of(ACROSS, stand_in="recall", outcome="kl"), "no prompt has a response"
    assert found.row(DOCUMENTS, stand_in="mass_lost", outcome="answer").value == 6
    mass = found.row(ACROSS, stand_in="mass_lost", outcome="answer")
    by_document = [
        np.mean([stats.spearmanr(cell["mass_lost"], cell["nll"])[0] for _, cell in part.groupby("budget")])
        for _, part in table.groupby("document")
    ]
    assert mass.value == pytest.approx(np.mean(by_document)) and (mass.low, mass.high) == pytest.approx(
        students(by_document), abs=1e-6
    )


def test_within_a_policy_documents_are_resampled():
    table = made()
    found = correlations.findings(table)
    row = found.row(correlations.WITHIN, stand_in="output_error", outcome="answer")
    of_each = [
        stats.spearmanr(part["output_error"], part["nll"] - part["nll_full"])[0] for _, part in table.groupby("policy")
    ]
    assert row.value == pytest.approx(np.mean(of_each)) == pytest.approx(1)
    noise = found.row(correlations.WITHIN, stand_in="mass_lost", outcome="answer")
    assert noise.low < noise.value < noise.high and noise.high - noise.low < 1
    again = correlations.findings(table).row(correlations.WITHIN, stand_in="mass_lost", outcome="answer")
    assert (again.low, again.high) == (noise.low, noise.high)
    two = correlations.findings(pd.concat([table, table.assign(prompt=table["prompt"] + 100)]))
    wider = two.row(correlations.WITHIN, stand_in="mass_lost", outcome="answer")
    assert wider.high - wider.low == pytest.approx(noise.high - noise.low, abs=0.05), "copies are no further documents"
