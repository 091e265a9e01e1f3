"""The leaderboard: policies by bytes and by a measure, from replays, from storages and from scores of tasks.

Runs of `all_together` give means of replays, equal_bytes/MODEL.csv in a kept folder. Runs of `evict_or_quantise` give
losses of policies and storages, storages/MODEL.csv (see `storage_means`). The page is leaderboard.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvlab.errors import KvlabError
from kvlab.lib.intervals import summarise
from kvlab.render import theme
from kvlab.workbench.report import csv_tables, runs, storage_means, task_scores
from kvlab.workbench.report.ledger import is_one_of, names
from kvlab.workbench.report.ledger_models import Subject
from kvlab.workbench.report.provenance import thoroughness
from kvlab.workbench.store import artifacts, database

if TYPE_CHECKING:
    import jinja2
    import pandas
    from mlflow.entities import Run

EXPERIMENT = "all_together"
FOLDER = "equal_bytes"
PAGE = "leaderboard.html"
TABLES = ("measures", "limit")
"""The tables of a run: every policy, and the limit of a budget."""
SLACK = 0.05
"""Sizes within this share count as equal on the front, as in the figures of `all_together`."""
REFERENCES = ("full", "exact_topk", "oracle_attention")
"""The full cache, and oracles that no user can run: they are drawn, and never on the front."""


class Measure(NamedTuple):
    """The label of a measure's axis, and whether more of it is better."""

    label: str
    higher: bool
    about: str


MEASURES = {
    "output_error": Measure("output error", False, "Relative error of the attention output."),
    "mass_lost": Measure("attention mass lost", False, "Share of a step's attention on entries that it does not read."),
    "recall": Measure("recall", True, "Share of the response's top tokens that are there after the prefill."),
    "window_recall": Measure("window recall", True, "Share of the response's top tokens among those ranked highest."),
    "step_recall": Measure("step recall", True, "Share of each step's top tokens that the step reads."),
}
SIDES = ("stored", "read")
SIZES = [*SIDES, *(f"{side}_bytes" for side in SIDES)]
NUMBERS = [f"{name}{end}" for name in MEASURES for end in ("", "_low", "_high")]
ASKED = {"policy", "budget", "full_bytes", *SIZES[2:], *MEASURES}
"""The columns of a run's tables."""
RUN = ["profile", "signature", "commit"]
COLUMNS = ["model", "policy", "budget", *SIZES, *NUMBERS, "n", *RUN]
STORAGE_LOSSES = {
    "output_error": Measure("output error by storage", False, "Relative error of the attention output."),
    "kl": Measure("KL of the next token, nats", False, "Divergence from the full model along its own response."),
    "needles_lost": Measure("digits of needles found", True, "Share of digits that are the likeliest tokens."),
}
STORAGE_NUMBERS = ["stored", "stored_bytes", "value", "low", "high"]
STORAGE_COLUMNS = ["model", "policy", "storage", "budget", "against", "measure", *STORAGE_NUMBERS, "n", *RUN]
QUESTION = {"prompt": "read", "context": "held back"}

Line = dict[str, str]


@dataclass(frozen=True)
class Point:
    """A policy at a budget.

    Attributes:
        name: the policy with the settings that tell it from others.
        stored, read: shares of the full cache; None where they are not known.
        low, high: the 95 % interval of `value`.
        n: how many documents or answers.
        rival: whether it can be on the front. References cannot, nor can scores over fewer answers than others.
    """

    policy: str
    name: str
    budget: str
    stored: float | None
    read: float | None
    stored_bytes: float
    read_bytes: float | None
    value: float
    low: float
    high: float
    n: int
    rival: bool


@dataclass(frozen=True)
class Chart:
    """The data of one chart.

    Attributes:
        measure: its name, unique for a model and question.
        group: of the choice of measures.
        question: a value of `QUESTION`: whether it was read when the cache was compressed; empty for replays.
        unit: of n: "documents" or "answers".
        percent: whether values are shares, shown in percent.
    """

    model: str
    group: str
    measure: str
    question: str
    higher: bool
    percent: bool
    unit: str
    about: str
    points: list[Point]


