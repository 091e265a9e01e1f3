"""The leaderboard, from runs and kept tables to the page: numbers are those of the tables."""

from __future__ import annotations

import json
import math
import re

import pandas
import pytest
from support.commands import call
from support.equal_bytes import FEW, table
from support.paths import ROOT
from support.runs import job
from support.storing import FEW as STORED

from kvlab.analyses.together import equal_bytes, storing
from kvlab.errors import KvlabError
from kvlab.workbench.report import leaderboard, page, snapshots, storage_means
from kvlab.workbench.store import database, tracking

KEPT = ROOT / "docs" / "ledger"
LIMIT = table(oracle_attention={"a": [(10, 10, 0.01)], "b": [(10, 10, 0.03)]})


def together(measured=FEW, profile="quick", model="toy@1", kind="job"):
    """A run of `all_together` with its two tables."""
    tags = {"kvlab.kind": kind, "kvlab.profile": profile, "kvlab.commit": "abc", "model": model}
    run = tracking.create_run(database.client(), leaderboard.EXPERIMENT, {}, tags, "toy")
    run.table("measures", measured)
    run.table("limit", LIMIT)
    run.finish()


def errors(charts):
    """(policy, budget) -> its point, of the first chart of output errors."""
    chart = next(chart for chart in charts if chart.measure == "output error")
    return {(point.policy, point.budget): point for point in chart.points}


def test_means_are_those_of_the_figures():
    found = pandas.DataFrame(leaderboard.means(FEW))
    drawn = equal_bytes.points(FEW, "stored", "output_error")
    assert found["policy"].tolist() == drawn["policy"].tolist()
    for name, as_drawn in {"": "value", "_low": "low", "_high": "high"}.items():
        assert found[f"output_error{name}"].tolist() == pytest.approx(drawn[as_drawn].tolist())
    assert found["stored"].tolist() == [0.1, 0.4, 1, 1, 0.02, 0.05]
    assert found["read_bytes"].tolist() == [10 * 2**20, 40 * 2**20] * 2 + [2 * 2**20, 5 * 2**20]
    assert set(leaderboard.MEASURES) == set(equal_bytes.QUALITY)
    assert {equal_bytes.ORACLE, equal_bytes.LIMIT} < set(leaderboard.REFERENCES)
    assert [name for name in leaderboard.MEASURES if not leaderboard.MEASURES[name].higher] == sorted(
        equal_bytes.BETTER_LOW, reverse=True
    )


def test_a_kept_table_gives_the_charts_of_its_runs(project, tmp_path):
    together()
    (path,) = leaderboard.keep_store(tmp_path)
    assert path == tmp_path / "equal_bytes" / "toy.csv"
    lines = pandas.read_csv(path, dtype=str)
    assert lines.columns.tolist() == leaderboard.COLUMNS and set(lines["commit"]) == {"abc"}
    assert leaderboard.read(tmp_path) == leaderboard.of_store()
    point = errors(leaderboard.read(tmp_path))["keeps", "1"]
    assert (point.stored, point.read, point.value, point.n, point.rival) == (0.4, 0.4, 0.3, 2, True)
    assert point.low == pytest.approx(0.3 - 12.706 * 0.1, abs=1e-3), "Student's t of two documents"
    assert not errors(leaderboard.of_store())["oracle_attention", "0"].rival


def test_the_most_thorough_profile_counts_and_trials_do_not(project, tmp_path):
    together(profile="full", measured=table(thorough={"a": [(10, 10, 0.1)], "b": [(10, 10, 0.2)]}))
    together()
    together(kind="trial", measured=table(tried={"a": [(10, 10, 0.1)]}))
    assert {policy for policy, _ in errors(leaderboard.of_store())} == {"thorough", "oracle_attention"}
    assert ("keeps", "0") in errors(leaderboard.of_store(profile="quick"))
    assert leaderboard.of_store("another") == []
    leaderboard.keep_store(tmp_path, profile="quick")
    leaderboard.keep_store(tmp_path)
    leaderboard.keep_store(tmp_path, profile="quick")
    (path,) = (tmp_path / "equal_bytes").iterdir()
    lines = pandas.read_csv(path)
    assert lines.groupby("profile").size().to_dict() == {"full": 2, "quick": 7}, "each profile once"
    assert ("thorough", "0") in errors(leaderboard.read(tmp_path))
    assert ("keeps", "0") in errors(leaderboard.read(tmp_path, profile="quick"))


