"""The full model's continuation through a compressed cache, and the closed loop beside the open one."""

from __future__ import annotations

import math

import pandas
import pytest
import torch
from support.oracles import gates
from support.refusals import one_sentence
from support.spread import students
from support.tensors import sets

import kvlab
from kvlab.attribution.oracle import oracle_attention
from kvlab.errors import KvlabError
from kvlab.live.fidelity import closed_against_open, fidelity
from kvlab.methods import has_budget, policies

BUDGETS = {name: {"budget": 36} if has_budget(name) else {} for name in policies()}


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 200, (60,), generator=torch.Generator().manual_seed(7)).tolist()


def test_a_full_cache_is_faithful(tiny, ids):
    lm = tiny("tiny-llama-gqa")
    found = fidelity(lm, "full", ids, new_tokens=12).summary
    assert found["kl"] == pytest.approx(0, abs=1e-5) and found["agreement"] == 1
    assert found["perplexity_ratio"] == pytest.approx(1, abs=1e-4)


def test_nll_is_that_of_the_models_own_forward_pass(tiny, ids):
    """Held against one teacher-forced pass over prompt and continuation, without any cache."""
    lm = tiny("tiny-qwen3")
    found = fidelity(lm, kvlab.policy("random", budget=20), ids, new_tokens=10)
    response = kvlab.capture(lm, ids, 10, pseudo=()).ids[60:]
    with torch.inference_mode():
        logits = lm.model(torch.cat([torch.tensor(ids), response])[None]).logits[0, 59:-1]
    expected = torch.nn.functional.cross_entropy(logits, response, reduction="none")
    nll = found.table[found.table["measure"] == "nll_full"]["value"]
    assert nll.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    assert found.summary["perplexity_ratio"] == pytest.approx(
        math.exp(found.summary["nll"] - found.summary["nll_full"]), rel=1e-6
    )
    # The first token is predicted before anything is compressed.
    first = found.table[(found.table["measure"] == "kl") & (found.table["step"] == 1)]["value"]
    assert first.item() == pytest.approx(0, abs=1e-6) and found.summary["kl"] > 1e-4


def test_a_given_response_is_followed_instead_of_the_models_own(tiny, ids):
    """Its own greedy response, given, changes nothing; another text is told by one forward pass over it."""
    lm, one = tiny("tiny-llama-gqa"), kvlab.policy("random", budget=20)
    own = kvlab.capture(lm, ids, 10, pseudo=()).ids[60:]
    greedy = fidelity(lm, one, ids, new_tokens=10).table
    pandas.testing.assert_frame_equal(fidelity(lm, one, ids, response=own).table, greedy)
    other = own.roll(3).tolist()
    found = fidelity(lm, one, ids, new_tokens=2, response=other).table
    with torch.inference_mode():
        logits = lm.model(torch.tensor([ids + other])).logits[0, 59:-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(other), reduction="none")
    assert found[found["measure"] == "nll_full"]["value"].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_intervals_are_over_documents_of_means_over_steps(tiny, ids):
    lm = tiny("tiny-llama-gqa")
    found = fidelity(lm, ["random", "full"], [ids, ids[5:], ids[9:]], budgets=[20], new_tokens=6)
    row = found.intervals.set_index(["policy", "measure"]).loc[("random", "kl")]
    means = [
        fidelity(lm, kvlab.policy("random", budget=20), one, new_tokens=6).summary["kl"]
        for one in (ids, ids[5:], ids[9:])
    ]
    assert row.documents == 3 and row.budget == 20 and row.value == pytest.approx(sum(means) / 3, rel=1e-4)
    assert (row.low, row.high) == pytest.approx(students(means), rel=1e-3)
    assert (
        len(found.intervals) == 2 * 4
        and found.intervals.query("policy == 'full' and measure == 'kl'").high.item() < 1e-5
    )


def test_a_response_is_of_one_document_and_has_two_tokens(tiny, ids):
    lm = tiny("tiny-llama-gqa")
    with one_sentence("a response goes on from one document"):
        fidelity(lm, "full", [ids, ids[5:]], response=[3, 4, 5])
    with one_sentence("two are needed"):
        fidelity(lm, "full", ids, response=[3])


def test_several_documents_have_an_interval(tiny, ids):
    found = fidelity(tiny("tiny-llama-gqa"), kvlab.policy("random", budget=16), [ids, ids[5:], ids[::-1]], 8)
    low, high = found.intervals()["kl"]
    assert low < found.summary["kl"] < high
    assert found.table["document"].nunique() == 3


