"""Policies at equal bytes: curves read off between points, fronts and ranks."""

import math

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.equal_bytes import FEW, MIB, table
from support.spread import students

import kvlab
from kvlab.analyses.tasks.contenders import by_name, contender, contenders
from kvlab.analyses.together import equal_bytes
from kvlab.errors import KvlabError
from kvlab.methods import policies


def test_a_curve_is_read_off_in_the_logarithm_of_the_bytes():
    # 20 lies half way between 10 and 40 on a logarithmic axis, 40 is measured, 80 is half way to 160.
    assert equal_bytes.interpolate([10, 40, 160], [0.9, 0.5, 0.1], 20).value == pytest.approx(0.7)
    assert equal_bytes.interpolate([160, 10, 40], [0.1, 0.9, 0.5], 80).value == pytest.approx(0.3)
    assert equal_bytes.interpolate([10, 40, 160], [0.9, 0.5, 0.1], 40).value == 0.5
    assert equal_bytes.interpolate([1, 1000], [0.0, 3.0], 10).value == pytest.approx(1.0)


def test_a_curve_ends_where_its_points_end():
    below = equal_bytes.interpolate([8 * MIB, 16 * MIB], [0.2, 0.1], 7.9 * MIB)
    assert below.value is None and below.reason == "takes at least 8 MiB"
    above = equal_bytes.interpolate([8 * MIB, 16 * MIB], [0.2, 0.1], 16.1 * MIB)
    assert above.value is None and above.reason == "takes at most 16 MiB"
    assert equal_bytes.interpolate([8 * MIB], [0.2], 8 * MIB).value == 0.2


def test_where_a_curve_passes_a_size_twice_the_larger_budgets_count():
    # 20 bytes lie between the first two points, and again between the last two, which have the larger budgets.
    assert equal_bytes.interpolate([10, 40, 10, 40], [0.9, 0.7, 0.3, 0.1], 20).value == pytest.approx(0.2)
    assert equal_bytes.interpolate([10, 40, 30], [0.9, 0.5, 0.4], 20).value == pytest.approx(0.7)
    assert equal_bytes.interpolate([20, 10, 40], [0.9, 0.7, 0.3], 20).value == pytest.approx(0.5)
    assert equal_bytes.interpolate([30, 30, 30], [0.9, 0.5, 0.4], 30).value == 0.4


@pytest.mark.parametrize(("size", "values", "at"), [([], [], 1), ([1, 2], [1], 1), ([0, 2], [1, 1], 1), ([1], [1], 0)])
def test_what_is_no_curve_is_refused(size, values, at):
    with pytest.raises(KvlabError, match="a curve needs"):
        equal_bytes.interpolate(size, values, at)


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), max_size=12))
def test_the_front_is_what_nothing_beats(points):
    beaten = [
        any(other <= size and less <= loss and (other < size or less < loss) for other, less in points)
        for size, loss in points
    ]
    assert equal_bytes.front([p[0] for p in points], [p[1] for p in points]) == [not b for b in beaten]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), max_size=12))
def test_a_slack_forgives_a_little_more_size(points):
    beaten = [
        any((less < loss and other <= 1.5 * size) or (less == loss and other < size) for other, less in points)
        for size, loss in points
    ]
    assert equal_bytes.front([p[0] for p in points], [p[1] for p in points], slack=0.5) == [not b for b in beaten]


def test_neither_the_full_cache_nor_an_oracle_stands_on_the_front():
    curves = table(
        full={"a": [(100, 100, 0.0)]},
        exact_topk={"a": [(100, 10, 0.1)]},
        oracle_attention={"a": [(9, 9, 0.05)]},
        larger={"a": [(120, 120, 0.1)]},
        other={"a": [(10, 10, 0.5), (10.2, 10.2, 0.4)]},
    )
    found = equal_bytes.points(curves, "read", "output_error").set_index(["policy", "budget"])["front"]
    assert found[found].index.tolist() == [("other", 1)]


