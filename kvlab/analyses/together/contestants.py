"""Which policies take part where nobody names them."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.errors import KvlabError, nearest
from kvlab.methods import policies

LEFT_OUT = ("criticalkv", "kvzip", "leverage", "think", "triattention")
"""What "quick" leaves out: what makes traces larger or captures slower, or was added when the others were enough."""


def named(names: Sequence[str] = ("quick",)) -> list[str]:
    """Policies by name, where "all" stands for every one, and "quick" for those that cost little besides the others.

    Raises:
        KvlabError: an unknown name.
    """
    sets = {"all": policies(), "quick": [name for name in policies() if name not in LEFT_OUT]}
    known = [*sets, *policies()]
    for name in names:
        if name not in known:
            raise KvlabError(nearest(name, known, "policy"))
    return list(dict.fromkeys(each for name in names for each in sets.get(name, [name])))
