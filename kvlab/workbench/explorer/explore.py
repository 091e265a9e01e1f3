"""`kvlab.explore(trace)`: sliders over policy, budget, layer, head and step, and what the query there lost.

Where widgets do not run (a code host, a static export) the same picture is shown as it stands.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlab.errors import KvlabError, nearest, whole
from kvlab.inputs import models
from kvlab.lib import bars
from kvlab.methods import Policy, policies, policy, unknown
from kvlab.replays.run import Replay
from kvlab.traces.trace import opened
from kvlab.workbench.explorer import picture
from kvlab.workbench.explorer.picture import LIVE, Look, Place

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.traces.trace import Trace

LEFT, RIGHT = "snapkv", "dapq"
SIDES = ("left", "right")
HELP = {
    "left": "the policy of the left side",
    "right": "the policy of the right side",
    "budget": "entries that each policy may keep for every layer and KV head",
    "layer": "layer of the query that is shown, from 0",
    "head": "query head that is shown, from 0; heads of one group share a KV head",
    "step": "decoding step of the query that is shown, from 1: which token of the response asks",
}
KEYS = (
    "A slider that was clicked on moves by one with the arrow keys, by more with Page Up and Page Down, and to its "
    "ends with Home and End; its number can be typed over."
)
# Where the widgets did not come to life, JupyterLab's word about that is hidden.
STILL = (
    "<style>.jp-OutputArea-child:not(:has(.widget-box)):has(+ .jp-OutputArea-child .kvlab-picture)"
    "{display:none}</style>"
)
CUT = 8  # tokens that one character may be cut into
_numbers = itertools.count(1)


class Explorer:
    """Two policies side by side on one trace, at one query. Shown by JupyterLab as sliders and a picture; where nobody
    watches (papermill, nbconvert) as the picture alone. `panel` always has the sliders.

    Replays are made when they are first looked at and kept; those of the other budgets of the two chosen policies are
    made in the background, so that moving the budget does not wait.

    Attributes:
        place: the query that is shown.
        chosen: the names of the two policies.
        budget: entries for each layer and KV head.
    """

    def __init__(
        self,
        trace: Trace,
        left: str | Policy,
        right: str | Policy,
        budgets: Sequence[int],
        budget: int,
        place: Place,
        tokens: Sequence[str],
    ):
        self.trace, self.tokens, self.budgets = trace, list(tokens), list(budgets)
        self._own = {_label(one): one for one in (left, right) if isinstance(one, Policy)}
        self.chosen = [_label(one) for one in (left, right)]
        self.budget, self.place = budget, place
        self._replays: dict[tuple[str, int], Replay] = {}
        self._locks: dict[tuple[str, int], threading.Lock] = {}
        self._lock = threading.Lock()
        self._ahead: ThreadPoolExecutor | None = None
        self._queued: list[Future] = []
        self._panel = None
        # Other notebooks are open in the same page, so a number alone would not do.
        self._mark = f"kvlab-{zlib.crc32(f'{trace.signature} {self.chosen}'.encode()):x}-{next(_numbers)}"
        own = [name for name in self._own if name not in policies()]
        self.names = own + [name for name in policies() if name in self.chosen or _fits(trace, name, self.budgets[0])]

    # ------------------------------------------------------------------ what is shown

    def replay(self, name: str, budget: int) -> Replay:
        """The replay of a policy at a budget, made on first use."""
        key = name, budget
        if key not in self._replays:
            # A lock of its own: what is made in the background must not hold up what is looked at.
            with self._lock:
                mine = self._locks.setdefault(key, threading.Lock())
            with mine:
                if key not in self._replays:
                    self._replays[key] = Replay(self.trace, self._policy(name, budget))
        return self._replays[key]

    def _policy(self, name: str, budget: int) -> Policy:
        own = self._own.get(name)
        if own is not None:
            return own.replace(budget=budget) if "budget" in type(own).model_fields else own
        return _made(name, budget)

    def looks(self) -> list[Look]:
        """What each of the two policies leaves of the chosen query."""
        return self._looks(self.chosen, self.budget, self.place)

    def _looks(self, chosen: Sequence[str], budget: int, place: Place) -> list[Look]:
        return [Look(self.replay(name, budget), place, name) for name in chosen]

    def html(self) -> str:
        """The picture as it stands, as HTML that needs nothing else."""
        return picture.page(self.looks(), self.tokens, self._mark)

    def show(self, **changes: Any) -> None:
        """Look elsewhere: any of left, right, budget, layer, head, step.

        Raises:
            KvlabError: no such policy, budget or place in this trace, or a policy that needs a larger budget; the
                picture stays as it was.
        """
        known = (*SIDES, "budget", "layer", "head", "step")
        for name in changes:
            if name not in known:
                raise KvlabError(nearest(name, known, "setting"))
        chosen = [changes.get("left", self.chosen[0]), changes.get("right", self.chosen[1])]
        for name in chosen:
            if name not in self.names:
                raise KvlabError(nearest(name, self.names, "policy for this trace"))
        budget = changes.get("budget", self.budget)
        if budget not in self.budgets:
            raise KvlabError(f"the budgets of this view are {', '.join(map(str, self.budgets))}, and not {budget}")
        wanted = {name: changes.get(name, getattr(self.place, name)) for name in ("layer", "head", "step")}
        place = _checked(self.trace, **wanted)
        # Before anything is changed: a policy may refuse.
        self._looks(chosen, budget, place)
        self.place, self.chosen, self.budget = place, chosen, budget
        self._redraw()
        if set(SIDES) & set(changes):
            self.look_ahead()

    def worst(self, side: str = "left") -> Place:
        """The query that loses the most attention on the fewest tokens (`measures.concentrated_loss`) under the policy
        of a side: "left" or "right". One that loses a little on each of a thousand tokens says nothing about a text.
        """
        if side not in SIDES:
            raise KvlabError(nearest(side, SIDES, "side"))
        return self._at_most(self.replay(self.chosen[SIDES.index(side)], self.budget).concentrated_loss)

    def most_different(self) -> Place:
        """The query at which the two policies differ the most in that measure."""
        left, right = (self.replay(name, self.budget).concentrated_loss for name in self.chosen)
        return self._at_most((left - right).abs())

    def _at_most(self, values: Tensor) -> Place:
        layer, head, step = (int(i) for i in torch.unravel_index(values.argmax(), values.shape))
        return Place(layer, head, step + 1)

    def look_ahead(self) -> list[Future]:
        """Make the replays of the chosen policies at the other budgets in the background."""
        # What was queued for other policies would come first.
        for one in self._queued:
            one.cancel()
        if self._ahead is None:
            self._ahead = ThreadPoolExecutor(1)
        # The nearest budgets are the likeliest to be looked at next.
        at = self.budgets.index(self.budget)
        near = sorted(self.budgets, key=lambda budget: abs(self.budgets.index(budget) - at))
        self._queued = [self._ahead.submit(self._make, name, budget) for budget in near for name in self.chosen]
        return self._queued

    def _make(self, name: str, budget: int) -> None:
        # At the interpreter's end the pool works off what is queued, which nobody will look at.
        if threading.main_thread().is_alive():
            with contextlib.suppress(KvlabError):  # said when it is looked at
                self.replay(name, budget)

    def close(self) -> None:
        """Stop working in the background, until other policies are chosen; what is shown can still be moved."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=False, cancel_futures=True)
        self._ahead, self._queued = None, []

    # ------------------------------------------------------------------ widgets

    @property
    def panel(self) -> Any:
        """The sliders and the picture, an ipywidgets box; made once."""
        if self._panel is None:
            self._panel = self._made_panel()
        return self._panel

    def _made_panel(self) -> Any:
        import ipywidgets as widgets

        wide = widgets.Layout(width="312px")
        style = {"description_width": "70px"}
        trace, place = self.trace, self.place

        def common(name: str) -> dict[str, Any]:
            return {"description": name, "tooltip": HELP[name], "layout": wide, "style": style}

        def slider(name: str, low: int, high: int) -> widgets.IntSlider:
            return widgets.IntSlider(getattr(place, name), low, high, **common(name))

        left, right = (
            widgets.Dropdown(options=self.names, value=name, **common(side))
            for side, name in zip(SIDES, self.chosen, strict=True)
        )
        budget = widgets.SelectionSlider(options=self.budgets, value=self.budget, **common("budget"))
        self._controls = {
            "left": left,
            "right": right,
            "budget": budget,
            "layer": slider("layer", 0, trace.n_layers - 1),
            "head": slider("head", 0, trace.heads - 1),
            "step": slider("step", 1, trace.steps),
        }
        for name, control in self._controls.items():
            control.observe(lambda change, name=name: self._moved(name, change["new"]), names="value")
        places = {
            "worst of left": ("where the left policy loses much attention on few tokens", lambda: self.worst("left")),
            "worst of right": ("the same for the right policy", lambda: self.worst("right")),
            "most different": ("where one policy loses much on few tokens, the other not", self.most_different),
        }
        buttons = []
        for name, (about, find) in places.items():
            button = widgets.Button(description=name, tooltip=about)
            button.on_click(lambda _, find=find: self._answer(lambda: self.show(**vars(find()))))
            buttons.append(button)
        self._message = widgets.HTML()
        drawn = self._drawn_panel(widgets)
        # Not before the first picture: both would want the same cores.
        self.look_ahead()
        wrapped = widgets.Layout(flex_flow="row wrap")
        return widgets.VBox(
            [
                widgets.HBox(list(self._controls.values()), layout=wrapped),
                widgets.HBox(buttons, layout=wrapped),
                widgets.HTML(_help([*HELP.items(), *((name, about) for name, (about, _) in places.items())])),
                self._message,
                drawn,
            ]
        )

    def _drawn_panel(self, widgets: Any) -> Any:
        """The picture in parts, of which only those that change are sent; each text keeps how far it was scrolled."""
        self._parts = {name: widgets.HTML(html) for name, html in self._live().items()}
        sides = []
        for side in SIDES:
            self._parts[f"{side} text"].add_class("kvlab-scroll")
            one = widgets.VBox([self._parts[f"{side} {part}"] for part in ("top", "text", "below")])
            sides.append(one.add_class("kvlab-side"))
        # Where the widgets live, the picture that is saved beside them is not seen.
        hidden = f"<style>.{self._mark}-still{{display:none}}</style>"
        legend = widgets.HTML(picture.SHEET + hidden + picture.legend(LIVE))
        drawn = widgets.VBox([self._parts["where"], legend, widgets.HBox(sides).add_class("kvlab-sides")])
        return drawn.add_class("kvlab-picture")

    def _live(self) -> dict[str, str]:
        """The HTML of each part of the picture."""
        looks = self.looks()
        opened = picture.passages(looks, len(self.tokens))
        parts = {"where": picture.where(looks[0], self.tokens)}
        for side, look in zip(SIDES, looks, strict=True):
            mark = f"{self._mark}{side}"
            parts[f"{side} top"] = picture.top(look, LIVE)
            parts[f"{side} text"] = picture.text(look, self.tokens, LIVE, mark, opened)
            parts[f"{side} below"] = picture.below(look, self.tokens, LIVE, mark)
        return parts

    def _moved(self, name: str, value: Any) -> None:
        if value != self._shown(name):
            self._answer(lambda: self.show(**{name: value}))

    def _answer(self, ask: Callable[[], None]) -> None:
        """Do what a control asks for; what goes wrong is said beside the controls, which then show what is shown."""
        try:
            ask()
            self._message.value = ""
        except Exception as error:
            about = str(error) if isinstance(error, KvlabError) else f"{type(error).__name__}: {error}"
            self._message.value = f'<span style="color:rgb{picture.RED}">{escape(about)}</span>'
            self._follow()
            # A fault of a user's own policy: its traceback belongs in the log.
            if not isinstance(error, KvlabError):
                raise

    def _shown(self, name: str) -> Any:
        if name in SIDES:
            return self.chosen[SIDES.index(name)]
        return self.budget if name == "budget" else getattr(self.place, name)

    def _follow(self) -> None:
        for name, control in self._controls.items():
            control.value = self._shown(name)

    def _redraw(self) -> None:
        if self._panel is None:
            return
        for name, html in self._live().items():
            self._parts[name].value = html
        self._follow()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        still = self.html()
        if _watched():
            # Two outputs: JupyterLab saves no state of widgets, so that a notebook that is opened again has an error in
            # the place of the first, and the second to show.
            panel = self.panel._repr_mimebundle_()
            display({**panel, "text/html": "", "text/plain": repr(self)}, raw=True)
            still = f'{STILL}<div class="{self._mark}-still">{still}</div>'
        display({"text/html": still, "text/plain": repr(self)}, raw=True)

    def __repr__(self) -> str:
        return (
            f"Explorer({' and '.join(self.chosen)} at {self.budget} on {self.trace.signature}, layer "
            f"{self.place.layer}, head {self.place.head}, step {self.place.step})"
        )


