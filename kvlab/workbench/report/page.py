"""The claims ledger as HTML that needs nothing else, with the runs' figures, and as CSV.

With one model report.html is its page; with several it compares them side by side, and each also has its own page. A
page begins with the papers in short, goes on with findings and models, and ends with the claims, each one line until
opened.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.lib.files import replacing
from kvlab.render.phrases import number
from kvlab.render.sentences import sentence
from kvlab.workbench import project
from kvlab.workbench.report import forest, leaderboard, model_trends, stability
from kvlab.workbench.report.evidence import (
    UI,
    Evidence,
    anchor,
    beside_claims,
    evidence,
    origin_of,
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
    refuse,
)
from kvlab.workbench.report.ledger import names as ledger_names
from kvlab.workbench.report.ledger_models import Subject, remarks, subjects
from kvlab.workbench.report.model_agreement import across
from kvlab.workbench.report.paper_summary import digest, quoted
from kvlab.workbench.report.question_timing import moments
from kvlab.workbench.report.stability import Stability
from kvlab.workbench.report.task_scores import Board
from kvlab.workbench.report.value_axis import scale

if TYPE_CHECKING:
    import jinja2

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
    "holds by a weak stand-in": ("weak", "◔"),
    "fails": ("fails", "○"),
    "undecided": ("undecided", "◇"),
    "not measured": ("unmeasured", "–"),
    UNTESTED: ("untested", "∅"),
}
DECIDED = (papers.HOLDS, papers.DIRECTION, papers.WEAK, papers.FAILS)
MAIN = "report.html"
OF_MODELS = "model-*.html"
FOLDED = {
    "unmeasured": "Not measured by these runs",
    "questions": "Questions of ours, which the paper's sentences raise and do not answer",
    "checks": "Controls, identities and examples",
    "recomputed": "Recomputed from what the paper prints; no model ran for these",
    "untested": "Cannot be tested here",
    "timings": "Timings",
}
"""The groups of claims that are folded under a paper's findings, with their headings."""
GENERATOR = '<meta name="generator" content="kvlab report">'


def write(out: str | Path | None = None, model: str | Sequence[str] | None = None, profile: str | None = None) -> Path:
    """Write report.html and claims.csv into `out` (default: the project's `report`); returns the page.

    With several models there is a page for each next to report.html, and leaderboard.html where `all_together` has run.
    Each file appears whole or not at all. Raises KvlabError where they cannot be written, the store not be read, or no
    run in it measured a claim.
    """
    check(out)  # refused before the store is read
    return save(measured(model, profile), out, stability.read(), charts=leaderboard.of_store(model, profile))


def measured(model: str | Sequence[str] | None = None, profile: str | None = None) -> list[Entry]:
    """`entries` of the store; raises KvlabError where no run of it measured a claim."""
    judged = entries(model, profile)
    if not any(entry.run for entry in judged):
        refuse(model, profile)
    return judged


def check(out: str | Path | None) -> None:
    """Raise KvlabError where `out` is no folder for a report."""
    _folder(out)


def _folder(out: str | Path | None) -> Path:
    folder = Path(out) if out is not None else project.root() / "report"
    if folder.exists() and not folder.is_dir():
        raise KvlabError(f"cannot write the report into {folder}: it is a file, not a folder")
    return folder


def save(
    judged: list[Entry],
    out: str | Path | None = None,
    steady: Sequence[Stability] = (),
    scores: Sequence[Board] = (),
    charts: Sequence[leaderboard.Chart] = (),
) -> Path:
    """Write the pages and claims.csv of these entries, measured or not; returns report.html.

    steady: what was measured of findings with other seeds and texts; those that flip are marked.
    scores: of tasks, shown in tables of their own.
    charts: of the leaderboard, a page next to the others; without any there is none.
    """
    folder = _folder(out)
    pages = render(judged, steady, scores, charts)
    with replacing(folder / "claims.csv") as path:
        frame(judged).to_csv(path, index=False)
    # The page that links to the others comes last, so that no link of it leads nowhere.
    for name, text in sorted(pages.items(), key=lambda page: page[0] == MAIN):
        with replacing(folder / name) as path:
            path.write_text(text, encoding="utf-8")
    for path in (*folder.glob(OF_MODELS), *folder.glob(leaderboard.PAGE)):
        if path.name not in pages and GENERATOR in path.read_text(encoding="utf-8", errors="replace")[:2000]:
            path.unlink()
    return folder / MAIN