def test_tables_of_another_shape_and_values_that_are_none_are_left_out(project):
    together(FEW.drop(columns="full_bytes"))
    assert {policy for policy, _ in errors(leaderboard.of_store())} == {"oracle_attention"}
    together(FEW.assign(output_error=FEW["output_error"].where(FEW["policy"] != "keeps")))
    assert {policy for policy, _ in errors(leaderboard.of_store())} == {"selects", "small", "oracle_attention"}


def test_a_table_without_numbers_is_refused(project, tmp_path):
    together()
    (path,) = leaderboard.keep_store(tmp_path)
    path.write_text(path.read_text().replace("0.5,0.5,0.5", "much,0.5,0.5"))
    with pytest.raises(KvlabError, match="the table of equal bytes of toy@1 has no readable numbers"):
        leaderboard.read(tmp_path)


def test_scores_are_those_of_the_kept_tables():
    charts = [chart for chart in leaderboard.read(KEPT) if chart.group == "Tasks"]
    lines = pandas.concat(pandas.read_csv(path, dtype=str) for path in sorted((KEPT / "tasks").glob("*.csv")))
    whole = lines[lines[["kind", "mode", "turn"]].isna().all(axis=1)]
    assert sum(len(chart.points) for chart in charts) == len(whole)
    assert len({(chart.model, chart.measure, chart.question) for chart in charts}) == len(charts)
    (chart,) = [
        chart
        for chart in charts
        if (chart.model, chart.measure, chart.question) == ("qwen2.5-coder-1.5b", "ruler score", "held back")
    ]
    point = next(point for point in chart.points if point.policy == "kvzip")
    mine = whole[whole["model"].str.startswith("qwen2.5-coder-1.5b") & (whole["task"] == "ruler")]
    mine = mine[mine["compress_at"] == "context"].set_index("policy")
    assert f"{point.value:.6g}" == mine["score"]["kvzip"] and str(point.n) == mine["n"]["kvzip"]
    sizes = mine["kv_bytes"].astype(float)
    assert point.stored == sizes["kvzip"] / sizes["full"] and point.read is None
    assert all(chart.points[0].policy == "full" and chart.points[0].stored == 1 for chart in charts)
    fewer = [point for chart in charts for point in chart.points if point.stored is None]
    assert fewer and {point.n for point in fewer} == {30} and not any(point.rival for point in fewer)


def stored(measured=STORED, model="toy@1"):
    """A run of `evict_or_quantise` with its table."""
    tags = {"kvlab.kind": "job", "kvlab.profile": "quick", "kvlab.commit": "abc", "model": model}
    run = tracking.create_run(database.client(), "evict_or_quantise", {}, tags, "toy")
    run.table("measured", measured)
    run.finish()


def test_losses_of_storages_are_those_of_the_figures():
    means = pandas.DataFrame(storage_means.means(STORED))
    means = means[means["against"] == ""]
    for name in set(STORED["measure"]):
        drawn, mine = storing.points(STORED, name), means[means["measure"] == name]
        assert mine["storage"].tolist() == drawn["storage"].tolist()
        assert mine["stored"].tolist() == pytest.approx(drawn["share"].tolist())
        assert mine["value"].tolist() == pytest.approx(drawn["value"].tolist())
    assert set(leaderboard.STORAGE_LOSSES) == set(storing.MEASURES) and storage_means.AS_IS == storing.PLAIN


