"""RocketKV's design on small random traces: every number counted again by hand, slowly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.claims import unmeasured
from support.rocketkv import DIM, GROUP, HEADS, KV_HEADS, LAYERS, PROMPT, STEPS, TOTAL, random_traces, rows_of

from kvlab.analyses.rocketkv import common, design
from kvlab.analyses.texts import continuation
from kvlab.errors import KvlabError
from kvlab.methods import policy
from kvlab.render.figures import rocketkv_design as draw
from kvlab.replays.run import replay
from kvlab.traces.trace import Trace


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return random_traces()


@pytest.fixture(scope="module")
def ladder(traces):
    return design.stage_by_stage(traces, [4, 6, 12])


@pytest.fixture(scope="module")
def pooling(traces):
    return design.kernels(traces, (200, 850), sizes=(7, 21, 63), compression=4, steps=8)


@pytest.fixture(scope="module")
def between(traces):
    return design.splits(traces, [16, 32])


@pytest.fixture(scope="module")
def inside(traces):
    return design.pages_against_dimensions(traces)


def test_the_ladder_stands_at_one_token_budget(ladder, traces):
    steps = design.ladder(traces[0], 151)
    sizes = {name: stage.budget for name, stage in steps.items()}
    assert sizes == {"snapkv": (151 - 8) // 2, "snapkv_gqa": 143, "snapkv_pp": 143, "rocketkv": 151}
    assert [steps["snapkv"].sets, steps["snapkv_gqa"].sets] == ["head", "group"]
    shared = rows_of(ladder, method="snapkv_gqa", compression=6)["output_error"]
    apart = rows_of(ladder, method="snapkv", compression=6)["output_error"]
    assert ladder.metrics["gain/output_error/snapkv_gqa_over_snapkv/c6"] == pytest.approx((apart - shared).mean())
    widening = ladder.metrics["widening/output_error/snapkv_gqa_over_snapkv"]
    gains = [ladder.metrics[f"gain/output_error/snapkv_gqa_over_snapkv/{c}"] for c in ("c4", "c12", "tightest")]
    assert widening == pytest.approx(gains[1] - gains[0]) and gains[1] == gains[2]
    assert ladder.metrics["redundancy/over_chance/tightest"] == ladder.metrics["redundancy/over_chance/c12"]


def test_stages_end_where_snapkv_still_has_a_choice(traces):
    """908 tokens: 8 of the response and two heads with 48 entries each are 104, so that c may be 8."""
    assert design.stages(traces) == (4, 8)
    snapkv = design.ladder(traces[0], round(TOTAL / 8))["snapkv"]
    assert snapkv.budget - snapkv.window >= 16
    assert design.stages([continuation(traces[0], 300, 8)]) == (4,)


def test_lengths_are_a_quarter_half_and_all_of_the_shortest_prompt(traces):
    assert design.lengths(traces) == (210, 430, 860)
    cut = [*traces, continuation(traces[0], 480, 8)]
    assert design.lengths(cut, steps=80) == (100, 200, 400)


def test_where_one_compression_leaves_no_room_the_others_are_compared(traces):
    found = design.stage_by_stage(traces[:2], [6, 20])
    assert {"gain/output_error/snapkv_gqa_over_snapkv/c6", "redundancy/c6", "output_error/rocketkv/c20"} <= set(
        found.metrics
    )
    assert not {name for name in found.metrics if "snapkv_gqa_over_snapkv/c20" in name or name == "redundancy/c20"}
    assert "widening/output_error/snapkv_gqa_over_snapkv" not in found.metrics
    *_, again = draw.figure_6(found).axes
    assert np.isfinite([bar.get_height() for bar in again.patches]).sum() == 2


def test_a_ladder_needs_room_for_each_head(traces):
    with pytest.raises(KvlabError, match="a compression of 20 SnapKV's budget is 45: too small"):
        design.stage_by_stage(traces[:1], [20])


def test_the_first_stage_leaves_the_root_of_the_compression(traces):
    found = design.first_stage(traces, [4, 16])
    assert set(found.table["budget"]) == {round(TOTAL / 2), round(TOTAL / 4)}
    errors = [
        [replay(trace, policy(name, budget=round(TOTAL / 4) - STEPS)).summary["output_error"] for trace in traces]
        for name in ("snapkv", "snapkv_pp")
    ]
    gain = np.subtract(*errors)
    name = "first_stage/gain/output_error/snapkv_pp_over_snapkv_gqa/c16"
    assert found.metrics[name] == pytest.approx(gain.mean(), rel=1e-5, abs=1e-7)
    assert found.metrics["first_stage/output_error/snapkv_pp/c16"] == pytest.approx(np.mean(errors[1]), rel=1e-5)
    whole = {name for name in found.metrics if not name.startswith("first_stage/ahead/")}  # a share of the budgets
    assert set(found.intervals) == whole and np.abs(gain).max() > 1e-4


def test_redundancy_counts_what_another_head_has_chosen_already(traces):
    trace, snapkv = traces[0], policy("snapkv", budget=72, sets="head")
    chosen = snapkv.prefill(trace.prompt)
    total = twice = 0
    for i in range(LAYERS):
        for kv in range(KV_HEADS):
            heads = [[p for p in chosen[i, kv * GROUP + g].tolist() if p < PROMPT - 32] for g in range(GROUP)]
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


def test_kernels_run_on_the_cut_prompts(pooling, traces):
    cut = continuation(traces[1], 200, 8)
    own = replay(cut, policy("rocketkv", budget=52, kernel=21)).summary
    row = rows_of(pooling, length=200, kernel=21).loc[traces[1].document]
    assert row["output_error"] == pytest.approx(own["output_error"]) and row["mass_lost"] == own["mass_lost"]
    gain = (rows_of(pooling, length=850, kernel=7) - rows_of(pooling, length=850, kernel=63))["output_error"]
    assert pooling.metrics["gain/output_error/k63_over_k7/longest"] == pytest.approx(gain.mean())


def test_the_best_kernel_is_that_of_the_mean_curve(pooling, traces):
    best, own = {}, {}
    for n in (200, 850):
        errors = {k: rows_of(pooling, length=n, kernel=k)["output_error"] for k in (7, 21, 63)}
        best[n] = min(errors, key=lambda k: errors[k].mean())
        own[n] = [min(errors, key=lambda k: errors[k][trace.document]) for trace in traces]
    assert pooling.metrics["best_kernel/longest"] == pytest.approx(math.log2(best[850]))
    assert pooling.metrics["best_kernel_size/shortest"] == pytest.approx(best[200])
    assert pooling.metrics["best_kernel/growth"] == pytest.approx(math.log2(best[850] / best[200]))
    low, high = pooling.intervals["best_kernel_size/longest"]
    assert {round(low), round(high)} <= {7, 21, 63} and low <= best[850] <= high
    kernels = design.best_kernels(pooling.table).set_index(["length", "document"])["kernel"]
    assert [kernels[850][trace.document] for trace in traces] == own[850] and len(kernels) == 6


def test_a_split_is_rocketkv_hybrid_or_snapkv_pp(traces):
    trace = traces[0]
    half, even = replay(trace, design.SplitRocketKV(budget=57)), replay(trace, policy("rocketkv", budget=57))
    assert torch.equal(half.stored(1, 4), even.stored(1, 4)) and half.summary == even.summary
    none = replay(trace, design.SplitRocketKV(budget=57, exponent=0.0))
    alone = replay(trace, policy("hybrid", budget=57))
    assert none.summary["output_error"] == pytest.approx(alone.summary["output_error"], rel=1e-5)
    assert torch.equal(none.kept(0, 3), alone.kept(0, 3))
    whole = replay(trace, design.SplitRocketKV(budget=57, exponent=1.0))
    first = replay(trace, policy("snapkv_pp", budget=57 - STEPS))
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
    half = points.query("exponent == 0.75 and compression == 32")["value"].item()
    assert half == between.metrics["survived/split0.75/c32"]
    assert design.published_exponent(16) == pytest.approx(0.44) and design.published_exponent(2**20) == 0.8


def test_the_published_exponent_is_the_policy_s(traces):
    total, budget = TOTAL, 57
    exponent = design.published_exponent(total / budget)
    found = policy("rocketkv", budget=budget, split="adaptive").capacity(PROMPT, STEPS)
    assert found == max(int(total / (total / budget) ** exponent), 2 * STEPS)


def test_pages_and_dimensions_cost_the_same(inside, traces):
    trace, row = traces[0], rows_of(inside, method="pages0.75").loc[traces[0].document]
    hybrid = policy("hybrid", budget=57, page=8)
    result = replay(trace, hybrid)
    assert row["output_error"] == pytest.approx(result.summary["output_error"])
    allowed = LAYERS * KV_HEADS * 57 * 2 * DIM * 4
    for page in (1, 2, 4, 8, 16):
        loaded = replay(trace, policy("hybrid", budget=57, page=page)).read_bytes
        assert bool((loaded <= allowed).all()) and float(loaded.mean()) > 0.85 * allowed, page
    assert set(inside.table["method"]) == {f"pages{e}" for e in ("0", "0.25", "0.5", "0.75", "1")}


def test_table_1_is_named_by_compression(traces):
    found = design.table_1(traces[0])
    row = found.table.query("method == 'quest' and compression == 16").iloc[0]
    assert row["budget"] == 57
    pages = math.ceil(TOTAL / max(16, math.ceil(TOTAL / 28)))
    assert found.metrics["auxiliary/quest/c16"] == pytest.approx(found.metrics["storage/quest/c16"] - 1)
    assert found.metrics["auxiliary/quest/c16"] == pytest.approx(pages / TOTAL, rel=0.05)
    by_tensors = [found.metrics[f"by_tensors/{name}/c16"] for name in ("rocketkv", "quest", "sparq", "snapkv")]
    assert by_tensors == pytest.approx([1 / 4 + 1 / 8, 1 + 1 / 32, 1.5, 1 / 16]), "at exactly 16"
    assert found.metrics["of_tensors/sparq/c64"] == pytest.approx(found.metrics["storage/sparq/c64"] / 1.5)
    assert "storage/snapkv/c64" not in found.metrics


def test_formulas_stand_in_a_row_for_each_method_and_compression():
    table = common.formulas([4, 16]).set_index(["method", "c"])
    assert len(table) == 8
    assert table.loc[("rocketkv", 16)].tolist() == pytest.approx([1 / 4 + 2 / 8, 1 / 4 + 1 / 8, 1 / 16])


def test_claims_find_their_metrics(ladder, pooling, between, inside, traces):
    parts = [ladder, pooling, between, inside, design.table_1(traces[0]), design.first_stage(traces, [8, 16])]
    assert not unmeasured("rocketkv_design", *parts, paper="rocketkv")
