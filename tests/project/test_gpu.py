"""Everything that takes a model or a trace does so on a GPU, with the CPU's numbers and the CPU's positions.

The GPU is a pretended one, which computes like the CPU and mixes with it as little as a real one.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings

import pandas as pd
import pytest
import torch
from support import pretend_gpu
from support.commands import call
from support.compiling import DOCUMENTS, settings
from support.evaluating import POLICIES, Echo, wordy
from support.live_runs import ONE_TURN, SMALL, generate, left_padded, prompt

import kvlab
from kvlab import compile, evaluation
from kvlab.analyses import exploring, first_look
from kvlab.analyses.rocketkv import budgets
from kvlab.bench import memory, meters, timing
from kvlab.inputs import models
from kvlab.instruments.probes import QuerySimilarity
from kvlab.live.gather import gather
from kvlab.methods import registry
from kvlab.methods.lookup import DecisionTables
from kvlab.traces import retrieval_heads, shared
from kvlab.workbench import doctor

TINY = dict(shape="tiny-llama-gqa", dtype="float32")
PARAMETERS = SMALL | {"full": {}, "think": dict(window=8)}
NAMES = sorted(registry())
WHOLE = dict(queries="all", accumulate=True)
PROBES = ["mass_lost", "step_recall", "output_error", "entropy", "positions", "bytes"]


def on(device: str = "cpu") -> models.LM:
    """The same random weights wherever they lie."""
    lm = models.random_lm(device="cpu", **TINY)
    lm.model.to(device)
    return lm


def policy(name: str) -> kvlab.Policy:
    return kvlab.policy(name, **PARAMETERS[name])


@pytest.fixture(scope="module")
def cpu() -> models.LM:
    return on("cpu")


@pytest.fixture(scope="module")
def gpu() -> models.LM:
    with pretend_gpu.present() as device:
        return on(device)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(duoattention|compilerkv)")
        yield


@pytest.fixture(scope="module")
def pairs(cpu, gpu):
    """A function that captures the same on both devices."""
    needed = dict(pseudo=[policy("dapq")], policies=[policy(name) for name in NAMES])
    here = kvlab.capture(cpu, prompt(60), 8, **WHOLE, **needed)
    with pretend_gpu.present():
        there = kvlab.capture(gpu, prompt(60), 8, **WHOLE, **needed)
    return here, there


def close(found, expected):
    torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3, equal_nan=True)


def same_tables(found: pd.DataFrame, expected: pd.DataFrame):
    pd.testing.assert_frame_equal(found, expected, check_exact=False, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_replay(pairs, name):
    here, there = pairs
    expected = kvlab.replay(here, policy(name), probes=())
    watched = kvlab.replay(here, policy(name), probes=PROBES)
    with pretend_gpu.present():
        found = kvlab.replay(there, policy(name))
        probed = kvlab.replay(there, policy(name), probes=PROBES)
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
    expected, tokens, sets = two_turns(cpu, policy(name), turns, pairs[0])
    with pretend_gpu.present():
        found, others, same = two_turns(gpu, policy(name), turns, pairs[1])
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
            summary = kvlab.replay(one, policy("snapkv")).summary
            assert summary == pytest.approx(kvlab.replay(kept["device"], policy("snapkv")).summary, abs=1e-3)
        with pytest.raises(kvlab.KvlabError, match="pinned memory is the CPU's"):
            there.to(device, pinned=True)
    with pytest.raises(kvlab.KvlabError, match="keep='disk' is none of 'device', 'cpu', 'pinned'"):
        kvlab.capture(gpu, ids, keep="disk")
    with pytest.raises(kvlab.KvlabError, match="torch finds none here; leave pinned out"):
        expected.to("cpu", pinned=True)
    with pytest.raises(kvlab.KvlabError, match="device 'cuda' was asked for, but torch finds no GPU here"):
        expected.to("cuda")


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
    ("zsmerge", dict(budget=16, window=4, residual=3, initial="similarity", newcomer="displaces")),
    ("dapq", dict(budget=12, window=6, content="vocabulary")),
    ("rocketkv", dict(budget=12, window=6, kernel=3, split="adaptive")),
    ("random", dict(budget=1)),
]


@pytest.mark.parametrize("name, parameters", VARIANTS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_replay_the_other_way(cpu, gpu, name, parameters):
    one = kvlab.policy(name, **parameters)
    asked = dict(new_tokens=5, pseudo=[one] if one.pseudo_key else ())
    expected = kvlab.replay(kvlab.capture(cpu, prompt(50), **asked), one)
    with pretend_gpu.present():
        found = kvlab.replay(kvlab.capture(gpu, prompt(50), **asked), one)
        same_tables(found.table, expected.table)
        assert found.kept(1).tolist() == expected.kept(1).tolist()


def test_tables_of_compilerkv(cpu, gpu):
    weights = [[1.0, 0.5, 2.0, 1.0], [0.2, 1.0, 1.0, 3.0]]
    risk = [[[0.8, 0.8], [0.8, 0.8]], [[0.9, 0.9], [0.9, 0.9]]]
    one = policy("compilerkv").using(DecisionTables(heads=weights, risk=risk, entropy=(1.0, 4.0)))
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
    one = policy("zsmerge")
    expected = kvlab.fidelity(cpu, one, [prompt(50), prompt(40, 1)], 5)
    loops = kvlab.closed_against_open(cpu, one, prompt(50), 5)
    with pretend_gpu.present():
        same_tables(kvlab.fidelity(gpu, one, [prompt(50), prompt(40, 1)], 5).table, expected.table)
        found = kvlab.closed_against_open(gpu, one, prompt(50), 5)
        assert found.first_difference == loops.first_difference
        same_tables(found.table, loops.table)


def on_gpu_like(made: models.LM) -> models.LM:
    """A copy of a model on the pretended GPU."""
    there = dataclasses.replace(made, model=copy.deepcopy(made.model))
    there.model.to(pretend_gpu.NAME)
    return there


@pytest.mark.parametrize("compress_at", ["prompt", "context"])
def test_an_evaluation(compress_at, tmp_path):
    words = wordy()
    one = evaluation.plan(Echo(n=2, tokens=4), POLICIES, compress_at=compress_at)
    expected = evaluation.run(words, one, tmp_path / "here.jsonl")
    with pretend_gpu.present():
        found = evaluation.run(on_gpu_like(words), one, tmp_path / "there.jsonl")
    assert [answer.prediction for answer in found] == [answer.prediction for answer in expected]
    assert [(answer.kv_bytes, answer.aux_bytes) for answer in found] == [
        (answer.kv_bytes, answer.aux_bytes) for answer in expected
    ]


def test_answers_that_go_on_as_one_batch(cpu, gpu):
    def joined(lm):
        with torch.inference_mode():
            ids, many = prompt(50).to(lm.device), [policy(name) for name in ("snapkv", "h2o", "quest")]
            with gather(lm.model, many):
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
        with kvlab.compress(lm.model, policy("h2o"), ["mass_lost"]) as session:
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


# ---------------------------------------------------------------------------------------------------- commands


@pytest.fixture(scope="module")
def readers(tiny):
    """A model that shares the default model's tokenizer, on the CPU and on the GPU."""
    here = tiny("tiny-llama-gqa", tokenizer="smollm2-135m")
    with pretend_gpu.present():
        return here, on_gpu_like(here)


