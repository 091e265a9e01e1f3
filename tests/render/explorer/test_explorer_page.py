"""The explorer's page in a browser, from a file and without a network: clicks, keys, addresses, sizes and mistakes."""

from __future__ import annotations

import re
import struct
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from support.browsing import DESKTOP, PHONE, contrasts, opened, overflow
from support.exploring import attention_by_hand
from support.live_runs import prompt, small
from support.replaying import HEADS, KV_HEADS, LAYERS, PROMPT, STEPS

import kvlab
from kvlab import KvlabError
from kvlab.render.explorer import page as pages
from kvlab.render.explorer.query_view import Look, Spot

POLICIES = ["snapkv", "morphkv", "quest"]
BUDGETS = [36, 40]
LENGTH = PROMPT + STEPS
HOSTILE = {3: "</script>", 5: "<b>&amp;", 7: "\n", 9: "\u202e"}
WORDS = [HOSTILE.get(p, f" word{p}") for p in range(LENGTH)]


@pytest.fixture(scope="module")
def view(trace):
    made = kvlab.explore(trace, "snapkv", "morphkv", budgets=BUDGETS, budget=36)
    made.tokens = WORDS
    yield made
    made.close()


@pytest.fixture(scope="module")
def path(view, tmp_path_factory):
    return view.save(tmp_path_factory.mktemp("page") / "why.html", policies=POLICIES)


@pytest.fixture
def shown(browser, path):
    """shown(address, **more): the page in a window; no request may leave the file, and nothing may go wrong in it."""
    contexts = []

    def show(address="", size=DESKTOP, file=path, **more):
        context = opened(browser, f"{file.as_uri()}{address}", size, offline=True, **more)
        page, complaints = context.__enter__()
        contexts.append((context, complaints))
        page.wait_for_selector("body[data-ready]")
        return page

    yield show
    for context, complaints in contexts:
        context.__exit__(None, None, None)
        assert complaints == []


def value(page, name):
    return int(page.locator(f"#{name}").input_value())


def place(page):
    return Spot(*(value(page, name) for name in ("layer", "head", "step")))


def go(page, name, to):
    page.locator(f"#{name}").evaluate(
        "(dial, to) => { dial.value = to; dial.dispatchEvent(new Event('input', {bubbles: true})); }", to
    )


def address(page):
    page.wait_for_timeout(300)
    return dict(part.split("=") for part in page.url.partition("#")[2].split("&"))


def click(page, figure, x, y):
    """A click at a place within a picture, in its own pixels."""
    page.locator(f"#{figure} svg").click(position={"x": x, "y": y})


def look(view, name, budget, spot):
    return Look(view.replay(name, budget), spot, name)


def classes(page):
    return page.locator("#text span").evaluate_all("spans => spans.map(span => span.className.split(' '))")


def by_look(page, view, spot, budget=36, focus="snapkv"):
    """Hold each token's look against the sets and the attention at a query."""
    looks = [look(view, name, budget, spot) for name in POLICIES]
    weights = attention_by_hand(spot.layer, spot.head, spot.step)
    found = classes(page)
    for p, weight in enumerate(weights):
        own = found[p]
        held = sum(int(each.read[p]) << i for i, each in enumerate(looks))
        assert (f"m{held}" in own) == (held > 0), (p, own)
        kept = bool(looks[POLICIES.index(focus)].read[p])
        assert ("kept" in own) == kept
        (level,) = [int(name[4:]) for name in own if re.fullmatch("(lost|read)[0-9]", name)] or [0]
        assert abs(level - 8 * min(1, weight / pages.WEAK / 100) ** 0.5) <= 1.1
        assert not level or (f"read{level}" in own) == kept
    assert all("later" in own for own in found[len(weights) :])


def test_the_first_sentence_is_that_of_the_command(shown, view):
    page = shown()
    said = page.locator("#finding").inner_text()
    assert said.startswith(view.finding())
    first = view.worst()
    assert place(page) == first
    rest = {name: look(view, name, 36, first).mass_lost for name in POLICIES[1:]}
    assert said.endswith(f"Others here: {', '.join(f'{name} {pages.percent(lost)}' for name, lost in rest.items())}.")