def test_equal_read_bytes_compare_what_equal_stored_bytes_cannot():
    read = equal_bytes.summary(equal_bytes.at_equal(FEW, "read", 0.20))
    assert read["policy"].tolist() == ["selects", "keeps", "small"]
    assert read["output_error"].tolist()[:2] == pytest.approx([0.1, 0.4])
    assert read["rank"].tolist()[:2] == [1.0, 2.0]
    stored = equal_bytes.summary(equal_bytes.at_equal(FEW, "stored", 0.20)).set_index("policy")
    assert stored.loc["keeps", "output_error"] == pytest.approx(0.4)
    assert stored.loc["selects", "reason"] == "stores at least 100 MiB"
    assert stored.loc["small", "reason"] == "stores at most 5 MiB"
    assert math.isnan(stored.loc["selects", "output_error"]) and math.isnan(stored.loc["small", "rank"])


def test_a_policy_that_falls_short_on_one_document_has_no_value_on_any():
    uneven = table(one={"a": [(10, 10, 0.4), (40, 40, 0.2)], "b": [(10, 10, 0.4), (15, 15, 0.3)]})
    equal = equal_bytes.at_equal(uneven, "stored", 0.2)
    assert equal["value"].isna().all() and set(equal["reason"]) == {"stores at most 15 MiB"}


def test_ranks_know_which_measures_should_be_high():
    equal = equal_bytes.at_equal(FEW, "read", 0.20)
    places = equal_bytes.ranks(equal).set_index(["measure", "policy", "document"])["rank"]
    assert places["output_error", "selects", "a"] == 1 and places["recall", "selects", "a"] == 1
    assert places["output_error", "keeps", "b"] == 2 and places["recall", "keeps", "b"] == 2
    assert places["step_recall", "keeps", "a"] == places["step_recall", "selects", "a"] == 1.5
    assert "small" not in places.index.get_level_values("policy")


def test_findings_name_side_share_policy_and_measure():
    found = equal_bytes.findings(FEW, {"read": [0.2], "stored": [0.2, 1.0]})
    assert found.metrics["read/0.2/keeps/output_error"] == pytest.approx(0.4)
    low, high = found.intervals["read/0.2/keeps/output_error"]
    assert (low, high) == pytest.approx(students((0.3, 0.5)), rel=1e-4)
    assert found.metrics["read/0.2/selects/rank"] == 1
    assert found.metrics["stored/1/selects/output_error"] == pytest.approx((0.0 + 0.1) / 2)
    assert not any(name.startswith("stored/0.2/selects") for name in found.metrics)


def test_an_unknown_side_is_refused():
    with pytest.raises(KvlabError, match="stored or read"):
        equal_bytes.at_equal(FEW, "written", 0.2)


def test_a_policy_in_two_storages_is_two_curves():
    rough = table(keeps={"a": [(1, 1, 0.5), (4, 4, 0.3)]}).assign(storage="turbo-4")
    plain = table(keeps={"a": [(10, 10, 0.4), (40, 40, 0.2)]}, full={"a": [(100, 100, 0.0)]}).assign(storage="as_is")
    equal = equal_bytes.at_equal(pd.concat([plain, rough]), "stored", 0.04).query("measure == 'output_error'")
    assert dict(zip(equal.policy, equal.value, strict=True))["keeps+turbo-4"] == pytest.approx(0.3)
    assert dict(zip(equal.policy, equal.reason, strict=True))["keeps"] == "stores at least 10 MiB"


