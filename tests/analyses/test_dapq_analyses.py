"""DapQ's analyses, on the real model with a short text and on a tiny one: by hand, slowly, and by their parts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch

import kvlab
from kvlab import papers
from kvlab.analyses.dapq import position as dapq
from kvlab.analyses.dapq import pseudo, recall
from kvlab.analyses.findings import Findings
from kvlab.errors import KvlabError
from kvlab.methods import policy
from kvlab.traces.run import prefilled, pseudo_queries
from kvlab.workbench.jobs.experiments import load as load_experiment

N = 16
POLICIES = ("dapq", *recall.OTHERS)


@pytest.fixture(scope="module")
def small(tiny):
    """A tiny model and traces of three random prompts, with every query of the prompt."""
    lm = tiny()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 200, (n,), generator=generator) for n in (300, 310, 420)]
    options = {"window": 64, "queries": "all", "accumulate": True, "pseudo": ()}
    return lm, [kvlab.capture(lm, ids, new_tokens=8, **options) for ids in prompts]


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
    assert table_1.intervals["similarity/post/dc_sp"] == pytest.approx((min(found), max(found)), abs=1e-4)
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
        assert table_1.intervals[f"effect/post/{name}"] == pytest.approx((values.min(), values.max()), abs=1e-4)
    ratios = wide["dc_sp"] / wide["sc_dp"]
    assert table_1.metrics["ratio/post/dc_sp_over_sc_dp"] == pytest.approx(ratios.mean()) and len(ratios) == 2
    shares = by_hand["content/different_position"] / by_hand["position/different_content"]
    assert table_1.metrics["ratio/post/content_over_position"] == pytest.approx(shares.mean())
    low_high = table_1.intervals["ratio/post/content_over_position"]
    assert low_high == pytest.approx((shares.min(), shares.max()), abs=1e-4)


def test_table_1_of_one_more_prompt_goes_by_its_length(lm, traces, table_1):
    one = dapq.at_length(lm, traces[0], N)
    length = dapq.context_name(traces[0].prompt_length)
    of_it = table_1.table.query("document == @traces[0].document and rope == 'post'")
    of_it = of_it.set_index("condition")["similarity"]
    assert one.metrics[f"similarity/post/dc_sp/{length}"] == pytest.approx(of_it["dc_sp"], abs=1e-5)
    assert not one.intervals and all(name.endswith(f"/{length}") for name in one.metrics)


@pytest.mark.parametrize(
    "analysis",
    [
        lambda lm, trace: dapq.table_1(lm, [trace], 25),
        lambda lm, trace: dapq.figure_2a(lm, [trace], trials=2, n=25),
        lambda lm, trace: dapq.figure_2b(lm, [trace], parts=2, n=25),
    ],
)
def test_pseudo_queries_need_as_many_decoding_queries(lm, trace, analysis):
    with pytest.raises(KvlabError, match="25 pseudo-queries need as many decoding queries .* the trace has 24"):
        analysis(lm, trace)


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
    low, high = first.intervals["gap_random/post/dc_sp_less_sc_dp_m"]
    assert gap.min() <= low < gap.mean() < high <= gap.max()
    assert not first.table.equals(dapq.figure_2a(lm, traces, trials=2, n=8, seed=1).table)


def test_figure_2as_positions_are_where_they_are_said_to_be(trace):
    found = dapq._random_conditions(trace, 50, N, 100, 5000, torch.Generator().manual_seed(0))
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
            assert 0 <= positions.min() and positions.max() < within and positions[:, 0].unique().numel() > 10


@pytest.fixture(scope="module")
def figure_2b(small):
    lm, (one, _, other) = small
    return dapq.figure_2b(lm, [one, other], parts=4, n=8)


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
    assert two["low"].tolist() == pytest.approx([0.1, 0.8], abs=1e-3)
    assert (points[points["context"] == "4k"]["low"] == points[points["context"] == "4k"]["high"]).all()


@pytest.mark.parametrize("tokens, name", [(493, "500"), (1000, "1k"), (1993, "2k"), (3993, "4k"), (8000, "8k")])
def test_contexts_are_named_as_in_the_paper(tokens, name):
    assert dapq.context_name(tokens) == name


def test_a_documents_plain_name(trace):
    named = replace(trace, meta={"document": "sotu/1962[0:1951]@672aba60"})
    assert dapq.plain_name(named) == "sotu/1962"


# --- figure 3 ---


def attention_rows(queries, keys, scaling, positions):
    """softmax(q . K) of each query `[heads, n, d]` over the keys that it may see, one number at a time in numpy."""
    heads, group = len(queries), len(queries) // len(keys)
    rows = np.zeros((heads, queries.shape[1], keys.shape[1]))
    for h in range(heads):
        for i, position in zip(range(queries.shape[1]), positions, strict=False):
            logits = np.array([queries[h, i] @ keys[h // group, j] * scaling for j in range(keys.shape[1])])
            logits[np.arange(len(logits)) > position] = -np.inf
            weights = np.exp(logits - logits.max())
            rows[h, i] = weights / weights.sum()
    return rows


def best(rows, g, group, k):
    """Equation 1 and 2: the k positions with the largest attention, summed over queries and the heads of a group."""
    scores = rows[g * group : (g + 1) * group].sum((0, 1))
    return set(sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:k])


def test_window_recall_is_equations_1_to_3(small):
    lm, (trace, *_) = small
    window, k, length = 8, 20, trace.prompt_length
    one = policy("dapq", budget=k, window=window, content="vocabulary", seed=3)
    own = recall.with_pseudo(lm, trace, [one])
    keys = trace.prompt_keys.double().numpy()
    layers = range(trace.n_layers)
    group, after = trace.heads // trace.kv_heads, [length] * 99
    scaling = trace.scaling

    def rows(queries, positions):
        return [attention_rows(queries[l].double().numpy(), keys[l], scaling, positions) for l in layers]

    gold = rows(trace.response_queries, after)
    windows = {
        "dapq": rows(own.pseudo[one.pseudo_key], after),
        "snapkv": rows(trace.prompt.window(window), range(length - window, length)),
        "h2o": rows(trace.prompt.window(length), range(length)),
    }
    for name, predicted in windows.items():
        shares = [
            len(best(gold[l], g, group, k) & best(predicted[l], g, group, k)) / k
            for l in layers
            for g in range(trace.kv_heads)
        ]
        options = {"window": window} if name == "snapkv" else {}
        found = recall.recalls(own, one if name == "dapq" else policy(name, budget=k, **options))
        assert found["window_recall"] == pytest.approx(np.mean(shares), abs=1e-6), name
    recent = {0, 1, 2, 3} | set(range(length - k + 4, length))
    shares = [len(best(gold[l], g, group, k) & recent) / k for l in layers for g in range(trace.kv_heads)]
    found = recall.recalls(own, policy("streamingllm", budget=k))
    assert found["window_recall"] == found["recall"] == pytest.approx(np.mean(shares), abs=1e-6)


@pytest.mark.parametrize("name", POLICIES)
def test_recalls_are_those_of_a_replay(small, name):
    lm, traces = small
    one = policy(name, budget=40)
    own = recall.with_pseudo(lm, traces[1], [one]) if name == "dapq" else traces[1]
    found, whole = recall.recalls(own, one), kvlab.replay(own, one).summary
    assert found == pytest.approx({m: whole[m] for m in recall.MEASURES}, abs=1e-6)
    assert 0 < found["recall"] < 1


def test_the_responses_own_tokens_recall_everything(small):
    lm, traces = small
    for trace in traces:
        true = trace.ids[trace.prompt_length :]
        oracle = SimpleNamespace(pseudo_key="given", pseudo_tokens=lambda *_, true=true: true)
        own = recall.with_pseudo(lm, trace, [oracle])
        torch.testing.assert_close(own.pseudo["given"], trace.response_queries, atol=1e-4, rtol=1e-4)
        assert recall.recalls(own, policy("dapq", budget=30, window=8))["recall"] > 0.99


@pytest.fixture(scope="module")
def figure_3(small):
    quick = load_experiment("dapq_window_recall").parameters
    chosen = {name: quick[name] for name in ("windows", "budgets", "window", "budget")}
    return recall.figure_3(*small, **chosen, contents=2)


def test_figure_3_is_made_of_recalls(small, figure_3):
    lm, traces = small
    for w, b in ((16, 256), (32, 64)):
        dap, snap = [], []
        for number, trace in enumerate(traces):
            seeds = (2 * number, 2 * number + 1)
            random = [policy("dapq", budget=b, window=w, content="vocabulary", seed=s) for s in seeds]
            own = recall.with_pseudo(lm, trace, random)
            dap.append(np.mean([recall.recalls(own, one)["window_recall"] for one in random]))
            snap.append(recall.recalls(trace, policy("snapkv", budget=b, window=w))["window_recall"])
        leads = np.subtract(dap, snap)
        assert figure_3.metrics[f"window_recall/dapq/w{w}/b{b}"] == pytest.approx(np.mean(dap), abs=1e-6)
        assert figure_3.metrics[f"lead/window_recall/snapkv/w{w}/b{b}"] == pytest.approx(leads.mean(), abs=1e-6)
        low, high = figure_3.intervals[f"lead/window_recall/snapkv/w{w}/b{b}"]
        assert leads.min() - 1e-9 <= low <= leads.mean() <= high <= leads.max() + 1e-9


def test_figure_3s_random_contents_differ_between_documents(small, monkeypatch):
    seen = []
    whole = recall.with_pseudo
    monkeypatch.setattr(
        recall, "with_pseudo", lambda lm, t, ps: seen.append({one.pseudo_key for one in ps}) or whole(lm, t, ps)
    )
    recall.figure_3(*small, windows=[8], budgets=[40], window=8, budget=40, contents=2)
    assert [len(keys) for keys in seen] == [2, 2, 2] and len(set.union(*seen)) == 6
    assert all(key.startswith("vocabulary/") for key in set.union(*seen))


def test_curves_follow_one_axis(figure_3):
    points = recall.curves(figure_3, "window_recall", "budget", 32)
    assert set(points["policy"]) == set(POLICIES) and set(points["window"]) == {32}
    assert points[points["policy"] == "h2o"]["budget"].tolist() == [64, 128, 256, 512]
    assert (points["low"] <= points["value"]).all() and (points["value"] <= points["high"]).all()
    flat = recall.curves(figure_3, "window_recall", "window", 256).query("policy == 'streamingllm'")
    assert flat["window"].tolist() == [8, 16, 32, 64, 128] and flat["value"].nunique() == 1


def test_small_windows_and_small_budgets_by_hand():
    rows = [
        {"document": d, "policy": p, "window": w, "budget": b, "measure": "window_recall", "value": v}
        for p, w, b, values in (
            ("dapq", 16, 256, (0.60, 0.50)),
            ("dapq", 32, 256, (0.70, 0.58)),
            ("dapq", 64, 256, (0.65, 0.60)),
            ("snapkv", 16, 256, (0.40, 0.45)),
            ("snapkv", 32, 256, (0.5, 0.5)),
            ("snapkv", 64, 256, (0.5, 0.5)),
            ("dapq", 32, 64, (0.60, 0.50)),
            ("snapkv", 32, 64, (0.30, 0.40)),
        )
        for d, v in zip("ab", values, strict=True)
    ]
    figure = Findings(pandas.DataFrame(rows))
    # Best on average is 32: losses 0.10 and 0.08, leads at 16 are 0.20 and 0.05.
    found = recall.small_windows(figure, 16, 256)
    assert found.metrics["small_window/loss"] == pytest.approx(0.09)
    assert found.metrics["small_window/lead_less_loss"] == pytest.approx((0.10 - 0.03) / 2)
    # Leads at 64 are 0.30 and 0.10, at 256 0.20 and 0.08.
    found = recall.small_budgets(figure, 64, 256, 32)
    assert found.metrics["small_budget/lead_grows"] == pytest.approx((0.10 + 0.02) / 2)


# --- figure 6 ---


def test_contents_are_those_of_the_paper(lm, trace, monkeypatch):
    fed = {}

    def record(lm, cache, ids, positions):
        fed[len(fed)] = ids, positions
        return torch.zeros(1), None

    monkeypatch.setattr(recall, "pseudo_queries", record)
    wanted = pseudo.contents(32, firsts=(2, 4), seeds=(5, 6))
    assert list(wanted) == ["F2L30", "F4L28", "RS_C", "RC_C", "Fix_C"]
    recall.with_pseudo(lm, trace, [pseudo.asked(one) for many in wanted.values() for one in many])
    prompt, length = trace.ids[: trace.prompt_length].tolist(), trace.prompt_length
    f2, f4, rs, rs2, rc, rc2, fix = (ids.tolist() for ids, _ in fed.values())
    assert f2 == prompt[:2] + prompt[-30:] and f4 == prompt[:4] + prompt[-28:]
    spans = [prompt[i : i + 32] for i in range(length - 31)]
    assert rc in spans and rc2 in spans and rc != rc2
    assert set(rs) | set(rs2) <= set(prompt) and rs != rs2 and rs not in spans
    sentence = lm.tokenizer("Sorry, I don't know. ", add_special_tokens=False).input_ids
    assert fix == (sentence * 32)[:32] and "Sorry, I don't know." in lm.tokenizer.decode(fix)
    assert all(positions.tolist() == list(range(length, length + 32)) for _, positions in fed.values())
    fed.clear()
    recall.with_pseudo(lm, trace, [pseudo.asked(wanted["F4L28"][0])], start=0)
    assert fed[0][1].tolist() == list(range(32))


def test_variation_by_hand():
    wide = pandas.DataFrame({"x": [1.0, 3.0], "y": [3.0, 5.0]})
    value, (low, high) = pseudo.variation(wide)
    # Means 2 and 4: deviation 1, mean 3. Drawn twice alike, the rows give 1/2 and 1/4.
    assert value == pytest.approx(1 / 3) and (low, high) == pytest.approx((1 / 4, 1 / 2))
    assert pseudo.variation(wide.iloc[:1])[1] == pytest.approx((1 / 2, 1 / 2))


@pytest.fixture(scope="module")
def figure_6a(lm, traces):
    return pseudo.figure_6a(lm, traces, budgets=[48], firsts=(2, 4), draws=1)


def test_figure_6a_is_made_of_replays(lm, traces, figure_6a):
    usual = policy("dapq", budget=48, first=4)
    here = [kvlab.replay(recall.with_pseudo(lm, t, [usual]), usual).summary for t in traces]
    away = [kvlab.replay(recall.with_pseudo(lm, t, [usual], start=0), usual).summary for t in traces]
    for measure, sign in (("recall", 1), ("mass_lost", -1)):
        a, b = ([one[measure] for one in side] for side in (here, away))
        assert figure_6a.metrics[f"content/{measure}/F4L28/b48"] == pytest.approx(np.mean(a), abs=1e-5)
        assert figure_6a.metrics[f"content/{measure}/F4L28 at 0/b48"] == pytest.approx(np.mean(b), abs=1e-5)
        worth = sign * np.subtract(a, b)
        assert figure_6a.metrics[f"content/position/{measure}/b48"] == pytest.approx(worth.mean(), abs=1e-5)
        assert worth.mean() > 0, "the right position is better by both measures"


def test_figure_6as_comparisons_follow_from_its_table(figure_6a):
    for measure, sign in (("recall", 1), ("mass_lost", -1)):
        rows = figure_6a.table[figure_6a.table["measure"] == measure]
        wide = rows.pivot(index="document", columns="content", values="value").drop(columns="F4L28 at 0")
        ends = (wide["F2L30"] + wide["F4L28"]) / 2 - (wide["RS_C"] + wide["RC_C"]) / 2
        assert figure_6a.metrics[f"content/ends_less_random/{measure}/b48"] == pytest.approx(sign * ends.mean())
        means = wide.mean().to_numpy()
        spread = np.sqrt(((means - means.mean()) ** 2).mean()) / means.mean()
        assert figure_6a.metrics[f"content/cv/{measure}/b48"] == pytest.approx(spread) and len(means) == 5
        widest = (wide.max(axis=1) - wide.min(axis=1)).mean()
        left = figure_6a.metrics[f"content/position/{measure}/b48"] - widest
        assert figure_6a.metrics[f"content/position_less_spread/{measure}/b48"] == pytest.approx(left)
    points = pseudo.by_content(figure_6a, "recall")
    assert points["content"].tolist() == ["F2L30", "F4L28", "RS_C", "RC_C", "Fix_C", "F4L28 at 0"]


def test_the_best_length_is_chosen_on_the_other_documents():
    wide = pandas.DataFrame({1: [0.0, 0.0, 0.9], 8: [0.5, 0.4, 0.1], 64: [0.6, 0.1, 0.1]}, index=list("abc"))
    assert pseudo.best_by_others(wide).to_dict() == {"a": 1, "b": 1, "c": 8}
    with pytest.raises(KvlabError, match="at least two are needed"):
        pseudo.best_by_others(wide.iloc[:1])


def test_figure_6b_rises_and_falls_by_its_table(lm, traces):
    found = pseudo.figure_6b(lm, traces, lengths=(1, 8, 32), budget=48, responses=(8,))
    assert set(found.table["response"]) == {8, 24}
    for measure, sign in (("recall", 1), ("mass_lost", -1)):
        rows = found.table[(found.table["measure"] == measure) & (found.table["response"] == 24)]
        wide = sign * rows.pivot(index="document", columns="length", values="value")
        one, other = (wide.loc[name] for name in wide.index)
        # With two documents each takes the best length of the other.
        rise = (one[other.idxmax()] - one[1] + other[one.idxmax()] - other[1]) / 2
        fall = (one[other.idxmax()] - one[32] + other[one.idxmax()] - other[32]) / 2
        assert found.metrics[f"length/rise/{measure}"] == pytest.approx(rise)
        assert found.metrics[f"length/fall/{measure}"] == pytest.approx(fall)
        assert found.metrics[f"length/best/{measure}/r24"] == wide.mean().idxmax()
    window = {"content": "first_last", "first": 1, "window": 8}
    again = [
        recall.recalls(recall.with_pseudo(lm, t, [pseudo.asked(window)]), pseudo.asked(window, 48))["recall"]
        for t in traces
    ]
    assert found.metrics["length/recall/n8"] == pytest.approx(np.mean(again), abs=1e-6)
    points = pseudo.by_length(found, "recall")
    assert points.groupby("response")["length"].apply(list).to_dict() == {8: [1, 8, 32], 24: [1, 8, 32]}


def test_aligned_documents_keep_their_means_and_lose_their_differences():
    rows = [
        {"document": d, "response": 32, "length": n, "measure": "mass_lost", "value": v}
        for d, values in (("a", (0.1, 0.3)), ("b", (0.5, 0.7)))
        for n, v in zip((1, 8), values, strict=True)
    ]
    figure = Findings(pandas.DataFrame(rows))
    plain, aligned = (pseudo.by_length(figure, "mass_lost", each).set_index("length") for each in (False, True))
    assert plain["value"].tolist() == pytest.approx([0.3, 0.5])
    assert aligned["value"].tolist() == pytest.approx([0.3, 0.5])
    assert (aligned["low"] - aligned["high"]).abs().max() < 1e-9 and plain["low"].tolist() == pytest.approx([0.1, 0.3])


def test_a_shortened_response_is_what_a_shorter_capture_gives(small):
    lm, (trace, *_) = small
    short = pseudo.shortened(trace, 3)
    again = kvlab.capture(lm, trace.ids[: trace.prompt_length], new_tokens=3, window=64, queries="all", pseudo=())
    assert (short.steps, short.length) == (3, trace.prompt_length + 3) and torch.equal(short.ids, again.ids)
    for name in ("keys", "values", "queries", "pre_queries"):
        torch.testing.assert_close(getattr(short, name), getattr(again, name), atol=1e-5, rtol=1e-5)
    one = policy("snapkv", budget=50, window=16)
    assert kvlab.replay(short, one).summary == pytest.approx(kvlab.replay(again, one).summary, rel=1e-4)
    for steps in (0, trace.steps + 1):
        with pytest.raises(KvlabError, match=f"has 8 tokens, so that its first {steps} cannot be looked at"):
            pseudo.shortened(trace, steps)


def test_scores_are_those_of_a_replay(small):
    for trace in small[1][:2]:
        one = policy("snapkv", budget=60, window=16)
        found, whole = pseudo.scored(trace, one.prefill(trace.prompt)), kvlab.replay(trace, one).summary
        assert found == pytest.approx({m: whole[m] for m in ("recall", "mass_lost")}, abs=1e-5)


# --- claims ---


def test_the_claims_of_figure_3_name_what_it_measures(figure_3):
    both = figure_3 | recall.small_windows(figure_3, 16, 256) | recall.small_budgets(figure_3, 64, 512, 32)
    asked = set().union(*(claim.metrics for claim in papers.claims(experiment="dapq_window_recall")))
    ends = {f"{name}/{end}" for name in both.intervals for end in ("low", "high")}
    assert asked and asked <= set(both.metrics) | ends


@pytest.mark.parametrize("name", ["table3", "table5", "table6", "table7", "table8"])
def test_typed_in_tables_average_to_their_last_column(name):
    table = papers.figure("dapq", name)
    scores = table.drop(columns=["model", "budget", "method", "average"])
    whole = scores.notna().all(axis=1) & table["average"].notna()
    off = (scores.mean(axis=1) - table["average"])[whole].abs()
    # A few rows are misprinted, or misread: their cells do not average to what stands beside them.
    assert whole.sum() > 30 and (off < 0.05).sum() >= whole.sum() - 1 and off.max() < 0.5
    assert table["budget"].isna().sum() == table["model"].nunique(), "one row with the full cache for each model"


def test_effects_in_the_claims_are_the_papers_cells():
    cells = papers.figure("dapq", "table1").set_index("condition")
    claims = {claim.id: claim for claim in papers.claims(paper="dapq")}
    post, pre = cells["post"], cells["pre"]
    for name, value in {
        "position_outweighs_content": post["dc_sp"] - post["sc_dp"],
        "dc_sp": post["dc_sp"],
        "sc_dp": post["sc_dp"],
        "pre_sc_dp": pre["sc_dp"],
    }.items():
        assert claims[f"dapq.table1.{name}"].paper_value == pytest.approx(value, abs=1e-9)
    of_content = claims["dapq.table1.content_at_wrong_position"]
    share = (post["sc_dp"] - post["dc_dp"]) / (post["dc_sp"] - post["dc_dp"])
    assert of_content.paper_value == pytest.approx(share, abs=5e-5)
    assert [test.value for test in of_content.size.tests] == pytest.approx([-2 * share, 2 * share], abs=5e-4)
    for name, value in {
        "dc_sp": post["dc_sp"],
        "sc_dp": post["sc_dp"],
        "dc_dp": post["dc_dp"],
        "pre_sc_dp": pre["sc_dp"],
        "pre_dc_dp": pre["dc_dp"],
    }.items():
        assert claims[f"dapq.table1.{name}"].size.to == pytest.approx(1 - value, abs=1e-9)
    table = papers.figure("dapq", "table4").query("model == 'Llama3-8B-Instruct' and budget == 64")
    hard = table.set_index("method")["hard"]
    assert claims["dapq.table4.hard"].paper_value == pytest.approx(hard["DapQ"] - hard["SnapKV"])
