"""Templates as files: jinja2 for text, and notebooks written as Python in the percent format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIX = ".j2"
CELL = re.compile(r"^# %%(?P<markdown> \[markdown\])?(?: tags=(?P<tag>\w+))?$")
SHOWN = "#> "
"""Begins a line of a code cell that is printed when the cell runs, and not part of its code."""


def render(template: str, **values: Any) -> str:
    """The text of a template, named from the folder `templates`; of a notebook, its JSON."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvlab.workbench.workspace"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    text = environment.get_template(template).render(**values)
    return notebook(text) if template.endswith(f".ipynb{SUFFIX}") else text


def templates(part: str) -> Iterator[tuple[str, str]]:
    """The templates of a part, and the files that they become: ("project/Makefile.j2", "Makefile")."""
    folder = Path(__file__).parent / "templates"
    for path in sorted((folder / part).rglob(f"*{SUFFIX}")):
        yield path.relative_to(folder).as_posix(), path.relative_to(folder / part).as_posix().removesuffix(SUFFIX)


def notebook(text: str) -> str:
    """The JSON of a notebook that is written as Python, with a line `# %%` before each cell."""
    cells: list[dict[str, Any]] = []
    for line in text.splitlines():
        if begins := CELL.match(line):
            kind = "markdown" if begins["markdown"] else "code"
            tags = {"tags": [begins["tag"]]} if begins["tag"] else {}
            cells.append({"cell_type": kind, "id": f"cell-{len(cells):02d}", "metadata": tags, "lines": []})
        elif cells:
            cells[-1]["lines"].append(line)
    content = {
        "cells": [_finished(cell) for cell in cells],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _finished(cell: dict[str, Any]) -> dict[str, Any]:
    lines = cell.pop("lines")
    if cell["cell_type"] == "markdown":
        return cell | {"source": _source([line.removeprefix("#").removeprefix(" ") for line in lines])}
    shown = [line.removeprefix(SHOWN) for line in lines if line.startswith(SHOWN)]
    printed = [{"name": "stdout", "output_type": "stream", "text": [f"{line}\n" for line in shown]}] if shown else []
    code = [line for line in lines if not line.startswith(SHOWN)]
    # nbval takes a cell with outputs that was never run for a mistake.
    return cell | {"execution_count": 1 if printed else None, "outputs": printed, "source": _source(code)}


def _source(lines: list[str]) -> list[str]:
    """Lines as the format keeps them: with their ends, but for the last."""
    text = "\n".join(lines).strip("\n")
    return text.splitlines(keepends=True)
