"""MorphKV's analyses: cuts of one capture, gains and slopes by hand, predicted cache sizes against tensors, and what
the paper's own tables add up to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from support.live_runs import prompt

import kvlab
from kvlab import papers
from kvlab.analyses.morphkv import printed, responses, sizes, windows
from kvlab.analyses.morphkv.sizes import Geometry, entries, stored_bytes
from kvlab.errors import KvlabError

PREDICTIONS = Path(__file__).parents[3] / "shared" / "data" / "longbench_predictions"


@pytest.fixture(scope="module")
def tiny_traces(tiny):
    """Traces of two random prompts of 120 tokens with all their queries."""
    return [kvlab.capture(tiny(), prompt(120, seed), 20, queries="all", accumulate=True, pseudo=()) for seed in (1, 2)]


# --- one capture, cut in several ways ---


def test_a_continuation_is_what_capturing_the_shorter_prompt_gives(tiny, tiny_traces):
    whole, ids = tiny_traces[0], prompt(120, 1)[0]
    cut = windows.continuation(whole, 70, 30, accumulate=True)
    fresh = kvlab.capture(tiny(), ids[:70], queries="all", accumulate=True, pseudo=(), response=ids[70:100])
    assert (cut.prompt_length, cut.steps) == (70, 30) == (fresh.prompt_length, fresh.steps)
    assert cut.ids.tolist() == ids[:100].tolist()
    for name in ("queries", "keys", "values", "accumulated"):
        torch.testing.assert_close(getattr(cut, name), getattr(fresh, name), atol=2e-4, rtol=1e-3)
    one = kvlab.policy("morphkv", budget=24, window=6)
    lost = [float(kvlab.replay(each, one).mass_lost.sum()) for each in (cut, fresh)]
    assert lost[0] == pytest.approx(lost[1], rel=1e-3) and lost[0] > 1


def test_a_continuation_needs_the_queries_and_the_tokens(tiny, tiny_traces):
    windowed = kvlab.capture(tiny(), prompt(60), 4, window=10, pseudo=())
    with pytest.raises(KvlabError, match="capture with queries='all'"):
        windows.continuation(windowed, 30, 20)
    with pytest.raises(KvlabError, match="has 120 tokens, and 100 [+] 21 are asked for"):
        windows.continuation(tiny_traces[0], 100, 21)


def test_another_kind_of_response_is_refused(lm):
    with pytest.raises(KvlabError, match="'beam' is neither 'document' nor 'greedy'"):
        windows.long_response(lm, "sotu/1962", 64, 8, "beam")


def test_repetition_is_a_share_of_what_occurred_before(tiny_traces):
    cut = windows.continuation(tiny_traces[0], 60, 20)
    cut.ids[60:80] = torch.arange(4).repeat(5)
    assert windows.repetition(cut, n=4) == pytest.approx(13 / 17), "17 quadruples, of which four are different"


# --- windows and fusions ---


def test_the_walk_through_gives_the_papers_numbers():
    found = windows.walk_through()
    assert found.metrics["walkthrough/today_score"] == pytest.approx(0.6, abs=1e-6)
    assert found.metrics["walkthrough/me_score"] == pytest.approx(0.1, abs=1e-6)
    assert found.metrics["walkthrough/kept_today"] == 1.0
    kept = found.table.set_index("token")["kept"]
    assert kept.to_dict() == {"me": False, "today's": True, "weather": True, "The": True}


def test_the_window_ablation_is_made_of_replays(tiny_traces):
    found = windows.window_ablation(tiny_traces, windows=(2, 8, 32), capacities=(32, 48))
    settings = {f"{fusion}/w{w}/c{c}" for fusion in ("sum", "max") for c in (32, 48) for w in (2, 8, 32) if w < c}
    means = {name for name in found.metrics if not name.startswith("gain/")}
    assert means == {f"{measure}/{s}" for measure in windows.MEASURES for s in settings}
    assert set(found.intervals) == set(found.metrics)

    def summaries(**parameters) -> list[dict[str, float]]:
        return [kvlab.replay(t, kvlab.policy("morphkv", **parameters)).summary for t in tiny_traces]

    sums, maxima, narrow = (summaries(budget=32, window=w, fusion=f) for w, f in ((8, "sum"), (8, "max"), (2, "max")))
    for measure in windows.MEASURES:
        one = [each[measure] for each in maxima]
        assert found.metrics[f"{measure}/max/w8/c32"] == pytest.approx(np.mean(one), rel=1e-5)
        assert found.intervals[f"{measure}/max/w8/c32"] == pytest.approx((min(one), max(one)), rel=1e-5)
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


def test_windows_that_leave_no_room_are_passed_over(tiny_traces):
    found = windows.window_ablation(tiny_traces, windows=(4, 16, 40), capacities=(16, 32), fusions=("max",))
    settings = {tuple(name.split("/")[2:]) for name in found.metrics if name.startswith("mass_lost/")}
    assert settings == {("w4", "c16"), ("w4", "c32"), ("w16", "c32")}
    assert [n for n in found.metrics if n.startswith("gain/mass_lost")] == ["gain/mass_lost/max/c32/w4_to_w16"]


def test_fusion_gains_go_by_the_regimes_name(tiny_traces):
    found = windows.fusion_gains(tiny_traces, 4, 24, "writing")
    assert set(found.metrics) == {f"gain/{measure}/writing/max_to_sum" for measure in windows.MEASURES}
    mean = found.table.query("measure == 'output_error'").groupby(["document", "fusion"])["value"].mean().unstack()
    expected = ((mean["max"] - mean["sum"]) / mean["max"]).mean()
    assert found.metrics["gain/output_error/writing/max_to_sum"] == pytest.approx(expected)


# --- small budgets ---


def test_methods_get_the_same_bytes_or_the_same_entries(tiny_traces):
    one = tiny_traces[0]  # 120 tokens, two query heads for each KV head
    policies = responses.at_budget(one, 0.2, 4)
    stored = {name: kvlab.replay(one, each) for name, each in policies.items()}
    kept = {
        name: sum(int((each.kept(layer) >= 0).sum()) for layer in range(one.n_layers)) for name, each in stored.items()
    }
    assert kept["snapkv_shared"] == kept["h2o"] == kept["streamingllm"] == 24 * one.n_layers * one.kv_heads
    assert kept["snapkv"] == 12 * one.n_layers * one.heads == kept["h2o"], "half the entries for twice the sets"
    last = [stored["morphkv"].stored(layer, one.steps) for layer in range(one.n_layers)]
    assert sum(int((positions >= 0).sum()) for positions in last) == kept["h2o"]


def test_small_budgets_pair_their_documents(tiny_traces):
    shares = (0.1, 0.3)
    found = responses.small_budgets(tiny_traces, shares, window=4)

    def lost(name: str, share: float) -> np.ndarray:
        """From the second step on: MorphKV's first reads the whole prompt."""
        each = [kvlab.replay(t, responses.at_budget(t, share, 4)[name]).mass_lost for t in tiny_traces]
        assert all(float(one[..., 0].max()) < 1e-5 for one in each) == (name == "morphkv")
        return np.array([float(one[..., 1:].mean()) for one in each])

    ahead = lost("h2o", 0.1) - lost("morphkv", 0.1)
    assert found.metrics["behind/mass_lost/h2o/0.10"] == pytest.approx(ahead.mean(), abs=1e-6)
    assert found.intervals["behind/mass_lost/h2o/0.10"] == pytest.approx((ahead.min(), ahead.max()), abs=1e-6)
    sharper = (lost("snapkv", 0.1) - lost("snapkv", 0.3)) - (lost("morphkv", 0.1) - lost("morphkv", 0.3))
    assert found.metrics["sharper/mass_lost/snapkv"] == pytest.approx(sharper.mean(), abs=1e-6)
    recall = found.table.query("measure == 'step_recall' and share == 0.3 and step > 1")
    recall = recall.groupby(["document", "policy"])["value"].mean().unstack()
    drop = ((recall["morphkv"] - recall["snapkv"]) / recall["morphkv"]).mean()
    assert found.metrics["drop/step_recall/snapkv/0.30"] == pytest.approx(drop)
    points = responses.by_budget(found, "mass_lost")
    assert len(points) == 10 and set(points["share"]) == set(shares)