def test_policies_meet_at_the_size_of_a_quantised_full_cache():
    full = {"a": [(100, 100, 0.0)], "b": [(100, 100, 0.0)]}
    small = {"a": [(10, 10, 0.1)], "b": [(20, 20, 0.2)]}
    keeps = {"a": [(10, 10, 0.4), (40, 40, 0.2)], "b": [(10, 10, 0.6), (20, 20, 0.5), (40, 40, 0.4)]}
    plain = table(full=full, keeps=keeps).assign(storage="as_is").drop(columns="full_bytes")
    both = pd.concat([plain, table(full=small).assign(storage="turbo-4")]).drop(columns="full_bytes")
    equal = equal_bytes.at_equal(both, "stored", "full+turbo-4").query("measure == 'output_error'")
    assert equal.query("policy == 'full+turbo-4'").value.tolist() == [0.1, 0.2]
    assert equal.query("policy == 'keeps'").value.tolist() == pytest.approx([0.4, 0.5])
    with pytest.raises(
        KvlabError, match=r"'keeps' has not one size on each document; the table has full, keeps, full\+"
    ):
        equal_bytes.at_equal(both, "stored", "keeps")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pd.concat([FEW, FEW]), "several rows of keeps at budget 0 on a: give each setting"),
        (FEW.drop(columns="full_bytes"), "replay the policy `full`, too"),
        (FEW.drop(columns=["document", "read_bytes"]), "lacks: document, read_bytes; pass a replay's summary"),
    ],
)
def test_a_table_that_would_mix_curves_or_has_no_full_cache_is_refused(rows, message):
    with pytest.raises(KvlabError, match=message):
        equal_bytes.at_equal(rows, "stored", 0.2)


def test_every_policy_meets_every_measure(tiny):
    ids = torch.randint(5, 90, (1, 160), generator=torch.Generator().manual_seed(0))
    trace = kvlab.capture(tiny(), ids, new_tokens=6, window=64, policies=sorted(policies()))
    measured = equal_bytes.measure([trace], [100])
    assert set(measured["policy"]) == set(policies())
    assert not measured[list(equal_bytes.QUALITY)].isna().any().any()
    summary = kvlab.replay(trace, kvlab.policy("snapkv", budget=100), k=16).summary  # a tenth of the prompt
    row = measured[measured["policy"] == "snapkv"].iloc[0]
    assert {name: row[name] for name in summary} == pytest.approx(summary)
    full = measured[measured["policy"] == "full"].iloc[0]
    assert full["stored_bytes"] == row["full_bytes"] and full["output_error"] == 0
    assert math.isnan(full["budget"])


def test_contenders_get_what_they_need_and_come_once():
    made = contenders([64, 128], heads="smollm2-135m")
    assert len(made) == 2 * len(policies()) - 3  # the full cache, think and threshold have no budget
    assert contender("duoattention", 64, heads="smollm2-135m").heads == "smollm2-135m"
    assert contender("compilerkv", 64, pad="budget").pad == "budget" and contender("compilerkv", 64).pad == "none"
    assert contender("snapkv", 64, heads="smollm2-135m") == kvlab.policy("snapkv", budget=64)
    assert [str(method) for method in by_name({"full": [0], "h2o": [64, 128]})] == [
        str(kvlab.policy("full")),
        str(kvlab.policy("h2o", budget=64)),
        str(kvlab.policy("h2o", budget=128)),
    ]


def test_every_policy_has_a_family():
    from kvlab.render import theme

    assert "other" not in {equal_bytes.family(name) for name in policies()}
    assert {theme.family_colour(name) for name in policies()}.isdisjoint({theme.OTHER})
    assert equal_bytes.family("mine") == "other" and theme.family_colour("mine") == theme.OTHER


def test_a_needle_s_metric_is_the_mean_of_its_scores(reader):
    found = equal_bytes.needles(reader, [160], [0.1, 0.9], 96, document="sotu/1962")
    assert set(found.table["policy"]) == set(policies()) and len(found.table) == 2 * len(policies())
    of_h2o = found.table.query("policy == 'h2o'")["score"]
    assert found.row(equal_bytes.NEEDLE, policy="h2o").value == pytest.approx(of_h2o.mean())
    assert set(found.metrics) == {f"needle/{name}" for name in policies()} and not found.intervals


def test_what_was_measured_is_said_in_words():
    measured = pd.concat([FEW, table(full={"a": [(100, 100, 0.0)]}).assign(budget=None)])
    assert equal_bytes.in_words(measured) == "4 policies, 2 budgets, 2 documents; the full cache: 100.0 MiB"
