"""RocketKV's budgets on small random traces: every number counted again by hand, slowly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.claims import unmeasured
from support.rocketkv import (
    GROUP,
    HEADS,
    PROMPT,
    STEPS,
    attention,
    every,
    random_trace,
    random_traces,
    rows_of,
    top_of_group,
)
from support.spread import students
from support.tensors import layer

from kvlab import papers
from kvlab.analyses.rocketkv import budgets, design, printed
from kvlab.errors import KvlabError
from kvlab.methods import policy
from kvlab.papers.verdict import judge
from kvlab.replays.run import replay
from kvlab.traces.trace import Trace

WANTED = (4, 8, 16, 32, 64)

pytestmark = pytest.mark.filterwarnings("ignore:duoattention knows no head scores")


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return random_traces()


@pytest.fixture(scope="module")
def found(traces):
    return budgets.figure_4(traces, WANTED, heads=None)


@pytest.fixture(scope="module")
def longer():
    """Small traces with the queries of all tokens."""
    return design.leads([random_trace(seed, 500, 8) for seed in (3, 5)], steps=12)


def test_the_largest_compression_says_whether_rivals_are_judged_where_the_paper_does(found):
    assert found.metrics["compression/tightest"] == max(WANTED)
    for method in ("quest", "sparq"):
        (claim,) = [c for c in papers.claims(paper="rocketkv") if c.id == f"rocketkv.section4_2.{method}_fails"]
        numbers = dict.fromkeys(claim.metrics, 1.5) | {f"{claim.metric}/low": 1.4, f"{claim.metric}/high": 1.6}
        assert judge(claim, numbers | {"compression/tightest": 16.0}).verdict == "not measured"
        assert judge(claim, numbers | {"compression/tightest": 62.5}).verdict == "holds in direction only"


def test_snapkv_gets_what_the_response_leaves_shared_by_the_group(traces):
    trace = traces[0]
    snapkv = budgets.snapkv_as_compared(trace, 100)
    assert (snapkv.budget, snapkv.sets, snapkv.window, snapkv.kernel) == ((100 - 8) // 2, "head", 32, 7)
    assert budgets.snapkv_as_compared(trace, 74).budget == 33 and budgets.snapkv_as_compared(trace, 73) is None
    assert budgets.snapkv_as_compared(trace, 41, "group").budget == 33
    assert budgets.snapkv_as_compared(trace, 40, "group") is None


@pytest.mark.parametrize(("group", "window"), [(1, 32), (4, 32), (6, 21), (7, 18), (16, 8)])
def test_the_windows_of_a_large_group_take_no_more_than_those_of_the_papers(group, window):
    """Qwen2.5's groups have six or seven heads: with 32 each their windows would exceed a tenth of 2k tokens."""
    trace = Trace.from_tensors(*layer(1, 2 * group, 2, 8, 60, 4, layers=1), 60)
    one = budgets.snapkv_as_compared(trace, 4 + group * (window + 1))
    assert (one.window, one.budget) == (window, window + 1)
    assert budgets.snapkv_as_compared(trace, 3 + group * (window + 1)) is None
    assert budgets.snapkv_as_compared(trace, 40, "group").window == 32


def test_the_budget_is_the_length_with_its_response_over_the_compression(traces):
    assert [budgets.budget_at(traces[0], c) for c in (4, 16, 64)] == [227, 57, 14]


