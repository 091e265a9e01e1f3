"""MorphKV over long responses: windows after short prompts, groups, rivals, and facts fact early and asked for late."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.live_runs import prompt
from support.spread import students

import kvlab
from kvlab.analyses.morphkv import facts, groups, responses, windows
from kvlab.errors import KvlabError
from kvlab.replays.run import replay


@pytest.fixture(scope="module")
def cuts(random_traces):
    return [windows.continuation(t, 20, 100, accumulate=True) for t in random_traces]


def test_a_wider_window_is_compared_after_a_prompt_that_fits(cuts):
    found = windows.wider_window(cuts, [10, 2], 24)
    lost = {
        window: np.array(
            [
                float(kvlab.replay(t, kvlab.policy("morphkv", budget=24, window=window, fusion="max")).mass_lost.mean())
                for t in cuts
            ]
        )
        for window in (2, 10)
    }
    gains = 1 - lost[10] / lost[2]
    assert found.metrics["gain/mass_lost/generating/narrow_to_wide"] == pytest.approx(gains.mean(), abs=1e-6)
    assert found.intervals["gain/mass_lost/generating/narrow_to_wide"] == pytest.approx(students(gains), rel=1e-3)
    assert set(found.metrics) == {f"gain/{measure}/generating/narrow_to_wide" for measure in windows.MEASURES}


# --- section 3.3 ---


def test_a_trace_without_groups_has_the_same_attention(cuts):
    apart = groups.ungrouped(cuts[0])
    assert apart.kv_heads == apart.heads == 2 * cuts[0].kv_heads and apart.document == cuts[0].document
    policies = [kvlab.policy("streamingllm", budget=24)] * 2
    lost, again = (kvlab.replay(t, p).mass_lost for t, p in zip((cuts[0], apart), policies, strict=True))
    torch.testing.assert_close(lost, again, atol=1e-5, rtol=1e-5)


def test_a_set_for_each_query_head_follows_that_heads_own_attention(cuts):
    """By a loop over the heads of one group: each alone is a model with one head."""
    found = groups.section_3_3(cuts[:1], 4, 24)
    rows = found.table.query("variant == 'own_sets' and measure == 'mass_lost'").set_index("step")["value"]
    trace, alone = cuts[0], []
    for head in range(trace.heads):
        group = head * trace.kv_heads // trace.heads
        tensors = trace.queries[:, [head]], trace.keys[:, [group]], trace.values[:, [group]]
        single = kvlab.Trace.from_tensors(*tensors, trace.prompt_length, scaling=trace.scaling)
        alone.append(kvlab.replay(single, kvlab.policy("morphkv", budget=24, window=4)).mass_lost.mean((0, 1)))
    np.testing.assert_allclose(rows, torch.stack(alone).mean(0), atol=1e-5)


def test_gains_over_the_papers_aggregation_by_hand(cuts):
    found = groups.section_3_3(cuts, 4, 24)
    assert set(found.table["variant"]) == {"shared", "own_sets", "llama_code", "other_code"}
    errors = {
        name: np.array(
            [
                kvlab.replay(t, kvlab.policy("morphkv", budget=24, window=4, **more)).summary["output_error"]
                for t in cuts
            ]
        )
        for name, more in {"shared": {}, "code": {"aggregation": "logits", "renormalise": True}}.items()
    }
    gain = (1 - errors["code"] / errors["shared"]).mean()
    assert found.metrics["groups/gain/output_error/llama_code"] == pytest.approx(gain, abs=1e-5)
    assert "groups/gain/mass_lost/shared" not in found.metrics


# --- figure 3 ---


def test_the_share_of_early_entries_by_a_loop(cuts):
    result = replay(cuts[0], kvlab.policy("h2o", budget=24))
    shares = []
    for layer in range(2):
        for head in result.stored(layer, 100).tolist():
            stored = [position for position in head if position >= 0]
            shares.append(sum(position < 30 for position in stored) / len(stored))
    assert responses.early_share(result) == pytest.approx(np.mean(shares))
    assert responses.early_share(replay(cuts[0], kvlab.policy("full"))) == pytest.approx(0.25)


def test_rivals_lose_and_stay_as_large_as_morphkv(cuts):
    found = responses.along_a_response(cuts, 24, 4)
    assert {"keyformer", "scissorhands", "streamingllm", "random_response"} <= set(found.table["policy"])
    lost = found.table.query("measure == 'mass_lost'").groupby("policy")["value"].mean()
    assert found.metrics["behind/mass_lost/keyformer"] == pytest.approx(lost["keyformer"] - lost["morphkv"], abs=1e-6)
    earlier = [
        responses.early_share(replay(t, kvlab.policy("h2o", budget=24)))
        - responses.early_share(replay(t, kvlab.policy("morphkv", budget=24, window=4)))
        for t in cuts
    ]
    assert found.metrics["earlier/h2o"] == pytest.approx(np.mean(earlier), abs=1e-6)
    # The prompt of 20 tokens lies in the first quarter of 120, and 4 of the response's 100 stay.
    assert 20 / 24 < found.metrics["early/random_response"] + 1e-6 < 22 / 24
    # Four sinks of 120 tokens are all that StreamingLLM keeps of the first quarter.
    assert found.metrics["early/streamingllm"] == pytest.approx(4 / 24)


# --- choices at small budgets ---


def test_snapkv_can_choose_little_where_its_window_is_as_large_as_its_entries(random_traces):
    """Of 120 tokens a tenth is 12 entries, six for each of two query heads, of which a window of five leaves one."""
    found = responses.small_budgets(random_traces, (0.1, 0.3), window=5)
    free = {name: found.metrics[f"choices/{name}/0.10"] for name in ("morphkv", "snapkv", "snapkv_choosing")}
    assert free == {"morphkv": 7, "snapkv": 1, "snapkv_choosing": 4}
    assert found.metrics["choices/snapkv/0.30"] == 13
    assert "behind/mass_lost/snapkv_choosing/0.10" in found.metrics


# --- facts ---


@pytest.fixture(scope="module")
def texts(lm):
    return facts.plant_facts(lm, ["sotu/1962", "squad/Oxygen"], 100)


def test_a_fact_stands_at_the_beginning_and_is_asked_for_at_the_end(lm, texts):
    assert texts.ids.shape == (2, 100)
    for row, (fact, answers, begins) in enumerate(zip(texts.fact, texts.answers, texts.question, strict=True)):
        ids = texts.ids[row]
        code = lm.tokenizer.decode(ids[fact.start : fact.stop]).strip()
        assert code.isdigit() and len(code) == facts.DIGITS
        assert ids[-answers:].tolist() == ids[fact.start : fact.stop].tolist()
        assert lm.tokenizer.decode(ids[begins:]).strip().startswith("Question: what is the code of the")
        assert fact.stop < 30 < begins
    codes = [texts.ids[row, fact.start : fact.stop].tolist() for row, fact in enumerate(texts.fact)]
    assert codes[0] != codes[1]


@pytest.fixture(scope="module")
def made_up(tiny):
    """A tiny model, and two random texts of 100 tokens with a code of four at 5 and at 7, asked for at their ends."""
    ids = prompt(100, 3, rows=2)
    fact = [range(5, 9), range(7, 11)]
    for row, places in enumerate(fact):
        ids[row, -4:] = ids[row, places.start : places.stop]
    return tiny(), facts.PlantedFacts(["a", "b"], ids, fact, [4, 4], [88, 90])


def test_facts_that_are_kept_cost_nothing_and_what_is_gone_is_not_stored(made_up):
    lm, texts = made_up
    policies = {
        "morphkv": kvlab.policy("morphkv", budget=150, window=4),
        "morphkv_narrow": kvlab.policy("morphkv", budget=24, window=1, fusion="max"),
        "h2o": kvlab.policy("streamingllm", budget=24),  # under its name a method that surely loses the code
    }
    found = facts.measure(lm, texts, 30, policies)
    table = found.table.set_index(["policy", "document"])
    assert table.loc["morphkv", "nats"].abs().max() < 1e-3 and (table.loc["morphkv", "stored"] == 1).all()
    assert (table.loc["h2o", "stored"] == 0).all() and table.loc["h2o", "nats"].abs().max() > 1e-3
    nats = table["nats"].unstack("policy")
    assert found.metrics["facts/nats/h2o_less_wide"] == pytest.approx((nats["h2o"] - nats["morphkv"]).mean())
    assert found.metrics["facts/nats/narrow_less_wide"] == pytest.approx(
        (nats["morphkv_narrow"] - nats["morphkv"]).mean()
    )
    stored = table["stored"].unstack("policy")
    assert found.metrics["facts/stored/wide_less_narrow"] == pytest.approx((1 - stored["morphkv_narrow"]).mean())


@torch.inference_mode()
def test_what_is_lost_of_a_code_is_what_its_tokens_lose(made_up):
    """By one pass over the whole text with the full cache, and by a session that is stepped alone."""
    lm, texts = made_up
    narrow = kvlab.policy("morphkv", budget=24, window=2, fusion="max")
    asked = facts.measure(lm, texts, 30, {"morphkv": narrow, "morphkv_narrow": narrow})
    ids, logits, stored = texts.ids[1], [], []
    full = lm.model(ids[None]).logits[0].log_softmax(-1)
    with kvlab.compress(lm.model, narrow) as session:
        past = lm.model(ids[None, :30], use_cache=True).past_key_values
        for position, token in enumerate(ids[30:-1], 31):
            logits.append(lm.model(token.view(1, 1), past_key_values=past).logits[0, -1])
            if position == 90:
                stored = [set(head) & {7, 8, 9, 10} for layer in range(2) for head in session.kept(layer).tolist()]
    own = torch.stack(logits)[-4:].log_softmax(-1)
    right = ids[-4:, None]
    both = [
        -float(lm.model(text[None]).logits[0, -5:-1].log_softmax(-1).gather(-1, text[-4:, None]).mean())
        for text in texts.ids
    ]
    assert asked.metrics["facts/full_nats"] == pytest.approx(np.mean(both), abs=1e-4)
    expected = (full[-5:-1].gather(-1, right) - own.gather(-1, right)).mean()
    row = asked.table.set_index(["policy", "document"]).loc[("morphkv", "b")]
    assert row["nats"] == pytest.approx(float(expected), abs=1e-3)
    assert row["stored"] == pytest.approx(np.mean([len(kept) / 4 for kept in stored]))


def test_a_prompt_that_ends_before_the_fact_is_refused(lm, made_up):
    with pytest.raises(KvlabError, match="a prompt of 8 tokens must end between the fact and its question"):
        facts.measure(*made_up, 8, {})
    with pytest.raises(KvlabError, match="tokens, and 999[0-9]+ are asked for between a fact and its question"):
        facts.plant_facts(lm, ["sotu/1962"], 10**6)
