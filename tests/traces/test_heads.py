"""Head scores: what `measure` finds, the file that keeps it, and the command that makes it."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from support.commands import call, complaint
from support.measured_files import head_scores
from support.refusals import one_sentence
from support.texts import FERRY

import kvlab
from kvlab.errors import KvlabError
from kvlab.inputs.corpus import Document
from kvlab.inputs.models import MODELS
from kvlab.methods._base import lookup
from kvlab.methods._base.lookup import HeadScores
from kvlab.traces import retrieval_heads
from kvlab.traces.retrieval_heads import measure, needle_shares

HAY = [Document("ferry", FERRY)]
SHIPPED = "smollm2-135m"


@pytest.fixture(scope="module")
def scores(reader):
    return measure(reader, context=64, needles=3, seed=1, hay=HAY, progress=False)


def content(**changes) -> dict:
    """What a file holds of a model of 2 layers, 4 query heads and 2 KV heads."""
    return head_scores([[0.1, 0.4, 0.2, 0.2], [0.3, 0.0, 0.5, 0.6]], 2) | changes


# ---------------------------------------------------------------------------------------------------- the score


def with_known_shares(group=2, prompt=6, steps=3, needle=(2, 3)):
    """A trace of 2 layers whose heads put 0, 1/2, 9/10 and all of their attention on the needle's positions."""
    d, tokens = 8, prompt + steps
    keys = torch.zeros(2, 4 // group, tokens, d)
    keys[:, :, list(needle), 0] = 1.0
    queries = torch.zeros(2, 4, steps, d)
    for t in range(steps):
        visible = prompt + t + 1
        for head, share in enumerate((0.0, 0.5, 0.9, 1.0)):
            others = visible - len(needle)
            # softmax over `len(needle)` logits of x and the rest of 0
            x = math.log(max(share, 1e-12) * others / (max(1 - share, 1e-12) * len(needle)))
            queries[:, head, t, 0] = x * math.sqrt(d)
    return kvlab.Trace.from_tensors(queries, keys, torch.zeros_like(keys), prompt)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_a_needle_gets_the_share_that_the_trace_was_made_with(group):
    found = needle_shares(with_known_shares(group), torch.tensor([2, 3]))
    assert found.shape == (2, 4)
    assert torch.allclose(found, torch.tensor([0.0, 0.5, 0.9, 1.0]).expand(2, 4), atol=1e-5)


def test_the_response_is_among_what_the_answer_sees():
    """Uniform attention over 4 prompt tokens and what of the response has come: a needle of 2 gets 2/5 and then 2/6."""
    trace = kvlab.Trace.from_tensors(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 6, 4), torch.zeros(1, 1, 6, 4), 4)
    assert needle_shares(trace, torch.tensor([0, 3])).item() == pytest.approx((2 / 5 + 2 / 6) / 2)


def test_a_needle_must_lie_in_the_prompt_and_be_answered():
    trace = with_known_shares()
    for wrong in ([6], [-1, 2], []):
        with pytest.raises(KvlabError, match=r"0 \.\. 5"):
            needle_shares(trace, torch.tensor(wrong, dtype=torch.int64))
    unanswered = kvlab.Trace.from_tensors(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 6, 4), torch.zeros(1, 1, 6, 4), 6)
    with pytest.raises(KvlabError, match="response"):
        needle_shares(unanswered, torch.tensor([1]))


# ---------------------------------------------------------------------------------------------------- measuring


def test_what_is_measured(reader, scores):
    assert (scores.model, scores.sha256, scores.kvlab) == (reader.name, reader.sha256, kvlab.__version__)
    assert (scores.n_layers, scores.heads, scores.kv_heads, scores.seed) == (2, 4, 2, 1)
    assert scores.depths == pytest.approx([1 / 6, 1 / 2, 5 / 6], abs=1e-4)
    assert len(scores.contexts) == 3 and all(64 < tokens < 200 for tokens in scores.contexts)
    assert all(re.fullmatch(r"ferry\[0:64\]@[0-9a-f]{8}", name) for name in scores.documents)
    flat = [score for row in scores.scores for score in row]
    # Random weights look everywhere alike: a needle gets about its share of the tokens, 30 of some 130.
    assert all(0.1 < score < 0.4 for score in flat) and len(set(flat)) == 8


def test_the_same_seed_gives_the_same_scores_and_another_others(reader, scores):
    assert measure(reader, context=64, needles=3, seed=1, hay=HAY, progress=False) == scores
    assert measure(reader, context=64, needles=3, seed=2, hay=HAY, progress=False).scores != scores.scores


@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("templated", [True, False])
def test_the_needle_stands_where_its_tokens_are_said_to_be(lm, reader, monkeypatch, depth, templated):
    if not templated:
        monkeypatch.setattr(lm.tokenizer, "chat_template", None)
    ids, needle, answer = retrieval_heads._example(lm, FERRY, depth, retrieval_heads.random.Random(3))
    assert needle.tolist() == list(range(int(needle[0]), int(needle[-1]) + 1))
    said = lm.tokenizer.decode(ids[needle]).strip()
    assert re.fullmatch(r"The words that open the \w+ gate of [\w ]+ are [a-z, ]+\.", said)
    assert lm.tokenizer.decode(answer).strip() == said.partition(" are ")[2][:-1]
    before = lm.tokenizer.decode(ids[: int(needle[0])])
    assert ("<|im_start|>" in before) == templated
    if templated or depth:
        assert before.rstrip().endswith((".", "user"))  # between two sentences, or at the start
    share = len(before) / len(lm.tokenizer.decode(ids))
    assert abs(share - depth) < 0.3


