"""How steady verdicts are: stability."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlab.commands import claims, experiments, options
from kvlab.lib import extras
from kvlab.lib.files import located

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from kvlab.workbench.report.stability import Stability

app = typer.Typer()


@app.command(
    epilog="Examples:   kvlab stability --jobs 2   |   kvlab stability --model qwen2.5-coder-0.5b --keep docs/ledger   "
    "|   kvlab stability --seeds 0,1,2,3,4 --documents mixed/8   |   kvlab report   (marks the findings that flip)"
)
def stability(
    profile: experiments.Profile = "quick",
    models: experiments.Models = None,
    seeds: Annotated[str, typer.Option("--seeds", metavar="SEEDS", help="With commas between them.")] = "0,1,2",
    documents: Annotated[
        str,
        typer.Option(
            "--documents",
            metavar="SETS",
            help="Sets of documents, documents or text files, with commas between them: `kvlab list documents`.",
        ),
    ] = "mixed/8,mixed/8b",
    jobs: experiments.Jobs = None,
    fresh: experiments.Fresh = False,
    cluster: experiments.Cluster = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FOLDER",
            help="Write FOLDER/stability/MODEL.csv, next to the reference ledgers (default: in the project's report).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Judge the most quoted findings again with other seeds and other texts, and say how often a verdict flips.

    Runs the experiments that these findings need, once for each seed and set of documents. Finished jobs are not run
    again, and those of `kvlab reproduce` count; none of the others enters the report but as a mark.
    """
    extras.need()
    from kvlab.workbench.jobs import stability_cells
    from kvlab.workbench.report import stability as steadiness
    from kvlab.workbench.report import stability_jobs as judging

    numbers = options.numbers(seeds, "--seeds", int)
    sets = [located(name) for name in options.names(documents)]
    chosen = options.models(models or [])
    found = stability_cells.run(
        stability_cells.wanted(profile), profile, chosen, numbers, sets, jobs, fresh, cluster=cluster
    )
    lines = judging.judged(found, profile)
    written = steadiness.keep(keep or steadiness.here(), lines)
    measured = steadiness.measured(lines)
    for path in written:
        show([one for one in measured if path.stem == steadiness.label(one)], keep)
        typer.echo(f"{path}\n")
    for sentence in steadiness.sentences(measured):
        typer.echo(sentence)
    experiments.finish([result for results in found.values() for result in results], quiet=True)


def show(measured: Sequence[Stability], keep: Path | None = None) -> None:
    """A table of one model's findings: the verdict that is kept, that of each cell as its mark, and how many flip."""
    from rich import box
    from rich.console import Console

    from kvlab.lib.terminal import titled
    from kvlab.workbench.report.page import MARKS

    if not measured:
        return
    kept = _kept(measured[0].model, keep)
    sets = list(dict.fromkeys(cell.documents for one in measured for cell in one.cells))
    legend = ", ".join(f"{mark} {state}" for state, (_, mark) in MARKS.items() if state in claims.STYLES)
    seeds = " ".join(dict.fromkeys(cell.seed for one in measured for cell in one.cells))
    table = titled(title=f"Seeds {seeds}: {legend}", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("paper", "finding", "kept"):
        table.add_column(heading, overflow="fold")
    for name in sets:
        table.add_column(name, overflow="fold")
    for heading in ("flips", "turns"):
        table.add_column(heading, justify="right", no_wrap=True)
    _rows(table, measured, kept, sets)
    Console(width=None if sys.stdout.isatty() else 150).print(table, highlight=False)


def _rows(
    table: Table, measured: Sequence[Stability], kept: Mapping[tuple[str, str], str], sets: Sequence[str]
) -> None:
    from kvlab.papers import of_project
    from kvlab.workbench.report.page import MARKS

    labels = {paper.name: paper.label for paper in of_project()}

    def marks(one: Stability, documents: str) -> str:
        verdicts = [cell.verdict for cell in one.cells if cell.documents == documents]
        return " ".join(f"[{claims.STYLES[verdict]}]{MARKS[verdict][1]}[/]" for verdict in verdicts)

    for one in measured:
        style = "red" if one.turns else "yellow" if one.flips else "dim"
        table.add_row(
            labels[one.paper],
            one.finding,
            kept.get((one.paper, one.finding), "–"),
            *(marks(one, name) for name in sets),
            f"[{style}]{one.count if one.others else '–'}[/]",
            f"[{style}]{len(one.turns) or '·'}[/]",
        )
    findings, flips = sum(bool(one.flips) for one in measured), sum(len(one.flips) for one in measured)
    others, turns = sum(len(one.others) for one in measured), sum(len(one.turns) for one in measured)
    table.add_section()
    total = f"{findings} of {len(measured)} findings flip"
    table.add_row("all", total, "", *("" for _ in sets), f"{flips} of {others}", str(turns or "·"))


def _kept(model: str, keep: Path | None) -> dict[tuple[str, str], str]:
    """(paper, finding) -> what the kept ledger says of it on a model, and of which profile; nothing where none is."""
    from kvlab.papers import SAMPLED, UNMEASURED
    from kvlab.workbench import project
    from kvlab.workbench.report import snapshots
    from kvlab.workbench.report.ledger import WEAKEST, names

    folder = keep or project.root() / "docs" / "ledger"
    verdicts: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for entry in snapshots.kept(folder) if any(folder.glob("*.csv")) else ():
        if names(entry.model) == names(model) and entry.claim.kind in SAMPLED and entry.state != UNMEASURED:
            verdicts.setdefault(entry.claim.fact, []).append((entry.state, entry.origin.profile))
    weakest = {fact: min(states, key=lambda one: WEAKEST.index(one[0])) for fact, states in verdicts.items()}
    return {fact: state if profile == "quick" else f"{state} ({profile})" for fact, (state, profile) in weakest.items()}
