"""`kvlab.explore`: what the picture says is what the replay says, and sliders and static picture agree."""

import base64
import html as markup
import re
import threading
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.browsing import DESKTOP, PHONE, launched, opened, overflow
from support.replaying import HEADS, KV_HEADS, LAYERS, PROMPT, STEPS, tensors
from support.tensors import exact
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import kvlab
from kvlab import KvlabError, Trace
from kvlab.analyses import exploring
from kvlab.methods.streamingllm import StreamingLLM
from kvlab.replays.run import Replay
from kvlab.workbench.explorer import choices, drawings, medium, painting, picture, texts
from kvlab.workbench.explorer import explorer as module
from kvlab.workbench.explorer.look import Look, Spot
from kvlab.workbench.explorer.medium import LIVE, STATIC
from kvlab.workbench.explorer.painting import text

PLACE = Spot(layer=1, head=4, step=7)


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


class Pieces(HTMLParser):
    """The (element, style, text) of each piece of text, in order; nothing for what stands outside of one."""

    def __init__(self, html):
        super().__init__()
        self.found, self._open = [], [("", "")]
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        inside = ("", "") if tag == "div" else (tag, dict(attributes).get("style", ""))
        self._open.append(inside)

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        self.found.append((*self._open[-1], data))


def words(html):
    """What a reader sees of HTML, without the drawings."""
    return markup.unescape(re.sub(r"<style>.*?</style>|<svg.*?</svg>|<[^>]*>", "", html))


def numbers_in(found):
    """The positions in the texts of pieces, whose tokens are <0>, <1>, ..."""
    return {int(position) for piece in found for position in re.findall(r"<(\d+)>", piece[-1])}


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
    pieces = Pieces(text(look, tokens)).found
    assert "".join(piece[-1] for piece in pieces) == "".join(tokens[: PROMPT + PLACE.step])
    weights = attention_by_hand(PLACE.layer, PLACE.head, PLACE.step)
    # Four sinks, the six most recent entries that were stored, and its own.
    read = {*range(4), *range(PROMPT + PLACE.step - 7, PROMPT + PLACE.step)}
    assert numbers_in(piece for piece in pieces if piece[0] == "mark") == read
    lost = {p: weight for p, weight in enumerate(weights) if p not in read and weight >= painting.WEAK}
    assert lost, "the example loses something"
    assert numbers_in(piece for piece in pieces if piece[0] in ("span", "ins")) == set(lost)
    # The more is lost, the darker; and much of it is underlined, for who cannot tell the colours.
    much = {p for p, weight in lost.items() if weight > painting.STRONG * (2 / medium.LEVELS) ** 2}
    assert numbers_in(piece for piece in pieces if piece[0] == "ins") == much and len(much) < len(lost)
    most = max(lost, key=lost.get)
    darkness = {p: sum(channels(piece[1])) for piece in pieces for p in numbers_in([piece]) if p in lost}
    assert darkness[most] == min(darkness.values()) < max(darkness.values())


