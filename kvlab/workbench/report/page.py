"""The claims ledger as HTML that needs nothing else, with the runs' figures, and as CSV.

With one model report.html is its page; with several it sets them side by side, and each has a page beside it.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.lib.files import replacing
from kvlab.workbench import project
from kvlab.workbench.report import growth
from kvlab.workbench.report.evidence import (
    UI,
    Evidence,
    anchor,
    beside_claims,
    evidence,
    run_link,
    signature,
    slug,
    thumbnail,
    when,
)
from kvlab.workbench.report.ledger import (
    GROUPS,
    STATES,
    UNTESTED,
    Entry,
    Tally,
    by_model,
    entries,
    frame,
    ledger,
    number,
    refuse,
)
from kvlab.workbench.report.scales import scale
from kvlab.workbench.report.subjects import Subject, remarks, subjects

__all__ = [
    "entries",
    "evidence",
    "ledger",
    "measured",
    "number",
    "render",
    "run_link",
    "save",
    "scale",
    "signature",
    "write",
]

MARKS = {
    "holds": ("holds", "●"),
    "holds in direction only": ("direction", "◐"),
    "fails": ("fails", "○"),
    "undecided": ("undecided", "◇"),
    "not measured": ("unmeasured", "–"),
    UNTESTED: ("untested", "∅"),
}
MAIN = "report.html"
OF_MODELS = "model-*.html"
GENERATOR = '<meta name="generator" content="kvlab report">'


def write(out: str | Path | None = None, model: str | Sequence[str] | None = None, profile: str | None = None) -> Path:
    """Write report.html and claims.csv into `out` (default: the project's `report`); returns the page.

    With several models there is a page for each beside report.html. Each file appears whole or not at all. Raises
    KvlabError where they cannot be written, the store not be read, or no run in it measured a claim.
    """
    _folder(out)  # refused before the store is read
    return save(measured(model, profile), out)


def measured(model: str | Sequence[str] | None = None, profile: str | None = None) -> list[Entry]:
    """`entries` of the store; raises KvlabError where no run of it measured a claim."""
    judged = entries(model, profile)
    if not any(entry.run for entry in judged):
        refuse(model, profile)
    return judged


def _folder(out: str | Path | None) -> Path:
    folder = Path(out) if out is not None else project.root() / "report"
    if folder.exists() and not folder.is_dir():
        raise KvlabError(f"cannot write the report into {folder}: it is a file, not a folder")
    return folder


def save(judged: list[Entry], out: str | Path | None = None) -> Path:
    """Write the pages and claims.csv of these entries, measured or not; returns report.html."""
    folder = _folder(out)
    pages = render(judged)
    with replacing(folder / "claims.csv") as path:
        frame(judged).to_csv(path, index=False)
    # The page that links to the others comes last, so that no link of it leads nowhere.
    for name, text in sorted(pages.items(), key=lambda page: page[0] == MAIN):
        with replacing(folder / name) as path:
            path.write_text(text, encoding="utf-8")
    for path in folder.glob(OF_MODELS):
        if path.name not in pages and GENERATOR in path.read_text(encoding="utf-8", errors="replace")[:2000]:
            path.unlink()
    return folder / MAIN


def render(judged: list[Entry]) -> dict[str, str]:
    """Name of a file -> the page, as one string that needs nothing else but the other pages."""
    models = by_model(judged)
    known = {subject.name: subject for subject in subjects(judged)}
    files = _files(known) if len(models) > 1 else dict.fromkeys(models, MAIN)
    pages = {
        files[name]: _page(
            "model.html.j2",
            mine,
            shown := evidence(mine),
            subject=known.get(name),
            others=[(known[other], files[other]) for other in models if other != name],
            elsewhere=_elsewhere(judged, name),
            files=files,
            names=known,
            evidence=list(shown.values()),
            pictures=beside_claims(mine, shown),
        )
        for name, mine in models.items()
    }
    if len(models) > 1:
        order = [known[name] for name in models]
        pages[MAIN] = _models_page(judged, order, files)
    return pages


def _files(names: Iterable[str]) -> dict[str, str]:
    """Model -> the file of its page; names that would share one get a number."""
    taken: dict[str, str] = {}
    for name in names:
        stem = OF_MODELS.replace("*", re.sub(r"[^\w.-]+", "-", Subject(name).label).strip("-.") or "unnamed")
        again = (stem.replace(".html", f"-{n}.html") for n in range(2, len(taken) + 3))
        taken[name] = next(file for file in (stem, *again) if file not in taken.values())
    return taken


def _page(template: str, judged: list[Entry], shown: Mapping[str, Evidence], **given: Any) -> str:
    """The page of a template, with what both kinds of pages show."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvlab.workbench.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(number=number, slug=slug)
    environment.globals.update(
        marks=MARKS,
        states=STATES,
        thumbnail=lambda entry: thumbnail(entry, shown),
        run_link=run_link,
        anchor=anchor,
        stored=any(entry.run for entry in judged),
        when=when,
        scale=scale,
        remarks=remarks,
        together=_together(judged),
        generator=GENERATOR,
        main=MAIN,
        ui=UI,
        version=project.version(),
        commit=project.commit(),
        written=datetime.datetime.now(datetime.UTC).strftime("%d %B %Y, %H:%M UTC"),
    )
    return environment.get_template(template).render(
        sections=_sections(judged),
        total=Tally.of(judged),
        claims=len(judged),
        **given,
    )


def _models_page(judged: list[Entry], order: list[Subject], files: Mapping[str, str]) -> str:
    """The page that sets the models side by side."""
    rows = growth.rows(judged, order)
    names = [subject.name for subject in order]
    per_model = by_model(judged)
    return _page(
        "models.html.j2",
        per_model[names[0]],
        {},
        subjects=order,
        files=files,
        tallies={name: Tally.of(per_model[name]) for name in names},
        papers={
            name: {section["paper"].name: section["tally"] for section in _sections(per_model[name])} for name in names
        },
        rows={
            paper.name: {
                group: [row for row in rows if row.claim.paper == paper.name and row.group == group] for group in GROUPS
            }
            for paper in papers.of_project()
        },
        trends=growth.trends(rows),
        plot=lambda row: growth.plot(row, order),
        growth=growth,
        names={subject.name: subject for subject in order},
    )


def _elsewhere(judged: Iterable[Entry], model: str) -> dict[str, list[Entry]]:
    """Claim id -> its measured entries on the other models."""
    others: dict[str, list[Entry]] = {}
    for entry in judged:
        if entry.model != model and entry.measured:
            others.setdefault(entry.claim.id, []).append(entry)
    return others


def _together(judged: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Claim id -> the other claims that are counted as one finding with it."""
    facts: dict[tuple[str, str], list[Entry]] = {}
    for entry in judged:
        if entry.claim.finding:
            facts.setdefault(entry.claim.fact, []).append(entry)
    return {one.claim.id: [other for other in mine if other is not one] for mine in facts.values() for one in mine}


def _sections(judged: Sequence[Entry]) -> list[dict[str, Any]]:
    """Of each paper: its entries on one model, by group, and their counts."""
    return [
        {
            "paper": paper,
            "tally": Tally.of(mine),
            "untested": [entry for entry in mine if entry.claim.untested],
            **{
                group: [entry for entry in mine if entry.group == group and not entry.claim.untested]
                for group in GROUPS
            },
        }
        for paper in papers.of_project()
        for mine in [[entry for entry in judged if entry.claim.paper == paper.name]]
    ]
