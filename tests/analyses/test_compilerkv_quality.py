"""CompilerKV's budgets, competitors and ablations on small random traces: what is measured, and that it adds up."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.claims import unmeasured
from support.compilerkv import (
    BUDGETS,
    HEADS,
    LAYERS,
    PROMPT,
    SHARE,
    TRACES,
    WEIGHTS,
    analyses,
    tables,
    trace,
)
from support.measured_files import table_file
from support.spread import students

from kvlab import papers
from kvlab.analyses.compilerkv import ablation, printed, quality, variants
from kvlab.analyses.texts import without_span
from kvlab.errors import KvlabError
from kvlab.methods import policy
from kvlab.methods._base.lookup import DecisionTables

MEASURED = ("kept", "recall", "error")


def test_a_sweep_is_the_replays_by_head():
    settings = [("a", policy("snapkv", budget=64)), ("b", policy("streamingllm", budget=32))]
    table = quality.sweep(TRACES[:2], settings)
    assert len(table) == 2 * 2 * LAYERS * HEADS
    found = quality.replayed(TRACES[1], settings[0][1])
    rows = table.query("document == 'document 2' and method == 'a'")
    assert (rows["stored"] == 64).all() and (rows["entries"] == 64).all()
    lost = rows.pivot(index="layer", columns="head", values="kept")
    np.testing.assert_allclose(1 - lost, found.mass_lost.mean(-1), atol=1e-6)
    assert rows["recall"].mean() == pytest.approx(found.summary["recall"], abs=1e-6)
    assert rows["error"].mean() == pytest.approx(found.summary["output_error"], abs=1e-6)
    means = quality.by_document(table, "kept")
    assert list(means.index) == ["document 1", "document 2"] and means["a", 64]["document 2"] == pytest.approx(
        1 - found.summary["mass_lost"], abs=1e-6
    )


def test_every_claim_s_metric_is_measured():
    first, second, results = (
        papers.figure("compilerkv", name) for name in ("table1", "appendix_table", "published_results")
    )
    points = printed.points(papers.figure("compilerkv", "table2"))
    recomputed = printed.checks(first, second), printed.published_results(results, first), points
    assert not unmeasured("compilerkv_budgets", *recomputed, *analyses().values())


def test_figure_2():
    metrics = analyses()["figure_2"].metrics
    small, large = (
        [
            1
            - quality.replayed(captured, policy("compilerkv", budget=budget, tables=tables(), pad="budget")).summary[
                "mass_lost"
            ]
            for captured in TRACES
        ]
        for budget in (64, 256)
    )
    drop = np.mean(large) - np.mean(small)
    assert metrics["drop/filled"] == pytest.approx(drop, abs=1e-6)
    assert metrics["flatter_filled/snapkv"] == pytest.approx(metrics["drop/snapkv"] - drop, abs=1e-6)
    lead = metrics["kept/filled/64"] - metrics["kept/h2o/64"]
    assert metrics["lead_filled/h2o/64"] == pytest.approx(lead, abs=1e-9)
    curves = analyses()["figure_2"].frame(quality.AT_BUDGET)
    assert set(curves["method"]) == {"filled", *quality.RIVALS} and len(curves) == 2 * 7 * len(BUDGETS)
    assert set(curves["measure"]) == {"kept", "recall"} and set(curves["budget"]) == set(BUDGETS)
    assert (curves["low"] <= curves["value"]).all() and (curves["value"] <= curves["high"]).all()


def test_figure_2_needs_the_budgets_of_its_drop():
    with pytest.raises(KvlabError, match="256 to 64 entries needs both"):
        quality.figure_2(TRACES[:1], [64, 128])


def test_gains_are_ratios_document_by_document():
    found = analyses()["table_1"]
    table = quality.by_document(found.table, "kept").droplevel("budget", axis=1)
    gains = [table.loc[name, "filled"] / table.loc[name, "h2o"] - 1 for name in table.index]
    assert found.metrics["gain_filled/kept/h2o"] == pytest.approx(np.mean(gains))
    assert found.intervals["gain_filled/kept/h2o"] == pytest.approx(students(gains), rel=1e-4)
    again = {
        "twin": policy("compilerkv", budget=SHARE, tables=tables(), pad="budget", kernel=7, recent=32),
        "published": policy("compilerkv", budget=SHARE, variant="published", window=32),
    }
    for name, ours in again.items():
        kept_again = [1 - quality.replayed(captured, ours).summary["mass_lost"] for captured in TRACES]
        gain = (kept_again / table["snapkv"] - 1).mean()
        assert found.metrics[f"gain_{name}/kept/snapkv"] == pytest.approx(gain, abs=1e-6)
    gain = (table["published"] / table["twin"] - 1).mean()
    assert found.metrics["gain_published/kept/twin"] == pytest.approx(gain)
    assert found.metrics["lost/snapkv"] == pytest.approx(1 - found.metrics["retained/snapkv"])


def test_all_methods_of_table_1_store_the_same():
    """ZigZagKV and DynamicKV on the mean over layers."""
    stored = analyses()["table_1"].frame(quality.STORED).set_index("method")["value"]
    assert stored.to_dict() == pytest.approx(dict.fromkeys(stored.index, SHARE * PROMPT))


def test_weights_are_not_judged_on_what_they_were_learnt_from(tmp_path):
    seen = table_file(tmp_path, heads=WEIGHTS, documents=["document 1@abc"])
    for judged in (
        lambda: quality.table_1(TRACES, seen, SHARE),
        lambda: quality.figure_2(TRACES, BUDGETS, seen),
    ):
        with pytest.raises(KvlabError, match="learnt from document 1"):
            judged()


@pytest.mark.parametrize("name", ["sotu/1962", "/data/me/notes@work.txt", "/data/a[1].txt"])
def test_texts_are_told_apart_by_their_names(name):
    tables = DecisionTables.model_validate({"model": "toy", "heads": None, "risk": None, "documents": [f"{name}@0ab1"]})
    for document in (name, *(without_span(f"{name}{part}") for part in ("@0ab1", "[12:345]@0ab1", ""))):
        with pytest.raises(KvlabError, match=f"learnt from {re.escape(name)}"):
            quality.require_unseen([tables], [document])
    quality.require_unseen([tables], ["sotu/19620", "/data/a", "/data/me/notes"])


def test_table_2_compares_sets_of_one_size():
    found = analyses()["table_2"]
    rows = {
        measure: found.table.pivot_table(index="document", columns="method", values=measure) for measure in MEASURED
    }
    for measure, sign in (("kept", -1), ("recall", -1), ("error", 1)):
        lost = sign * (rows[measure]["raw_attention"] / rows[measure]["full"] - 1).mean()
        assert found.metrics[f"ablation/{measure}/raw_attention"] == pytest.approx(lost)
    assert found.metrics["ablation/stored/full"] == found.metrics["ablation/stored/raw_attention"] == PROMPT // 2
    raw = variants.RawAttention(budget=0.5, tables=tables(), pad="budget")
    lost = [quality.replayed(captured, raw).summary["mass_lost"] for captured in TRACES]
    assert rows["kept"]["raw_attention"].tolist() == pytest.approx([1 - each for each in lost], abs=1e-6)


def test_steps_are_differences_of_what_is_lost():
    steps = analyses()["steps"]
    metrics = steps.metrics
    assert metrics["one_set_costs/12"] == pytest.approx(metrics["steps/1/12"] - metrics["steps/4/12"])
    assert metrics["against_snapkv/7"] == pytest.approx(metrics["steps/1/7"] - metrics["steps/6/7"])
    assert metrics["norms_spare/7"] == pytest.approx(metrics["steps/0/7"] - metrics["steps/1/7"])
    assert metrics["model_mean_spares/7"] == pytest.approx(metrics["steps/2/7"] - metrics["steps/0/7"])
    errors = steps.table.query("budget == 0.07").groupby("method")["error"].mean()
    plain, norms, layer = (errors[name] for name in list(variants.ladder(0.07))[:3])
    assert metrics["norms_spare_error/7"] == pytest.approx(plain - norms)
    assert metrics["model_mean_spares_error/7"] == pytest.approx(layer - plain)
    by_head = ablation.against_snapkv(steps, SHARE)
    assert by_head.shape == (LAYERS, HEADS)
    assert by_head.to_numpy().mean() == pytest.approx(metrics["against_snapkv/12"])
    assert metrics["heads_worse/12"] == pytest.approx(np.mean(by_head.to_numpy() > 0))


def test_tables_1_and_2_share_their_replays(monkeypatch):
    """And budgets that are equal as numbers are no less apart: one entry, and the whole prompt."""
    fresh = trace(9, "fresh")
    first = quality.sweep([fresh], [("a", policy("snapkv", budget=SHARE))])
    monkeypatch.setattr(quality, "replayed", lambda *_: pytest.fail("replayed again"))
    again = quality.sweep([fresh], [("b", policy("snapkv", budget=SHARE))])
    assert set(again["method"]) == {"b"} and first.drop(columns="method").equals(again.drop(columns="method"))
    monkeypatch.undo()
    few, all_of_it = (
        quality.sweep([fresh], [("c", policy("streamingllm", budget=budget, sinks=0))]) for budget in (1, 1.0)
    )
    assert set(few["stored"]) == {1} and set(all_of_it["stored"]) == {PROMPT}
