"""Speed and memory beside the full cache: ratios from clocks that are made up, and bytes counted another way. How fast
anything is, is not a matter for tests.
"""

from __future__ import annotations

import itertools

import pandas
import pytest
import torch
from support.spread import students
from transformers import DynamicCache

import kvlab
from kvlab import papers
from kvlab.analyses.speed import footprint, ratios, timings
from kvlab.bench import clock, meters, timing
from kvlab.errors import KvlabError
from kvlab.live.shared_prefill import shared_prefill

BUDGET = 24
NAMES = ("h2o", "zsmerge", "rocketkv", "streamingllm")


@pytest.fixture(scope="module")
def chosen():
    return timings.contenders(NAMES, BUDGET)


@pytest.fixture(scope="module")
def decoded(tiny, chosen):
    return timings.decoding(tiny(), chosen, [96, 48], [1, 3], steps=4, repeats=3, batched=["zsmerge"])


# --- what is measured ---


def test_every_setting_has_every_contender_in_every_round(decoded):
    cells = decoded.groupby(["length", "batch"])["policy"].apply(set).to_dict()
    assert cells == {(48, 1): {"full", *NAMES}, (96, 1): {"full", *NAMES}, (48, 3): {"full", "zsmerge"}}
    rounds = decoded.groupby(["length", "batch", "policy"])["round"].apply(sorted)
    assert all(found == [0, 1, 2] for found in rounds)
    assert (decoded[["seconds_per_step", "first_step"]] > 0).all(axis=None)


def test_rounds_alternate_their_order(chosen):
    rounds = clock.rounds(list(chosen), 2)
    assert [name for turn, name in rounds if turn == 0] == list(chosen)
    assert [name for turn, name in rounds if turn == 1] == list(chosen)[::-1]


def test_bytes_are_those_of_a_run_of_its_own(tiny, chosen, decoded):
    lm = tiny()
    ids = torch.randint(256, (1, 96), generator=torch.Generator().manual_seed(0))
    for name, method in chosen.items():
        found = decoded.query("length == 96 and batch == 1 and policy == @name")
        if method is None:
            assert found["kv_bytes"].eq((96 + 5) * 2 * 2 * 2 * 16 * 4).all()  # entries, layers, KV heads, K and V
            continue
        with kvlab.compress(lm.model, method, max_new_tokens=5) as session:
            lm.model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        for measure in ("kv_bytes", "aux_bytes", "read_bytes"):
            assert found[measure].eq(getattr(session, measure)).all(), (name, measure)
    h2o = decoded.query("length == 96 and policy == 'h2o'")["kv_bytes"]
    assert h2o.eq(BUDGET * 2 * 2 * 2 * 16 * 4).all()


def test_the_plain_cache_of_a_prefill_goes_on_like_transformers_own(tiny, chosen):
    lm = tiny()
    ids = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        own = lm.model(ids, use_cache=True)
        assert isinstance(own.past_key_values, DynamicCache)
        with shared_prefill(lm.model, [method for method in chosen.values() if method is not None]):
            prefilled = lm.model(ids, use_cache=True).past_key_values
        token = own.logits[:, -1:].argmax(-1)
        for _ in range(2):  # one prefill serves several runs
            shared = lm.model(token, past_key_values=timings.plain_cache(prefilled), use_cache=True).logits
        expected = lm.model(token, past_key_values=own.past_key_values, use_cache=True).logits
    torch.testing.assert_close(shared, expected)


def test_what_stays_is_decided_for_each_sequence_of_a_batch(tiny):
    lm, zsmerge = tiny(), kvlab.policy("zsmerge", budget=BUDGET)
    ids, _ = meters.prompt(lm, 96, 2)
    kept = []
    with torch.inference_mode():
        for rows in (ids, ids[:1], ids[1:]):
            with kvlab.compress(lm.model, zsmerge) as session:
                out = lm.model(rows, use_cache=True)
                lm.model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values)
                kept.append([session.kept_after_prefill(0, sequence) for sequence in range(len(rows))])
    (first, second), (alone,), (other,) = kept
    assert torch.equal(first, alone) and torch.equal(second, other) and not torch.equal(first, second)


