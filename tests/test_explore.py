"""`kvlab.explore`: what the picture says is what the replay says, and sliders and static picture agree."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from replaying import HEADS, KV_HEADS, LAYERS, PROMPT, STEPS, tensors
from tensors import exact

import kvlab
from kvlab import KvlabError, Trace
from kvlab.analyses import exploring
from kvlab.workbench.picture import Look, Place, text

PLACE = Place(layer=1, head=4, step=7)


@pytest.fixture(scope="module")
def trace():
    queries, keys, values, pseudo = tensors()
    return Trace.from_tensors(queries, keys, values, PROMPT, pseudo=pseudo)


@pytest.fixture
def explorer(trace):
    made = kvlab.explore(trace, "snapkv", "morphkv", budgets=[36, 40, 44])
    yield made
    made.close()


def attention_by_hand(layer, head, step):
    """Softmax of one decoding query over all keys that it may see, from the tensors alone."""
    queries, keys = exact(*tensors()[:2])
    seen = PROMPT + step
    logits = queries[layer, head, PROMPT + step - 1] @ keys[layer, head * KV_HEADS // HEADS, :seen].T
    weights = np.exp(logits / np.sqrt(queries.shape[-1]))
    return weights / weights.sum()


class Spans(HTMLParser):
    """The (style, text) of each span, in order."""

    def __init__(self, html):
        super().__init__()
        self.found, self._style = [], None
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self._style = dict(attributes).get("style", "") if tag == "span" else None

    def handle_data(self, data):
        if self._style is not None:
            self.found.append((self._style, data))


def test_a_query_loses_what_its_set_does_not_hold(trace):
    result = kvlab.replay(trace, kvlab.policy("snapkv", budget=36))
    look = Look(result, PLACE)
    weights = attention_by_hand(PLACE.layer, PLACE.head, PLACE.step)
    kept = result.kept(PLACE.layer, PLACE.step)[PLACE.head * KV_HEADS // HEADS].tolist()
    expected = [0.0 if position in kept else weight for position, weight in enumerate(weights)]
    assert torch.allclose(look.lost.double(), torch.tensor(expected), atol=1e-6)
    assert look.mass_lost == pytest.approx(sum(expected), abs=1e-5)


def test_every_token_is_shown_once_and_in_order_and_red_where_attention_is_lost(trace):
    look = Look(kvlab.replay(trace, kvlab.policy("streamingllm", budget=10)), PLACE)
    tokens = [f"<{position}>" for position in range(trace.length)]
    spans = Spans(text(look, tokens)).found
    assert "".join(part for _, part in spans) == "".join(tokens[: PROMPT + PLACE.step])
    red = {p for style, part in spans if "213" in style for p in map(int, re.findall(r"<(\d+)>", part))}
    weights = attention_by_hand(PLACE.layer, PLACE.head, PLACE.step)
    # Four sinks, the six most recent entries that were stored, and its own.
    read = {*range(4), *range(PROMPT + PLACE.step - 7, PROMPT + PLACE.step)}
    assert red == {p for p, weight in enumerate(weights) if p not in read and weight >= 0.0005}
    assert red, "the example loses something"


def test_what_is_stored_but_not_read_looks_different_from_what_is_gone(trace):
    tokens = [f"{position} " for position in range(trace.length)]
    selecting = Look(kvlab.replay(trace, kvlab.policy("exact_topk", budget=8)), PLACE)
    evicting = Look(kvlab.replay(trace, kvlab.policy("streamingllm", budget=8)), PLACE)
    assert selecting.stored.all() and int(selecting.read.sum()) == 8
    assert evicting.stored.tolist() == evicting.read.tolist() and int(evicting.read.sum()) == 8 + 1
    assert "stored, not read" in text(selecting, tokens) and "evicted" not in text(selecting, tokens)
    assert "evicted" in text(evicting, tokens) and "stored, not read" not in text(evicting, tokens)


def test_text_that_looks_like_markup_stays_text(trace):
    look = Look(kvlab.replay(trace, kvlab.policy("full")), PLACE)
    html = text(look, ["<script>alert(1)</script>"] * trace.length)
    assert "<script" not in html and html.count("&lt;script&gt;") == PROMPT + PLACE.step


def test_the_first_look_is_the_worst_query(trace, explorer):
    lost = explorer.replay("snapkv", explorer.budget).mass_lost
    place = explorer.place
    assert lost[place.layer, place.head, place.step - 1] == lost.max()
    assert explorer.budget == 40


def test_sliders_move_the_picture_and_the_picture_moves_the_sliders(explorer):
    explorer.panel  # noqa: B018
    controls, shown = explorer._controls, explorer._picture
    before = shown.value
    controls["layer"].value = 1 - explorer.place.layer
    assert explorer.place.layer == controls["layer"].value and shown.value != before
    explorer.show(layer=0, head=2, step=3, budget=44)
    assert [controls[name].value for name in ("layer", "head", "step", "budget")] == [0, 2, 3, 44]
    assert "layer 0, query head 2, decoding step 3" in shown.value
    assert shown.value == explorer.html()


def test_another_policy_is_replayed_and_named(explorer):
    explorer.show(right="streamingllm")
    assert "streamingllm, budget 40" in explorer.html() and "morphkv" not in explorer.html()


def test_a_static_page_gets_the_picture_and_a_live_one_the_widget(explorer):
    bundle = explorer._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/html"] == explorer.html()
    assert "snapkv and morphkv" in bundle["text/plain"]


def test_what_is_looked_ahead_is_there_when_the_budget_moves(explorer):
    for made in explorer.look_ahead():
        made.result()
    assert {("snapkv", b) for b in (36, 40, 44)} | {("morphkv", b) for b in (36, 40, 44)} <= set(explorer._replays)


@pytest.mark.parametrize(("changes", "sentence"), [
    (dict(layer=LAYERS), rf"layer {LAYERS} is outside this trace, which has 0 .. {LAYERS - 1}"),
    (dict(step=0), rf"step 0 is outside this trace, which has 1 .. {STEPS}"),
    (dict(head=-1), r"head -1 is outside"),
    (dict(budget=37), r"budgets of this view are 36, 40, 44"),
    (dict(left="snapvk"), r"snapvk.*snapkv"),
    (dict(colour="red"), r"colour"),
])
def test_a_place_that_is_not_there_is_one_sentence_and_changes_nothing(explorer, changes, sentence):
    before = explorer.html()
    with pytest.raises(KvlabError, match=sentence):
        explorer.show(**changes)
    assert explorer.html() == before


def test_a_trace_without_a_response_or_pseudo_queries(trace):
    queries, keys, values, _ = tensors()
    bare = Trace.from_tensors(queries[:, :, :PROMPT], keys[:, :, :PROMPT], values[:, :, :PROMPT], PROMPT)
    with pytest.raises(KvlabError, match="no response"):
        kvlab.explore(bare)
    poor = Trace.from_tensors(queries, keys, values, PROMPT)
    with pytest.raises(KvlabError, match="pseudo"):
        kvlab.explore(poor, "snapkv", "dapq", budgets=[40])
    assert "dapq" not in kvlab.explore(poor, "snapkv", "morphkv", budgets=[40]).names
    assert "h2o" not in kvlab.explore(trace, "snapkv", "morphkv", budgets=[40]).names
    assert "dapq" in kvlab.explore(trace, "snapkv", "morphkv", budgets=[40]).names


def test_tokens_that_lose_the_most_agree_with_a_plain_sum(trace):
    result = kvlab.replay(trace, kvlab.policy("streamingllm", budget=12))
    lost = np.zeros(PROMPT + STEPS)
    for layer in range(LAYERS):
        for head in range(HEADS):
            for step in range(1, STEPS + 1):
                kept = set(result.kept(layer, step)[head * KV_HEADS // HEADS].tolist())
                for position, weight in enumerate(attention_by_hand(layer, head, step)):
                    lost[position] += weight * (position not in kept)
    lost /= LAYERS * HEADS * STEPS
    table = exploring.tokens_lost(trace, [result], [str(p) for p in range(trace.length)], limit=5)
    assert table["position"].tolist() == np.argsort(-lost)[:5].tolist()
    assert table["share"].tolist() == pytest.approx(sorted(lost)[::-1][:5], abs=1e-5)
