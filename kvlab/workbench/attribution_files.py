"""What `kvlab attribute` leaves in a folder: tables, a figure and a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.lib.files import replacing
from kvlab.render.explorer.effects import Picture

if TYPE_CHECKING:
    from kvlab.attribution.results import Attribution


def write(why: Attribution, folder: Path) -> Iterator[str]:
    """Write effects.csv, restored.csv, attribution.png and why.html; yields the summary's lines, then the paths."""
    import matplotlib.pyplot as plt

    from kvlab.render.figures import attribution, plots

    found = why.summary
    if why.table.empty:
        yield f"{why.policy} evicts nothing of {why.document}, so that there is nothing to attribute"
        return
    yield (
        f"the response loses {found['loss_full']:.4g} nats with the full cache and {found['loss_policy']:.4g} with "
        f"{why.policy}"
    )
    yield (
        f"{found['evicted']:,.0f} evicted entries explain {found['explained']:.4g} of {found['difference']:.4g} nats: "
        f"{found['harmful']:.4g} of harm, {found['helpful']:.4g} of help"
    )
    for row in why.by("token").head(5).to_dict(orient="records"):
        yield f"  {row['effect']:8.3g} nats on {why.tokens[int(row['position'])]!r} at position {row['position']}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in (("effects.csv", why.table), ("restored.csv", why.restored)):
        with replacing(folder / name) as part:
            table.to_csv(part, index=False)
        yield str(folder / name)
    plots.style()
    figure = attribution.attribution(why)
    with replacing(folder / "attribution.png") as part:
        figure.savefig(part, format="png")
    plt.close(figure)
    yield str(folder / "attribution.png")
    yield str(Picture(why).save(folder / "why.html"))
