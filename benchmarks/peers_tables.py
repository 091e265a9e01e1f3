"""Tables of kvlab and kvpress side by side, for a terminal and for Markdown."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.table
import torch
import transformers
from peers_methods import Method
from peers_sets import Agreement
from rich import box
from rich.console import Console

import kvlab
from kvlab.inputs.models import LM
from kvlab.lib.files import replacing

MIB = 2**20


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


def spread(values: Sequence[float], digits: int = 2, percent: bool = False) -> str:
    """The median with the least and the largest, "0.81 (0.75-0.86)", or one number where these look the same."""
    values = [100 * value for value in values] if percent else values
    middle, low, high = (f"{pick(values):.{digits}f}" for pick in (statistics.median, min, max))
    sign = " %" if percent else ""
    return middle + sign if low == high else f"{middle}{sign} ({low}-{high})"


def setting(lm: LM, about: dict[str, Any]) -> Table:
    """On what it was measured; `about` is what the peer's process says of itself."""
    theirs = about["versions"]
    rows = [
        ("kvlab", kvlab.__version__, transformers.__version__, torch.__version__, str(torch.get_num_threads())),
        ("kvpress", theirs["kvpress"], theirs["transformers"], theirs["torch"], str(about["threads"])),
    ]
    return Table(f"{lm.signature}, float32", ("", "version", "transformers", "torch", "threads"), rows)


def sets_table(rows: list[dict], methods: dict[str, Method], ratios: list[float], lengths: list[int]) -> Table:
    """Of the rows of `peers.sets`: one line for each method."""
    lines = []
    for name, method in methods.items():
        mine = [row for row in rows if row["method"] == name]
        plain: list[Agreement] = [row["plain"] for row in mine]
        alike: list[Agreement] = [row["alike"] for row in mine if row["alike"]]
        more = [one.theirs - one.ours for one in plain]
        counts = (
            f"{min(more):+.0f}" if round(min(more)) == round(max(more)) else f"{min(more):+.0f} to {max(more):+.0f}"
        )
        cells = ("", "") if not alike else (spread([one.same for one in alike], 1, percent=True), apart(alike))
        lines.append(
            (name, spread([one.same for one in plain], 1, percent=True), counts, method.why, *cells, method.rest)
        )
    header = ("method", "same", "entries more", "what differs", "made alike", "apart", "what still differs")
    note = (
        '"same" is twice the entries that both keep over all that either keeps, as a median over prompts and ratios. '
        '"entries more" is how many more a head of kvpress keeps than one of kvlab. "made alike" is kvlab with '
        'kvpress\'s parameters and its number of entries. "apart" is how many only one of them keeps, of all that '
        "either keeps. The ratio differs since kvpress gets the share that goes, and int(700 * (1 - 0.9)) is 69. kvlab "
        "keeps floor(700 * 0.1)."
    )
    shares = ", ".join(f"{keep:g}" for keep in ratios)
    return Table(f"Retained sets: prompts of {', '.join(map(str, lengths))} tokens, {shares} kept", header, lines, note)


def apart(found: list[Agreement]) -> str:
    total = sum(round((one.ours + one.theirs) * one.heads) for one in found)
    return f"{sum(one.apart for one in found):,} of {total:,}"


def times_table(rows: list[dict], ratios: int, length: int, response: int) -> Table:
    """Of the rows of `peers.times`: seconds and the ratio for each method, and for all with the capture."""
    by_round: dict[int, list[dict]] = defaultdict(list)
    for row in rows:
        by_round[row["round"]].append(row)
    names = dict.fromkeys(row["method"] for row in rows if row["method"] != "capture")
    lines = []
    for name in names:
        mine = [row for row in rows if row["method"] == name]
        lines.append(_timed(name, [row["ours"] for row in mine], [row["theirs"] for row in mine]))
    capture = [row["ours"] for row in rows if row["method"] == "capture"]
    lines.append(("the capture", f"{statistics.median(capture):.2f} s", "", ""))
    whole = [[sum((row[side] for row in some), 0.0) for some in by_round.values()] for side in ("ours", "theirs")]
    lines.append(_timed(f"all {len(names)} x {ratios}", *whole))
    note = (
        f"kvlab makes one capture with {response} tokens of response, then a replay with its measures for each ratio. "
        "kvpress makes a prefill for each, its compressed cache, and no measure."
    )
    title = f"Time for {len(names)} methods at {ratios} ratios, {length} tokens, {len(by_round)} rounds"
    return Table(title, ("method", "kvlab", "kvpress", "kvpress over kvlab"), lines, note)


def _timed(name: str, mine: Sequence[float], theirs: Sequence[float]) -> tuple[str, ...]:
    ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
    return name, f"{statistics.median(mine):.2f} s", f"{statistics.median(theirs):.2f} s", spread(ratios, 1)


def decode_table(rows: list[dict], budget: int, steps: int) -> Table:
    """Of the rows of `peers.decode`: both sides in one line for each prompt and method."""
    lines = []
    for context, name in dict.fromkeys((row["context"], row["method"]) for row in rows):
        mine, theirs = (
            sorted(
                (row for row in rows if (row["context"], row["method"], row["side"]) == (context, name, side)),
                key=lambda row: row["round"],
            )
            for side in ("ours", "theirs")
        )
        both = list(zip(mine, theirs, strict=True))
        cells = [f"{context:,}", name or "full cache"]
        for metric in ("tokens_per_second", "time_to_first_token"):
            cells += [f"{statistics.median([row[metric] for row in some]):.1f}" for some in (mine, theirs)]
            cells.append(spread([a[metric] / b[metric] for a, b in both]))
        for metric in ("kv_bytes", "peak_bytes"):
            cells += [f"{statistics.median([row[metric] for row in some]) / MIB:.0f}" for some in (mine, theirs)]
        lines.append(tuple(cells))
    header = (
        "prompt",
        "method",
        "kvlab, tokens/s",
        "kvpress",
        "kvlab over kvpress",
        "kvlab, s to first token",
        "kvpress",
        "kvlab over kvpress",
        "kvlab, cache MiB",
        "kvpress",
        "kvlab, peak MiB",
        "kvpress",
    )
    note = (
        f"Budget {budget}, {steps} steps, each run in a fresh process. Peak memory is above the loaded model. The "
        "cache's size is that at the end. The full cache is transformers' own, in each side's version."
    )
    return Table("Decoding", header, lines, note)


REPORTS = Table(
    "The report of each on one run",
    ("", "kvlab", "kvpress"),
    [
        ("retained positions", "`kept`, `stored`, for each layer, head and step", "none; found here by the keys' bits"),
        ("what was lost", "recall, attention mass, output error, for each layer, head and step", "none"),
        ("bytes", "stored, read, auxiliary, allocated", "the cache's tensors; a masked entry still lies there"),
        ("ratio", "entries, and whether a fraction was raised", "the ratio asked for"),
        (
            "answer",
            "`generate`, likelihood, scores of tasks",
            "its pipeline's text; scores by a script of its repository",
        ),
    ],
)


def show(table: Table, console: Console) -> None:
    grid = rich.table.Table(title=table.title, caption=table.note or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in table.header:
        grid.add_column(name)
    for row in table.rows:
        grid.add_row(*row)
    console.print(grid)


def markdown(table: Table) -> str:
    lines = [table.header, ("---",) * len(table.header), *table.rows]
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"### {table.title}\n\n{body}\n" + (f"\n{table.note}\n" if table.note else "")


def write(tables: list[Table], path: Path) -> None:
    with replacing(path) as part:
        part.write_text("\n".join(map(markdown, tables)), encoding="utf-8")
