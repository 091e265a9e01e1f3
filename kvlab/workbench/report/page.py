"""The claims ledger as one self-contained HTML page, with the runs' figures, and as CSV."""

from __future__ import annotations

import base64
import datetime
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.lib.files import replacing
from kvlab.workbench import project
from kvlab.workbench.report.ledger import STATES, UNTESTED, Entry, Tally, entries, frame, ledger, number, refuse
from kvlab.workbench.store import database
from kvlab.workbench.store.tracking import file_name

if TYPE_CHECKING:
    from mlflow.entities import Run
    from PIL.Image import Image

    from kvlab.workbench.store.patience import Patient

__all__ = ["entries", "evidence", "ledger", "number", "render", "save", "signature", "write"]

MARKS = {
    "holds": ("holds", "●"),
    "holds in direction only": ("direction", "◐"),
    "fails": ("fails", "○"),
    "not measured": ("unmeasured", "–"),
    UNTESTED: ("untested", "∅"),
}
WIDEST, THUMB = 1600, 300  # pixels of an embedded figure, and of its small copy beside a claim
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
    """What is shown of a run: its signature line, its figures by name, and the claims that rest on it."""

    run: Run
    signature: str
    pictures: dict[str, Picture] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    @property
    def experiment(self) -> str:
        return self.run.data.tags.get("kvlab.experiment", "run")


def write(out: str | Path | None = None, model: str | None = None, profile: str | None = None) -> Path:
    """Write report.html (self-contained) and claims.csv into `out` (default: the project's `report`); returns the page.

    Each file appears whole or not at all. Raises KvlabError where they cannot be written, the store not be read, or no
    run in it measured a claim.
    """
    folder = _folder(out)
    found = entries(model, profile)
    if not any(entry.run for entry in found):
        refuse(model, profile)
    return save(found, folder)


def _folder(out: str | Path | None) -> Path:
    folder = Path(out) if out is not None else project.root() / "report"
    if folder.exists() and not folder.is_dir():
        raise KvlabError(f"cannot write the report into {folder}: it is a file, not a folder")
    return folder


def save(found: list[Entry], out: str | Path | None = None) -> Path:
    """Write report.html and claims.csv of these entries, measured or not; returns the page."""
    folder = _folder(out)
    page = render(found, evidence(found))
    with replacing(folder / "claims.csv") as path:
        frame(found).to_csv(path, index=False)
    with replacing(folder / "report.html") as path:
        path.write_text(page, encoding="utf-8")
    return folder / "report.html"


def evidence(found: Iterable[Entry]) -> dict[str, Evidence]:
    """Run id -> what is shown of that run, for the runs that the entries rest on, sorted by experiment."""
    shown: dict[str, Evidence] = {}
    for entry in found:
        if entry.run:
            run_id = entry.run.info.run_id
            shown.setdefault(run_id, Evidence(entry.run, signature(entry.run))).entries.append(entry)
    if shown:
        connection = database.client()
        for run_id, item in shown.items():
            item.pictures = {picture.name: picture for picture in _pictures(connection, run_id)}
    return dict(sorted(shown.items(), key=lambda pair: pair[1].experiment))


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


def _pictures(connection: Patient, run_id: str) -> Iterable[Picture]:
    from PIL import Image

    for artifact in sorted(connection.list_artifacts(run_id, "figures"), key=lambda each: each.path):
        if not artifact.path.endswith(".png"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(connection.download_artifacts(run_id, artifact.path, folder))
            try:
                with Image.open(path) as image:
                    plain = image.convert("RGB")
            # Pillow raises all of these for a damaged picture.
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
                mend = "run its experiment again with --fresh, or delete the run"
                raise KvlabError(f"the figure {artifact.path} of run {run_id} is damaged: {mend}") from None
            # Lossless, since the colours of a heatmap are data.
            yield Picture(
                f"{run_id[:8]}-{_slug(path.stem)}",
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


def render(found: list[Entry], shown: Mapping[str, Evidence]) -> str:
    """The page, as one string that needs nothing else."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvlab.workbench.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(number=number, slug=_slug)
    environment.globals.update(
        marks=MARKS, thumbnail=lambda entry: _thumbnail(entry, shown), run_link=run_link, when=_when, scale=scale
    )
    return environment.get_template("report.html.j2").render(
        sections=[_section(paper, found) for paper in papers.papers()],
        states=STATES,
        total=Tally.of(found),
        claims=len(found),
        evidence=list(shown.values()),
        models=sorted({entry.model for entry in found if entry.model}),
        pictures=_beside_claims(found, shown),
        ui=UI,
        version=project.version(),
        commit=project.commit(),
        written=datetime.datetime.now(datetime.UTC).strftime("%d %B %Y, %H:%M UTC"),
    )


def _section(paper: papers.Paper, found: Iterable[Entry]) -> dict[str, Any]:
    mine = [entry for entry in found if entry.claim.paper == paper.name]
    return {
        "paper": paper,
        "tally": Tally.of(mine),
        "untested": [entry for entry in mine if entry.claim.untested],
        **{
            group: [entry for entry in mine if entry.group == group and not entry.claim.untested]
            for group in ("findings", "checks", "recomputed")
        },
    }


def _thumbnail(entry: Entry, shown: Mapping[str, Evidence]) -> Picture | None:
    if not entry.run or not entry.claim.figure or entry.run.info.run_id not in shown:
        return None
    return shown[entry.run.info.run_id].pictures.get(file_name(entry.claim.figure))


def _beside_claims(found: Iterable[Entry], shown: Mapping[str, Evidence]) -> list[Picture]:
    """The pictures that stand as small copies beside claims, each once."""
    named = {picture.anchor: picture for entry in found if (picture := _thumbnail(entry, shown))}
    return list(named.values())


def run_link(run: Run) -> str:
    """The address of a run in the MLflow UI: that of the tracking server, else where `make lab` starts one."""
    where = urlsplit(database.store_uri())
    # An address may hold a password, which must not get into the page.
    server = f"{where.scheme}://{where.netloc.rpartition('@')[2]}" if where.scheme in ("http", "https") else UI
    return f"{server}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"


def scale(entry: Entry) -> dict[str, Any] | None:
    """Positions from 0 to 100 on a common axis: of our value, its interval's ends, the paper's value, and the turn.

    The turn is the value at which the claim's direction changes. None where there is nothing to compare our value with.
    """
    verdict, claim = entry.verdict, entry.claim
    marks = {
        "value": verdict.value,
        "low": verdict.low,
        "high": verdict.high,
        "paper": claim.paper_value,
        "turn": _turn(claim),
    }
    known = {name: value for name, value in marks.items() if value is not None}
    if "value" not in known or len(known) < 2 or max(known.values()) == min(known.values()):
        return None
    low, high = min(known.values()), max(known.values())
    return {name: round(6 + 88 * (known[name] - low) / (high - low), 2) if name in known else None for name in marks}


def _turn(claim: papers.Claim) -> float | None:
    """The value at which the direction of a claim changes, if that is a number and the claim tests its own metric."""
    test = claim.direction
    than = getattr(test, "than", None)
    if test.metric is not None or isinstance(than, str):
        return None
    turn = test.threshold({}.__getitem__, claim.paper_value)
    return than if turn is None else turn


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text)


def _when(run: Run) -> str:
    assert run.info.end_time is not None, "claims rest on finished runs"
    return datetime.datetime.fromtimestamp(run.info.end_time / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M")
