"""Q-Filters: the main direction of queries, against power iteration, and the files that hold it."""

from __future__ import annotations

import json

import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.commands import call
from support.live_runs import prompt
from support.refusals import one_sentence
from support.tensors import exact, layer, sets, shaken
from support.texts import FERRY

import kvlab
from kvlab.analyses import shipped_tables
from kvlab.inputs.corpus import Document
from kvlab.methods._base.lookup import QueryFilters
from kvlab.traces.query_filters import measure

TEXTS = [Document("ferry", FERRY), Document("again", FERRY[100:])]


def leaning(seed, heads, kv_heads):
    """Queries with a direction of their own for each head, so that singular values lie apart."""
    queries, keys, values = layer(seed, heads, kv_heads, prompt=70, spread=0.5)
    return queries + torch.randn(heads, 1, 16, generator=torch.Generator().manual_seed(seed)), keys, values


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("window", [32, 9])
def test_without_filters_the_last_queries_stand_in(heads, kv_heads, window):
    queries, keys, values = leaning(heads + kv_heads, heads, kv_heads)

    def oracle(q, k):
        return oracles.oracle_qfilters(q[:, 70 - window :], k, 20)

    expected = oracle(*exact(queries, keys))
    assert oracle(*shaken(*exact(queries, keys))) == expected, "the test's input has near-ties"
    policy = kvlab.policy("qfilters", budget=20, window=window)
    assert sets(policy.keep(queries[None], keys[None], values[None])[0]) == expected


def content(**others):
    """A file of two layers with two KV heads of four channels."""
    filters = [[[1.0, 0, 0, 0], [0, 1.0, 0, 0]], [[0, 0, -1.0, 0], [0.5, 0.5, 0, 0]]]
    about = dict(model="mine", sha256="0" * 64, heads=4, tokens=8, samples=9, seed=0, kvlab="0.1.0")
    return {**about, "filters": filters, **others}


def test_given_filters_need_no_query(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content()))
    policy = kvlab.policy("qfilters", budget=2, filters=path)
    keys = torch.randn(1, 2, 30, 4, generator=torch.Generator().manual_seed(1))
    assert policy.needs.queries == 0
    for index, columns in enumerate(
        [(keys[0, 0, :, 0], keys[0, 1, :, 1]), (-keys[0, 0, :, 2], keys[0, 1, :, :2].sum(-1))]
    ):
        kept = policy.keep(keys[:, :, :0].repeat(1, 2, 1, 1), keys, keys, layer=index, n_layers=2)
        assert sets(kept[0]) == [sorted(column.topk(2).indices.tolist()) for column in columns]
    with one_sentence(r"\(2, 2, 4\); this model has \(3, 2, 4\)"):
        policy.keep(keys, keys, keys, layer=0, n_layers=3)
    before = str(policy)
    path.write_text(json.dumps(content(seed=1)))
    assert str(policy.replace(budget=2)) != before, "a signature tells files apart"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (dict(format="kvlab-filters-2"), "format"),
        (dict(filters=[]), "no vectors"),
        (dict(filters=[[[1.0, 2.0], [1.0]]]), "rows of 2 numbers"),
        (dict(heads=3), "KV heads"),
        (dict(layers=[1]), "layers names 1 layers"),
        (dict(filters=[[[float("nan")]]]), "filters"),
    ],
)
def test_a_file_that_is_not_right_is_refused_by_name(tmp_path, changed, said):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content(**changed)))
    with one_sentence(said) as caught:
        kvlab.policy("qfilters", budget=2, filters=path)
    assert str(path) in str(caught.value)


def test_measured_filters_are_the_main_directions_of_a_texts_queries(reader, tmp_path):
    found = measure(reader, tokens=41, documents=1, samples=41, texts=TEXTS[:1])
    ids = torch.tensor(reader.tokenizer(TEXTS[0].window(reader, 41).text)["input_ids"][:41])
    trace = kvlab.capture(reader, ids, 0, queries="all")
    assert (found.samples, found.measured_on) == (len(ids), (reader.sha256, reader.name, 2, 4))
    for queries, filters in zip(exact(trace.queries), found.filters):
        for group, mean in enumerate(filters):
            members = oracles.heads_of(group, 4, 2)
            expected = sum(oracles.main_direction(queries[head]) for head in members) / 2
            assert mean == pytest.approx(expected.tolist(), abs=2e-4)
    path = found.save(tmp_path / "found.json")
    assert QueryFilters.load(path) == found
    policy = kvlab.policy("qfilters", budget=12, filters=path)
    with kvlab.compress(reader.model, policy) as session, torch.inference_mode():
        reader.model.generate(prompt(60), max_new_tokens=2, do_sample=False)
    replayed = kvlab.replay(kvlab.capture(reader, prompt(60)[0], 2), policy)
    assert all(session.kept_after_prefill(index).equal(replayed.kept(index)) for index in range(2))


def test_queries_are_drawn_evenly_over_texts_by_the_seed(reader):
    first, same, other = (measure(reader, 60, samples=20, seed=seed, texts=TEXTS) for seed in (1, 1, 2))
    assert first.samples == 20 and first == same and first.filters != other.filters
    with one_sentence("samples must be at least 1"):
        measure(reader, 60, samples=0, texts=TEXTS)


def test_the_command_writes_what_measure_finds(capsys, monkeypatch, tmp_path, reader):
    monkeypatch.setattr("kvlab.inputs.models.load", lambda name: reader)
    monkeypatch.setattr("kvlab.inputs.corpus.documents_between", lambda *_, **__: iter(TEXTS))
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, "filters", "any", "--tokens", "40", "--samples", "30", "--seed", "3")
    assert code == 0
    assert QueryFilters.load(tmp_path / out.strip()) == measure(reader, 40, 2, 30, 3, texts=TEXTS)


def test_the_default_models_filters_come_along(lm):
    shipped = QueryFilters.load("smollm2-135m")
    assert (shipped.model, shipped.sha256, tuple(shipped.tensor().shape)) == (lm.name, lm.sha256, (30, 3, 64))
    assert shipped.samples == 3000 and len(shipped.documents) == 20
    taken = shipped_tables.with_shipped(lm, kvlab.policy("qfilters", budget=64))
    assert taken == kvlab.policy("qfilters", budget=64, filters="smollm2-135m")
