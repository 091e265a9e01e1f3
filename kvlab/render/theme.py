"""Every colour and marker: those of policies, the same in each figure, then families, verdicts, ink and lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

INK = "#1c2430"
EDGE = "#566173"
FAINT = "#7a8594"
PAPER = "#9aa3ae"
"""The colour of a paper's printed numbers."""
GRID = "#e6e9ed"
RULE = "#c5cbd3"
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5B5B5B"]
"""Of curves that are no policies, in this order: Okabe and Ito's, which colour-blind readers can tell apart."""
BETTER, WORSE = COLOURS[0], COLOURS[1]
WORDS = {BETTER: "blue", WORSE: "orange"}
"""Their names in captions."""
MAP = "cividis"
VERDICTS = {
    "holds": "#d5efe0",
    "holds in direction only": "#fdf0c8",
    "holds by a weak stand-in": "#f3efd9",
    "fails": "#f8d9d3",
    "undecided": "#d8e6f5",
    "not measured": "#e8eaee",
}


SCREEN = {
    "page": ("#ffffff", "#14181f"),
    "panel": ("#f5f7f9", "#1c222b"),
    "ink": (INK, "#e8ebf0"),
    "soft": (EDGE, "#a9b3c1"),
    "line": ("#d6dbe1", "#333c48"),
    "read": ("#0072B2", "#3d9fe0"),
    "lost": ("#D55E00", "#f0803c"),
    "wanted": ("#7a4fb5", "#b795ea"),
    "focus": ("#000000", "#ffffff"),
    "hit": ("#ffe27a", "#6b5600"),
}
"""Colours of the explorer's page, in the light and in the dark."""

MARKS = {
    "holds": "#146c43",
    "holds in direction only": COLOURS[4],
    "holds by a weak stand-in": "#b08b3e",
    "fails": COLOURS[1],
    "undecided": COLOURS[0],
}
"""Of points and intervals, by their verdict."""


class Look(NamedTuple):
    """How a policy is drawn: its colour, and its marker, which tells it apart in grey."""

    colour: str
    marker: str


FAMILIES = {
    "reference": FAINT,
    "recent tokens, or layers' and heads' shares": "#8a5a2b",
    "keeps tokens of the prompt": "#0072B2",
    "evicts or merges while decoding": "#D55E00",
    "stores all, reads a selection": "#009E73",
    "both: keeps some, reads some of those": "#c2408f",
    "drops channels of keys": "#17a2b8",
}
"""The hue of each family, which its policies vary in lightness."""
OTHER = "#5B5B5B"
POLICIES = {
    "full": Look(INK, "o"),
    "random": Look(FAINT, "x"),
    "streamingllm": Look("#8a5a2b", "v"),
    "duoattention": Look("#c2a26a", "<"),
    "lacache": Look("#5c3a1e", ">"),
    "adakv": Look("#a98463", "p"),
    "kvzip": Look("#d9b98c", "h"),
    "snapkv": Look("#0072B2", "s"),
    "dapq": Look("#1b2f8a", "D"),
    "laq": Look("#7fb8dc", "X"),
    "compilerkv": Look("#6a51c8", "P"),
    "pyramidkv": Look("#56B4E9", "^"),
    "dynamickv": Look("#8fa8ff", "v"),
    "zigzagkv": Look("#3d6b99", "h"),
    "snapkv_pp": Look("#4a90c2", "p"),
    "morphkv": Look("#D55E00", "o"),
    "zsmerge": Look("#9c1f0e", "D"),
    "h2o": Look("#E69F00", "X"),
    "keyformer": Look("#f2b77a", "^"),
    "scissorhands": Look("#e8746a", "v"),
    "tova": Look("#b5651d", "p"),
    "quest": Look("#7cc4a8", "^"),
    "sparq": Look("#009E73", "d"),
    "hybrid": Look("#4fae52", "P"),
    "exact_topk": Look("#0b4d3a", "*"),
    "rocketkv": Look("#c2408f", "o"),
    "think": Look("#17a2b8", "h"),
}
"""Policies that the papers draw next to each other; the others have their family's colour."""
VARIANTS = {
    "snapkv_choosing": Look(POLICIES["snapkv_pp"].colour, "o"),
    "snapkv_shared": Look(POLICIES["pyramidkv"].colour, "o"),
    "h2o_prefill": Look(COLOURS[3], "o"),
    "zsmerge_unmerged": POLICIES["zsmerge"],
    "laq_raw": Look("#4a90c2", "o"),
    "rocketkv_published": Look(OTHER, "o"),
    "random_response": Look(FAINT, "o"),
    "filled": Look(POLICIES["compilerkv"].colour, "o"),
}
"""The looks of policies with other parameters, by their names in notebooks."""
KNOWN = POLICIES | VARIANTS
MARKERS = "os^Dv<>pPXh"


def _registry() -> dict[str, Any]:
    from kvlab.methods import registry  # it loads torch, which a command that only shows verdicts does without

    return registry()


def family_colour(policy: str) -> str:
    """The colour of the family of a policy, whose name is the first word of `policy`."""
    from kvlab.analyses.together.equal_bytes import family  # it loads torch, as `_registry` does

    return FAMILIES.get(family(_name(policy)), OTHER)


def look(policy: str) -> Look:
    """How a policy is drawn, by its name; what follows the name, such as a storage, changes nothing."""
    name = _name(policy)
    if name in KNOWN:
        return KNOWN[name]
    others = [known for known in _registry() if known not in POLICIES]
    marker = MARKERS[others.index(name) % len(MARKERS)] if name in others else "o"
    return Look(family_colour(name), marker)


def is_policy(name: object) -> bool:
    """Whether this is the name of a policy of kvlab."""
    return isinstance(name, str) and (name in KNOWN or name in _registry())


def colours(names: Iterable[str]) -> dict[str, str]:
    """The colour of each of these policies; names that are no policy of kvlab take `COLOURS` in turn."""
    names = list(names)
    others = dict(zip([name for name in names if not is_policy(_name(name))], cycle(COLOURS), strict=False))
    return {name: others.get(name, look(name).colour) for name in names}


def screen(policies: Sequence[str]) -> str:
    """A style sheet with `SCREEN` and the colour of each policy (`--p0`, `--p1`, ...) as variables, lighter in the
    dark.
    """
    found: list[str] = []
    for colour in colours(policies).values():
        # Two variants of one policy stand side by side here.
        free = (other for other in [colour, *COLOURS] if other not in found)
        found.append(next(free))
    of_policies = {f"p{number}": colour for number, colour in enumerate(found)}
    light = {name: pair[0] for name, pair in SCREEN.items()} | of_policies
    dark = {name: pair[1] for name, pair in SCREEN.items()} | {name: _lighter(c) for name, c in of_policies.items()}
    sheets = [
        ":root{" + "".join(f"--{name}:{colour};" for name, colour in shades.items()) + "}" for shades in (light, dark)
    ]
    return f"{sheets[0]}\n@media (prefers-color-scheme: dark){{{sheets[1]}}}"


def _lighter(colour: str, share: float = 0.4) -> str:
    """The colour with this share of white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _name(policy: str) -> str:
    return policy.partition(" ")[0].partition(",")[0]
