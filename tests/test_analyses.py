"""The papers' analyses on the real model and a short text: names, identities, and what their numbers are made of."""

from __future__ import annotations

import copy

import numpy as np
import pandas
import pytest
import torch
from texts import FERRY

import kvlab
from kvlab import corpus, papers
from kvlab.analyses import Findings, dapq, morphkv, to_summarise, zsmerge
from kvlab.errors import KvlabError
from kvlab.policies.zsmerge import ZSMerge
from kvlab.spread import interval, summarise
from kvlab.trace import prefilled, pseudo_queries

N = 16
RATIOS = (0.05, 0.20)


@pytest.fixture(scope="module")
def traces(lm, trace):
    """The shared trace, and one of another document."""
    return [trace, kvlab.capture(lm, FERRY[len(FERRY) // 2 :], new_tokens=24, window=64)]


# --- spread ---


def test_intervals_cover_the_mean_about_as_often_as_they_say():
    random = np.random.default_rng(5)
    covered = sum(low <= 3.0 <= high for low, high in (interval(random.normal(3.0, 2.0, 40)) for _ in range(60)))
    assert 50 <= covered <= 60
    narrow, wide = (np.diff(interval(random.normal(3.0, 2.0, n))) for n in (400, 25))
    assert 2 < wide / narrow < 8, "an interval shrinks with the root of the number of repetitions"


def test_intervals_are_the_same_each_time_and_degenerate_with_dignity():
    values = np.random.default_rng(6).random(12)
    assert interval(values) == interval(list(values)) != interval(values, seed=1)
    low, high = interval(values)
    assert low < values.mean() < high and summarise(values) == (values.mean(), (low, high))
    assert interval(values, confidence=0.5)[0] > low
    assert interval([0.4]) == (0.4, 0.4) and interval([2.0, 2.0, 2.0]) == (2.0, 2.0)
    assert np.isnan(interval([])).all()


def test_findings_join_their_metrics():
    one, two = Findings(pandas.DataFrame({"a": [1]})), Findings(pandas.DataFrame({"b": [1]}))
    one.add("x", [1.0, 2.0, 6.0])
    two.add("y", iter([4.0]))
    both = one | two
    assert both.metrics == {"x": 3.0, "y": 4.0} and list(both.table) == ["a"]
    assert 1.0 <= both.intervals["x"][0] < 3.0 < both.intervals["x"][1] <= 6.0 and both.intervals["y"] == (4.0, 4.0)


# --- DapQ ---


@pytest.fixture(scope="module")
def table_1(lm, traces):
    return dapq.table_1(lm, traces, N)


def test_table_1_names_what_the_claims_ask_for(table_1):
    names = {f"similarity/{rope}/{c}" for rope in ("post", "pre") for c in ("sc_sp", "dc_sp", "sc_dp", "dc_dp")}
    assert set(table_1.metrics) == set(table_1.intervals) == names | {"ratio/post/dc_sp_over_sc_dp"}
    asked = {claim.metric for claim in papers.claims(paper="dapq")}
    assert {name for name in asked if name.startswith(("similarity/", "ratio/"))} <= set(table_1.metrics)


def test_the_same_content_in_the_same_place_is_the_same(table_1):
    metrics = table_1.metrics
    assert metrics["similarity/post/sc_sp"] == pytest.approx(1, abs=1e-3)
    assert metrics["similarity/pre/sc_sp"] == pytest.approx(1, abs=1e-3)
    assert all(-1 <= metrics[f"similarity/post/{c}"] < 0.98 for c in ("dc_sp", "sc_dp", "dc_dp"))


def test_table_1_is_the_mean_over_documents_of_cosines(lm, traces, table_1):
    found = []
    for trace in traces:
        ids = dapq.nonsense(lm, N)
        assert ids.shape == (N,) and "Sorry, I don't know. Sorry" in lm.tokenizer.decode(ids)
        post, _ = pseudo_queries(lm, prefilled(trace), ids, torch.arange(N) + trace.prompt_length)
        a, b = post.double().numpy(), trace.response_queries[:, :, :N].double().numpy()
        found.append(((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).mean())
    assert table_1.metrics["similarity/post/dc_sp"] == pytest.approx(np.mean(found), abs=1e-5)
    assert table_1.intervals["similarity/post/dc_sp"] == pytest.approx((min(found), max(found)), abs=1e-4)
    rows = table_1.table.query("rope == 'post'").pivot(index="document", columns="condition", values="similarity")
    ratios = rows["dc_sp"] / rows["sc_dp"]
    assert table_1.metrics["ratio/post/dc_sp_over_sc_dp"] == pytest.approx(ratios.mean()) and len(ratios) == 2


@pytest.mark.parametrize("analysis", [
    lambda lm, trace: dapq.table_1(lm, [trace], 25),
    lambda lm, trace: dapq.figure_2a(lm, trace, trials=2, n=25),
    lambda lm, trace: dapq.figure_2b(lm, [trace], points=2, n=25),
])
def test_pseudo_queries_need_as_many_decoding_queries(lm, trace, analysis):
    with pytest.raises(KvlabError, match="25 pseudo-queries need as many decoding queries .* the trace has 24"):
        analysis(lm, trace)


def test_figure_2a_repeats_with_its_seed_and_its_trials_differ(lm, trace):
    first, again = (dapq.figure_2a(lm, trace, trials=3, n=N) for _ in range(2))
    pandas.testing.assert_frame_equal(first.table, again.table)
    conditions = ("dc_sp", "sc_dp_m", "dc_dp_m", "sc_dp_100", "dc_dp_100")
    assert set(first.metrics) == {f"similarity_random/{rope}/{c}" for rope in ("post", "pre") for c in conditions}
    values = first.table.query("rope == 'post'").groupby("condition")["similarity"]
    assert (values.nunique() == 3).all() and (values.size() == 3).all()
    assert first.metrics["similarity_random/post/dc_sp"] == pytest.approx(values.mean()["dc_sp"])
    assert not first.table.equals(dapq.figure_2a(lm, trace, trials=3, n=N, seed=1).table)


def test_figure_2b_ends_in_the_right_place(lm, trace):
    found = dapq.figure_2b(lm, [trace], points=4, n=N)
    context = dapq.context_name(trace.prompt_length)
    assert set(found.metrics) == {f"offset/spearman/{context}", f"offset/drop/{context}"}
    rows = found.table.sort_values("offset")
    assert (rows["start"] + rows["offset"] == trace.prompt_length).all()
    assert rows["offset"].iloc[[0, -1]].tolist() == [0, trace.prompt_length]
    assert rows["similarity"].iloc[0] == pytest.approx(1, abs=1e-3)
    assert (rows["low"] <= rows["similarity"]).all() and (rows["similarity"] <= rows["high"]).all()
    drop = rows["similarity"].iloc[0] - rows["similarity"].iloc[-1]
    assert found.metrics[f"offset/drop/{context}"] == pytest.approx(drop, abs=1e-5)
    ranks = rows[["offset", "similarity"]].rank()
    assert found.metrics[f"offset/spearman/{context}"] == pytest.approx(ranks.corr().iloc[0, 1])


@pytest.mark.parametrize("tokens, name", [(1000, "1k"), (2000, "2k"), (3993, "4k"), (8000, "8k")])
def test_contexts_are_named_as_in_the_paper(tokens, name):
    assert dapq.context_name(tokens) == name


def test_a_prompt_to_summarise_is_as_long_as_it_may_be(lm):
    document = corpus.Document("ferry", FERRY * 2)
    for tokens in (200, 300):
        made = to_summarise(lm, document, tokens)
        assert made.text.endswith("Summarize the text above in one paragraph.")
        assert tokens - 12 <= lm.encode(made.text).shape[-1] <= tokens


# --- ZSMerge ---


@pytest.fixture(scope="module")
def figure_4(traces):
    return zsmerge.figure_4(traces, RATIOS)


def test_figure_4_is_made_of_replays(traces, figure_4):
    policies = {"evict": dict(residual=0), "merge": {}, "merge_alpha0": dict(alpha=0.0)}
    for ratio in RATIOS:
        errors = {name: [kvlab.replay(t, kvlab.policy("zsmerge", budget=ratio, **more)).summary["output_error"]
                         for t in traces] for name, more in policies.items()}
        for name, values in errors.items():
            assert figure_4.metrics[f"error/{name}/{ratio:.2f}"] == pytest.approx(np.mean(values), rel=1e-5)
            low_high = figure_4.intervals[f"error/{name}/{ratio:.2f}"]
            assert low_high == pytest.approx((min(values), max(values)), rel=1e-5)
        for name, of in (("reduction", "merge"), ("reduction_alpha0", "merge_alpha0")):
            expected = np.mean([1 - m / e for m, e in zip(errors[of], errors["evict"], strict=True)])
            assert figure_4.metrics[f"{name}/{ratio:.2f}"] == pytest.approx(expected, abs=1e-5)


def test_figure_4s_reductions_follow_from_its_table(figure_4):
    assert set(figure_4.table["variant"]) == {"evict", "merge", "merge_alpha0"}
    assert len(figure_4.table) == 2 * len(RATIOS) * 3 * 30
    rows = figure_4.table.groupby(["ratio", "document", "variant"])["error"].mean().unstack()
    for ratio, errors in rows.groupby("ratio"):
        reduction = (1 - errors["merge"] / errors["evict"]).mean()
        assert figure_4.metrics[f"reduction/{ratio:.2f}"] == pytest.approx(reduction, abs=1e-9)
    assert (rows["evict"].unstack("ratio")[0.20] < rows["evict"].unstack("ratio")[0.05]).all()


def test_figure_4_names_what_the_claims_ask_for(figure_4):
    ratios = {f"{r:.2f}" for r in zsmerge.RATIOS}
    kinds = {name.rpartition("/")[0] for name in figure_4.metrics}
    for claim in papers.claims(paper="zsmerge"):
        kind, _, ratio = claim.metric.rpartition("/")
        assert kind == "theorem1" or (kind in kinds and ratio in ratios), claim.id


def test_theorem_1_holds(traces):
    found = zsmerge.theorem_1(traces)
    assert found.metrics["theorem1/violations"] == 0
    assert -1e-12 <= found.metrics["theorem1/smallest_margin"] == found.table["smallest_margin"].min() < 1
    assert len(found.table) == 2 * 30 * 9
    budget, first = kvlab.policy("zsmerge", budget=0.2), found.table.iloc[0]
    kept = budget.entries(traces[0].prompt_length)
    slots = budget._parts(kept)[2]
    assert first["entries"] == kept + 1 - slots, "all entries but the residual slots, and the step's own"


@pytest.mark.parametrize("broken", [
    lambda bias: 2 * bias,              # a merged entry counts for more than what it stands for
    lambda bias: bias + (bias > 0) * 8,
])
def test_theorem_1_catches_a_wrong_compensation(trace, monkeypatch, broken):
    true = ZSMerge.bias
    monkeypatch.setattr(ZSMerge, "bias", lambda self, store: broken(true(self, store)))
    found = zsmerge.theorem_1([trace])
    assert found.metrics["theorem1/violations"] > 0 and found.metrics["theorem1/smallest_margin"] < -1e-6


# --- MorphKV ---


def test_the_walk_through_gives_the_papers_numbers():
    found = morphkv.walk_through()
    assert found.metrics["walkthrough/today_score"] == pytest.approx(0.6, abs=1e-6)
    assert found.metrics["walkthrough/me_score"] == pytest.approx(0.1, abs=1e-6)
    assert found.metrics["walkthrough/kept_today"] == 1.0
    kept = found.table.set_index("token")["kept"]
    assert kept.to_dict() == {"me": False, "today's": True, "weather": True, "The": True}


def test_the_window_ablation_is_made_of_replays(traces):
    found = morphkv.window_ablation(traces, windows=(2, 8, 64), capacities=(64, 96))
    settings = {f"{fusion}/w{w}/c{c}" for fusion in ("sum", "max") for c in (64, 96) for w in (2, 8, 64) if w < c}
    assert set(found.metrics) == {f"{measure}/{s}" for measure in morphkv.MEASURES for s in settings}
    assert set(found.intervals) == set(found.metrics)
    policy = kvlab.policy("morphkv", budget=64, window=8, fusion="max")
    values = [kvlab.replay(t, policy).summary for t in traces]
    for measure in morphkv.MEASURES:
        one = [v[measure] for v in values]
        assert found.metrics[f"{measure}/max/w8/c64"] == pytest.approx(np.mean(one), rel=1e-5)
        assert found.intervals[f"{measure}/max/w8/c64"] == pytest.approx((min(one), max(one)), rel=1e-5)
    rows = found.table.query("measure == 'mass_lost' and fusion == 'max' and window == 8 and capacity == 64")
    assert sorted(rows["step"].unique()) == list(range(1, 25)) and rows["document"].nunique() == 2
    assert rows["value"].mean() == pytest.approx(found.metrics["mass_lost/max/w8/c64"], rel=1e-5)
    first = rows.query("step == 1")["value"]
    assert (first < 1e-5).all(), "the first decoding query reads the whole prompt"
    assert (found.metrics["mass_lost/sum/w8/c96"] < found.metrics["mass_lost/sum/w8/c64"])


def test_a_window_beyond_the_captured_queries_is_refused(traces):
    with pytest.raises(KvlabError, match="a window of 65 needs as many prompt queries; capture with window=65"):
        morphkv.window_ablation(traces, windows=(2, 65), capacities=(128,))


def test_analyses_leave_the_traces_as_they_are(lm, traces):
    before = [copy.deepcopy(t._tensors()) for t in traces]
    dapq.table_1(lm, traces, 4)
    zsmerge.figure_4(traces, [0.1])
    morphkv.window_ablation(traces, windows=(4,), capacities=(32,))
    for trace, tensors in zip(traces, before, strict=True):
        assert all(torch.equal(t, tensors[name]) for name, t in trace._tensors().items())