def test_several_policies_share_the_full_run_and_say_how_much_of_the_gap_they_close(tiny, ids):
    lm, texts = gates.sharpened(tiny("tiny-llama-gqa")), [ids, ids[9:]]
    found = fidelity(lm, ["random", "keydiff", "oracle_attention", "full"], texts, 8, budgets=[16])
    for one in found[:2]:
        pandas.testing.assert_frame_equal(one.table, fidelity(lm, one.policy, texts, 8).table)
    # The oracle is what its function gives for the full model's own continuation, whose last token is never fed.
    for index, text in enumerate(texts):
        trace = kvlab.capture(lm, text, 7, pseudo=())
        alone = fidelity(lm, oracle_attention(trace, 16), text, 8).table
        row = found[2].table[index * len(alone) : (index + 1) * len(alone)]
        assert row["value"].tolist() == alone["value"].tolist()
    random, keydiff, oracle, full = found.summary.to_dict("records")
    assert full["kl"] < oracle["kl"] < random["kl"]
    for loss in ("kl", "nll"):
        closed = (random[loss] - keydiff[loss]) / (random[loss] - oracle[loss])
        assert keydiff[f"{loss}_gap_closed"] == pytest.approx(closed)
        assert (random[f"{loss}_gap_closed"], oracle[f"{loss}_gap_closed"]) == (0, 1)
        assert math.isnan(full[f"{loss}_gap_closed"])
    assert found.table["policy"].unique().tolist() == ["random", "keydiff", "oracle_attention", "full"]
    assert len(found.table) == 4 * 2 * 8 * 4 and found.table["budget"].nunique() == 1
    assert "kl_gap_closed" not in fidelity(lm, ["random", "keydiff"], ids, 3, budgets=[16]).summary


def test_a_summary_shows_the_divergence_in_a_terminal_of_80_columns(tiny, ids, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = fidelity(tiny("tiny-llama-gqa"), ["streamingllm", "oracle_attention"], ids, 4, budgets=[16])
    header, *rows = repr(found.summary).splitlines()
    assert header.split() == ["policy", "budget", "agreement", "kl", "nll", "nll_full", "perplexity_ratio"]
    assert max(map(len, [header, *rows])) <= 80
    assert [row.split()[4] for row in rows] == [f"{one.summary['kl']:.3f}" for one in found]
    assert f"{'kl':<16} {found[0].summary['kl']:>12.3f}" in str(found[0].summary).splitlines()


def test_an_oracle_by_name_runs_alone_and_with_a_given_response(tiny, ids):
    lm, oracle = tiny("tiny-llama-gqa"), kvlab.policy("oracle_attention", budget=0.3)
    given = [9, 8, 7, 6, 5]
    trace = kvlab.capture(lm, ids, response=given[:-1], pseudo=())
    expected = fidelity(lm, oracle_attention(trace, 18), ids, response=given).table
    pandas.testing.assert_frame_equal(fidelity(lm, oracle, ids, response=given).table, expected)
    with one_sentence("at least one policy"):
        fidelity(lm, [], ids)
    with one_sentence("budgets is a list"):
        fidelity(lm, "snapkv", ids, budgets=64)


@pytest.mark.parametrize("name", policies())
def test_the_first_layer_sees_the_same_in_both_loops(tiny, ids, name):
    """At the first step, before any other token was generated, only deeper layers can tell the loops apart."""
    lm, one = tiny("tiny-llama-gqa"), kvlab.policy(name, **BUDGETS[name])
    trace = kvlab.capture(lm, ids, 3, policies=[one])
    opened = kvlab.replay(trace, one)
    probes = ["mass_lost", "output_error"]
    with kvlab.compress(lm.model, one, probes=probes, max_new_tokens=3) as session, torch.inference_mode():
        out = lm.model(torch.tensor([ids]))
        lm.model(trace.ids[60].view(1, 1), past_key_values=out.past_key_values)
    first = session.table[session.table["layer"] == 0]
    for measure in ("mass_lost", "output_error"):
        closed = first[first["measure"] == measure]["value"].tolist()
        assert closed == pytest.approx(getattr(opened, measure)[0, :, 0].tolist(), abs=1e-5)
    for layer in range(trace.n_layers):
        assert sets(session.kept_after_prefill(layer)) == sets(opened.kept(layer))


@pytest.mark.parametrize("name", policies())
def test_both_loops_are_told_apart_where_they_part(tiny, ids, name):
    loops = closed_against_open(tiny("tiny-llama-gqa"), kvlab.policy(name, **BUDGETS[name]), ids, new_tokens=20)
    assert loops.table["step"].tolist() == list(range(1, 21))
    if name == "full":
        assert loops.first_difference is None
        assert loops.table["kl"].max() < 1e-5 and loops.table["mass_lost_closed"].max() < 1e-5
    else:
        assert loops.table["kl"][0] == pytest.approx(0, abs=1e-6)
        assert loops.table["mass_lost_closed"].between(0, 1).all()
    same = loops.table["token_full"] == loops.table["token_closed"]
    assert loops.first_difference == (None if same.all() else int((~same).idxmax()) + 1)


def test_one_token_is_too_few(tiny, ids):
    with pytest.raises(KvlabError, match="two are needed"):
        fidelity(tiny("tiny-llama-gqa"), "full", ids, new_tokens=1)
