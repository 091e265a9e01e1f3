"""DapQ's controls: the same tokens in SnapKV's place, offsets, cosines without their mean, by hand."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
from support import oracles
from support.tensors import exact

from kvlab.analyses.dapq import control, position, recall
from kvlab.methods import policy
from kvlab.traces.passes import prefilled, pseudo_queries

N = 8


@pytest.fixture(scope="module")
def found(sentences):
    return control.similarity(*sentences, n=N)


@pytest.fixture(scope="module")
def sentences(small, request):
    """The tiny model knows no text: the sentence is tokens of its own."""
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    patch.setattr(control, "nonsense", lambda lm, n: torch.arange(3, 3 + n))
    return small


def cosine(a, b):
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def test_the_response_at_its_own_place_is_itself(found):
    assert found.metrics["control/similarity/true/right"] == pytest.approx(1, abs=1e-4)
    assert found.metrics["control/similarity/true/back"] < 0.999
    assert set(found.table["place"]) == {"right", "back", "start"} and found.table["document"].nunique() == 3


def test_cells_are_cosines_of_tokens_run_where_they_are_said_to_be(sentences, found):
    lm, traces = sentences
    trace = traces[1]
    for content, place, start in (("last", "back", trace.prompt_length - N), ("random", "right", trace.prompt_length)):
        ids = control.tokens(lm, trace, N, 1)[content]
        post, pre = pseudo_queries(lm, prefilled(trace), ids, torch.arange(N) + start)
        true, before = trace.response_queries[:, :, :N].numpy(), trace.response_pre_queries[:, :, :N].numpy()
        table = found.table[found.table["document"] == trace.document]
        part = table[(table["content"] == content) & (table["place"] == place)]
        at = part.sort_values(["layer", "head"])
        assert at["post"].to_numpy() == pytest.approx(cosine(post.numpy(), true).mean(-1).ravel(), abs=1e-5)
        mean = trace.pre_queries[:, :, : -trace.steps].mean(2, keepdim=True).numpy()
        centred = cosine(pre.numpy() - mean, before - mean).mean(-1)
        assert at["centred"].to_numpy() == pytest.approx(centred.ravel(), abs=1e-4)
        assert at["mean_query"].to_numpy() == pytest.approx(cosine(mean, before).mean(-1).ravel(), abs=1e-5)
    assert control.tokens(lm, trace, N, 1)["last"].equal(trace.ids[trace.prompt_length - N : trace.prompt_length])


def test_effects_are_differences_of_cells(found):
    m = found.metrics
    cell = {(c, p): m[f"control/similarity/{c}/{p}"] for c in ("true", "random") for p in ("right", "back")}
    assert m["control/similarity/position/random"] == pytest.approx(cell["random", "right"] - cell["random", "back"])
    assert m["control/similarity/content/back"] == pytest.approx(cell["true", "back"] - cell["random", "back"])
    expected = cell["random", "right"] - cell["true", "back"]
    assert m["control/similarity/position_less_content"] == pytest.approx(expected)
    over = cell["random", "right"] - m["control/similarity/mean_query"]
    assert m["control/similarity/random_less_mean_query"] == pytest.approx(over)


def test_heads_are_counted_and_mapped():
    """Two heads of one layer: in the first the right position wins, in the second the right content."""
    cells = {("random", "right"): (0.9, 0.3), ("true", "back"): (0.5, 0.8), ("random", "back"): (0.2, 0.3)}
    every = dict.fromkeys(control.CELLS, (0.1, 0.1))
    rows = [
        {"document": d, "content": c, "place": p, "layer": 0, "head": h, "post": v, "centred": v, "mean_query": 0.4}
        for d in "ab"
        for (c, p), values in (every | cells).items()
        for h, v in enumerate(values)
    ]
    findings = control.from_heads(pandas.DataFrame(rows))
    assert findings.metrics["control/heads/position_over_content"] == 0.5
    heads = control.by_head(findings).set_index("head")
    assert heads["position"].tolist() == pytest.approx([0.7, 0.0])
    assert heads["content"].tolist() == pytest.approx([0.3, 0.5])


def losses(by_document):
    return pandas.DataFrame(
        [
            {"document": d, "offset": o, "loss": loss, "content": content}
            for d, (content, curve) in by_document.items()
            for o, loss in curve.items()
        ]
    )


def test_a_curve_reaches_a_level_between_its_points():
    curve = {1: 0.0, 8: 0.1, 32: 0.3, 128: 0.5}
    both = control.crossings(losses({"a": (0.2, curve), "b": (0.3, curve)}))
    # a: half way from 8 to 32 on a scale of doublings, 16; b: at 32.
    assert both.metrics["offset/equal_to_content"] == pytest.approx(2 ** ((4 + 5) / 2))
    assert both.metrics["offset/loss_at_window_less_content"] == pytest.approx(0.05)
    low, high = both.intervals["offset/equal_to_content"]
    assert 0 < low < 16 < 32 < high


@pytest.mark.parametrize(("content", "expected"), [(0.9, 128), (0.0, 1)])
def test_a_level_that_is_never_reached_or_at_once(content, expected):
    found = control.crossings(losses({"a": (content, {1: 0.01, 32: 0.3, 128: 0.5})}))
    assert found.metrics["offset/equal_to_content"] == pytest.approx(expected)


def test_offsets_take_the_curve_of_figure_2b_and_the_content_of_the_controls(sentences, found):
    lm, traces = sentences
    figure = position.figure_2b(lm, traces[:1], parts=4, n=N)
    alone = control.from_heads(found.table[found.table["document"] == traces[0].document])
    both = control.offsets(figure, alone, "300", n=N)
    assert both.table["offset"].tolist() == [4, 8, 16, 64, 75, 150, 225, 300]
    random = alone.metrics["control/similarity/random/right"]
    assert both.table["content"].tolist() == pytest.approx([1 - random] * 8)
    curve = figure.table.set_index("offset")["similarity"]
    at_window = both.metrics["offset/loss_at_window_less_content"]
    assert at_window == pytest.approx((1 - curve[N]) - (1 - random))


def test_neighbours_are_compared_with_distant_tokens(small):
    _, traces = small
    found = control.adjacent(traces, far=4)
    near, far = [], []
    for trace in traces:
        queries = trace.response_queries.double().numpy()
        near.append(cosine(queries[:, :, 1:], queries[:, :, :-1]).mean())
        far.append(cosine(queries[:, :, 4:], queries[:, :, :-4]).mean())
    assert found.metrics["adjacent/post/1"] == pytest.approx(np.mean(near), abs=1e-5)
    assert found.metrics["adjacent/post/near_less_far"] == pytest.approx(np.subtract(near, far).mean(), abs=1e-5)
    assert {"adjacent/centred/4", "adjacent/pre/near_less_far"} <= set(found.metrics)


def test_recalls_of_the_same_tokens_in_two_places(sentences):
    lm, traces = sentences
    found = control.recall(lm, traces, n=N, budget=20)
    assert found.metrics["control/recall/true/right"] > 0.98
    trace = traces[0]
    ids = control.tokens(lm, trace, N, 0)["last"]
    post, _ = pseudo_queries(lm, prefilled(trace), ids, torch.arange(N) + trace.prompt_length - N)
    shares = []
    for layer in range(trace.n_layers):
        keys = exact(trace.prompt_keys[layer])
        rows = [oracles.attention_over_prompt(exact(q[layer]), keys) for q in (trace.response_queries, post)]
        for group in range(trace.kv_heads):
            gold, own = (oracles.summed_over_group(each, group, trace.kv_heads).sum(0) for each in rows)
            shares.append(len({*oracles.top_positions(gold, 20)} & {*oracles.top_positions(own, 20)}) / 20)
    row = found.table.query("document == @trace.document and content == 'last' and place == 'back'")
    assert row["recall"].item() == pytest.approx(np.mean(shares), abs=1e-6)
    window = recall.recalls(trace, policy("snapkv", budget=20, window=N))["window_recall"]
    own = found.table.query("document == @trace.document and content == 'window'")["recall"].item()
    assert own == pytest.approx(window, abs=1e-6)


def test_with_the_same_pooling_both_sides_are_pooled_or_neither_is(small):
    lm, traces = small
    found = recall.same_pooling(lm, traces, budgets=(40,), window=N)
    trace = traces[2]
    row = found.table.query("document == @trace.document").set_index("pair")
    random = policy("dapq", budget=40, content="vocabulary", window=N, seed=2)
    own = recall.with_pseudo(lm, trace, [random])
    assert row.loc["snapkv_raw", "dapq"] == pytest.approx(recall.recalls(own, random)["recall"])
    raw = recall.recalls(trace, policy("snapkv", budget=40, window=N))
    assert row.loc["snapkv_raw", "snapkv"] == pytest.approx(raw["window_recall"])
    assert row.loc["snapkv_pooled", "snapkv"] == pytest.approx(raw["recall"])
    pooled = recall.PooledDapQ(budget=40, content="vocabulary", window=N, seed=2)
    kept = pooled.prefill(own.prompt)
    assert bool((kept[..., -N:] == torch.arange(trace.prompt_length - N, trace.prompt_length)).all())
    scores = random.scores(own.prompt)[0, 0, : trace.prompt_length - N].double().numpy()
    means = [scores[max(0, i - 3) : i + 4].sum() / 7 for i in range(len(scores))]
    assert kept[0, 0, :-N].tolist() == sorted(oracles.top_positions(np.array(means), 40 - N))
    gaps = found.table.query("pair == 'snapkv_pooled'")
    lead = found.metrics["lead/recall/snapkv_pooled/w8/b40"]
    assert lead == pytest.approx((gaps["dapq"] - gaps["snapkv"]).mean())
