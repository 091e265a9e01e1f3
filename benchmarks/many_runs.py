"""Measure time and memory of the commands that read the store, when the store has grown large.

\b
python benchmarks/many_runs.py
python benchmarks/many_runs.py --runs 5000 --experiments 50 --store sqlite

The runs are written straight into the database, over as many experiments as asked for. Some are kvlab's own
experiments, on three models. Their runs have every metric that a claim reads of a quick profile, and as many metrics as
a real run. Another experiment has a sweep of up to a hundred finished jobs, which is resumed. The server is MLflow's,
on PostgreSQL (Debian's package `postgresql`). Both are on loopback, and run only during the benchmark. The driver that
the server needs goes into the same temporary folder.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy
import typer
from common import bar, in_a_sentence
from rich.console import Console
from rich.table import Table
from sweeps import make_project

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.workbench import experiments, project
from kvlab.workbench.store import database

MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
JOBS = 100  # of the sweep, if each experiment has as many runs
REAL, OWN = 900, 50  # metrics of a run of kvlab's experiments, and of one of somebody's own
COMMANDS = {
    "resume a finished sweep": ["run", "short"],
    "report": ["report"],
    "list experiments": ["list", "experiments"],
    "list claims": ["list", "claims"],
}
DRIVER = "psycopg2-binary==2.9.10"
PATIENCE = 600  # seconds for a server to answer
AT_ONCE = 50  # runs in one insertion
GLANCE = 0.05  # seconds between looks at the memory of a command

Logged = tuple[dict[str, str], dict[str, float]]
"""Tags and metrics of a run."""


class Store(StrEnum):
    """Which store to measure."""

    sqlite = "sqlite"
    server = "server"
    both = "both"


def main(
    runs: Annotated[int, typer.Option(min=1, help="Finished runs in the store.")] = 20_000,
    folders: Annotated[int, typer.Option("--experiments", min=20, help="Experiments that they belong to.")] = 200,
    store: Annotated[Store, typer.Option(help="A database in a file, or a server.")] = Store.both,
) -> None:
    console = Console()
    if runs < folders:
        raise typer.BadParameter(f"{runs} runs are less than one for each of {folders} experiments")
    table = Table("store", "command", "seconds", "peak memory", title=f"{runs:,} runs of {folders} experiments")
    kinds = (Store.sqlite, Store.server) if store is Store.both else (store,)
    with in_a_sentence():
        try:
            for kind in kinds:
                table_of(kind, runs, folders, table, console)
        finally:
            console.print(table)


def table_of(kind: Store, runs: int, folders: int, table: Table, console: Console) -> None:
    """Measure all commands on one kind of store, a row each."""
    with tempfile.TemporaryDirectory(prefix="kvlab-many-") as place:
        folder = Path(place)
        folder.chmod(0o755)  # PostgreSQL runs under a user of its own
        make_project(folder, min(JOBS, runs // folders))
        os.environ["KVLAB_ROOT"] = str(folder)
        with STORES[kind](folder, lambda url: fill(url, runs, folders, console)) as uri:
            for what, words in COMMANDS.items():
                seconds, peak = measured(folder, words, uri)
                table.add_row(kind.value, what, f"{seconds:.1f} s", f"{peak / 2**20:.0f} MiB")


# ---------------------------------------------------------------- the runs


def fill(url: str, runs: int, folders: int, console: Console) -> None:
    """Write finished runs into the database at `url`, whose tables are there."""
    kinds = [*of_claims(), ("short", jobs_of_the_sweep())]
    kinds += [(f"own-{number}", somebodys_own()) for number in range(folders - len(kinds))]
    engine, tables = sqlalchemy.create_engine(url), sqlalchemy.MetaData()
    tables.reflect(engine)
    now, turns = int(time.time() * 1000), cycle(kinds)
    with bar(console) as progress:
        task = progress.add_task(f"writing {runs:,} runs", total=runs)
        ids: dict[str, int] = {}
        with engine.begin() as connection:
            for name, _ in kinds:
                place = project.root() / "mlruns" / "artifacts" / name
                about = {"artifact_location": place.as_uri(), "lifecycle_stage": "active", "workspace": "default"}
                row = tables.tables["experiments"].insert().values(name=name, creation_time=now, **about)
                made = connection.execute(row).inserted_primary_key
                assert made is not None, "one row was inserted"
                ids[name] = made[0]
        for start in range(0, runs, AT_ONCE):
            rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for number, (name, logged) in enumerate(islice(turns, min(AT_ONCE, runs - start)), start):
                write(rows, ids[name], name, next(logged), now - 1000 * (runs - number))
            with engine.begin() as connection:
                for name, found in rows.items():
                    connection.execute(tables.tables[name].insert(), found)
            progress.advance(task, AT_ONCE)
    engine.dispose()


def write(rows: dict[str, list[dict[str, Any]]], experiment: int, name: str, logged: Logged, at: int) -> None:
    """Add the rows of one run, which ended at `at` (milliseconds)."""
    run, (tags, metrics) = uuid.uuid4().hex, logged
    place = project.root() / "mlruns" / "artifacts" / name / run / "artifacts"
    rows["runs"].append(
        {
            "run_uuid": run,
            "name": "quick",
            "source_type": "NOTEBOOK",
            "source_name": "kvlab",
            "entry_point_name": "",
            "user_id": "somebody",
            "status": "FINISHED",
            "start_time": at - 100_000,
            "end_time": at,
            "source_version": "",
            "lifecycle_stage": "active",
            "artifact_uri": place.as_uri(),
            "experiment_id": experiment,
        }
    )
    tags = {
        "kvlab.kind": "job",
        "kvlab.experiment": name,
        "kvlab.profile": "quick",
        "kvlab.version": "0.1.0",
        "kvlab.seconds": "100",
        "kvlab.commit": "0" * 40,
        "kvlab.code": project.code_hash()[:16],
        "kvlab.host": socket.gethostname(),
        "seed": "0",
        "signature": "toy@0|" + " ".join(f"sotu/{year}@0" for year in range(1962, 1970)),
        **tags,
    }
    rows["tags"] += [{"key": key, "value": value, "run_uuid": run} for key, value in tags.items()]
    rows["params"] += [{"key": f"parameter_{i}", "value": str(i), "run_uuid": run} for i in range(10)]
    numbers = [
        {"key": key, "value": value, "timestamp": at, "step": 0, "is_nan": False, "run_uuid": run}
        for key, value in metrics.items()
    ]
    rows["metrics"] += numbers
    rows["latest_metrics"] += numbers


def of_claims() -> Iterator[tuple[str, Iterator[Logged]]]:
    """Kvlab's experiments: all that their claims read, and more up to `REAL` metrics."""
    read: dict[str, set[str]] = defaultdict(set)
    for claim in papers.claims():
        if claim.experiment and claim.profile == "quick":
            read[claim.experiment] |= claim.metrics
    for name, metrics in sorted(read.items()):
        more = [f"other/{i}" for i in range(max(0, REAL - len(metrics)))]
        yield name, _noise([*sorted(metrics), *more])


