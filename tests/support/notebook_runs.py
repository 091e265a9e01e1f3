"""A notebook's cells run in this process, on a model at hand; what they log stays in memory: no kernel, no store."""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas
import pytest

import kvlab
from kvlab.workbench.experiments import notebooks
from kvlab.workbench.store import findings_files, tracking


@dataclass
class Recorded:
    """What a notebook logged, as `tracking.Run` takes it."""

    metrics: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    figures: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    state: str = "RUNNING"

    def log(self, metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]] | None = None) -> None:
        assert not [name for name, value in metrics.items() if not math.isfinite(value)]
        self.metrics |= metrics
        for name, (low, high) in (intervals or {}).items():
            assert low <= high and name in self.metrics, (name, low, high)
            self.metrics |= {f"{name}/low": low, f"{name}/high": high}

    def figure(self, name: str, figure: Any) -> None:
        figure.savefig(io.BytesIO(), dpi=30)
        plt.close(figure)
        self.figures.append(name)

    def table(self, name: str, frame: Any) -> None:
        frame.to_parquet(io.BytesIO(), index=False)
        self.tables.append(name)

    def tell(self, figure: str, sentences: list[str]) -> None:
        assert any(sentences), figure

    def record(self, name: str, findings: Any = None, *, figure: Any = None, text: Sequence[str] = ()) -> None:
        """As `tracking.Run.record`; what is saved must come back as it was."""
        if findings is not None:
            with tempfile.TemporaryDirectory() as folder:
                findings_files.write(findings, Path(folder), "one")
                again = findings_files.read(Path(folder), "one")
            table = findings if isinstance(findings, pandas.DataFrame) else findings.table
            pandas.testing.assert_frame_equal(getattr(again, "table", again), pandas.DataFrame(table))
            if table is not findings:
                assert again.rows == findings.rows, name
                self.log(findings.metrics, findings.intervals)
            if len(table):
                self.table(name, table)
        if figure is not None:
            self.figure(name, figure)
        if text:
            self.tell(name, list(text))

    def tag(self, key: str, value: object) -> None:
        self.tags[key] = str(value)

    def about(self, lm: kvlab.LM, **chosen: object) -> None:
        for key, value in chosen.items():
            self.tag(key, value)

    def claims(self) -> list[str]:
        return []

    def finish(self) -> None:
        self.state = "FINISHED"


def executed(path: Path, lm: kvlab.LM, monkeypatch: pytest.MonkeyPatch, **parameters: Any) -> Recorded:
    """Run every code cell of a notebook on `lm`, with some of its parameters changed; returns what it logged.

    Raises whatever a cell raises, with the cell's number in its traceback.
    """
    run = Recorded()
    monkeypatch.setattr(tracking, "start", lambda *_, **tags: run)
    monkeypatch.setattr(kvlab, "load", lambda *_: lm)
    declared = notebooks.parameters_of(path)
    assert parameters.keys() <= declared.keys()
    names: dict[str, Any] = {"display": lambda *_: None}
    for number, cell in enumerate(notebooks.cells(path)):
        if cell["cell_type"] == "code":
            code = compile(notebooks.source(cell), f"<{path.stem}, cell {number}>", "exec")
            exec(code, names)
            if "parameters" in cell["metadata"].get("tags", []):
                names |= parameters
    return run
