"""`kvlab.explore(trace)`: sliders over policy, budget, layer, head and step, and what the query there lost.

Where widgets do not run (a code host, a static export) the same picture is shown as it stands.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kvlab import models
from kvlab.errors import KvlabError, nearest
from kvlab.policies import Policy, policies, policy
from kvlab.replay import Replay
from kvlab.workbench import picture
from kvlab.workbench.picture import Look, Place

if TYPE_CHECKING:
    from kvlab.models import LM
    from kvlab.trace import Trace

LEFT, RIGHT = "snapkv", "dapq"


class Explorer:
    """Two policies side by side on one trace, at one query. Shown by JupyterLab as sliders and a picture.

    Replays are made when they are first looked at and kept; those of the other budgets of the two chosen policies are
    made in the background, so that moving the budget does not wait.

    Attributes:
        place: the query that is shown.
        chosen: the names of the two policies.
        budget: entries for each layer and KV head.
    """

    def __init__(self, trace: Trace, left: str | Policy, right: str | Policy, budgets: Sequence[int], place: Place,
                 tokens: Sequence[str]):
        self.trace, self.tokens, self.budgets = trace, list(tokens), list(budgets)
        self._own = {one.name: one for one in (left, right) if isinstance(one, Policy)}
        self.chosen = [one.name if isinstance(one, Policy) else one for one in (left, right)]
        self.budget, self.place = self.budgets[len(self.budgets) // 2], place
        self._replays: dict[tuple[str, int], Replay] = {}
        self._lock = threading.Lock()
        self._ahead = ThreadPoolExecutor(1)
        self._closed = False
        self._panel = None
        self.names = [name for name in policies() if name in self.chosen or _fits(trace, name, self.budgets[0])]

    # ------------------------------------------------------------------ what is shown

    def replay(self, name: str, budget: int) -> Replay:
        """The replay of a policy at a budget, made on first use."""
        key = name, budget
        with self._lock:
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
        return [Look(self.replay(name, self.budget), self.place) for name in self.chosen]

    def html(self) -> str:
        """The picture as it stands, as HTML that needs nothing else."""
        return picture.page(self.looks(), self.tokens)

    def show(self, **changes: Any) -> None:
        """Look elsewhere: any of left, right, budget, layer, head, step.

        Raises:
            KvlabError: no such policy, budget or place in this trace; the picture stays as it was.
        """
        known = ("left", "right", "budget", "layer", "head", "step")
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
        self.place = _checked(self.trace, **wanted)
        self.chosen, self.budget = chosen, budget
        self._redraw()
        if {"left", "right"} & set(changes):
            self.look_ahead()

    def worst(self) -> Place:
        """The query that loses the most attention under the left policy."""
        lost = self.replay(self.chosen[0], self.budget).mass_lost
        layer, head, step = (int(i) for i in divmod3(int(lost.argmax()), *lost.shape[1:]))
        return Place(layer, head, step + 1)

    def look_ahead(self) -> list[Future]:
        """Make the replays of the chosen policies at the other budgets in the background."""
        # The nearest budgets are the likeliest to be looked at next.
        at = self.budgets.index(self.budget)
        near = sorted(self.budgets, key=lambda budget: abs(self.budgets.index(budget) - at))
        return [self._ahead.submit(self._make, name, budget) for budget in near for name in self.chosen]

    def _make(self, name: str, budget: int) -> None:
        # At the interpreter's end the pool works off what is queued, which nobody will look at.
        if not self._closed and threading.main_thread().is_alive():
            with contextlib.suppress(KvlabError):  # said when it is looked at
                self.replay(name, budget)

    def close(self) -> None:
        """Stop working in the background."""
        self._closed = True
        self._ahead.shutdown(cancel_futures=True)

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

        def slider(name: str, low: int, high: int) -> widgets.IntSlider:
            return widgets.IntSlider(getattr(place, name), low, high, description=name, layout=wide, style=style)

        left, right = (
            widgets.Dropdown(options=self.names, value=name, description=side, layout=wide, style=style)
            for side, name in zip(("left", "right"), self.chosen, strict=True)
        )
        budget = widgets.SelectionSlider(options=self.budgets, value=self.budget, description="budget", layout=wide,
                                         style=style)
        self._controls = {
            "left": left, "right": right, "budget": budget, "layer": slider("layer", 0, trace.n_layers - 1),
            "head": slider("head", 0, trace.heads - 1), "step": slider("step", 1, trace.steps),
        }
        worst = widgets.Button(description="worst query", tooltip="where the left policy loses the most attention")
        self._picture = widgets.HTML(self.html())
        self._message = widgets.HTML()
        for name, control in self._controls.items():
            control.observe(lambda change, name=name: self._moved(name, change["new"]), names="value")
        worst.on_click(lambda _: self._go(self.worst()))
        # Not before the first picture: both would want the same cores.
        self.look_ahead()
        wrapped = widgets.HBox(list(self._controls.values()), layout=widgets.Layout(flex_flow="row wrap"))
        return widgets.VBox([wrapped, widgets.HBox([worst, self._message]), self._picture])

    def _moved(self, name: str, value: Any) -> None:
        if value == self._shown(name):
            return
        try:
            self.show(**{name: value})
            self._message.value = ""
        except KvlabError as error:
            self._message.value = f'<span style="color:rgb{picture.RED}">{error}</span>'

    def _shown(self, name: str) -> Any:
        if name in ("left", "right"):
            return self.chosen[name == "right"]
        return self.budget if name == "budget" else getattr(self.place, name)

    def _go(self, place: Place) -> None:
        self.place = place
        self._redraw()

    def _redraw(self) -> None:
        if self._panel is None:
            return
        self._picture.value = self.html()
        for name, control in self._controls.items():
            control.value = self._shown(name)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **options: Any) -> dict[str, Any]:
        panel = self.panel._repr_mimebundle_(include=include, exclude=exclude, **options)
        bundle = panel[0] if isinstance(panel, tuple) else panel or {}
        return {**bundle, "text/html": self.html(), "text/plain": repr(self)}

    def __repr__(self) -> str:
        return (f"Explorer({' and '.join(self.chosen)} at {self.budget} on {self.trace.signature}, layer "
                f"{self.place.layer}, head {self.place.head}, step {self.place.step})")


def divmod3(flat: int, columns: int, depth: int) -> tuple[int, int, int]:
    """The three indices of a flat one into `[rows, columns, depth]`."""
    rest, last = divmod(flat, depth)
    return *divmod(rest, columns), last


def explore(
    trace: Trace, left: str | Policy = LEFT, right: str | Policy = RIGHT, *, budgets: Sequence[int] | None = None,
    layer: int | None = None, head: int | None = None, step: int | None = None, lm: LM | None = None,
) -> Explorer:
    """Explore a trace by hand in JupyterLab: two policies side by side, one query, and what it lost.

    Args:
        trace: with a response.
        left, right: two policies, by name or as objects.
        budgets: the stops of the budget's slider; by default powers of two below the prompt's length.
        layer, head, step: the query to begin with (step from 1); by default the one that loses the most under `left`.
        lm: whose tokenizer shows the text; by default that of the model that the trace names.

    Raises:
        KvlabError: a trace without a response, a policy that this trace cannot serve, or a place outside it.
    """
    if not trace.steps:
        raise KvlabError("there is no query to look at: this trace has no response; capture it with new_tokens=32")
    for one in (left, right):
        if isinstance(one, str) and one not in policies():
            raise KvlabError(nearest(one, policies(), "policy"))
    stops = sorted(set(budgets)) if budgets is not None else default_budgets(trace, left, right)
    if not stops or min(stops) < 1:
        raise KvlabError(f"budgets must be whole numbers of entries from 1 on, and are {list(budgets or [])}")
    explorer = Explorer(trace, left, right, stops, Place(0, 0, 1), texts(trace, lm))
    first = explorer.worst()
    explorer.place = _checked(trace, layer=first.layer if layer is None else layer,
                              head=first.head if head is None else head, step=first.step if step is None else step)
    explorer.replay(explorer.chosen[1], explorer.budget)
    return explorer


def default_budgets(trace: Trace, *chosen: str | Policy) -> list[int]:
    """Powers of two from the least that the chosen policies work with up to the prompt's length."""
    lowest = max(_minimum(one) for one in chosen)
    stops = [2**k for k in range(4, 18) if lowest <= 2**k < trace.prompt_length]
    return stops or [max(lowest, 1)]