@pytest.mark.parametrize(
    ("tokens", "allowed"),
    [(64, (4,)), (300, (4, 8)), (908, (4, 8, 15)), (1232, (4, 8, 16)), (2032, (4, 8, 16)), (4064, (4, 8, 16, 31))],
)
def test_compressions_end_where_quest_reads_one_page(tokens, allowed):
    trace = random_trace(2, tokens - 8, 8)
    assert budgets.compressions([trace]) == allowed
    budget = budgets.budget_at(trace, allowed[-1])
    quest = budgets.contenders(trace, budget, None)["quest"]
    page = math.ceil(trace.length / (budget // 2))
    assert replay(trace, quest).kept(0, 1).shape[1] >= page - 2


def test_the_paper_s_smallest_budget_is_at_the_limit():
    """Half of 256 tokens pays for 128 pages of 125 entries and reads 128: one page."""
    assert math.isqrt(16000 // 4) == 63 and 16000 / 256 == 62.5


def test_a_sequence_too_short_for_any_compression_is_refused():
    with pytest.raises(KvlabError, match="63 tokens allows compressions up to 3, below 4; take at least 64"):
        budgets.compressions([random_trace(2, 55, 8)])


@pytest.mark.parametrize("compression", [4, 8, 15])
def test_quest_and_sparq_spend_the_budget_that_they_are_given(traces, compression):
    """Whole pages and whole dimensions leave less than a tenth of it unspent."""
    trace = traces[0]
    budget = budgets.budget_at(trace, compression)
    whole = trace.prompt_length + (trace.steps + 1) / 2
    for method in ("quest", "sparq"):
        contender = budgets.contenders(trace, budget, None)[method]
        numbers = budgets.measured(replay(trace, contender, k=budget))
        assert 0.9 < numbers["read"] * whole / budget <= 1.001, method


def test_sparqs_dimensions_are_rounded_to_what_the_paper_s_setting_implies(traces):
    """16 dimensions at a compression of 9 are 1.8 of them: 2, and not 1."""
    trace = traces[0]
    ranks = {c: budgets.contenders(trace, budgets.budget_at(trace, c), None)["sparq"].rank for c in (4, 9, 15, 60)}
    assert ranks == {4: 4, 9: 2, 15: 1, 60: 1}


def test_the_tightest_budget_has_names_of_its_own(found):
    for name in ("mass_lost/quest", "gain/output_error/rocketkv_over_next_best"):
        assert found.metrics[f"{name}/tightest"] == found.metrics[f"{name}/c64"]
        assert found.intervals[f"{name}/tightest"] == found.intervals[f"{name}/c64"]


def test_what_the_oracle_does_not_lose_is_what_finding_loses(found):
    for measure in ("mass_lost", "output_error"):
        at = {c: found.table[found.table["compression"] == c] for c in (16, 64)}
        losses = {c: part.pivot(index="document", columns="method", values=measure) for c, part in at.items()}
        best = {c: of[of[["duoattention", "quest", "sparq"]].mean().idxmin()] for c, of in losses.items()}
        share = 1 - losses[64]["exact_topk"] / best[64]
        assert found.metrics[f"finding/{measure}"] == pytest.approx(share.mean())
        quarter = best[16] - losses[64]["exact_topk"]
        assert found.metrics[f"at_a_quarter/{measure}"] == pytest.approx(quarter.mean())


def test_the_first_two_layers_stand_against_the_others():
    losses = torch.tensor([0.4, 0.2, 0.1, 0.3, 0.5])[:, None, None].expand(5, 2, 3)
    assert budgets.first_layers(losses) == pytest.approx(0.3 - 0.3)
    assert budgets.first_layers(losses, first=1) == pytest.approx(0.4 - 0.275)


def test_all_methods_meet_at_each_budget_but_snapkv_where_it_has_no_room(found, traces):
    table = found.table
    assert len(table) == 3 * (5 * 8 - 3)
    assert set(table[table["compression"] == 8]["method"]) == set(budgets.NAMES)
    assert set(table[table["compression"] == 16]["method"]) == set(budgets.NAMES) - {"snapkv"}
    assert found.metrics["shortfall/snapkv"] == 3 / 5
    assert set(table["document"]) == {t.document for t in traces}


def test_exact_top_k_loses_what_lies_outside_each_query_heads_own_top(found, traces):
    trace, lost, recall = traces[1], [], []
    for i, h, t in every(trace):
        weights = attention(trace, i, h, t)
        own = np.argsort(-weights)[:57].tolist()
        lost.append(1 - weights[own].sum())
        recall.append(len(top_of_group(trace, i, h // GROUP, t, 57) & set(own)) / 57)
    row = rows_of(found, method="exact_topk", compression=16).loc[trace.document]
    assert row["mass_lost"] == pytest.approx(np.mean(lost), abs=1e-5)
    assert row["step_recall"] == pytest.approx(np.mean(recall), abs=1e-5) and np.mean(recall) < 1


@pytest.mark.parametrize("method", ["rocketkv", "quest", "snapkv"])
def test_recall_and_mass_lost_of_what_was_read(found, traces, method):
    trace, budget = traces[2], budgets.budget_at(traces[2], 8)
    contender = budgets.contenders(trace, budget, None)[method]
    result = replay(trace, contender)
    recall, lost = [], []
    for i, h, t in every(trace):
        kept = result.kept(i, t)
        read = {p for p in kept[h if len(kept) == HEADS else h // GROUP].tolist() if p >= 0}
        top = top_of_group(trace, i, h // GROUP, t, budget)
        recall.append(len(top & read) / budget)
        lost.append(1 - attention(trace, i, h, t)[sorted(read)].sum())
    row = rows_of(found, method=method, compression=8).loc[trace.document]
    assert row["step_recall"] == pytest.approx(np.mean(recall), abs=1e-5)
    assert row["mass_lost"] == pytest.approx(np.mean(lost), abs=1e-5)
    assert replay(trace, contender, k=budget).step_recall.mean() == pytest.approx(np.mean(recall), abs=1e-5)


def test_what_is_stored_counts_apart_from_what_is_read(traces):
    trace = traces[0]
    result = replay(trace, policy("rocketkv", budget=57))
    share = budgets.share_stored(result, 57)
    i, h, t = 1, 0, 5
    stored = {p for p in result.stored(i, t)[h].tolist() if p >= 0}
    assert share[i, h, t - 1] == pytest.approx(len(top_of_group(trace, i, h, t, 57) & stored) / 57)
    assert bool((share >= replay(trace, result.policy, k=57).step_recall).all())
    everything = replay(trace, policy("exact_topk", budget=57))
    assert bool((budgets.share_stored(everything, 57) == 1).all())


def test_bytes_are_shares_of_the_full_cache(found):
    whole = np.mean([PROMPT + t for t in range(1, STEPS + 1)])
    exact = rows_of(found, method="exact_topk", compression=8)
    assert exact["stored"].to_numpy() == pytest.approx(1)
    assert exact["read"].to_numpy() == pytest.approx(GROUP * 114 / whole, rel=1e-5)
    per_head = (114 - STEPS) // GROUP
    assert rows_of(found, method="snapkv", compression=8)["stored"].to_numpy() == pytest.approx(
        GROUP * (per_head + np.mean(range(1, STEPS + 1))) / whole, rel=1e-5
    )


def test_gains_are_paired_and_positive_where_the_first_is_better(found):
    for measure, sign in (("step_recall", 1), ("output_error", -1), ("mass_lost", -1)):
        left = rows_of(found, method="rocketkv", compression=16)[measure]
        right = rows_of(found, method="quest", compression=16)[measure]
        gain = sign * (left - right)
        name = f"gain/{measure}/rocketkv_over_quest/c16"
        assert found.metrics[name] == pytest.approx(gain.mean())
        assert found.intervals[name] == pytest.approx(students(gain), rel=1e-4, abs=1e-9)
    assert found.metrics["gain/mass_lost/exact_topk_over_rocketkv/c16"] > 0
    assert "gain/mass_lost/rocketkv_over_snapkv/c16" not in found.metrics
    assert "widening/mass_lost/rocketkv_over_snapkv" not in found.metrics


def test_the_next_best_is_the_best_of_the_rivals(found):
    best = budgets.next_best(found)
    assert len(best) == 3 * 5
    for row in best.itertuples():
        means = found.table[found.table["compression"] == row.compression].groupby("method")[row.measure].mean()
        rivals = means[[m for m in means.index if m in ("duoattention", "snapkv", "quest", "sparq")]]
        others = rivals.max() if row.measure == "step_recall" else rivals.min()
        assert rivals[row.next_best] == others
        assert row.value == pytest.approx(abs(means["rocketkv"] - others) * (1 if row.value > 0 else -1))
        assert (row.value > 0) == (
            others < means["rocketkv"] if row.measure == "step_recall" else others > means["rocketkv"]
        )


def test_a_lead_widens_by_the_difference_of_its_ends(found):
    gains = budgets.gains_of(found, "output_error").query("other == 'sparq'").set_index("compression")["value"]
    assert list(gains.index) == [4, 8, 16, 32, 64]
    assert found.metrics["widening/output_error/rocketkv_over_sparq"] == pytest.approx(gains[64] - gains[4])


def test_a_measures_values_are_the_metrics(found):
    points = budgets.values_of(found, "stored").set_index(["method", "compression"])
    assert len(points) == 5 * 8 - 3
    assert points.loc[("sparq", 16), "value"] == found.metrics["stored/sparq/c16"]
    kept = budgets.attention_kept(found).set_index(["method", "compression"])
    assert (kept["low"] <= kept["value"] + 1e-12).all() and (kept["value"] <= kept["high"] + 1e-12).all()
    assert kept.loc[("quest", 64), "value"] == pytest.approx(1 - found.metrics["mass_lost/quest/c64"])


def test_costs_are_means_over_documents(found):
    costs = budgets.costs(found).set_index(["method", "compression"])
    assert len(costs) == 5 * 8 - 3
    assert costs.loc[("quest", 8), "stored"] == pytest.approx(found.metrics["stored/quest/c8"])
    assert costs.loc[("quest", 8), "mass_lost"] == pytest.approx(found.metrics["mass_lost/quest/c8"])


def test_a_trace_without_a_response_is_refused():
    with pytest.raises(KvlabError, match=r"no response.*new_tokens"):
        budgets.figure_4([random_trace(1, 100, 0)], heads=None)


def test_claims_find_their_metrics(found, longer):
    assert not unmeasured("rocketkv_budgets", found, longer, printed.findings(), paper="rocketkv")


def test_leads_at_one_budget_on_a_quarter_of_the_text(longer):
    table = longer.table
    assert set(table.groupby("end")["length"].first().items()) == {("longer", 488), ("shorter", 122)}
    assert table["budget"].nunique() == 1 and "hybrid" not in set(table["method"])
    for measure in ("mass_lost", "output_error"):
        lead = {}
        for end, part in table.groupby("end"):
            losses = part.pivot(index="document", columns="method", values=measure).dropna(axis="columns")
            rivals = losses.drop(columns="rocketkv")
            lead[end] = rivals[rivals.mean().idxmin()] - losses["rocketkv"]
            assert longer.metrics[f"lead/{measure}/{end}"] == pytest.approx(lead[end].mean())
        wider = lead["longer"] - lead["shorter"]
        assert longer.metrics[f"lead/{measure}/longer_less_shorter"] == pytest.approx(wider.mean())


def test_the_paper_s_tables_are_whole():
    longbench = papers.figure("rocketkv", "longbench")
    assert len(longbench) == 3 * (1 + 5 * 7)
    at = longbench.set_index(["model", "method", "budget"]).sort_index()
    assert at.loc[("Llama3.1-8B", "rocketkv", 256), "average"].item() == 51.1
    assert at.loc[("LongChat-7B-v1.5", "rocketkv", 256), "needle"].item() == 93.7
    categories = ["single_qa", "multi_qa", "summarisation", "few_shot", "synthetic", "code"]
    assert longbench[longbench["average"].isna()]["method"].unique().tolist() == ["snapkv"]
    # Three tasks of each kind, two of code and two of synthetic; the printed average leaves out the count of passages,
    # on which every model scores next to nothing, so that it lies somewhat higher.
    tasks = np.array([3, 3, 3, 3, 2, 2])
    whole = longbench.dropna(subset=[*categories, "average"])
    assert (whole["average"] - whole[categories].to_numpy() @ tasks / 16).between(-0.1, 3.5).all()
    ruler = papers.figure("rocketkv", "ruler")
    sizes = ruler.groupby(["model", "length"]).size()
    # As far as our copy of the paper can be read.
    part = {("Llama3.1-8B", 16000): 25, ("Mistral-7B-v0.2", 8000): 25, ("LongChat-7B-v1.5", 8000): 23}
    assert sizes[list(part)].to_dict() == part and sizes.drop(list(part)).eq(36).all()
    assert ruler["average"].between(0, 100).all()
    qasper = papers.figure("rocketkv", "figure1").set_index(["method", "budget"])["qasper"]
    assert len(qasper) == 36 and qasper["quest", 1024] == 26.7
