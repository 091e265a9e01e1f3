"""Logging from a notebook: metrics with intervals, tables, figures and verdicts, into one MLflow run."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat, cast

from kvlab.core.geometry import geometry
from kvlab.errors import KvlabError
from kvlab.lib import workspace
from kvlab.lib.batches import batches
from kvlab.lib.files import first_line, why
from kvlab.render import theme
from kvlab.workbench import experiments, project
from kvlab.workbench.experiments import POLICY, content_key
from kvlab.workbench.experiments.notebook_parameters import parameters as read_parameters
from kvlab.workbench.experiments.notebook_parameters import shell
from kvlab.workbench.experiments.notebooks import parameters_of
from kvlab.workbench.store import findings_table, showing
from kvlab.workbench.store.database import DESCRIPTION, client, ensure_store, experiment_id, store_uri
from kvlab.workbench.store.signatures import signature

if TYPE_CHECKING:
    import pandas
    from IPython.display import Markdown
    from matplotlib.figure import Figure
    from pandas.io.formats.style import Styler

    from kvlab.analyses.findings import Findings
    from kvlab.inputs.models import LM
    from kvlab.instruments.records import Records
    from kvlab.workbench.store.retries import RetryingClient

__all__ = ["Run", "client", "create_run", "ensure_store", "experiment_id", "start", "store_uri"]

BATCH = 1000  # metrics that MLflow's log_batch takes at once
ERROR = "kvlab.error"
LONGEST = 5000  # characters; MLflow cuts longer parameters without saying so
SHOWN = 1000  # rows; the page of a run fetches them all
STORY = "story"  # the folder of what the figures show, in sentences
BULLET = "- "  # before each sentence on a claim
PARAMETERS = "parameters"  # the tag with the number of the model's weights
RENDERED = "kvlab.render"  # the tag with the hash of the code that drew the run's figures
NONE = "none"  # what a tag says where nothing was measured for a model
LISTED = "mlflow.loggedArtifacts"  # which JSON files MLflow's UI shows as tables
NAME = re.compile(r"[\w\-. /]{1,240}")


def _one_sentence(method: Callable[..., Any]) -> Callable[..., Any]:
    """Turn errors of MLflow and of the disk into one sentence."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        from mlflow.exceptions import MlflowException
        from requests import RequestException

        try:
            return method(*args, **kwargs)
        except (MlflowException, RequestException) as error:  # before OSError, since RequestException is one
            raise KvlabError(f"the MLflow store failed: {first_line(error)}") from error
        except OSError as error:
            raise KvlabError(f"cannot write an artifact: {why(error)}") from error

    return wrapped


@dataclass
class Shown:
    """The files of a run under one name: figures/NAME.png and .svg, and story/NAME.md.

    Attributes:
        text: the user's own sentences; None where they cannot be made again, so that the saved ones stay.
        sentences: those on the claims that the figure shows.
    """

    name: str
    figure: Figure | None = None
    text: Sequence[str] | None = ()
    sentences: Sequence[str] = ()

    @property
    def markdown(self) -> str:
        """The user's sentences as one paragraph, without empty ones, and then a list of those on claims."""
        own = " ".join(sentence.strip() for sentence in self.text or () if sentence.strip())
        return "\n\n".join(filter(None, (own, "\n".join(f"{BULLET}{sentence}" for sentence in self.sentences))))

    @_one_sentence
    def log(self, connection: RetryingClient, run_id: str) -> None:
        from kvlab.lib.figures import save

        if self.figure is not None:
            with tempfile.TemporaryDirectory() as folder:
                save(self.figure, *(Path(folder) / f"{file_name(self.name)}.{suffix}" for suffix in ("png", "svg")))
                connection.log_artifacts(run_id, folder, "figures")
        if self.markdown:
            connection.log_text(run_id, self.markdown + "\n", f"{STORY}/{file_name(self.name)}.md")


def story_of(shown: Iterable[Shown]) -> str:
    """All that a run's figures show, in sentences: MLflow's description of the run."""
    return "\n\n".join(filter(None, (each.markdown for each in shown)))


def _display(figure: Figure) -> None:
    """Show a figure in a notebook now, above the sentences that a cell may end with."""
    if shell() is not None and "inline" in os.environ.get("MPLBACKEND", "inline"):
        from IPython.display import display
        from matplotlib import pyplot

        display(figure)
        pyplot.close(figure)  # else the notebook would show it once more at the end of the cell


