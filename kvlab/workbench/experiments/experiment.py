"""Experiments: YAML files checked against their notebooks, and the jobs that they stand for.

    notebook: notebooks/NAME.ipynb                  # relative to the project
    description: one or two sentences
    parameters: {model: smollm2-135m, seed: 0}      # as in the notebook's `parameters` cell
    grid: {window: [8, 32]}                         # one job for each combination
    limits: {budget: [33, null]}                    # least and most for a number, or for each number of a list
    timeout: 3600                                   # seconds for each job; by default none
    profiles:
      quick: {seconds: 60}                          # rough time of one job
      full: {parameters: {...}, grid: {...}}        # its changes

`limits: {budget: [windows, null]}` means: larger than the largest value of the parameter `windows`.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvlab.errors import KvlabError, nearest
from kvlab.inputs import packs
from kvlab.lib import yaml_loader
from kvlab.lib.unknown_keys import first_problem, unknown_key
from kvlab.lib.workspace import workspace
from kvlab.workbench import project
from kvlab.workbench.experiments import content_key, shipped
from kvlab.workbench.experiments.notebooks import parameters_of
from kvlab.workbench.experiments.parameter_values import checked, listed, read, short

MOST = 10_000  # jobs of an experiment
PROFILES = ("quick", "full", "gpu")
ORDINARY, CELL, TRIAL = "job", "cell", "trial"
"""The kinds of jobs: those that the ledger judges, and those that only say how far a verdict depends on seed and texts.
"""
POLICY = "policy"
"""The kind of a run under a job's, which holds one policy's curves for MLflow's charts. Nothing else reads it."""


class Profile(BaseModel):
    """The changes of a profile: parameters by name, grid axes by name.

    seconds: rough time of a job, used until a finished run shows the true time; the longest jobs begin first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    parameters: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    timeout: int | None = Field(default=None, gt=0)
    seconds: int | None = Field(default=None, gt=0)


class Experiment(BaseModel):
    """A notebook with the parameters it is run with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    notebook: str
    description: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    limits: dict[str, tuple[int | float | str | None, int | float | None]] = Field(default_factory=dict)
    timeout: int | None = Field(default=None, gt=0)
    profiles: dict[str, Profile] = Field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The notebook's file."""
        return project.root() / self.notebook

    @property
    def summary(self) -> str:
        return " ".join(self.description.split())


@dataclass(frozen=True)
class Job:
    """One grid point: a notebook with plain JSON parameters. `key` changes with all that its numbers depend on.

    kind: ORDINARY; the ledger does not read a CELL (another seed or text) or a TRIAL (other parameters than the
        profile's).
    """

    experiment: str
    name: str
    profile: str
    notebook: Path
    parameters: dict[str, Any]
    key: str
    timeout: int | None = None
    seconds: int | None = None
    kind: str = ORDINARY


def names() -> list[str]:
    """The experiments of the project, in the order of their files. Raises KvlabError where there are none."""
    return sorted(path.stem for path in (project.checkout() / "experiments").glob("*.yaml"))


def longest_first(profile: str = "quick") -> list[str]:
    """The notebooks of all experiments, relative to the project, each once; those that take longest come first."""
    loaded = [load(name) for name in names()]
    seconds = [changes.seconds if (changes := experiment.profiles.get(profile)) else None for experiment in loaded]
    known = [estimate for estimate in seconds if estimate]
    usual = sum(known) / len(known) if known else 0
    order = sorted(range(len(loaded)), key=lambda number: -(seconds[number] or usual))
    return list(dict.fromkeys(loaded[number].notebook for number in order))


def _unknown(name: str) -> str:
    """The sentence for an experiment that the project lacks; in a workspace, kvlab's own can be copied."""
    if workspace() and name in shipped.names():
        return f"this workspace has no experiment {name!r}, and kvlab has one; copy it: kvlab add experiment {name}"
    return nearest(name, names(), "experiment")