def test_every_dial_repaints_the_text_by_the_sets_and_the_attention(shown, view):
    page = shown()
    for name, to in (("layer", 1), ("head", 4), ("step", 7), ("step", STEPS), ("head", 0), ("layer", 0)):
        go(page, name, to)
        by_look(page, view, place(page))
    page.locator("#budget").select_option(label="40")
    by_look(page, view, place(page), 40)
    page.get_by_role("radio", name="quest").click()
    by_look(page, view, place(page), 40, "quest")
    assert address(page) == {
        "policy": "quest",
        "versus": "morphkv",
        "budget": "40",
        "layer": "0",
        "head": "0",
        "step": str(STEPS),
    }


def test_a_policy_says_what_it_does_to_the_heads_output_and_to_the_model(shown, view):
    page = shown("#layer=1&head=3&step=9&budget=40")
    for name in POLICIES:
        result = view.replay(name, 40)
        told = page.locator("#policies button", has_text=name).get_attribute("title")
        error = float(re.search("output error here ([0-9.]+);", told)[1])
        assert error == pytest.approx(float(result.output_error[1, 3, 8]), abs=0.006)
        mean, recall = float(result.mass_lost.mean()), float(result.recall.mean())
        stored = f"recall of entries stored after the prompt {pages.percent(recall)}"
        assert told.endswith(f"{pages.percent(mean)} lost, {stored}")


def test_the_text_is_shown_as_it_is(shown):
    tokens = shown().locator("#text span").all_inner_texts()
    assert [tokens[p] for p in (3, 5)] == ["</script>", "<b>&amp;"]
    assert tokens[7].startswith("↵") and tokens[9] == "⟨U+202E⟩"


def test_a_cell_leads_to_its_layer_and_head_and_a_bar_to_its_step(shown):
    page = shown()
    for layer, head in ((1, 5), (0, 2)):
        # As drawn: 22 pixels of numbers, 30 of titles, cells of 15 by 9.
        click(page, "maps", 22 + 15 * head + 7, 30 + 9 * layer + 4)
        assert (value(page, "layer"), value(page, "head")) == (layer, head)
    width = page.locator("#curve svg").evaluate("svg => svg.viewBox.baseVal.width")
    for step in (1, 17, STEPS):
        click(page, "curve", 40 + (step - 0.5) * (width - 42) / STEPS, 50)
        assert value(page, "step") == step


def test_a_cell_of_the_head_leads_to_its_step_and_token(shown):
    page = shown()
    width = page.locator("#matrix svg").evaluate("svg => svg.viewBox.baseVal.width")
    high = page.locator("#matrix svg").evaluate("svg => svg.viewBox.baseVal.height") - 18
    click(page, "matrix", 28 + (20 + 0.5) * (width - 28) / LENGTH, (11 - 0.5) * high / STEPS)
    assert value(page, "step") == 11 and page.locator(".chosen").get_attribute("data-token") == "20"
    assert address(page)["token"] == "20"


def test_a_token_says_which_heads_wanted_it_and_when_each_policy_dropped_it(shown, view):
    page = shown()
    token = 21
    page.locator(f"#text [data-token='{token}']").click()
    panel = page.locator("#token")
    most = {
        (layer, head, step): attention_by_hand(layer, head, step)[token]
        for layer in range(LAYERS)
        for head in range(HEADS)
        for step in range(1, STEPS + 1)
    }
    layer, head, step = max(most, key=most.__getitem__)
    first = panel.locator("tr[data-go]").first
    assert f"layer {layer}, head {head}, step {step}" in first.inner_text()
    for name in POLICIES:
        sets = [
            view.replay(name, 36).stored(row, STEPS - 1)[group] for row in range(LAYERS) for group in range(KV_HEADS)
        ]
        kept = sum(token in each.tolist() for each in sets)
        assert f"{name}: {kept} of {LAYERS * KV_HEADS} KV heads keep it to the end" in panel.inner_text()
    first.click()
    assert place(page) == Spot(layer, head, step)
    page.keyboard.press("Escape")
    assert not panel.is_visible() and "token" not in address(page)


