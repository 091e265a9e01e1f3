"""Every policy, trace and session does on a GPU what it does on the CPU, with its numbers and its positions.

The GPU is a pretended one, which computes like the CPU and mixes with it as little as a real one.
"""

from __future__ import annotations

import re

import pytest
import torch
from support import pretend_gpu
from support.both_devices import NAMES, PROBES, TINY, captured, close, on_gpu_like, same_tables
from support.live_runs import ONE_TURN, generate, left_padded, prompt, small

import kvlab
from kvlab.analyses import exploring, first_look
from kvlab.analyses.rocketkv import budgets
from kvlab.analyses.together import storing
from kvlab.inputs import models
from kvlab.instruments.probes import QuerySimilarity
from kvlab.live.shared_prefill import shared_prefill
from kvlab.methods._base.lookup import DecisionTables
from kvlab.traces import shared

pytestmark = pytest.mark.filterwarnings("ignore:(duoattention|compilerkv)")


@pytest.fixture(scope="module")
def cpu() -> models.LM:
    return models.random_lm(device="cpu", **TINY)


@pytest.fixture(scope="module")
def gpu(cpu) -> models.LM:
    with pretend_gpu.present():
        return on_gpu_like(cpu)


@pytest.fixture(scope="module")
def pairs(cpu, gpu):
    """A function that captures the same on both devices."""
    here = captured(cpu)
    with pretend_gpu.present():
        there = captured(gpu)
    return here, there


@pytest.mark.parametrize("name", NAMES)
def test_a_replay(pairs, name):
    here, there = pairs
    expected = kvlab.replay(here, small(name), probes=())
    watched = kvlab.replay(here, small(name), probes=PROBES)
    with pretend_gpu.present():
        found = kvlab.replay(there, small(name))
        probed = kvlab.replay(there, small(name), probes=PROBES)
        same_tables(found.table, expected.table)
        same_tables(probed.records.table, watched.records.table)
        for layer in range(here.n_layers):
            for step in range(here.steps + 1):
                assert found.kept(layer, step).tolist() == expected.kept(layer, step).tolist()
                assert found.stored(layer, step).tolist() == expected.stored(layer, step).tolist()


def two_turns(lm: models.LM, one: kvlab.Policy, turns: str, reference: kvlab.Trace):
    """Two prompts of unequal length answered greedily, then a second turn by sampling, each seen by every probe."""
    ids, mask = (x.to(lm.device) for x in left_padded(prompt(60)[0], prompt(44, 1)[0]))
    session = kvlab.compress(lm.model, one, [*PROBES, QuerySimilarity(reference)], turns=turns, max_new_tokens=12)
    with session:
        first = generate(lm.model, ids, 6, attention_mask=mask)
        after = [session.kept_after_prefill(layer, row).tolist() for layer in range(2) for row in range(2)]
        longer = torch.cat([first.sequences, prompt(9, 2, rows=2).to(lm.device)], 1)
        whole = torch.cat([mask, mask.new_ones(2, longer.shape[1] - mask.shape[1])], 1)
        torch.manual_seed(7)
        second = generate(
            lm.model, longer, 6, past_key_values=first.past_key_values, attention_mask=whole, do_sample=True
        )
    kept = [session.kept(layer, row).tolist() for layer in range(2) for row in range(2)]
    read = [session.records.positions(layer, step).tolist() for layer in range(2) for step in range(1, 6)]
    return session, second.sequences.tolist(), (after, kept, read)


@pytest.mark.parametrize(
    "name, turns",
    [
        *((name, "leave" if name in ONE_TURN else "recompress") for name in NAMES),
        ("morphkv", "leave"),
    ],
)
def test_a_live_run(cpu, gpu, pairs, name, turns):
    expected, tokens, sets = two_turns(cpu, small(name), turns, pairs[0])
    with pretend_gpu.present():
        found, others, same = two_turns(gpu, small(name), turns, pairs[1])
        assert others == tokens and same == sets
        same_tables(found.table, expected.table)
        for size in ("kv_bytes", "aux_bytes", "allocated_bytes", "read_bytes"):
            assert getattr(found, size) == getattr(expected, size)


