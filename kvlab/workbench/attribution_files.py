"""The files of `kvlab attribute`: tables, a figure and a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.lib.files import replacing
from kvlab.render.explorer.effects import Picture

if TYPE_CHECKING:
    from kvlab.attribution.results import Attribution


SHOWN = 300
"""Characters of a response in the terminal."""


def write(why: Attribution, folder: Path) -> Iterator[str]:
    """Write effects.csv, restored.csv, attribution.png and why.html, and rounding.csv where entries are stored rounded;
    yields the summary's lines, then the paths.
    """
    found = why.summary
    if why.table.empty and why.rounding.empty:
        yield f"{why.name} evicts nothing of {why.document}, so that there is nothing to attribute"
        return
    said = " ".join("".join(why.tokens[len(why.prompt) :]).split())
    yield f"the response, as attributed: {said if len(said) <= SHOWN else said[:SHOWN].rstrip() + ' ...'}"
    yield (
        f"the response loses {found['loss_full']:.4g} nats with the full cache and {found['loss_policy']:.4g} with "
        f"{why.name}"
    )
    evicted = found["harmful"] + found["helpful"]
    yield (
        f"{found['evicted']:,.0f} evicted entries explain {evicted:.4g} of {found['difference']:.4g} nats: "
        f"{found['harmful']:.4g} of harm, {found['helpful']:.4g} of help"
    )
    if not why.storage.exact:
        keys, values = found["rounding_keys"], found["rounding_values"]
        yield (
            f"{len(why.rounding):,} rounded entries explain {keys + values:.4g} nats: {keys:.4g} by their keys, "
            f"{values:.4g} by their values"
        )
    for row in why.by("token").head(5).to_dict(orient="records"):
        yield f"  {row['effect']:8.3g} nats on {why.tokens[int(row['position'])]!r} at position {row['position']}"
    folder.mkdir(parents=True, exist_ok=True)
    tables = {"effects.csv": why.table, "restored.csv": why.restored}
    for name, table in (tables if why.storage.exact else tables | {"rounding.csv": why.rounding}).items():
        with replacing(folder / name) as part:
            table.to_csv(part, index=False)
        yield str(folder / name)
    picture = Picture(why)
    with replacing(folder / "attribution.png") as part:
        part.write_bytes(picture.figure("png"))
    yield str(folder / "attribution.png")
    yield str(picture.save(folder / "why.html"))