def test_a_token_dropped_while_decoding_is_told_with_its_steps(shown, view):
    page = shown("#policy=morphkv")
    result = view.replay("morphkv", 36)
    ends = {}
    for row in range(LAYERS):
        for group in range(KV_HEADS):
            for p in range(PROMPT):
                held = [t for t in range(1, STEPS + 1) if p in result.stored(row, t - 1)[group].tolist()]
                if held and held[-1] < STEPS:
                    ends.setdefault(p, {})[row, group] = held[-1]
    apart = {p: last for p, last in ends.items() if len(set(last.values())) > 1}
    alike = {p: last for p, last in ends.items() if len(set(last.values())) == 1}
    assert apart and alike
    for found in (apart, alike):
        token = max(found, key=lambda p: len(found[p]))
        last = sorted(found[token].values())
        when = f"step {last[0]}" if found is alike else f"steps {last[0]} to {last[-1]}"
        layer, group = next(iter(found[token]))
        go(page, "layer", layer)
        go(page, "head", group * HEADS // KV_HEADS)
        go(page, "step", STEPS)
        page.locator(f"#text [data-token='{token}']").click()
        told = page.locator("#token li", has_text="morphkv").inner_text()
        assert f"{len(last)} dropped it after {when}. Here: dropped after step {found[token][layer, group]}." in told


def test_what_a_selection_keeps_and_does_not_read_is_called_so_everywhere(shown, view):
    """Every word of the page on a step is of what the step reads; the panel alone says what is stored, too."""
    page = shown("#policy=quest&layer=1&head=0&step=9")
    read = set(view.replay("quest", 36).kept(1, 9)[0].tolist())
    unread, first = next(p for p in range(PROMPT) if p not in read), next(p for p in range(PROMPT) if p in read)
    for token, end in ((unread, "kept to the end, not read at this step"), (first, "kept to the end")):
        page.locator(f"#text [data-token='{token}']").hover()
        readers = page.locator("#tip").inner_text().partition("read by ")[2]
        assert ("quest" in readers) == (token == first) and readers
        page.locator(f"#text [data-token='{token}']").click()
        assert page.locator("#token li", has_text="quest").inner_text().endswith(f"Here: {end}.")
    assert [each for each in page.locator("body").inner_text().splitlines() if "kept by" in each] == []
    assert "read by quest" in page.locator("#legend").inner_text()
    assert "bands: read by each policy" in page.locator("#strip").inner_text()


def test_an_address_leads_to_its_view_and_ignores_what_the_page_lacks(shown, view):
    page = shown("#policy=morphkv&budget=40&layer=1&head=3&step=9&token=12")
    assert place(page) == Spot(1, 3, 9)
    assert "layer 1, head 3, morphkv lost" in page.locator("#finding").inner_text()
    by_look(page, view, Spot(1, 3, 9), 40, "morphkv")
    assert page.locator(".chosen").get_attribute("data-token") == "12"
    page = shown("#policy=nosuch&layer=99&head=99&step=x&token=-4")
    first = view.worst()
    assert place(page) == Spot(first.layer, HEADS - 1, first.step)


def test_the_difference_is_of_the_two_chosen_policies(shown, view):
    page = shown("#layer=1&head=2&step=5")
    for other in ("quest", "morphkv"):
        page.locator("#versus").select_option(label=other)
        apart = 100 * (
            look(view, "snapkv", 36, Spot(1, 2, 5)).mass_lost - look(view, other, 36, Spot(1, 2, 5)).mass_lost
        )
        told = page.locator("#maps svg text", has_text="points here").inner_html()
        assert told.removesuffix(" points here").replace("−", "-") == (f"{apart:+.0f}" if abs(apart) >= 0.5 else "0")


def test_buttons_and_keys(shown, view):
    page = shown("#layer=0&head=0&step=3")
    page.locator("#worst").click()
    assert place(page) == view.worst()
    page.locator("#differ").click()
    assert place(page) == view.most_different()
    page.keyboard.press("2")
    assert "morphkv lost" in page.locator("#finding").inner_text()
    page.locator("body").press("w")
    assert place(page) == view.worst("right")
    for key, name, change in (("k", "layer", -1), ("j", "layer", 1), (",", "head", -1), (".", "head", 1)):
        before = value(page, name)
        page.locator("body").press(key)
        top = {"layer": LAYERS, "head": HEADS}[name] - 1
        assert value(page, name) == min(top, max(0, before + change))
    go(page, "step", 5)
    page.locator("body").press("ArrowRight")
    assert value(page, "step") == 6
    page.locator("body").press("p")
    page.wait_for_function("document.getElementById('step').value > 7")
    page.locator("body").press("p")
    stopped = value(page, "step")
    page.wait_for_timeout(1200)
    assert value(page, "step") == stopped


def test_words_are_found_across_tokens(shown):
    page = shown()
    page.locator("body").press("/")
    page.keyboard.type("WORD20 word21")
    assert page.locator("#found").inner_text() == "1 of 1"
    assert [each.get_attribute("data-token") for each in page.locator(".hit").all()] == ["20", "21"]
    page.locator("#search").fill("word3")
    count = sum("word3" in word for word in WORDS)
    page.keyboard.press("Enter")
    assert page.locator("#found").inner_text() == f"2 of {count}"
    page.locator("#search").fill("nowhere")
    assert page.locator("#found").inner_text() == "not found" and page.locator(".hit").count() == 0


@pytest.mark.parametrize("figure", ["strip", "maps", "curve", "matrix"])
def test_a_picture_is_saved_alone(figure, shown):
    page = shown(color_scheme="dark")
    saved = {}
    for form in ("svg", "png"):
        with page.expect_download() as download:
            page.locator(f"#{figure} [data-save={form}]").click()
        saved[form] = download.value.path().read_bytes()
        assert download.value.suggested_filename.endswith(f".{form}")
    drawing = ElementTree.fromstring(saved["svg"])
    title = page.locator(f"#{figure} figcaption b").inner_text()
    assert title in "".join(drawing.itertext()) and "layer" in "".join(drawing.itertext())
    assert b"var(" not in saved["svg"] and drawing.tag.endswith("svg")
    size = struct.unpack(">II", saved["png"][16:24])
    assert size == (2 * int(drawing.get("width")), 2 * int(drawing.get("height")))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_it_fits_and_is_legible_and_its_controls_stay(size, scheme, shown):
    page = shown("#token=20", size, color_scheme=scheme)
    page.locator("#help").click()
    assert overflow(page) <= 0
    assert [(words, contrast) for words, contrast in contrasts(page, "body") if contrast < 4.5] == []
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    top = page.locator("#top").bounding_box()
    assert top["y"] == 0 and top["height"] < size[1] / 4


def test_the_page_asks_for_nothing_but_its_file(browser, path):
    context = browser.new_context()
    page, asked = context.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-ready]")
    context.close()
    assert asked == [path.as_uri()]
    assert not re.search(r"(?:src|href)=|https?://(?!www\.w3\.org/2000/svg)", path.read_text(encoding="utf-8"))