def test_lengths_that_make_no_sense_are_refused(tiny, chosen):
    lm = tiny()
    with pytest.raises(KvlabError, match="at least 1"):
        timings.decoding(lm, chosen, [])
    with pytest.raises(KvlabError, match="at least 1"):
        timings.first_tokens(lm, chosen, [20], repeats=0)
    with pytest.raises(KvlabError, match="takes 2048 tokens, fewer than 2040 and 17 more"):
        timings.decoding(lm, chosen, [2040])
    assert timings.fitting(lm, [10, 2040, 2031], 16) == [10, 2031]


def test_what_does_not_fit_is_marked_and_has_no_metric(tiny, chosen, monkeypatch):
    decode = timings._decode

    def small(lm, method, *rest):
        if method is None:
            raise torch.OutOfMemoryError
        return decode(lm, method, *rest)

    monkeypatch.setattr(timings, "_decode", small)
    table = timings.decoding(tiny(), chosen, [48, 64], steps=1, repeats=2)
    assert table[table["policy"] == "full"]["seconds_per_step"].isna().all()
    assert table[table["policy"] != "full"]["seconds_per_step"].notna().all()
    found = ratios.speed_findings(table)
    assert set(found.metrics) == {f"slowdown/{name}" for name in NAMES} | {"gain_over_h2o/zsmerge"}


# --- ratios, by hand ---


def rows(times):
    """A table of `decoding` from {(policy, length, batch): seconds of each round}."""
    return pandas.DataFrame(
        [
            {
                "length": length,
                "batch": batch,
                "policy": name,
                "round": turn,
                "seconds_per_step": seconds,
                "first_step": 1.0,
                "kv_bytes": 1000 * length * batch if name == "full" else 5000 * batch,
                "aux_bytes": 0 if name == "full" else 1000 * batch,
                "read_bytes": 0,
                "peak_bytes": float("nan"),
            }
            for (name, length, batch), values in times.items()
            for turn, seconds in enumerate(values)
        ]
    )


BY_HAND = rows(
    {
        ("full", 10, 1): [1.0, 2.0],
        ("full", 40, 1): [2.0, 4.0],
        ("full", 10, 4): [3.0, 6.0],
        ("zsmerge", 10, 1): [2.0, 4.0],
        ("zsmerge", 40, 1): [1.0, 1.0],
        ("zsmerge", 10, 4): [2.0, 4.0],
        ("h2o", 10, 1): [1.0, 2.0],
        ("h2o", 40, 1): [1.5, 2.0],
    }
)


def test_gains_are_taken_round_by_round():
    found = ratios.speed_findings(BY_HAND)
    assert found.metrics == pytest.approx(
        {
            "slowdown/full": 1.0,
            "gain/zsmerge/shortest": -0.5,
            "gain/zsmerge/longest": 2.0,
            "gain_growth/zsmerge": 2.5,
            "slowdown/zsmerge": (0.5 + 0.25) / 2 - 1,
            "gain/zsmerge/largest_batch": 0.5,
            "batch_gain/zsmerge": 1.0,
            "gain/h2o/shortest": 0.0,
            "gain/h2o/longest": (4 / 3 + 2) / 2 - 1,
            "slowdown/h2o": 0.25,
            "gain_growth/h2o": (4 / 3 + 2) / 2 - 1,
            "gain_over_h2o/zsmerge": 0.75,
        }
    )
    assert found.intervals["gain/zsmerge/longest"] == pytest.approx(students((2 / 1 - 1, 4 / 1 - 1)), rel=1e-4)
    batch = found.table.query("policy == 'zsmerge' and batch == 4")
    assert batch["tokens_per_second"].tolist() == [2.0, 1.0] and batch["speedup"].tolist() == [1.5, 1.5]