def render(
    judged: list[Entry],
    steady: Sequence[Stability] = (),
    scores: Sequence[Board] = (),
    charts: Sequence[leaderboard.Chart] = (),
) -> dict[str, str]:
    """Name of a file -> the page, as one string that needs nothing else but the other pages; `steady`, `scores` and
    `charts`: as of `save`.
    """
    models = by_model(judged)
    order = subjects(judged)
    known = {subject.name: subject for subject in order}
    files = _files(known) if len(models) > 1 else dict.fromkeys(models, MAIN)
    beside = leaderboard.PAGE if charts else ""
    pages = {
        files[name]: _page(
            mine,
            [known[name]] if name in known else [],
            evidence(mine),
            files=files,
            names=known,
            others=[(known[other], files[other]) for other in models if other != name],
            elsewhere=_elsewhere(judged, name),
            steady=steady,
            scores=[board for board in scores if board.model == Subject(name).label],
            leaderboard=beside,
        )
        for name, mine in models.items()
    }
    if len(models) > 1:
        about = {"files": files, "names": known, "others": [], "elsewhere": {}, "leaderboard": beside}
        pages[MAIN] = _page(judged, order, {}, steady=steady, scores=scores, **about)
    if charts:
        pages[beside] = leaderboard.render(_templates(), charts, generator=GENERATOR, main=MAIN, made=_made())
    return pages