# ---------------------------------------------------------------------------------------------------- means of replays


def means(measured: pandas.DataFrame) -> Iterator[dict[str, Any]]:
    """A row for each policy and budget of `equal_bytes.measure`: means over documents, with 95 % intervals."""
    for _, part in measured.groupby(["policy", "budget"], sort=False, dropna=False):
        budget = part["budget"].iloc[0]
        row = {"policy": part["policy"].iloc[0], "n": len(part), "budget": "" if math.isnan(budget) else f"{budget:g}"}
        for side in SIDES:
            size = part[f"{side}_bytes"]
            row |= {side: (size / part["full_bytes"]).mean(), f"{side}_bytes": size.mean()}
        for name in MEASURES:
            value, (low, high) = summarise(part[name])
            row |= {name: value, f"{name}_low": low, f"{name}_high": high}
        yield row


def lines(run: Run, source: Source | None = None) -> list[Line]:
    """A run's measurements as lines of its file: numbers to six digits. Nothing where its tables lack a column.

    source: `all_together` by default.
    """
    import pandas

    source, tags = source or SOURCES[0], run.data.tags
    about = {"model": tags.get("model", ""), "profile": tags.get("kvlab.profile", "")}
    about |= {"signature": tags.get("signature", ""), "commit": tags.get("kvlab.commit", "")}
    found = {}
    for path in artifacts.files(database.client(), run, "tables", ".parquet"):
        if path.stem in source.tables and not source.asked - set(table := pandas.read_parquet(path)):
            found[path.stem] = [_texts(row | about, source.columns) for row in source.means(table)]
    return [line for table in source.tables for line in found.get(table, [])]


def _texts(row: Mapping[str, Any], columns: Sequence[str]) -> Line:
    return {name: f"{row[name]:.6g}" if isinstance(row[name], float) else str(row[name]) for name in columns}


def _runs(experiment: str, model: str | Sequence[str] | None, profile: str | None) -> list[Run]:
    """Of each of these models the newest finished job of its most thorough profile."""
    profiles = [profile] if profile else runs.newest({experiment}, "kvlab.profile").get(experiment, {})
    found: dict[str, Run] = {}
    for each in sorted(profiles, key=thoroughness):
        for name, run in runs.newest({experiment}, "model", profile=each).get(experiment, {}).items():
            if is_one_of(name, names(model)):
                found.setdefault(Subject(name).label, run)
    return list(found.values())


def keep_store(folder: Path, model: str | Sequence[str] | None = None, profile: str | None = None) -> list[Path]:
    """Write FOLDER/equal_bytes/MODEL.csv and FOLDER/storages/MODEL.csv of each model; lines of other profiles stay.

    A line of equal_bytes is a policy at a budget. It has the stored and read bytes, as shares of the full cache and in
    bytes. It has each measure with its 95 % interval over documents, and n, the number of documents. A line of storages
    is one measure of a policy at a budget in a storage, or its difference from the full cache in another. Both end with
    the run's profile, signature and commit.

    Returns:
        The files.
    """
    written = []
    for source in SOURCES:
        for run in _runs(source.experiment, model, profile):
            if mine := lines(run, source):
                path = folder / source.folder / f"{Subject(mine[0]['model']).label}.csv"
                before = csv_tables.read(path, source.columns, source.what) if path.exists() else []
                others = [line for line in before if line["profile"] != mine[0]["profile"]]
                csv_tables.write(path, [*others, *mine], source.columns)
                written.append(path)
    return written


# ---------------------------------------------------------------------------------------------------- charts


def of_store(model: str | Sequence[str] | None = None, profile: str | None = None) -> list[Chart]:
    """The charts of the store's runs of `all_together` and `evict_or_quantise`."""
    return [
        chart
        for source in SOURCES
        for run in _runs(source.experiment, model, profile)
        for chart in source.charts(lines(run, source))
    ]


