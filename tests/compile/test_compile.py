"""`kvlab compile`: tables that a seed decides, runs that were cut off, tables for other models, and the command."""

from __future__ import annotations

import shlex

import numpy as np
import pytest
import torch
from support.commands import call, complaint
from support.compiling import DOCUMENTS, settings, step_by_step
from support.refusals import one_sentence

import kvlab
from kvlab import compile as compiling
from kvlab.analyses.compilerkv import held_out
from kvlab.analyses.compilerkv import tables as analysis
from kvlab.compile import trials
from kvlab.errors import KvlabError
from kvlab.methods._base.lookup import DecisionTables


@pytest.fixture(scope="module")
def learnt(reader):
    return compiling.learn(reader, settings(), DOCUMENTS)


def written(folder, learnt) -> list[bytes]:
    folder.mkdir(exist_ok=True)
    return [path.read_bytes() for path in learnt.save(folder / "tables.json")]


# --- the tables ---


def test_what_is_learnt(reader, learnt):
    found = learnt.tables
    assert (found.model, found.sha256, found.n_layers, found.kv_heads) == (reader.name, reader.sha256, 2, 2)
    assert np.array(found.risk).shape == (2, 6, 3) and np.array(found.heads).shape == (2, 4)
    assert {w for row in found.heads for w in row} <= {0.25, 0.5, 1.0, 2.0}
    assert all(row[0] == row[1] and row[2] == row[3] for row in found.heads)  # the heads of a group act as one
    seen = np.array(found.visited)
    assert seen.sum() == found.contexts == 4 and found.samples == {"heads": 32, "risk": 24}
    assert (np.array(found.risk)[:, seen == 0] == 0).all()
    assert found.propensities == {"heads": [0.25] * 4, "risk": [1 / 3] * 3}
    assert [name.partition("@")[0] for name in found.documents] == ["ferry", "ferry twice"]
    assert found.command.startswith("kvlab compile --model ") and "-p lengths=[60,110]" in found.command
    assert [len(line["nll"]) for line in learnt.lines["heads"]] == [8] * 4


def test_one_seed_gives_one_file_and_another_gives_another(reader, learnt, tmp_path):
    first = written(tmp_path / "a", learnt)
    assert written(tmp_path / "b", compiling.learn(reader, settings(), DOCUMENTS)) == first
    other = compiling.learn(reader, settings(seed=2), DOCUMENTS)
    assert other.lines["heads"][0]["actions"] != learnt.lines["heads"][0]["actions"]


class Cut(Exception):
    pass


def cut_after(lines):
    left = iter(range(lines))

    def advance(*_):
        if next(left, None) is None:
            raise Cut

    return advance


@pytest.mark.parametrize("lines", [3, 8, 13])
def test_a_run_that_was_cut_off_goes_on_where_it_stopped(reader, learnt, tmp_path, monkeypatch, lines):
    """In the pool, among the heads and among the thresholds; half a line stands at the end of the log."""
    journal = tmp_path / "journal.jsonl"
    with pytest.raises(Cut):
        compiling.learn(reader, settings(), DOCUMENTS, journal, cut_after(lines))
    kept = journal.read_text()
    with journal.open("a") as file:
        file.write('{"key": "1234", "kind": "hea')
    prefills = []
    monkeypatch.setattr("kvlab.compile.compiler.prefilled", lambda *a: prefills.append(1) or trials.prefilled(*a))
    found = compiling.learn(reader, settings(), DOCUMENTS, journal)
    assert written(tmp_path / "a", found) == written(tmp_path / "b", learnt)
    assert journal.read_text().startswith(kept) and "hea\n" not in journal.read_text()
    assert len(prefills) == 7 + 4 + 4 - len(kept.splitlines())
    prefills.clear()
    assert compiling.learn(reader, settings(), DOCUMENTS, journal).tables == learnt.tables and not prefills


def test_more_contexts_use_what_the_log_has(reader, tmp_path, learnt):
    journal = tmp_path / "journal.jsonl"
    compiling.learn(reader, settings(contexts=2, risk_samples=0), DOCUMENTS, journal)
    before = len(journal.read_text().splitlines())
    found = compiling.learn(reader, settings(), DOCUMENTS, journal)
    assert before == 7 + 2 and found.tables.heads == learnt.tables.heads
    assert len(journal.read_text().splitlines()) <= 7 + 4 + 4 + 2


def test_the_log_that_is_shipped_teaches_the_same(learnt, tmp_path):
    _, path = learnt.save(tmp_path / "tables.json")
    found = compiling.load(path)
    assert list(found) == ["heads", "risk"] and path.stat().st_size < 20_000
    for phase in found:
        ours, theirs = found[phase], learnt.samples(phase)
        assert (ours.actions == theirs.actions).all() and (ours.change == theirs.change).all()
        assert (ours.context == theirs.context).all() and ours.names == theirs.names
        assert (ours.retained == theirs.retained).all()


