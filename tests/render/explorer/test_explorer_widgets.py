"""Sliders and buttons: they move the picture, the picture moves them, and a page without them says the same."""

from __future__ import annotations

import base64
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from support.exploring import (
    concentrated_by_hand,
    shown_by,
    words,
)
from support.paths import ROOT

import kvlab
from kvlab import KvlabError
from kvlab.render.explorer import explorer as module
from kvlab.render.explorer import query_html
from kvlab.render.explorer.html_medium import LIVE
from kvlab.replays.run import replay


def test_sliders_move_the_picture_and_the_picture_moves_the_sliders(explorer):
    explorer.panel  # noqa: B018
    controls, before = explorer._controls, shown_by(explorer)
    controls["layer"].value = 1 - explorer.spot.layer
    assert explorer.spot.layer == controls["layer"].value and shown_by(explorer) != before
    explorer.show(layer=0, head=2, step=3, budget=44)
    assert [controls[name].value for name in ("layer", "head", "step", "budget")] == [0, 2, 3, 44]
    assert "layer 0, query head 2, decoding step 3" in shown_by(explorer)


def test_the_widgets_and_the_static_page_say_the_same(explorer):
    explorer.panel  # noqa: B018
    explorer.show(layer=1, head=5, step=20)
    static, live = words(explorer.html()), words(shown_by(explorer))
    legend = words(query_html.legend(LIVE))
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
    explorer.show(layer=1 - explorer.spot.layer)
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
        place = explorer.spot
        return float(values[place.layer, place.head, place.step - 1])

    right.click()
    assert at(lost[1]) == lost[1].max()
    different.click()
    assert at(np.abs(lost[0] - lost[1])) == np.abs(lost[0] - lost[1]).max()
    left.click()
    assert at(lost[0]) == lost[0].max()
    assert [explorer._controls[name].value for name in ("layer", "head", "step")] == list(vars(explorer.spot).values())


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
    path = ROOT / "notebooks" / "01_explore.ipynb"
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
        return replay(trace, policy)

    monkeypatch.setattr(module, "replay", slow)
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
            explorer.show(left="snapkv", layer=1 - explorer.spot.layer)
        assert explorer.html() == before and explorer.chosen == ["streamingllm", "full"]
        explorer._controls["left"].value = "snapkv"
        assert "budget" in explorer._message.value and explorer._controls["left"].value == "streamingllm"
        assert shown_by(explorer) == live
        explorer._controls["budget"].value = 8
        assert explorer._message.value == "" and "budget 8" in shown_by(explorer)
    finally:
        explorer.close()