def _templates() -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("kvlab.workbench.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def _made() -> dict[str, str | None]:
    """By what a page was made, and when."""
    written = datetime.datetime.now(datetime.UTC).strftime("%d %B %Y, %H:%M UTC")
    return {"version": project.version(), "commit": project.commit(), "written": written}


def _files(names: Iterable[str]) -> dict[str, str]:
    """Model -> the file of its page; names that would share one get a number."""
    taken: dict[str, str] = {}
    for name in names:
        stem = OF_MODELS.replace("*", re.sub(r"[^\w.-]+", "-", Subject(name).label).strip("-.") or "unnamed")
        again = (stem.replace(".html", f"-{n}.html") for n in range(2, len(taken) + 3))
        taken[name] = next(file for file in (stem, *again) if file not in taken.values())
    return taken


def _page(
    judged: Sequence[Entry],
    order: Sequence[Subject],
    shown: Mapping[str, Evidence],
    steady: Sequence[Stability],
    **given: Any,
) -> str:
    """The page of these entries, on one model or on several; `shown`: their runs, on the page of one model."""
    environment = _templates()
    environment.filters.update(number=number, slug=slug)
    rows = model_trends.rows(judged, order)
    on_models = ledger_names([subject.name for subject in order])
    mine = [one for one in steady if ledger_names(one.model) & on_models]
    farthest = model_trends.reach(rows)
    totals = {name: Tally.of(mine) for name, mine in by_model(judged).items()}
    environment.globals.update(
        marks=MARKS,
        full_only=papers.FULL_ONLY,
        states=STATES,
        thumbnail=lambda entry: thumbnail(entry, shown),
        run_link=run_link,
        anchor=anchor,
        when=when,
        origin_of=origin_of,
        found=found,
        scale=scale,
        remarks=remarks,
        growth=model_trends,
        no_effect=forest.NO_EFFECT,
        strip_of=forest.strip,
        steadiness=stability.of_entries(mine),
        plot=lambda row: model_trends.plot(row, order, farthest),
    )
    return environment.get_template("page.html.j2").render(
        generator=GENERATOR,
        main=MAIN,
        ui=UI,
        stored=any(entry.run for entry in judged),
        kept=any(entry.kept for entry in judged),
        drawn=any(item.pictures for item in shown.values()),
        **_made(),
        subjects=order,
        groups=FOLDED,
        sections=[_section(paper, judged, rows, order, shown) for paper in papers.of_project()],
        totals=totals,
        total=next(iter(totals.values())),
        claims=len(rows),
        trends=model_trends.trends(rows),
        flipping=stability.sentences(mine),
        texts=_texts(judged),
        many=_many(judged),
        sizes=across(judged, order),
        together=_together(next(iter(by_model(judged).values()))),
        at_both_moments=moments(given.get("scores", ())),
        evidence=list(shown.values()),
        pictures=beside_claims(judged, shown),
        **given,
    )


def found(entry: Entry) -> str:
    """The text of an entry under its claim's summary: of one that is not measured only the reason."""
    verdict = entry.verdict
    return verdict.why if verdict.verdict == papers.UNMEASURED else sentence(entry.claim, verdict, entry.weak)


def _section(
    paper: papers.Paper,
    judged: Sequence[Entry],
    rows: Sequence[model_trends.Row],
    order: Sequence[Subject],
    shown: Mapping[str, Evidence],
) -> dict[str, Any]:
    """Of a paper: what it comes to in short, its counts on each model, and its claims by group."""
    mine = [entry for entry in judged if entry.claim.paper == paper.name]
    of_paper = [row for row in rows if row.claim.paper == paper.name]
    asked = {entry.claim.experiment for entry in mine}
    return {
        "paper": paper,
        "forest": (drawn := forest.of_paper(of_paper, paper)),
        "headline": forest.headline(drawn, len(order)),
        "digest": digest(mine, order, paper.says),
        "quoted": quoted(mine, order[-1].name, paper.quoted) if order else [],
        "places": [place for item in shown.values() if item.experiment in asked for place in item.places],
        "tallies": {name: Tally.of(of_model) for name, of_model in by_model(mine).items()},
        "untested": [row for row in of_paper if row.claim.untested],
        "findings": [row for row in of_paper if row.group == "findings"],
        "unmeasured": [row for row in of_paper if row.group == "findings" and not (row.found or row.claim.untested)],
        **{
            group: [row for row in of_paper if row.group == group and not row.claim.untested]
            for group in GROUPS
            if group != "findings"
        },
    }


def _texts(judged: Sequence[Entry]) -> dict[str, int]:
    """How many verdicts on findings are decided, on how many of those kinds of text differ, and how many are undecided
    when clustered by genre.
    """
    decided = [each.verdict for each in judged if each.group == "findings" and each.state in DECIDED]
    return {
        "decided": len(decided),
        "differ": sum(bool(verdict.of_these_texts) for verdict in decided),
        "open_by_genre": sum(verdict.open_by_genre for verdict in decided),
    }


def _many(judged: Sequence[Entry]) -> dict[str, int]:
    """How many directions have a q, how many of these are decided, and how many of the decided do not survive."""
    tested = [each for each in judged if each.q is not None]
    decided = [each for each in tested if each.decided]
    return {"tested": len(tested), "decided": len(decided), "by_chance": sum(each.by_chance for each in decided)}


def _elsewhere(judged: Iterable[Entry], model: str) -> dict[str, list[Entry]]:
    """Claim id -> its measured entries on the other models."""
    others: dict[str, list[Entry]] = {}
    for entry in judged:
        if entry.model != model and entry.measured:
            others.setdefault(entry.claim.id, []).append(entry)
    return others


def _together(judged: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Claim id -> the other claims that are counted as one finding with it, where there are any."""
    facts: dict[tuple[str, str], list[Entry]] = {}
    for entry in judged:
        if entry.claim.finding:
            facts.setdefault(entry.claim.fact, []).append(entry)
    shared = [mine for mine in facts.values() if len(mine) > 1]
    return {one.claim.id: [other for other in mine if other is not one] for mine in shared for one in mine}
