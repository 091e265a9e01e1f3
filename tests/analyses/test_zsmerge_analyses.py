"""ZSMerge's sensitivity: what its numbers are made of, on the real model and a short text."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
from support.spread import students

import kvlab
from kvlab import papers
from kvlab.analyses.findings import Findings
from kvlab.analyses.morphkv import windows
from kvlab.analyses.zsmerge import decoding, merging, sensitivity, theorem
from kvlab.errors import KvlabError
from kvlab.methods.zsmerge import ZSMerge

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
    assert all(claim.paper_value is None for claim in claims), "the paper does not print it"


def test_the_default_sweeps_give_what_the_claims_ask_for():
    settings = [(name, float(value)) for name, values in sensitivity.SWEEPS.items() for value in values]
    errors = {key: [0.1, 0.2] for key in settings}
    errors[("residual", 0.0)] = [0.2, 0.3]
    have = set(by_hand(errors).metrics)
    claims = [claim for claim in papers.claims(experiment="zsmerge_sensitivity") if claim.figure == "figure_5"]
    asked = {name for claim in claims for name in claim.metrics}
    assert len(asked) > 10
    assert not {name.removesuffix("/low").removesuffix("/high") for name in asked} - have
    assert all(sensitivity.RECOMMENDED[name] in values for name, values in sensitivity.SWEEPS.items())


def test_an_unknown_parameter_is_named(traces):
    with pytest.raises(KvlabError, match=r"sweeps proximity, residual, alpha, decay, window, not kernel"):
        sensitivity.figure_5(traces, 0.25, {"kernel": (3, 5)})


def test_the_choices_that_the_paper_leaves_open_by_replays(traces):
    found = sensitivity.open_choices(traces, 0.25)
    errors = {
        choice: np.array(
            [kvlab.replay(t, kvlab.policy("zsmerge", budget=0.25, **more)).summary["output_error"] for t in traces]
        )
        for choice, more in {"none": {}, "residual": {"residual": 0}, **merging.CHOICES}.items()
    }
    assert set(merging.CHOICES) == {"similarity", "displaces", "plain"}
    for choice in merging.CHOICES:
        worse = errors[choice] - errors["none"]
        assert found.metrics[f"worse_by/{choice}"] == pytest.approx(worse.mean(), abs=1e-6)
        share = (abs(worse) / abs(errors["residual"] - errors["none"])).mean()
        assert found.metrics[f"worse_by_over_merging/{choice}"] == pytest.approx(share, rel=1e-3, abs=1e-5)
    # A prompt as short as these leaves one residual slot: there is nothing to choose between.
    assert found.metrics["worse_by_over_merging/similarity"] == pytest.approx(0, abs=1e-5)
    assert found.metrics["worse_by_over_merging/displaces"] > 1e-3


def test_choices_and_definitions_stand_in_figure_4(traces):
    found = merging.figure_4(traces, (0.1, 0.25), without_bias=(), choices=(0.25,))
    assert "reduction_similarity/0.25" in found.metrics and "reduction_similarity/0.10" not in found.metrics
    results = {
        name: [kvlab.replay(t, kvlab.policy("zsmerge", budget=0.25, **more)) for t in traces]
        for name, more in {"merge": {}, "evict": {"residual": 0}, "similarity": {"initial": "similarity"}}.items()
    }
    saved = [
        float(ours.output_error.mean() - theirs.output_error.mean())
        for ours, theirs in zip(results["merge"], results["similarity"], strict=True)
    ]
    assert found.metrics["saved_by_similarity/0.25"] == pytest.approx(np.mean(saved), abs=1e-6)
    whole = {name: [layer_error(result) for result in several] for name, several in results.items()}
    expected = np.mean([1 - m / e for m, e in zip(whole["merge"], whole["evict"], strict=True)])
    assert found.metrics["reduction_layer/0.25"] == pytest.approx(expected, abs=1e-5)


def layer_error(result) -> float:
    """||all heads' errors|| / ||all heads' outputs|| by a loop over layers and steps."""
    trace, errors = result.trace, []
    for layer in range(trace.n_layers):
        for step in range(trace.steps):
            seen = trace.prompt_length + step + 1
            norms = []
            for head in range(trace.heads):
                group = head * trace.kv_heads // trace.heads
                keys, values = (t[layer, group, :seen].double() for t in (trace.keys, trace.values))
                logits = keys @ trace.response_queries[layer, head, step].double() / keys.shape[-1] ** 0.5
                norms.append(float((logits.softmax(-1) @ values).norm()))
            own = result.output_error[layer, :, step].numpy()
            errors.append(np.sqrt(((own * norms) ** 2).sum()) / np.sqrt((np.array(norms) ** 2).sum()))
    return float(np.mean(errors))


def test_merging_while_decoding_is_made_of_replays(random_traces):
    cuts = [windows.continuation(t, 12, 100) for t in random_traces]
    found = decoding.merging_while_decoding(cuts, budget=20, residual=3)
    results = {
        name: [kvlab.replay(t, kvlab.policy("zsmerge", budget=20, **more)) for t in cuts]
        for name, more in {
            "evict": {"residual": 0},
            "merge": {"residual": 3},
            "plain": {"residual": 3, "scored": "plain"},
        }.items()
    }
    errors = {name: np.array([float(r.output_error.mean()) for r in several]) for name, several in results.items()}
    assert found.metrics["decoding/error/merge"] == pytest.approx(
        (1 - errors["merge"] / errors["evict"]).mean(), rel=1e-4
    )
    assert found.intervals["decoding/error/plain"] == pytest.approx(
        students(1 - errors["plain"] / errors["evict"]), rel=1e-3
    )
    assert found.metrics["decoding/saved_by_plain"] == pytest.approx(
        (errors["merge"] - errors["plain"]).mean(), abs=1e-6
    )
    last = {
        name: np.array([float(r.output_error[..., 75:].mean()) for r in several]) for name, several in results.items()
    }
    assert found.metrics["decoding/part/4"] == pytest.approx((1 - last["merge"] / last["evict"]).mean(), rel=1e-4)
    assert set(found.table["variant"]) == {"evict", "merge", "displaces", "plain", "alpha0"} and len(found.table) == 40


def test_theorem_1_holds_after_a_response_was_merged(random_traces):
    cuts = [windows.continuation(t, 12, 100) for t in random_traces]
    zsmerge = kvlab.policy("zsmerge", budget=20, residual=3)
    found = theorem.theorem_1(cuts, zsmerge, steps=90)
    # 12 + 90 tokens in 20 entries: each KV head has merged 82 of them away.
    heads = sum(t.n_layers * t.kv_heads for t in cuts)
    assert found.metrics["theorem1_decoding/violations"] == 0
    assert found.metrics["theorem1_decoding/merges"] == 82 * heads
    assert found.metrics["theorem1_decoding/even_slot"] == pytest.approx(1 / 3)
    assert 1 / 3 < found.metrics["theorem1_decoding/fullest_slot"] <= 1
    # Its own entry is appended to the others; a slot into which nothing has gone yet is unmerged, too.
    assert found.table["entries"].between(20 - 3 + 1, 20 + 1).all()


def test_theorem_1_after_merges_catches_a_wrong_compensation(random_traces, monkeypatch):
    true = ZSMerge.bias
    broken = lambda self, store: None if true(self, store) is None else 3 * true(self, store)  # noqa: E731
    monkeypatch.setattr(ZSMerge, "bias", broken)
    cut = windows.continuation(random_traces[0], 12, 100)
    found = theorem.theorem_1([cut], kvlab.policy("zsmerge", budget=20, residual=3), steps=90)
    assert found.metrics["theorem1_decoding/violations"] > 0


def test_the_bias_is_left_out_only_where_asked(traces):
    found = merging.figure_4(traces, (0.1, 0.25), without_bias=(0.25,))
    assert "error/merge_alpha0/0.25" in found.metrics and "error/merge_alpha0/0.10" not in found.metrics
    errors = found.table.groupby(["ratio", "variant", "document"])["error"].mean().unstack()
    saved = (errors.loc[0.25, "evict"] - errors.loc[0.25, "merge"]).mean()
    bias = (errors.loc[0.25, "merge_alpha0"] - errors.loc[0.25, "merge"]).mean()
    assert found.metrics["saved/0.25"] == pytest.approx(saved) and found.metrics["bias/0.25"] == pytest.approx(bias)
    assert {"saved/0.10", "reduction/0.10"} <= set(found.metrics) and "bias/0.10" not in found.metrics


def test_theorem_1_is_told_in_one_line():
    findings = Findings(pandas.DataFrame({"entries": [1200, 34], "merges": [7, 5]}))
    findings.set(theorem.VIOLATIONS, 2, moment="theorem1")
    findings.set(theorem.SMALLEST_MARGIN, -1.5e-3, moment="theorem1")
    told = theorem.theorem_1_in_words(findings)
    assert told == "1,234 unmerged entries after 12 merges, 2 violations, smallest margin -1.5e-03"
