"""A workspace of one's own: `new` makes its folder, `add` writes the skeleton of a policy, claim, notebook or task."""

from kvlab.workbench.workspace.adding import KINDS, add
from kvlab.workbench.workspace.making import new

__all__ = ["KINDS", "add", "new"]