def channels(style):
    """The red, green and blue of a style's background."""
    found = re.search("background:#([0-9a-f]+)", style).group(1)
    return [int(part * (2 // len(part)), 16) for part in re.findall("." * (len(found) // 3), found)]


def test_a_head_with_a_set_of_its_own_is_shown_with_that_set(trace):
    result = kvlab.replay(trace, kvlab.policy("snapkv", budget=36, sets="head"))
    assert len(result.kept(1, 7)) == HEADS
    shown = []
    for head in range(HEADS):
        look = Look(result, Spot(1, head, 7))
        own = {p for p in result.kept(1, 7)[head].tolist() if p >= 0}
        assert set(look.read.nonzero()[:, 0].tolist()) == own
        weights = attention_by_hand(1, head, 7)
        assert look.mass_lost == pytest.approx(sum(w for p, w in enumerate(weights) if p not in own), abs=1e-5)
        shown.append(frozenset(own))
    assert shown[0] != shown[1], "two heads of one group differ here"


def test_merged_entries_are_not_shown_as_read(trace):
    result = kvlab.replay(trace, kvlab.policy("zsmerge", budget=16))
    look = Look(result, PLACE)
    kept = result.kept(PLACE.layer, PLACE.step)[PLACE.head * KV_HEADS // HEADS]
    tokens = [f"<{position}>" for position in range(trace.length)]
    pieces = Pieces(text(look, tokens)).found
    assert numbers_in(piece for piece in pieces if piece[0] == "mark") == {p for p in kept.tolist() if p >= 0}
    assert look.mass_lost > 0.05 and "evicted or merged" in words(picture.legend(STATIC))


def test_one_kv_head_and_a_budget_beyond_the_prompt():
    queries, keys, values, _ = tensors()
    narrow = Trace.from_tensors(queries, keys[:, :1], values[:, :1], PROMPT)
    explorer = kvlab.explore(narrow, "streamingllm", "full", budgets=[16, 2 * PROMPT])
    try:
        explorer.show(budget=2 * PROMPT)
        for look in explorer.looks():
            assert look.read.all() and look.mass_lost == pytest.approx(0, abs=1e-6)
        assert "No token lost" in explorer.html() and "1 KV heads" in explorer.html()
        explorer.show(budget=16)
        assert explorer.looks()[0].mass_lost > 0.1
    finally:
        explorer.close()


def test_what_is_stored_but_not_read_looks_different_from_what_is_gone(trace):
    tokens = [f"{position} " for position in range(trace.length)]
    selecting = Look(kvlab.replay(trace, kvlab.policy("exact_topk", budget=8)), PLACE)
    evicting = Look(kvlab.replay(trace, kvlab.policy("streamingllm", budget=8)), PLACE)
    assert selecting.stored.all() and int(selecting.read.sum()) == 8
    assert evicting.stored.tolist() == evicting.read.tolist() and int(evicting.read.sum()) == 8 + 1
    assert "stored, not read" in text(selecting, tokens) and "evicted" not in text(selecting, tokens)
    assert "evicted or merged" in text(evicting, tokens) and "stored, not read" not in text(evicting, tokens)


def test_text_that_looks_like_markup_stays_text(trace):
    look = Look(kvlab.replay(trace, kvlab.policy("full")), PLACE)
    html = text(look, ["<script>alert(1)</script>"] * trace.length)
    assert "<script" not in html and html.count("&lt;script&gt;") == PROMPT + PLACE.step


def concentrated_by_hand(result):
    """m / sqrt(m^2 / sum w^2) of every query, from the tensors alone, with plain loops."""
    found = np.zeros((LAYERS, HEADS, STEPS))
    for layer, head, step in np.ndindex(found.shape):
        kept = result.kept(layer, step + 1)
        own = set(kept[head * len(kept) // HEADS].tolist())
        lost, squares = 0.0, 0.0
        for position, weight in enumerate(attention_by_hand(layer, head, step + 1)):
            if position not in own:
                lost += weight
                squares += weight * weight
        tokens = lost * lost / squares if squares else 1
        found[layer, head, step] = lost / tokens**0.5
    return found


@pytest.mark.parametrize(
    "policy",
    [
        dict(name="snapkv", budget=40),
        dict(name="snapkv", budget=36, sets="head"),
        dict(name="zsmerge", budget=16),
        dict(name="duoattention", budget=24),
        dict(name="exact_topk", budget=8),
        dict(name="full"),
    ],
    ids=str,
)
def test_what_is_lost_on_few_tokens_agrees_with_plain_loops(trace, policy):
    """Sets of a group and of a head, padded ones, and those that a step selects."""
    result = kvlab.replay(trace, kvlab.policy(**policy))
    by_hand = concentrated_by_hand(result)
    assert np.abs(result.concentrated_loss.numpy() - by_hand).max() < 1e-6
    assert by_hand.max() > 0.1 or policy["name"] == "full"


def test_two_tokens_say_more_than_nine_hundred():
    """Head 0 loses much, evenly over the whole text; head 1 less, on two tokens. The second is the finding."""
    prompt = 1000
    keys = torch.zeros(1, 1, prompt + 1, 4)
    keys[0, 0, [400, 700], 1] = 1.0
    keys[0, 0, -1, 2] = 1.0  # the query's own entry, which is always read
    queries = torch.zeros(1, 2, prompt + 1, 4)
    queries[0, 0, -1, 2] = 2 * np.log(600)
    queries[0, 1, -1, 1:3] = 2 * np.log(50_000) * torch.tensor([1.0, 1.0])
    explorer = kvlab.explore(Trace.from_tensors(queries, keys, keys, prompt), "streamingllm", "full", budgets=[100])
    try:
        diffuse, pointed = explorer.replay("streamingllm", 100).mass_lost[0, :, 0].tolist()
        assert diffuse == pytest.approx(900 / 1600, abs=0.01) and pointed == pytest.approx(2 / 3, abs=0.02)
        assert explorer.place == Spot(0, 1, 1)
        # Half of the second head's attention, which is then less than the first one's, still says more.
        queries[0, 1, -1, 2] = 2 * np.log(150_000)
        weaker = kvlab.explore(Trace.from_tensors(queries, keys, keys, prompt), "streamingllm", "full", budgets=[100])
        try:
            diffuse, pointed = weaker.replay("streamingllm", 100).mass_lost[0, :, 0].tolist()
            assert pointed == pytest.approx(0.4, abs=0.02) and diffuse > pointed
            assert weaker.place == Spot(0, 1, 1) == weaker.most_different()
            assert "2 tokens" in words(weaker.html())
        finally:
            weaker.close()
    finally:
        explorer.close()


def test_the_first_look_is_the_worst_query(explorer):
    lost = concentrated_by_hand(explorer.replay("snapkv", explorer.budget))
    place = explorer.place
    assert (place.layer, place.head, place.step - 1) == np.unravel_index(lost.argmax(), lost.shape)
    assert explorer.budget == 40


def shown_by(explorer):
    """The HTML of the widgets' picture."""
    return "".join(part.value for part in explorer._parts.values())


def test_sliders_move_the_picture_and_the_picture_moves_the_sliders(explorer):
    explorer.panel  # noqa: B018
    controls, before = explorer._controls, shown_by(explorer)
    controls["layer"].value = 1 - explorer.place.layer
    assert explorer.place.layer == controls["layer"].value and shown_by(explorer) != before
    explorer.show(layer=0, head=2, step=3, budget=44)
    assert [controls[name].value for name in ("layer", "head", "step", "budget")] == [0, 2, 3, 44]
    assert "layer 0, query head 2, decoding step 3" in shown_by(explorer)


def test_the_widgets_and_the_static_page_say_the_same(explorer):
    explorer.panel  # noqa: B018
    explorer.show(layer=1, head=5, step=20)
    static, live = words(explorer.html()), words(shown_by(explorer))
    legend = words(picture.legend(LIVE))
    assert legend in static and static.replace(legend, "") == live
    drawings = [base64.b64decode(part).decode() for part in re.findall(r'base64,([^"]+)"', explorer.html())]
    assert len(drawings) == 8
    assert [re.findall(' d="([^"]*)"', drawing) for drawing in drawings] == [
        re.findall(' d="([^"]*)"', drawing) for drawing in re.findall("<svg.*?</svg>", shown_by(explorer))
    ]


def test_only_what_changed_is_sent(explorer):
    explorer.panel  # noqa: B018
    sent = []
    for name, part in explorer._parts.items():
        part.observe(lambda _, name=name: sent.append(name), names="value")
    explorer.show(right="streamingllm")
    assert set(sent) == {"right top", "right text", "right below"}
    sent.clear()
    explorer.show(layer=1 - explorer.place.layer)
    assert len(sent) == len(set(sent)) == 7


def test_every_control_says_what_it_does(explorer):
    controls = [*explorer.panel.children[0].children, *explorer.panel.children[1].children]
    assert len(controls) == 9
    for control in controls:
        assert len(control.tooltip) > 10 and control.description
        assert control.description in explorer.panel.children[2].value
        assert control.tooltip in explorer.panel.children[2].value


def test_the_buttons_go_to_the_worst_and_to_the_most_different_query(explorer):
    left, right, different = explorer.panel.children[1].children
    lost = [concentrated_by_hand(explorer.replay(name, explorer.budget)) for name in explorer.chosen]

    def at(values):
        place = explorer.place
        return float(values[place.layer, place.head, place.step - 1])

    right.click()
    assert at(lost[1]) == lost[1].max()
    different.click()
    assert at(np.abs(lost[0] - lost[1])) == np.abs(lost[0] - lost[1]).max()
    left.click()
    assert at(lost[0]) == lost[0].max()
    assert [explorer._controls[name].value for name in ("layer", "head", "step")] == list(vars(explorer.place).values())


def test_another_policy_is_replayed_and_named(explorer):
    explorer.show(right="streamingllm")
    assert "streamingllm, budget 40" in explorer.html() and "morphkv" not in explorer.html()


@pytest.fixture
def displayed(monkeypatch):
    """displayed(explorer, watched): what it displays in a kernel whose front end can ask its user, or cannot."""

    def display(explorer, watched):
        kernel = SimpleNamespace(get_parent=lambda: {"content": {"allow_stdin": watched}})
        monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=kernel))
        bundles = []
        monkeypatch.setattr("IPython.display.display", lambda bundle, raw: bundles.append(bundle))
        explorer._ipython_display_()
        return bundles

    return display


def test_where_nobody_can_move_a_slider_there_is_the_picture_alone(explorer, displayed):
    """A kernel that runs for papermill or nbconvert is told that there is nobody to ask."""
    assert displayed(explorer, watched=False) == [{"text/html": explorer.html(), "text/plain": repr(explorer)}]
    assert explorer._panel is None and "snapkv and morphkv" in repr(explorer)


def test_beside_the_widgets_stands_the_picture_for_when_they_are_gone(explorer, displayed):
    widget, still = displayed(explorer, watched=True)
    assert "application/vnd.jupyter.widget-view+json" in widget and widget["text/html"] == ""
    assert explorer.html() in still["text/html"]
    (name,) = re.findall('<div class="([^"]*-still)">', still["text/html"])
    sheet = explorer.panel.children[-1].children[1].value
    assert f".{name}{{display:none}}" in sheet, "the live picture hides the still one"


def test_without_ipywidgets_there_is_the_picture(explorer, displayed, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert [set(bundle) for bundle in displayed(explorer, watched=True)] == [{"text/html", "text/plain"}]


def test_the_committed_notebook_is_small_and_shows_the_picture():
    path = Path(__file__).parents[2] / "notebooks" / "01_explore.ipynb"
    content = path.read_text(encoding="utf-8")
    assert len(content) < 250_000 and "kvlab-picture" in content and "widget-state" not in content


def test_what_is_looked_ahead_is_there_when_the_budget_moves(explorer):
    for made in explorer.look_ahead():
        made.result()
    assert {("snapkv", b) for b in (36, 40, 44)} | {("morphkv", b) for b in (36, 40, 44)} <= set(explorer._replays)


def test_what_is_made_in_the_background_does_not_hold_up_the_picture(explorer, monkeypatch):
    explorer.show(budget=40)
    begun, go_on = threading.Event(), threading.Event()

    def slow(trace, policy):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(60)
        return Replay(trace, policy)

    monkeypatch.setattr(module, "Replay", slow)
    explorer._replays = {key: kept for key, kept in explorer._replays.items() if key[1] == 40}
    ahead = explorer.look_ahead()
    try:
        assert begun.wait(60)
        explorer.show(layer=0, step=2)  # is there
        explorer.show(left="streamingllm")  # is made meanwhile
        assert not go_on.is_set() and "streamingllm" in explorer.html()
        # What waits for policies that nobody looks at any more is left.
        assert sum(one.cancelled() for one in ahead) >= len(ahead) - 3
    finally:
        go_on.set()


def test_a_closed_explorer_can_still_be_moved(explorer):
    explorer.panel  # noqa: B018
    explorer.close()
    explorer.close()
    explorer._controls["right"].value = "streamingllm"
    explorer._controls["budget"].value = 44
    assert "streamingllm, budget 44" in shown_by(explorer) and explorer._message.value == ""


def test_a_policy_that_refuses_leaves_everything_as_it_was(trace):
    explorer = kvlab.explore(trace, "streamingllm", "full", budgets=[8, 16])
    try:
        explorer.panel  # noqa: B018
        before, live = explorer.html(), shown_by(explorer)
        with pytest.raises(KvlabError, match="budget"):
            explorer.show(left="snapkv", layer=1 - explorer.place.layer)
        assert explorer.html() == before and explorer.chosen == ["streamingllm", "full"]
        explorer._controls["left"].value = "snapkv"
        assert "budget" in explorer._message.value and explorer._controls["left"].value == "streamingllm"
        assert shown_by(explorer) == live
        explorer._controls["budget"].value = 8
        assert explorer._message.value == "" and "budget 8" in shown_by(explorer)
    finally:
        explorer.close()


# ---------------------------------------------------------------------- policies that are objects


class EveryOther(StreamingLLM):
    """A user's own: what streamingllm keeps, under another name; it fails where the budget is 13."""

    name = "every_other"

    def compress(self, store, prompt):
        if self.budget == 13:
            raise ZeroDivisionError("<b>thirteen</b>")
        super().compress(store, prompt)


def test_a_policy_of_the_users_own_is_explored_at_its_own_budget(trace):
    explorer = kvlab.explore(trace, EveryOther(budget=11), "streamingllm")
    try:
        assert explorer.budget == 11 and {11, 16, 32} == set(explorer.budgets)
        assert explorer.names[0] == "every_other" and explorer.panel is not None
        assert "every_other, budget 11" in explorer.html()
        own, named = explorer.looks()
        assert own.read.equal(named.read)
        explorer.show(budget=16, left="full")
        explorer.show(left="every_other")
        assert int(explorer.looks()[0].read.sum()) == 16 + 1
    finally:
        explorer.close()


def test_what_fails_within_a_users_policy_is_said_and_goes_to_the_log(trace):
    explorer = kvlab.explore(trace, EveryOther(budget=11), "full", budgets=[11, 13])
    try:
        explorer.panel  # noqa: B018
        before = shown_by(explorer)
        with pytest.raises(ZeroDivisionError):
            explorer._controls["budget"].value = 13
        assert "ZeroDivisionError: &lt;b&gt;thirteen" in explorer._message.value
        assert shown_by(explorer) == before and explorer._controls["budget"].value == explorer.budget == 11
    finally:
        explorer.close()


def test_a_named_policy_that_needs_more_than_a_budget_is_not_offered(trace, monkeypatch):
    made = choices.made

    def refuse(name, budget):
        if name == "quest":
            raise KvlabError("quest: parameter 'page' is missing")
        return made(name, budget)

    monkeypatch.setattr(choices, "made", refuse)
    names = kvlab.explore(trace, "snapkv", "full", budgets=[36]).names
    assert "quest" not in names and "sparq" in names


def test_two_variants_of_one_policy_stand_side_by_side(trace):
    plain, wide = kvlab.policy("snapkv", budget=36), kvlab.policy("snapkv", budget=36, sets="head")
    explorer = kvlab.explore(trace, plain, wide)
    try:
        assert explorer.chosen == ["snapkv", "snapkv(sets='head')"] and explorer.budget == 36
        assert [look.result.policy for look in explorer.looks()] == [plain, wide]
        assert "snapkv(sets=&#x27;head&#x27;), budget 36" in explorer.html()
    finally:
        explorer.close()
    with pytest.raises(KvlabError, match="both sides are snapkv"):
        kvlab.explore(trace, plain, plain.replace(budget=40))


# ---------------------------------------------------------------------- text


def test_what_has_no_shape_is_seen(trace):
    look = Look(kvlab.replay(trace, kvlab.policy("full")), PLACE)
    odd = ["a\n", "\n", "\t", "\x00", "\u202e", "\u200b", "é", "שלום", "👩\u200d🚀", "<b>&amp;", '"']
    tokens = odd + ["."] * (trace.length - len(odd))
    for html in (text(look, tokens, STATIC), text(look, tokens, LIVE)):
        assert words(html).startswith('a↵\n↵\n⇥\t⟨U+0000⟩⟨U+202E⟩⟨U+200B⟩éשלום👩\u200d🚀<b>&amp;"')
        assert "\u202e" not in html and "<b>" not in html
    assert painting.shown(tokens, 1) == "'\\n'"


def test_tokens_keep_their_spaces_and_cut_characters_are_whole(trace):
    """As a tokenizer of Llama 2's kind tells them: spaces as ▁, and bytes for what is not in the vocabulary."""
    pieces = ["<unk>", "▁the", "▁cat", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    ids = [1, 2, 3, *(4 + byte for byte in "🙂é".encode()), 2, 4 + 0xF0]
    cut = SimpleNamespace(ids=torch.tensor(ids), meta={})
    found = texts.texts(cut, SimpleNamespace(tokenizer=tokenizer))
    assert found == ["the", " cat", "s", "🙂", "", "", "", "é", "", " cat", "�"]
    assert painting.shown(found, 5) == "🙂 (part 3)" and painting.shown(found, 3) == "🙂"


def test_the_tokens_that_lost_the_most_lead_to_their_places(trace):
    explorers = [kvlab.explore(trace, "streamingllm", "snapkv", budgets=[36]) for _ in range(2)]
    try:
        pages = [explorer.html() for explorer in explorers]
        for html in pages:
            links, marks = re.findall('href="#([^"]+)"', html), re.findall(' id="([^"]+)"', html)
            assert len(links) > 8 and set(links) == set(marks) and len(marks) == len(set(marks))
        assert set(re.findall(' id="[^"]+"', pages[0])).isdisjoint(re.findall(' id="[^"]+"', pages[1]))
    finally:
        for explorer in explorers:
            explorer.close()


# ---------------------------------------------------------------------- a long text


@pytest.fixture(scope="module")
def long():
    """A trace of 2,000 tokens, of which the only query pays much to 400 and 1600, some to 1200, and little to a few."""
    prompt = 2000
    weights = torch.full((prompt + 1,), 0.4 / prompt)
    weights[[400, 1600, 1200]] = torch.tensor([0.3, 0.2, 0.05])
    weights[[150, 700, 900, 1400, 1800]] = 0.01
    keys = torch.zeros(1, 1, prompt + 1, 4)
    keys[..., 0] = weights.log()
    queries = torch.zeros(1, 2, prompt + 1, 4)
    queries[0, 0, -1, 0] = 2  # against the scaling, 1 / sqrt(4)
    return Trace.from_tensors(queries, keys, keys, prompt)


@pytest.fixture
def far(long):
    made = kvlab.explore(long, "streamingllm", "snapkv", budgets=[64])
    made.tokens = [f"<{position}> " for position in range(long.length)]
    yield made
    made.close()


def unfolded(html):
    """The positions in a text that are seen when it is opened, and what the folds say."""
    folds = re.findall(r"<details.*?<summary[^>]*>(.*?)</summary>.*?</details>", html, re.DOTALL)
    return numbers_in([(markup.unescape(re.sub(r"<details.*?</details>", "", html, flags=re.DOTALL)),)]), folds


def test_a_long_text_is_opened_at_what_was_lost(far):
    assert far.place == Spot(0, 0, 1)
    looks = far.looks()
    opened = painting.passages(looks, len(far.tokens))
    for look in looks:
        html = text(look, far.tokens, STATIC, opened=opened)
        seen, folds = unfolded(html)
        assert {400, 1200, 1600} <= seen and len(seen) < 300
        assert all(set(range(p - painting.AROUND, p + painting.AROUND + 1)) <= seen for p in (400, 1200, 1600))
        # Nothing is left out, nothing comes twice, and what the folds and the open passages lost is all.
        whole = re.sub(r"<summary.*?</summary>", "", html)
        assert "".join(words(whole).split()) == "".join("".join(far.tokens).split())
        shares = [re.fullmatch(r"([\d,]+) tokens, ([\d.]+)% lost on them", fold).groups() for fold in folds]
        assert sum(int(count.replace(",", "")) for count, _ in shares) == len(far.tokens) - len(seen)
        hidden = sum(float(look.lost[p]) for p in range(len(far.tokens)) if p not in seen)
        assert sum(float(share) for _, share in shares) == pytest.approx(100 * hidden, abs=0.06 * len(shares))


def test_both_sides_open_the_same_passages(far):
    """What one policy lost is looked for in the other's text."""
    far.show(left="full")
    texts = re.findall(r'<div class="kvlab-text">.*?</div>', far.html(), re.DOTALL)
    (kept, _), (lost, _) = map(unfolded, texts)
    assert kept == lost and 400 in kept
    live = {side: unfolded(html)[0] for side, html in far._live().items() if side.endswith("text")}
    assert live["left text"] == live["right text"] == kept


def test_a_text_of_which_nothing_is_lost_is_whole(long):
    whole = Look(kvlab.replay(long, kvlab.policy("full")), Spot(0, 0, 1))
    assert "<details" not in text(whole, [f"<{p}>" for p in range(long.length)])


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_tokens_that_lost_the_most_are_seen_at_once(far, tmp_path, size):
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{far.html()}", encoding="utf-8")
    with launched() as browser, opened(browser, path.as_uri(), size) as (page, complaints):
        boxes = page.locator(".kvlab-text").evaluate_all("""texts => texts.map(text => {
            const box = text.parentElement.getBoundingClientRect();
            return [...text.querySelectorAll('[id]')].filter(each => {
                const own = each.getBoundingClientRect();
                return own.height && own.top >= box.top && own.bottom <= box.bottom;
            }).map(each => each.textContent.trim());
        })""")
        assert all({"<400>", "<1200>", "<1600>"} <= set(seen) for seen in boxes) and len(boxes) == 2
        # A link to a token that lies in a fold opens the fold.
        hidden = page.locator(".kvlab-text details [id]").first
        assert not hidden.is_visible()
        page.locator(f".kvlab-worst a[href='#{hidden.get_attribute('id')}']").click()
        assert hidden.is_visible() and complaints == [] and overflow(page) == 0


# ---------------------------------------------------------------------- drawings


def test_a_map_shades_every_cell_and_frames_the_chosen_one(trace):
    look = Look(kvlab.replay(trace, kvlab.policy("streamingllm", budget=10)), PLACE)
    lost, recall = re.findall("<svg.*?</svg>", drawings.maps(look, LIVE))
    for drawing, values, column in (
        (lost, look.result.mass_lost[:, :, PLACE.step - 1], PLACE.head),
        (recall, look.result.recall, PLACE.head * KV_HEADS // HEADS),
    ):
        shades = np.full(values.shape, np.nan)
        for path, colour in re.findall(r'<path d="((?:M\d+ \d+h\d+)+)" stroke="(#\w+)"/>', drawing):
            for x, y, run in re.findall(r"M(\d+) (\d+)h(\d+)", path):
                assert np.isnan(shades[int(y), int(x) : int(x) + int(run)]).all(), "a cell is painted once"
                shades[int(y), int(x) : int(x) + int(run)] = sum(channels(f"background:{colour}"))
        order = np.argsort(values.flatten().numpy(), kind="stable")
        assert (np.diff(shades.flatten()[order]) <= 0).all() and shades.min() < shades.max(), "more is darker"
        x, y = map(float, re.search(r'class="kvlab-chosen" d="M([\d.]+) ([\d.]+)', drawing).groups())
        width = float(re.search(r"scale\(([\d.]+)", drawing).group(1))
        assert (round((x - drawings.MARGIN) / width), y / drawings.CELL) == (column, PLACE.layer)
    assert ">query head<" in lost and ">KV head<" in recall
    assert f"here {look.mass_lost:.1%}" in lost


def test_the_steps_of_a_head_are_drawn_with_the_chosen_one_framed(trace):
    look = Look(kvlab.replay(trace, kvlab.policy("streamingllm", budget=10)), PLACE)
    drawing = re.search("<svg.*?</svg>", drawings.steps(look, LIVE, 102)).group()
    path, width = re.search(r'd="M0 102([^"]*)V102z" transform="scale\(([\d.]+)', drawing).groups()
    heights, height = [], 0
    for verb, number in re.findall(r"([hv])(-?\d+)", path):
        height -= int(number) if verb == "v" else 0
        heights += [height] * int(number) if verb == "h" else []
    assert heights == [round(100 * value) for value in look.result.mass_lost[PLACE.layer, PLACE.head].tolist()]
    left = float(re.search(r'class="kvlab-chosen" d="M([\d.]+)', drawing).group(1))
    assert round(left / float(width)) == PLACE.step - 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(layer=LAYERS), rf"layer {LAYERS} is outside this trace, which has 0 .. {LAYERS - 1}"),
        (dict(step=0), rf"step 0 is outside this trace, which has 1 .. {STEPS}"),
        (dict(head=-1), r"head -1 is outside"),
        (dict(budget=37), r"budgets of this view are 36, 40, 44"),
        (dict(left="snapvk"), r"snapvk.*snapkv"),
        (dict(colour="red"), r"colour"),
        (dict(layer="1"), r"layer must be a whole number, and is '1'"),
        (dict(step=1.5), r"step must be a whole number"),
    ],
)
def test_a_place_that_is_not_there_is_one_sentence_and_changes_nothing(explorer, changes, sentence):
    before = explorer.html()
    with pytest.raises(KvlabError, match=sentence):
        explorer.show(**changes)
    assert explorer.html() == before


def test_budgets_are_whole_numbers(trace):
    with pytest.raises(KvlabError, match=r"a budget must be a whole number, and is 0\.25"):
        kvlab.explore(trace, budgets=[0.25])
    with pytest.raises(KvlabError, match="from 1 on, and are \\[0, 40\\]"):
        kvlab.explore(trace, budgets=[40, 0])
    explorer = kvlab.explore(trace, "snapkv", "full", budgets=np.array([40, 36]), layer=np.int64(1))
    assert explorer.budgets == [36, 40] and type(explorer.place.layer) is int
    explorer = kvlab.explore(trace, "snapkv", "full", budget=37)
    assert explorer.budget == 37 and 37 in explorer.budgets and "snapkv, budget 37" in explorer.html()


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
