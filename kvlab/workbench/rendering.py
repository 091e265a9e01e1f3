"""`kvlab render`: the figures and sentences of a finished run, made again from its findings without measuring.

The notebook has the code: statements such as `run.record("lead", found, figure=draw.lead(found))` run again with the
saved findings. The sentences on claims follow from the run's metrics. A figure whose notebook code needs a model stays
as it is.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import KvlabError
from kvlab.lib.files import first_line
from kvlab.render.sentences import of_figure
from kvlab.workbench import experiments
from kvlab.workbench.experiments import content_key, notebooks, parameter_values
from kvlab.workbench.report import runs
from kvlab.workbench.store import artifacts, findings_files
from kvlab.workbench.store.database import DESCRIPTION
from kvlab.workbench.store.findings_table import numbers
from kvlab.workbench.store.tracking import LONGEST, RENDERED, Shown, file_name, story_of

if TYPE_CHECKING:
    from mlflow.entities import Run
    from pandas import DataFrame

    from kvlab.analyses.findings import Findings
    from kvlab.workbench.store.retries import RetryingClient

    Load = Callable[[str], Findings | DataFrame | None]

PACKAGE = "kvlab"


@dataclass
class Rendered:
    """The files made again for one run: the names of its figures and texts, and why others stay as they are."""

    made: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


class _Unsaved(Exception):
    """A name that only a measurement can give."""


class _Package:
    """`kvlab` in a notebook that is rendered: its functions measure, and are not called."""

    def __getattr__(self, name: str) -> Any:
        raise _Unsaved(f"it calls kvlab.{name}")


@dataclass
class _Later:
    """A name's statement, executed when a figure first asks for it, with the names as they stood there."""

    statement: ast.stmt
    names: dict[str, Any]
    scope: dict[str, Any] | None = None

    def value(self, name: str) -> Any:
        if self.scope is None:
            scope = _resolved(self.statement, self.names)
            exec(compile(ast.Module([self.statement], []), "<notebook>", "exec"), scope)
            self.scope = scope
        return self.scope[name]


def is_current(run: Run) -> bool:
    """Whether today's code has drawn the figures of a run, or they cannot be drawn again."""
    path = experiments.load(run.data.tags.get("kvlab.experiment", "")).path
    return run.data.tags.get(RENDERED) in (None, content_key.showing(path))


def render(connection: RetryingClient, run: Run) -> Rendered:
    """Make the figures and sentences of a finished run again, and replace those that it holds.

    Raises:
        KvlabError: the run saved no findings, or its notebook is not here.
    """
    from matplotlib import pyplot, rc_context

    experiment = experiments.load(run.data.tags.get("kvlab.experiment", ""))
    rendered = Rendered()
    with tempfile.TemporaryDirectory() as temporary, rc_context():
        pyplot.switch_backend("agg")
        folder = Path(temporary)
        saved = set(artifacts.fetch(connection, run, findings_files.FOLDER, folder))
        if not saved:
            raise KvlabError(f"the run {run.info.run_id} saved no findings: run it again with --fresh")

        @functools.cache
        def load(name: str) -> Findings | DataFrame | None:
            """The findings that were saved under a name; None where none were."""
            stem = file_name(name)
            return findings_files.read(folder, stem) if f"{stem}{findings_files.SUFFIX}" in saved else None

        found = _shown(experiment.path, run, load, rendered)
        for name, shown in found.items():
            if shown.text is not None:
                shown.sentences = of_figure(experiment.name, name, numbers(run))
            if shown.figure is not None or shown.markdown:
                shown.log(connection, run.info.run_id)
                rendered.made.append(name)
        pyplot.close("all")
    if all(shown.text is not None for shown in found.values()) and (story := story_of(found.values())):
        connection.set_tag(run.info.run_id, DESCRIPTION, story[:LONGEST])
    connection.set_tag(run.info.run_id, RENDERED, content_key.showing(experiment.path))
    return rendered


def _shown(path: Path, run: Run, load: Load, rendered: Rendered) -> dict[str, Shown]:
    """The records of the notebook, by name, without the sentences on claims."""
    found: dict[str, Shown] = {}
    names: dict[str, Any] = {PACKAGE: _Package()} | _parameters(path, run)
    statements = list(_statements(path))
    for number, statement in enumerate(statements):
        nodes = list(ast.walk(statement))
        for call in (call for node in nodes if (call := recorded(node)) is not None):
            name = ast.literal_eval(call.args[0])
            if recorded(statement) is None and _variable(call) is not None and load(name) is None:
                continue  # the run did not take this branch
            _bind(call, names, load)
            _add(call, found.setdefault(name, Shown(name)), names, rendered)
        for call in (node for node in nodes if isinstance(node, ast.Call) and notebooks.method_of_run(node) == "tell"):
            if call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value in found:
                found[call.args[0].value].text = None  # these sentences are not made again, and stay
        if recorded(statement) is None:
            _define(statement, names)
            for call in _recorded_next(_stored(statement), statements[number + 1 :]):
                _bind(call, names, load)
    return found