def test_differences_from_the_full_cache_in_a_storage_are_those_of_the_findings():
    means = pandas.DataFrame(storage_means.means(STORED))
    pairs = means[(means["against"] != "") & (means["policy"] != "full")]
    found = storing.findings(STORED, []).frame(storing.EVICT)
    keys = ["against", "policy", "measure"]
    numbers = ["value", "low", "high"]
    asked = found.rename(columns={"storage": "against"}).set_index(keys)[numbers].sort_index()
    assert len(asked)
    pandas.testing.assert_frame_equal(pairs.set_index(keys)[numbers].sort_index(), asked)


def test_the_full_cache_in_two_storages_is_compared_from_the_larger_to_the_smaller():
    rows = []
    for document, size, loss in (("a", 60, 0.5), ("b", 60, 0.7), ("a", 40, 0.4), ("b", 40, 0.3)):
        form = "large" if size == 60 else "small"
        about = {"document": document, "policy": "full", "budget": math.nan, "storage": form, "measure": "kl"}
        rows.append(about | {"value": loss, "stored_bytes": size, "full_bytes": 100})
    (row,) = [row for row in storage_means.means(pandas.DataFrame(rows)) if row["against"]]
    assert (row["storage"], row["against"], row["stored"]) == ("small", "large", 0.4)
    assert row["value"] == pytest.approx(-0.25) and row["low"] < row["value"] < row["high"]


def test_storages_are_kept_and_drawn_with_the_full_cache_quantised_as_a_rival(project, tmp_path):
    together()
    stored()
    assert {path.relative_to(tmp_path).as_posix() for path in leaderboard.keep_store(tmp_path)} == {
        "equal_bytes/toy.csv",
        "storages/toy.csv",
    }
    assert leaderboard.read(tmp_path) == leaderboard.of_store()
    charts = {chart.measure: chart for chart in leaderboard.of_store() if chart.group == "Storages"}
    divergence = {(point.name, point.budget): point for point in charts["KL of the next token, nats"].points}
    assert not divergence["full", ""].rival and divergence["full in rounded", ""].rival
    assert divergence["full in rounded", ""].value == pytest.approx(0.15)
    found = next(point for point in charts["digits of needles found"].points if point.name == "full in rounded")
    assert found.value == pytest.approx(0.85) and (found.low, found.high) == (pytest.approx(0.2147, abs=1e-4), 1)


def test_the_report_links_to_it_where_there_is_one(project, tmp_path, capsys):
    job(0.3)
    code, out, _ = call(capsys, "report", "--out", str(tmp_path))
    assert code == 0 and "leaderboard" not in out + (tmp_path / "report.html").read_text()
    together()
    code, out, _ = call(capsys, "report", "--out", str(tmp_path))
    assert code == 0 and out.count(f"{tmp_path / 'leaderboard.html'}\n") == 1
    assert '<a href="leaderboard.html">' in (tmp_path / "report.html").read_text()
    text = (tmp_path / "leaderboard.html").read_text()
    assert '<a class="home" href="report.html">' in text and "http" not in text.replace(
        "http://www.w3.org/2000/svg", ""
    )
    (held,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert json.loads(held) == json.loads(json.dumps(leaderboard.data(leaderboard.of_store())))

    code, out, _ = call(capsys, "report", "--keep", str(tmp_path / "kept"))
    assert code == 0 and "equal_bytes/toy.csv: every policy by bytes, for the leaderboard" in out
    code, out, _ = call(capsys, "report", "--from", str(tmp_path / "kept"), "--out", str(tmp_path / "again"))
    assert code == 0 and (tmp_path / "again" / "leaderboard.html").exists()
    page.save(snapshots.kept(tmp_path / "kept"), tmp_path / "again")
    assert not (tmp_path / "again" / "leaderboard.html").exists(), "no page stays that nothing leads to"