def test_a_trace_lies_where_it_is_asked_to(gpu, pairs, tmp_path):
    expected, there = pairs
    ids = prompt(60)
    with pretend_gpu.present() as device:
        assert there.device == device and there.ids.device.type == "cpu"
        loaded = kvlab.Trace.load(there.save(tmp_path / "there.safetensors"))
        back = kvlab.Trace.load(tmp_path / "there.safetensors", device="pretend")
        assert (loaded.device.type, back.device) == ("cpu", device) and there.to(device) is there
        for one in (loaded, back, there):
            assert one.signature == expected.signature and one.pseudo.keys() == expected.pseudo.keys()
            for name, tensor in one._tensors().items():
                close(tensor, expected._tensors()[name])
        kept = {keep: kvlab.capture(gpu, ids, 4, keep=keep) for keep in ("device", "cpu", "pinned")}
        places = {keep: (one.device.type, one.keys.is_pinned()) for keep, one in kept.items()}
        assert places == {"device": ("pretend", False), "cpu": ("cpu", False), "pinned": ("cpu", True)}
        for one in [*kept.values(), kept["pinned"].to(device), *kvlab.capture(gpu, [ids, ids], 4, keep="cpu")]:
            close(one.queries, kept["cpu"].queries)
            summary = kvlab.replay(one, small("snapkv")).summary
            assert summary == pytest.approx(kvlab.replay(kept["device"], small("snapkv")).summary, abs=1e-3)
        with pytest.raises(kvlab.KvlabError, match="pinned memory is the CPU's"):
            there.to(device, pinned=True)
    with pytest.raises(kvlab.KvlabError, match="keep='disk' is none of 'device', 'cpu', 'pinned'"):
        kvlab.capture(gpu, ids, keep="disk")
    with pytest.raises(kvlab.KvlabError, match="torch finds none here; leave pinned out"):
        expected.to("cpu", pinned=True)
    with pytest.raises(kvlab.KvlabError, match="device 'cuda' was asked for, but torch finds no GPU here"):
        expected.to("cuda")


