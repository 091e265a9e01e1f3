"""`kvlab add`: the skeleton of a policy, a task, a notebook or a claim in the workspace in use, with its test.

Each skeleton works as it is written: its test passes before anything is changed in it. An experiment is a copy of one
of kvlab's own.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from kvlab import methods, papers, tasks
from kvlab.errors import KvlabError, nearest
from kvlab.lib import workspace
from kvlab.lib.files import read_text, replacing
from kvlab.workbench.experiments import shipped
from kvlab.workbench.workspace.rendering import render

WORD = re.compile(r"[a-z][a-z0-9_]*")
CLAIM = re.compile(r"(?P<paper>[a-z][a-z0-9-]*)\.(?P<what>[a-z][a-z0-9_.-]*)")
PRINTED = re.compile(r"(?P<kind>table|figure)_?(?P<number>[a-z]?\d+[a-z]?)\.")


def add(kind: str, name: str, with_tasks: bool = False) -> list[Path]:
    """Write the skeleton of that kind and name, with its test, and return the files.

    Args:
        kind: one of KINDS.
        name: a word in small letters; of a claim, PAPER.NAME: a paper that is not there yet is begun. Of
            `mypaper.table2.gain` the claim is of table 2; without a table or a figure in its name, of table 1. Of an
            experiment, the name of one of kvlab's own, which is copied with its notebook.
        with_tasks: of a notebook: it scores answers of the live model to tasks, instead of replays.

    Raises:
        KvlabError: outside a workspace, an unknown kind, a name that is no word or is taken, or a file that is there.
    """
    if kind not in KINDS:
        raise KvlabError(nearest(kind, KINDS, "kind"))
    folder = workspace.workspace()
    if folder is None:
        raise KvlabError(f"{workspace.root()} is no workspace; make one with `kvlab new my-lab`, and change into it")
    if with_tasks:
        if kind != "notebook":
            raise KvlabError(f"--tasks is for notebooks, and this is a {kind}")
        return _notebook(folder, name, "task_")
    return KINDS[kind](folder, name)


def _policy(folder: Path, name: str) -> list[Path]:
    return _python(folder, name, "policy", "policies", methods.registry())


def _task(folder: Path, name: str) -> list[Path]:
    return _python(folder, name, "task", "tasks", tasks.registry())


def _python(folder: Path, name: str, kind: str, part: str, existing: Iterable[str]) -> list[Path]:
    _check_word(name, kind)
    if name in existing:
        raise KvlabError(f"there is a {kind} {name!r} already; take another name")
    values = {"name": name, "title": _title(name), "cls": _title(name).replace(" ", "")}
    return _written(
        {
            folder / part / f"{name}.py": render(f"added/{kind}.py.j2", **values),
            folder / "tests" / f"test_{name}.py": render(f"added/test_{kind}.py.j2", **values),
        }
    )


def _notebook(folder: Path, name: str, which: str = "") -> list[Path]:
    _check_word(name, "notebook")
    values = {"name": name, "title": _title(name)}
    return _written(
        {
            folder / "notebooks" / f"{name}.ipynb": render(f"added/{which}notebook.ipynb.j2", **values),
            folder / "experiments" / f"{name}.yaml": render(f"added/{which}experiment.yaml.j2", **values),
        }
    )


def _claim(folder: Path, name: str) -> list[Path]:
    parts = CLAIM.fullmatch(name)
    if parts is None:
        raise KvlabError(
            f"{name!r} is no name for a claim: it is PAPER.NAME in small letters, such as mypaper.table1.gain"
        )
    paper, what = parts["paper"], parts["what"]
    if name in {claim.id for claim in papers.claims()}:
        raise KvlabError(f"there is a claim {name!r} already; take another name")
    printed = PRINTED.match(what)
    kind, number = printed.group("kind", "number") if printed else ("table", "1")
    values = {
        "id": name,
        "paper": paper,
        "what": what.replace(".", "/"),
        "where": f"{kind} {number}",
        "title": _title(paper),
    }
    path = folder / papers.OWN / f"{paper}.yaml"
    test = folder / "tests" / ("test_" + re.sub(r"\W+", "_", name) + ".py")
    claim = render("added/claim.yaml.j2", **values)
    files = {test: render("added/test_claim.py.j2", **values)}
    if path.exists():
        _check_free(files)
        _append(path, claim)
        return [path, *_written(files)]
    if paper in {known.name for known in papers.papers()}:
        raise KvlabError(f"kvlab has the paper {paper!r}; `kvlab new my-lab --paper {paper}` makes a workspace of it")
    figure = folder / papers.OWN / "figures" / f"{paper}_{kind}{number}.csv"
    return _written(
        {
            path: render("added/paper.yaml.j2", **values) + claim,
            figure: render("added/figure.csv.j2", **values),
            **files,
        }
    )


def _append(path: Path, claim: str) -> None:
    """Write a claim at the end of a paper's file, if the file is right with it."""
    before = len(papers.load_file(path).claims)
    with replacing(path) as temporary:
        temporary.write_text(f"{read_text(path).rstrip()}\n\n{claim}", encoding="utf-8")
        try:
            added = len(papers.load_file(temporary).claims) - before
        except KvlabError:
            added = 0
        if added != 1:
            raise KvlabError(
                f"{path} does not end with its claims, so a claim cannot be added; move `claims` to its end"
            )


def _experiment(folder: Path, name: str) -> list[Path]:
    if name not in (known := shipped.names()):
        raise KvlabError(
            f"{nearest(name, known, 'experiment of kvlab')}; for one of your own: kvlab add notebook {name}"
        )
    return _written({folder / part: text for part, text in shipped.files_of(name).items()})


KINDS: dict[str, Callable[[Path, str], list[Path]]] = {
    "policy": _policy,
    "claim": _claim,
    "notebook": _notebook,
    "task": _task,
    "experiment": _experiment,
}


def _check_word(name: str, kind: str) -> None:
    if not WORD.fullmatch(name) or keyword.iskeyword(name):
        raise KvlabError(f"{name!r} is no name for a {kind}: use small letters, digits and '_', a letter first")


def _title(name: str) -> str:
    return " ".join(part.capitalize() for part in re.split(r"[_-]+", name) if part)


def _check_free(files: Iterable[Path]) -> None:
    for path in files:
        if path.exists():
            raise KvlabError(f"{path} exists already; take another name, or remove it")


def _written(files: dict[Path, str]) -> list[Path]:
    _check_free(files)
    for path, text in files.items():
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return list(files)