def somebodys_own() -> Iterator[Logged]:
    return _noise([f"loss/{i}" for i in range(OWN)])


def jobs_of_the_sweep() -> Iterator[Logged]:
    """The jobs of the sweep, again and again, as runs that were begun afresh."""
    for job in cycle(experiments.jobs("short")):
        yield {"kvlab.key": job.key, "kvlab.job": job.name}, {"number": 1.0}


def _noise(names: list[str]) -> Iterator[Logged]:
    draw = random.Random(0)
    for number, model in enumerate(cycle(MODELS)):
        yield {"model": model, "kvlab.key": f"{number:064x}"}, {name: draw.gauss(0, 1) for name in names}


# ---------------------------------------------------------------- the stores


@contextlib.contextmanager
def sqlite(folder: Path, filled: Callable[[str], None]) -> Iterator[str]:
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    database.ensure_store()
    uri = database.store_uri()
    filled(uri)
    yield uri


@contextlib.contextmanager
def server(folder: Path, filled: Callable[[str], None]) -> Iterator[str]:
    """MLflow's server on a PostgreSQL of its own."""
    driver, data = folder / "driver", folder / "postgresql"
    called(sys.executable, "-m", "pip", "install", "-q", "--target", str(driver), DRIVER)
    sys.path.insert(0, str(driver))
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
    if not found:
        raise KvlabError("PostgreSQL is not installed; `apt-get install postgresql` brings it")
    tools, port, web = found[-1].parent, free_port(), free_port()
    data.mkdir()
    # It refuses to run as root.
    someone = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    if someone:
        shutil.chown(data, "postgres")
    called(*someone, str(tools / "initdb"), "-D", str(data), "-A", "trust", "-U", "kvlab")
    options = f"-p {port} -k {data} -c listen_addresses=127.0.0.1"
    called(*someone, str(tools / "pg_ctl"), "-D", str(data), "-l", str(data / "log"), "-o", options, "-w", "start")
    url = f"postgresql+psycopg2://kvlab@127.0.0.1:{port}/postgres"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(driver), *filter(None, [os.getenv("PYTHONPATH")])])}
    words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(web), "--workers", "1"]
    words += ["--backend-store-uri", url, "--artifacts-destination", str(folder / "artifacts")]
    # The server writes to it as long as it lives.
    log = open(folder / "server.log", "w", encoding="utf-8")  # noqa: SIM115
    answering = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{web}/health", folder / "server.log")
        filled(url)
        os.environ["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{web}"
        yield os.environ["MLFLOW_TRACKING_URI"]
    finally:
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(answering.pid, 9)
        answering.wait()
        log.close()
        called(*someone, str(tools / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop")


STORES = {Store.sqlite: sqlite, Store.server: server}


def called(*words: str) -> None:
    """Run a command of the system that must succeed."""
    done = subprocess.run(words, capture_output=True, text=True, cwd="/")
    if done.returncode:
        raise KvlabError(f"{' '.join(words)} failed: {(done.stderr or done.stdout).strip()[-500:]}")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_for(address: str, log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(address, timeout=5).close()
            return
        time.sleep(0.5)
    raise KvlabError(f"the server does not answer: {log.read_text(encoding='utf-8')[-500:]}")


# ---------------------------------------------------------------- measuring


def measured(folder: Path, words: list[str], uri: str) -> tuple[float, int]:
    """Seconds and peak resident bytes of one command of kvlab, which must succeed."""
    environment = {**os.environ, "KVLAB_ROOT": str(folder), "MLFLOW_TRACKING_URI": uri}
    said = folder / "said.txt"
    with open(said, "w", encoding="utf-8") as file:
        start = time.perf_counter()
        command = [sys.executable, "-m", "kvlab", *words]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
        peak = 0
        while process.poll() is None:
            peak = max(peak, high_water(process.pid))
            time.sleep(GLANCE)
        taken = time.perf_counter() - start
    if process.returncode:
        raise KvlabError(f"kvlab {' '.join(words)} failed: {said.read_text(encoding='utf-8')[-500:]}")
    return taken, peak


def high_water(pid: int) -> int:
    """Peak resident bytes of a process so far. (What a parent learns at its child's end counts its own pages too.)"""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return 0


if __name__ == "__main__":
    typer.run(main)