def test_a_long_prompt_is_captured_in_chunks_and_into_a_file(cpu, gpu, tmp_path):
    asked = dict(chunk=16, accumulate=True, policies=["kvzip"])
    expected = kvlab.capture(cpu, prompt(60), 4, into=tmp_path / "here", **asked)
    with pretend_gpu.present():
        for keep, place in (("device", "pretend"), ("cpu", "cpu")):
            found = kvlab.capture(gpu, prompt(60), 4, into=tmp_path / "there", keep=keep, **asked)
            assert found.device.type == place
            for name, tensor in found._tensors().items():
                close(tensor, expected._tensors()[name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]


def test_a_trace_that_is_shared_lies_where_it_is_asked_to(cpu, gpu, own_home):
    with pretend_gpu.present():
        places = [
            shared.shared(gpu, prompt(40), 4, keep=keep).device.type for keep in ("cpu", "device", "pinned", "device")
        ]
        assert places == ["cpu", "pretend", "cpu", "pretend"]
        assert len(list(shared.folder().glob("*.safetensors"))) == 1
    assert shared.shared(cpu, prompt(40), 4, keep="pinned").device.type == "cpu"


def test_a_trace_lies_on_one_device():
    with pretend_gpu.present() as device:
        queries, keys = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
        with pytest.raises(kvlab.KvlabError, match="queries lies on cpu and the keys on pretend:0"):
            kvlab.Trace.from_tensors(queries, keys.to(device), keys.to(device), 3)


# Settings of a policy that take another way through it.
VARIANTS = [
    ("snapkv", dict(budget=0.3, window=6, kernel=3, sets="head")),
    ("morphkv", dict(budget=14, window=6, aggregation="logits", fusion="max", renormalise=True)),
    ("zsmerge", dict(budget=16, window=4, residual=3, initial="similarity", newcomer="displaces", scored="plain")),
    ("dapq", dict(budget=12, window=6, content="vocabulary")),
    ("rocketkv", dict(budget=12, window=6, kernel=3, split="adaptive")),
    ("random", dict(budget=1)),
]


@pytest.mark.parametrize("name, parameters", VARIANTS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_replay_the_other_way(cpu, gpu, name, parameters):
    one = kvlab.policy(name, **parameters)
    asked = dict(new_tokens=5, pseudo=[one] if one.needs.pseudo else ())
    expected = kvlab.replay(kvlab.capture(cpu, prompt(50), **asked), one)
    with pretend_gpu.present():
        found = kvlab.replay(kvlab.capture(gpu, prompt(50), **asked), one)
        same_tables(found.table, expected.table)
        assert found.kept(1).tolist() == expected.kept(1).tolist()


def test_tables_of_compilerkv(cpu, gpu):
    weights = [[1.0, 0.5, 2.0, 1.0], [0.2, 1.0, 1.0, 3.0]]
    risk = [[[0.8, 0.8], [0.8, 0.8]], [[0.9, 0.9], [0.9, 0.9]]]
    one = small("compilerkv").using(DecisionTables(heads=weights, risk=risk, entropy=(1.0, 4.0)))
    expected = kvlab.replay(kvlab.capture(cpu, prompt(50), 5, policies=[one]), one)
    assert (expected.kept(0) == -1).any() or expected.kept(0).shape[1] < 12, "no threshold turned a token away"
    with pretend_gpu.present():
        found = kvlab.replay(kvlab.capture(gpu, prompt(50), 5, policies=[one]), one)
        same_tables(found.table, expected.table)
        assert found.kept(0).tolist() == expected.kept(0).tolist()
        with kvlab.compress(gpu.model, one) as session:
            generate(gpu.model, prompt(50).to(gpu.device), 3)
        assert session.kept_after_prefill(1).tolist() == expected.kept(1).tolist()


def test_fidelity_and_both_loops(cpu, gpu):
    one = small("zsmerge")
    expected = kvlab.fidelity(cpu, one, [prompt(50), prompt(40, 1)], 5)
    loops = kvlab.closed_against_open(cpu, one, prompt(50), 5)
    with pretend_gpu.present():
        same_tables(kvlab.fidelity(gpu, one, [prompt(50), prompt(40, 1)], 5).table, expected.table)
        found = kvlab.closed_against_open(gpu, one, prompt(50), 5)
        assert found.first_difference == loops.first_difference
        same_tables(found.table, loops.table)


@pytest.mark.parametrize("name", ["snapkv", "h2o", "quest"])
def test_an_attribution(cpu, gpu, name):
    one, response = small(name), prompt(4, 5)[0]
    expected = kvlab.attribute(cpu, one, prompt(60), response=response, progress=False)
    with pretend_gpu.present():
        found = kvlab.attribute(gpu, one, prompt(60), response=response, progress=False)
        close(found.effects, expected.effects)
        assert found.summary == pytest.approx(expected.summary, rel=1e-3, abs=1e-3)


def test_a_divergence_from_a_trace_that_was_kept_on_the_cpu(cpu, gpu):
    def divergences(lm):
        found = storing.systems(lm, ["kvzip", "dapq"], [40], ["as_is"], [])
        trace = kvlab.capture(lm, prompt(60), 8, policies=["kvzip"], pseudo=["dapq"], keep="cpu")
        return [value for _, _, value, _ in storing._divergences(lm, trace, found)]

    expected = divergences(cpu)
    with pretend_gpu.present():
        assert divergences(gpu) == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_answers_that_go_on_as_one_batch(cpu, gpu):
    def joined(lm):
        with torch.inference_mode():
            ids, many = prompt(50).to(lm.device), [small(name) for name in ("snapkv", "h2o", "quest")]
            with shared_prefill(lm.model, many):
                prefilled = lm.model(ids, use_cache=True).past_key_values
            sessions = []
            for one in many:
                with kvlab.compress(lm.model, one, turns="leave") as session:
                    session.branch(prefilled)
                    session.end_prompt()
                sessions.append(session)
            with kvlab.compress(lm.model, "full", turns="leave") as whole:
                past = whole.join(sessions)
                past.reorder_cache(torch.arange(3, device=lm.device))
                logits = lm.model(ids[:, :1].expand(3, 1), past_key_values=past, use_cache=True).logits[:, -1]
        return logits, [session.kv_bytes for session in sessions]

    expected, sizes = joined(cpu)
    with pretend_gpu.present():
        found, same = joined(gpu)
        close(found, expected)
    assert same == sizes


def test_beams(cpu, gpu):
    def beams(lm):
        with kvlab.compress(lm.model, small("h2o"), ["mass_lost"]) as session:
            out = lm.model.generate(
                prompt(40, rows=2).to(lm.device),
                max_new_tokens=4,
                min_new_tokens=4,
                num_beams=2,
                do_sample=False,
                pad_token_id=0,
            )
        return out.tolist(), session

    expected, session = beams(cpu)
    with pretend_gpu.present():
        found, there = beams(gpu)
        assert found == expected
        same_tables(there.table, session.table)


def test_exploring(pairs):
    def pages(trace):
        made = kvlab.explore(trace, small("snapkv"), small("quest"), budgets=[24, 32])
        found = [made.html()]
        made.show(budget=32, layer=1, head=3, step=5)
        found += [made.html(), made.worst(), made.most_different()]
        made.close()
        return [re.sub(r"kvlab-[0-9a-f]+-\d+", "kvlab", page) if isinstance(page, str) else page for page in found]

    expected = pages(pairs[0])
    with pretend_gpu.present():
        assert pages(pairs[1]) == expected


def test_what_notebooks_ask_of_a_replay(pairs):
    def asked(trace):
        result, tokens = kvlab.replay(trace, small("snapkv")), [str(i) for i in range(trace.length)]
        shares = budgets.share_stored(result, 8), kvlab.replay(trace, small("snapkv"), k=8).step_recall
        return exploring.tokens_lost(trace, [result], tokens), shares, first_look.worst(result)

    expected, shares, place = asked(pairs[0])
    with pretend_gpu.present():
        found, same, there = asked(pairs[1])
        same_tables(found, expected)
        for ours, theirs in zip(same, shares, strict=True):
            close(ours, theirs)
    assert there == place


@pytest.mark.parametrize("family", ["hybrid-gpt-oss", "hybrid-gemma2", "hybrid-gemma3", "hybrid-llama4", "hybrid-lfm2"])
def test_a_hybrid_model(family):
    """Windows, chunks, convolutions, sinks and soft caps; pseudo-tokens in a padded batch among them."""
    ids, mask = left_padded(prompt(60)[0], prompt(44, 1)[0])
    dapq = small("dapq")

    def run(device):
        lm = models.random_lm(family, device="cpu", dtype="float32")
        # The other way to run experts has a kernel for true GPUs alone.
        lm.model.set_experts_implementation("eager")
        lm.model.to(device)
        trace = kvlab.capture(lm, ids[:1], 4, pseudo=[dapq], accumulate=True)
        result = kvlab.replay(trace, dapq)
        with kvlab.compress(lm.model, dapq, PROBES) as session:
            out = generate(lm.model, ids.to(lm.device), 6, attention_mask=mask.to(lm.device))
        kept = [session.kept(layer, row).tolist() for layer in lm.layout.compressed for row in range(2)]
        tables = (result.table, session.table, session.layers)
        return out.sequences.tolist(), kept, tables, session.uncompressed_bytes, trace.uncompressed_bytes

    expected = run("cpu")
    with pretend_gpu.present() as device:
        found = run(device)
    for mine, theirs in zip(found[2], expected[2], strict=True):
        same_tables(mine, theirs)
    assert found[:2] == expected[:2] and found[3:] == expected[3:]