class Run:
    """One MLflow run. `attached`: it belongs to a sweep, which sets the final status itself.

    Also a context manager: the run ends FINISHED, or FAILED if the block raises.

    headlines: the metrics that MLflow shows, at most `showing.MOST`. By default these are those that the experiment's
    claims quote, or the first ones of an experiment without claims. The table `findings` has all of them.
    """

    def __init__(
        self,
        connection: RetryingClient,
        run_id: str,
        experiment: str,
        attached: bool = False,
        headlines: Sequence[str] = (),
    ) -> None:
        self.client, self.id, self.experiment, self.attached = connection, run_id, experiment, attached
        self.metrics: dict[str, float] = {}
        self.intervals: dict[str, tuple[float, float]] = {}
        self._headlines = showing.Headlines(experiment, headlines)
        self._earlier: dict[str, findings_table.Number] | None = None  # the stored run's numbers before this object
        self._of_policies: dict[str, list[showing.Point]] = {}
        self._shown: dict[str, Shown] = {}
        self._error = ""
        self._unwatch: Callable[[], object] = lambda: None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish("FAILED" if kind else "FINISHED")

    def __repr__(self) -> str:
        return f"Run({self.experiment!r}, {self.id})"

    @_one_sentence
    def log(self, metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]] | None = None) -> None:
        """Log metrics; an interval of a metric becomes NAME/low and NAME/high.

        The run's table `findings` has all of them; MLflow's own metrics are the headlines.

        Raises KvlabError, before anything is logged, for a number that is not finite, or a name that MLflow cannot
        store. It also refuses an interval without its metric, or with ends the wrong way round.
        """
        intervals = dict(intervals or {})
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            if not NAME.fullmatch(name):
                raise KvlabError(f"{name!r} is no metric name: use letters, digits, '_', '-', '.', '/' and spaces")
            numbers[name] = _finite(name, value)
        for name, (low, high) in intervals.items():
            if name not in numbers and name not in self.metrics:
                raise KvlabError(f"there is an interval for {name!r}, but no metric of that name")
            numbers[f"{name}/low"], numbers[f"{name}/high"] = _finite(f"{name}/low", low), _finite(f"{name}/high", high)
            if numbers[f"{name}/low"] > numbers[f"{name}/high"]:
                raise KvlabError(f"the interval of {name!r} has its ends the wrong way round: ({low}, {high})")
        kept = {name: (numbers[f"{name}/low"], numbers[f"{name}/high"]) for name in intervals}
        self._write_table(self.metrics | numbers, self.intervals | kept)
        self._log_points(showing.Point(name, 0, numbers[name]) for name in self._headlines.among(numbers))
        self.metrics.update(numbers)
        self.intervals.update(kept)

    def _write_table(self, metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]) -> None:
        if self._earlier is None:
            self._earlier = findings_table.read(self.client, self.client.get_run(self.id))
            self._list(findings_table.FILE)
        rows = self._earlier | findings_table.table(metrics, intervals)
        findings_table.write(self.client, self.id, rows)
        self.tag(findings_table.NAMES, findings_table.signed(rows))  # after the file: it says that there is one

    def _log_points(self, points: Iterable[showing.Point]) -> None:
        for entries in batches(showing.metrics(points), BATCH):
            self.client.log_batch(self.id, metrics=entries)

    def _list(self, path: str) -> None:
        """Let MLflow's UI show a JSON file as a table."""
        listed = json.loads(self.client.get_run(self.id).data.tags.get(LISTED, "[]"))
        entry = {"path": path, "type": "table"}
        self.client.set_tag(self.id, LISTED, json.dumps([*(earlier for earlier in listed if earlier != entry), entry]))

    @_one_sentence
    def table(self, name: str, frame: pandas.DataFrame) -> None:
        """Keep a tidy table as tables/NAME.parquet, and for MLflow's UI as NAME.json; of a table with more than SHOWN
        rows the first ones, as NAME_first_1000_rows.json.

        MLflow's own log_table is not used: if a cell is run again, it appends the rows once more.
        """
        cut = f"_first_{SHOWN}_rows" if len(frame) > SHOWN else ""
        shown = f"tables/{file_name(name)}{cut}.json"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{file_name(name)}.parquet"
            frame.to_parquet(path, index=False)
            self.client.log_artifact(self.id, str(path), "tables")
        rows = frame.head(SHOWN).to_json(orient="split", index=False, default_handler=str)
        self.client.log_text(self.id, rows, shown)
        self._list(shown)

    def probes(self, name: str, records: Records) -> None:
        """Save the `records` of the probes in a live session or a replay.

        The tidy table becomes tables/NAME.parquet. The mean of every measure becomes a metric NAME/measure.
        """
        self.table(name, records.table)
        self.log({f"{name}/{measure}": value for measure, value in records.means.items()})

    @_one_sentence
    def record(
        self,
        name: str,
        findings: Findings | pandas.DataFrame | None = None,
        *,
        figure: Figure | None = None,
        text: Sequence[str] = (),
    ) -> Markdown | None:
        """Keep what an analysis found and what shows it: metrics with intervals, a table, a figure and sentences.

        The sentences on the experiment's claims that name this figure are added, of those whose metrics are logged by
        now; `finish` adds the others.

        Args:
            name: of tables/NAME.parquet, figures/NAME.png and story/NAME.md.
            findings: their metrics are logged. They are saved whole, so that `kvlab render` can draw figures again
                without measuring. A table alone has no metrics.
            figure: a matplotlib figure.
            text: sentences of your own, computed from the findings; empty ones are left out.

        Returns:
            The sentences, to display: yours as one paragraph, then a list of those on claims. None without sentences.
        """
        import pandas
        from IPython.display import Markdown

        from kvlab.workbench.store import findings_files

        if findings is not None:
            if isinstance(findings, pandas.DataFrame):
                table = findings
            else:
                table = findings.table
                self.log(findings.metrics, findings.intervals)
                # None of the run's `metrics`, which claims are judged by.
                for policy, points in showing.curves(findings.rows).items():
                    self._of_policies.setdefault(policy, []).extend(points)
            if len(table):
                self.table(name, table)
            with tempfile.TemporaryDirectory() as folder:
                findings_files.write(findings, Path(folder), file_name(name))
                self.client.log_artifacts(self.id, folder, findings_files.FOLDER)
        own = text or (self._shown[name].text if name in self._shown else ())
        shown = self._shown[name] = Shown(name, figure, own, self._sentences(name))
        shown.log(self.client, self.id)
        if figure is not None:
            _display(figure)
            shown.figure = None
        return Markdown(shown.markdown) if shown.markdown else None

    def _sentences(self, name: str) -> list[str]:
        """On the claims that the figure of this name shows."""
        from kvlab.render.sentences import of_figure

        # A mistake in a paper's file must not end a measurement; `kvlab render` makes the sentences once it is mended.
        with contextlib.suppress(KvlabError):
            return of_figure(self.experiment, name, self.metrics)
        return []

    def figure(self, name: str, figure: Figure) -> None:
        """Keep a matplotlib figure as figures/NAME.png and .svg."""
        self.record(name, figure=figure)

    def tell(self, figure: str, sentences: Sequence[str]) -> Markdown:
        """Keep your own sentences on a figure, computed from its numbers, in story/FIGURE.md.

        Args:
            figure: the name that `figure` was given.
            sentences: in the order in which they are read; empty ones are left out.

        Returns:
            As `record`.
        """
        shown = self.record(figure, text=sentences)
        if shown is None:
            raise KvlabError(f"there is no sentence to tell about the figure {figure!r}")
        return shown

    @_one_sentence
    def json(self, name: str, value: object) -> None:
        """Keep plain data as NAME.json."""
        self.client.log_text(self.id, json.dumps(value, indent=1, ensure_ascii=False), f"{file_name(name)}.json")

    @_one_sentence
    def tag(self, key: str, value: object) -> None:
        """Set a tag, such as the signature of what was measured."""
        self.client.set_tag(self.id, key, str(value)[:LONGEST])

    @_one_sentence
    def inputs(self, line: str) -> None:
        """Say which texts the numbers are of, as MLflow's datasets.

        Args:
            line: the run's signature.
        """
        if texts := showing.datasets(line):
            self.client.log_inputs(self.id, texts)

    def about(self, lm: LM, **chosen: object) -> None:
        """Tag the run with the model of its numbers (hash, number of parameters, type and shape) and the hardware.

        Args:
            lm: as it was loaded.
            chosen: what else was picked for this very model, such as `tables="smollm2-135m"`; None is tagged as NONE.
        """
        from kvlab.bench.meters import device_name

        shape = geometry(lm.model.config)
        compressed = f" ({len(lm.layout.compressed)} compressed)" if lm.layout.mixed else ""
        own = {
            "model_sha256": lm.sha256,
            PARAMETERS: lm.model.num_parameters(),
            "dtype": str(lm.dtype).removeprefix("torch."),
            "shape": f"{lm.n_layers} layers{compressed}, {shape.heads} query heads, {shape.kv_heads} KV heads",
            "hardware": device_name(lm.device),
        }
        for key, value in (own | chosen).items():
            self.tag(key, NONE if value is None else value)

    def claims(self, experiment_or_paper: str | None = None) -> Styler:
        """Judge the claims of an experiment (this run's, if none is named) or a paper on this run's metrics.

        The verdicts are kept as claims.json and returned as a table to display.
        """
        import pandas

        from kvlab import papers

        named = experiment_or_paper or self.experiment
        is_paper = named in [paper.name for paper in papers.papers()]
        chosen = papers.claims(paper=named) if is_paper else papers.claims(experiment=named)
        verdicts = [papers.judge(claim, self.metrics, self.intervals) for claim in chosen]
        rows = [
            {
                "where": f"{claim.paper}, {claim.where}",
                "claim": claim.summary,
                "paper": claim.paper_value,
                "here": verdict.value,
                "low": verdict.low,
                "high": verdict.high,
                "verdict": verdict.verdict,
            }
            for claim, verdict in zip(chosen, verdicts, strict=True)
        ]
        self.json(
            "claims",
            [
                {"id": claim.id, "group": claim.group, "metric": claim.metric, "paper_value": claim.paper_value}
                | verdict.model_dump()
                for claim, verdict in zip(chosen, verdicts, strict=True)
            ],
        )
        if not is_paper:
            for key, count in showing.verdicts(verdict.verdict for verdict in verdicts).items():
                self.tag(key, count)
        frame = pandas.DataFrame(rows, columns=["where", "claim", "paper", "here", "low", "high", "verdict"])
        numbers = dict.fromkeys(("paper", "here", "low", "high"), "{:.3g}")
        styler = frame.style.hide(axis="index").set_uuid(f"claims-{file_name(named)}")
        styler.format(numbers, na_rep="–")
        return styler.map(
            lambda verdict: f"background-color: {theme.VERDICTS[verdict]}; color: {theme.INK}", subset=["verdict"]
        ).set_properties(**{"text-align": "left", "vertical-align": "top"})

    @_one_sentence
    def finish(self, status: str = "FINISHED") -> None:
        """End the run, with all sentences on its figures' claims.

        The run of a sweep's job is left open: only the sweep knows how the notebook ended.
        """
        if status == "FINISHED":
            for name, shown in self._shown.items():
                if shown.sentences != (sentences := self._sentences(name)):
                    shown.sentences = sentences
                    Shown(name, None, shown.text, sentences).log(self.client, self.id)
            if story := story_of(self._shown.values()):
                self.tag(DESCRIPTION, story)
            self._log_points(showing.Point(name, 0, self.metrics[name]) for name in self._headlines.more(self.metrics))
            self._log_policies()
        if not self.attached:
            if self._error and status == "FINISHED":  # a cell failed, was mended by hand, and the notebook went on
                self.client.delete_tag(self.id, ERROR)
            self.client.set_terminated(self.id, status)
        self._unwatch()

    def _log_policies(self) -> None:
        """A run for each policy under this one, with its curves over budgets: MLflow's charts compare runs."""
        for policy, points in self._of_policies.items():
            tags = {"kvlab.kind": POLICY, "kvlab.policy": policy, "mlflow.parentRunId": self.id}
            child = create_run(self.client, self.experiment, {}, tags, name=policy)
            child._log_points(points)
            child.finish()
        self._of_policies.clear()

    @_one_sentence
    def _stopped_by(self, error: BaseException) -> None:
        self._error = f"{type(error).__name__}: {first_line(error)}"
        self.tag(ERROR, self._error)
        self.client.set_terminated(self.id, "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")

    def watch(self) -> None:
        """From now to `finish`, a cell that fails marks this run FAILED, and a cell that is interrupted KILLED.

        Plain papermill ends the kernel after a cell that failed, so nothing later could mark the run. Outside IPython
        this does nothing.
        """
        if (interpreter := shell()) is None:
            return

        def ended(result: Any) -> None:
            if error := result.error_before_exec or result.error_in_exec:
                # The notebook shows the cell's error. A store that is away must not replace it by its own.
                with contextlib.suppress(KvlabError):
                    self._stopped_by(error)

        interpreter.events.register("post_run_cell", ended)
        self._unwatch = lambda: (
            ended in interpreter.events.callbacks["post_run_cell"]
            and interpreter.events.unregister("post_run_cell", ended)
        )


