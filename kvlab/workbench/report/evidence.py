"""A report's evidence of the runs behind its numbers: signatures, figures, and the links to them."""

from __future__ import annotations

import base64
import datetime
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.lib.files import read_text
from kvlab.render.phrases import plural
from kvlab.render.sentences import of_claims
from kvlab.workbench import experiments
from kvlab.workbench.report import runs
from kvlab.workbench.report.ledger import Entry, measuring
from kvlab.workbench.report.provenance import Origin
from kvlab.workbench.store import artifacts, database
from kvlab.workbench.store.signatures import documents
from kvlab.workbench.store.tracking import BULLET, STORY, file_name

if TYPE_CHECKING:
    from mlflow.entities import Run
    from PIL.Image import Image

    from kvlab.workbench.store.retries import RetryingClient

WIDEST, THUMB = 1600, 300  # pixels of an embedded figure, and of its small copy next to a claim
UI = "http://127.0.0.1:5000"  # where `make lab` and `mlflow server` answer


@dataclass(frozen=True)
class Picture:
    """A figure of a run: a name unique on the page, what it is called, and both sizes as data URIs."""

    anchor: str
    name: str
    large: str
    small: str


@dataclass
class Evidence:
    """The evidence of a run: its signature line, its figures and sentences by name, and the claims that rest on it.

    Sentences may have no figure. A run in a kept ledger (`run` is None, `kept` is not) has sentences on its claims, and
    no figures.
    """

    anchor: str
    experiment: str
    profile: str
    signature: str
    run: Run | None = None
    kept: Origin | None = None
    pictures: dict[str, Picture] = field(default_factory=dict)
    sentences: dict[str, list[str]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    @property
    def places(self) -> list[tuple[str, str]]:
        """The names of figures that have sentences, and where on the page these stand."""
        return [(name, self.place(name)) for name in self.sentences]

    def place(self, name: str) -> str:
        """Where on the page the sentences of a name stand: at its figure, if there is one."""
        return self.pictures[name].anchor if name in self.pictures else f"told-{self.anchor}-{slug(name)}"

    @classmethod
    def of(cls, entry: Entry) -> Evidence:
        run = entry.run
        experiment = run.data.tags.get("kvlab.experiment", "run") if run else entry.claim.experiment or "run"
        line = signature(run) if run else entry.origin.signature
        return cls(anchor(entry), experiment, entry.origin.profile, line, run, entry.kept)


def evidence(judged: Iterable[Entry]) -> dict[str, Evidence]:
    """Source of an entry (`source`) -> the evidence of that run, for all measured entries, sorted by experiment.

    Runs of the same models and profiles that no claim rests on are included.
    """
    shown: dict[str, Evidence] = {}
    for entry in judged:
        if entry.measured:
            shown.setdefault(source(entry), Evidence.of(entry)).entries.append(entry)
    _add_others(shown)
    for item in shown.values():
        if item.run:
            connection = database.client()
            item.pictures = {picture.name: picture for picture in _pictures(connection, item.run)}
            item.sentences = saved_sentences(connection, item.run)
        else:
            item.sentences = _of_claims(item.entries)
    return dict(sorted(shown.items(), key=lambda pair: pair[1].experiment))


def _add_others(shown: dict[str, Evidence]) -> None:
    """Add the newest runs of the project's experiments that no claim rests on, of the same models and profiles."""
    measured = [entry for item in shown.values() if item.run for entry in item.entries]
    models = {entry.model for entry in measured}
    try:
        names = sorted(set(experiments.names()) - measuring())
    except KvlabError:  # the folder is no project
        return
    for profile in sorted({entry.origin.profile for entry in measured}):
        if "'" in profile:  # cannot be asked for
            continue
        for name, by_model in runs.newest(names, "model", profile=profile).items():
            for model in by_model.keys() & models:
                run = by_model[model]
                number = run.info.run_id
                shown[number] = Evidence(number[:8], name, profile, signature(run), run)


def saved_sentences(connection: RetryingClient, run: Run) -> dict[str, list[str]]:
    """Figure -> the sentences that a run saved with it."""
    paths = artifacts.files(connection, run, STORY, ".md")
    return {
        path.stem: [line.removeprefix(BULLET) for line in read_text(path).splitlines() if line.strip()]
        for path in paths
    }


def _of_claims(entries: Iterable[Entry]) -> dict[str, list[str]]:
    """Figure -> the sentences on the claims that it shows, as a run would save them."""
    found: dict[str, list[tuple[papers.Claim, papers.Verdict]]] = {}
    for entry in entries:
        if entry.claim.figure:
            found.setdefault(file_name(entry.claim.figure), []).append((entry.claim, entry.verdict))
    return {figure: of_claims(judged) for figure, judged in found.items()}


def source(entry: Entry) -> str:
    """The key of the run behind an entry: the run's id; of kept lines their record of the run."""
    if entry.run:
        return entry.run.info.run_id
    origin = entry.origin
    about = entry.model, entry.claim.experiment, origin.profile, origin.signature, origin.commit
    return hashlib.sha256("\n".join(map(str, about)).encode()).hexdigest()


def anchor(entry: Entry) -> str:
    """The name of its run on the page."""
    return source(entry)[:8]


def signature(run: Run) -> str:
    """The line that stands with every number of a run: its tag `signature`, else put together from other tags."""
    tags = run.data.tags
    if "signature" in tags:
        return tags["signature"]
    parts = [
        tags.get("model", ""),
        tags.get("document", ""),
        tags.get("seed") and f"seed {tags['seed']}",
        tags.get("kvlab.version") and f"kvlab {tags['kvlab.version']}",
    ]
    return " | ".join(part for part in parts if part)


def _pictures(connection: RetryingClient, run: Run) -> Iterable[Picture]:
    from PIL import Image

    run_id = run.info.run_id
    for path in artifacts.files(connection, run, "figures", ".png"):
        try:
            with Image.open(path) as image:
                plain = image.convert("RGB")
        # Pillow raises all of these for a damaged picture.
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            mend = "run its experiment again with --fresh, or delete the run"
            raise KvlabError(f"the figure figures/{path.name} of run {run_id} is damaged: {mend}") from None
        # Lossless, since the colours of a heatmap are data.
        yield Picture(
            f"{run_id[:8]}-{slug(path.stem)}",
            path.stem,
            _data_uri(plain, WIDEST, lossless=True),
            _data_uri(plain, THUMB, quality=80),
        )


def _data_uri(image: Image, widest: int, **how: Any) -> str:
    """The picture as WebP, at most so many pixels wide and high; how: as pillow's writer takes it."""
    import io

    copy, buffer = image.copy(), io.BytesIO()
    copy.thumbnail((widest, widest))
    copy.save(buffer, "WEBP", **how)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def thumbnail(entry: Entry, shown: Mapping[str, Evidence]) -> Picture | None:
    if not entry.measured or not entry.claim.figure or source(entry) not in shown:
        return None
    return shown[source(entry)].pictures.get(file_name(entry.claim.figure))


def beside_claims(judged: Iterable[Entry], shown: Mapping[str, Evidence]) -> list[Picture]:
    """The pictures that stand as small copies next to claims, each once."""
    named = {picture.anchor: picture for entry in judged if (picture := thumbnail(entry, shown))}
    return list(named.values())


def origin_of(entry: Entry) -> str:
    """Describe the run behind an entry: profile, number of documents, commit and seconds."""
    origin = entry.origin
    count = documents(origin.signature)
    parts = [
        f"{origin.profile or 'no'} profile",
        f"{count} {plural(count, 'document')}" if count else "",
        f"commit {origin.commit[:10]}{'+changes' if '+' in origin.commit else ''}" if origin.commit else "",
        "" if origin.seconds is None else f"{origin.seconds} s",
    ]
    return ", ".join(part for part in parts if part)


def run_link(run: Run) -> str:
    """The address of a run in the MLflow UI: that of the tracking server, else where `make lab` starts one."""
    where = urlsplit(database.shown_uri())
    server = f"{where.scheme}://{where.netloc}" if where.scheme in ("http", "https") else UI
    return f"{server}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"


def slug(text: str) -> str:
    return re.sub(r"\W+", "-", text)


def when(run: Run) -> str:
    assert run.info.end_time is not None, "claims rest on finished runs"
    return datetime.datetime.fromtimestamp(run.info.end_time / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M")
