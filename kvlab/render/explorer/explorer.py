"""Two policies side by side at one query of a trace: the state, and the widgets that change it."""

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

from kvlab.errors import KvlabError, nearest
from kvlab.lib import extras, policy_names, progress_bars
from kvlab.lib.files import replacing
from kvlab.methods import Policy, policies, registry
from kvlab.render.explorer import choices, page, query_html, token_html
from kvlab.render.explorer.effects import Picture
from kvlab.render.explorer.html_medium import LIVE, RED, SHEET
from kvlab.render.explorer.query_view import Look, Spot
from kvlab.replays.replay import Replay
from kvlab.replays.run import replay

if TYPE_CHECKING:
    from kvlab.attribution.results import Attribution
    from kvlab.traces.trace import Trace

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
    "Click on a slider to move it with the keyboard. The arrow keys move it by one, and Page Up and Page Down by more. "
    "Home and End move it to its ends. Its number can be typed over."
)
# Hides JupyterLab's message about widgets that could not start.
STILL = (
    "<style>.jp-OutputArea-child:not(:has(.widget-box)):has(+ .jp-OutputArea-child .kvlab-picture)"
    "{display:none}</style>"
)
_numbers = itertools.count(1)


class Explorer:
    """Two policies side by side on one trace, at one query.

    JupyterLab shows sliders and a picture. Where nobody watches (papermill, nbconvert), only the picture is shown.
    `panel` always has the sliders.

    A replay is made when it is first looked at, and kept. Replays of the two chosen policies at the other budgets are
    made in the background, so the budget slider does not wait.

    Attributes:
        spot: the query that is shown.
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
        spot: Spot,
        tokens: Sequence[str],
        effects: Attribution | None = None,
    ):
        self._effects = None if effects is None else Picture(effects)
        self.trace, self.tokens, self.budgets = trace, list(tokens), list(budgets)
        self._own = {choices.label(choice): choice for choice in (left, right) if isinstance(choice, Policy)}
        self.chosen = [choices.label(choice) for choice in (left, right)]
        self.budget, self.spot = budget, spot
        self._replays: dict[tuple[str, int], Replay] = {}
        self._locks: dict[tuple[str, int], threading.Lock] = {}
        self._lock = threading.Lock()
        self._ahead: ThreadPoolExecutor | None = None
        self._queued: list[Future] = []
        self._panel = None
        # Other notebooks may be open in the same page, so a number alone is not unique.
        self._mark = f"kvlab-{zlib.crc32(f'{trace.signature} {self.chosen}'.encode()):x}-{next(_numbers)}"
        own, offered = [name for name in self._own if name not in registry()], policies()
        self.names = own + [
            name
            for name in registry()
            if name in self.chosen or (name in offered and choices.fits(trace, name, self.budgets[0]))
        ]

    # ------------------------------------------------------------------ what is shown

    def replay(self, name: str, budget: int) -> Replay:
        """The replay of a policy at a budget, made on first use."""
        key = name, budget
        if key not in self._replays:
            # Each replay has its own lock: one made in the background must not delay the one that is looked at.
            with self._lock:
                lock = self._locks.setdefault(key, threading.Lock())
            with lock:
                if key not in self._replays:
                    self._replays[key] = replay(self.trace, self._policy(name, budget))
        return self._replays[key]

    def _policy(self, name: str, budget: int) -> Policy:
        own = self._own.get(name)
        if own is not None:
            return own.replace(budget=budget) if "budget" in type(own).model_fields else own
        return choices.made(name, budget)

    def looks(self) -> list[Look]:
        """The chosen query under each of the two policies."""
        return self._looks(self.chosen, self.budget, self.spot)

    def _looks(self, chosen: Sequence[str], budget: int, spot: Spot) -> list[Look]:
        return [Look(self.replay(name, budget), spot, name) for name in chosen]

    def html(self) -> str:
        """The present picture, as HTML that needs nothing else."""
        below = "" if self._effects is None else self._effects.html()
        return query_html.page(self.looks(), self.tokens, self._mark) + below

    def show(self, **changes: Any) -> None:
        """Show another query or policy: any of left, right, budget, layer, head, step.

        Raises:
            KvlabError: no such policy, budget or query in this trace, or a policy that needs a larger budget. The
                picture then stays as it was.
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
        target = {name: changes.get(name, getattr(self.spot, name)) for name in ("layer", "head", "step")}
        spot = choices.checked(self.trace, **target)
        # Before anything is changed: a policy may refuse.
        self._looks(chosen, budget, spot)
        self.spot, self.chosen, self.budget = spot, chosen, budget
        self._redraw()
        if set(SIDES) & set(changes):
            self.look_ahead()

    def save(
        self,
        path: str | Path,
        policies: Sequence[str | Policy] | None = None,
        budgets: Sequence[int] | None = None,
    ) -> Path:
        """Write one HTML file that needs nothing else: two to four policies on the text, maps, steps, one head.

        It opens at the present policy, budget and query. If the page has no room for that step, both move to the worst
        query that it has. Its address names what is chosen in it.

        Args:
            policies: two to four, by name or as objects; by default the two that are chosen.
            budgets: by default all stops of the slider.

        Raises:
            KvlabError: fewer or more policies, one that needs more than this trace holds, or a budget that one refuses.
        """
        path, whole = Path(path), self._page(policies, budgets)
        with replacing(path) as part:
            part.write_text(whole, encoding="utf-8")
        return path

    def page(
        self,
        policies: Sequence[str | Policy] | None = None,
        budgets: Sequence[int] | None = None,
        height: int = 900,
    ) -> Any:
        """The page that `save` writes, as the output of a notebook's cell, `height` pixels high.

        The notebook then holds the page's megabytes, and its reader needs no kernel.
        """
        from IPython.display import HTML

        return HTML(f"<div>{page.frame(self._page(policies, budgets), height)}</div>")

    def _page(self, policies: Sequence[str | Policy] | None, budgets: Sequence[int] | None) -> str:
        self._own |= {choices.label(choice): choice for choice in policies or () if isinstance(choice, Policy)}
        names = [choices.label(choice) for choice in policies or self.chosen]
        for name in names:
            if name not in self._own and name not in self.names:
                raise KvlabError(nearest(name, self.names, "policy for this trace"))
        policy_names.check_page(names)
        stops = self.budgets if budgets is None else sorted(budgets)
        jobs = list(itertools.product(names, stops))
        runs = {job: self.replay(*job) for job in progress_bars.each(jobs, "replay", "policy", None)}
        name = self.chosen[0] if self.chosen[0] in names else names[0]
        budget = min(stops, key=lambda stop: abs(stop - self.budget))
        shown = page.steps_shown(self.trace)
        if self.spot.step > shown:
            self.show(**vars(self._at_most(runs[name, budget].concentrated_loss[:, :, :shown])))
        effects = None if self._effects is None else self._effects.why
        return page.html(self.trace, runs, (name, budget, self.spot), self.tokens, effects)

    def finding(self) -> str:
        """One sentence on the left policy's loss at the present query."""
        return page.finding(self.looks()[0], self.tokens)

    def worst(self, side: str = "left") -> Spot:
        """The query that loses the most attention on the fewest tokens (`measures.concentrated_loss`) under the policy
        of a side: "left" or "right". A query that loses a little on each of a thousand tokens says nothing about a
        text.
        """
        if side not in SIDES:
            raise KvlabError(nearest(side, SIDES, "side"))
        return self._at_most(self.replay(self.chosen[SIDES.index(side)], self.budget).concentrated_loss)

    def most_different(self) -> Spot:
        """The query at which the two policies differ most in `measures.concentrated_loss`."""
        left, right = (self.replay(name, self.budget).concentrated_loss for name in self.chosen)
        return self._at_most((left - right).abs())

    def _at_most(self, values: Tensor) -> Spot:
        row, head, step = (int(i) for i in torch.unravel_index(values.argmax(), values.shape))
        return Spot(self.trace.layers[row], head, step + 1)

    def look_ahead(self) -> list[Future]:
        """Make the replays of the chosen policies at the other budgets in the background."""
        # Replays queued earlier, for other policies, would come first.
        for future in self._queued:
            future.cancel()
        if self._ahead is None:
            self._ahead = ThreadPoolExecutor(1)
        # The nearest budgets are the most likely to be looked at next.
        at = self.budgets.index(self.budget)
        nearest = sorted(self.budgets, key=lambda budget: abs(self.budgets.index(budget) - at))
        self._queued = [self._ahead.submit(self._make, name, budget) for budget in nearest for name in self.chosen]
        return self._queued

    def _make(self, name: str, budget: int) -> None:
        # At the interpreter's end the pool still runs its queue, but nobody will look at the results.
        if threading.main_thread().is_alive():
            with contextlib.suppress(KvlabError):  # raised again when the replay is looked at
                self.replay(name, budget)

    def close(self) -> None:
        """Stop the work in the background until other policies are chosen; the sliders still work."""
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
        extras.need("ipywidgets")
        import ipywidgets as widgets

        wide = widgets.Layout(width="312px")
        style = {"description_width": "70px"}
        trace, spot = self.trace, self.spot

        def common(name: str) -> dict[str, Any]:
            return {"description": name, "tooltip": HELP[name], "layout": wide, "style": style}

        def slider(name: str, low: int, high: int) -> widgets.IntSlider:
            return widgets.IntSlider(getattr(spot, name), low, high, **common(name))

        left, right = (
            widgets.Dropdown(options=self.names, value=name, **common(side))
            for side, name in zip(SIDES, self.chosen, strict=True)
        )
        layer = slider("layer", 0, trace.n_layers - 1)
        if trace.layout.mixed:
            layer = widgets.SelectionSlider(options=list(trace.layers), value=spot.layer, **common("layer"))
        budget = widgets.SelectionSlider(options=self.budgets, value=self.budget, **common("budget"))
        self._controls = {
            "left": left,
            "right": right,
            "budget": budget,
            "layer": layer,
            "head": slider("head", 0, trace.heads - 1),
            "step": slider("step", 1, trace.steps),
        }
        for name, control in self._controls.items():
            control.observe(lambda change, name=name: self._moved(name, change["new"]), names="value")
        spots = {
            "worst of left": ("where the left policy loses much attention on few tokens", lambda: self.worst("left")),
            "worst of right": ("the same for the right policy", lambda: self.worst("right")),
            "most different": ("where one policy loses much on few tokens, the other not", self.most_different),
        }
        buttons = []
        for name, (about, find) in spots.items():
            button = widgets.Button(description=name, tooltip=about)
            button.on_click(lambda _, find=find: self._answer(lambda: self.show(**vars(find()))))
            buttons.append(button)
        self._message = widgets.HTML()
        drawn = self._drawn_panel(widgets)
        # Only after the first picture: both would use the same cores.
        self.look_ahead()
        wrapped = widgets.Layout(flex_flow="row wrap")
        return widgets.VBox(
            [
                widgets.HBox(list(self._controls.values()), layout=wrapped),
                widgets.HBox(buttons, layout=wrapped),
                widgets.HTML(_help([*HELP.items(), *((name, about) for name, (about, _) in spots.items())])),
                self._message,
                drawn,
                *([] if self._effects is None else [widgets.HTML(self._effects.html())]),
            ]
        )

    def _drawn_panel(self, widgets: Any) -> Any:
        """The picture in parts; only the parts that change are sent, and each text keeps its scroll position."""
        self._parts = {name: widgets.HTML(html) for name, html in self._live().items()}
        sides = []
        for side in SIDES:
            self._parts[f"{side} text"].add_class("kvlab-scroll")
            column = widgets.VBox([self._parts[f"{side} {part}"] for part in ("top", "text", "below")])
            sides.append(column.add_class("kvlab-side"))
        # Where the widgets work, the saved picture next to them is hidden.
        hidden = f"<style>.{self._mark}-still{{display:none}}</style>"
        legend = widgets.HTML(SHEET + hidden + query_html.legend(LIVE))
        drawn = widgets.VBox([self._parts["where"], legend, widgets.HBox(sides).add_class("kvlab-sides")])
        return drawn.add_class("kvlab-picture")

    def _live(self) -> dict[str, str]:
        """The HTML of each part of the picture."""
        looks = self.looks()
        opened = token_html.passages(looks, len(self.tokens))
        parts = {"where": query_html.where(looks[0], self.tokens)}
        for side, look in zip(SIDES, looks, strict=True):
            mark = f"{self._mark}{side}"
            parts[f"{side} top"] = query_html.top(look, LIVE)
            parts[f"{side} text"] = token_html.text(look, self.tokens, LIVE, mark, opened)
            parts[f"{side} below"] = query_html.below(look, self.tokens, LIVE, mark)
        return parts

    def _moved(self, name: str, value: Any) -> None:
        if value != self._shown(name):
            self._answer(lambda: self.show(**{name: value}))

    def _answer(self, action: Callable[[], None]) -> None:
        """Do what a control asks for.

        An error is shown next to the controls. They then go back to the state that the picture shows.
        """
        try:
            action()
            self._message.value = ""
        except Exception as error:
            about = str(error) if isinstance(error, KvlabError) else f"{type(error).__name__}: {error}"
            self._message.value = f'<span style="color:rgb{RED}">{escape(about)}</span>'
            self._follow()
            # An error in a user's own policy: its traceback belongs in the log.
            if not isinstance(error, KvlabError):
                raise

    def _shown(self, name: str) -> Any:
        if name in SIDES:
            return self.chosen[SIDES.index(name)]
        return self.budget if name == "budget" else getattr(self.spot, name)

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
            # JupyterLab does not save the state of widgets, so there are two outputs. In a notebook that is opened
            # again, an error replaces the first one, and the second one is shown.
            panel = self.panel._repr_mimebundle_()
            display({**panel, "text/html": "", "text/plain": repr(self)}, raw=True)
            still = f'{STILL}<div class="{self._mark}-still">{still}</div>'
        display({"text/html": still, "text/plain": repr(self)}, raw=True)

    def __repr__(self) -> str:
        return (
            f"Explorer({' and '.join(self.chosen)} at {self.budget} on {self.trace.signature}, layer "
            f"{self.spot.layer}, head {self.spot.head}, step {self.spot.step})"
        )


def _watched() -> bool:
    """Whether the front end of this cell can ask its user something, and show widgets.

    papermill and nbconvert say that they cannot. There only the picture is shown: sliders saved with a notebook would
    double its size and move nothing.
    """
    return importlib.util.find_spec("ipywidgets") is not None and bool(progress_bars.front_end())


def _help(about: Sequence[tuple[str, str]]) -> str:
    """Help on each control, folded away."""
    rows = "".join(
        f'<div style="display:flex;gap:8px"><b style="flex:0 0 120px">{name}</b><span>{meaning}</span></div>'
        for name, meaning in about
    )
    return (
        '<details style="line-height:1.5;margin:2px"><summary style="cursor:pointer">what the controls do</summary>'
        f"{rows}<div>{KEYS}</div></details>"
    )
