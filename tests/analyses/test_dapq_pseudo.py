"""DapQ's figure 6, on the real model with a short text and on a tiny one."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
from support.spread import students

import kvlab
from kvlab.analyses.dapq import pseudo, recall
from kvlab.analyses.findings import Findings
from kvlab.errors import KvlabError
from kvlab.methods import policy


def test_contents_are_those_of_the_paper(lm, trace, monkeypatch):
    fed = {}

    def record(lm, cache, ids, positions):
        fed[len(fed)] = ids, positions
        return torch.zeros(1), None

    monkeypatch.setattr("kvlab.traces.passes.pseudo_queries", record)
    wanted = pseudo.contents(32, firsts=(2, 4), seeds=(5, 6))
    assert list(wanted) == ["F2L30", "F4L28", "RS_C", "RC_C", "Fix_C"]
    recall.with_pseudo(
        lm, trace, [pseudo.dapq_with(parameters) for variants in wanted.values() for parameters in variants]
    )
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
    recall.with_pseudo(lm, trace, [pseudo.dapq_with(wanted["F4L28"][0])], start=0)
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
        a, b = ([summary[measure] for summary in side] for side in (here, away))
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
        first, second = (sign * wide.loc[name] for name in wide.index)
        # With two documents each takes the best and the worst content of the other.
        gap = (first[second.idxmax()] - first[second.idxmin()] + second[first.idxmax()] - second[first.idxmin()]) / 2
        assert figure_6a.metrics[f"content/gap/{measure}/b48"] == pytest.approx(gap)
        left = figure_6a.metrics[f"content/position/{measure}/b48"] - gap
        assert figure_6a.metrics[f"content/position_less_gap/{measure}/b48"] == pytest.approx(left)
    points = figure_6a.frame(pseudo.CONTENT).query("measure == 'recall'")
    assert points["content"].tolist() == ["F2L30", "F4L28", "RS_C", "RC_C", "Fix_C", "F4L28 at 0"]


def test_the_best_length_is_chosen_on_the_other_documents():
    wide = pandas.DataFrame({1: [0.0, 0.0, 0.9], 8: [0.5, 0.4, 0.1], 64: [0.6, 0.1, 0.1]}, index=list("abc"))
    assert pseudo.best_by_others(wide).to_dict() == {"a": 1, "b": 1, "c": 8}
    with pytest.raises(KvlabError, match="at least two are needed"):
        pseudo.best_by_others(wide.iloc[:1])


def test_a_gap_between_contents_that_do_not_differ_is_none_on_average():
    """By chance alone the largest less the smallest of a document is always positive, and `gap_by_others` is not."""
    noise = np.random.default_rng(0)
    tables = [pandas.DataFrame(noise.normal(0.5, 0.1, (8, 7))) for _ in range(300)]
    assert np.mean([(table.max(axis=1) - table.min(axis=1)).mean() for table in tables]) > 0.2
    assert np.mean([pseudo.gap_by_others(table).mean() for table in tables]) == pytest.approx(0, abs=0.015)
    apart = [pseudo.gap_by_others(table + np.arange(7) * 0.1).mean() for table in tables]
    assert np.mean(apart) == pytest.approx(0.6, abs=0.03)


def test_figure_6b_rises_and_falls_by_its_table(lm, traces):
    found = pseudo.figure_6b(lm, traces, lengths=(1, 8, 32), budget=48, responses=(8,))
    assert set(found.table["response"]) == {8, 24}
    for measure, sign in (("recall", 1), ("mass_lost", -1)):
        rows = found.table[(found.table["measure"] == measure) & (found.table["response"] == 24)]
        wide = sign * rows.pivot(index="document", columns="length", values="value")
        first, second = (wide.loc[name] for name in wide.index)
        # With two documents each takes the best length of the other.
        rise = (first[second.idxmax()] - first[1] + second[first.idxmax()] - second[1]) / 2
        fall = (first[second.idxmax()] - first[32] + second[first.idxmax()] - second[32]) / 2
        assert found.metrics[f"length/rise/{measure}"] == pytest.approx(rise)
        assert found.metrics[f"length/fall/{measure}"] == pytest.approx(fall)
        assert found.metrics[f"length/best/{measure}/r24"] == wide.mean().idxmax()
    window = {"content": "first_last", "first": 1, "window": 8}
    again = [
        recall.recalls(recall.with_pseudo(lm, t, [pseudo.dapq_with(window)]), pseudo.dapq_with(window, 48))["recall"]
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
    plain, aligned = (
        pseudo.by_length(figure, "mass_lost", alignment).set_index("length") for alignment in (False, True)
    )
    assert plain["value"].tolist() == pytest.approx([0.3, 0.5])
    assert aligned["value"].tolist() == pytest.approx([0.3, 0.5])
    assert (aligned["low"] - aligned["high"]).abs().max() < 1e-9 and plain["low"].tolist() == pytest.approx(
        [students((0.1, 0.5))[0], students((0.3, 0.7))[0]], rel=1e-4
    )


def test_a_shortened_response_is_what_a_shorter_capture_gives(small):
    lm, (trace, *_) = small
    short = pseudo.shortened(trace, 3)
    again = kvlab.capture(lm, trace.ids[: trace.prompt_length], new_tokens=3, window=64, queries="all", pseudo=())
    assert (short.steps, short.length) == (3, trace.prompt_length + 3) and torch.equal(short.ids, again.ids)
    for name in ("keys", "values", "queries", "pre_queries"):
        torch.testing.assert_close(getattr(short, name), getattr(again, name), atol=1e-5, rtol=1e-5)
    snapkv = policy("snapkv", budget=50, window=16)
    assert kvlab.replay(short, snapkv).summary == pytest.approx(kvlab.replay(again, snapkv).summary, rel=1e-4)
    for steps in (0, trace.steps + 1):
        with pytest.raises(KvlabError, match=f"has 8 tokens; a part of it has 1 to 8, not {steps}"):
            pseudo.shortened(trace, steps)


def test_scores_are_those_of_a_replay(small):
    for trace in small[1][:2]:
        snapkv = policy("snapkv", budget=60, window=16)
        found, whole = pseudo.scored(trace, snapkv.prefill(trace.prompt)), kvlab.replay(trace, snapkv).summary
        assert found == pytest.approx({m: whole[m] for m in ("recall", "mass_lost")}, abs=1e-5)


def test_mutual_attention_is_paired_by_window(small):
    lm, traces = small
    found = pseudo.mutual(lm, traces, lengths=(4, 16), budget=40)
    wide = found.table.query("measure == 'recall'").pivot(
        index="document", columns=["softmax", "length"], values="value"
    )
    gain = wide["prompt"] - wide["all"]
    assert found.metrics["mutual/recall/n16"] == pytest.approx(gain[16].mean())
    assert found.metrics["mutual/loss_grows/recall"] == pytest.approx((gain[16] - gain[4]).mean())
    # By hand: the policy on a trace that was captured for it.
    given = {"content": "first_last", "first": 2, "window": 16, "softmax": "all"}
    policy = pseudo.dapq_with(given, 40)
    trace = traces[1]
    captured = kvlab.capture(lm, trace.ids[: trace.prompt_length], new_tokens=8, policies=[policy], pseudo=())
    value = pseudo.recalled(captured, policy.prefill(captured.prompt))
    assert wide.loc[trace.document, ("all", 16)] == pytest.approx(value, abs=1e-6)