def load(name: str) -> Experiment:
    """The experiment `name`. Raises KvlabError, in one sentence, for an unknown name, broken YAML and unknown keys."""
    if name not in names():
        raise KvlabError(_unknown(name))
    path = project.root() / "experiments" / f"{name}.yaml"
    raw, lines = yaml_loader.load(path)
    if not isinstance(raw, dict):
        keys = ", ".join(key for key in Experiment.model_fields if key != "name")
        raise KvlabError(f"{path.name} must be a mapping with the keys {keys}")
    if "name" in raw:
        raise KvlabError(
            f"{path.name}{lines.shown(['name'])}: unknown key 'name': an experiment has the name of its file"
        )
    for part in ("parameters", "grid", "profiles"):
        if raw.get(part, 0) is None:
            del raw[part]
    try:
        experiment = Experiment.model_validate({**raw, "name": name})
    except ValidationError as error:
        first = first_problem(error)
        raise KvlabError(f"{path.name}{lines.shown(first['loc'])}: {_sentence(first)}") from None
    folders = [project.root(), experiment.path.parent]
    for place, text in _texts(raw):
        if _leaves_the_project(text) or any(_leads_out(folder, text) for folder in folders):
            or_else = "" if place == ("notebook",) else f", or give it on the command line (-p {place[-1]}=...)"
            raise KvlabError(
                f"{path.name}{lines.shown(place)}: {text!r} leaves the project; name a file inside it{or_else}"
            )
    return experiment