def _minimum(one: str | Policy) -> int:
    return one.minimum if isinstance(one, Policy) else _made(one, 2**20).minimum


def _made(name: str, budget: int) -> Policy:
    from kvlab.policies import registry

    return policy(name, budget=budget) if "budget" in registry()[name].model_fields else policy(name)


def _fits(trace: Trace, name: str, budget: int) -> bool:
    """Whether the trace holds what a policy needs (queries, pseudo-queries, accumulated attention)."""
    one = _made(name, max(budget, _minimum(name)))
    queries = trace.queries.shape[2] - trace.steps
    needed = trace.prompt_length if one.observes is None else min(one.observes, trace.prompt_length)
    if queries < needed or (one.accumulates and trace.accumulated is None):
        return False
    if one.reads_perplexity and trace.nll is None:
        return False
    try:
        return not one.pseudo_key or trace.prompt.pseudo(one) is not None
    except KvlabError:
        return False


def _checked(trace: Trace, layer: int, head: int, step: int) -> Place:
    for name, value, low, high in (("layer", layer, 0, trace.n_layers - 1), ("head", head, 0, trace.heads - 1),
                                   ("step", step, 1, trace.steps)):
        if not low <= value <= high:
            raise KvlabError(f"{name} {value} is outside this trace, which has {low} .. {high}")
    return Place(layer, head, step)


def texts(trace: Trace, lm: LM | None = None) -> list[str]:
    """The text of each token of a trace; positions in brackets where there is no tokenizer to tell."""
    if trace.ids is None:
        return [f"[{position}] " for position in range(trace.length)]
    # Only what lies on this machine: a view must never start a download.
    name = str(trace.meta.get("model", "")).split("@")[0]
    tokenizer = lm.tokenizer if lm is not None else models.tokenizer(name)
    if tokenizer is None:
        return [f"[{number}] " for number in trace.ids.tolist()]
    return [tokenizer.decode([number]) for number in trace.ids.tolist()]

