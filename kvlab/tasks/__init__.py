"""Tasks by name: benchmarks that make examples for a model and score its answers."""

from __future__ import annotations

from typing import Any

from kvlab.errors import KvlabError, nearest
from kvlab.lib import workspace
from kvlab.tasks.base import Example, Task

__all__ = ["Example", "Task", "registry", "task", "tasks"]


def registry() -> dict[str, type[Task]]:
    """Every named task class: kvlab's own, then the workspace's.

    Raises KvlabError for a file of the workspace that cannot be read, and for a name that is taken.
    """
    from kvlab.tasks.arithmetic import Arithmetic
    from kvlab.tasks.competition import Aime, Math
    from kvlab.tasks.icl import ManyShot
    from kvlab.tasks.longbench import LongBench
    from kvlab.tasks.longgen import LongGen
    from kvlab.tasks.needle import Needle
    from kvlab.tasks.ruler import Ruler
    from kvlab.tasks.turns import Turns

    own = {cls.name: cls for cls in (Needle, Ruler, LongBench, LongGen, ManyShot, Arithmetic, Turns, Math, Aime)}
    return workspace.joined(own, "tasks", Task, "task")


def tasks() -> list[str]:
    """Names that `task` takes."""
    return list(registry())


def task(name: str | Task, **parameters: Any) -> Task:
    """A task by name, with its parameters.

    Raises:
        KvlabError: an unknown name or parameter, with the nearest ones.
    """
    if isinstance(name, Task):
        return name
    if name not in registry():
        raise KvlabError(nearest(name, registry(), "task"))
    return registry()[name](**parameters)
