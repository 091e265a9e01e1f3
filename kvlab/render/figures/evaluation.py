"""Results of `kvlab eval`: tables on the screen, and a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.core.storage import AS_IS
from kvlab.evaluation import Answer, by_turn, decline, lengths, summary, table
from kvlab.lib.files import replacing
from kvlab.lib.terminal import titled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

KINDS_ABREAST = 7
LONGEST = 1000  # characters, more than any row has
HALVES = {
    "against the full cache": "against the\nfull cache",
    "stored, MiB": "stored,\nMiB",
    "s per answer": "s per\nanswer",
}


def needles(answers: Sequence[Answer]) -> Figure | None:
    """The heatmap of needles by length and depth; None without needles."""
    from kvlab.render.figures import plots

    hidden = [answer for answer in answers if {"length", "depth"} <= set(answer.marks)]
    if not hidden:
        return None
    rows = table(hidden)
    # A panel for each storage, too.
    rows["policy"] = [
        f"{policy} {_unusual(storage)}".strip() for policy, storage in zip(rows["policy"], rows["storage"], strict=True)
    ]
    plots.style()
    return plots.figure_of(plots.needle_heatmap(rows)[0])


def draw(answers: Sequence[Answer], path: Path, compared: Sequence[Answer] = ()) -> Path | None:
    """Write the heatmap of needles, or the scores by turn, to this PNG file and return its path; None without.

    compared: answers of earlier runs. Those that were compressed at another moment are drawn next to these, by turn.
    """
    from kvlab.lib.figures import save
    from kvlab.render.figures import turns

    if figure := needles(answers) or turns.scores(turns.with_counterparts(answers, compared)):
        with replacing(path) as part:
            save(figure, part)
        return path
    return None


def show(rows: pd.DataFrame, console: Console) -> None:
    """Print a table of `kvlab.evaluation.results.summary`.

    Where it is wider than the console, columns with one value for all rows go into the title. Intervals then go under
    their numbers.
    """
    grid = _grid(rows)
    if console.measure(grid, options=console.options.update(width=LONGEST)).maximum > console.width:
        grid = _grid(rows, narrow=True)
    console.print(grid, highlight=False)
    console.print(
        "against the full cache: the mean of the differences on the same examples, with its interval", style="dim"
    )
    console.print("stored: keys, values and the policy's own data, such as scores or page summaries", style="dim")


def _grid(rows: pd.DataFrame, narrow: bool = False) -> Table:
    at = ", ".join(sorted(set(rows["compress_at"])))
    interval = "\n{:+.1f} to {:+.1f}" if narrow else " ({:+.1f} to {:+.1f})"
    columns: dict[str, list[str]] = {"task": [], "policy": [], "budget": [], "storage": [], "n": []}
    columns |= {"score, %": [], "95 % interval": [], "against the full cache": [], "stored, MiB": []}
    others = "uncompressed_bytes" in rows
    columns |= {"other layers, MiB": []} if others else {}
    columns |= {"s per answer": []}
    for row in rows.to_dict("records"):
        difference, low, high = (100 * row[name] for name in ("difference", "difference_low", "difference_high"))
        paired = row["policy"] != "full" and not math.isnan(difference)
        cells = (
            row["task"],
            row["policy"],
            _in_words(row["budget"]),
            row["storage"],
            str(row["n"]),
            f"{100 * row['score']:.1f}",
            f"{100 * row['low']:.1f}-{100 * row['high']:.1f}",
            f"{difference:+.1f}{interval.format(low, high)}" if paired else "",
            f"{(row['kv_bytes'] + row['aux_bytes']) / 2**20:.2f}",
            *([f"{row['uncompressed_bytes'] / 2**20:.2f}"] if others else []),
            f"{row['seconds']:.2f}",
        )
        for column, cell in zip(columns.values(), cells, strict=True):
            column.append(cell)
    title = [f"compressed at the {at}'s end"]
    if narrow:
        alike = [name for name in ("task", "storage", "n") if len(set(columns[name])) == 1]
        title += [f"{name} {columns.pop(name)[0]}" for name in alike]
        ends = columns.pop("95 % interval")
        columns["score, %"] = [f"{score}\n{end}" for score, end in zip(columns["score, %"], ends, strict=True)]
    grid = titled(title="; ".join(title))
    words = ("task", "policy", "budget", "storage")
    for heading in columns:
        shown = HALVES.get(heading, heading) if narrow else heading
        grid.add_column(shown, justify="left" if heading in words else "right", no_wrap=heading == "policy")
    for cells in zip(*columns.values(), strict=True):
        grid.add_row(*cells)
    return grid


def show_parts(answers: Sequence[Answer], console: Console) -> None:
    """Print the lengths and repetition of answers, the scores by kind, and the scores of each mode by turn.

    A table is left out where it says nothing. That is so where no task scores repetition, where there is a single kind,
    or where there are no turns.
    """
    if long := [answer for answer in answers if "repetition" in answer.scores]:
        _show_lengths(lengths(long), console)
    if len({answer.marks.get("kind") for answer in answers}) > 1:
        _show_by(summary(answers, "kind"), "kind", "score by kind, %", console)
    for mode, part in by_turn(answers).items():
        changes = {}
        for row in decline(part).to_dict("records"):
            # Adding 0 makes 0 of minus 0, as a mean of tiny errors is shown.
            change = [round(100 * row[name], 1) + 0.0 for name in ("decline", "low", "high")]
            change_text = "{:+.1f} ({:+.1f} to {:+.1f})".format(*change)
            changes[row["policy"], _in_words(row["budget"]), row["storage"]] = change_text
        title = f"score by turn, %: {mode}".removesuffix(": ")
        _show_by(summary(part, "turn"), "turn", title, console, {"later turns less the first": changes})


def _show_lengths(rows: pd.DataFrame, console: Console) -> None:
    grid = titled("task", "policy", "budget", "storage", title="how long the answers are")
    for heading in ("tokens", "against the full cache", "no box, %", "repeated, %"):
        grid.add_column(heading, justify="right")
    for row in rows.to_dict("records"):
        system = row["task"], row["policy"], _in_words(row["budget"]), row["storage"]
        longer = "" if _missing(row["longer"]) else f"{row['longer']:+.0f}"
        grid.add_row(
            *system, f"{row['tokens']:.0f}", longer, f"{100 * row['unboxed']:.0f}", f"{100 * row['repetition']:.1f}"
        )
    console.print(grid, highlight=False)


def _show_by(
    rows: pd.DataFrame, by: str, title: str, console: Console, more: Mapping[str, Mapping[tuple, str]] | None = None
) -> None:
    """`more`: further columns, their cells by policy, budget and storage as they are shown."""
    if len(rows["task"].unique()) > 1:
        rows = rows.assign(**{by: rows["task"] + " " + rows[by].fillna("").astype(str)})
    settings = rows.drop_duplicates(["policy", "budget", "storage"]).to_dict("records")
    kinds = list(dict.fromkeys(rows[by]))
    for first in range(0, len(kinds), KINDS_ABREAST):
        grid = titled("policy", "budget", "storage", title=title)
        for kind in kinds[first : first + KINDS_ABREAST]:
            grid.add_column(str(kind), justify="right")
        for heading in more or {}:
            grid.add_column(heading, justify="right")
        for setting in settings:
            policy, budget, storage = setting["policy"], setting["budget"], setting["storage"]
            same = rows["budget"].isna() if _missing(budget) else rows["budget"] == budget
            group = rows.loc[(rows["policy"] == policy) & same & (rows["storage"] == storage)]
            scores = dict(zip(group[by], group["score"], strict=True))
            grid.add_row(
                policy,
                _in_words(budget),
                storage,
                *(f"{100 * scores[kind]:.1f}" for kind in kinds[first : first + KINDS_ABREAST]),
                *(cells.get((policy, _in_words(budget), storage), "") for cells in (more or {}).values()),
            )
        console.print(grid, highlight=False)


def _in_words(budget: float | None) -> str:
    return "" if budget is None or _missing(budget) else f"{budget:g}"


def _unusual(storage: str) -> str:
    """A storage other than the plain one, which goes without saying."""
    return "" if storage == AS_IS.name else storage


def _missing(value: Any) -> bool:
    return value is None or value != value
