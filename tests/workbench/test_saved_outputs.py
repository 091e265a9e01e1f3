"""What the notebooks were saved with is today's: the claims in their tables, and the verdicts of the kept ledger."""

from __future__ import annotations

import csv
import html
import re

import pytest
from support.paths import NOTEBOOKS, ROOT

from kvlab import papers
from kvlab.workbench.experiments import notebooks

KEPT = ROOT / "docs" / "ledger" / "smollm2-135m.csv"
CELL = re.compile(r"<td[^>]*>(.*?)</td>", re.DOTALL)


def judged(path) -> list[tuple[str, str, str]]:
    """Where, claim and verdict of each row of the table of claims that a notebook was saved with."""
    for cell in notebooks.cells(path):
        for output in cell.get("outputs", []):
            table = "".join(output.get("data", {}).get("text/html", []))
            if 'id="T_claims-' in table:
                rows = [[html.unescape(each) for each in CELL.findall(row)] for row in table.split("<tr>")]
                return [(row[0], row[1], row[-1]) for row in rows if row]
    return []


WITH_CLAIMS = [path for path in NOTEBOOKS if papers.claims(experiment=path.stem)]


@pytest.mark.parametrize("path", WITH_CLAIMS, ids=lambda path: path.stem)
def test_a_notebook_is_saved_with_todays_claims_and_the_kept_verdicts(path):
    """Timings aside, which follow the machine."""
    mine, saved = papers.claims(experiment=path.stem), judged(path)
    assert [(where, claim) for where, claim, _ in saved] == [(f"{c.paper}, {c.where}", c.summary) for c in mine]
    with KEPT.open(newline="", encoding="utf-8") as lines:
        kept = {line["claim"]: line["verdict"] for line in csv.DictReader(lines) if line["profile"] == "quick"}
    shown = {claim.id: verdict for claim, (*_, verdict) in zip(mine, saved, strict=True) if claim.kind != "timing"}
    assert {name: kept[name] for name in shown if name in kept} == {n: v for n, v in shown.items() if n in kept}
