"""The names of policies, known without an import: a command refuses an unknown one before it waits for torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from kvlab.errors import KvlabError, nearest
from kvlab.lib import workspace

GROUP = "kvlab.policies"
"""Entry points of installed packages, each a policy."""
FEWEST, MOST = 2, 4
"""Policies of one page of the explorer."""


def check(wanted: Iterable[str]) -> None:
    """Raise KvlabError for a name that no policy has.

    A file of the workspace may define any name; where there is one, `methods.policy` decides.
    """
    if workspace.files("policies", "*.py"):
        return
    known = {*own(), *(point.name for point in entry_points(group=GROUP))}
    for name in wanted:
        if name not in known:
            raise KvlabError(unknown(name, known))


def check_page(names: Sequence[str]) -> None:
    """Raise KvlabError unless these are as many different policies as the explorer's page shows."""
    if len(set(names)) != len(names) or not FEWEST <= len(names) <= MOST:
        raise KvlabError(f"a page shows {FEWEST} to {MOST} different policies, not {len(names)}: {', '.join(names)}")


def own() -> list[str]:
    """The names of kvlab's own policies: each is the name of a file."""
    files = (Path(__file__).parents[1] / "methods").glob("[!_]*.py")
    return sorted(path.stem for path in files)


def unknown(name: str, known: Iterable[str]) -> str:
    """The message for an unknown policy: the nearest names, and all that are `known`."""
    known = sorted(known)
    bare, opened, inside = name.partition("(")
    if opened:
        values = inside.removesuffix(")")
        made = f"kvlab.policy({bare!r}{values and f', {values}'})"
        return (
            f"{name!r} is not a policy's name: a name has no parameters; in Python pass {made}, and for commands name "
            "a subclass with other defaults"
        )
    if name == "oracle_effect":
        return (
            "oracle_effect has to run the model, so it is a function and no policy: "
            "kvlab.attribution.oracle.oracle_effect(lm, text, budget).policy"
        )
    sentence = nearest(name, known, "policy", limit=len(known))
    own = (
        "" if workspace.workspace() else "; one of your own is known inside its workspace (kvlab new), or by its object"
    )
    if "did you mean" not in sentence:
        return sentence + own
    return f"{sentence} (known are: {', '.join(known)}{own})"