def _texts(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Every text of an experiment except its description, with its place in the YAML: each may name a file."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            if place or key != "description":
                yield from _texts(key if place else None, place)
                yield from _texts(entry, (*place, key))
    elif isinstance(value, list | tuple):  # YAML's pairs are tuples
        for entry in value:
            yield from _texts(entry, place)


def _leaves_the_project(text: str) -> bool:
    parts = PurePath(text).parts
    return bool(parts) and (PurePath(text).is_absolute() or parts[0].startswith("~") or ".." in parts)


def _leads_out(folder: Path, text: str) -> bool:
    """Whether a path in the project is a link to a file outside both the project and the cache."""
    path = os.path.join(folder, text)
    if len(text) > 500 or not os.path.lexists(path):
        return False
    homes = project.root().resolve(), packs.home().resolve()
    return not any(Path(os.path.realpath(path)).is_relative_to(home) for home in homes)


def _sentence(error: Mapping[str, Any]) -> str:
    place = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        return unknown_key(Experiment, error["loc"], hidden=["name"])
    if error["type"] == "missing":
        return f"the key '{'.'.join(place)}' is missing"
    got = repr(error["input"])
    return f"{'.'.join(place)}: {error['msg'][0].lower()}{error['msg'][1:]} (got {got[:60]})"


def jobs(experiment: Experiment | str, profile: str = "quick", overrides: Mapping[str, Any] | None = None) -> list[Job]:
    """The jobs of an experiment in a profile, one for each point of its grid.

    overrides: parameter -> value, which replaces a parameter, or a grid axis (a list of values keeps it an axis). A
    string may be text from a command line; it is read by the type of the notebook's default.
    Raises KvlabError for an unknown profile or parameter and for a value of the wrong type.
    """
    experiment = load(experiment) if isinstance(experiment, str) else experiment
    if experiment.profiles and profile not in experiment.profiles:
        raise KvlabError(nearest(profile, experiment.profiles, f"profile of {experiment.name}"))
    if not experiment.profiles and profile not in PROFILES:
        raise KvlabError(nearest(profile, PROFILES, "profile"))
    changes = experiment.profiles.get(profile, Profile())
    declared = parameters_of(experiment.path)
    single = {**experiment.parameters, **changes.parameters}
    usual = {axis: values for axis, values in experiment.grid.items() if axis not in changes.parameters}
    grid = {**usual, **changes.grid}
    for name, value in (overrides or {}).items():
        _known(name, declared, experiment)
        value = read(value, declared[name]) if isinstance(value, str) else value
        is_axis = name in grid and isinstance(value, list) and not isinstance(declared[name], list)
        grid.pop(name, None)
        single.pop(name, None)
        if is_axis:
            grid[name] = value
        else:
            single[name] = value
    bounds = [least for least, _ in experiment.limits.values() if isinstance(least, str)]
    for name in (*single, *grid, *experiment.limits, *bounds):
        _known(name, declared, experiment)
    for axis, values in grid.items():
        single.pop(axis, None)
        if not values:
            raise KvlabError(f"the grid of {experiment.name} has no values for {axis!r}")
    # A job's name shows the parameters in which it differs from the other jobs, and from those of other commands.
    shown = [axis for axis, values in grid.items() if any(value != values[0] for value in values)]
    usual = {**declared, **experiment.parameters, **changes.parameters}
    shown += [name for name in overrides or {} if name not in grid and single[name] != usual[name]]
    wanted = math.prod(map(len, grid.values()))
    if wanted > MOST:
        raise KvlabError(f"the grid of {experiment.name} stands for {wanted:,} jobs, and at most {MOST:,} are allowed")
    points = []
    for combination in itertools.product(*grid.values()):
        point = dict(zip(grid, combination, strict=True))
        parameters = {
            name: checked(name, _found_in_project(value, experiment.path.parent), declared[name], experiment.name)
            for name, value in {**declared, **single, **point}.items()
        }
        for name, value in parameters.items():
            _within(name, value, declared[name], experiment, parameters)
        name = run_name({name: parameters[name] for name in shown}) or profile
        points.append(
            Job(
                experiment.name,
                name,
                profile,
                experiment.path,
                parameters,
                content_key.key(experiment.path, parameters),
                changes.timeout or experiment.timeout,
                changes.seconds,
            )
        )
    return points


def _found_in_project(value: Any, notebooks: Path) -> Any:
    """A text, or each text of a list, as a whole path where it names a file of the project and none of `notebooks`.

    A job runs in the folder of its notebook, and a file of an experiment may be named from the project's root.
    """
    if isinstance(value, list):
        return [_found_in_project(entry, notebooks) for entry in value]
    if not isinstance(value, str) or not PurePath(value).suffix or len(value) > 500 or "\0" in value:
        return value
    path = project.root() / value
    return str(path) if path.is_file() and not (notebooks / value).exists() else value


def _within(name: str, value: Any, default: Any, experiment: Experiment, parameters: Mapping[str, Any]) -> None:
    """Refuse numbers outside the experiment's limits; without limits, negative ones where the notebook has a count."""
    usual = _numbers(default)
    counts = bool(usual) and all(isinstance(number, int) and number >= 0 for number in usual)
    least, most = experiment.limits.get(name, (0 if counts else None, None))
    lower, upper = f"at least {least}", f"at most {most}"
    if isinstance(least, str):
        above = max(_numbers(parameters[least]), default=0)
        least, lower = above + 1, f"at least {above + 1} (one more than {above}, the largest of {least!r})"
    for number in _numbers(value):
        for beyond, bound in (
            (least is not None and number < least, lower),
            (most is not None and number > most, upper),
        ):
            if beyond:
                raise KvlabError(f"parameter {name!r} of {experiment.name} must be {bound}, and is {short(number)}")


def _numbers(value: Any) -> list[int | float]:
    return [number for number in listed(value) if _is_number(number)]


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _known(name: str, declared: Mapping[str, Any], experiment: Experiment) -> None:
    if name not in declared:
        raise KvlabError(nearest(name, declared, f"parameter of {experiment.name}"))


def run_name(parameters: Mapping[str, Any]) -> str:
    """A name of at most 120 characters that shows these parameters; empty without any."""
    shown = [
        f"{name}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in parameters.items()
    ]
    return " ".join(" ".join(shown).split())[:120]
