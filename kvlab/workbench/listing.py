"""What `kvlab list` shows: objects with at least a name and a summary."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def entries(what: str) -> list[dict[str, Any]]:
    """The entries of one list, by its name ("policies", "claims", ...)."""
    return _LISTS[what]()


def _first_line(thing: object) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def _policies() -> list[dict[str, Any]]:
    from kvlab.methods import registry

    return [{"name": name, "summary": _first_line(policy)} for name, policy in registry().items()]


def _storages() -> list[dict[str, Any]]:
    from kvlab.core.storage import STORAGES

    return [{"name": name, "summary": storage.summary} for name, storage in STORAGES.items()]


def _experiments() -> list[dict[str, Any]]:
    from kvlab.workbench import experiments

    loaded = [experiments.load(name) for name in experiments.names()]
    return [
        {"name": each.name, "summary": each.summary, "notebook": each.notebook, "profiles": list(each.profiles)}
        for each in loaded
    ]


def _claims() -> list[dict[str, Any]]:
    from kvlab import papers

    return [
        {
            "name": claim.id,
            "summary": claim.summary,
            "id": claim.id,
            "paper": claim.paper,
            "where": claim.where,
            "metric": claim.metric,
            "measured": claim.experiment is not None,
            "experiment": claim.experiment,
            "paper_value": claim.paper_value,
            "unit": claim.unit,
            "kind": claim.kind,
            "untested": claim.untested,
        }
        for claim in papers.claims()
    ]


def _measures() -> list[dict[str, Any]]:
    from kvlab.instruments import measures

    found = inspect.getmembers(measures, inspect.isfunction)
    own = [
        (name, function)
        for name, function in found
        if not name.startswith("_") and function.__module__ == measures.__name__
    ]
    return [{"name": name, "summary": _first_line(function)} for name, function in own]


def _probes() -> list[dict[str, Any]]:
    from kvlab.instruments.probes import PROBES

    return [{"name": name, "summary": probe.summary} for name, probe in PROBES.items()]


def _models() -> list[dict[str, Any]]:
    from kvlab.inputs import models

    return [{"name": name, "summary": entry.summary} for name, entry in models.MODELS.items()]


def _packs() -> list[dict[str, Any]]:
    from kvlab.inputs import packs

    return [
        {
            "name": name,
            "summary": pack.summary,
            "package": pack.package,
            "version": pack.version,
            "licence": pack.licence,
        }
        for name, pack in packs.PACKS.items()
    ]


def _tasks() -> list[dict[str, Any]]:
    from kvlab import tasks

    return [
        {
            "name": name,
            "summary": cls.summary,
            "metric": cls.metric,
            "parameters": {key: field.default for key, field in cls.model_fields.items()},
        }
        for name, cls in tasks.registry().items()
    ]


_LISTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "policies": _policies,
    "storages": _storages,
    "experiments": _experiments,
    "claims": _claims,
    "measures": _measures,
    "probes": _probes,
    "models": _models,
    "packs": _packs,
    "tasks": _tasks,
}
