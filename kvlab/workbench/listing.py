"""The objects that `kvlab list` shows: each has at least a name and a summary."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.inputs.models.cached import CachedModel
    from kvlab.lib.references import Paper


def entries(name: str) -> list[dict[str, Any]]:
    """The entries of one list, by its name ("policies", "claims", ...)."""
    return _LISTS[name]()


def _first_line(documented: object) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())


def _policies() -> list[dict[str, Any]]:
    from kvlab.methods import registry
    from kvlab.methods._base.policy import KINDS

    found = [
        {"name": name, "summary": _first_line(cls), "group": cls.kind, "paper": _paper(cls.paper)}
        for name, cls in registry().items()
    ]
    return sorted(found, key=lambda entry: KINDS.index(entry["group"]) if entry["group"] in KINDS else len(KINDS))


def _paper(paper: Paper | None) -> dict[str, Any] | None:
    return None if paper is None else asdict(paper) | {"url": paper.url}


def _storages() -> list[dict[str, Any]]:
    from kvlab.core.storage import STORAGES

    return [{"name": name, "summary": storage.summary} for name, storage in STORAGES.items()]


def _experiments() -> list[dict[str, Any]]:
    from kvlab.workbench import experiments

    loaded = [experiments.load(name) for name in experiments.names()]
    return [
        {
            "name": experiment.name,
            "summary": experiment.summary,
            "notebook": experiment.notebook,
            "profiles": list(experiment.profiles),
        }
        for experiment in loaded
    ]


def _claims() -> list[dict[str, Any]]:
    from kvlab import papers
    from kvlab.papers import SAMPLED

    return [
        {
            "name": claim.id,
            **claim.model_dump(mode="json"),
            "measured": claim.experiment is not None,
            "finding": claim.fact[1] if claim.kind in SAMPLED else "",
            "direction": claim.direction.model_dump(mode="json", exclude_none=True),
            "size": claim.size.model_dump(mode="json", exclude_none=True),
        }
        for claim in papers.claims()
    ]


def _measures() -> list[dict[str, Any]]:
    from kvlab.instruments import measures

    functions = inspect.getmembers(measures, inspect.isfunction)
    own = [
        (name, function)
        for name, function in functions
        if not name.startswith("_") and function.__module__ == measures.__name__
    ]
    return [{"name": name, "summary": _first_line(function)} for name, function in own]


def _probes() -> list[dict[str, Any]]:
    from kvlab.instruments.probes import PROBES

    return [{"name": name, "summary": probe.summary} for name, probe in PROBES.items()]


def _models() -> list[dict[str, Any]]:
    """The known models, then those of a user's own GGUF files that were converted."""
    from kvlab.inputs.models import MODELS, cached, sources

    downloaded = {model.name: model for model in cached.cached_models()}
    known = [
        {
            "name": name,
            "summary": model.summary,
            "parameters": model.parameters,
            "licence": model.licence,
            "context": model.context,
            "bytes_to_fetch": model.fetched_size,
            "sources": list(sources.SOURCES),
        }
        for name, model in MODELS.items()
    ]
    others = [{"name": name, "summary": model.about} for name, model in downloaded.items() if name not in MODELS]
    return [entry | _cache(downloaded.get(entry["name"])) for entry in [*known, *others]]


def _cache(cached: CachedModel | None) -> dict[str, Any]:
    """A model's state in the cache: in words, bytes and folder."""
    return {
        "cached": cached and cached.about,
        "cached_bytes": cached.size if cached else 0,
        "folder": str(cached.folder) if cached else None,
    }


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


def _documents() -> list[dict[str, Any]]:
    """The sets of documents, then each source with all its names; a pack's are known once it is pulled."""
    from kvlab.inputs import corpus

    sets = [
        {"name": name, "summary": ", ".join(documents), "documents": list(documents)}
        for name, documents in corpus.SETS.items()
    ]
    return sets + [
        {
            "name": f"{source}/...",
            "summary": f"{len(names)} documents, such as {names[0]} and {names[-1]}" if names else "not pulled yet",
            "documents": names,
        }
        for source in corpus.SOURCES
        for names in [corpus.names(source)]
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
    "documents": _documents,
    "tasks": _tasks,
}