def test_a_notebooks_cell_holds_the_page(browser, view, tmp_path):
    cell = tmp_path / "notebook.html"
    cell.write_text(f"<!doctype html><meta charset=utf-8>{view.page(POLICIES).data}", encoding="utf-8")
    with opened(browser, cell.as_uri(), offline=True) as (page, complaints):
        within = page.frame_locator("iframe")
        within.locator("body[data-ready]").wait_for()
        within.locator("#maps svg").click(position={"x": 22 + 15 * 3 + 7, "y": 30 + 9 + 4})
        assert "layer 1, head 3, snapkv lost" in within.locator("#finding").inner_text()
        page.wait_for_timeout(300)
        assert complaints == [] and page.url == cell.as_uri()


def test_a_page_is_no_larger_than_its_parts(path):
    queries, runs = LAYERS * HEADS * STEPS, len(POLICIES) * len(BUDGETS)
    bits = STEPS * LAYERS * KV_HEADS * LENGTH // 8
    # A byte for each weight; sets that are read and stored, and three numbers for each query. Base64 adds a third.
    data = 4 / 3 * (queries * LENGTH + runs * (2 * bits + 6 * queries))
    assert path.stat().st_size < data + 60_000


def test_a_long_response_is_cut_to_the_steps_there_is_room_for(shown, view, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "CELLS", LAYERS * HEADS * LENGTH * 9)
    view.show(step=STEPS)
    page = shown(file=view.save(tmp_path / "cut.html"))
    assert page.locator("#step").get_attribute("max") == "9" and 1 <= value(page, "step") <= 9
    page.locator("#help").click()
    assert f"the first 9 of {STEPS} steps" in page.locator("#limits").inner_text()
    losses = view.replay("snapkv", 36).concentrated_loss[:, :, :9]
    at = place(page)
    assert page.locator("#finding").inner_text().startswith(view.finding())
    assert losses[at.layer, at.head, at.step - 1] == losses.max()


