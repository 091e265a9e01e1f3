"""What runs told of their figures, in sentences, kept as data beside a ledger: stories/MODEL.csv."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import KvlabError
from kvlab.lib.files import read_text, replacing
from kvlab.workbench import experiments
from kvlab.workbench.report import runs
from kvlab.workbench.report.ledger import Entry, measuring
from kvlab.workbench.report.provenance import Origin, seconds
from kvlab.workbench.store import artifacts, database
from kvlab.workbench.store.tracking import STORY

if TYPE_CHECKING:
    from mlflow.entities import Run

    from kvlab.workbench.store.retries import RetryingClient

FOLDER = "stories"  # a folder of its own, so that every CSV beside it is a ledger
LATER = ["machine", "seconds"]  # columns that older files lack
COLUMNS = ["model", "experiment", "figure", "profile", "signature", "commit", "story", *LATER]


def keep(folder: Path, label: str, sweeps: Iterable[Sequence[Entry]]) -> None:
    """Write what the runs of a model told as FOLDER/stories/LABEL.csv: a line for each figure, experiment and profile.

    The stories of an experiment and a profile are replaced together, by those of the newest run that entries rest on;
    those without one stay, unless no claim names the experiment any more and the project has none of that name. Of
    experiments that no claim rests on the newest run of each profile of the entries tells.

    Args:
        folder: of the ledger.
        label: the name of the model's file.
        sweeps: its entries; later ones are kept in place of earlier ones of the same profile.
    """
    path = folder / FOLDER / f"{label}.csv"
    known, others = measuring(), without_claims()
    kept: dict[tuple[str, str], list[dict[str, str]]] = {}
    for line in read(folder, label):
        if others is None or line["experiment"] in known | others:
            kept.setdefault((line["experiment"], line["profile"]), []).append(line)
    telling: dict[tuple[str, str], Run] = {}
    for judged in sweeps:
        found = _newest(judged)
        models, profiles = {entry.model for entry in judged}, {_profile(run) for run in found.values()}
        for experiment, run in (*found.items(), *beside(models, profiles)):
            telling[experiment, _profile(run)] = run
    kept |= {(experiment, profile): _lines(experiment, run) for (experiment, profile), run in telling.items()}
    lines = [line for key in sorted(kept) for line in kept[key]]
    if not lines and not path.exists():
        return
    write(path, lines, COLUMNS)


def read(folder: Path, label: str) -> list[dict[str, str]]:
    """The kept stories of a model, in the order of their experiments and figures; none where none are kept.

    Raises:
        KvlabError: the file cannot be read, or lacks a column, or its seconds are no numbers.
    """
    path = folder / FOLDER / f"{label}.csv"
    if not path.exists():
        return []
    found = [dict.fromkeys(LATER, "") | line for line in table(path, [name for name in COLUMNS if name not in LATER])]
    if wrong := [line["seconds"] for line in found if line["seconds"] and not line["seconds"].isdecimal()]:
        raise KvlabError(f"{path}: seconds are a whole number, not {wrong[0]!r}")
    return found


def origin(line: Mapping[str, str], file: Path) -> Origin:
    """What a kept story says of its run; `file`: the ledger that the story is kept beside."""
    took = int(line["seconds"]) if line["seconds"] else None
    return Origin(line["profile"], line["signature"], line["commit"], line["machine"], took, file=file)


def without_claims() -> set[str] | None:
    """The project's experiments that no claim rests on; None where a folder is no project."""
    try:
        names = experiments.names()
    except KvlabError:
        return None
    return set(names) - measuring()


def beside(models: Collection[str], profiles: Iterable[str]) -> Iterator[tuple[str, Run]]:
    """The project's experiments that no claim rests on, each with its newest finished job on each of these models by
    each of these profiles.
    """
    names = sorted(without_claims() or ())
    for profile in sorted(profiles):
        if "'" in profile:  # cannot be asked for
            continue
        for name, by_model in runs.newest(names, "model", profile=profile).items():
            yield from ((name, run) for model, run in by_model.items() if model in models)


def stories(connection: RetryingClient, run: Run) -> dict[str, str]:
    """Figure -> what the run told of it."""
    return {path.stem: read_text(path).strip() for path in artifacts.files(connection, run, STORY, ".md")}


def table(path: Path, columns: Sequence[str], what: str = "kept ledger") -> list[dict[str, str]]:
    """The lines of a CSV that has these columns, as texts; `what` it should be, for the message.

    Raises:
        KvlabError: it cannot be read, or lacks a column.
    """
    import pandas

    try:
        frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise KvlabError(f"cannot read the {what} {path}: {error}") from error
    if missing := [name for name in columns if name not in frame]:
        raise KvlabError(f"{path} is no {what}: it has no column {missing[0]!r}")
    return frame.to_dict("records")


def write(path: Path, lines: Iterable[Mapping[str, Any]], columns: list[str]) -> None:
    """Write lines as `table` reads them, whole or not at all. Raises OSError where the file cannot be written."""
    import pandas

    with replacing(path) as part:
        pandas.DataFrame(lines, columns=columns).to_csv(part, index=False)


def _newest(judged: Iterable[Entry]) -> dict[str, Run]:
    """Experiment -> the newest run that its entries rest on."""
    found: dict[str, Run] = {}
    for entry in judged:
        if entry.run and entry.claim.experiment:
            other = found.get(entry.claim.experiment, entry.run)
            found[entry.claim.experiment] = max(other, entry.run, key=lambda run: run.info.end_time or 0)
    return found


def _profile(run: Run) -> str:
    return run.data.tags.get("kvlab.profile", "")


def _lines(experiment: str, run: Run) -> list[dict[str, str]]:
    tags = run.data.tags
    about = {
        "model": tags.get("model", ""),
        "experiment": experiment,
        "profile": _profile(run),
        "signature": tags.get("signature", ""),
        "commit": tags.get("kvlab.commit", ""),
        "machine": tags.get("hardware", ""),
        "seconds": "" if (took := seconds(run)) is None else str(took),
    }
    found = stories(database.client(), run)
    return [{**about, "figure": figure, "story": story} for figure, story in found.items()]
