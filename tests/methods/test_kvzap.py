"""KVzap: hidden states in replays and live, the map of them by plain loops, and how surrogates are trained and read."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import oracles
from support.commands import call
from support.eager import CLOSE, eager
from support.live_runs import generate, left_padded, prompt
from support.paths import ROOT
from support.refusals import one_sentence
from support.surrogates import random_surrogate, shipped_for
from support.tensors import exact, sets
from support.texts import FERRY

import kvlab
from kvlab.inputs.corpus import Document
from kvlab.methods._base.surrogates import FORMAT, SHIPPED_SURROGATES, Surrogate
from kvlab.traces import surrogate_training
from kvlab.traces.surrogate_training import explained, observed, train

TEXTS = [Document("ferry", FERRY), Document("again", FERRY[100:])]
FAMILIES = ["tiny-llama-gqa", "tiny-qwen3", "hybrid-qwen3-next", "hybrid-gemma3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_holds_what_enters_each_attention_where_somebody_asks(tiny, family):
    lm, ids = tiny(family), prompt(41)[0]
    trace = kvlab.capture(lm, ids, 3, policies=["kvzap"])
    assert trace.hidden is not None
    for found, expected in zip(trace.hidden, eager(lm, ids).hidden, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)
    pieces = kvlab.capture(lm, ids, 3, policies=["kvzap"], chunk=9)
    torch.testing.assert_close(pieces.hidden, trace.hidden, atol=1e-3, rtol=1e-3)  # rounding of a linear state
    assert kvlab.capture(lm, ids, 3).hidden is None


def test_hidden_states_are_saved_and_checked(tiny, tmp_path):
    trace = kvlab.capture(tiny(), prompt(30)[0], 2, policies=["kvzap"])
    for path in (trace.save(tmp_path / "saved"), tmp_path / "filled"):
        if not path.exists():
            kvlab.capture(tiny(), prompt(30)[0], 2, policies=["kvzap"], into=path)
        assert torch.equal(kvlab.Trace.load(path).hidden, trace.hidden)
    with one_sentence(r"hidden \(2, 29, 64\) is not \[2, 30, width\]"):
        dataclasses.replace(trace, hidden=trace.hidden[:, 1:]).save(tmp_path / "short")
        kvlab.Trace.load(tmp_path / "short")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "more", [{}, dict(window=30, sinks=0), dict(budget=1.0, at=0.3, window=5), dict(budget=6)], ids=str
)
def test_sets_are_those_of_the_plain_loops_in_a_replay_live_and_of_keep(tiny, family, more):
    lm, ids = tiny(family), prompt(60, seed=3)[0]
    policy = kvlab.policy("kvzap", **dict(budget=20, window=6) | more)
    trace = kvlab.capture(lm, ids, 2, policies=[policy])
    replay = kvlab.replay(trace, policy)
    with kvlab.compress(lm.model, policy) as session:
        generate(lm.model, ids[None], 3)
    given = random_surrogate((trace.n_layers, trace.kv_heads, trace.hidden.shape[-1]))
    budget = policy.entries(60)
    for layer, number in enumerate(trace.layers):
        hidden, weight, bias = exact(trace.hidden[layer], given.weight[layer], given.bias[layer])
        expected = oracles.oracle_kvzap(hidden, weight, bias, budget, policy.window, policy.sinks, policy.at)
        assert sets(replay.kept(number)) == sets(session.kept_after_prefill(number)) == expected
        sizes = set(map(len, expected))
        assert sizes == {budget} if policy.at is None else max(sizes) < 60 and min(sizes) > 5 + 4


def test_a_prompt_within_budget_and_window_stays_whole_whatever_the_threshold(tiny):
    """With a threshold a short prompt is judged, too; without one it is not looked at."""
    trace = kvlab.capture(tiny(), prompt(40, seed=3)[0], 2, policies=["kvzap"])
    for budget, window, at, few in ((200, 44, 9.0, False), (200, 44, None, False), (200, 8, 9.0, True)):
        replay = kvlab.replay(trace, kvlab.policy("kvzap", budget=budget, window=window, at=at))
        assert {len(kept) for layer in range(2) for kept in sets(replay.kept(layer))} == {4 + 8 if few else 40}


def test_a_layer_alone_is_judged_by_keep(tiny, tmp_path):
    trace = kvlab.capture(tiny(), prompt(60, seed=3)[0], 2, policies=["kvzap"])
    path = random_surrogate((2, 2, 64)).save(tmp_path / "mine.safetensors")
    policy = kvlab.policy("kvzap", budget=20, window=6, surrogate=path)
    replay = kvlab.replay(trace, policy)
    for layer in range(2):
        tensors = trace.queries[layer, None, :, :0], trace.prompt_keys[layer, None], trace.prompt_values[layer, None]
        kept = policy.keep(*tensors, layer=layer, n_layers=2, hidden=trace.hidden[layer, None])
        assert kept[0].equal(replay.kept(layer))
    with one_sentence("needs the hidden states of the whole prompt"):
        policy.keep(*tensors, n_layers=2)
    with one_sentence(r"hidden must be \[batch, length, width\] = \[1, 60, width\], and is \[1, 59, 64\]"):
        policy.keep(*tensors, n_layers=2, hidden=trace.hidden[0, None, 1:])
    with one_sentence("2 layers of 2 KV heads on hidden states of 64, and not of this model"):
        policy.keep(*tensors, hidden=trace.hidden[0, None])


def test_padded_prompts_in_pieces_are_judged_as_if_alone(tiny):
    lm, policy = tiny(), kvlab.policy("kvzap", budget=12, window=4)
    ids, mask = left_padded(prompt(60, seed=1)[0], prompt(45, seed=2)[0])
    with kvlab.compress(lm.model, policy) as session, torch.inference_mode():
        past = lm.model(ids[:, :31], attention_mask=mask[:, :31]).past_key_values
        lm.model(ids[:, 31:], attention_mask=mask, past_key_values=past)
        session.end_prompt()
    for row, length in enumerate((60, 45)):
        alone = kvlab.replay(kvlab.capture(lm, ids[row, 60 - length :], 1, policies=[policy]), policy)
        for layer in range(2):
            assert sets(session.kept_after_prefill(layer, row)) == sets(alone.kept(layer))


def test_a_prefill_for_several_policies_keeps_hidden_states(tiny):
    from kvlab.live.shared_prefill import shared_prefill

    lm, ids = tiny(), prompt(50)
    policies = [kvlab.policy(name, budget=14) for name in ("kvzap", "knorm")]
    with shared_prefill(lm.model, policies), torch.inference_mode():
        prefilled = lm.model(ids, use_cache=True).past_key_values
    for policy in policies:
        with kvlab.compress(lm.model, policy) as session:
            session.branch(prefilled)
            session.end_prompt()
        replay = kvlab.replay(kvlab.capture(lm, ids, 1, policies=[policy]), policy)
        assert all(sets(session.kept_after_prefill(layer)) == sets(replay.kept(layer)) for layer in range(2))


# ---------------------------------------------------------------------------------------------------- refusals


def test_a_model_without_a_surrogate_is_told_the_command(tiny, monkeypatch):
    monkeypatch.setattr("kvlab.methods.kvzap.shipped_for", shipped_for)
    trace = kvlab.capture(tiny(), prompt(60)[0], 2, policies=["kvzap"])
    with one_sentence("no surrogate comes with kvlab for random:tiny-llama-gqa .* `kvlab surrogate MODEL --out FILE`"):
        kvlab.replay(trace, kvlab.policy("kvzap", budget=20))
    with (
        kvlab.compress(tiny().model, kvlab.policy("kvzap", budget=20)),
        pytest.raises(kvlab.KvlabError, match="no surrogate comes with kvlab for this model"),
    ):
        generate(tiny().model, prompt(60), 2)
    with one_sentence("unknown model with a surrogate 'gpt-9'.*`kvlab surrogate gpt-9`"):
        kvlab.policy("kvzap", budget=20, surrogate="gpt-9")


def test_a_surrogate_of_other_weights_is_refused(tiny, tmp_path):
    trace = kvlab.capture(tiny(), prompt(60)[0], 2, policies=["kvzap"])
    path = tmp_path / "mine.safetensors"
    for shape, model, said in (
        ((3, 2, 64), "", "3 layers of 2 KV heads on hidden states of 64, and not of random:tiny-llama-gqa"),
        ((2, 2, 48), "wide", "of wide with 2 layers of 2 KV heads on hidden states of 48"),
        ((2, 2, 64), "qwen", "trained for the weights of qwen, and this model is random:tiny-llama-gqa"),
    ):
        random_surrogate(shape, model).save(path)
        with one_sentence(said):
            kvlab.replay(trace, kvlab.policy("kvzap", budget=20, surrogate=path))


def test_the_shipped_one_is_found_by_name_and_shape(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.methods._base.surrogates.SHIPPED_SURROGATES", tmp_path)
    shipped_for.cache_clear()
    random_surrogate((2, 2, 64), "one").save(tmp_path / "one.safetensors")
    random_surrogate((2, 2, 48), "two").save(tmp_path / "two.safetensors")
    for model, shape, found in (
        ("one", (2, 2, 64), "one"),
        ("ONE-0.1", (2, 2, 64), "one"),
        ("", (2, 2, 48), "two"),
        ("two", (2, 2, 64), None),
        ("three", (2, 2, 64), None),
    ):
        surrogate = shipped_for(model, shape)
        assert (None if surrogate is None else surrogate.about.model) == found
    shipped_for.cache_clear()
    assert Surrogate.load("two").shape == (2, 2, 48)


@pytest.mark.parametrize("name", ["decoding", "threshold"])
def test_scorers_while_decoding_are_shown_no_hidden_states(name):
    parameters = dict(budget=40) if name == "decoding" else {}
    with one_sentence("looks at hidden states, which no decoding step is shown"):
        _ = kvlab.policy(name, scorer="kvzap", **parameters).needs


ABOUT = json.dumps(dict(model="mine", tokens=8, ridge=1.0, kvlab="0.1.0"))


@pytest.mark.parametrize(
    ("tensors", "about", "said"),
    [
        ({}, {"format": "kvlab-surrogate-2"}, "kvlab-surrogate-2"),
        ({"weight": torch.zeros(2, 4)}, {}, r"`weight` is numbers .* float32 \[2, 4\]"),
        ({"weight": torch.zeros(2, 2, 4, dtype=torch.int64)}, {}, "int64"),
        ({"bias": torch.zeros(3, 2)}, {}, r"`bias` is numbers \[2, 2\]"),
        ({"bias": torch.full((2, 2), torch.nan)}, {}, "not finite"),
        ({}, {"about": "{"}, "about: Invalid JSON"),
        ({}, {"about": ABOUT.replace("8", "0")}, "about.tokens"),
        ({}, {"about": ABOUT[:-1] + ', "layers": [1]}'}, "layers names 1 layers"),
    ],
)
def test_a_file_that_is_not_right_is_refused_by_name(tmp_path, tensors, about, said):
    path, good = tmp_path / "mine.safetensors", {"weight": torch.zeros(2, 2, 4), "bias": torch.zeros(2, 2)}
    save_file(good, path, {"format": FORMAT, "about": ABOUT})
    before = str(kvlab.policy("kvzap", budget=20, surrogate=path))
    save_file(good | tensors, path, {"format": FORMAT, "about": ABOUT} | about)
    with one_sentence(said) as caught:
        kvlab.policy("kvzap", budget=20, surrogate=path)
    assert str(path) in str(caught.value)
    save_file({name: tensor + 1 for name, tensor in good.items()}, path, {"format": FORMAT, "about": ABOUT})
    assert str(kvlab.policy("kvzap", budget=20, surrogate=path)) != before, "a signature tells files apart"
    for content, why in ((b"none", "no file of a surrogate"), (None, "cannot read")):
        path.unlink() if content is None else path.write_bytes(content)
        with one_sentence(why):
            kvlab.policy("kvzap", budget=20, surrogate=path)


# ---------------------------------------------------------------------------------------------------- training


def test_training_solves_the_least_squares_of_numpy(reader):
    """A ridge is a least squares with a row for each weight; the intercept has none."""
    ridge = 3.0
    found = train(reader, tokens=90, ridge=ridge, texts=TEXTS)
    parts = [observed(reader, text.window(reader, 90)) for text in TEXTS]
    hidden, scores = (
        np.concatenate([part.double().numpy() for part in side], at) for side, at in zip(zip(*parts), (1, 2))
    )
    assert hidden.shape[:1] + hidden.shape[2:] == (2, 64) and scores.shape[:2] == (2, 2)
    for layer in range(2):
        rows = np.hstack([hidden[layer], np.ones((len(hidden[layer]), 1))])
        penalty = np.eye(65)[:64] * ridge**0.5
        for head in range(2):
            wanted = np.append(scores[layer, head], np.zeros(64))
            solution = np.linalg.lstsq(np.vstack([rows, penalty]), wanted, rcond=None)[0]
            assert found.weight[layer, head].numpy() == pytest.approx(solution[:64], abs=1e-4, rel=1e-3)
            assert float(found.bias[layer, head]) == pytest.approx(solution[64], abs=1e-4)
    again = train(reader, tokens=90, ridge=ridge, texts=TEXTS)
    assert torch.equal(again.weight, found.weight) and torch.equal(again.bias, found.bias)


def test_what_it_is_trained_on_are_kvzips_scores_and_the_layers_inputs(reader):
    text = TEXTS[0].window(reader, 60)
    hidden, scores = observed(reader, text)
    ids = reader.encode(text.text)[0]
    torch.testing.assert_close(hidden[1], eager(reader, ids).hidden[1], **CLOSE)
    zipped = kvlab.policy("kvzip", budget=1.0, plus=True)
    trace = kvlab.capture(reader, text, 0, policies=[zipped])
    assert scores.equal(trace.prompt.repeated(zipped, zipped.repetition).log())


def test_r2_is_the_share_of_the_variance_that_is_explained(reader):
    (text,) = [TEXTS[1].window(reader, 80)]
    found = train(reader, tokens=80, texts=TEXTS[:1], held_out=TEXTS[1:])
    hidden, scores = observed(reader, text)
    shares = []
    for layer in range(2):
        for head in range(2):
            x, y, w = exact(hidden[layer], scores[layer, head], found.weight[layer, head])
            predicted = [float(state @ w + found.bias[layer, head]) for state in x]
            off = sum((a - b) ** 2 for a, b in zip(predicted, y, strict=True))
            shares.append(1 - off / sum((a - sum(y) / len(y)) ** 2 for a in y))
    assert explained(found, hidden, scores).flatten().tolist() == pytest.approx(shares, abs=1e-4)
    assert found.about.r2 == {text.signature: pytest.approx(sum(shares) / 4, abs=1e-4)}


def test_mistakes_in_training_are_refused(reader, tiny):
    with one_sentence("tokens must be at least 1"):
        train(reader, 0, texts=TEXTS)
    with one_sentence("ridge must be"):
        train(reader, ridge=-1, texts=TEXTS)
    with one_sentence("at least one document"):
        train(reader, texts=[])
    with one_sentence("has no tokenizer"):
        train(tiny(), texts=TEXTS)


def test_the_command_writes_what_train_finds(capsys, monkeypatch, tmp_path, reader):
    monkeypatch.setattr("kvlab.inputs.models.load", lambda name: reader)
    monkeypatch.setattr("kvlab.inputs.corpus.documents_between", lambda *_, **__: iter(TEXTS[:1]))
    monkeypatch.setattr("kvlab.inputs.corpus.documents", lambda names: TEXTS[1:])
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, "surrogate", "any", "--tokens", "50", "--seed", "3", "--ridge", "2")
    told, path = out.splitlines()
    expected = train(reader, 50, seed=3, ridge=2.0, texts=TEXTS[:1], held_out=TEXTS[1:])
    found = Surrogate.load(tmp_path / path)
    assert code == 0 and found.about == expected.about and torch.equal(found.weight, expected.weight)
    assert told.endswith(f"{next(iter(expected.about.r2.values())):.3f}") and "again[0:50]@" in told


# ---------------------------------------------------------------------------------------------------- what comes along


def test_the_default_models_surrogate_comes_along(lm):
    shipped = Surrogate.load("smollm2-135m")
    assert (shipped.about.model, shipped.about.sha256, shipped.shape) == (lm.name, lm.sha256, (30, 3, 576))
    assert shipped_for(lm.name, shipped.shape) is not None
    assert len(shipped.about.documents) == 20 and shipped.about.tokens == 1000
    assert {name.partition("[")[0] for name in shipped.about.r2} == {"sotu/1962", "squad/Oxygen"}
    # As long as the texts that it was trained on: scores fall with the length of a text.
    text = kvlab.document("squad/Rhine").window(lm, 1000)
    assert float(explained(shipped, *observed(lm, text)).mean()) > 0.2


def test_no_shipped_surrogate_was_trained_on_a_text_of_a_set_of_documents():
    judged = {name for names in kvlab.inputs.corpus.SETS.values() for name in names}
    files = sorted(SHIPPED_SURROGATES.glob("*.safetensors"))
    assert files
    for file in files:
        about = Surrogate.load(file.stem).about
        assert about.model == file.stem and not {name.partition("[")[0] for name in about.documents} & judged


def test_the_docs_tell_r2_of_each_shipped_surrogate():
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    told = re.findall(
        r"^\| (\S+) \| ([\d.]+) \| ([\d.]+) \| `kvlab surrogate \1 --out \1.safetensors` \|", page, re.MULTILINE
    )
    files = sorted(SHIPPED_SURROGATES.glob("*.safetensors"))
    found = {file.stem: [f"{r2:.3f}" for r2 in Surrogate.load(file.stem).about.r2.values()] for file in files}
    assert {model: list(numbers) for model, *numbers in told} == found


def test_its_target_repeats_the_whole_text_at_once():
    assert surrogate_training.TARGET.repetition.chunk >= 2 * 1000 and surrogate_training.TARGET.plus