# --- along a response ---


def test_slopes_by_hand():
    """MorphKV rises by 0.03 and 0.05 for each 100 tokens, H2O by 0.10 and 0.06, SnapKV not at all."""
    rises = {"morphkv": (3e-4, 5e-4), "h2o": (1e-3, 6e-4), "snapkv": (0.0, 0.0)}
    rows = [
        {"document": f"d{number}", "policy": name, "step": step, "measure": "kl", "value": 0.2 + rise * step}
        for name, pair in rises.items()
        for number, rise in enumerate(pair)
        for step in (1, 2, 3, 4)
    ]
    found = responses.fading(pandas.DataFrame(rows), ["kl"])
    assert found.metrics["slope/kl/morphkv"] == pytest.approx(0.04)
    assert found.intervals["slope/kl/morphkv"] == pytest.approx((0.03, 0.05))
    assert found.metrics["steeper/kl/h2o"] == pytest.approx((0.07 + 0.01) / 2)
    assert found.metrics["steeper/kl/snapkv"] == pytest.approx(-0.04)
    assert found.metrics["mean/kl/h2o"] == pytest.approx(0.2 + 8e-4 * 2.5)
    assert found.metrics["behind/kl/h2o"] == pytest.approx(4e-4 * 2.5)
    bins = responses.binned(found.table, "kl", over=2)
    assert bins[bins["policy"] == "h2o"]["value"].tolist() == pytest.approx([0.2 + 8e-4 * 1.5, 0.2 + 8e-4 * 3.5])