def test_memory_is_that_of_weights_and_cache():
    found = ratios.memory_findings(BY_HAND, weight_bytes=60_000)
    assert found.metrics == pytest.approx(
        {
            "stored/zsmerge/longest": 0.15,
            "stored/h2o/longest": 0.15,
            "memory_saving/zsmerge/longest": 1 - 66 / 100,
            "memory_saving/h2o/longest": 1 - 66 / 100,
            "cache_beside_weights/longest": 40 / 60,
        }
    )
    batch = found.table.query("batch == 4").set_index("policy")
    assert batch.loc["full", "stored_bytes"] == 40_000 and batch.loc["zsmerge", "share"] == pytest.approx(0.6)


def first(times):
    """A table of `first_tokens` from {(policy, length): seconds of each round}."""
    return pandas.DataFrame(
        [
            {"length": length, "policy": name, "round": turn, "seconds": seconds}
            for (name, length), values in times.items()
            for turn, seconds in enumerate(values)
        ]
    )


def test_the_overhead_of_a_first_token_is_that_of_its_round():
    found = ratios.first_token_findings(
        first(
            {
                ("full", 10): [1.0, 1.0],
                ("zsmerge", 10): [9.0, 9.0],
                ("full", 40): [10.0, 20.0],
                ("zsmerge", 40): [11.0, 21.0],
            }
        )
    )
    assert found.metrics == pytest.approx({"first_token/zsmerge": (0.1 + 0.05) / 2})
    assert found.intervals["first_token/zsmerge"] == pytest.approx(students((0.05, 0.1)), rel=1e-4)


def test_pseudo_queries_stand_beside_as_many_steps_of_the_full_cache():
    times = first(
        {("full", 10): [1.0, 1.0], ("dapq", 10): [9.0, 9.0], ("full", 40): [10.0, 20.0], ("dapq", 40): [16.0, 23.0]}
    )
    assert timings.pseudo_windows(timings.contenders(["snapkv", "dapq"], 40)) == {"dapq": 32}
    found = ratios.pseudo_findings(times, BY_HAND, {"dapq": 8})
    # Steps of the full cache after 40 tokens take 2 and 4 s, so that 8 of them take 24 s.
    assert found.metrics == pytest.approx({"pseudo_share/dapq": 8 / 40, "pseudo_over_generated/dapq": 4.5 / 24})
    assert found.intervals["pseudo_over_generated/dapq"] == pytest.approx(students((6 / 24, 3 / 24)), rel=1e-4)
    assert found.table["extra"].tolist() == [6.0, 3.0]


def test_steps_that_were_not_timed_are_compared_with_nothing():
    times = first({("full", 80): [1.0, 1.0], ("dapq", 80): [2.0, 2.0]})
    assert ratios.pseudo_findings(times, BY_HAND, {"dapq": 8}).metrics == {"pseudo_share/dapq": 0.1}
    assert not ratios.pseudo_findings(times, BY_HAND, {}).metrics


def test_peaks_are_compared_within_their_round(tiny, monkeypatch):
    runs = []

    def peak(lm, subject, contender, *sizes):
        runs.append((subject.model, contender.name, *sizes))
        return {"transformers": 50, "snapkv": 100, "dapq": 110 if len(runs) < 4 else 90}[contender.name]

    monkeypatch.setattr(timing, "peak_bytes", peak)
    table = timings.peaks(tiny(), "a/model", 40, 64, 2)
    assert [name for _, name, *_ in runs] == ["transformers", "snapkv", "dapq", "dapq", "snapkv", "transformers"]
    assert {(model, *sizes) for model, _, *sizes in runs} == {("a/model", 64, 1, 1)}
    found = ratios.peak_findings(table)
    assert found.metrics == pytest.approx({"peak_over_snapkv/dapq": 0.0})
    assert found.intervals["peak_over_snapkv/dapq"] == pytest.approx(students((0.1, -0.1)), rel=1e-4)
    none = timings.peaks(tiny(), "a/model", 40, 64, 0)
    assert none.empty and not ratios.peak_findings(none).metrics and len(runs) == 6


