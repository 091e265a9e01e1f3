"""One head at a time: against replays, on planted gains, and cut off in between."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support.commands import call
from support.compiling import settings
from support.texts import FERRY

import kvlab
from kvlab import compile as compiling
from kvlab.compile import evidence, marginal
from kvlab.compile.marginal import MarginalSettings
from kvlab.errors import KvlabError
from kvlab.inputs.corpus import Document
from kvlab.methods import policy
from kvlab.methods._base.lookup import DecisionTables

SETTINGS = settings()
PROMPTS = [Document(f"ferry[{start}:{start + 300}]", FERRY[start : start + 300]) for start in (0, 200, 400, 600)]


@pytest.fixture(scope="module")
def measured(reader):
    return compiling.measure(reader, SETTINGS, PROMPTS)


def test_what_a_change_does_is_what_replays_say(reader, measured):
    """Layer by layer: a head's weight changes what its own layer loses, and nothing else."""
    trace = kvlab.capture(reader, PROMPTS[1], 4, 16, pseudo=())
    how = dict(window=16, utility_window=8)

    def lost(budget, tables):
        one = policy("compilerkv", budget=budget, **how).using(DecisionTables(**{"heads": None, "risk": None} | tables))
        return kvlab.replay(trace, one).mass_lost.double().mean((1, 2))

    for budget in SETTINGS.budgets:
        found = measured.effects(budget)
        with pytest.warns(UserWarning, match="neutral"):
            base = lost(budget, {})
        weights = np.ones((2, 4))
        weights[1, 2:] = 0.25
        changed = lost(budget, {"heads": weights.tolist()}) - base
        assert changed[0] == pytest.approx(0, abs=1e-9)
        assert found.heads[1, 3, 0] == pytest.approx(float(changed[1]), abs=1e-6)
        assert (found.heads[:, :, SETTINGS.neutral] == 0).all()


def test_budgets_that_were_not_tried_and_prompts_that_fit_are_refused(reader, measured):
    with pytest.raises(KvlabError, match="only at 12, 24"):
        measured.effects(13)
    with pytest.raises(KvlabError, match="nothing to learn"):
        MarginalSettings(budgets=(60,), lengths=(60,))
    with pytest.raises(KvlabError, match="fits a budget of 59"):
        compiling.measure(reader, SETTINGS.replace(budgets=(59,)), [Document("short", "Seven.")])
    with pytest.raises(KvlabError, match="weights"):
        MarginalSettings(weights=(0.5, 2.0))


def test_a_run_that_was_cut_off_goes_on_where_it_stopped(reader, measured, tmp_path, monkeypatch):
    class Cut(Exception):
        pass

    def cut(_label, done, _total):
        if done == 2:
            raise Cut

    journal = tmp_path / "journal.jsonl"
    with pytest.raises(Cut):
        compiling.measure(reader, SETTINGS, PROMPTS, journal, cut)
    captured = []
    monkeypatch.setattr(marginal, "capture", lambda *a, **k: captured.append(1) or kvlab.capture(*a, **k))
    again = compiling.measure(reader, SETTINGS, PROMPTS, journal)
    assert again.lines == measured.lines and len(captured) == 2
    captured.clear()
    stricter = SETTINGS.replace(level=0.01)
    assert compiling.measure(reader, stricter, PROMPTS, journal).lines == again.lines and not captured


def test_tables_are_the_policys(measured, tmp_path):
    for budget in SETTINGS.budgets:
        found = compiling.tables(measured, budget)
        assert found.budget == budget and found.risk is None
        path = compiling.write(found, tmp_path / f"{budget}.json")
        assert DecisionTables.load(path) == found
        assert kvlab.policy("compilerkv", budget=budget, tables=str(path)).gates == found.gates
        assert found.documents[0].startswith("ferry@") and found.contexts == 4


# --- evidence ---


def test_an_action_is_taken_where_its_gain_is_clear_and_nowhere_else():
    rng = np.random.default_rng(0)
    gains = rng.normal(0, 0.1, (20, 30, 4))
    gains[:, :, 2] = 0.0
    gains[:, 0, 3] += 0.3  # clear
    gains[:, 1, 0] += 0.3
    gains[:, 1, 1] += 0.5  # clear, and better than another that is
    gains[:, 2, 3] -= 0.5  # clearly worse
    found = evidence.chosen(gains, rest=2, level=0.05)
    assert found[:3].tolist() == [3, 1, 2] and (found[3:] != 2).sum() <= 2


