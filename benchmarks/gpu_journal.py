"""The items of `gpu.py`: time limits, a file of results that the next call goes on from, and the tables."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.table import Table

import kvlab
from kvlab.errors import KvlabError

Row = dict[str, Any]
"""One line of a table: what was measured, and numbers by the names of their columns."""


class OutOfTime(BaseException):
    """A time limit is over. No `Exception`, since libraries catch those."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block once `seconds` are over; on a system without SIGALRM the block is not ended."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def over(*_: object) -> None:
        raise OutOfTime

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, over)
    left, interval = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        # An alarm that was set before goes on.
        signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-3) if left else 0, interval)
        signal.signal(signal.SIGALRM, handler)


@dataclass(frozen=True)
class Item:
    """One thing to measure.

    `run` appends rows as it finds them. The time that is left of a part is shared among the items that are left, by
    their `weight`.
    """

    part: str
    subject: str  # a model or a shape
    name: str
    run: Callable[[list[Row]], None]
    weight: float = 1

    @property
    def key(self) -> tuple[str, str, str]:
        return self.part, self.subject, self.name


@dataclass
class Journal:
    """The results in a file: a line of JSON for each item, written when the item ends.

    An item is in the file when it has ended or failed. One that its time limit cut off is there with the rows it had,
    and is not there when it had none.
    """

    path: Path
    device: str
    retry: bool = False  # whether items that failed run again
    records: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.exists():
            return
        written = self.path.read_bytes()
        whole = written[: written.rfind(b"\n") + 1]
        if whole != written:  # the call before was killed while it wrote
            os.truncate(self.path, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                if record["device"] == self.device:
                    self.records[record["part"], record["subject"], record["item"]] = record
            except (ValueError, KeyError, TypeError):
                raise KvlabError(f"line {number} of {self.path} is no result; give another folder with --out") from None

    def has(self, item: Item) -> bool:
        record = self.records.get(item.key)
        return record is not None and not (self.retry and "error" in record)

    def add(self, item: Item, rows: list[Row], seconds: float, **more: Any) -> None:
        record = {"part": item.part, "subject": item.subject, "item": item.name, "device": self.device}
        record |= versions() | {"seconds": round(seconds, 3), **more, "rows": rows}
        self.records[item.key] = record
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def versions() -> dict[str, str]:
    return {"kvlab": kvlab.__version__, "torch": torch.__version__, "transformers": transformers.__version__}


def clocks() -> str | None:
    """The clocks of the first GPU, now and at most, as NVIDIA's tool says; None without it."""
    asked = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True)
        now, memory_now, most, memory_most = done.stdout.splitlines()[0].split(", ")
        return f"{now} of {most}, memory {memory_now} of {memory_most}"
    return None


def sentence(error: BaseException) -> str:
    """An error in one line."""
    first = (str(error).strip().splitlines() or ["no message"])[0][:300]
    return first if isinstance(error, KvlabError) else f"{type(error).__name__}: {first}"


def run_part(
    journal: Journal, items: Sequence[Item], seconds: float, device: torch.device, say: Callable[[str], None]
) -> list[str]:
    """Run the items of a part that are not in the file; the labels of those that the time limit left out."""
    until, left = time.monotonic() + seconds, [item for item in items if not journal.has(item)]
    missing = []
    while left:
        item, share = left[0], left[0].weight / sum(each.weight for each in left)
        left, start = left[1:], time.monotonic()
        # Most items take less than their share, so that one may take twice its own; the last takes all.
        limit = (until - start) * (min(2 * share, 0.75) if left else 1)
        rows: list[Row] = []
        more: dict[str, Any] = {}
        label = f"{item.part}, {item.subject}, {item.name}"
        if limit <= 0:
            missing.append(label)
            continue
        say(f"{label} (at most {limit:.0f} s)")
        try:
            with time_limit(limit):
                item.run(rows)
        except OutOfTime:
            more["cut"] = f"the time limit of {limit:.0f} s was over"
            if not rows:
                missing.append(label)
                continue
        except Exception as error:
            more["error"] = sentence(error)
            say(f"  failed: {more['error']}")
        found = clocks() if device.type == "cuda" and item.part != "right" else None
        journal.add(item, rows, time.monotonic() - start, **more | ({"clocks": found} if found else {}))
    return missing


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def tables(journal: Journal, part: str) -> Iterator[Table]:
    """One table for each subject of a part."""
    records = [record for record in journal.records.values() if record["part"] == part]
    for subject in dict.fromkeys(record["subject"] for record in records):
        own = [record for record in records if record["subject"] == subject]
        rows = [{"item": record["item"]} | row for record in own for row in record["rows"]]
        rows += [
            {"item": record["item"], "note": record.get("error") or record.get("cut")}
            for record in own
            if "error" in record or "cut" in record
        ]
        columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "note"]
        if any("note" in row for row in rows):
            columns.append("note")
        grid = Table(title=f"{part}: {subject}", box=box.MARKDOWN)
        for name in columns:
            texts = any(isinstance(row.get(name), str) for row in rows)
            grid.add_column(name, justify="left" if texts else "right")
        for row in rows:
            grid.add_row(*(_cell(row.get(name)) for name in columns))
        yield grid
