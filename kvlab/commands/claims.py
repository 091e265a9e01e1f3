"""The claims and their counts as tables on the terminal."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvlab.lib.terminal import titled

if TYPE_CHECKING:
    from rich.table import Table

    from kvlab.workbench.report.ledger import Entry, Tally

STYLES = {
    "holds": "green",
    "holds in direction only": "yellow",
    "holds by a weak stand-in": "magenta",
    "fails": "red",
    "undecided": "blue",
    "not measured": "dim",
    "cannot be tested here": "dim",
}

WIDE = 140
"""Columns of a terminal from which on the headings of the counts have a line each."""


def show(ledger: list[Entry]) -> None:
    """Print the measured claims, the timings with their machine, and each paper's findings counted by verdict.

    Checks are counted apart. With several models, each has a column and counts of its own.
    """
    from rich.console import Console

    from kvlab.workbench.report.ledger import by_model

    models = by_model(ledger)
    console = Console(width=None if sys.stdout.isatty() else 150)
    labels = _labels(ledger)
    drawn = _on_one if len(models) == 1 else lambda mine, title: _side_by_side(by_model(mine), labels, title)
    for table in _claims_and_timings(ledger, drawn):
        console.print(table, highlight=False)
    count(ledger)


def count(ledger: list[Entry]) -> None:
    """Print how many findings of each paper have which verdict, on each model."""
    from rich.console import Console

    from kvlab.workbench.report.ledger import by_model

    models, labels = by_model(ledger), _labels(ledger)
    console = Console(width=None if sys.stdout.isatty() else 150)
    for name, entries in models.items():
        console.print(
            _counts(entries, f" on {labels[name]}" if len(models) > 1 else "", console.width < WIDE), highlight=False
        )


def _labels(ledger: list[Entry]) -> dict[str, str]:
    """Model -> what it is called, with its size."""
    from kvlab.workbench.report.ledger_models import subjects

    return {subject.name: " ".join([subject.label, subject.size]).strip() for subject in subjects(ledger)}


def _claims_and_timings(ledger: list[Entry], drawn: Callable[[list[Entry], str], Table]) -> Iterator[Table]:
    """The table of what does not depend on a machine, then that of the timings, if there are any."""
    yield drawn([entry for entry in ledger if entry.group != "timings"], "Claims")
    timings = [entry for entry in ledger if entry.group == "timings"]
    if timings:
        machines = sorted({entry.origin.machine for entry in timings} - {""})
        where = f" on {'; '.join(machines)}" if machines else ""
        yield drawn(timings, f"Timings{where} (no findings: they vary with the machine and from run to run)")


def _claims(title: str) -> Table:
    """A table whose first columns are a claim's place in the paper, its summary, and the paper's number."""
    from rich import box

    table = titled(title=title, title_style="bold", box=box.SIMPLE_HEAD, expand=True)
    table.add_column("where", ratio=2, overflow="fold")
    table.add_column("claim", ratio=5, overflow="fold")
    table.add_column("paper's", justify="right", no_wrap=True)
    return table


def _about(label: str, entry: Entry) -> tuple[str, str, str]:
    """The first three cells of a row."""
    from kvlab.render.phrases import number

    claim = entry.claim
    kind = "" if entry.group == "findings" else f" ({claim.kind})"
    where = f"{label}, {claim.where}{kind}".replace("[", r"\[")
    return where, claim.summary.replace("[", r"\["), number(claim.paper_value)


def _on_one(ledger: list[Entry], title: str) -> Table:
    from kvlab.papers import FULL_ONLY
    from kvlab.render.phrases import number
    from kvlab.workbench.report.ledger import by_paper

    table = _claims(title)
    for heading in ("here", "interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold", max_width=14)
    for label, of_paper in by_paper(ledger).items():
        for entry in of_paper:
            verdict = entry.verdict
            if entry.claim.untested:
                continue
            has_interval = verdict.low is not None and verdict.high is not None
            interval = f"{number(verdict.low)} to {number(verdict.high)}" if has_interval else ""
            reason = f": {FULL_ONLY}" if entry.full_only else ""
            state = f"[{STYLES[entry.state]}]{entry.state}{reason}[/]"
            table.add_row(*_about(label, entry), number(verdict.value), interval, state)
        table.add_section()
    return table


def _side_by_side(models: dict[str, list[Entry]], labels: dict[str, str], title: str) -> Table:
    from kvlab.render.phrases import number
    from kvlab.workbench.report.ledger import UNTESTED, by_paper
    from kvlab.workbench.report.page import MARKS

    def cell(entry: Entry) -> str:
        value = entry.verdict.value
        text = MARKS[entry.state][1] + ("" if value is None else f" {number(value)}")
        return f"[{STYLES[entry.state]}]{text}[/]"

    legend = ", ".join(f"{mark} {state}" for state, (_, mark) in MARKS.items() if state != UNTESTED)
    table = _claims(f"{title}: {legend}")
    for name in models:
        table.add_column(labels[name], justify="right", overflow="fold", max_width=14)
    for papers in zip(*(by_paper(entries).items() for entries in models.values()), strict=True):
        for row in zip(*(of_model for _, of_model in papers), strict=True):
            if not row[0].claim.untested:
                table.add_row(*_about(papers[0][0], row[0]), *map(cell, row))
        table.add_section()
    return table


def _counts(ledger: list[Entry], on: str = "", narrow: bool = False) -> Table:
    """Findings by paper and verdict; apart from these the checks that are met, and what was recomputed and agrees.

    If narrow, each column is as wide as the longest word of its heading. Weak stand-ins have a column
    where there are any.
    """
    from rich import box

    from kvlab import papers
    from kvlab.workbench.report.ledger import Tally, by_paper

    title = f"Findings{on}. Counted apart: checks (controls, identities, examples), and the papers' own sums"
    table = titled(title=title, title_style="bold", show_footer=True, box=box.SIMPLE_HEAD)
    if narrow:
        table.padding, table.show_edge = 0, False
    total = Tally.of(ledger)
    table.add_column("paper", footer="all", overflow="fold")
    styles = {state: style for state, style in STYLES.items() if state != papers.WEAK or total.findings[state]}
    agreeing = "sums agree" if narrow and papers.WEAK in styles else "recomputed, agree"
    for state, style in styles.items():
        heading = _stacked(state) if narrow else state
        number = _number_of(total, state, "0", narrow)
        table.add_column(heading, justify="right", footer=f"[{style}]{number}[/]")
    for heading, group in (("checks met", "checks"), (agreeing, "recomputed")):
        table.add_column(_stacked(heading) if narrow else heading, justify="right", footer=total.met(group) or "·")
    questions = []
    for label, of_paper in by_paper(ledger).items():
        tally = Tally.of(of_paper)
        style = "red" if tally.checks_missed else "dim"
        table.add_row(
            label,
            *(f"[{STYLES[state]}]{_number_of(tally, state, narrow=narrow)}[/]" for state in styles),
            f"[{style}]{tally.met('checks') or '·'}[/]",
            f"[dim]{tally.met('recomputed') or '·'}[/]",
        )
        # The answer is yes, at least in direction.
        if answered := tally.met("questions", (papers.HOLDS, papers.DIRECTION, papers.WEAK)):
            questions.append(f"{label} {answered}")
    if questions:
        table.caption_justify = "left"
        table.caption = f"Questions of ours, answered with yes: {', '.join(questions)}"
    return table


def _stacked(text: str) -> str:
    """The text in lines as short as its longest word allows."""
    return textwrap.fill(text, max(map(len, text.split())))


def _number_of(tally: Tally, state: str, none: str = "·", narrow: bool = False) -> str:
    """The number of findings in a state, and below it the number of those that wait for the full profile."""
    waiting = tally.waiting(state)
    return str(tally.findings[state] or none) + (f"\n{_stacked(waiting) if narrow else waiting}" if waiting else "")
