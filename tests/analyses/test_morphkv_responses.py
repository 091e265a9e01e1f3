"""MorphKV's small budgets and long responses: paired documents, slopes by hand, and the model fed token by token."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
from support.claims import unmeasured
from support.live_runs import prompt
from support.spread import students

import kvlab
from kvlab import papers
from kvlab.analyses.morphkv import headlines, printed, rescored, responses, sizes, windows
from kvlab.core.geometry import Geometry
from kvlab.errors import KvlabError

# --- small budgets ---


def test_methods_get_the_same_bytes_or_the_same_entries(random_traces):
    trace = random_traces[0]  # 120 tokens, two query heads for each KV head
    policies = responses.at_budget(trace, 0.2, 4)
    stored = {name: kvlab.replay(trace, method) for name, method in policies.items()}
    kept = {
        name: sum(int((replayed.kept(layer) >= 0).sum()) for layer in range(trace.n_layers))
        for name, replayed in stored.items()
    }
    assert kept["snapkv_shared"] == kept["h2o"] == kept["streamingllm"] == 24 * trace.n_layers * trace.kv_heads
    assert kept["snapkv"] == 12 * trace.n_layers * trace.heads == kept["h2o"], "half the entries for twice the sets"
    last = [stored["morphkv"].stored(layer, trace.steps) for layer in range(trace.n_layers)]
    assert sum(int((positions >= 0).sum()) for positions in last) == kept["h2o"]


def test_a_large_group_shares_the_budget_whatever_the_window(random_traces):
    """Two heads to a KV head: of 12 entries each gets six, of which a window of eight would leave nothing."""
    snapkv = responses.at_budget(random_traces[0], 0.1, 8)["snapkv"]
    assert (snapkv.budget, snapkv.window, snapkv.sets) == (6, 5, "head")
    assert responses.at_budget(random_traces[0], 0.1, 4)["snapkv"].window == 4


def test_small_budgets_pair_their_documents(random_traces):
    shares = (0.1, 0.3)
    found = responses.small_budgets(random_traces, shares, window=4)

    def lost(name: str, share: float) -> np.ndarray:
        """From the second step on: MorphKV's first reads the whole prompt."""
        losses = [kvlab.replay(t, responses.at_budget(t, share, 4)[name]).mass_lost for t in random_traces]
        assert all(float(loss[..., 0].max()) < 1e-5 for loss in losses) == (name == "morphkv")
        return np.array([float(loss[..., 1:].mean()) for loss in losses])

    ahead = lost("h2o", 0.1) - lost("morphkv", 0.1)
    assert found.metrics["behind/mass_lost/h2o/0.10"] == pytest.approx(ahead.mean(), abs=1e-6)
    assert found.intervals["behind/mass_lost/h2o/0.10"] == pytest.approx(students(ahead), rel=1e-4, abs=1e-6)
    sharper = (lost("snapkv", 0.1) - lost("snapkv", 0.3)) - (lost("morphkv", 0.1) - lost("morphkv", 0.3))
    assert found.metrics["sharper/mass_lost/snapkv"] == pytest.approx(sharper.mean(), abs=1e-6)
    for name in ("morphkv", "snapkv"):
        methods = responses.at_budget(random_traces[0], 0.3, 4)
        same_top = kvlab.replay(random_traces[0], methods[name], k=methods["morphkv"].budget).step_recall
        rows = found.table.query("measure == 'step_recall' and share == 0.3 and policy == @name")
        rows = rows[rows["document"] == random_traces[0].document].sort_values("step")
        np.testing.assert_allclose(rows["value"], same_top.mean((0, 1)), atol=1e-6)
    recall = found.table.query("measure == 'step_recall' and share == 0.3 and step > 1")
    recall = recall.groupby(["document", "policy"])["value"].mean().unstack()
    drop = ((recall["morphkv"] - recall["snapkv"]) / recall["morphkv"]).mean()
    assert found.metrics["drop/step_recall/snapkv/0.30"] == pytest.approx(drop)
    points = found.frame(responses.AT_SHARE).query("measure == 'mass_lost'")
    assert len(points) == 12 and set(points["share"]) == set(shares)
    row = found.row(responses.AT_SHARE, measure="mass_lost", policy="h2o", share=0.3)
    assert row.value == pytest.approx(lost("h2o", 0.3).mean(), abs=1e-6)


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
    assert found.intervals["slope/kl/morphkv"] == pytest.approx(students((0.03, 0.05)), rel=1e-4)
    assert found.metrics["steeper/kl/h2o"] == pytest.approx((0.07 + 0.01) / 2)
    assert found.metrics["steeper/kl/snapkv"] == pytest.approx(-0.04)
    assert found.metrics["mean/kl/h2o"] == pytest.approx(0.2 + 8e-4 * 2.5)
    assert found.metrics["behind/kl/h2o"] == pytest.approx(4e-4 * 2.5)
    bins = responses.binned(found.table, "kl", over=2)
    assert bins[bins["policy"] == "h2o"]["value"].tolist() == pytest.approx([0.2 + 8e-4 * 1.5, 0.2 + 8e-4 * 3.5])


