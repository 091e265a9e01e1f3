"""How tables look on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def titled(*headings: str, title: str, **look: Any) -> Table:
    """An empty table with a title above its left end and quiet headings; `look` is whatever rich's `Table` takes."""
    from rich.table import Table

    return Table(*headings, title=title, title_justify="left", header_style="dim", pad_edge=False, **look)