def test_layers_have_their_numbers_and_a_head_may_have_a_set_of_its_own(shown, tiny, tmp_path):
    ids = torch.randint(3, 256, (60,), generator=torch.Generator().manual_seed(1))
    trace = kvlab.capture(tiny("hybrid-gemma3"), ids, 6)
    own = kvlab.policy("snapkv", budget=40, sets="head")
    view = kvlab.explore(trace, own, "snapkv", budgets=[40])
    page = shown("#layer=4&head=3&step=2", file=view.save(tmp_path / "hybrid.html"))
    assert "layer 4, head 3" in page.locator("#finding").inner_text() and address(page)["layer"] == "4"
    for head in range(trace.heads):
        go(page, "head", head)
        kept = [
            set(kvlab.replay(trace, policy).kept(4, 2)[head * n // trace.heads].tolist())
            for policy, n in (
                (own, trace.heads),
                (kvlab.policy("snapkv", budget=40), trace.kv_heads),
            )
        ]
        for p, names in enumerate(classes(page)[: trace.prompt_length + 2]):
            mask = sum((p in each) << i for i, each in enumerate(kept))
            assert [name for name in names if re.fullmatch("m[0-9]+", name)] == ([f"m{mask}"] if mask else [])
    view.close()


def test_effects_colour_the_tokens_and_stand_in_their_panel(shown, tiny, tmp_path):
    lm, policy = tiny(), small("snapkv")
    trace = kvlab.capture(lm, prompt(48), new_tokens=6, pseudo=())
    why = kvlab.attribute(lm, policy, trace)
    view = kvlab.explore(trace, policy, small("streamingllm"), budgets=[14], effects=why)
    page = shown(file=view.save(tmp_path / "effects.html"))
    page.get_by_role("button", name="colour by effect").click()
    nats = [*why.costs.sum((0, 1)).tolist(), 0.0]
    harm = sum(cost for cost in nats if cost > 0)
    for p, (own, cost) in enumerate(zip(classes(page), nats, strict=True)):
        level = 8 * min(1, abs(cost) / harm / 0.05) ** 0.5
        painted = [name for name in own if re.fullmatch("(lost|read)[0-9]", name)]
        if abs(cost) / harm < 0.00049:
            assert painted == [], p
        elif abs(cost) / harm > 0.00051:
            assert painted[0][:4] == ("lost" if cost > 0 else "read") and abs(int(painted[0][4:]) - level) <= 1
    worst = max(range(48), key=nats.__getitem__)
    page.locator(f"#text [data-token='{worst}']").click()
    assert f"its loss costs the response {nats[worst]:.2g} nats".casefold() in page.locator("#token").inner_text()
    page.locator("#text [data-token='53']").click()
    assert "costs the response 0.0 nats" in page.locator("#token").inner_text()
    assert address(page)["colour"] == "effect"
    view.close()


def test_numbers_lie_where_a_browser_may_read_them():
    store = pages._Store()
    places = [store.add(np.zeros(size, np.uint8)) for size in (1, 2, 3, 5, 4)]
    assert [start % 4 for start, _ in places] == [0] * 5 and [size for _, size in places] == [1, 2, 3, 5, 4]
    assert len(store.bytes()) == places[-1][0] + 4


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        (["snapkv"], "2 to 4 different policies, not 1"),
        (["snapkv", "snapkv"], "2 to 4 different policies"),
        (["snapkv", "morphkv", "quest", "full", "random"], "not 5"),
        (["snapkv", "snapk"], "did you mean 'snapkv'"),
    ],
)
def test_other_policies_than_a_page_can_show_are_refused(policies, said, view, tmp_path):
    with pytest.raises(KvlabError, match=said):
        view.save(tmp_path / "no.html", policies=policies)
    assert not list(tmp_path.iterdir())