def test_one_table_alone(reader):
    heads = compiling.learn(reader, settings(risk_samples=0), DOCUMENTS).tables
    risk = compiling.learn(reader, settings(samples=0), DOCUMENTS).tables
    assert heads.risk is None and heads.heads is not None and risk.heads is None and risk.risk is not None


def test_learnt_tables_serve_the_policy(reader, learnt, context, tmp_path):
    path, _ = learnt.save(tmp_path / "tables.json")
    one = kvlab.policy("compilerkv", budget=16, window=16, utility_window=8, tables=str(path))
    with trials.prefilled(reader, context, settings()) as found:
        given = found.kept(trials.neutral(settings()).using(learnt.tables))
    _, stored = step_by_step(reader, context, one)
    assert all(torch.equal(a, b) for a, b in zip(given, stored, strict=True))


# --- other models ---


def test_mapping_by_depth():
    risk = [[[0.0, 0.2]], [[0.4, 0.2]]]
    two = DecisionTables(heads=[[1.0, 2.0], [0.5, 1.0]], risk=risk)
    assert two.mapped(2, 2) == two
    three = two.mapped(3, 2)
    assert np.allclose(three.heads, [[1, 2], [0.75, 1.5], [0.5, 1]])
    assert np.allclose(three.risk, [[[0, 0.2]], [[0.2, 0.2]], [[0.4, 0.2]]])
    assert two.mapped(2, 4).heads == [[1, 1, 2, 2], [0.5, 0.5, 1, 1]] and two.mapped(1, 1).heads == [[1.5]]
    with pytest.raises(KvlabError, match="at least 1 layer"):
        two.mapped(0, 4)
    with pytest.raises(KvlabError, match=r"nothing|neither"):
        DecisionTables(heads=None, risk=None).mapped(4, 4)


@pytest.mark.parametrize("layers", [3, 7, 30, 64])
def test_mapping_keeps_what_rises_with_depth_rising(layers):
    rng = np.random.default_rng(layers)
    risk = np.sort(rng.random((12, 4, 2)), 0)
    found = np.array(DecisionTables(heads=None, risk=risk.tolist()).mapped(layers, 9).risk)
    assert found.shape == (layers, 4, 2) and (np.diff(found, axis=0) >= 0).all()
    assert np.allclose(found[0], risk[0]) and np.allclose(found[-1], risk[-1])


def test_tables_of_another_shape_are_refused_with_the_way_out(reader, learnt, context):
    one = trials.neutral(settings()).using(learnt.tables.mapped(3, 4))
    with trials.prefilled(reader, context, settings()) as prefill, one_sentence("kvlab compile --from"):
        prefill.kept(one)


# --- the analysis ---