def read(folder: Path, model: str | Sequence[str] | None = None, profile: str | None = None) -> list[Chart]:
    """The charts of what a folder keeps: of each model its most thorough replays and storages, then its tasks.

    Raises:
        KvlabError: a file cannot be read, or has no numbers.
    """
    found = []
    for source in SOURCES:
        for path in sorted((folder / source.folder).glob("*.csv")):
            of_profiles: dict[str, list[Line]] = {}
            for line in csv_tables.read(path, source.columns, source.what):
                if is_one_of(line["model"], names(model)) and profile in (None, line["profile"]):
                    of_profiles.setdefault(line["profile"], []).append(line)
            if of_profiles:
                found += source.charts(of_profiles[min(of_profiles, key=thoroughness)])
    for path in sorted((folder / task_scores.FOLDER).glob("*.csv")):
        of_tasks: dict[tuple[str, ...], list[Line]] = {}
        for line in task_scores.read(path):
            if is_one_of(line["model"].split()[0], names(model)) and not (line["kind"] or line["mode"] or line["turn"]):
                about = (*(line[name] for name in ("model", "task", "settings", "compress_at")),)
                of_tasks.setdefault(about, []).append(line)
        found += _of_tasks(of_tasks)
    return found


def _numbers(found: Sequence[Line], columns: Sequence[str], what: str) -> list[tuple[Line, dict[str, float]]]:
    """Each line with its numbers, by their columns."""
    try:
        return [(line, {name: float(line[name]) for name in columns}) for line in found]
    except ValueError as error:
        raise KvlabError(f"the {what} of {found[0]['model']} has no readable numbers: {error}") from error


def _of_replays(found: Sequence[Line]) -> list[Chart]:
    """A chart for each measure, from the lines of one run."""
    if not found:
        return []
    first, every = found[0], _numbers(found, [*SIZES, *NUMBERS], SOURCES[0].what)
    about = f" Means over {first['n']} documents, {first['profile']} profile of {EXPERIMENT}."
    return [
        Chart(
            Subject(first["model"]).label,
            "Replays",
            measure.label,
            "",
            measure.higher,
            False,
            "documents",
            measure.about + about,
            [
                Point(
                    line["policy"],
                    line["policy"],
                    line["budget"],
                    **{name: numbers[name] for name in SIZES},
                    value=numbers[name],
                    low=numbers[f"{name}_low"],
                    high=numbers[f"{name}_high"],
                    n=int(line["n"]),
                    rival=line["policy"] not in REFERENCES,
                )
                for line, numbers in every
                if math.isfinite(numbers[name])
            ],
        )
        for name, measure in MEASURES.items()
    ]


def _of_storages(found: Sequence[Line]) -> list[Chart]:
    """A chart for each loss, from the lines of one run of `evict_or_quantise`."""
    charts = []
    for name, measure in STORAGE_LOSSES.items():
        mine = [line for line in found if line["measure"] == name and not line["against"]]
        every = _numbers(mine, STORAGE_NUMBERS, SOURCES[1].what)
        points = [_stored_point(line, numbers, measure.higher) for line, numbers in every]
        points = [point for point in points if math.isfinite(point.value)]
        if points:
            first = every[0][0]
            about = f" Means over {first['n']} documents, {first['profile']} profile of {SOURCES[1].experiment}."
            about += " Bytes are those of a server in bfloat16."
            label = Subject(first["model"]).label
            about = measure.about + about
            charts.append(
                Chart(label, "Storages", measure.label, "", measure.higher, measure.higher, "documents", about, points)
            )
    return charts


def _stored_point(line: Line, numbers: Mapping[str, float], found: bool) -> Point:
    """The point of a policy in a storage; with `found`, its share lost is shown as a share found."""
    value, low, high = numbers["value"], numbers["low"], numbers["high"]
    if found:
        # Of four answers the interval reaches further than shares do.
        value, low, high = 1 - value, max(1 - high, 0.0), min(1 - low, 1.0)
    as_is = line["storage"] == storage_means.AS_IS
    return Point(
        line["policy"],
        line["policy"] if as_is else f"{line['policy']} in {line['storage']}",
        line["budget"],
        stored=numbers["stored"],
        read=None,
        stored_bytes=numbers["stored_bytes"],
        read_bytes=None,
        value=value,
        low=low,
        high=high,
        n=int(line["n"]),
        rival=not (as_is and line["policy"] in REFERENCES),
    )