def _statements(path: Path) -> Iterator[ast.stmt]:
    for cell in notebooks.cells(path):
        if cell.get("cell_type") == "code" and not notebooks.is_parameters(cell):
            with contextlib.suppress(SyntaxError, ValueError):
                yield from ast.parse(notebooks.source(cell)).body


def _recorded_next(names: set[str], statements: list[ast.stmt]) -> Iterator[ast.Call]:
    """The calls that record these names before they are given another value."""
    names = set(names)
    for statement in statements:
        call = recorded(statement)
        if call is not None and _variable(call) in names:
            yield call
        names -= _stored(statement)
        if not names:
            return


def _parameters(path: Path, run: Run) -> dict[str, Any]:
    declared = notebooks.parameters_of(path)
    given = {name: run.data.params[name] for name in declared if name in run.data.params}
    return declared | {name: parameter_values.read(text, declared[name]) for name, text in given.items()}


def recorded(statement: ast.AST) -> ast.Call | None:
    """The call of `run.record` that a statement is, if the name in it is plain text."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or notebooks.method_of_run(call) != "record" or not call.args:
        return None
    return call if isinstance(call.args[0], ast.Constant) else None


def _variable(call: ast.Call) -> str | None:
    """The variable whose findings a call records."""
    found = call.args[1] if len(call.args) > 1 else None
    return found.id if isinstance(found, ast.Name) else None


def _bind(call: ast.Call, names: dict[str, Any], load: Load) -> None:
    """From here on the variable that a call records is what was saved under the call's name."""
    variable = _variable(call)
    if variable is not None and (found := load(ast.literal_eval(call.args[0]))) is not None:
        names[variable] = found


def _add(call: ast.Call, shown: Shown, names: dict[str, Any], rendered: Rendered) -> None:
    """Add the figure and the user's own sentences of a call."""
    for keyword in call.keywords:
        if keyword.arg not in notebooks.SHOWN:
            continue
        value = None
        try:
            value = eval(compile(ast.Expression(keyword.value), "<notebook>", "eval"), _resolved(keyword.value, names))
        except _Unsaved as error:
            rendered.left[shown.name] = str(error)
        except Exception as error:  # one figure's mistake is no reason to leave the others
            rendered.left[shown.name] = f"{type(error).__name__}: {first_line(error)}"
        setattr(shown, keyword.arg, value)


def _define(statement: ast.stmt, names: dict[str, Any]) -> None:
    """Take over what a statement defines: imports at once, assignments when they are asked for."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        if not any(alias.name == PACKAGE for alias in statement.names):
            scope: dict[str, Any] = {}
            exec(compile(ast.Module([statement], []), "<notebook>", "exec"), scope)
            names.update({name: value for name, value in scope.items() if name != "__builtins__"})
        return
    later = _Later(statement, dict(names))
    for name in _stored(statement):
        if not isinstance(statement, ast.If) or name not in names:  # what a branch recorded stays
            names[name] = later


def _stored(statement: ast.stmt) -> set[str]:
    """The names that a statement defines; none for one that starts the run."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    nodes = ast.walk(statement) if not isinstance(statement, ast.Expr) else ()
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return set() if notebooks.RUN in names else names


def _resolved(node: ast.AST, names: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the names that a node reads. Raises _Unsaved for one that only a measurement gives."""
    wanted = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    own = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    own |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    scope: dict[str, Any] = {}
    for name in wanted:
        if name in names:
            value = names[name]
            scope[name] = value.value(name) if isinstance(value, _Later) else value
        elif name not in own and not hasattr(builtins, name):
            raise _Unsaved(f"it needs {name!r}, which the run did not save")
    return scope


def stale(names: list[str], profile: str | None = None, fresh: bool = False) -> list[Run]:
    """The newest finished runs, one for each experiment, profile and model, whose figures older code has drawn.

    Runs that saved no findings are left out.

    Args:
        names: of experiments.
        profile: only runs of this one.
        fresh: also runs whose figures are of today's code.
    """
    found = []
    for each in [profile] if profile else experiments.PROFILES:
        for models in runs.newest(names, "model", profile=each).values():
            found += [run for run in models.values() if RENDERED in run.data.tags and (fresh or not is_current(run))]
    return found
