"""The claims and their counts as tables on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvlab.lib.terminal import titled

if TYPE_CHECKING:
    from rich.table import Table

    from kvlab.workbench.report.ledger import Entry

STYLES = {
    "holds": "green",
    "holds in direction only": "yellow",
    "fails": "red",
    "not measured": "dim",
    "cannot be tested here": "dim",
}


def show(ledger: list[Entry]) -> None:
    """Print the measured claims, then each paper's counts by verdict; checks are counted separately."""
    from rich import box
    from rich.console import Console

    from kvlab.workbench.report.ledger import by_paper, number

    table = titled(title="Claims", title_style="bold", box=box.SIMPLE_HEAD, expand=True)
    table.add_column("where", ratio=2, overflow="fold")
    table.add_column("claim", ratio=5, overflow="fold")
    for heading in ("paper's", "here", "interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold", max_width=14)
    for label, of_paper in by_paper(ledger).items():
        for entry in of_paper:
            claim, verdict = entry.claim, entry.verdict
            if claim.untested:
                continue
            has_interval = verdict.low is not None and verdict.high is not None
            interval = f"{number(verdict.low)} to {number(verdict.high)}" if has_interval else ""
            kind = "" if entry.group == "findings" else f" ({claim.kind})"
            table.add_row(
                f"{label}, {claim.where}{kind}".replace("[", r"\["),
                claim.summary.replace("[", r"\["),
                number(claim.paper_value),
                number(verdict.value),
                interval,
                f"[{STYLES[entry.state]}]{entry.state}[/]",
            )
        table.add_section()
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table, highlight=False)
    console.print(_counts(ledger), highlight=False)


def _counts(ledger: list[Entry]) -> Table:
    """Findings by paper and verdict; beside them the checks that are met, and the recomputed sums that agree."""
    from rich import box

    from kvlab.workbench.report.ledger import Tally, by_paper

    table = titled(
        title="Findings. Counted apart: checks (controls, identities, examples), and the papers' own sums",
        title_style="bold",
        show_footer=True,
        box=box.SIMPLE_HEAD,
    )
    total = Tally.of(ledger)
    table.add_column("paper", footer="all")
    for state, style in STYLES.items():
        table.add_column(state, justify="right", footer=f"[{style}]{total.findings[state]}[/]")
    table.add_column("checks met", justify="right", footer=total.met("checks"))
    table.add_column("recomputed, agree", justify="right", footer=total.met("recomputed"))
    for label, of_paper in by_paper(ledger).items():
        tally = Tally.of(of_paper)
        style = "red" if tally.checks_missed else "dim"
        table.add_row(
            label,
            *(f"[{STYLES[state]}]{tally.findings[state] or '·'}[/]" for state in STYLES),
            f"[{style}]{tally.met('checks')}[/]",
            f"[dim]{tally.met('recomputed')}[/]",
        )
    return table
