"""MorphKV's headlines beside its own figures: arithmetic by hand."""

from __future__ import annotations

import pytest

from kvlab import papers
from kvlab.analyses.morphkv import headlines, sizes


def verdict(name: str) -> str:
    known = {metric: value for findings in headlines.everything() for metric, value in findings.metrics.items()}
    (claim,) = [claim for claim in papers.claims(paper="morphkv") if claim.id == f"morphkv.{name}"]
    return papers.judge(claim, known).verdict


def test_the_bars_of_long_responses_are_of_sizes_not_of_savings():
    found = headlines.memory().metrics
    assert found["bars/saving/h2o/longwriter"] == pytest.approx(1 - 0.25 / 1)
    assert found["bars/saving/snapkv/longgenbench"] == pytest.approx(1 - 0.55 / 5.01)
    assert found["bars/saving/h2o/longgenbench"] == pytest.approx(1 - 0.55 / 1.22)
    assert verdict("abstract.memory_bars") == "holds", "the bars are means, and leave the mean of savings open"


def test_the_saving_over_snapkv_follows_on_the_benchmark_that_the_sentences_accuracy_is_of():
    """LongGenBench's three models: a set for each query head is 4, 4 and 7 times the full cache."""
    found = sizes.printed_sizes().metrics
    by_hand = (2 * (1 - 0.55 / 4) + (1 - 0.55 / 7)) / 3
    assert found["saving/longgenbench/snapkv"] == pytest.approx(by_hand, abs=2e-4) == pytest.approx(0.8821, abs=1e-4)
    known = {claim.id: papers.judge(claim, found).verdict for claim in papers.claims(paper="morphkv")}
    assert known["morphkv.section1.memory_snapkv"] == "holds" and known["morphkv.abstract.memory"] == "fails"
    assert known["morphkv.figure8.snapkv"] == known["morphkv.section4.lightweight"] == "holds"


def test_long_contexts_save_half_by_the_settings_and_more_by_the_bars():
    """2,000 entries for each KV head against 1,024 for each of four query heads, with and without an answer."""
    found = headlines.memory().metrics
    assert found["figure9b/saving/no_answer"] == pytest.approx(1 - 2000 / (4 * 1024))
    assert found["figure9b/saving/longest_answer"] > found["figure9b/saving/no_answer"]
    assert found["figure9/snapkv_over_morphkv"] == pytest.approx(2.8)
    assert verdict("figure9b.half") == "holds" and verdict("section5_3_2.up_to_twice") == "fails"
    assert verdict("section5_3_2.up_to_five") == "fails"


def test_figure_2b_by_hand():
    found = headlines.figure_2b().metrics
    assert found["figure2b/qwen_gain"] == pytest.approx(8 / 39)
    assert found["figure2b/qwen_gain/inputs"] == pytest.approx(47.5 / 38.5 - 47 / 39)
    # A group of seven: what SnapKV stores seven times MorphKV stores once, as long as it evicts nothing.
    assert found["figure2b/qwen_saving/shortest"] == pytest.approx(6 / 7)
    assert found["figure2b/qwen_saving/implied"] == pytest.approx(1 - 4000 / (7 * round(4000 / 0.55)))
    assert found["figure2b/vcsum_saving/no_answer"] == pytest.approx(1 - 2000 / 4096)
    assert found["figure2b/vcsum_saving/longest_answer"] == pytest.approx(1 - 2000 / (4 * (1024 + 512)))
    assert (verdict("figure2b.qwen_gain"), verdict("figure2b.qwen_saving")) == ("holds", "fails")
    assert verdict("figure2b.vcsum_saving") == "holds"


def test_at_1_percent_snapkv_has_one_free_choice_in_the_paper():
    """A hundredth of 2,000 / 0.15 tokens is 133 entries, a quarter of them 33, of which the window takes 32."""
    found = headlines.choices_at_1_percent()
    assert found.metrics == {"figure10/choices/snapkv": 1, "figure10/choices/morphkv": 101}
    assert found.table.set_index("method")["entries"].to_dict() == {"snapkv": 33, "morphkv": 133}


