"""MorphKV's windows and fusions: cuts of one capture, the worked example, and gains by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.live_runs import prompt
from support.spread import students

import kvlab
from kvlab.analyses.morphkv import windows
from kvlab.errors import KvlabError

# --- one capture, cut in several ways ---


def test_a_continuation_is_what_capturing_the_shorter_prompt_gives(tiny, random_traces):
    whole, ids = random_traces[0], prompt(120, 1)[0]
    cut = windows.continuation(whole, 70, 30, accumulate=True)
    fresh = kvlab.capture(tiny(), ids[:70], queries="all", accumulate=True, pseudo=(), response=ids[70:100])
    assert (cut.prompt_length, cut.steps) == (70, 30) == (fresh.prompt_length, fresh.steps)
    assert cut.ids.tolist() == ids[:100].tolist()
    for name in ("queries", "keys", "values", "accumulated"):
        torch.testing.assert_close(getattr(cut, name), getattr(fresh, name), atol=2e-4, rtol=1e-3)
    morphkv = kvlab.policy("morphkv", budget=24, window=6)
    lost = [float(kvlab.replay(trace, morphkv).mass_lost.sum()) for trace in (cut, fresh)]
    assert lost[0] == pytest.approx(lost[1], rel=1e-3) and lost[0] > 1


def test_a_continuation_needs_the_queries_and_the_tokens(tiny, random_traces):
    windowed = kvlab.capture(tiny(), prompt(60), 4, window=10, pseudo=())
    with pytest.raises(KvlabError, match="capture with queries='all'"):
        windows.continuation(windowed, 30, 20)
    with pytest.raises(KvlabError, match=r"has 120 tokens, and 100 [+] 21 are asked for"):
        windows.continuation(random_traces[0], 100, 21)


def test_another_kind_of_response_is_refused(lm):
    with pytest.raises(KvlabError, match="'beam' is neither 'document' nor 'greedy'"):
        windows.long_response(lm, "sotu/1962", 64, 8, "beam")


# --- windows and fusions ---


def test_the_walk_through_gives_the_papers_numbers():
    found = windows.walk_through()
    assert found.metrics["walkthrough/today_score"] == pytest.approx(0.6, abs=1e-6)
    assert found.metrics["walkthrough/me_score"] == pytest.approx(0.1, abs=1e-6)
    assert found.metrics["walkthrough/kept_today"] == 1.0
    kept = found.table.set_index("token")["kept"]
    assert kept.to_dict() == {"me": False, "today's": True, "weather": True, "The": True}


def test_the_window_ablation_is_made_of_replays(random_traces):
    found = windows.window_ablation(random_traces, windows=(2, 8, 32), capacities=(32, 48))
    settings = {f"{fusion}/w{w}/c{c}" for fusion in ("sum", "max") for c in (32, 48) for w in (2, 8, 32) if w < c}
    means = found.frame(windows.MEAN)
    keys = zip(*(means[key] for key in ("measure", "fusion", "window", "capacity")), strict=True)
    drawn = {f"{measure}/{fusion}/w{window}/c{capacity}" for measure, fusion, window, capacity in keys}
    assert drawn == {f"{measure}/{s}" for measure in windows.MEASURES for s in settings} <= set(found.metrics)
    assert set(found.intervals) == set(found.metrics)

    def summaries(**parameters) -> list[dict[str, float]]:
        return [kvlab.replay(t, kvlab.policy("morphkv", **parameters)).summary for t in random_traces]

    sums, maxima, narrow = (summaries(budget=32, window=w, fusion=f) for w, f in ((8, "sum"), (8, "max"), (2, "max")))
    for measure in windows.MEASURES:
        values = [summary[measure] for summary in maxima]
        assert found.metrics[f"{measure}/max/w8/c32"] == pytest.approx(np.mean(values), rel=1e-5)
        assert found.intervals[f"{measure}/max/w8/c32"] == pytest.approx(students(values), rel=1e-4, abs=1e-7)
        sign = 1 if measure == "step_recall" else -1
        for name, new, old in (("max/c32/w2_to_w8", maxima, narrow), ("w8/c32/max_to_sum", sums, maxima)):
            gains = [sign * (n[measure] - o[measure]) / o[measure] for n, o in zip(new, old, strict=True)]
            assert found.metrics[f"gain/{measure}/{name}"] == pytest.approx(np.mean(gains), abs=1e-5)
    rows = found.table.query("measure == 'mass_lost' and fusion == 'max' and window == 8 and capacity == 32")
    assert sorted(rows["step"].unique()) == list(range(1, 21)) and rows["document"].nunique() == 2
    first = rows.query("step == 1")["value"]
    assert (first < 1e-5).all(), "the first decoding query reads the whole prompt"
    assert found.metrics["mass_lost/sum/w8/c48"] < found.metrics["mass_lost/sum/w8/c32"]


def test_a_window_beyond_the_captured_queries_is_refused(tiny):
    windowed = kvlab.capture(tiny(), prompt(60), 4, window=10, pseudo=())
    with pytest.raises(KvlabError, match="a window of 11 needs as many prompt queries; capture with window=11"):
        windows.window_ablation([windowed], windows=(2, 11), capacities=(20,))


def test_fusions_after_a_short_prompt_are_compared_only_where_prompts_fit(random_traces):
    lengths = {trace.prompt_length for trace in random_traces}
    small, large = min(lengths) - 1, max(lengths) + 1
    found = windows.window_ablation(random_traces, windows=(4,), capacities=(small, large)).metrics
    assert f"gain/mass_lost/w4/c{small}/max_to_sum" in found
    assert f"gain/mass_lost/w4/c{small}/short_prompt/max_to_sum" not in found
    short = f"gain/mass_lost/w4/c{large}/short_prompt/max_to_sum"
    assert found[short] == found[short.replace("short_prompt/", "")]


def test_windows_that_leave_no_room_are_passed_over(random_traces):
    found = windows.window_ablation(random_traces, windows=(4, 16, 40), capacities=(16, 32), fusions=("max",))
    means = found.frame(windows.MEAN).query("measure == 'mass_lost'")
    assert list(zip(means["window"], means["capacity"], strict=True)) == [(4, 16), (4, 32), (16, 32)]
    assert [n for n in found.metrics if n.startswith("gain/mass_lost")] == ["gain/mass_lost/max/c32/w4_to_w16"]


def test_fusion_gains_go_by_the_regimes_name(random_traces):
    found = windows.fusion_gains(random_traces, 4, 24, "writing")
    assert set(found.metrics) == {f"gain/{measure}/writing/max_to_sum" for measure in windows.MEASURES}
    mean = found.table.query("measure == 'output_error'").groupby(["document", "fusion"])["value"].mean().unstack()
    expected = ((mean["max"] - mean["sum"]) / mean["max"]).mean()
    assert found.metrics["gain/output_error/writing/max_to_sum"] == pytest.approx(expected)


def test_two_regimes_are_measured_each_with_its_own_window_and_capacity(random_traces, monkeypatch):
    """Long responses to short prompts are fed as asked, short answers come from the requests to summarise."""
    asked = []
    monkeypatch.setattr(windows, "long_response", lambda *given: asked.append(given) or random_traces[0])
    monkeypatch.setattr(windows, "common_traces", lambda *given: asked.append(given) or [random_traces[1]])
    writing = {"tokens": 7, "new_tokens": 90, "window": 4, "capacity": 24}
    answering = {"tokens": 120, "new_tokens": 5, "window": 6, "capacity": 40}
    found = windows.two_regimes("lm", ["a"], writing, answering, "greedy")
    assert asked == [("lm", "a", 7, 90, "greedy", False), ("lm", ["a"], 120, 5)]
    assert found.metrics == {
        **windows.fusion_gains(random_traces[:1], 4, 24, "writing").metrics,
        **windows.fusion_gains(random_traces[1:], 6, 40, "answering").metrics,
    }
    known = found.table.groupby("regime")[["window", "capacity"]].agg(set).to_dict("index")
    assert known == {
        "writing": {"window": {4}, "capacity": {24}},
        "answering": {"window": {6}, "capacity": {40}},
    }