def test_heads(readers):
    asked = dict(context=64, needles=2, seed=1, hay=DOCUMENTS[:1], progress=False)
    expected, found = retrieval_heads.measure(readers[0], **asked), None
    with pretend_gpu.present():
        found = retrieval_heads.measure(readers[1], **asked)
    close(torch.tensor(found.scores), torch.tensor(expected.scores))


def test_compiling(readers):
    few = settings(pool=3, contexts=2, samples=4, risk_samples=4)
    expected = compile.learn(readers[0], few, DOCUMENTS)
    with pretend_gpu.present():
        found = compile.learn(readers[1], few, DOCUMENTS)
    assert (found.tables.heads, found.tables.risk) == (expected.tables.heads, expected.tables.risk)
    for phase in expected.lines:
        for here, there in zip(expected.lines[phase], found.lines[phase], strict=True):
            assert there["nll"] == pytest.approx(here["nll"], abs=1e-3) and there["actions"] == here["actions"]


def test_exploring(pairs):
    def pages(trace):
        made = kvlab.explore(trace, policy("snapkv"), policy("quest"), budgets=[24, 32])
        found = [made.html()]
        made.show(budget=32, layer=1, head=3, step=5)
        found += [made.html(), made.worst(), made.most_different()]
        made.close()
        return [re.sub(r"kvlab-[0-9a-f]+-\d+", "kvlab", page) if isinstance(page, str) else page for page in found]

    expected = pages(pairs[0])
    with pretend_gpu.present():
        assert pages(pairs[1]) == expected


def test_eval_takes_the_gpu(readers, monkeypatch, capsys, tmp_path):
    asked = [
        "eval",
        "needle",
        "-p",
        "lengths=[144]",
        "-p",
        "depths=[0.5]",
        "--limit",
        "1",
        "--policies",
        "h2o",
        "--budgets",
        "48",
        "--no-log",
    ]
    lines = {}
    for name, lm in zip(("here", "there"), readers, strict=True):
        monkeypatch.setattr("kvlab.inputs.models.load", lambda *_, lm=lm: lm)
        with pretend_gpu.present():
            code, _, err = call(capsys, *asked, "--out", str(tmp_path / f"{name}.jsonl"))
        assert code == 0, err
        found = evaluation.read(tmp_path / f"{name}.jsonl")
        lines[name] = [(answer.policy, answer.prediction, answer.kv_bytes) for answer in found]
    assert lines["there"] == lines["here"] and len(lines["here"]) == 2


