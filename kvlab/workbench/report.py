"""The claims ledger: for every claim the newest finished run that measured it, as a table, CSV and one HTML page."""

from __future__ import annotations

import base64
import datetime
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.files import replacing
from kvlab.workbench import project, store

if TYPE_CHECKING:
    import pandas
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

COLUMNS = ["id", "paper", "where", "claim", "metric", "paper_value", "value", "low", "high", "verdict", "model",
           "run_id"]
MARKS = {"holds": ("holds", "●"), "holds in direction only": ("direction", "◐"), "fails": ("fails", "○"),
         "not measured": ("unmeasured", "–")}
WIDEST = 1600   # pixels of an embedded figure


@dataclass
class Entry:
    """A claim, what our numbers say to it, and the run that they come from (None if there is none)."""

    claim: papers.Claim
    verdict: papers.Verdict
    run: Run | None = None

    @property
    def row(self) -> dict[str, Any]:
        claim, verdict = self.claim, self.verdict
        return {"id": claim.id, "paper": claim.paper, "where": claim.where, "claim": claim.summary,
                "metric": claim.metric, "paper_value": claim.paper_value, "value": verdict.value, "low": verdict.low,
                "high": verdict.high, "verdict": verdict.verdict,
                "model": self.run.data.tags.get("model", "") if self.run else "",
                "run_id": self.run.info.run_id if self.run else ""}


@dataclass
class Evidence:
    """What is shown of a run: its signature line and its figures."""

    run: Run
    signature: str
    figures: list[tuple[str, str]] = field(default_factory=list)    # name, data URI


def entries(model: str | None = None, profile: str | None = None) -> list[Entry]:
    """Every claim with its verdict. `model` (a name, with or without its hash) and `profile` narrow the runs.

    A claim is judged on the newest finished run of its experiment that has all metrics it needs; failing that, on the
    newest that has its own metric. Interactive runs do not count. Without a store nothing is measured: no error.
    """
    every = papers.claims()
    runs: dict[str, list[Run]] = {}
    if store.exists():
        connection = store.client()
        for name in {claim.experiment for claim in every if claim.experiment}:
            runs[name] = _finished(connection, name, model, profile)
    found = []
    for claim in every:
        candidates = [run for run in runs.get(claim.experiment or "", []) if claim.metric in run.data.metrics]
        complete = [run for run in candidates if claim.metrics <= set(run.data.metrics)]
        run = next(iter(complete or candidates), None)
        found.append(Entry(claim, papers.judge(claim, run.data.metrics if run else {}), run))
    return found


def _finished(connection: MlflowClient, experiment: str, model: str | None, profile: str | None) -> list[Run]:
    """The finished jobs of an experiment, newest first."""
    known = connection.get_experiment_by_name(experiment)
    if known is None:
        return []
    query = "attributes.status = 'FINISHED' and tags.`kvlab.kind` = 'job'"
    if profile:
        query += f" and tags.`kvlab.profile` = '{_quotable(profile)}'"
    found, token = [], None
    while True:
        page = connection.search_runs([known.experiment_id], query, max_results=1000, page_token=token,
                                      order_by=["attributes.end_time DESC"])
        found += page
        token = page.token
        if not token:
            break
    wanted = model.split("@")[0] if model else None
    return [run for run in found if wanted is None or run.data.tags.get("model", "").split("@")[0] == wanted]


def _quotable(text: str) -> str:
    if "'" in text:
        raise KvlabError(f"{text!r} is no profile: a name has no quotes")
    return text


def ledger(model: str | None = None, profile: str | None = None) -> pandas.DataFrame:
    """The ledger as a table with the columns `COLUMNS`; the numbers are floats, NaN where there is none."""
    return _frame(entries(model, profile))


def _frame(found: Iterable[Entry]) -> pandas.DataFrame:
    import pandas

    frame = pandas.DataFrame([entry.row for entry in found], columns=COLUMNS)
    numbers = ["paper_value", "value", "low", "high"]
    return frame.astype(dict.fromkeys(numbers, "float64"))


def write(out: str | Path | None = None, model: str | None = None, profile: str | None = None) -> Path:
    """Write report.html (self-contained) and claims.csv into `out` (default: the project's `report`); returns the page.

    Each file appears whole or not at all. Raises KvlabError where they cannot be written or the store not be read.
    """
    folder = Path(out) if out is not None else project.root() / "report"
    if folder.exists() and not folder.is_dir():
        raise KvlabError(f"cannot write the report into {folder}: it is a file, not a folder")
    found = entries(model, profile)
    page = render(found, evidence(found))
    with replacing(folder / "claims.csv") as path:
        _frame(found).to_csv(path, index=False)
    with replacing(folder / "report.html") as path:
        path.write_text(page, encoding="utf-8")
    return folder / "report.html"


def evidence(found: Iterable[Entry]) -> dict[str, Evidence]:
    """Run id -> figures and signature of the runs that the entries rest on."""
    used = {entry.run.info.run_id: entry.run for entry in found if entry.run}
    if not used:
        return {}
    connection = store.client()
    return {run_id: Evidence(run, signature(run), list(_figures(connection, run_id))) for run_id, run in used.items()}


def signature(run: Run) -> str:
    """The line without which no number travels: the run's own, else what its tags say."""
    tags = run.data.tags
    if "signature" in tags:
        return tags["signature"]
    parts = [tags.get("model", ""), tags.get("document", ""), tags.get("seed") and f"seed {tags['seed']}",
             tags.get("kvlab.version") and f"kvlab {tags['kvlab.version']}"]
    return " | ".join(part for part in parts if part)


def _figures(connection: MlflowClient, run_id: str) -> Iterable[tuple[str, str]]:
    import tempfile

    for artifact in sorted(connection.list_artifacts(run_id, "figures"), key=lambda each: each.path):
        if artifact.path.endswith(".png"):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(connection.download_artifacts(run_id, artifact.path, folder))
                yield path.stem.replace("_", " "), _data_uri(path)


def _data_uri(path: Path) -> str:
    import io

    from PIL import Image

    with Image.open(path) as image:
        image.thumbnail((WIDEST, WIDEST))
        buffer = io.BytesIO()
        image.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def render(found: list[Entry], shown: Mapping[str, Evidence]) -> str:
    """The page, as one string that needs nothing else."""
    import jinja2

    environment = jinja2.Environment(loader=jinja2.PackageLoader("kvlab.workbench"), autoescape=True, trim_blocks=True,
                                     lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(number=number, slug=lambda text: re.sub(r"\W+", "-", text))
    sections = []
    for paper in papers.papers():
        mine = [entry for entry in found if entry.claim.paper == paper.name]
        runs = list(dict.fromkeys(entry.run.info.run_id for entry in mine if entry.run))
        sections.append({"paper": paper, "entries": mine, "evidence": [shown[run] for run in runs if run in shown],
                         "counts": Counter(entry.verdict.verdict for entry in mine)})
    return environment.get_template("report.html.j2").render(
        sections=sections, marks=MARKS, counts=Counter(entry.verdict.verdict for entry in found), total=len(found),
        models=sorted({entry.row["model"] for entry in found if entry.row["model"]}), version=project.version(),
        commit=project.commit(), written=datetime.datetime.now(datetime.UTC).strftime("%d %B %Y, %H:%M UTC"),
        when=_when)


def _when(run: Run) -> str:
    return datetime.datetime.fromtimestamp(run.info.end_time / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M")


def number(value: float | None) -> str:
    """A number as a table wants it, with three decimals if it is small; a dash for none."""
    if value is None:
        return "–"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}×10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    text = "0" if value == 0 else f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"
    return text.replace("-", "−")