def test_a_response_fades_where_something_is_evicted(tiny_traces):
    cuts = [windows.continuation(t, 10, 110, accumulate=True) for t in tiny_traces]
    found = responses.along_a_response(cuts, 24, 4)
    lost = found.table.query("measure == 'mass_lost'").set_index(["policy", "step"]).sort_index()["value"]
    assert lost.loc["snapkv"].max() == lost.loc["full"].max() == 0, "a budget above the prompt evicts nothing"
    for name in ("morphkv", "h2o"):
        assert lost.loc[name].loc[:15].max() < 1e-5 < lost.loc[name].loc[16:].min()
    policies = [kvlab.policy("h2o", budget=24), kvlab.policy("morphkv", budget=24, window=4)]
    slopes = np.array(
        [
            [np.polyfit(range(110), kvlab.replay(t, each).mass_lost.mean((0, 1)), 1)[0] for each in policies]
            for t in cuts
        ]
    )
    times = slopes[:, 0] / slopes[:, 1]
    assert found.metrics["times/mass_lost/h2o"] == pytest.approx(np.mean(times), rel=1e-4)
    assert found.metrics["times/mass_lost/snapkv"] == 0


# --- inside the model ---


@pytest.fixture(scope="module")
def inside(tiny):
    """Two random texts of 40 + 30 tokens under policies that evict, and one that need not."""
    lm, ids = tiny(), prompt(71, 5, rows=2)
    policies = responses.writing(16, 4) | {"whole": kvlab.policy("snapkv", budget=40, window=4)}
    return lm, ids, policies, responses.teacher_forced(lm, ids, 40, policies)


def test_what_evicts_nothing_predicts_as_the_full_cache(inside):
    table = inside[-1].table.query("policy in ['full', 'whole'] and measure in ['kl', 'nll_gap']")
    assert table["value"].abs().max() < 1e-4 and len(table) == 2 * 2 * 2 * 30


def test_the_step_at_which_morphkv_reads_the_whole_prompt_does_not_count(inside):
    found = inside[-1]
    kl = found.table.query("measure == 'kl'").pivot_table(index=["document", "step"], columns="policy", values="value")
    first = kl.xs(1, level="step")
    assert first["morphkv"].max() < 1e-4 < first[["h2o", "snapkv"]].min().min()
    later = kl.drop(1, level="step").groupby("document").mean()
    assert found.metrics["behind/kl/h2o"] == pytest.approx((later["h2o"] - later["morphkv"]).mean())
    assert found.metrics["mean/kl/morphkv"] == pytest.approx(later["morphkv"].mean())


