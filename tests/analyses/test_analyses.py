"""The papers' analyses on the real model and a short text: names, identities, and what their numbers are made of."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch
from support.spread import students
from support.texts import FERRY

import kvlab
from kvlab import papers
from kvlab.analyses.dapq import position
from kvlab.analyses.findings import Findings
from kvlab.analyses.morphkv import windows
from kvlab.analyses.texts import to_summarise
from kvlab.analyses.zsmerge import merging, theorem
from kvlab.inputs import corpus
from kvlab.lib.intervals import argmin, bounded, interval, summarise
from kvlab.methods.zsmerge import ZSMerge

RATIOS = (0.05, 0.20)


# --- spread ---


DRAWS = {
    "normal": (lambda random, n: random.normal(3.0, 2.0, n), 3.0),
    "shares": (lambda random, n: random.beta(2, 8, n), 0.2),
    "two genres": (lambda random, n: random.normal([0.0, 1.0] * (n // 2), 0.5), 0.5),
}


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("documents", [8, 20])
def test_intervals_cover_the_mean_at_the_numbers_of_documents_of_the_profiles(kind, documents):
    draw, mean = DRAWS[kind]
    random = np.random.default_rng(5)
    drawn = [draw(random, documents) for _ in range(4000)]
    covered = np.mean([low <= mean <= high for low, high in map(interval, drawn)])
    assert covered >= 0.93
    resampled = random.integers(documents, size=(1000, documents))
    bootstraps = [np.quantile(sample[resampled].mean(1), [0.025, 0.975]) for sample in drawn[:300]]
    if kind != "two genres":
        assert np.mean([low <= mean <= high for low, high in bootstraps]) < covered, (
            "a bootstrap of so few is too narrow"
        )


@pytest.mark.parametrize("right", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("examples", [5, 15, 30])
def test_intervals_of_scores_cover_at_the_numbers_of_examples_of_the_tasks(examples, right):
    drawn = np.random.default_rng(7).binomial(1, right, (4000, examples))
    ends = [bounded(scores, 0.0, 1.0)[1] for scores in drawn]
    assert np.mean([low <= right <= high for low, high in ends]) >= 0.93
    assert all(0 <= low < high <= 1 for low, high in ends)


@pytest.mark.parametrize("documents", [8, 20])
def test_intervals_of_an_argmin_cover_the_best_setting(documents):
    random, settings = np.random.default_rng(8), [1.0, 2.0, 4.0, 8.0]
    costs = np.array([0.3, 0.1, 0.0, 0.25])
    covered = 0
    for _ in range(400):
        noise = random.normal(0, 0.3, (documents, 1)) + random.normal(0, 0.2, (documents, len(settings)))
        _, (low, high) = argmin(pandas.DataFrame(costs + noise, columns=settings), resamples=300)
        covered += low <= 4.0 <= high
    assert covered / 400 >= 0.93


def test_intervals_shrink_with_the_root_of_the_number_of_repetitions():
    random = np.random.default_rng(5)
    narrow, wide = (np.diff(interval(random.normal(3.0, 2.0, n))) for n in (400, 25))
    assert 2 < wide / narrow < 8


def test_intervals_are_the_same_each_time_and_degenerate_with_dignity():
    values = np.random.default_rng(6).random(12)
    assert interval(values) == interval(list(values))
    low, high = interval(values)
    assert low < values.mean() < high and summarise(values) == (values.mean(), (low, high))
    assert interval(values, confidence=0.5)[0] > low
    assert interval([0.4]) == (0.4, 0.4) and interval([2.0, 2.0, 2.0]) == (2.0, 2.0)
    assert np.isnan(interval([])).all()


def test_findings_join_their_metrics():
    first, second = Findings(pandas.DataFrame({"a": [1]})), Findings(pandas.DataFrame({"b": [1]}))
    first.add("x", [1.0, 2.0, 6.0])
    second.add("y", iter([4.0]))
    both = first | second
    assert both.metrics == {"x": 3.0, "y": 4.0} and list(both.table) == ["a"]
    assert both.intervals["x"][0] < 3.0 < both.intervals["x"][1] and both.intervals["y"] == (4.0, 4.0)


def test_findings_give_the_mean_of_each_genre():
    names = ["sotu/1962[0:90]@0a", "squad/Oxygen@1b", "sotu/1999@2c", "squad/Rhine@3d"]
    values = pandas.Series([1.0, 5.0, 3.0, 9.0], index=pandas.Index(names, name="document"))
    found = Findings(pandas.DataFrame())
    found.add("x/{ratio:.1f}", values, ratio=0.5)
    found.add_difference("y", values, values[::-1] / 2)
    assert found.metrics == {
        "x/0.5": 4.5,
        "x/0.5/genre/sotu": 2.0,
        "x/0.5/genre/squad": 7.0,
        "y": 2.25,
        "y/genre/sotu": 1.0,
        "y/genre/squad": 3.5,
    }
    assert set(found.intervals) == {"x/0.5", "y"}
    both = values.set_axis(pandas.MultiIndex.from_product([[0.2], names], names=["ratio", "document"]))
    found.add("x/{ratio:.1f}", both, ratio=0.5)
    assert found.metrics["x/0.5/genre/squad"] == 7.0


def test_an_interval_over_genres_counts_each_genre_once():
    names = ["sotu/1", "sotu/2", "squad/A", "squad/B", "code/x", "code/y", "code/z"]
    values = pandas.Series([1.0, 3.0, 4.0, 6.0, 8.0, 8.0, 8.0], index=pandas.Index(names, name="document"))
    found = Findings(pandas.DataFrame())
    found.add("x", values)
    # Means 2, 5, 8: mean 5, standard error 3 / sqrt(3), and 4.3027 of these for two degrees of freedom.
    reach = 4.302653 * 3**0.5
    assert found.metrics["x/genre_low"] == pytest.approx(5 - reach)
    assert found.metrics["x/genre_high"] == pytest.approx(5 + reach)
    assert found.row("x").low > 5 - reach, "documents alone are surer"
    found.add("x", values[:4])
    assert not any(name.startswith("x/genre_") for name in found.metrics), "of two genres there is none"


def test_findings_of_scores_know_their_ends():
    found = Findings(pandas.DataFrame())
    found.add("loose", [1.0, 1.0, 1.0])
    found.add_bounded("score/{task}", [1.0, 1.0, 1.0], (0.0, 1.0), task="needle")
    found.add_bounded("gain", [0.0, 0.0, 0.0], (-1.0, 1.0))
    found.add_bounded("spread", [0.0, 0.0, 1.0], (0.0, 1.0))
    assert found.metrics == pytest.approx({"loose": 1.0, "score/needle": 1.0, "gain": 0.0, "spread": 1 / 3})
    # Clopper and Pearson's lower end where all of three are right: 0.025 ** (1 / 3).
    assert found.intervals["score/needle"] == pytest.approx((0.025 ** (1 / 3), 1.0))
    low, high = found.intervals["gain"]
    assert -1 < low < 0 < high < 1 and found.intervals["loose"] == (1.0, 1.0)
    assert found.intervals["spread"][0] == 0.0 and found.intervals["spread"][1] <= 1.0


@pytest.mark.parametrize(
    "names", [["sotu/1", "sotu/2", "sotu/3", "squad/A"], ["a.txt", "b.txt", "c.txt", "d.txt"]], ids=["one", "none"]
)
def test_a_genre_needs_two_documents_and_another_genre(names):
    found = Findings(pandas.DataFrame())
    found.add("x", pandas.Series([1.0, 2.0, 3.0, 4.0], index=pandas.Index(names, name="document")))
    assert list(found.metrics) == ["x"]


# --- prompts ---


def test_a_prompt_to_summarise_is_as_long_as_it_may_be(lm):
    document = corpus.Document("ferry", FERRY * 2)
    for tokens in (200, 300):
        made = to_summarise(lm, document, tokens)
        assert made.text.endswith("Summarize the text above in one paragraph.")
        assert tokens - 12 <= lm.encode(made.text).shape[-1] <= tokens


# --- ZSMerge ---


@pytest.fixture(scope="module")
def figure_4(traces):
    return merging.figure_4(traces, RATIOS)


def test_figure_4_is_made_of_replays(traces, figure_4):
    policies = {"evict": dict(residual=0), "merge": {}, "merge_alpha0": dict(alpha=0.0)}
    for ratio in RATIOS:
        errors = {
            name: [
                kvlab.replay(t, kvlab.policy("zsmerge", budget=ratio, **more)).summary["output_error"] for t in traces
            ]
            for name, more in policies.items()
        }
        for name, values in errors.items():
            assert figure_4.metrics[f"error/{name}/{ratio:.2f}"] == pytest.approx(np.mean(values), rel=1e-5)
            low_high = figure_4.intervals[f"error/{name}/{ratio:.2f}"]
            assert low_high == pytest.approx(students(values), rel=1e-4)
        for name, of in (("reduction", "merge"), ("reduction_alpha0", "merge_alpha0")):
            expected = np.mean([1 - m / e for m, e in zip(errors[of], errors["evict"], strict=True)])
            assert figure_4.metrics[f"{name}/{ratio:.2f}"] == pytest.approx(expected, abs=1e-5)


def test_figure_4s_squared_errors_are_squared_before_they_are_averaged(traces, figure_4):
    ratio = RATIOS[-1]
    merged, evicted = (
        [
            float((kvlab.replay(t, kvlab.policy("zsmerge", budget=ratio, **more)).output_error ** 2).mean())
            for t in traces
        ]
        for more in ({}, {"residual": 0})
    )
    expected = np.mean([1 - m / e for m, e in zip(merged, evicted, strict=True)])
    assert figure_4.metrics[f"reduction_squared/{ratio:.2f}"] == pytest.approx(expected, abs=1e-5)
    assert figure_4.metrics[f"reduction/{ratio:.2f}"] != pytest.approx(expected, abs=1e-4)


def test_a_templates_effect_is_paired_by_document(traces, figure_4):
    """The same traces on both sides differ by nothing; others under the same names by what their errors say."""
    same = merging.template(traces, traces, RATIOS[0])
    name = f"template/{RATIOS[0]:.2f}"
    assert same.metrics[name] == 0 and set(same.table["template"]) == {"with", "without"}
    names = [trace.document for trace in traces]
    others = [
        replace(trace, meta=trace.meta | {"document": document})
        for trace, document in zip(traces[::-1], names, strict=True)
    ]
    swapped = merging.template(traces, others, RATIOS[0])
    rows = figure_4.table.query("ratio == @RATIOS[0]").pivot_table(index="document", columns="variant", values="error")
    reductions = (1 - rows["merge"] / rows["evict"])[names].to_numpy()
    assert reductions.std() > 1e-3
    assert swapped.metrics[name] == pytest.approx((reductions[::-1] - reductions).mean(), abs=1e-6)


def test_figure_4s_reductions_follow_from_its_table(figure_4):
    assert set(figure_4.table["variant"]) == {"evict", "merge", "merge_alpha0"}
    assert len(figure_4.table) == 2 * len(RATIOS) * 3 * 30
    rows = figure_4.table.groupby(["ratio", "document", "variant"])["error"].mean().unstack()
    for ratio, errors in rows.groupby("ratio"):
        reduction = (1 - errors["merge"] / errors["evict"]).mean()
        assert figure_4.metrics[f"reduction/{ratio:.2f}"] == pytest.approx(reduction, abs=1e-9)
    assert (rows["evict"].unstack("ratio")[0.20] < rows["evict"].unstack("ratio")[0.05]).all()


def test_figure_4_names_what_the_claims_ask_for(figure_4):
    ratios = {f"{r:.2f}" for r in merging.RATIOS}
    kinds = {name.rpartition("/")[0] for name in figure_4.metrics}
    kinds |= {f"{name}_{choice}" for name in ("reduction", "saved_by") for choice in merging.CHOICES}
    claims = [claim for claim in papers.claims(experiment="zsmerge_error_curves") if claim.figure == "figure_4"]
    assert len(claims) > 8
    for claim in claims:
        kind, _, ratio = claim.metric.rpartition("/")
        assert kind in kinds and ratio in ratios, claim.id


def test_theorem_1_holds(traces):
    found = theorem.theorem_1(traces)
    assert found.metrics["theorem1/violations"] == 0
    assert -1e-12 <= found.metrics["theorem1/smallest_margin"] == found.table["smallest_margin"].min() < 1
    assert len(found.table) == 2 * 30 * 9
    budget, first = kvlab.policy("zsmerge", budget=0.2), found.table.iloc[0]
    kept = budget.entries(traces[0].prompt_length)
    slots = budget._parts(kept)[2]
    assert first["entries"] == kept + 1 - slots, "all entries but the residual slots, and the step's own"


@pytest.mark.parametrize(
    "broken",
    [
        lambda bias: 2 * bias,  # a merged entry counts for more than what it stands for
        lambda bias: bias + (bias > 0) * 8,
    ],
)
def test_theorem_1_catches_a_wrong_compensation(trace, monkeypatch, broken):
    true = ZSMerge.bias
    monkeypatch.setattr(ZSMerge, "bias", lambda self, store: broken(true(self, store)))
    found = theorem.theorem_1([trace])
    assert found.metrics["theorem1/violations"] > 0 and found.metrics["theorem1/smallest_margin"] < -1e-6


# --- all of them ---


def test_analyses_leave_the_traces_as_they_are(lm, traces):
    before = [copy.deepcopy(t._tensors()) for t in traces]
    position.table_1(lm, traces, 4)
    merging.figure_4(traces, [0.1])
    windows.window_ablation(traces, windows=(4,), capacities=(32,))
    for trace, tensors in zip(traces, before, strict=True):
        assert all(torch.equal(t, tensors[name]) for name, t in trace._tensors().items())