def test_a_response_fades_where_something_is_evicted(random_traces):
    cuts = [windows.continuation(t, 10, 110, accumulate=True) for t in random_traces]
    found = responses.along_a_response(cuts, 24, 4)
    lost = found.table.query("measure == 'mass_lost'").set_index(["policy", "step"]).sort_index()["value"]
    assert lost.loc["snapkv"].max() == lost.loc["full"].max() == 0, "a budget above the prompt evicts nothing"
    for name in ("morphkv", "h2o"):
        assert lost.loc[name].loc[:15].max() < 1e-5 < lost.loc[name].loc[16:].min()
    policies = [kvlab.policy("h2o", budget=24), kvlab.policy("morphkv", budget=24, window=4)]
    slopes = np.array(
        [
            [np.polyfit(range(110), kvlab.replay(t, method).mass_lost.mean((0, 1)), 1)[0] for method in policies]
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
    with kvlab.compress(lm.model, policies[name]) as session:
        past = lm.model(text[:, :40], use_cache=True).past_key_values
        logits = [lm.model(token.view(1, 1), past_key_values=past).logits[0, -1] for token in text[0, 40:-1]]
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


def test_documents_in_several_batches_are_those_of_one(inside, monkeypatch):
    lm, ids, policies, found = inside
    seen = []
    monkeypatch.setattr(responses, "TOGETHER", 1)
    apart = responses.teacher_forced(lm, ids, 40, policies, lambda documents, step, _: seen.append((documents, step)))
    order = ["policy", "measure", "document", "step"]
    one, other = (each.table.sort_values(order, ignore_index=True) for each in (found, apart))
    pandas.testing.assert_frame_equal(one, other[one.columns], atol=1e-4)
    assert seen == [(range(row, row + 1), step) for row in (0, 1) for step in range(1, 31)]


def test_a_prompt_needs_something_behind_it(tiny):
    with pytest.raises(KvlabError, match="a prompt of 20 tokens and a response of two at least do not fit into 21"):
        responses.teacher_forced(tiny(), prompt(21), 20, {})


def test_inside_the_model_documents_go_on_behind_their_prompts(inside, monkeypatch):
    lm, ids, _, found = inside
    asked = []
    monkeypatch.setattr(responses, "starts", lambda *given: asked.append(given) or ids)
    again = responses.inside_the_model(lm, ["a", "b"], tokens=40, new_tokens=30, window=4, capacity=16)
    assert asked == [(lm, ["a", "b"], 71)] and set(again.table["policy"]) == {"snapkv", "h2o", "morphkv"}
    assert again.metrics == pytest.approx({name: found.metrics[name] for name in again.metrics}, abs=1e-6)


def test_starts_are_as_long_as_asked_or_refused(lm):
    ids = responses.starts(lm, ["sotu/1962", "sotu/1975"], 30)
    assert ids.shape == (2, 30) and ids[0].tolist() != ids[1].tolist()
    with pytest.raises(KvlabError, match=r"sotu/1962 has [0-9]+ tokens, and 1000000 are asked for"):
        responses.starts(lm, ["sotu/1962"], 10**6)


# --- claims ---


def test_every_claim_of_the_responses_is_about_something_found(random_traces, inside):
    cuts = [windows.continuation(t, 20, 90, accumulate=True) for t in random_traces]
    along = responses.along_a_response(cuts, 24, 4)
    found = [
        responses.small_budgets(random_traces, (0.01, 0.03, 0.07), 1),
        along,
        inside[-1],
        sizes.against_formula(along.table, Geometry(2, 4, 2, 16), 24, 4),
        sizes.printed_sizes(),
        printed.long_responses(),
        printed.long_contexts(),
        rescored.table_3(),
        *headlines.everything(),
    ]
    assert len(papers.claims("morphkv_long_responses", paper="morphkv")) > 20
    assert not unmeasured("morphkv_long_responses", *found, paper="morphkv")


def test_the_papers_own_numbers_hold_where_its_claims_print_them():
    """Each printed effect, taken as if it had been measured with a narrow interval, meets the size that is asked; where
    ours has another unit, no size is asked."""
    for claim in papers.claims(paper="morphkv"):
        if claim.paper_value is None or "gain" not in claim.metric:
            continue
        value = claim.paper_value
        ends = {f"{claim.metric}/low": 0.99 * value, f"{claim.metric}/high": 1.01 * value}
        ends[f"{claim.metric}/inputs"] = 0.0
        expected = "holds in direction only" if claim.size.kind == "not_compared" else "holds"
        assert papers.judge(claim, {claim.metric: value} | ends).verdict == expected, claim.id
