"""The one kind of error that is meant for the user, and the sentence for a name that does not exist."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable
from typing import Any


class KvlabError(Exception):
    """A mistake that the user can mend; its text is one sentence that says what was wrong and what would be right."""


def nearest(name: str, options: Iterable[str], kind: str = "name", limit: int = 12) -> str:
    """The sentence for an unknown `name`: the nearest of `options`, else the options themselves.

    >>> nearest("snapk", ["snapkv", "full"], "policy")
    "unknown policy 'snapk'; did you mean 'snapkv'?"
    """
    options = sorted(set(options))
    lowered = {option.lower(): option for option in options}
    wanted = str(name).lower()
    close = [wanted] if wanted in lowered else difflib.get_close_matches(wanted, lowered, n=3, cutoff=0.6)
    # The start of a longer name is near in every sense but the edit distance.
    close = close or [option for option in lowered if len(wanted) > 2 and wanted in option][:3]
    if close:
        return f"unknown {kind} {name!r}; did you mean {' or '.join(repr(lowered[c]) for c in close)}?"
    known = ", ".join(options[:limit]) + (f", ... ({len(options)} in all)" if len(options) > limit else "")
    return f"unknown {kind} {name!r}; known are: {known or 'none'}"


def whole(name: str, value: Any) -> int:
    """`value` as an int; numpy's and torch's whole numbers are taken, too. Raises KvlabError for anything else."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise KvlabError(f"{name} must be a whole number, and is {value!r:.40}")
