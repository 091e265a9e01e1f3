"""The text: every token once and in order, shaded by what was lost on it, and a long text opened where that was."""

from __future__ import annotations

import html as markup
import re
from types import SimpleNamespace

import pytest
import torch
from support.browsing import DESKTOP, PHONE, opened, overflow
from support.exploring import (
    PLACE,
    Pieces,
    attention_by_hand,
    channels,
    numbers_in,
    words,
)
from support.replaying import HEADS, KV_HEADS, PROMPT
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import kvlab
from kvlab import Trace
from kvlab.render.explorer import html_medium, query_html, texts, token_html
from kvlab.render.explorer.html_medium import LIVE, STATIC
from kvlab.render.explorer.query_view import Look, Spot
from kvlab.render.explorer.token_html import text


def test_every_token_is_shown_once_and_in_order_and_red_where_attention_is_lost(trace):
    look = Look(kvlab.replay(trace, kvlab.policy("streamingllm", budget=10)), PLACE)
    tokens = [f"<{position}>" for position in range(trace.length)]
    pieces = Pieces(text(look, tokens)).found
    assert "".join(piece[-1] for piece in pieces) == "".join(tokens[: PROMPT + PLACE.step])
    weights = attention_by_hand(PLACE.layer, PLACE.head, PLACE.step)
    # Four sinks, the six most recent entries that were stored, and its own.
    read = {*range(4), *range(PROMPT + PLACE.step - 7, PROMPT + PLACE.step)}
    assert numbers_in(piece for piece in pieces if piece[0] == "mark") == read
    lost = {p: weight for p, weight in enumerate(weights) if p not in read and weight >= token_html.WEAK}
    assert lost, "the example loses something"
    assert numbers_in(piece for piece in pieces if piece[0] in ("span", "ins")) == set(lost)
    # The more is lost, the darker; and much of it is underlined, for who cannot tell the colours.
    much = {p for p, weight in lost.items() if weight > token_html.STRONG * (2 / html_medium.LEVELS) ** 2}
    assert numbers_in(piece for piece in pieces if piece[0] == "ins") == much and len(much) < len(lost)
    most = max(lost, key=lost.get)
    darkness = {p: sum(channels(piece[1])) for piece in pieces for p in numbers_in([piece]) if p in lost}
    assert darkness[most] == min(darkness.values()) < max(darkness.values())


def test_merged_entries_are_not_shown_as_read(trace):
    result = kvlab.replay(trace, kvlab.policy("zsmerge", budget=16))
    look = Look(result, PLACE)
    kept = result.kept(PLACE.layer, PLACE.step)[PLACE.head * KV_HEADS // HEADS]
    tokens = [f"<{position}>" for position in range(trace.length)]
    pieces = Pieces(text(look, tokens)).found
    assert numbers_in(piece for piece in pieces if piece[0] == "mark") == {p for p in kept.tolist() if p >= 0}
    assert look.mass_lost > 0.05 and "evicted or merged" in words(query_html.legend(STATIC))


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


def test_what_has_no_shape_is_seen(trace):
    look = Look(kvlab.replay(trace, kvlab.policy("full")), PLACE)
    odd = ["a\n", "\n", "\t", "\x00", "\u202e", "\u200b", "é", "שלום", "👩\u200d🚀", "<b>&amp;", '"']
    tokens = odd + ["."] * (trace.length - len(odd))
    for html in (text(look, tokens, STATIC), text(look, tokens, LIVE)):
        assert words(html).startswith('a↵\n↵\n⇥\t⟨U+0000⟩⟨U+202E⟩⟨U+200B⟩éשלום👩\u200d🚀<b>&amp;"')
        assert "\u202e" not in html and "<b>" not in html
    assert token_html.shown(tokens, 1) == "'\\n'"


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
    assert token_html.shown(found, 5) == "🙂 (part 3)" and token_html.shown(found, 3) == "🙂"


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


# --- a long text ---


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
    assert far.spot == Spot(0, 0, 1)
    looks = far.looks()
    opened = token_html.passages(looks, len(far.tokens))
    for look in looks:
        html = text(look, far.tokens, STATIC, opened=opened)
        seen, folds = unfolded(html)
        assert {400, 1200, 1600} <= seen and len(seen) < 300
        assert all(
            set(range(p - token_html.CONTEXT_TOKENS, p + token_html.CONTEXT_TOKENS + 1)) <= seen
            for p in (400, 1200, 1600)
        )
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
def test_the_tokens_that_lost_the_most_are_seen_at_once(far, browser, tmp_path, size):
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{far.html()}", encoding="utf-8")
    with opened(browser, path.as_uri(), size) as (page, complaints):
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