def start(
    experiment: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    headlines: Sequence[str] = (),
    **tags: object,
) -> Run:
    """The run to log into: that of the sweep's job, if MLFLOW_RUN_ID names it, else a new one marked as interactive.

    In a notebook, the parameters are read from its parameters cell; texts that papermill handed over for lists become
    lists there. The run makes its own signature. Interactive runs are kept, but never enter the
    ledger.

    Args:
        experiment: its name.
        parameters: the parameters of the run, unless a notebook's parameters cell has them.
        headlines: the metrics that MLflow shows, at most twelve; by default those that the experiment's claims quote.
        tags: anything else that identifies the numbers.

    Raises:
        KvlabError: the store cannot be reached, or a parameter is not of the type that the notebook has for it.
    """
    given = dict(parameters) if parameters is not None else read_parameters(experiment)
    tags = {"signature": signature(experiment, given), **tags}
    with contextlib.suppress(KvlabError):
        tags[RENDERED] = content_key.showing(experiments.load(experiment).path)
    if run_id := os.environ.get("MLFLOW_RUN_ID"):
        run = Run(client(store_uri()), run_id, experiment, attached=True, headlines=headlines)
        for key, value in tags.items():
            run.tag(key, value)
        run.inputs(str(tags["signature"]))
        return run
    tags = {"kvlab.kind": "interactive", **tags}
    run = create_run(client(), experiment, given, tags, _name(experiment, given), headlines)
    run.inputs(str(tags["signature"]))
    run.watch()
    return run