def test_noise_alone_leaves_nearly_everything_neutral():
    rng = np.random.default_rng(1)
    changed = []
    for _ in range(40):
        gains = rng.normal(0, 1, (12, 90, 4))
        gains[:, :, 2] = 0
        changed.append((evidence.chosen(gains, 2, 0.05) != 2).any())
    assert np.mean(changed) <= 0.2, (
        "at a false discovery rate of 5 %, about one table of noise in twenty changes at all"
    )


def test_one_context_and_changes_of_nothing_decide_nothing():
    assert evidence.chosen(np.ones((1, 3, 2)), 0, 0.05).tolist() == [0, 0, 0]
    assert evidence.chosen(np.zeros((9, 3, 2)), 0, 0.05).tolist() == [0, 0, 0]
    sure = np.zeros((9, 3, 2))
    sure[:, 1, 1] = 0.1
    assert evidence.chosen(sure, 0, 0.05).tolist() == [0, 1, 0]
    assert evidence.chosen(-sure, 0, 0.05).tolist() == [0, 0, 0]


def test_bins_of_equal_counts_are_looked_up_by_their_edges():
    """As in the tables that come with kvlab."""
    made = DecisionTables(
        heads=None, risk=np.zeros((1, 3, 2)).tolist(), entropy_edges=[4.5, 5.5], perplexity_edges=[9.0]
    )
    row, column = made.cell(torch.tensor([4.0, 5.0, 6.0]), torch.tensor([8.0, 10.0, 100.0]))
    assert row.tolist() == [0, 1, 2] and column.tolist() == [0, 1, 1]
    assert "entropy_edges" in json.loads(made.model_dump_json())
    even = DecisionTables(heads=None, risk=np.zeros((1, 3, 2)).tolist())
    assert "entropy_edges" not in json.loads(even.model_dump_json()), "files with even bins stay as they were"


@pytest.mark.parametrize("edges", [[3.0], [4.0, 3.0], [3.0, 4.0, 5.0]])
def test_edges_that_do_not_fit_the_bins_are_refused(edges, tmp_path):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"heads": None, "risk": np.zeros((1, 3, 2)).tolist(), "entropy_edges": edges}))
    with pytest.raises(KvlabError, match="entropy_edges must ascend"):
        DecisionTables.load(path)


def test_the_command_writes_a_table_for_each_budget(capsys, monkeypatch, tmp_path, reader):
    documents = {name: Document(name, FERRY * 3) for name in ("ferry", "crossing")}
    monkeypatch.setattr("kvlab.inputs.models.load", lambda *_: reader)
    monkeypatch.setattr("kvlab.inputs.corpus.document", documents.__getitem__)
    monkeypatch.setattr("kvlab.compile.marginal.checked", lambda prompts: prompts)
    monkeypatch.chdir(tmp_path)
    given = {"budgets": "[12,24]", "lengths": "[100,120]", "new_tokens": 2, "window": 16, "utility_window": 8}
    options = [part for key, value in given.items() for part in ("-p", f"{key}={value}")]
    command = ["compile", "--alone", "--documents", "ferry,crossing", "--contexts", "6", *options, "--out", "mine.json"]
    code, out, _ = call(capsys, *command)
    assert code == 0 and out.splitlines()[1::2] == ["mine-12.json", "mine-24.json"]
    assert out.startswith("12 entries: ") and len((tmp_path / "mine.jsonl").read_text().splitlines()) == 6
    found = DecisionTables.load(tmp_path / "mine-24.json")
    assert (found.budget, found.contexts, found.model) == (24, 6, reader.name)
    monkeypatch.setattr(marginal, "capture", lambda *_, **__: pytest.fail("captured again"))
    assert call(capsys, *command)[:2] == (0, out)
    command.remove("--alone")
    assert call(capsys, *command)[:2] == (0, out), "there is no other way any more"