def test_two_rows_of_table_7_end_in_their_sixth_criterion():
    found = headlines.table_7()
    assert found.metrics["table7/totals_that_differ"] == 3 and len(found.table) == 16
    six = (62.5 + 80 + 70.42 + 75 + 41.2 + 58.75) / 6
    assert found.metrics["table7/mean_of_six/Phi4"] == pytest.approx(64.7 - six)
    assert max(found.metrics[f"table7/mean_of_six/{model}"] for model in ("Phi4", "Qwen")) < 0.1
    assert found.metrics["table7/relevance_over_h2o/least"] == pytest.approx(85.4 - 85.0)
    assert found.metrics["table1/most_over_methods"] == pytest.approx(64.7 / 61.5 - 1)
    assert found.metrics["table1/most_over_full"] == pytest.approx(69.5 / 66.5 - 1)
    assert verdict("table7.totals") == "fails" and verdict("table7.relevance") == "holds"
    assert verdict("table1.up_to") == "fails"


def test_table_2_is_worse_in_three_cells_of_fifteen():
    assert headlines.table_2().metrics["table2/share_not_worse"] == pytest.approx(12 / 15)
    assert verdict("table2.generally") == "holds"


def test_the_logs_of_multinews_agree_with_the_text_on_snapkv_alone():
    assert headlines.logged_sizes().metrics == {"figure9/multinews/snapkv": 1.89, "figure9/multinews/morphkv": 0.6}
    assert verdict("figure9.multinews_snapkv") == "holds"
    assert verdict("figure9.multinews_morphkv") == "fails"


def test_figure_9_by_the_logs():
    findings = headlines.logged_shares()
    table = findings.table.set_index(["model", "task"])
    assert table.loc[("Llama", "multi_news")].tolist() == pytest.approx([1.89, 0.60], abs=0.006), "as the text's own"
    llama = table.loc["Llama"]
    assert len(llama) == 18 and len(table) == 60
    for method in ("snapkv", "morphkv"):
        assert findings.metrics[f"figure9/logged/{method}"] == pytest.approx(llama[method].sum() / 18)
    # Long prompts, of which little is stored, weigh more in all entries together.
    total = {method: findings.metrics[f"figure9/logged/{method}/of_all_prompts"] for method in ("snapkv", "morphkv")}
    assert all(llama[method].min() < total[method] < llama[method].mean() for method in total)
    assert {name: verdict(name) for name in ("figure9.snapkv", "figure9.morphkv", "figure9b.logged_half")} == {
        "figure9.snapkv": "fails",
        "figure9.morphkv": "fails",
        "figure9b.logged_half": "holds in direction only",
    }
    assert [round(total[method], 2) for method in total] == [0.41, 0.17], "the printed 0.42 and 0.15 are neither"
    savings = [1 - part["morphkv"].sum() / part["snapkv"].sum() for _, part in table.groupby("model")]
    assert len(savings) == 3 and findings.metrics["figure9/logged/saving"] == pytest.approx(sum(savings) / 3)


def test_max_fusion_is_ahead_on_the_six_tasks_that_the_text_names():
    found = headlines.table_4()
    gains = [14.9 / 14.6 - 1, 0, 8.0 / 7.9 - 1, 97.6 / 96.9 - 1, 23.5 / 22.9 - 1, 0]
    assert found.metrics["table4/max_over_sum/six"] == pytest.approx(sum(gains) / 6)
    assert found.metrics["table4/max_over_sum/largest"] == pytest.approx(23.5 / 22.9 - 1)
    assert found.metrics["table4/max_over_sum/largest/inputs"] == pytest.approx(23.55 / 22.85 - 23.5 / 22.9)


def test_what_a_window_of_200_changes_in_table_6():
    found = headlines.table_6().metrics
    assert found["table6/average/least"] == found["table6/average/least_of_two"] == 2
    assert found["table6/completion_rate/most"] == 1
    higher = [True, True, False, False, True, True, True, True, False]  # Llama, Mistral, Qwen: once, range, periodic
    assert found["table6/kinds/share_higher"] == pytest.approx(sum(higher) / 9)
