"""Head scores and tables that come with kvlab are found by the model's weights, else by its name and shape."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest
from support.commands import call
from support.paths import ROOT
from support.refusals import one_sentence
from support.surrogates import shipped_for

import kvlab
from kvlab.analyses import shipped_tables
from kvlab.analyses.stand_ins import cells
from kvlab.analyses.tasks import contenders
from kvlab.compile.contexts import HELD_APART
from kvlab.methods._base import lookup
from kvlab.methods._base.lookup import DecisionTables, HeadScores, QueryFilters


@pytest.fixture
def shipped(tmp_path, monkeypatch, tiny):
    """Tables and head scores of three models: the tiny one by its weights, one of its shape, and one of another."""
    lm = tiny()
    about = {"same": (lm.sha256, "renamed"), "alike": ("0" * 64, lm.name), "other": ("1" * 64, "other")}
    for name, (sha256, model) in about.items():
        tables = {"model": model, "sha256": sha256, "heads": [[1.0] * 4] * 2, "risk": None}
        (tmp_path / f"{name}.json").write_text(json.dumps(tables))
    monkeypatch.setattr(DecisionTables, "folder", tmp_path)
    return tmp_path


def test_the_weights_decide_then_name_and_shape(shipped, tiny):
    assert shipped_tables.tables(tiny()) == "same"
    (shipped / "same.json").unlink()
    assert shipped_tables.tables(tiny()) == "alike"
    assert shipped_tables.tables(tiny(layers=3)) is None, "tables of two layers do not fit, whatever the name says"
    (shipped / "alike.json").unlink()
    assert shipped_tables.tables(tiny()) is None


def test_what_is_named_stays_as_it_is(tiny):
    assert (
        shipped_tables.tables(tiny(), "mine.json") == "mine.json"
        and shipped_tables.head_scores(tiny(), "mine.json") == "mine.json"
    )
    assert (
        shipped_tables.tables(tiny(), None)
        is shipped_tables.tables(tiny(), "")
        is shipped_tables.head_scores(tiny(), None)
        is None
    )


def test_the_default_model_has_both(lm):
    assert (shipped_tables.head_scores(lm), shipped_tables.tables(lm)) == ("smollm2-135m", "smollm2-135m")
    assert shipped_tables.tables_in_words("smollm2-135m") == "CompilerKV's tables: those of smollm2-135m"
    assert "neutral" in shipped_tables.tables_in_words(None) and "first heads" in shipped_tables.heads_in_words(None)


@pytest.mark.parametrize("kind", [HeadScores, DecisionTables, QueryFilters])
def test_each_file_is_named_like_its_model_and_says_whose_weights_it_is_of(kind):
    """Loaded by that name, although a name may hold a point."""
    for path in kind.folder.glob("*.json"):
        sha256, model, layers, heads = kind.load(path.stem).measured_on
        assert model == path.stem and len(sha256) == 64 and layers and heads
    with pytest.raises(lookup.KvlabError, match="qwen9.5-coder-0.5b"):
        kind.load("qwen9.5-coder-0.5b")


def learnt_alone(folder, lm, budget, name="", **changed):
    about = {"model": lm.name, "sha256": lm.sha256, "heads": [[1.0, 1.0, 2.0, 2.0]] * 2, "risk": None}
    about |= {"learnt": "alone", "budget": budget} | changed
    path = folder / f"{name or lm.name}-{budget}.json"
    path.write_text(json.dumps(about))
    return str(path)


def test_weights_learnt_one_head_at_a_time_are_found_by_their_budgets(tmp_path, monkeypatch, tiny):
    lm = tiny()
    monkeypatch.setattr(shipped_tables, "SHIPPED_ALONE", tmp_path)
    assert shipped_tables.per_head_tables(lm) == {} and "none learnt" in shipped_tables.per_head_in_words({})
    files = [learnt_alone(tmp_path, lm, budget) for budget in (256, 64)]
    learnt_alone(tmp_path, lm, 64, "other", model="other", sha256="1" * 64)
    found = shipped_tables.per_head_tables(lm)
    assert sorted(found) == [64, 256] and found[64].model == lm.name
    assert "at 64, 256 entries" in shipped_tables.per_head_in_words(found)
    assert shipped_tables.per_head_tables(lm, files[:1]).keys() == {256} and shipped_tables.per_head_tables(
        lm, files[0]
    ).keys() == {256}
    assert shipped_tables.per_head_tables(lm, []) == shipped_tables.per_head_tables(lm, "") == {}


def test_other_files_are_no_weights_learnt_one_head_at_a_time(tmp_path, tiny):
    lm = tiny()
    file = learnt_alone(tmp_path, lm, 64)
    for given, says in (
        (learnt_alone(tmp_path, lm, 64, "joint", learnt="joint"), "joint-64.json holds no weights learnt one head"),
        (learnt_alone(tmp_path, lm, None, "nameless"), "holds no weights learnt one head at a time"),
        ([file, learnt_alone(tmp_path, lm, 64, "again")], "two files of weights for 64 entries"),
        (str(tmp_path / "absent.json"), "cannot read"),
    ):
        with pytest.raises(lookup.KvlabError, match=says):
            shipped_tables.per_head_tables(lm, given)


def test_the_default_model_s_weights_learnt_one_head_at_a_time(lm):
    """For the budgets of figure 2 that are shorter than all prompts; other models have none yet."""
    found = shipped_tables.per_head_tables(lm)
    assert sorted(found) == [64, 128, 256, 512]
    held_apart = set(HELD_APART)
    for tables in found.values():
        about = tables.model_extra or {}
        assert (tables.model, about["sha256"], about["contexts"]) == (lm.name, lm.sha256, 40)
        assert not {name.rpartition("@")[0] for name in about["documents"]} & held_apart
        moved = [weight != 1 for row in tables.heads for weight in row]
        assert 0 < sum(moved) < len(moved), "some heads are clearly worth another weight, and not all"


def test_the_nearest_budget_decides_by_its_ratio():
    by_budget = {at: DecisionTables(heads=[[1.0, float(at)]], risk=[[[0.5]]]) for at in (64, 200)}
    for entries, nearest in (
        (10, 64),
        (64, 64),
        (112, 64),
        (128, 200),
        (4000, 200),
    ):  # 128 is 2 of 64, 200 is 1.56 of 128
        found = shipped_tables.nearest(by_budget, entries)
        assert found.heads == by_budget[nearest].heads and found.risk is None
    assert shipped_tables.nearest({}, 64) is None


@pytest.mark.parametrize("name", sorted(path.stem for path in lookup.SHIPPED_TABLES.glob("*.json")))
def test_no_experiment_evaluates_on_what_tables_were_learnt_from(name):
    """In any profile: tables must be judged on texts that they have not seen."""
    tables = DecisionTables.load(name)
    learnt_from = {document.rpartition("@")[0] for document in tables.documents}
    assert len(learnt_from) > 20 and not learnt_from & set(HELD_APART)
    written = [path.read_text() for path in (ROOT / "experiments").glob("*.yaml")]
    assert not [document for document in learnt_from if any(re.search(rf"{document}\b", text) for text in written)]


def test_the_policy_finds_the_tables_of_a_model_by_name(lm):
    tables = DecisionTables.load("smollm2-135m")
    assert (tables.model, tables.sha256, tables.n_layers) == (lm.name, lm.sha256, 30)
    with kvlab.compress(lm.model, kvlab.policy("compilerkv", budget=64, tables="smollm2-135m")) as session:
        ids = lm.encode("The ferry to the outer island leaves at seven. " * 30, chat=False)
        lm.model.generate(ids, max_new_tokens=2, do_sample=False)
    sizes = [session.kept_after_prefill(layer).shape[1] for layer in range(30)]
    assert max(sizes) <= 64 and min(sizes) >= 1


def test_a_model_without_a_surrogate_is_refused_before_it_runs_and_left_out_of_all(tiny, monkeypatch):
    given, named = kvlab.policy("kvzap", budget=20), kvlab.policy("snapkv", budget=40)
    assert shipped_tables.with_shipped(tiny(), given) == given
    monkeypatch.setattr("kvlab.methods.kvzap.shipped_for", shipped_for)
    with one_sentence("no surrogate comes with kvlab for random:tiny-llama-gqa"):
        shipped_tables.with_shipped(tiny(), given)
    assert not shipped_tables.served(tiny(), given) and shipped_tables.served(tiny(), named)
    assert set(kvlab.policies()) - set(contenders.named(["all"], tiny())) == {"kvzap"}
    assert set(cells.budgeted(["all"])) - set(cells.budgeted(["all"], tiny())) == {"kvzap"}
    assert "kvzap" in contenders.named(["all", "kvzap"], tiny())


def test_a_bench_of_all_on_random_weights_leaves_kvzap_out(capsys, monkeypatch):
    met = []
    monkeypatch.setattr(
        "kvlab.bench.timing.measure", lambda task, model, chosen, *_: met.append(chosen) or pd.DataFrame()
    )
    monkeypatch.setattr("kvlab.bench.timing.show", lambda *_: None)
    for named in ("all", "all,kvzap"):
        assert call(capsys, "bench", "decode", "--shape", "tiny-llama-gqa", "--policies", named)[0] == 0
    assert [sum(one.name == "kvzap" for one in chosen) for chosen in met] == [0, 1]
    assert len(met[0]) == len(met[1]) - 1 == len(kvlab.policies())
