"""What papers print of speed and memory, against arithmetic by hand."""

from __future__ import annotations

import pandas
import pytest

from kvlab import papers
from kvlab.analyses.speed import footprint


def test_weights_and_entries_are_those_of_the_published_models():
    # Embedding and head, and for each layer the projections of attention and MLP and two norms, then the last norm.
    llama_2 = 2 * 32000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096
    llama_2_13b = 2 * 32000 * 5120 + 40 * (4 * 5120**2 + 3 * 5120 * 13824 + 2 * 5120) + 5120
    llama_3 = 2 * 128256 * 4096 + 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096) + 4096
    assert [footprint.parameters(name) for name in ("llama-2-7b", "llama-2-13b", "llama-3.1-8b")] == [
        llama_2,
        llama_2_13b,
        llama_3,
    ]
    assert footprint.entry_bytes("llama-2-7b") == 2 * 32 * 32 * 128 * 2 == footprint.entry_bytes("llama-2-7b", 4) // 2
    assert footprint.entry_bytes("llama-3.1-8b") == 128 * 1024
    assert footprint.predicted("llama-3.1-8b", 10, batch=3) == 2 * llama_3 + 30 * 128 * 1024


def test_zsmerges_memory_is_that_of_32_bit_floats():
    found = footprint.zsmerge_memory(papers.figure("zsmerge", "memory"))
    assert len(found.table) == 6
    assert (found.table["float32"].round() == found.table["printed"]).all()
    assert (found.table["float16"] * 2).tolist() == pytest.approx(found.table["float32"].tolist())
    assert found.metrics["memory/zsmerge/reduction_54k"] == pytest.approx(1 - 43.1 / 79.1, abs=1e-3)


def test_workloads_that_cannot_be_are_counted():
    printed = pandas.DataFrame(
        [
            (1024, 1024, 4, "7b", "full", 100.0, 40.96),  # agrees, fits
            (8192, 8192, 16, "13b", "full", 100.0, 1310.72),  # agrees, needs 224 GiB
            (1024, 1024, 4, "7b", "full", None, None),  # out of memory, yet it fits
            (1024, 1024, 1, "13b", "zsmerge", 90.0, 20.0),  # 26 GB for each of 90 steps a second; latency makes 51.2
        ],
        columns=["prompt", "generated", "batch", "model", "method", "tokens_per_second", "latency"],
    )
    found = footprint.zsmerge_workloads(printed, "made_up")
    assert found.metrics == {
        "made_up/impossible": 1.0,
        "made_up/unexplained": 1.0,
        "made_up/above_bound": 1.0,
        "made_up/contradictions": 1.0,
    }
    assert found.table["bound"].iloc[3] == pytest.approx(2.039e12 / (2 * 13.016e9), rel=1e-3)
    assert "gib" not in printed


def test_table_1_is_part_of_table_4():
    small, large = (
        papers.figure("zsmerge", name).set_index(["prompt", "generated", "batch", "model", "method"])
        for name in ("table1", "table4")
    )
    assert len(small) == 32 and len(large) == 104
    pandas.testing.assert_frame_equal(small, large.loc[small.index])


def test_rocketkvs_saving_grows_with_length():
    found = footprint.rocketkv_saving(papers.figure("rocketkv", "figure5"))
    savings = found.table.pivot(index="length", columns="budget", values="saving")
    assert savings[256].is_monotonic_increasing and (savings[256] > savings[512]).all()
    # 96k tokens: the root of 96k x 256 entries, and pages of five (the root of 20, rounded up).
    stored = 5016 * 1.2
    weights, entry = 2 * footprint.parameters("llama-3.1-8b"), 128 * 1024
    expected = 1 - (weights + stored * entry) / (weights + 96 * 1024 * entry)
    assert found.metrics["saving/rocketkv/256/96k"] == pytest.approx(expected, rel=1e-3)
    assert 32 * 1024 < found.metrics["saving/rocketkv/256/equal_at"] < 96 * 1024


def test_table_a1_prints_less_than_its_text():
    found = footprint.compilerkv_table_a1(papers.figure("compilerkv", "tableA1"))
    assert found.metrics["table_a1/smallest_saving"] == pytest.approx(1 - 19050 / 20055)
    assert found.metrics["table_a1/speedup/32k"] == pytest.approx(28.5 / 11.65)
    assert found.metrics["table_a1/latency_saved/32k"] == pytest.approx(1 - 285 / 706.56)
    assert found.metrics["table_a1/growth_over_cache"] == pytest.approx((31213 - 20055) / (30 * 128), rel=1e-6)
    # A full cache's latency is its first token and its steps: a k is 1,024 there.
    full = papers.figure("compilerkv", "tableA1").query("method == 'FullKV'")
    latency = full["ttft_s"] + full["output_tokens"] / full["tokens_per_s"]
    assert (latency / full["latency_s"] - 1).abs().max() < 0.01


@pytest.mark.parametrize(("beside", "verdict"), [(0.16, "holds"), (0.02, "not measured"), (0.34, "not measured")])
def test_a_saving_of_memory_is_compared_where_the_cache_is_as_large_beside_the_weights(beside, verdict):
    (claim,) = [claim for claim in papers.claims() if claim.id == "compilerkv.tableA1.memory"]
    saving = {"memory_saving/compilerkv/longest": 0.1, "cache_beside_weights/longest": beside}
    assert papers.judge(claim, saving, {}).verdict == verdict