@torch.inference_mode()
@pytest.mark.parametrize("name", ["snapkv", "h2o", "morphkv"])
def test_divergences_are_those_of_a_text_fed_alone_token_by_token(inside, name):
    """Alone, prefilled by its own session and stepped: neither the batch, nor one prefill for all, nor a response that
    is fed at one go may change anything."""
    lm, ids, policies, found = inside
    text = ids[1:]
    full = lm.model(text[:, :-1]).logits[0, 40:].log_softmax(-1)
    logits = []
    with kvlab.compress(lm.model, policies[name]) as session:
        past = lm.model(text[:, :40], use_cache=True).past_key_values
        for token in text[0, 40:-1]:
            logits.append(lm.model(token.view(1, 1), past_key_values=past).logits[0, -1])
        stored = session.kv_bytes
    own = torch.stack(logits).log_softmax(-1)
    kl = (full.exp() * (full - own)).sum(-1)
    nexts = text[0, 41:, None]
    gap = (full.gather(-1, nexts) - own.gather(-1, nexts))[:, 0]
    table = found.table.query("policy == @name and document == 1")
    table = table.pivot(index="step", columns="measure", values="value")
    assert kl.max() > 1e-3
    np.testing.assert_allclose(table["kl"], kl, atol=1e-4)
    np.testing.assert_allclose(table["nll_gap"], gap, atol=1e-3)
    assert table["kv_bytes"].iloc[-1] == stored


def test_a_prompt_needs_something_behind_it(tiny):
    with pytest.raises(KvlabError, match="a prompt of 20 tokens and a response of two at least do not fit into 21"):
        responses.teacher_forced(tiny(), prompt(21), 20, {})


def test_starts_are_as_long_as_asked_or_refused(lm):
    ids = responses.starts(lm, ["sotu/1962", "sotu/1975"], 30)
    assert ids.shape == (2, 30) and ids[0].tolist() != ids[1].tolist()
    with pytest.raises(KvlabError, match="sotu/1962 has [0-9]+ tokens, and 1000000 are asked for"):
        responses.starts(lm, ["sotu/1962"], 10**6)


# --- cache sizes ---


def counted(method: str, prompt_tokens: int, response: int, budget: int) -> int:
    """What one KV head holds, token by token, as section 5 describes the methods."""
    held = list(range(prompt_tokens))
    if method == "snapkv":
        held = held[:budget]
    for token in range(prompt_tokens, prompt_tokens + response):
        held.append(token)
        while method in ("h2o", "morphkv") and len(held) > budget:
            held.pop(0)
    return len(held)


@pytest.mark.parametrize("method", sizes.METHODS)
def test_entries_are_what_counting_gives(method):
    for given in ((5, 3, 10), (5, 30, 10), (40, 1, 10), (40, 30, 10), (10, 1, 10)):
        assert entries(method, *given) == counted(method, *given)
        assert entries(method, *given, sets=4) == 4 * counted(method, *given) or method in ("full", "morphkv")


def test_an_unknown_method_has_no_size():
    with pytest.raises(KvlabError, match="'quest' is none of full, snapkv, h2o, morphkv"):
        entries("quest", 1, 1, 1)


@pytest.mark.parametrize("shape", ["tiny-llama-gqa", "tiny-llama-mqa", "tiny-phi3"])
@torch.inference_mode()
def test_predicted_bytes_are_those_of_tensors(tiny, shape):
    """A live run on a tiny model, step by step: what its stores hold is what the formula says."""
    lm, ids, (budget, window) = tiny(shape), prompt(50), (16, 4)
    model = sizes.geometry(lm.model.config)
    for name, one in responses.writing(budget, window).items():
        sets = model.group if name == "snapkv" else 1
        with kvlab.compress(lm.model, one) as session:
            past = lm.model(ids[:, :30], use_cache=True).past_key_values
            for step, token in enumerate(ids[0, 30:], 1):
                lm.model(token.view(1, 1), past_key_values=past)
                given = (model, name, 30, step, budget, window, sets)
                assert session.kv_bytes == stored_bytes(*given, score_bytes=0)
                assert session.kv_bytes + session.aux_bytes == stored_bytes(*given)


@pytest.mark.parametrize(("name", "kib"), [("Llama", 128), ("Mistral", 128), ("Phi4", 200), ("Qwen", 56)])
def test_a_token_of_the_papers_models_takes_what_is_known(name, kib):
    model = sizes.paper_models()[name]
    assert stored_bytes(model, "full", 0, 1, 0, element=2) == kib * 1024


