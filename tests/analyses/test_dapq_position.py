"""DapQ's table 1 and figure 2, on the real model with a short text and on a tiny one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch
from support.spread import students

from kvlab.analyses.dapq import position as dapq
from kvlab.analyses.dapq.recall import with_pseudo
from kvlab.analyses.findings import Findings
from kvlab.errors import KvlabError
from kvlab.methods import policy
from kvlab.traces.passes import prefilled, pseudo_queries

N = 16


# --- table 1 ---


@pytest.fixture(scope="module")
def table_1(lm, traces):
    return dapq.table_1(lm, traces, N)


def test_the_same_content_in_the_same_place_is_the_same(table_1):
    metrics = table_1.metrics
    assert metrics["similarity/post/sc_sp"] == pytest.approx(1, abs=1e-5)
    assert metrics["similarity/pre/sc_sp"] == pytest.approx(1, abs=1e-5)
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
    assert table_1.intervals["similarity/post/dc_sp"] == pytest.approx(students(found), abs=1e-3)
    assert table_1.metrics["distance/post/dc_sp"] == pytest.approx(1 - np.mean(found), abs=1e-5)


def test_table_1s_effects_are_differences_paired_by_document(table_1):
    wide = table_1.table.query("rope == 'post'").pivot(index="document", columns="condition", values="similarity")
    by_hand = {
        "position/same_content": wide["sc_sp"] - wide["sc_dp"],
        "position/different_content": wide["dc_sp"] - wide["dc_dp"],
        "content/same_position": wide["sc_sp"] - wide["dc_sp"],
        "content/different_position": wide["sc_dp"] - wide["dc_dp"],
        "position_less_content": wide["dc_sp"] - wide["sc_dp"],
    }
    for name, values in by_hand.items():
        assert table_1.metrics[f"effect/post/{name}"] == pytest.approx(values.mean())
        assert table_1.intervals[f"effect/post/{name}"] == pytest.approx(students(values), rel=1e-4, abs=1e-6)
    ratios = wide["dc_sp"] / wide["sc_dp"]
    assert table_1.metrics["ratio/post/dc_sp_over_sc_dp"] == pytest.approx(ratios.mean()) and len(ratios) == 2
    shares = by_hand["content/different_position"] / by_hand["position/different_content"]
    assert table_1.metrics["ratio/post/content_over_position"] == pytest.approx(shares.mean())
    low_high = table_1.intervals["ratio/post/content_over_position"]
    assert low_high == pytest.approx(students(shares), rel=1e-4, abs=1e-6)


def test_table_1_of_one_more_prompt_goes_by_its_length(lm, traces, table_1):
    longest = dapq.at_length(lm, traces[0], N)
    length = dapq.context_name(traces[0].prompt_length)
    of_it = table_1.table.query("document == @traces[0].document and rope == 'post'")
    of_it = of_it.set_index("condition")["similarity"]
    assert longest.metrics[f"similarity/post/dc_sp/{length}"] == pytest.approx(of_it["dc_sp"], abs=1e-5)
    assert not longest.intervals and {f"{name}/{length}" for name in table_1.metrics} == set(longest.metrics)
    ratio = table_1.metrics["ratio/post/dc_sp_over_sc_dp"]
    longer = longest.metrics[f"ratio/post/dc_sp_over_sc_dp/{length}"]
    words = dapq.position_over_content(table_1, "100k", longest)
    assert words == f"the right position over the right content: {ratio:.2f} at 100k, {longer:.2f} at {length}"


@pytest.mark.parametrize(
    "analysis",
    [
        lambda lm, trace: dapq.table_1(lm, [trace], 25),
        lambda lm, trace: dapq.figure_2a(lm, [trace], trials=2, n=25),
        lambda lm, trace: dapq.figure_2b(lm, [trace], parts=2, n=25),
    ],
)
def test_pseudo_queries_need_as_many_decoding_queries(lm, trace, analysis):
    with pytest.raises(KvlabError, match=r"25 pseudo-queries need as many decoding queries .* the trace has 24"):
        analysis(lm, trace)


def test_a_trace_of_tensors_alone_is_refused(small):
    lm, (trace, *_) = small
    bare = replace(trace, ids=None)
    with pytest.raises(KvlabError, match="this trace has no token ids; capture one"):
        dapq.table_1(lm, [bare], 8)
    with pytest.raises(KvlabError, match="this trace has no token ids; capture one"):
        with_pseudo(lm, bare, [policy("dapq", budget=20, window=8)])


# --- figure 2 ---


def test_figure_2a_repeats_with_its_seed_and_its_trials_differ(small):
    lm, traces = small
    first, again = (dapq.figure_2a(lm, traces, trials=2, n=8) for _ in range(2))
    pandas.testing.assert_frame_equal(first.table, again.table)
    conditions = {"dc_sp", "sc_dp_m", "dc_dp_m", "sc_dp_100", "dc_dp_100"}
    assert {name for name in first.metrics if name.startswith("similarity_random/post/")} == {
        f"similarity_random/post/{c}" for c in conditions
    }
    post = first.table.query("rope == 'post'")
    counts = post.groupby(["document", "condition"])["similarity"].nunique()
    assert len(counts) == 3 * 5 and (counts == 2).all()
    wide = post.groupby(["document", "condition"])["similarity"].mean().unstack()
    gap = wide["dc_sp"] - wide["sc_dp_m"]
    assert first.metrics["gap_random/post/dc_sp_less_sc_dp_m"] == pytest.approx(gap.mean())
    interval = first.intervals["gap_random/post/dc_sp_less_sc_dp_m"]
    assert interval == pytest.approx(students(gap), rel=1e-4, abs=1e-6)
    assert not first.table.equals(dapq.figure_2a(lm, traces, trials=2, n=8, seed=1).table)


def test_figure_2as_positions_are_where_they_are_said_to_be(trace):
    found = dapq._random_conditions(trace, 50, N, 5000, torch.Generator().manual_seed(0))
    true, length = trace.ids[trace.prompt_length :][:N], trace.prompt_length
    for condition, (ids, positions) in found.items():
        assert ids.shape == positions.shape == (50, N)
        assert (positions.diff(dim=1) == 1).all(), "a span is consecutive"
        same = (ids == true).all()
        assert bool(same) == condition.startswith("sc_")
        if condition == "dc_sp":
            assert (positions[:, 0] == length).all()
        else:
            within = 100 if condition.endswith("_100") else length
            assert positions.min() >= 0 and positions.max() < within and positions[:, 0].unique().numel() > 10


@pytest.fixture(scope="module")
def figure_2b(small):
    lm, (first, _, second) = small
    return dapq.figure_2b(lm, [first, second], parts=4, n=8)


def test_figure_2b_starts_at_the_right_position_and_ends_at_the_first(figure_2b):
    rows = figure_2b.table.sort_values("offset")
    contexts = {"300": 300, "400": 420}
    assert set(rows["context"]) == set(contexts)
    for context, length in contexts.items():
        part = rows[rows["context"] == context]
        assert (part["start"] + part["offset"] == length).all()
        assert part["offset"].iloc[[0, -1]].tolist() == [0, length]
        assert part["similarity"].iloc[0] == pytest.approx(1, abs=1e-3)
        drop = part["similarity"].iloc[0] - part["similarity"].iloc[-1]
        assert figure_2b.metrics[f"offset/drop/{context}"] == pytest.approx(drop, abs=1e-5)
        ranks = part[["offset", "similarity"]].rank()
        assert figure_2b.metrics[f"offset/spearman/{context}"] == pytest.approx(ranks.corr().iloc[0, 1])
        half = part.set_index("offset")["similarity"][round(length / 2)]
        assert figure_2b.metrics[f"offset/curve/{context}/2"] == pytest.approx(half)
        assert figure_2b.metrics[f"offset/curve/{context}/4"] == pytest.approx(part["similarity"].iloc[-1])


def test_the_longer_contexts_curve_goes_by_plain_names(figure_2b):
    alone = replace(figure_2b, table=figure_2b.table.assign(document="one"))
    found = dapq.longer_decays_more(alone, "300", "400")
    names = {"offset/longer_decays_more", "offset/spearman", *(f"offset/curve/{i}" for i in range(5))}
    assert set(found.metrics) == set(found.intervals) == names
    assert found.metrics["offset/spearman"] == figure_2b.metrics["offset/spearman/400"]
    assert found.metrics["offset/curve/3"] == figure_2b.metrics["offset/curve/400/3"]


def handmade(curves: dict[tuple[str, str], list[float]]) -> Findings:
    rows = [
        {"document": d, "context": c, "start": 10 - i, "offset": i, "similarity": s}
        for (d, c), values in curves.items()
        for i, s in enumerate(values)
    ]
    return Findings(pandas.DataFrame(rows))


def test_two_contexts_of_one_document_need_lengths_that_differ(small):
    lm, (trace, *_) = small
    with pytest.raises(KvlabError, match=r"is there twice with about \d+ tokens; contexts need lengths further apart"):
        dapq.figure_2b(lm, [trace, trace], parts=2, n=8)


def test_contexts_are_compared_document_by_document():
    figure = handmade(
        {("a", "500"): [1.0, 0.7], ("b", "500"): [1.0, 0.6], ("b", "2k"): [0.9, 0.8, 0.2], ("a", "2k"): [1.0, 0.9, 0.4]}
    )
    found = dapq.longer_decays_more(figure, "500", "2k")
    assert found.metrics["offset/longer_decays_more"] == pytest.approx(((0.6 - 0.3) + (0.7 - 0.4)) / 2)
    assert found.intervals["offset/longer_decays_more"] == pytest.approx((0.3, 0.3))
    with pytest.raises(KvlabError, match="no context of 8k in the figure; it has 2k, 500"):
        dapq.longer_decays_more(figure, "500", "8k")
    with pytest.raises(KvlabError, match="measured on different documents"):
        dapq.longer_decays_more(handmade({("a", "500"): [1, 0.7], ("b", "2k"): [1, 0.2]}), "500", "2k")


def test_curves_of_documents_are_averaged_point_by_point():
    figure = handmade({("a", "2k"): [1.0, 0.5], ("b", "2k"): [0.8, 0.1], ("a", "4k"): [1.0, 0.0]})
    points = dapq.averaged(figure.table)
    two = points[points["context"] == "2k"].sort_values("start")
    assert two["similarity"].tolist() == pytest.approx([0.3, 0.9])
    assert two["low"].tolist() == pytest.approx([students((0.5, 0.1))[0], students((1.0, 0.8))[0]], rel=1e-4)
    assert (points[points["context"] == "4k"]["low"] == points[points["context"] == "4k"]["high"]).all()


@pytest.mark.parametrize("tokens, name", [(493, "500"), (1000, "1k"), (1993, "2k"), (3993, "4k"), (8000, "8k")])
def test_contexts_are_named_as_in_the_paper(tokens, name):
    assert dapq.context_name(tokens) == name


def test_a_documents_plain_name(trace):
    named = replace(trace, meta={"document": "sotu/1962[0:1951]@672aba60"})
    assert dapq.plain_name(named) == "sotu/1962"


def test_a_line_for_each_trace_says_what_was_captured(lm, traces):
    first, second = dapq.responses(lm, traces).splitlines()
    assert first.startswith(f"{dapq.plain_name(traces[0])} {traces[0].prompt_length} tokens: ")
    assert lm.decode(traces[1].ids[traces[1].prompt_length :]).split()[1] in second