@pytest.mark.parametrize("task", timing.TASKS)
def test_bench_takes_the_gpu(task, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(meters, "bandwidth", lambda device: 1e9)
    asked = [
        "bench",
        task,
        "--shape",
        TINY["shape"],
        "--dtype",
        "float32",
        "--policies",
        "snapkv,dapq",
        "--budget",
        "40",
        "--contexts",
        "64",
        "--new-tokens",
        "2",
        "--repeats",
        "1",
        "--out",
        str(tmp_path / "bench.csv"),
    ]
    with pretend_gpu.present():
        code, out, err = call(capsys, *asked)
    assert code == 0, err
    table = pd.read_csv(tmp_path / "bench.csv")
    assert set(table["device"]) == {"pretend"} and set(table["policy"]) == {timing.FULL_CACHE, "snapkv", "dapq"}
    assert set(table["metric"]) == set(timing.METRICS[task]) - {"peak_bytes"} and table["value"].notna().all()
    assert ("Peak memory: torch does not count it on this device." in out) == ("peak_bytes" in timing.METRICS[task])
    if task == "memory":
        chosen = timing.contenders(["snapkv", "dapq"], [40])
        monkeypatch.setattr(timing, "peak_bytes", lambda *_: 0)
        on_cpu = timing.measure(task, timing.Subject(device="cpu", **TINY), chosen, [64], 2, 1)
        sizes = on_cpu[on_cpu["metric"] != "peak_bytes"]["value"].tolist()
        assert table["value"].tolist() == sizes


def test_peak_memory_is_the_gpus_own_count(monkeypatch):
    with pretend_gpu.present() as device:
        module = torch.get_device_module(device)
        for name, value in dict(reset_peak_memory_stats=None, memory_allocated=100, max_memory_allocated=350).items():
            monkeypatch.setattr(module, name, lambda place, value=value: value, raising=False)
        with memory.Peak(device) as peak:
            pass
        assert peak.bytes == 250
        table = timing.measure("memory", timing.Subject(device="auto", **TINY), timing.contenders([]), [64], 2, 1)
        assert table.set_index("metric")["value"]["peak_bytes"] == 250


def test_auto_takes_whatever_gpu_there_is():
    assert models.random_lm(**TINY).device.type == "cpu"
    with pretend_gpu.present() as device:
        made = models.random_lm(**TINY)
        assert made.device == device and models.random_lm(device="cpu", **TINY).device.type == "cpu"
        assert kvlab.load("random:tiny-llama-gqa").device == device
        assert doctor.gpu().found == "pretend (device 'pretend')"
        for wrong in ("cuda", "pretend:1"):
            with pytest.raises(kvlab.KvlabError, match=f"{wrong!r} was asked for, but torch finds 'pretend' here"):
                kvlab.load("random:tiny-llama-gqa", device=wrong)


def test_what_notebooks_ask_of_a_replay(pairs):
    def asked(trace):
        result, tokens = kvlab.replay(trace, policy("snapkv")), [str(i) for i in range(trace.length)]
        share = budgets.share_of_top(result, 8)
        return exploring.tokens_lost(trace, [result], tokens), share, first_look.worst(result)

    expected, share, place = asked(pairs[0])
    with pretend_gpu.present():
        found, same, there = asked(pairs[1])
        same_tables(found, expected)
        close(same, share)
    assert there == place


@pytest.mark.parametrize("family", ["hybrid-gpt-oss", "hybrid-gemma2", "hybrid-gemma3", "hybrid-llama4", "hybrid-lfm2"])
def test_a_hybrid_model(family):
    """Windows, chunks, convolutions, sinks and soft caps; pseudo-tokens in a padded batch among them."""
    ids, mask = left_padded(prompt(60)[0], prompt(44, 1)[0])
    one = kvlab.policy("dapq", **SMALL["dapq"])

    def run(device):
        lm = models.random_lm(family, device="cpu", dtype="float32")
        # The other way to run experts has a kernel for true GPUs alone.
        lm.model.set_experts_implementation("eager")
        lm.model.to(device)
        trace = kvlab.capture(lm, ids[:1], 4, pseudo=[one], accumulate=True)
        result = kvlab.replay(trace, one)
        with kvlab.compress(lm.model, one, PROBES) as session:
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