def test_measured_bytes_meet_the_formula(tiny_traces):
    cuts = [windows.continuation(t, 30, 90, accumulate=True) for t in tiny_traces]
    found = responses.along_a_response(cuts, 24, 4)
    checked = sizes.against_formula(found.table, Geometry(2, 4, 2, 16), 24, 4)
    assert checked.metrics["sizes/deviation"] < 1e-6
    growth = {name: checked.metrics[f"growth/{name}"] for name in ("full", "snapkv", "h2o", "morphkv")}
    assert growth == pytest.approx({"full": 1, "snapkv": 2, "h2o": 0, "morphkv": 0}, abs=1e-6)
    wrong = sizes.against_formula(found.table, Geometry(2, 4, 2, 16), 24, 5)
    assert wrong.metrics["sizes/deviation"] > 0.01, "a window of another size would be seen"


def test_printed_sizes_by_hand():
    found = sizes.printed_sizes()
    assert sizes.implied_length("longwriter") == 600 / 0.25
    assert found.metrics["relative_size/longwriter/h2o"] == pytest.approx(0.25 * (4 + 4 + 4 + 7) / 4)
    assert found.metrics["relative_size/longgenbench/snapkv"] == pytest.approx((4 + 4 + 7) / 3)
    assert found.metrics["relative_size/longgenbench/h2o"] == pytest.approx(0.55 * (4 + 4 + 7) / 3, rel=1e-4)
    rows = 200 / (2 * 128)  # weights for each entry, beside the numbers of its key and value
    assert found.metrics["relative_size/longgenbench/morphkv_with_rows"] == pytest.approx(0.55 * (1 + rows), rel=1e-4)
    answer = (3 * 512 + 4 * 128 + 2 * 64 + 6 * 32) / 15  # the longest answers of table 3's tasks
    snapkv = 4 * (1024 + answer) / (2000 / 0.15)
    assert found.metrics["relative_size/longbench/snapkv"] == pytest.approx(snapkv, rel=1e-3)
    savings = [1 - 1 / g for g in (4, 4, 4, 7, 4, 4, 7)]
    assert found.metrics["saving/long_response/h2o"] == pytest.approx(np.mean(savings))


def test_sizes_over_lengths():
    table = sizes.over_lengths("Qwen", 2, [100, 1000]).set_index(["method", "tokens"])["gigabytes"]
    token = 2 * 56 * 1024 / 1e9
    assert table["full", 1000] == pytest.approx(1000 * token) and table["snapkv", 1000] == pytest.approx(7000 * token)
    assert table["h2o", 100] == pytest.approx(700 * token) and table["h2o", 1000] == pytest.approx(4200 * token)
    assert table["morphkv", 1000] == pytest.approx(600 * token)


# --- the paper's tables ---


def test_the_printed_tables_by_hand():
    found = printed.long_responses().metrics
    assert found["table2/gain_over_snapkv"] == pytest.approx((1 / 44 + 3 / 49 + 8 / 39) / 3)
    assert found["table2/gain_over_h2o"] == pytest.approx((1 / 44 + 2 / 50 + 5 / 42) / 3)
    assert found["table1/gain_over_snapkv"] == pytest.approx((1.8 / 67.7 + 0 + 0.9 / 63.8 - 3.5 / 68.4) / 4)
    assert found["table1/gain_over_snapkv/Mistral"] == 0
    assert found["table1/gain_over_snapkv/others"] == pytest.approx((1.8 / 67.7 + 0 + 0.9 / 63.8) / 3)
    assert found["table1/below_snapkv/Qwen"] == pytest.approx(3.5 / 68.4)
    assert found["table1/snapkv_from_full"] == pytest.approx((1.2 / 66.5 + 0.2 / 81.3 + 0.9 / 62.9 + 2.2 / 66.2) / 4)


def test_two_tasks_turn_table_3():
    found = printed.long_contexts()
    llama = [-1.1, 0.5, 1.0, 1.0, 0.3, 1.2, 0.0, -0.3, -0.1, -0.6, 0.2, 0.5, 0.0, -0.2, 1.0]
    assert found.metrics["table3/gain/Llama"] == pytest.approx(np.mean(llama))
    assert found.metrics["table3/gain_with_omitted/Llama"] == pytest.approx(np.mean([*llama, -15.5, -6.0]))
    assert found.metrics["table3/gain/Llama"] > 0 > found.metrics["table3/gain_with_omitted/Llama"]
    assert found.metrics["table3/share_not_worse"] == pytest.approx(31 / 45)
    assert found.metrics["table3/share_not_worse/Llama"] == pytest.approx(sum(gain >= 0 for gain in llama) / 15)
    assert found.metrics["table3/share_not_worse_with_omitted/Llama"] == pytest.approx(10 / 17)
    low, high = found.intervals["table3/share_not_worse"]
    assert low < 31 / 45 < high
    assert len(found.table) == 45 + 2 and found.table["printed"].sum() == 45


