"""ZSMerge's own tables: what they add up to, and which sentences of the text follow from them."""

from __future__ import annotations

import pytest

from kvlab import papers
from kvlab.analyses.zsmerge import printed


def verdict(name: str) -> str:
    found = (printed.over_snapkv(), printed.over_eviction(), printed.infinite_bench(), printed.summaries())
    known = {metric: value for findings in found for metric, value in findings.metrics.items()}
    (claim,) = [claim for claim in papers.claims(paper="zsmerge") if claim.id == f"zsmerge.{name}"]
    return papers.judge(claim, known).verdict


def test_the_full_cache_stands_beside_every_capacity():
    table = printed.cells("table3")
    assert len(table) == 2 * 2 * 6
    row = table.set_index(["model", "capacity", "what"]).loc[("llama-2-7b", 512, "code")]
    assert row.filter(["full", "h2o", "snapkv", "streamingllm", "zsmerge"]).tolist() == [
        65.19,
        61.26,
        63.06,
        19.63,
        63.02,
    ]


def test_zsmerge_surpasses_snapkv_in_six_of_twenty_four_cells():
    found = printed.over_snapkv().metrics
    counts = [found[f"table3/over_snapkv/{what}"] for what in ("wins", "losses", "ties")]
    assert counts == [6, 17, 1] and found["table3/share_above_snapkv"] == 0.25
    assert found["table3/over_snapkv/least"] == pytest.approx(64.50 - 64.83)
    assert verdict("abstract.surpassing") == "fails" and verdict("section4_4_2.comparable") == "holds"


def test_streamingllm_and_h2o_are_behind_in_table_3_but_not_most_where_the_text_says():
    found = printed.over_eviction().metrics
    assert found["table3/over_h2o/least"] == pytest.approx(5.02 - 4.45)
    assert found["table3/over_streamingllm/least"] == pytest.approx(61.59 - 60.13)
    multi_document, summaries = (10.36 / 8.35, 11.37 / 8.16), (12.17 / 7.07, 13.23 / 7.18)
    assert found["table3/over_h2o/especially"] == pytest.approx(sum(multi_document + summaries) / 4 - 1)
    assert found["table3/over_streamingllm/especially"] < found["table3/over_streamingllm/elsewhere"]
    assert found["table5/over_h2o/share_above"] == pytest.approx(38 / 42)
    assert found["table5/over_streamingllm/share_above"] == pytest.approx(80 / 84)
    assert found["table5/h2o_fails"] == 2, "reports and news"
    names = ("section4_4_2.over_eviction", "section4_4_2.especially", "table5.superior", "table5.h2o_fails")
    assert [verdict(name) for name in names] == ["holds", "fails", "holds", "holds"]


def test_table_7_by_hand():
    found = printed.over_snapkv().metrics
    gains = [4.66, 6.31, 0.93, 0, 0.49, -0.50, -1.36, 0.98, 0.50]
    assert found["table7/over_snapkv/mean"] == pytest.approx(sum(gains) / 9)
    assert [found[f"table7/over_snapkv/{what}"] for what in ("wins", "losses", "ties")] == [6, 2, 1]
    assert found["table7/over_snapkv/llama_symbolic"] == found["table7/over_snapkv/least"] == pytest.approx(-1.36)
    assert verdict("table7.all_cells") == verdict("table7.llama_symbolic") == "fails"


def test_table_3_is_made_of_table_5():
    """The mean of lcc and repobench-p is the code of table 3, and every other cell agrees to rounding as well."""
    categories, tasks = (papers.figure("zsmerge", name).fillna(0) for name in ("table3", "table5"))
    full = tasks.set_index(["model", "method"]).loc[("llama-2-7b", "full")]
    assert full[["lcc", "repobench-p"]].mean() == pytest.approx(categories["code"].iloc[0], abs=0.005)
    assert sum(map(len, printed.CATEGORIES.values())) == 21 == len(tasks.columns) - 3
    assert 0 < printed.over_snapkv().metrics["table3/from_table5"] <= 0.01
    assert verdict("table3.from_table5") == "holds"


def test_two_averages_of_table_6_are_not_those_of_their_rows():
    found = printed.infinite_bench()
    differ = found.table.query("abs(difference) > 0.0051").set_index("method")["recomputed"].round(2)
    assert differ.to_dict() == {"full": 54.44, "zsmerge": 53.32} and found.metrics["table6/averages_that_differ"] == 2
    assert found.metrics["table6/share_of_full/printed"] == pytest.approx(52.95 / 54.69)
    assert found.metrics["table6/below_best"] == pytest.approx(53.52 - 52.95)
    assert found.metrics["table6/over_best/retrieve_kv"] == pytest.approx(67.96 - 53.53)
    assert found.metrics["table6/over_h2o/average"] == pytest.approx(52.95 - 46.63)
    assert found.metrics["table6/over_infllm/average"] == pytest.approx(52.95 - 42.64)
    assert verdict("table6.retrieve_kv") == verdict("table6.over_eviction") == "holds"
    assert verdict("table6.averages") == verdict("table6.share") == "fails" and verdict("table6.specialised") == "holds"


def test_table_2s_gains_reach_further_than_the_conclusion_says():
    found = printed.summaries()
    assert found.metrics["table2/over_h2o/least"] == pytest.approx(31.62 / 30.83 - 1)
    assert found.metrics["table2/over_h2o/most"] == pytest.approx(6.74 / 3.16 - 1)
    assert found.metrics["table2/over_less/least"] == pytest.approx(30.60 / 30.83 * 30.83 / 29.98 - 1, abs=0.01)
    assert found.metrics["table2/of_full/llama-2-7b/5"] == pytest.approx(30.60 / 30.59)
    assert found.metrics["table2/of_full/falcon-7b/5"] == pytest.approx(3.29 / 8.79)
    assert len(found.table) == 2 * 18
    assert verdict("table2.sustained") == "holds"
    assert verdict("section5.quality") == "fails" and verdict("table2.every_budget") == "holds"


def test_all_recomputed_numbers_stand_in_one_table():
    table = printed.in_numbers(printed.summaries(), printed.infinite_bench())
    assert table.loc["table6/averages_that_differ", "value"] == 2 and len(table) == 12 + 7
