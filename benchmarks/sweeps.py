"""Measure the cost that a sweep adds to its jobs, and whether kills lose any of them.

\b
python benchmarks/sweeps.py
python benchmarks/sweeps.py --jobs 20 --parts times

Short jobs (a notebook that logs one metric) run in projects of their own in a temporary folder. They run one after the
other, with cold and with warm starts in turns; two at once; and once more when all are done. Part "cluster" runs them
on one worker of a Dask scheduler on this machine, cold and warm. Part "kills" kills a sweep at random moments, and
starts it again until --kills kills have struck. A kill is `kill -9` of the driver, a worker, a kernel or the server for
warm starts. Every job must be there exactly once.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import nbformat
import psutil
import torch
import typer
import yaml
from common import in_a_sentence, run, some_of
from distributed import LocalCluster
from nbformat import v4
from rich.console import Console
from rich.table import Table

from kvlab.bench import clock

PARTS = "times,cluster,kills"
PARAMETERS = "number = 0\n"
BODY = (
    "from kvlab.workbench.store import tracking\n"
    "run = tracking.start('short', {'number': number})\n"
    "run.log({'number': number})\nrun.finish()\n"
)
CPU = torch.device("cpu")
# By the name and the command line of a process: a fork has its parent's command line.
VICTIMS = {
    "driver": None,
    "worker": r"^kvlab-worker |kvlab\.workbench\.jobs\.worker",
    "kernel": r"^kvlab-kernel |ipykernel",
    "server": r"^python.*kvlab\.workbench\.jobs\.forking",
}


def make_project(folder: Path, jobs: int) -> None:
    """A project with one experiment of `jobs` short jobs."""
    parameters = v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for name in ("notebooks", "experiments"):
        (folder / name).mkdir(parents=True)
    made = v4.new_notebook(cells=[parameters, v4.new_code_cell(BODY)], metadata=kernel)
    nbformat.write(made, folder / "notebooks" / "short.ipynb")
    (folder / "experiments" / "short.yaml").write_text(
        yaml.safe_dump(
            {"notebook": "notebooks/short.ipynb", "description": "Short jobs.", "grid": {"number": list(range(jobs))}}
        )
    )


def settings(warm: str) -> dict[str, str]:
    """The environment of a sweep, or of a worker; `warm` is the value of KVLAB_WARM."""
    named = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    return named | {"OMP_NUM_THREADS": "1", "KVLAB_WARM": warm}


def begin(folder: Path, at_once: int, warm: str = "1", cluster: str | None = None) -> subprocess.Popen:
    where = ["--jobs", str(at_once)] if cluster is None else ["--cluster", cluster]
    return subprocess.Popen(
        [sys.executable, "-m", "kvlab", "run", "short", *where],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=settings(warm) | {"KVLAB_ROOT": str(folder)},
    )


def sweep(folder: Path, at_once: int, warm: str = "1", cluster: str | None = None) -> None:
    """One sweep to its end, here or on a cluster."""
    process = begin(folder, at_once, warm, cluster)
    _, said = process.communicate()
    if process.returncode:
        raise SystemExit(f"the sweep failed: {said.strip()}")


def finished(folder: Path) -> tuple[list[int], list[float], set[str]]:
    """The numbers of the finished jobs, the seconds that each took, and the states of all runs."""
    from kvlab.workbench.store import database

    os.environ["KVLAB_ROOT"] = str(folder)
    client = database.client()
    experiment = client.get_experiment_by_name("short")
    if experiment is None:  # the driver was killed before it came to that
        return [], [], set()
    where = [experiment.experiment_id]
    runs = client.search_runs(where, "tags.`kvlab.kind` = 'job'", max_results=5000)
    done = [run for run in runs if run.info.status == "FINISHED"]
    seconds = [float(run.data.tags["kvlab.seconds"]) for run in done]
    return sorted(int(run.data.metrics["number"]) for run in done), seconds, {run.info.status for run in runs}


def strike(process: subprocess.Popen, victim: str) -> bool:
    """kill -9 a process of the sweep; False where there is none of that kind just now."""
    if process.poll() is not None:
        return False
    if victim == "driver":
        process.kill()
        return True
    try:
        for one in psutil.Process(process.pid).children(recursive=True):
            if re.search(VICTIMS[victim], " ".join([one.name(), *one.cmdline()])):
                one.kill()
                return True
    except psutil.Error:
        pass
    return False


def torment(folder: Path, kills: int, seed: int, console: Console) -> tuple[int, int]:
    """Kill the sweep `kills` times, starting it again whenever it has ended; how often it was started."""
    draw, struck, starts, process = random.Random(seed), 0, 1, begin(folder, 2)
    while struck < kills:
        if process.poll() is not None:
            process, starts = begin(folder, 2), starts + 1
        time.sleep(draw.uniform(1, 8))
        victim = draw.choice(list(VICTIMS))
        if strike(process, victim):
            struck += 1
            console.print(f"kill {struck} of {kills}: {victim}")
        elif process.poll() is not None and len(finished(folder)[0]) == len(list_of_jobs(folder)):
            break  # all is done before enough kills have struck
    process.communicate()
    sweep(folder, 2)
    return struck, starts + 1


def list_of_jobs(folder: Path) -> list[int]:
    return yaml.safe_load((folder / "experiments" / "short.yaml").read_text())["grid"]["number"]


def timed(place: Path, jobs: int, table: Table) -> None:
    """Rows for the same sweep cold and warm, two jobs at once, and when all is done."""
    folders = [place / name for name in ("cold", "warm", "cold again", "warm again", "two")]
    for folder in folders:
        make_project(folder, jobs)
    # In turns, so that a machine that grows busier meanwhile does not favour one of them.
    alone = [clock.seconds(CPU, sweep, folder, 1, warm) for folder, warm in zip(folders[:4], "0101", strict=True)]
    cold, warm = (min(alone[first::2]) for first in (0, 1))
    each = [statistics.median(finished(folders[first])[1] + finished(folders[first + 2])[1]) for first in (0, 1)]
    own = alone[3] - sum(finished(folders[3])[1])
    again = clock.seconds(CPU, sweep, folders[3], 1)
    two = clock.seconds(CPU, sweep, folders[4], 2)
    table.add_row("a job that starts cold", f"{each[0]:.1f} s", "")
    table.add_row("a job that starts warm", f"{each[1]:.1f} s, {each[1] / each[0]:.2f}x", "1.5 s")
    table.add_row(f"{jobs} jobs, --jobs 1, cold", f"{cold:.0f} s", "")
    table.add_row(f"{jobs} jobs, --jobs 1", f"{warm:.0f} s, {warm / cold:.2f}x", "")
    table.add_row(f"{jobs} jobs, --jobs 2", f"{two:.0f} s, {two / warm:.2f}x", "")
    table.add_row("the driver's own cost", f"{own / jobs:.2f} s a job", "0.20 s")
    table.add_row("the same sweep when all is done", f"{again:.1f} s", "10 s")


def on_cluster(place: Path, jobs: int, table: Table) -> None:
    """Rows for the sweep on a worker that starts its jobs cold, and on one that starts them warm."""
    seconds, each = {}, {}
    for warm in "01":
        make_project(folder := place / f"cluster {warm}", jobs)
        alone: dict = {"n_workers": 1, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}
        cluster: Any = LocalCluster(**alone, env=settings(warm))
        with cluster:
            seconds[warm] = clock.seconds(CPU, sweep, folder, 1, warm, cluster.scheduler_address)
        each[warm] = statistics.median(finished(folder)[1])
    table.add_row("a job on a worker of Dask, cold", f"{each['0']:.1f} s", "")
    table.add_row("a job on a worker of Dask, warm", f"{each['1']:.1f} s, {each['1'] / each['0']:.2f}x", "1.5 s")
    table.add_row(f"{jobs} jobs on that worker, cold", f"{seconds['0']:.0f} s", "")
    table.add_row(f"{jobs} jobs on that worker, warm", f"{seconds['1']:.0f} s, {seconds['1'] / seconds['0']:.2f}x", "")


def killed(folder: Path, jobs: int, kills: int, seed: int, table: Table, console: Console) -> None:
    """A row for what is left of a sweep after so many kills."""
    make_project(folder, 3 * jobs)  # warm jobs are soon done
    struck, starts = torment(folder, kills, seed, console)
    found, _, states = finished(folder)
    lost, doubled = set(list_of_jobs(folder)) - set(found), len(found) - len(set(found))
    table.add_row(
        f"{struck} kills, {starts} starts",
        f"{len(lost)} of {3 * jobs} lost, {doubled} doubled, {'some' if 'RUNNING' in states else 'none'} running",
        "0, 0, none",
    )


def main(
    jobs: Annotated[int, typer.Option(min=2, help="Jobs of the sweep; three times as many of the one killed.")] = 40,
    kills: Annotated[int, typer.Option(min=1, help="Kills at random moments.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the kills' moments and victims.")] = 0,
    parts: Annotated[str, typer.Option(help=f"Some of {PARTS}.")] = PARTS,
) -> None:
    console, table = Console(), Table("what", "measured", "goal")
    with in_a_sentence():
        wanted = some_of(PARTS, parts)
    with tempfile.TemporaryDirectory(prefix="kvlab-sweeps-") as place:
        if "times" in wanted:
            timed(Path(place), jobs, table)
        if "cluster" in wanted:
            on_cluster(Path(place), jobs, table)
        if "kills" in wanted:
            killed(Path(place) / "killed", jobs, kills, seed, table, console)
    console.print(table)


if __name__ == "__main__":
    run(main, __doc__)