def test_bad_requests_for_a_measurement(reader, tiny):
    for parameters in (dict(needles=0), dict(context=8)):
        with pytest.raises(KvlabError, match="at least 1 needle in 32 tokens"):
            measure(reader, hay=HAY, **parameters)
    with pytest.raises(KvlabError, match="no hay"):
        measure(reader, hay=[])
    with pytest.raises(KvlabError, match="too short"):
        measure(reader, context=100_000, needles=1, hay=HAY)
    with pytest.raises(KvlabError, match="no tokenizer"):
        measure(tiny("tiny-llama-gqa"), hay=HAY)


# ---------------------------------------------------------------------------------------------------- the file


def test_a_file_comes_back_as_it_was(scores, tmp_path):
    path = scores.save(tmp_path / "heads.json")
    assert HeadScores.load(path) == scores == HeadScores.load(str(path))
    assert json.loads(path.read_text())["format"] == "kvlab-heads-1"
    assert path.stat().st_size < 4000 and [file.name for file in tmp_path.iterdir()] == ["heads.json"]


def test_a_file_that_changed_is_read_again(tmp_path):
    path = tmp_path / "heads.json"
    path.write_text(json.dumps(content()))
    first = HeadScores.load(path)
    path.write_text(json.dumps(content(scores=[[0.5] * 4, [0.25] * 4])))
    assert HeadScores.load(path).scores != first.scores


def test_a_kv_head_is_worth_its_best_query_head():
    found = HeadScores(**content())
    assert found.per_kv_head().tolist() == [[0.4, 0.2], [0.3, 0.6]]
    assert found.best(3) == [(1, 3, 0.6), (1, 2, 0.5), (0, 1, 0.4)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1"),
        ("", "not valid JSON"),
        ("[]", "dictionary"),
        (json.dumps({}), "model"),
        (json.dumps(content(format="kvlab-heads-2")), "format"),
        (json.dumps(content(scores=[[0.1] * 4])), "scores"),
        (json.dumps(content(scores=[[0.1] * 4, [0.1] * 3])), "scores"),
        (json.dumps(content(kv_heads=3)), "KV heads"),
        (json.dumps(content(scores=[[0.1] * 3 + [float("nan")]] * 2)), "scores"),
        (json.dumps(content(layers=2)), "layers"),
        (json.dumps(content(n_layers=0, scores=[])), "n_layers"),
    ],
)
def test_a_file_that_is_not_right_is_refused_by_name(tmp_path, text, said):
    path = tmp_path / "heads.json"
    path.write_text(text)
    with one_sentence(said) as caught:
        HeadScores.load(path)
    assert str(path) in str(caught.value)


def test_no_such_file_or_name(tmp_path):
    with pytest.raises(KvlabError, match="no such file"):
        HeadScores.load(tmp_path / "heads.json")
    with pytest.raises(KvlabError, match=f"did you mean '{SHIPPED}'"):
        HeadScores.load("smollm2-135")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KvlabError, match="UTF-8"):
        HeadScores.load(tmp_path / "binary.json")


# ---------------------------------------------------------------------------------------------------- what comes along


def test_the_default_models_scores_come_along(lm):
    shipped = HeadScores.load(SHIPPED)
    assert (shipped.model, shipped.sha256, shipped.n_layers, shipped.heads) == (lm.name, lm.sha256, 30, 9)
    assert len(shipped.contexts) >= 8 and min(shipped.contexts) > 1000
    assert (lookup.SHIPPED / f"{SHIPPED}.json").stat().st_size < 20_000
    ordered = shipped.per_kv_head().flatten().sort().values
    # A few heads hold on to the needle, and most look past it.
    assert ordered[-3:].min() > 0.5 and ordered.median() < 0.2


@pytest.mark.parametrize("path", sorted(lookup.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_all_shipped_scores_are_of_models_of_the_catalogue_and_tell_heads_apart(path):
    """Whether they are of the very weights is checked with the model at hand (`make test-models`)."""
    shipped = HeadScores.load(path.stem)
    assert f"{shipped.n_layers} layers, {shipped.heads} query heads, {shipped.kv_heads} KV heads" in (
        MODELS[path.stem].summary
    )
    assert len(shipped.contexts) >= 20 and min(shipped.contexts) > 1000
    ordered = shipped.per_kv_head().flatten().sort().values
    assert ordered[-3:].min() > 0.5 and ordered.median() < 0.5 * ordered[-3:].min()


# ---------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_what_measure_finds(capsys, monkeypatch, tmp_path, reader, scores):
    monkeypatch.setattr("kvlab.inputs.models.load", lambda name: reader)
    monkeypatch.setattr("kvlab.inputs.corpus.documents_between", lambda *_, **__: iter(HAY))
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, "heads", "any", "--context", "64", "--needles", "3", "--seed", "1")
    assert code == 0 and out.splitlines()[-1] == "random-tiny-llama-gqa-heads.json"
    assert HeadScores.load(tmp_path / "random-tiny-llama-gqa-heads.json") == scores
    layer, head, best = scores.best(1)[0]
    assert out.startswith(f"layer {layer:2}, head {head:2}: {best:.1%}")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--needles", "0"], 2, "needles"),
        (["--context", "8"], 2, "context"),
        (["--out", "nowhere/heads.json"], 1, "folder"),
        (["--out", "."], 1, "folder"),
        (["smollm2-135"], 1, "smollm2-135m"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, arguments, code, said):
    assert said in complaint(capsys, "heads", *arguments, code=code)