def _name(experiment: str, parameters: Mapping[str, Any]) -> str:
    """The name of an interactive run: the parameters that differ from the defaults of the experiment's notebook."""
    changed = ""
    with contextlib.suppress(KvlabError):
        usual = parameters_of(experiments.load(experiment).path)
        changed = experiments.run_name({name: value for name, value in parameters.items() if usual.get(name) != value})
    return f"interactive {changed}".strip()


@_one_sentence
def create_run(
    connection: RetryingClient,
    experiment: str,
    parameters: Mapping[str, Any],
    tags: Mapping[str, object],
    name: str,
    headlines: Sequence[str] = (),
) -> Run:
    """Open a run with its parameters and the tags that every run of kvlab carries."""
    from mlflow.entities import Param, RunTag

    every = {**origin(), "kvlab.experiment": experiment, **_identity(parameters), **tags}
    created = connection.create_run(
        experiment_id(connection, experiment),
        run_name=name,
        tags={key: str(value)[:LONGEST] for key, value in every.items()},
    )
    run = Run(connection, created.info.run_id, experiment, headlines=headlines)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in parameters.items()}
    connection.log_batch(
        run.id,
        params=[Param(key, text[:LONGEST]) for key, text in texts.items()],
        tags=[RunTag("mlflow.source.name", "kvlab"), RunTag("mlflow.source.type", "NOTEBOOK")],
    )
    if any(len(text) > LONGEST for text in texts.values()):
        run.json("parameters", dict(parameters))
    return run


