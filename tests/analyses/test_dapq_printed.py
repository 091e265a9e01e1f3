"""What DapQ prints: typed-in tables are whole, and claims ask for their cells."""

from __future__ import annotations

import pytest

from kvlab import papers
from kvlab.analyses.dapq import printed


@pytest.mark.parametrize("name", ["table3", "table5", "table6", "table7", "table8"])
def test_typed_in_tables_average_to_their_last_column(name):
    table = papers.figure("dapq", name)
    scores = table.drop(columns=["model", "budget", "method", "average"])
    whole = scores.notna().all(axis=1) & table["average"].notna()
    off = (scores.mean(axis=1) - table["average"])[whole].abs()
    # A few rows are misprinted, or misread: their cells do not average to what stands beside them.
    assert whole.sum() > 30 and (off < 0.05).sum() >= whole.sum() - 1 and off.max() < 0.5
    assert table["budget"].isna().sum() == table["model"].nunique(), "one row with the full cache for each model"


def test_effects_in_the_claims_are_the_papers_cells():
    cells = papers.figure("dapq", "table1").set_index("condition")
    claims = {claim.id: claim for claim in papers.claims(paper="dapq")}
    post, pre = cells["post"], cells["pre"]
    for name, value in {
        "position_outweighs_content": post["dc_sp"] - post["sc_dp"],
        "dc_sp": post["dc_sp"],
        "sc_dp": post["sc_dp"],
        "pre_sc_dp": pre["sc_dp"],
    }.items():
        assert claims[f"dapq.table1.{name}"].paper_value == pytest.approx(value, abs=1e-9)
    of_content = claims["dapq.table1.content_at_wrong_position"]
    share = (post["sc_dp"] - post["dc_dp"]) / (post["dc_sp"] - post["dc_dp"])
    assert of_content.paper_value == pytest.approx(share, abs=5e-5)
    assert [test.value for test in of_content.size.tests] == pytest.approx([-2 * share, 2 * share], abs=5e-4)
    for name, value in {
        "dc_sp": post["dc_sp"],
        "sc_dp": post["sc_dp"],
        "dc_dp": post["dc_dp"],
        "pre_sc_dp": pre["sc_dp"],
        "pre_dc_dp": pre["dc_dp"],
    }.items():
        size = claims[f"dapq.table1.{name}"].size
        near = size.tests[0] if size.kind == "all_of" else size
        assert near.to == pytest.approx(1 - value, abs=1e-9)
    table = papers.figure("dapq", "table4").query("model == 'Llama3-8B-Instruct' and budget == 64")
    hard = table.set_index("method")["hard"]
    assert claims["dapq.table4.hard"].paper_value == pytest.approx(hard["DapQ"] - hard["SnapKV"])


def test_the_papers_size_is_a_distance_and_no_control_of_ours():
    """The printed cosine holds, however near the prompt's mean query comes: that is a question of its own."""
    (claim,) = [claim for claim in papers.claims(paper="dapq") if claim.id == "dapq.table1.dc_sp"]
    measured = {"similarity/post/dc_sp": 0.7238, "distance/post/dc_sp": 0.2762}
    measured["effect/post/position_less_content"] = 0.3971
    assert not any(metric.startswith("control/") for metric in claim.metrics)
    for distance, verdict in ((0.2762, "holds"), (2.1 * 0.2762, "holds in direction only")):
        assert papers.judge(claim, measured | {"distance/post/dc_sp": distance}).verdict == verdict


def test_dapqs_own_tables_cell_by_cell():
    """Table 9: H2O is ahead with 64 entries on Qwen3-8B, 62.70 against 61.98; cells without DapQ's number are none."""
    found = printed.findings()
    assert found.metrics["printed/needle/behind/H2O/Qwen3-8B/64"] == pytest.approx(0.72)
    assert found.metrics["printed/needle/dapq_not_behind"] == pytest.approx(9 / 10)
    assert found.metrics["printed/ruler/behind/StreamingLLM/Qwen3-8B/64"] == pytest.approx(2.98 - 0.66)
    cells = set(found.table.query("benchmark == 'needle'")["cell"])
    assert "Llama3-8B-Instruct/128" not in cells and "Qwen3-8B/256" in cells
    claims = {claim.id: claim for claim in papers.claims(paper="dapq") if ".printed_" in claim.id}
    verdicts = {name.rpartition("printed_")[2]: papers.judge(c, found.metrics).verdict for name, c in claims.items()}
    failing = {name for name, told in verdicts.items() if told == "fails"}
    assert failing == {"needles"} and verdicts.pop("needles") and set(verdicts.values()) == {"holds"}
    assert {"longbench", "ruler", "helmet", "multihop", "longbench_v2", "hard", "above_full"} < set(verdicts)


def test_table_4_and_multi_hop_questions_by_hand():
    found = printed.findings()
    cells = found.table.groupby("benchmark").size()
    assert cells["hotpotqa"] == 9 and cells["2wikimqa"] == 8, "one cell of 2WikiMQA cannot be read"
    assert found.metrics["printed/longbench_v2/hard_over_snapkv"] == pytest.approx(29.26 - 22.51)
    # DapQ ties with H2O at 128 entries on both Qwen models, and with PyramidKV at 64 on Qwen2.5-7B.
    assert cells["longbench_v2"] == 8 and found.metrics["printed/longbench_v2/ties"] == 3
    # Llama-3-8B: H2O, SnapKV and DapQ at 128, DapQ at 64; Llama-3.1-8B: all at 128, PyramidKV and DapQ at 64;
    # Qwen2.5-7B: H2O and DapQ at 128, PyramidKV, SnapKV and DapQ at 64; Qwen3-8B: all eight.
    assert found.metrics["printed/longbench_v2/above_full"] == 4 + 6 + 5 + 8


def test_lacache_is_behind_in_every_cell_of_ruler():
    """Nearest with 64 entries on Qwen3-8B, where all fail: 0.66 against 0.07."""
    assert printed.findings().metrics["printed/ruler/least_over/Lacache"] == pytest.approx(0.66 - 0.07)