@dataclass(frozen=True)
class Source:
    """An experiment whose tables the leaderboard shows.

    Attributes:
        folder: of its file in a kept folder, and `what` that file is called in messages.
        tables: of a run, those with the columns `asked`.
        means: a row for each line of the file, from a table.
        charts: from the lines of one run.
    """

    experiment: str
    folder: str
    what: str
    columns: list[str]
    tables: tuple[str, ...]
    asked: set[str]
    means: Callable[[pandas.DataFrame], Iterator[dict[str, Any]]]
    charts: Callable[[Sequence[Line]], list[Chart]]


SOURCES = (
    Source(EXPERIMENT, FOLDER, "table of equal bytes", COLUMNS, TABLES, ASKED, means, _of_replays),
    Source(
        "evict_or_quantise",
        "storages",
        "table of storages",
        STORAGE_COLUMNS,
        ("measured",),
        storage_means.ASKED,
        storage_means.means,
        _of_storages,
    ),
)


def _of_tasks(found: Mapping[tuple[str, ...], Sequence[Line]]) -> list[Chart]:
    """A chart for each task, its settings and moment of compression."""
    variants: dict[tuple[str, str], list[str]] = {}
    for model, task, settings, _ in found:
        known = variants.setdefault((model, task), [])
        known += [settings] * (settings not in known)
    charts = []
    for (model, task, settings, compress_at), mine in found.items():
        prompts, alike = task_scores.prompts(settings), variants[model, task]
        once = [task_scores.prompts(other) for other in alike].count(prompts) == 1
        which = prompts if once else f"settings {alike.index(settings) + 1}"
        label = f"{task} score" if len(alike) == 1 else f"{task} score, {which}"
        points = list(_scores([line for line in mine if line["kv_bytes"]]))
        if not points:
            continue
        of = f" to prompts of {prompts}" if prompts else ""
        about = f"Live answers{of}, {max(point.n for point in points)} at most for a policy."
        charts.append(
            Chart(
                Subject(model.split()[0]).label,
                "Tasks",
                label,
                QUESTION.get(compress_at, compress_at),
                True,
                True,
                "answers",
                about,
                points,
            )
        )
    return charts


def _scores(mine: Sequence[Line]) -> Iterator[Point]:
    """Yield the points of a task, the full cache's first.

    Scores over fewer answers have no share: the full cache's bytes on these examples are not kept.
    """
    plain = next((line for line in mine if line["policy"] == task_scores.FULL), None)
    full = float(plain["kv_bytes"]) if plain else None
    most = max((int(line["n"]) for line in mine), default=0)
    called = task_scores.system_names(mine)
    for line in sorted(mine, key=lambda line: line["policy"] != task_scores.FULL):
        whole, size = int(line["n"]) == most, float(line["kv_bytes"])
        # Of a few answers the interval reaches further than scores do.
        value, low, high = (min(max(float(line[name]), 0), 1) for name in ("score", "low", "high"))
        yield Point(
            line["policy"],
            called[task_scores.system(line)],
            line["budget"],
            size / full if full and whole else None,
            None,
            size,
            None,
            value,
            low,
            high,
            int(line["n"]),
            whole and line["policy"] not in REFERENCES,
        )


# ---------------------------------------------------------------------------------------------------- the page


def data(charts: Sequence[Chart]) -> dict[str, Any]:
    """The page's JSON data: the charts, and how each policy is drawn."""
    drawn = {point.policy for chart in charts for point in chart.points}
    return {
        "slack": SLACK,
        "references": REFERENCES,
        "charts": [asdict(chart) for chart in charts],
        "looks": {policy: theme.look(policy)._asdict() for policy in sorted(drawn)},
    }


def render(environment: jinja2.Environment, charts: Sequence[Chart], **given: Any) -> str:
    """The page, which needs only itself."""
    models = list(dict.fromkeys(chart.model for chart in charts))
    return environment.get_template(f"{PAGE}.j2").render(data=data(charts), models=models, **given)
