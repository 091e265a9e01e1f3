"""RocketKV's budgets and design on small random traces: every number counted again by hand, slowly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.tensors import layer

import kvlab
from kvlab import papers
from kvlab.analyses.rocketkv import budgets, design
from kvlab.errors import KvlabError
from kvlab.methods import policy
from kvlab.replays.run import Replay
from kvlab.traces.trace import Trace

PROMPT, STEPS, LAYERS, HEADS, KV_HEADS, DIM = 900, 8, 2, 4, 2, 16
TOTAL = PROMPT + STEPS
GROUP = HEADS // KV_HEADS

pytestmark = pytest.mark.filterwarnings("ignore:duoattention knows no head scores")


def random_trace(seed: int, prompt: int = PROMPT, steps: int = STEPS) -> Trace:
    trace = Trace.from_tensors(*layer(seed, HEADS, KV_HEADS, DIM, prompt, steps, layers=LAYERS), prompt)
    trace.meta["document"] = f"random/{seed}"
    return trace


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return [random_trace(seed) for seed in (3, 5, 8)]


@pytest.fixture(scope="module")
def found(traces):
    return budgets.figure_4(traces, heads=None)


@pytest.fixture(scope="module")
def ladder(traces):
    return design.stage_by_stage(traces)


@pytest.fixture(scope="module")
def pooling(traces):
    return design.kernels(traces, lengths=(200, 850), sizes=(7, 21, 63), compression=4, steps=8)


@pytest.fixture(scope="module")
def between(traces):
    return design.splits(traces)


@pytest.fixture(scope="module")
def inside(traces):
    return design.pages_against_dimensions(traces)


def attention(trace, layer_index, head, step):
    """Full attention of one query head at a step, from 1, in float64."""
    query = trace.response_queries[layer_index, head, step - 1].double().numpy()
    keys = trace.keys[layer_index, head // GROUP, : trace.prompt_length + step].double().numpy()
    logits = keys @ query / math.sqrt(DIM)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def every(trace):
    return [(l, h, t) for l in range(LAYERS) for h in range(HEADS) for t in range(1, trace.steps + 1)]


def top_of_group(trace, layer_index, kv_head, step, k):
    summed = sum(attention(trace, layer_index, kv_head * GROUP + g, step) for g in range(GROUP))
    return set(np.argsort(-summed)[:k].tolist())


def rows_of(found, **where):
    table = found.table
    for column, value in where.items():
        table = table[table[column] == value]
    return table.set_index("document")


# --- budgets ---


def test_snapkv_gets_what_the_response_leaves_shared_by_the_group(traces):
    trace = traces[0]
    one = budgets.snapkv_as_compared(trace, 100)
    assert (one.budget, one.sets, one.window, one.kernel) == ((100 - 8) // 2, "head", 32, 7)
    assert budgets.snapkv_as_compared(trace, 74).budget == 33 and budgets.snapkv_as_compared(trace, 73) is None
    assert budgets.snapkv_as_compared(trace, 41, "group").budget == 33
    assert budgets.snapkv_as_compared(trace, 40, "group") is None


def test_the_budget_is_the_length_with_its_response_over_the_compression(traces):
    assert [budgets.budget_at(traces[0], c) for c in (4, 16, 64)] == [227, 57, 14]


def test_all_methods_meet_at_each_budget_but_snapkv_where_it_has_no_room(found, traces):
    table = found.table
    assert len(table) == 3 * (5 * 8 - 3)
    assert set(table[table["compression"] == 8]["method"]) == set(budgets.NAMES)
    assert set(table[table["compression"] == 16]["method"]) == set(budgets.NAMES) - {"snapkv"}
    assert found.metrics["shortfall/snapkv"] == 3
    assert set(table["document"]) == {t.document for t in traces}


def test_exact_top_k_loses_what_lies_outside_the_groups_top(found, traces):
    trace = traces[1]
    lost = [
        1 - attention(trace, l, h, t)[list(top_of_group(trace, l, h // GROUP, t, 57))].sum() for l, h, t in every(trace)
    ]
    row = rows_of(found, method="exact_topk", compression=16).loc[trace.document]
    assert row["mass_lost"] == pytest.approx(np.mean(lost), abs=1e-5) and row["step_recall"] == pytest.approx(1)


@pytest.mark.parametrize("method", ["rocketkv", "quest", "snapkv"])
def test_recall_and_mass_lost_of_what_was_read(found, traces, method):
    trace, budget = traces[2], budgets.budget_at(traces[2], 8)
    one = budgets.contenders(trace, budget, None)[method]
    result = Replay(trace, one)
    recall, lost = [], []
    for l, h, t in every(trace):
        kept = result.kept(l, t)
        read = {p for p in kept[h if len(kept) == HEADS else h // GROUP].tolist() if p >= 0}
        top = top_of_group(trace, l, h // GROUP, t, budget)
        recall.append(len(top & read) / budget)
        lost.append(1 - attention(trace, l, h, t)[sorted(read)].sum())
    row = rows_of(found, method=method, compression=8).loc[trace.document]
    assert row["step_recall"] == pytest.approx(np.mean(recall), abs=1e-5)
    assert row["mass_lost"] == pytest.approx(np.mean(lost), abs=1e-5)
    assert budgets.share_of_top(result, budget).mean() == pytest.approx(np.mean(recall), abs=1e-5)


def test_what_is_stored_counts_apart_from_what_is_read(traces):
    trace = traces[0]
    result = Replay(trace, policy("rocketkv", budget=57))
    share = budgets.share_of_top(result, 57, stored=True)
    l, h, t = 1, 0, 5
    stored = {p for p in result.stored(l, t)[h].tolist() if p >= 0}
    assert share[l, h, t - 1] == pytest.approx(len(top_of_group(trace, l, h, t, 57) & stored) / 57)
    assert bool((share >= budgets.share_of_top(result, 57)).all())
    everything = Replay(trace, policy("exact_topk", budget=57))
    assert bool((budgets.share_of_top(everything, 57, stored=True) == 1).all())


def test_bytes_are_shares_of_the_full_cache(found):
    whole = np.mean([PROMPT + t for t in range(1, STEPS + 1)])
    exact = rows_of(found, method="exact_topk", compression=8)
    assert exact["stored"].to_numpy() == pytest.approx(1)
    assert exact["read"].to_numpy() == pytest.approx(114 / whole, rel=1e-5)
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
        assert gain.min() - 1e-9 <= found.intervals[name][0] <= found.intervals[name][1] <= gain.max() + 1e-9
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
    gains = budgets.gains(found, "output_error").query("other == 'sparq'").set_index("compression")["value"]
    assert list(gains.index) == [4, 8, 16, 32, 64]
    assert found.metrics["widening/output_error/rocketkv_over_sparq"] == pytest.approx(gains[64] - gains[4])


def test_points_come_back_from_the_metrics(found):
    points = budgets.points(found, "stored").set_index(["method", "compression"])
    assert len(points) == 5 * 8 - 3
    assert points.loc[("sparq", 16), "value"] == found.metrics["stored/sparq/c16"]
    kept = budgets.attention_kept(found).set_index(["method", "compression"])
    assert (kept["low"] <= kept["value"] + 1e-12).all() and (kept["value"] <= kept["high"] + 1e-12).all()
    assert kept.loc[("quest", 64), "value"] == pytest.approx(1 - found.metrics["mass_lost/quest/c64"])


def test_a_trace_without_a_response_is_refused():
    with pytest.raises(KvlabError, match="no response.*new_tokens"):
        budgets.figure_4([random_trace(1, 100, 0)], heads=None)


# --- design ---


def test_the_ladder_stands_at_one_token_budget(ladder, traces):
    steps = design.ladder(traces[0], 151)
    sizes = {name: one.budget for name, one in steps.items()}
    assert sizes == {"snapkv": (151 - 8) // 2, "snapkv_gqa": 143, "snapkv_pp": 143, "rocketkv": 151}
    assert [steps["snapkv"].sets, steps["snapkv_gqa"].sets] == ["head", "group"]
    shared = rows_of(ladder, method="snapkv_gqa", compression=6)["output_error"]
    apart = rows_of(ladder, method="snapkv", compression=6)["output_error"]
    assert ladder.metrics["gain/output_error/snapkv_gqa_over_snapkv/c6"] == pytest.approx((apart - shared).mean())
    widening = ladder.metrics["widening/output_error/snapkv_gqa_over_snapkv"]
    assert widening == pytest.approx(
        ladder.metrics["gain/output_error/snapkv_gqa_over_snapkv/c12"] - (apart - shared).mean()
    )


def test_a_ladder_needs_room_for_each_head(traces):
    with pytest.raises(KvlabError, match="a compression of 20 the budget of 45 leaves SnapKV no room"):
        design.stage_by_stage(traces[:1], [20])


def test_the_first_stage_leaves_the_root_of_the_compression(traces):
    found = design.first_stage(traces, [4, 16])
    assert set(found.table["budget"]) == {round(TOTAL / 2), round(TOTAL / 4)}
    errors = [
        [Replay(trace, policy(name, budget=round(TOTAL / 4) - STEPS)).summary["output_error"] for trace in traces]
        for name in ("snapkv", "snapkv_pp")
    ]
    gain = np.subtract(*errors)
    name = "first_stage/gain/output_error/snapkv_pp_over_snapkv_gqa/c16"
    assert found.metrics[name] == pytest.approx(gain.mean(), rel=1e-5, abs=1e-7)
    assert found.metrics["first_stage/output_error/snapkv_pp/c16"] == pytest.approx(np.mean(errors[1]), rel=1e-5)
    assert set(found.intervals) == set(found.metrics) and np.abs(gain).max() > 1e-4


def test_redundancy_counts_what_another_head_has_chosen_already(traces):
    trace, snapkv = traces[0], policy("snapkv", budget=72, sets="head")
    chosen = snapkv.prefill(trace.prompt)
    total = twice = 0
    for l in range(LAYERS):
        for kv in range(KV_HEADS):
            heads = [[p for p in chosen[l, kv * GROUP + g].tolist() if p < PROMPT - 32] for g in range(GROUP)]
            total += sum(map(len, heads))
            twice += sum(map(len, heads)) - len(set().union(*heads))
    ours, chance = design.redundancy(trace, snapkv)
    assert ours == pytest.approx(twice / total) and total == LAYERS * HEADS * 40
    random = np.random.default_rng(0)
    draws = [len(set(random.permutation(868)[:40]) & set(random.permutation(868)[:40])) / 80 for _ in range(400)]
    assert chance == pytest.approx(np.mean(draws), rel=0.1)


def test_heads_that_agree_are_half_redundant(traces):
    trace = traces[0]
    same = trace.queries.unflatten(1, (KV_HEADS, GROUP))[:, :, :1].expand(-1, -1, GROUP, -1, -1).flatten(1, 2)
    twins = Trace.from_tensors(same, trace.keys, trace.values, PROMPT)
    assert design.redundancy(twins, policy("snapkv", budget=72, sets="head"))[0] == pytest.approx(0.5)


def test_a_truncated_trace_is_that_of_the_shorter_prompt(tiny):
    lm = tiny("tiny-llama-gqa")
    ids = torch.randint(5, 90, (60,), generator=torch.Generator().manual_seed(2))
    whole = kvlab.capture(lm, ids, new_tokens=4, policies=["keyformer"])
    cut, alone = design.truncated(whole, 40, 6), kvlab.capture(lm, ids[:40], new_tokens=2, policies=["keyformer"])
    assert (cut.prompt_length, cut.steps, cut.document) == (40, 6, whole.document)
    torch.testing.assert_close(cut.prompt_keys, alone.prompt_keys, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(cut.prompt.queries, alone.prompt.queries, atol=1e-5, rtol=1e-4)
    longer = kvlab.capture(lm, ids[:46], new_tokens=2, policies=["keyformer"])
    torch.testing.assert_close(cut.response_queries, longer.prompt.queries[:, :, 40:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("n", [PROMPT - 7, PROMPT])
def test_a_cut_must_lie_within_the_prompt(traces, n):
    with pytest.raises(KvlabError, match=f"{n} \\+ 8 tokens cannot be cut out of a prompt of 900"):
        design.truncated(traces[0], n, 8)


def test_a_cut_needs_the_queries_of_all_tokens(traces):
    trace = traces[0]
    short = Trace.from_tensors(trace.queries[:, :, 300:], trace.keys, trace.values, PROMPT)
    with pytest.raises(KvlabError, match="queries of its last 600; capture"):
        design.truncated(short, 100, 8)


def test_kernels_run_on_the_cut_prompts(pooling, traces):
    cut = design.truncated(traces[1], 200, 8)
    own = Replay(cut, policy("rocketkv", budget=52, kernel=21)).summary
    row = rows_of(pooling, length=200, kernel=21).loc[traces[1].document]
    assert row["output_error"] == pytest.approx(own["output_error"]) and row["mass_lost"] == own["mass_lost"]
    gain = (rows_of(pooling, length=850, kernel=7) - rows_of(pooling, length=850, kernel=63))["output_error"]
    assert pooling.metrics["gain/output_error/k63_over_k7/longest"] == pytest.approx(gain.mean())


def test_the_best_kernel_is_found_in_each_document(pooling, traces):
    best = {}
    for n in (200, 850):
        for trace in traces:
            errors = {k: rows_of(pooling, length=n, kernel=k).loc[trace.document, "output_error"] for k in (7, 21, 63)}
            best.setdefault(n, []).append(math.log2(min(errors, key=errors.get)))
    assert pooling.metrics["best_kernel/longest"] == pytest.approx(np.mean(best[850]))
    assert pooling.metrics["best_kernel_size/shortest"] == pytest.approx(math.prod(2**b for b in best[200]) ** (1 / 3))
    growth = np.mean(np.subtract(best[850], best[200]))
    assert pooling.metrics["best_kernel/growth"] == pytest.approx(growth)


def test_a_split_is_rocketkv_hybrid_or_snapkv_pp(traces):
    trace = traces[0]
    half, even = Replay(trace, design.SplitRocketKV(budget=57)), Replay(trace, policy("rocketkv", budget=57))
    assert torch.equal(half.stored(1, 4), even.stored(1, 4)) and half.summary == even.summary
    none = Replay(trace, design.SplitRocketKV(budget=57, exponent=0.0))
    alone = Replay(trace, policy("hybrid", budget=57))
    assert none.summary["output_error"] == pytest.approx(alone.summary["output_error"], rel=1e-5)
    assert torch.equal(none.kept(0, 3), alone.kept(0, 3))
    whole = Replay(trace, design.SplitRocketKV(budget=57, exponent=1.0))
    first = Replay(trace, policy("snapkv_pp", budget=57 - STEPS))
    assert torch.equal(whole.kept(1, STEPS), first.kept(1, STEPS))
    assert whole.summary["mass_lost"] == pytest.approx(first.summary["mass_lost"], abs=1e-6)


def test_splits_report_what_the_first_stage_left(between):
    assert set(between.table["method"]) == {"split0", "split0.25", "split0.5", "split0.75", "split1", "splitpublished"}
    survived = between.table.groupby(["compression", "method"])["survived"].mean()
    assert survived[16, "split0"] == pytest.approx(1)
    assert survived[16, "split0"] > survived[16, "split0.5"] > survived[16, "split1"]
    assert between.metrics["survived/split0.5/c32"] == pytest.approx(survived[32, "split0.5"])
    points = design.by_exponent(between, "survived")
    assert sorted(points["exponent"].unique()) == [0, 0.25, 0.5, 0.75, 1] and len(points) == 10
    assert design.published_exponent(16) == pytest.approx(0.44) and design.published_exponent(2**20) == 0.8


def test_the_published_exponent_is_the_policy_s(traces):
    total, budget = TOTAL, 57
    exponent = design.published_exponent(total / budget)
    found = policy("rocketkv", budget=budget, split="adaptive").capacity(PROMPT, STEPS)
    assert found == max(int(total / (total / budget) ** exponent), 2 * STEPS)


def test_pages_and_dimensions_cost_the_same(inside, traces):
    trace, row = traces[0], rows_of(inside, method="pages0.75").loc[traces[0].document]
    one = policy("hybrid", budget=57, page=8)
    result = Replay(trace, one)
    assert row["output_error"] == pytest.approx(result.summary["output_error"])
    allowed = LAYERS * KV_HEADS * 57 * 2 * DIM * 4
    for page in (1, 2, 4, 8, 16):
        loaded = Replay(trace, policy("hybrid", budget=57, page=page)).read_bytes
        assert bool((loaded <= allowed).all()) and float(loaded.mean()) > 0.85 * allowed, page
    assert set(inside.table["method"]) == {f"pages{e}" for e in ("0", "0.25", "0.5", "0.75", "1")}


def test_table_1_is_named_by_compression(traces):
    found = design.table_1(traces[0])
    row = found.table.query("method == 'quest' and compression == 16").iloc[0]
    assert row["budget"] == 57
    pages = math.ceil(TOTAL / max(16, math.ceil(TOTAL / 28)))
    assert found.metrics["auxiliary/quest/c16"] == pytest.approx(found.metrics["storage/quest/c16"] - 1)
    assert found.metrics["auxiliary/quest/c16"] == pytest.approx(pages / TOTAL, rel=0.05)
    assert found.metrics["of_tensors/sparq/c64"] == pytest.approx(found.metrics["storage/sparq/c64"] / 1.5)
    assert "storage/snapkv/c64" not in found.metrics


# --- what the paper prints, and what its claims ask for ---


def test_claims_find_their_metrics(found, ladder, pooling, between, inside, traces):
    made = {
        "rocketkv_budgets": [found],
        "rocketkv_design": [ladder, pooling, between, inside, design.table_1(traces[0]), design.first_stage(traces)],
    }
    for experiment, parts in made.items():
        names = {name for part in parts for name in part.metrics}
        names |= {f"{name}/{end}" for part in parts for name in part.intervals for end in ("low", "high")}
        for claim in papers.claims(experiment, paper="rocketkv"):
            assert claim.metrics <= names, f"{claim.id}: {sorted(claim.metrics - names)}"


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
    assert sizes.drop([("Llama3.1-8B", 16000), ("Llama3.1-8B", 96000)]).eq(36).all()
    assert ruler["average"].between(0, 100).all()
    qasper = papers.figure("rocketkv", "figure1").set_index(["method", "budget"])["qasper"]
    assert len(qasper) == 36 and qasper["quest", 1024] == 26.7