def _watched() -> bool:
    """Whether a front end runs this cell that can ask its user something, and show widgets.

    papermill and nbconvert say that they cannot: there the picture alone is shown, since sliders that are saved with a
    notebook double its size and move nothing.
    """
    return importlib.util.find_spec("ipywidgets") is not None and bool(bars.front_end())


def explore(
    trace: Trace | str | Path,
    left: str | Policy = LEFT,
    right: str | Policy = RIGHT,
    *,
    budgets: Sequence[int] | None = None,
    budget: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    step: int | None = None,
    lm: LM | None = None,
) -> Explorer:
    """Explore a trace by hand in JupyterLab: two policies side by side, one query, and what it lost.

    Args:
        trace: with a response; or the path of one that was saved.
        left, right: two policies, by name or as objects (of the user's own, or two variants of one).
        budgets: the stops of the budget's slider; by default powers of two below the prompt's length, and the budgets
            of policies that are given as objects.
        budget: the one to begin with; by default that of a policy given as an object, else the middle one.
        layer, head, step: the query to begin with (step from 1); by default the worst under `left`
            (`Explorer.worst`).
        lm: whose tokenizer shows the text; by default that of the model that the trace names.

    Raises:
        KvlabError: a trace without a response, a policy that this trace cannot serve, two policies that differ in their
            budgets alone, or a place outside the trace.
    """
    trace = opened(trace)
    if not trace.steps:
        raise KvlabError("there is no query to look at: this trace has no response; capture it with new_tokens=32")
    for one in (left, right):
        if isinstance(one, str) and one not in policies():
            raise KvlabError(unknown(one))
    if _label(left) == _label(right) and _given(left, trace) != _given(right, trace):
        raise KvlabError(
            f"both sides are {_label(left)}, and the slider gives both the same budget: choose two "
            "policies that differ in something else"
        )
    stops = default_budgets(trace, left, right) if budgets is None else sorted({whole("a budget", b) for b in budgets})
    if budget is not None:
        stops = sorted({*stops, whole("a budget", budget)})
    if not stops or min(stops) < 1:
        raise KvlabError(f"budgets must be whole numbers of entries from 1 on, and are {stops}")
    likely = (budget, _given(left, trace), _given(right, trace), stops[len(stops) // 2])
    begin = next(int(one) for one in likely if one in stops)
    explorer = Explorer(trace, left, right, stops, begin, Place(0, 0, 1), texts(trace, lm))
    first = explorer.worst()
    explorer.place = _checked(
        trace,
        layer=first.layer if layer is None else layer,
        head=first.head if head is None else head,
        step=first.step if step is None else step,
    )
    explorer.replay(explorer.chosen[1], explorer.budget)
    return explorer


def _label(one: str | Policy) -> str:
    """What a policy is called here: its name, and where it is an object, the parameters that it was given besides."""
    if isinstance(one, str):
        return one
    fields = type(one).model_fields
    own = ", ".join(f"{name}={value!r}" for name, value in one if name != "budget" and value != fields[name].default)
    return f"{one.name}({own})" if own else one.name


def _given(one: str | Policy, trace: Trace) -> int | None:
    """The entries that a policy was given as an object; None for a name, and for one that has no budget."""
    has = isinstance(one, Policy) and "budget" in type(one).model_fields
    return one.entries(trace.prompt_length) if has else None


def _help(about: Sequence[tuple[str, str]]) -> str:
    """What each control does, folded away."""
    rows = "".join(
        f'<div style="display:flex;gap:8px"><b style="flex:0 0 120px">{name}</b><span>{what}</span></div>'
        for name, what in about
    )
    return (
        '<details style="line-height:1.5;margin:2px"><summary style="cursor:pointer">what the controls do</summary>'
        f"{rows}<div>{KEYS}</div></details>"
    )


def default_budgets(trace: Trace, *chosen: str | Policy) -> list[int]:
    """Powers of two from the least that the chosen policies work with up to the prompt's length, and their own
    budgets.
    """
    lowest = max(_minimum(one) for one in chosen)
    given = {budget for one in chosen if (budget := _given(one, trace)) is not None and budget >= lowest}
    stops = {2**k for k in range(4, 18) if lowest <= 2**k < trace.prompt_length} | given
    return sorted(stops) or [max(lowest, 1)]


def _minimum(one: str | Policy) -> int:
    return one.minimum if isinstance(one, Policy) else _made(one, 2**20).minimum


def _made(name: str, budget: int) -> Policy:
    from kvlab.methods import registry

    return policy(name, budget=budget) if "budget" in registry()[name].model_fields else policy(name)


def _fits(trace: Trace, name: str, budget: int) -> bool:
    """Whether the trace holds what a policy needs (queries, pseudo-queries, accumulated attention)."""
    try:
        one = _made(name, max(budget, _minimum(name)))
        held = not one.pseudo_key or trace.prompt.pseudo(one) is not None
    except KvlabError:  # also of somebody's policy that cannot be made from a budget alone
        return False
    queries = trace.queries.shape[2] - trace.steps
    needed = trace.prompt_length if one.observes is None else min(one.observes, trace.prompt_length)
    if queries < needed or (one.accumulates and trace.accumulated is None):
        return False
    return held and not (one.reads_perplexity and trace.nll is None)


def _checked(trace: Trace, layer: int, head: int, step: int) -> Place:
    found = []
    for name, value, low, high in (
        ("layer", layer, 0, trace.n_layers - 1),
        ("head", head, 0, trace.heads - 1),
        ("step", step, 1, trace.steps),
    ):
        if not low <= whole(name, value) <= high:
            raise KvlabError(f"{name} {value} is outside this trace, which has {low} .. {high}")
        found.append(whole(name, value))
    return Place(*found)


def texts(trace: Trace, lm: LM | None = None) -> list[str]:
    """The text of each token of a trace; positions in brackets where there is no tokenizer to tell. Of a character that
    is cut into several tokens the first has the text, the others none.
    """
    if trace.ids is None:
        return [f"[{position}] " for position in range(trace.length)]
    # Only what lies on this machine: a view must never start a download.
    name = str(trace.meta.get("model", "")).split("@")[0]
    tokenizer = lm.tokenizer if lm is not None else models.tokenizer(name)
    ids = trace.ids.tolist()
    if tokenizer is None:
        return [f"[{number}] " for number in ids]
    found, before, at = [], 0, 0
    while at < len(ids):
        ends = range(at + 1, min(at + CUT, len(ids)) + 1)
        pieces = ((end, _piece(tokenizer, ids[before:at], ids[at:end])) for end in ends)
        end, piece = next(
            (each for each in pieces if not each[1].endswith("\ufffd")), (at + 1, tokenizer.decode(ids[at : at + 1]))
        )
        found += [piece, *[""] * (end - at - 1)]
        before, at = at, end
    return found


def _piece(tokenizer: Any, before: list[int], ids: list[int]) -> str:
    """What some tokens add to the text; alone, those of some tokenizers lose the space that they begin with."""
    context, both = tokenizer.decode(before), tokenizer.decode(before + ids)
    return both[len(context) :] if both.startswith(context) else tokenizer.decode(ids)
