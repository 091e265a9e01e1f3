"""Evaluations, compilation, head scores and timings of hybrid models."""

from __future__ import annotations

from io import StringIO

import pytest
import torch
from rich.console import Console
from support.compiling import DOCUMENTS, settings
from support.evaluating import Echo, wordy
from support.families import HYBRIDS
from support.live_runs import SMALL
from support.texts import FERRY

import kvlab
from kvlab import compile as compiling
from kvlab import evaluation
from kvlab.analyses.speed.timings import plain_cache
from kvlab.bench import meters, timing
from kvlab.evaluation import results
from kvlab.inputs.corpus import Document
from kvlab.live.shared_prefill import shared_prefill
from kvlab.render.figures import evaluation as figures
from kvlab.traces.retrieval_heads import measure

CHOSEN = [kvlab.policy("full"), *(kvlab.policy(name, **SMALL[name]) for name in ("snapkv", "dapq", "zsmerge", "sparq"))]


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("at", ["prompt", "context"])
def test_one_prefill_for_all_gives_what_generate_gives(family, at):
    words = wordy(family)
    example = next(Echo(words=60).examples(words))
    made = list(evaluation.answers(words, example, CHOSEN, at))
    for one, answer in zip(CHOSEN, made, strict=True):
        (alone,) = evaluation.answers(words, example, [one], at)
        assert {**alone, "seconds": 0, "prefill_seconds": 0} == {**answer, "seconds": 0, "prefill_seconds": 0}, one
        assert answer["uncompressed_bytes"] > 0
        if at == "prompt":
            ids = words.encode(example.prompt)
            with kvlab.compress(words.model, one, max_new_tokens=example.max_new_tokens) as session:
                out = words.model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
            assert answer["prediction"].split() == words.decode(out[0, ids.shape[1] :]).split()
            assert answer["kv_bytes"] == session.kv_bytes


def test_tables_have_a_column_for_the_other_layers_where_there_are_any(tmp_path):
    for family, there in (("hybrid-gemma3", True), ("tiny-llama-gqa", False)):
        words = wordy(family)
        found = evaluation.run(words, evaluation.Plan(Echo(n=2), tuple(CHOSEN[:2])), tmp_path / family)
        assert evaluation.read(tmp_path / family) == found
        for table in (results.table(found), results.summary(found)):
            assert ("uncompressed_bytes" in table) == there
        console = Console(width=200, file=StringIO())
        figures.show(results.summary(found), console)
        assert ("other layers, MiB" in console.file.getvalue()) == there


@pytest.fixture(scope="module")
def reader(tiny):
    """A random hybrid model that shares the default model's tokenizer."""
    return tiny("hybrid-gemma3", tokenizer="smollm2-135m")


def test_tables_are_learnt_for_the_compressed_layers(reader):
    tables = compiling.tables(compiling.measure(reader, settings(), DOCUMENTS), 24)
    assert tables.n_layers == 2
    policy = kvlab.policy("compilerkv", budget=20, window=8, utility_window=4).using(tables)
    trace = kvlab.capture(reader, FERRY, 2, chat=False, policies=[policy], pseudo=())
    assert sorted(kvlab.replay(trace, policy).table.layer.dropna().unique()) == [2, 4]


def test_head_scores_name_their_layers(reader, tmp_path):
    scores = measure(reader, context=64, needles=2, seed=1, hay=[Document("ferry", FERRY)], progress=False)
    assert scores.n_layers == 2 and scores.layers == [2, 4]
    assert {layer for layer, _, _ in scores.best(8)} == {2, 4}
    path = scores.save(tmp_path / "heads.json")
    policy = kvlab.policy("duoattention", budget=40, sinks=4, recent=8, heads=str(path))
    assert kvlab.replay(kvlab.capture(reader, range(3, 80), 2, pseudo=()), policy).kept(4).shape[0] == 2


def test_the_memory_of_other_layers_is_a_row_of_its_own(monkeypatch):
    monkeypatch.setattr(timing, "peak_bytes", lambda *_: 1)
    chosen = timing.contenders(["snapkv"], [48])
    subject = timing.BenchmarkModel(shape="hybrid-gemma3", device="cpu", dtype="float32")
    table = timing.measure("memory", subject, chosen, contexts=[96], new_tokens=4, repeats=1)
    values = table.set_index(["policy", "metric"])["value"]
    # Three windows of 16 tokens keep 15 entries each, whatever becomes of the others.
    assert {values[name, "uncompressed_bytes"] for name in table.policy.unique()} == {3 * 15 * 2 * 2 * 16 * 4}
    assert values["snapkv", "kv_bytes"] < values[timing.FULL_CACHE, "kv_bytes"] == 2 * 101 * 2 * 2 * 16 * 4


@torch.inference_mode()
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_prefill_goes_on_as_transformers_own_cache(tiny, family):
    lm, ids = tiny(family), torch.arange(3, 63)[None]
    expected = lm.model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1]
    with shared_prefill(lm.model, [kvlab.policy("full")]):
        prefilled = lm.model(ids).past_key_values
    cache = plain_cache(prefilled)
    torch.testing.assert_close(
        lm.model(ids[:, :1], past_key_values=cache).logits[:, -1], expected, atol=1e-3, rtol=1e-3
    )
    held = meters.stored(cache, None)
    assert held["kv_bytes"] == 2 * 61 * 2 * 2 * 16 * 4 and held["uncompressed_bytes"] > 0