def test_an_answer_takes_its_first_token_and_its_steps():
    found = ratios.answer_findings(first({("full", 40): [10.0, 20.0], ("zsmerge", 40): [11.0, 21.0]}), BY_HAND)
    # A first token of 15 s and of 16 s; 9 steps more, of 2 and 4 s in the two rounds, and of 1 s in both.
    saved = [1 - (16 + 9) / (15 + 18), 1 - (16 + 9) / (15 + 36)]
    assert found.metrics == pytest.approx({"answer_saved/zsmerge": sum(saved) / 2})
    assert found.intervals["answer_saved/zsmerge"] == pytest.approx(students(saved), rel=1e-4)


def test_an_answer_is_that_after_the_longest_prompt_timed_both_ways():
    """At 10 tokens the policy is slower than the full cache and at 40 it is faster; nothing was decoded at 80."""
    times = first(
        {
            ("full", 10): [1.0],
            ("zsmerge", 10): [1.0],
            ("full", 40): [4.0],
            ("zsmerge", 40): [4.0],
            ("full", 80): [9.0],
            ("zsmerge", 80): [99.0],
        }
    )
    found = ratios.answer_findings(times, BY_HAND)
    assert set(found.table["length"]) == {10, 40} and set(found.table["policy"]) == {"full", "zsmerge"}
    short = found.table.query("length == 10 and policy == 'zsmerge'")["answer_saved"]
    assert (short < 0).all() and found.metrics["answer_saved/zsmerge"] > 0


def test_first_tokens_are_timed_by_the_clock(tiny, chosen, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(clock, "busy", lambda device: float(next(ticks)))
    table = timings.first_tokens(tiny(), {name: chosen[name] for name in ("full", "zsmerge")}, [32, 64], repeats=2)
    assert len(table) == 2 * 2 * 2 and table["seconds"].eq(2.0).all()
    assert table["prompt_seconds"].eq(1.0).all() and table["step_seconds"].eq(1.0).all()


def test_points_are_means_with_intervals():
    found = ratios.speed_findings(BY_HAND)
    points = ratios.points(found.table, "speedup", ("policy", "length", "batch"))
    row = points.query("policy == 'zsmerge' and length == 40").iloc[0]
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((3.0, *students((2.0, 4.0))), rel=1e-4) and len(
        points
    ) == 8


# --- claims ---


def test_the_metrics_that_claims_ask_for_are_there(decoded, tiny):
    have = set(ratios.speed_findings(decoded).metrics) | set(ratios.memory_findings(decoded, 1).metrics)
    have |= {"first_token/compilerkv", "answer_saved/compilerkv", "first_token/dapq"}
    have |= {"pseudo_share/dapq", "pseudo_over_generated/dapq", "peak_over_snapkv/dapq"}
    have |= {name.replace("rocketkv", "compilerkv") for name in have}
    for paper, figure, read in (
        ("zsmerge", "memory", footprint.zsmerge_memory),
        ("zsmerge", "table4", footprint.zsmerge_workloads),
        ("rocketkv", "figure5", footprint.rocketkv_saving),
        ("compilerkv", "tableA1", footprint.compilerkv_table_a1),
    ):
        have |= set(read(papers.figure(paper, figure)).metrics)
    have |= set(footprint.zsmerge_workloads(papers.figure("zsmerge", "table1"), "table1").metrics)
    asked = {name for claim in papers.claims(experiment="speed_and_memory") for name in claim.metrics}
    assert len(asked) > 20
    assert not {name for name in asked if not name.endswith(("/low", "/high"))} - have