def test_table_4s_rows_say_the_opposite_of_its_text():
    found = printed.fusions()
    rows = found.table.query("table == 'table4'").set_index("what")["gain"]
    assert rows["qms"] == pytest.approx(0.6 / 22.9) and rows["trec"] == pytest.approx(-3 / 49) and len(rows) == 17
    assert found.metrics["table4/max_over_sum"] == pytest.approx(rows.mean()) and rows.mean() < 0
    assert found.metrics["table5/sum_over_max"] > 0


def test_predictions_are_scored_where_there_are_any(tmp_path):
    """Two answers, one right and one with half of its words: an F1 of 1 and of 2/3."""
    rows = [
        {"pred": "green boats", "answers": ["green boats"], "all_classes": None},
        {"pred": "green", "answers": ["green boats"], "all_classes": None},
    ]
    path = tmp_path / f"{printed.PREFIX}qasper.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = printed.rescored(tmp_path)
    table = found.table.set_index("task")
    assert table.loc["qasper", "rescored"] == 83.33 and table["rescored"].notna().sum() == 1
    assert found.metrics["table3/rescored_from_stored"] == pytest.approx(83.33 - 11.7)
    assert found.metrics["table3/printed_from_predictions"] == pytest.approx(83.33 - 11.7)


def test_without_predictions_the_stored_scores_are_compared():
    found = printed.rescored(None)
    assert found.table["rescored"].isna().all() and set(found.metrics) == {"table3/printed_from_predictions"}
    assert found.metrics["table3/printed_from_predictions"] == pytest.approx(0.04)


@pytest.mark.skipif(not PREDICTIONS.is_dir(), reason="the authors' predictions are not at hand")
def test_the_authors_predictions_give_the_stored_scores(tmp_path):
    """All but multi_news, whose ROUGE takes long and is checked with the scorers."""
    for path in PREDICTIONS.glob("*.jsonl"):
        if "multi_news" not in path.name:
            (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    found = printed.rescored(tmp_path)
    assert found.table["rescored"].notna().sum() == 5
    assert found.metrics["table3/rescored_from_stored"] < 0.005


def test_the_folder_of_predictions(tmp_path, monkeypatch):
    monkeypatch.delenv(printed.FOLDER, raising=False)
    assert printed.predictions_folder() is None
    monkeypatch.setenv(printed.FOLDER, str(tmp_path))
    assert printed.predictions_folder() == tmp_path
    with pytest.raises(KvlabError, match="there is no folder of predictions at nowhere"):
        printed.predictions_folder("nowhere")


# --- claims ---


def test_every_claim_of_the_responses_is_about_something_found(tiny_traces, inside):
    cuts = [windows.continuation(t, 30, 90, accumulate=True) for t in tiny_traces]
    along = responses.along_a_response(cuts, 24, 4)
    found = [
        responses.small_budgets(tiny_traces, (0.01, 0.03, 0.07), 1),
        along,
        inside[-1],
        sizes.against_formula(along.table, Geometry(2, 4, 2, 16), 24, 4),
        sizes.printed_sizes(),
        printed.long_responses(),
        printed.long_contexts(),
        printed.rescored(None),
    ]
    names = {name for one in found for name in one.metrics}
    names |= {f"{name}/{end}" for one in found for name in one.intervals for end in ("low", "high")}
    asked = [claim for claim in papers.claims(experiment="morphkv_long_responses") if claim.paper == "morphkv"]
    missing = {claim.id: sorted(claim.metrics - names) for claim in asked if claim.metrics - names}
    assert len(asked) > 20 and not missing


def test_the_papers_own_numbers_hold_where_its_claims_print_them():
    """Each printed effect, taken as if it had been measured with a narrow interval, meets the size that is asked."""
    for claim in papers.claims(paper="morphkv"):
        if claim.paper_value is None or "gain" not in claim.metric:
            continue
        value = claim.paper_value
        ends = {f"{claim.metric}/low": 0.99 * value, f"{claim.metric}/high": 1.01 * value}
        assert papers.judge(claim, {claim.metric: value} | ends).verdict == "holds", claim.id
