"""A model whose layers lie on two GPUs does what it does on the CPU. The GPUs are pretended ones."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from accelerate import dispatch_model
from support import pretend_gpu
from support.both_devices import NAMES, PROBES, TINY, captured, close, same_tables
from support.live_runs import ONE_TURN, generate, left_padded, prompt, small

import kvlab
from kvlab.core import hookable
from kvlab.inputs import models

FIRST, SECOND = (f"{pretend_gpu.NAME}:{number}" for number in range(2))
SPLIT = {"model.embed_tokens": FIRST, "model.rotary_emb": FIRST, "model.layers.0": FIRST}
SPLIT |= {"model.layers.1": SECOND, "model.norm": SECOND, "lm_head": SECOND}

pytestmark = pytest.mark.filterwarnings("ignore:(duoattention|compilerkv)")


@pytest.fixture(scope="module")
def cpu() -> models.LM:
    return models.random_lm(device="cpu", **TINY)


@pytest.fixture(scope="module")
def gpus(cpu) -> models.LM:
    return split(cpu)


def split(lm: models.LM, places: dict[str, str] = SPLIT) -> models.LM:
    """A copy of a model, as accelerate splits it over devices."""
    with pretend_gpu.present(2):
        model = dispatch_model(copy.deepcopy(lm.model), places, main_device=places["model.embed_tokens"])
    return dataclasses.replace(lm, model=model)


@pytest.fixture(scope="module")
def pairs(cpu, gpus):
    with pretend_gpu.present(2):
        return captured(cpu), captured(gpus)


def test_a_trace_is_joined_where_it_is_asked_to(gpus, pairs, tmp_path):
    here, there = pairs
    with pretend_gpu.present(2) as first:
        kept = {
            first: there,
            torch.device("cpu"): captured(gpus, keep="cpu", chunk=16, into=tmp_path / "trace"),
        }
        for device, trace in kept.items():
            assert trace.device == device and trace._tensors().keys() == here._tensors().keys()
            assert trace.rotations == here.rotations
            for name, tensor in trace._tensors().items():
                assert name == "ids" or tensor.device == device, name
                close(tensor, here._tensors()[name])
        assert captured(gpus, keep="pinned").keys.is_pinned()


@pytest.mark.parametrize("name", NAMES)
def test_a_replay(pairs, name):
    here, there = pairs
    expected = kvlab.replay(here, small(name), probes=PROBES)
    with pretend_gpu.present(2):
        for place in (FIRST, SECOND):
            found = kvlab.replay(there.to(place), small(name), probes=PROBES)
            same_tables(found.table, expected.table)
            assert found.kept(1, 8).tolist() == expected.kept(1, 8).tolist()


def two_turns(lm: models.LM, one: kvlab.Policy, turns: str):
    """Two prompts of unequal length answered greedily, then a second turn, each seen by every probe."""
    ids, mask = (x.to(lm.device) for x in left_padded(prompt(60)[0], prompt(44, 1)[0]))
    with kvlab.compress(lm.model, one, PROBES, turns=turns, max_new_tokens=12) as session:
        first = generate(lm.model, ids, 6, attention_mask=mask)
        after = [session.kept_after_prefill(layer, row).tolist() for layer in range(2) for row in range(2)]
        places = {str(layer.groups[0].store.device) for layer in first.past_key_values.compressed}
        longer = torch.cat([first.sequences, prompt(9, 2, rows=2).to(lm.device)], 1)
        whole = torch.cat([mask, mask.new_ones(2, longer.shape[1] - mask.shape[1])], 1)
        second = generate(lm.model, longer, 6, past_key_values=first.past_key_values, attention_mask=whole)
    kept = [session.kept(layer, row).tolist() for layer in range(2) for row in range(2)]
    return session, places, (second.sequences.tolist(), after, kept)


@pytest.mark.parametrize("name", NAMES)
def test_a_live_run(cpu, gpus, name):
    turns = "leave" if name in ONE_TURN else "recompress"
    expected, _, sets = two_turns(cpu, small(name), turns)
    with pretend_gpu.present(2):
        found, places, same = two_turns(gpus, small(name), turns)
        assert places == {FIRST, SECOND} and same == sets
        same_tables(found.table, expected.table)
        for size in ("kv_bytes", "aux_bytes", "allocated_bytes", "read_bytes"):
            assert getattr(found, size) == getattr(expected, size)


@pytest.mark.parametrize("name, storage", [("snapkv", "as_is"), ("h2o", "as_is"), ("quest", "as_is"), ("h2o", "int8")])
def test_an_attribution(cpu, name, storage):
    """Autograd counts one pretended GPU and no more, so the first device is the CPU."""
    asked = dict(response=prompt(4, 5)[0], progress=False, storage=storage)
    expected = kvlab.attribute(cpu, small(name), prompt(60), **asked)
    parts = split(cpu, {part: "cpu" if place == FIRST else FIRST for part, place in SPLIT.items()})
    assert [device.type for device in hookable.devices_of(parts.model)] == ["cpu", "pretend"]
    with pretend_gpu.present(2):
        found = kvlab.attribute(parts, small(name), prompt(60), **asked)
        close(found.effects, expected.effects)
        assert found.summary == pytest.approx(expected.summary, rel=1e-3, abs=1e-3)
        same_tables(found.table, expected.table)


def test_fidelity_and_both_loops(cpu, gpus):
    one = small("zsmerge")
    expected = kvlab.fidelity(cpu, one, [prompt(50), prompt(40, 1)], 5)
    loops = kvlab.closed_against_open(cpu, one, prompt(50), 5)
    with pretend_gpu.present(2):
        same_tables(kvlab.fidelity(gpus, one, [prompt(50), prompt(40, 1)], 5).table, expected.table)
        same_tables(kvlab.closed_against_open(gpus, one, prompt(50), 5).table, loops.table)


@pytest.mark.parametrize("family", ["hybrid-gpt-oss", "hybrid-lfm2", "latent-deepseek-v3"])
def test_sinks_windows_convolutions_and_latents(family):
    """Every second layer lies on the second GPU."""
    lm = models.random_lm(family, device="cpu", dtype="float32")
    if "experts" in str(lm.model):
        lm.model.set_experts_implementation("eager")  # the other one has a kernel for true GPUs alone
    within = [name for name, _ in lm.model.model.named_children() if name != "layers"]
    places = {f"model.{name}": FIRST for name in within} | {"lm_head": SECOND}
    places |= {f"model.layers.{number}": (FIRST, SECOND)[number % 2] for number in range(len(lm.model.model.layers))}
    if lm.model.config.tie_word_embeddings:
        places["lm_head"] = FIRST
    ids, mask = left_padded(prompt(60)[0], prompt(44, 1)[0])

    def run(lm):
        trace = kvlab.capture(lm, ids[:1], 4, accumulate=True)
        result = kvlab.replay(trace, small("h2o"))
        with kvlab.compress(lm.model, small("snapkv"), PROBES) as session:
            out = generate(lm.model, ids.to(lm.device), 6, attention_mask=mask.to(lm.device))
        kept = [session.kept(layer, row).tolist() for layer in lm.layout.compressed for row in range(2)]
        return (result.table, session.table), (out.sequences.tolist(), kept)

    tables, others = run(lm)
    with pretend_gpu.present(2):
        found, same = run(split(lm, places))
    for mine, theirs in zip(found, tables, strict=True):
        same_tables(mine, theirs)
    assert same == others


def test_a_cache_of_fixed_size(cpu, gpus):
    def steps(lm):
        ids = prompt(60).to(lm.device)
        with torch.no_grad():
            with kvlab.compress(lm.model, small("snapkv")) as session:
                logits = [lm.model(ids).logits[:, -1:]]
                session.end_prompt()
            cache = session.static_cache(5)
            for _ in range(5):
                logits.append(lm.model(logits[-1].argmax(-1), past_key_values=cache).logits)
        return torch.cat(logits, 1), [str(layer.keys.device) for layer in cache.layers]

    expected, _ = steps(cpu)
    with pretend_gpu.present(2):
        found, places = steps(gpus)
        close(found, expected)
    assert places == [FIRST, SECOND]


def test_beams(cpu, gpus):
    def beams(lm):
        settings = dict(max_new_tokens=4, min_new_tokens=4, num_beams=2, do_sample=False, pad_token_id=0)
        with kvlab.compress(lm.model, small("h2o")):
            return lm.model.generate(prompt(40, rows=2).to(lm.device), **settings).tolist()

    expected = beams(cpu)
    with pretend_gpu.present(2):
        assert beams(gpus) == expected
