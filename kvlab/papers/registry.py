"""The papers, claims and printed figures that there are: kvlab's own, and those of the workspace in use."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.errors import KvlabError, nearest
from kvlab.lib import workspace
from kvlab.papers.claim import SAMPLED, Claim, Paper, load_file

if TYPE_CHECKING:
    import pandas

OWN = "papers"
"""The folder of a workspace with its papers' files; their figures are in its folder `figures`."""


@functools.cache
def shipped() -> tuple[Paper, ...]:
    """The papers that come with kvlab, by name."""
    return tuple(load_file(path) for path in sorted(folder().glob("*.yaml")))


def folder() -> Path:
    """Where kvlab's own papers lie."""
    return Path(str(files("kvlab.papers")))


def papers() -> tuple[Paper, ...]:
    """All papers that there are claims of: kvlab's own by name, then those of the workspace in use.

    Raises KvlabError, in one sentence, for a file of the workspace that is not right or takes the name of another.
    """
    mine = own()
    return (*_kept(mine), *mine)


def of_project() -> tuple[Paper, ...]:
    """The papers whose claims the project's ledger holds: those of a workspace if it has any, else all."""
    return own() or papers()


def _kept(own: tuple[Paper, ...]) -> tuple[Paper, ...]:
    """kvlab's papers, less those that the workspace has replaced."""
    replaced = {paper.name for paper in own if paper.replaces}
    return tuple(paper for paper in shipped() if paper.name not in replaced)


def own() -> tuple[Paper, ...]:
    """The papers of the workspace in use, by name; none outside of one."""
    paths = workspace.files(OWN, "*.yaml")
    mine = tuple(_read(path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths)
    taken = {paper.name for paper in _kept(mine)}
    for paper, path in zip(mine, paths, strict=True):
        if paper.name in taken:
            raise KvlabError(
                f"{path}: kvlab has the paper {paper.name!r}; rename yours, or say `replaces: true` if it is a copy"
            )
    return mine


@functools.lru_cache(maxsize=256)
def _read(path: Path, changed: int, size: int) -> Paper:
    """A paper of the workspace; the time and the size of its file are there so that a change is seen."""
    paper = load_file(path)
    if paper.name != path.stem or "_" in paper.name:
        raise KvlabError(
            f"{path}: a paper has the name of its file, without underscores, and its name is {paper.name!r}"
        )
    for claim in paper.claims:
        if claim.paper != paper.name or not claim.id.startswith(f"{paper.name}."):
            raise KvlabError(
                f"{path}: the claim {claim.id!r} must be of the paper {paper.name!r}, with an id that begins "
                f"'{paper.name}.'"
            )
    return paper


def claims(experiment: str | None = None, paper: str | None = None) -> list[Claim]:
    """The claims, of one experiment or one paper if named. An unknown paper raises KvlabError; an experiment of the
    user's own has no claims, which is no mistake."""
    every = papers()
    known = [p.name for p in every]
    if paper is not None and paper not in known:
        raise KvlabError(nearest(paper, known, "paper"))
    return [
        claim
        for p in every
        for claim in p.claims
        if (paper is None or claim.paper == paper) and (experiment is None or claim.experiment == experiment)
    ]


def quoted() -> list[Claim]:
    """The claims of the project's ledger that are part of a quoted finding (`Paper.quoted`), in the order of the papers
    and there of `quoted`."""
    return [
        claim
        for paper in of_project()
        for name in paper.quoted
        for claim in paper.claims
        if claim.kind in SAMPLED and claim.fact[1] == name and not claim.untested
    ]


def figures() -> list[str]:
    """The printed tables and figures that are stored as data, as "paper/name"."""
    return sorted(_figures())


def figure(paper: str, name: str) -> pandas.DataFrame:
    """A table or figure as the paper prints it, tidy: figure("zsmerge", "figure4"). Raises KvlabError if unknown."""
    import pandas

    known = _figures()
    if f"{paper}/{name}" not in known:
        raise KvlabError(nearest(f"{paper}/{name}", known, "figure"))
    path = known[f"{paper}/{name}"]
    try:
        return pandas.read_csv(path, comment="#")
    except (ValueError, OSError) as error:  # pandas' own errors of a table that is none are ValueErrors
        raise KvlabError(f"{path} is not a table: {str(error).splitlines()[0]}") from None


def _figures() -> dict[str, Path]:
    """Figures by "paper/name"; those of the workspace replace kvlab's where their paper does."""
    known = _named((folder() / "figures").glob("*.csv"))
    mine = _named(workspace.files(f"{OWN}/figures", "*.csv"))
    replaced = {paper.name for paper in own() if paper.replaces} if mine else set()
    for name in sorted(mine.keys() & known.keys()):
        if name.partition("/")[0] not in replaced:
            raise KvlabError(f"{mine[name]}: kvlab has the figure {name!r}; rename yours")
    return known | mine


def _named(paths: Iterable[Path]) -> dict[str, Path]:
    return {path.stem.replace("_", "/", 1): path for path in paths}