def test_variants_hold_the_same_numbers_in_other_places(learnt):
    both = learnt.tables.model_copy(update={"heads": [[1.0, 1.0, 2.0, 2.0], [0.5, 0.5, 0.25, 0.25]]})
    found = held_out.variants(both, shuffles=4)
    assert found["neutral"].neutral and found["heads"].risk is None and found["heads"].heads == both.heads
    shuffled = [found[f"shuffled heads {n}"].heads for n in (1, 2, 3, 4)]
    assert all(
        sorted(map(tuple, np.reshape(one, (4, 2)))) == sorted(map(tuple, np.reshape(both.heads, (4, 2))))
        for one in shuffled
    ) and any(one != both.heads for one in shuffled)
    seen = np.array(both.visited) > 0
    for number in (1, 2, 3, 4):
        moved = np.array(found[f"shuffled risk {number}"].risk)
        assert (np.sort(moved[:, seen], 1) == np.sort(np.array(both.risk)[:, seen], 1)).all()
        assert (moved[:, ~seen] == 0).all()
    still = np.array(found["static"].risk)
    for layer in range(2):
        of_contexts = sorted(
            tau
            for taus, visits in zip(both.risk[layer], both.visited, strict=True)
            for tau, times in zip(taus, visits, strict=True)
            for _ in range(times)
        )
        assert (still[layer] == of_contexts[(len(of_contexts) - 1) // 2]).all()


def test_held_out_differences_are_paired_by_window(reader, learnt):
    tables_by_name = held_out.variants(learnt.tables, shuffles=2)
    found = held_out.held_out(reader, tables_by_name, 16, ["sotu/1962", "sotu/1975"], tokens=80, continuation=8)
    table = found.table.set_index(["window", "variant"])
    equal = {"ungated learnt", "ungated static", "ungated shuffled risk", "equal neutral"}
    assert set(found.table["variant"]) == {*tables_by_name, *equal}
    assert len(table) == 4 * (len(tables_by_name) + len(equal)) and (table["entries"] <= 16).all()
    by_window = table["nll_change"].unstack()
    assert found.metrics["gain/nll/over_neutral"] == pytest.approx((by_window["neutral"] - by_window["learnt"]).mean())
    shuffled = by_window[["shuffled heads 1", "shuffled heads 2"]].mean(1)
    assert found.metrics["gain/nll/heads_over_shuffled"] == pytest.approx((shuffled - by_window["heads"]).mean())
    assert (table["mass_lost"] > 0).all() and (table["mass_lost"] < 1).all()

    # At equal storage: what stands against a gate stores the rounded mean of what the gate stored, everywhere.
    entries = table["entries"].unstack()
    pooled = entries[["shuffled risk 1", "shuffled risk 2"]].mean(1)
    for gated, free in (
        (entries["learnt"], "ungated learnt"),
        (entries["learnt"], "equal neutral"),
        (entries["static"], "ungated static"),
        (pooled, "ungated shuffled risk"),
    ):
        assert set(entries[free]) == {round(gated.mean())}
    assert found.metrics["gain/nll/equal/over_neutral"] == pytest.approx(
        (by_window["equal neutral"] - by_window["learnt"]).mean()
    )
    spared = {name: (by_window[f"ungated {name}"] - by_window[name]).mean() for name in ("learnt", "static")}
    assert found.metrics["gain/nll/equal/gate"] == pytest.approx(spared["learnt"])
    assert found.metrics["gain/nll/equal/learnt_over_static"] == pytest.approx(spared["learnt"] - spared["static"])
    starts = [int(name.partition("[")[2].partition(":")[0]) for name in dict.fromkeys(found.table["window"])]
    assert starts[0] == starts[2] == 0 and starts[1] >= 89


def test_trends_of_a_table_by_hand():
    """Three layers; thresholds fall by 0.1 for each nat of entropy, and are 0.2 lower in the second perplexity bin."""
    entropies = 2.0 + (np.arange(4) + 0.5) * 2
    risk = np.stack([0.9 - 0.1 * entropies, 0.7 - 0.1 * entropies], 1)[None].repeat(3, 0).clip(0, 1)
    visited = [[1, 1], [2, 1], [0, 3], [0, 0]]
    found = analysis.structure(DecisionTables(heads=np.ones((3, 2)).tolist(), risk=risk.tolist(), visited=visited))
    assert found.metrics["risk/entropy_slope"] == pytest.approx(-0.1)
    assert found.metrics["risk/high_less_low_perplexity"] == pytest.approx(-0.2)
    assert found.metrics["risk/visited"] == 5 / 8 and found.metrics["heads/changed"] == 0


def test_middle_layers_are_those_of_the_paper():
    weights = np.ones((32, 4))
    weights[12:21, 0] = 0.5
    found = analysis.structure(DecisionTables(heads=weights.tolist(), risk=[[[0.1]]] * 32, visited=[[1]]))
    assert found.metrics["heads/middle_less_rest"] == pytest.approx(-0.125)


def test_the_command_writes_what_learn_finds(capsys, monkeypatch, tmp_path, reader, learnt):
    monkeypatch.setattr("kvlab.inputs.models.load", lambda *_: reader)
    monkeypatch.setattr("kvlab.inputs.corpus.document", lambda name: next(d for d in DOCUMENTS if d.name == name))
    monkeypatch.setattr("kvlab.compile.contexts.HELD_APART", ())
    monkeypatch.setattr("kvlab.compile.compiler.checked", lambda documents: documents)
    monkeypatch.chdir(tmp_path)
    # What the file says about itself is the command that makes it.
    code, out, _err = call(capsys, "compile", *shlex.split(learnt.tables.command)[2:], "--out", "mine.json")
    assert code == 0 and out.splitlines()[-2:] == ["mine.json", "mine-log.parquet"]
    assert (tmp_path / "mine.json").read_bytes() == written(tmp_path / "a", learnt)[0]
    assert out.startswith("32 joint actions on the heads") and (tmp_path / "mine.jsonl").exists()
    code, out, _ = call(capsys, "compile", "--from", "mine.json", "--out", "mapped.json")
    mapped = DecisionTables.load(tmp_path / "mapped.json")
    assert code == 0 and out == "mapped.json\n" and mapped.mapped_from.startswith(f"{reader.name}@")
    assert mapped.heads == learnt.tables.heads


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--budget", "0"], 2, "budget"),
        (["--contexts", "0"], 2, "contexts"),
        (["--out", "."], 1, "folder"),
        (["--out", "nowhere/x.json"], 1, "folder"),
        (["-p", "lenghts=[300]"], 1, "lengths"),
        (["--budget", "400"], 1, "fits the budget"),
        (["--documents", "sotu/1888x"], 1, "sotu/1888"),
        (["--from", "smollm2-135"], 1, "smollm2-135m"),
        (["--model", "smollm2-135"], 1, "smollm2-135m"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, arguments, code, said):
    assert said in complaint(capsys, "compile", *arguments, code=code)


def test_help_names_its_options(capsys):
    code, out, _ = call(capsys, "compile", "--help")
    assert code == 0 and all(option in out for option in ("--documents", "--budget", "--from", "Examples"))
