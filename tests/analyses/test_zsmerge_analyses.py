"""ZSMerge's sensitivity: what its numbers are made of, on the real model and a short text."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
from support.spread import students

import kvlab
from kvlab import papers
from kvlab.analyses.findings import Findings
from kvlab.analyses.zsmerge import merging, sensitivity
from kvlab.errors import KvlabError

SWEEPS = {"residual": (0, 0.02, 0.08), "alpha": (0.0, 1.0), "window": (4, 16)}


@pytest.fixture(scope="module")
def figure_5(traces):
    return sensitivity.figure_5(traces, 0.25, SWEEPS)


def test_figure_5_is_made_of_replays(traces, figure_5):
    for parameter, value in (("residual", 0), ("residual", 0.08), ("alpha", 0.0), ("window", 16)):
        zsmerge = kvlab.policy("zsmerge", budget=0.25, **{parameter: value})
        summaries = [kvlab.replay(trace, zsmerge).summary for trace in traces]
        for name, measure in (("error", "output_error"), ("mass_lost", "mass_lost")):
            values = [summary[measure] for summary in summaries]
            metric = f"{name}/{parameter}/{value:g}"
            assert figure_5.metrics[metric] == pytest.approx(np.mean(values), rel=1e-5)
            assert figure_5.intervals[metric] == pytest.approx(students(values), rel=1e-4)


def test_every_sweep_meets_in_the_recommended_configuration(traces, figure_5):
    anchor = kvlab.policy("zsmerge", budget=0.25)
    recommended = [kvlab.replay(trace, anchor).summary["output_error"] for trace in traces]
    for parameter, value in sensitivity.RECOMMENDED.items():
        if parameter in SWEEPS:
            errors = figure_5.table.query("parameter == @parameter and value == @value")["error"]
            assert errors.tolist() == pytest.approx(recommended, rel=1e-5)
            assert f"worse/{parameter}/{value:g}" not in figure_5.metrics
    assert set(figure_5.table.query("parameter == 'window'")["value"]) == {4.0, 8.0, 16.0}, "8 is measured unasked"


def by_hand(errors):
    """Findings as of a sweep, from {(parameter, value): errors of the documents}."""
    findings = Findings(
        pandas.DataFrame(
            [
                {
                    "document": f"d{number}",
                    "parameter": parameter,
                    "value": value,
                    "error": error,
                    "mass_lost": error / 2,
                }
                for (parameter, value), found in errors.items()
                for number, error in enumerate(found)
            ]
        )
    )
    sensitivity._summarise(findings)
    return findings


BY_HAND = by_hand(
    {
        ("residual", 0.0): [0.30, 0.50],
        ("residual", 0.02): [0.20, 0.30],
        ("decay", 0.0): [0.90, 0.90],
        ("decay", 0.5): [0.19, 0.31],
        ("decay", 0.98): [0.20, 0.30],
        ("decay", 1.0): [0.24, 0.33],
    }
)


def test_differences_and_spreads_by_hand():
    metrics, intervals = BY_HAND.metrics, BY_HAND.intervals
    assert metrics["worse/residual/0"] == pytest.approx(0.15)
    assert intervals["worse/residual/0"] == pytest.approx(students((0.1, 0.2)), rel=1e-4)
    assert metrics["worse/decay/0.5"] == pytest.approx(0.0) and metrics["best/residual"] == 0.02
    # One document prefers 0.5 and one 0.98; the mean curve is as low at both, and its bootstrap finds both.
    assert intervals["best/decay"] == (0.5, 0.98) and intervals["best/residual"] == (0.02, 0.02)
    # What lies outside the paper's stable range (0.5 to 1) is not in the spread.
    assert metrics["spread/decay"] == pytest.approx((0.05 / 0.2 + 0.03 / 0.3) / 2)
    assert metrics["spread_over_merging/decay"] == pytest.approx((0.05 / 0.1 + 0.03 / 0.2) / 2)
    worse = BY_HAND.frame(sensitivity.WORSE)
    assert list(zip(worse["parameter"], worse["setting"], strict=True)) == [
        ("residual", 0.0),
        ("decay", 0.0),
        ("decay", 0.5),
        ("decay", 1.0),
    ]
    table = sensitivity.flatness(BY_HAND).set_index("parameter")
    assert list(table.index) == ["residual", "decay"]
    assert table.loc["decay", "spread_over_merging_high"] == pytest.approx(
        students((0.05 / 0.1, 0.03 / 0.2))[1], rel=1e-4
    )


def test_without_a_sweep_of_the_residual_slots_nothing_is_compared_with_merging():
    found = by_hand({("decay", 0.5): [0.2, 0.3], ("decay", 0.98): [0.2, 0.4]})
    (row,) = sensitivity.flatness(found).to_dict("records")
    assert (row["parameter"], row["from"], row["to"], row["spread"]) == ("decay", 0.5, 1.0, pytest.approx(0.125))
    assert pandas.isna(row["spread_over_merging"]) and found.frame(sensitivity.SPREAD_OVER_MERGING).empty


def test_changes_are_relative_to_the_recommended_value():
    changes = sensitivity.changes(BY_HAND).set_index(["parameter", "value", "measure"])
    row = changes.loc["residual", 0.0, "error"]
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((7 / 12, *students((0.5, 2 / 3))), rel=1e-4)
    assert changes.loc["decay", 0.98, "mass_lost"].abs().max() == 0
    assert len(changes) == 2 * 6


def test_the_papers_yardstick_is_what_it_prints():
    yardstick = sensitivity.paper_yardstick(papers.figure("zsmerge", "figure5"))
    assert yardstick == pytest.approx({"decay": 0.02 / 0.06, "window": 0.02 / 0.06})
    claims = [claim for claim in papers.claims(experiment="zsmerge_sensitivity") if "robust" in claim.id]
    assert len(claims) == 2
    assert all(
        claim.paper_value == pytest.approx(yardstick[claim.metric.rpartition("/")[2]], abs=1e-3) for claim in claims
    )


def test_the_default_sweeps_give_what_the_claims_ask_for():
    settings = [(name, float(value)) for name, values in sensitivity.SWEEPS.items() for value in values]
    errors = {key: [0.1, 0.2] for key in settings}
    errors[("residual", 0.0)] = [0.2, 0.3]
    have = set(by_hand(errors).metrics)
    asked = {name for claim in papers.claims(experiment="zsmerge_sensitivity") for name in claim.metrics}
    assert len(asked) > 10
    assert not {name.removesuffix("/low").removesuffix("/high") for name in asked} - have
    assert all(sensitivity.RECOMMENDED[name] in values for name, values in sensitivity.SWEEPS.items())


def test_an_unknown_parameter_is_named(traces):
    with pytest.raises(KvlabError, match=r"sweeps proximity, residual, alpha, decay, window, not kernel"):
        sensitivity.figure_5(traces, 0.25, {"kernel": (3, 5)})


def test_the_bias_is_left_out_only_where_asked(traces):
    found = merging.figure_4(traces, (0.1, 0.25), without_bias=(0.25,))
    assert "error/merge_alpha0/0.25" in found.metrics and "error/merge_alpha0/0.10" not in found.metrics
    errors = found.table.groupby(["ratio", "variant", "document"])["error"].mean().unstack()
    saved = (errors.loc[0.25, "evict"] - errors.loc[0.25, "merge"]).mean()
    bias = (errors.loc[0.25, "merge_alpha0"] - errors.loc[0.25, "merge"]).mean()
    assert found.metrics["saved/0.25"] == pytest.approx(saved) and found.metrics["bias/0.25"] == pytest.approx(bias)
    assert {"saved/0.10", "reduction/0.10"} <= set(found.metrics) and "bias/0.10" not in found.metrics


def test_theorem_1_is_told_in_one_line():
    findings = Findings(pandas.DataFrame({"entries": [1200, 34]}))
    findings.set(merging.VIOLATIONS, 2)
    findings.set(merging.SMALLEST_MARGIN, -1.5e-3)
    assert merging.theorem_1_in_words(findings) == "1,234 unmerged entries, 2 violations, smallest margin -1.5e-03"