def origin() -> dict[str, str]:
    """Tags that say where the numbers come from: version, code, commit, and the process, which `earlier.tidy` looks
    for.
    """
    import psutil

    tags = {
        "kvlab.version": project.version(),
        "kvlab.code": project.code_hash()[:16],
        "kvlab.host": socket.gethostname(),
        "kvlab.pid": str(os.getpid()),
        "kvlab.pid_started": f"{psutil.Process().create_time():.2f}",
    }
    if own := workspace.code_hash():
        tags["kvlab.workspace"] = own[:16]
    if commit := project.commit():
        tags["mlflow.source.git.commit"] = tags["kvlab.commit"] = commit
    return tags


def _identity(parameters: Mapping[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for key in ("model", "document", "documents", "seed"):
        if key in parameters:
            value = parameters[key]
            several = isinstance(value, (list, tuple))
            named[key.removesuffix("s") if key == "documents" else key] = (
                ", ".join(map(str, value)) if several else str(value)
            )
    return named


def _finite(name: str, value: object) -> float:
    try:
        number = float(cast("SupportsFloat", value))
    except (TypeError, ValueError):
        raise KvlabError(f"metric {name!r} must be one number, not {type(value).__name__}") from None
    if not math.isfinite(number):
        raise KvlabError(f"metric {name!r} is {number}: a number that is not finite is a fault upstream, not a result")
    return number


def file_name(name: str) -> str:
    """The file, less its suffix, under which a table or figure of that name is kept."""
    return re.sub(r"[^\w.\-]+", "_", name).strip("_.") or "unnamed"
