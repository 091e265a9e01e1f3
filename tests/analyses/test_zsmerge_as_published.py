"""ZSMerge's figure 4 as published, by loops over layers, heads and tokens in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.spread import students

from kvlab import papers
from kvlab.analyses.zsmerge import as_published
from kvlab.errors import KvlabError

TEXTS = ["squad/Oxygen", "squad/Rhine"]


@pytest.fixture(scope="module")
def found(tiny, random_traces):
    return as_published.figure_4(random_traces, as_published.projections(tiny()), (160, 100, 40, 10))


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def entries_of(queries, keys, budget):
    """Of one KV head: the positions kept as they are, and those that one slot averages."""
    scores = np.zeros(len(keys))
    for query_head in queries:
        for position, query in enumerate(query_head):
            seen = keys[: position + 1]
            scores[: position + 1] += softmax(seen @ query / math.sqrt(len(query)))
    recent = int(0.4 * budget)
    older = len(keys) - recent
    best = sorted(range(older), key=lambda j: (-scores[j], j))[: budget - recent - 1]
    kept = [*sorted(best), *range(older, len(keys))]
    return kept, [j for j in range(older) if j not in best]


def error_by_hand(trace, projections, budget, alpha):
    """Half of the relative error of the last prompt query's output after W_o, averaged over layers."""
    length, group = trace.prompt_length, trace.heads // trace.kv_heads
    errors = []
    for layer, projection in enumerate(projections):
        full, ours = [], []
        for kv_head in range(trace.kv_heads):
            keys, values = (t[layer, kv_head, :length].double().numpy() for t in (trace.keys, trace.values))
            heads = range(kv_head * group, (kv_head + 1) * group)
            queries = [trace.queries[layer, head, :length].double().numpy() for head in heads]
            kept, merged = entries_of(queries, keys, budget)
            for query in (each[-1] for each in queries):
                full.append(softmax(keys @ query / math.sqrt(len(query))) @ values)
                slot_keys = np.vstack([keys[kept], keys[merged].mean(0)])
                slot_values = np.vstack([values[kept], values[merged].mean(0)])
                bias = np.append(np.zeros(len(kept)), alpha * math.log(len(merged)))
                ours.append(softmax(slot_keys @ query / math.sqrt(len(query)) + bias) @ slot_values)
        output = projection.double().numpy()
        true, wrong = (output @ np.concatenate(each) for each in (full, ours))
        errors.append(np.linalg.norm(true - wrong) / np.linalg.norm(true) / 2)
    return float(np.mean(errors))


@pytest.mark.parametrize("budget", [100, 40, 10])
def test_errors_and_reductions_by_hand(tiny, random_traces, found, budget):
    projections = as_published.projections(tiny())
    by_hand = {
        alpha: np.array([error_by_hand(trace, projections, budget, alpha) for trace in random_traces])
        for alpha in (0, 1)
    }
    for alpha, errors in by_hand.items():
        name = f"published/error/alpha{alpha}/{budget}"
        assert found.metrics[name] == pytest.approx(errors.mean(), rel=1e-4)
        assert found.intervals[name] == pytest.approx(students(errors), rel=1e-3, abs=1e-6)
    reduction = 1 - by_hand[1] / by_hand[0]
    assert found.metrics[f"published/reduction/{budget}"] == pytest.approx(reduction.mean(), abs=1e-4)
    assert abs(by_hand[0] - by_hand[1]).min() > 1e-6


def test_a_prompt_that_fits_has_no_error_and_no_reduction(found):
    assert found.metrics["published/error/alpha0/160"] < 1e-7
    assert found.metrics["published/error/alpha1/160"] < 1e-7
    assert "published/reduction/160" not in found.metrics
    assert len(found.table) == 2 * 4 * 2 * 2, "documents, caches, alphas and layers"


def test_prompts_are_the_first_tokens_of_texts_with_all_their_queries(reader):
    traces = as_published.prompts(reader, TEXTS, 103)
    assert [trace.prompt_length for trace in traces] == [103, 103]
    assert [trace.document for trace in traces] == TEXTS
    assert all(trace.queries.shape[2] == trace.length for trace in traces)
    with pytest.raises(KvlabError, match="squad/Oxygen has .* tokens, and a prompt of 10000000 is asked for"):
        as_published.prompts(reader, TEXTS, 10_000_000)


def test_the_printed_reductions_are_those_of_the_two_alphas():
    found = as_published.printed()
    assert found.metrics["printed/figure4/reduction/40"] == pytest.approx(1 - 22 / 56)
    # 0.0215 / 0.0565 and 0.0225 / 0.0555 are the ends of what the rounding of both cells allows.
    assert found.metrics["printed/figure4/reduction/40/inputs"] == pytest.approx(0.0125, abs=3e-4)
    assert found.metrics["printed/figure4/reduction/100/inputs"] < 0.001
    (claim,) = [claim for claim in papers.claims(paper="zsmerge") if claim.id.endswith("printed_reductions")]
    assert papers.judge(claim, found.metrics).verdict == "holds"
    turned = found.metrics | {"printed/figure4/reduction/10": 0.5}
    assert papers.judge(claim, turned).verdict == "fails"
