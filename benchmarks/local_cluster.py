"""What Dask's own LocalCluster would do for a sweep on this machine: its start, its memory limit, and a killed driver.

\b
python benchmarks/local_cluster.py
python benchmarks/local_cluster.py --workers 4 --megabytes 2000

A job of kvlab is a kernel, a process of its own beside whatever started it. Here a worker of a LocalCluster starts such
a process, which holds some memory; then the driver is killed (kill -9).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

BODY = "import sys, time; held = b'x' * (int(sys.argv[1]) << 20); print(flush=True); time.sleep(600)"
BRIEFLY = 10.0  # seconds in which whatever ends with its driver has ended


def begin_kernel(megabytes: int) -> int:
    """On a worker: a process like a kernel; its pid, once it holds its memory."""
    kernel = subprocess.Popen([sys.executable, "-c", BODY, str(megabytes)], stdout=subprocess.PIPE)
    assert kernel.stdout is not None, "it was asked for"
    kernel.stdout.readline()
    return kernel.pid


def drive(workers: int, megabytes: int) -> None:
    """A driver: prints what it measures as JSON, and waits to be killed."""
    begun = time.perf_counter()
    from distributed import Client, LocalCluster

    cluster = LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address="127.0.0.1:0"
    )
    client = Client(cluster)
    client.submit(os.getpid, pure=False).result()
    started = time.perf_counter() - begun
    kernel = client.submit(begin_kernel, megabytes, pure=False).result()
    time.sleep(2)  # workers measure their memory twice a second
    known = client.scheduler_info(n_workers=-1)["workers"].values()
    own = [process.pid for process in psutil.Process().children(recursive=True) if process.pid != kernel]
    found = {
        "started": started,
        "kernel": kernel,
        "own": own,
        "counted": max(worker["metrics"]["memory"] for worker in known),
        "held": psutil.Process(kernel).memory_info().rss,
        "beside": sum(psutil.Process(pid).memory_info().rss for pid in own),
    }
    print(json.dumps(found), flush=True)
    time.sleep(600)


def main(
    workers: Annotated[int, typer.Option("--workers", min=1)] = 2,
    megabytes: Annotated[int, typer.Option("--megabytes", min=1, help="What the kernel holds.")] = 700,
) -> None:
    """Start a LocalCluster, look at what it counts, and kill its driver."""
    command = [sys.executable, str(Path(__file__)), "drive", str(workers), str(megabytes)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None, "it was asked for"
    try:
        found = json.loads(driver.stdout.readline())
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    mib = {name: round(found[name] / 2**20) for name in ("counted", "held", "beside")}
    print(f"from import to the first answer of a worker: {found['started']:.1f} s")
    print(f"its processes: {mib['beside']} MiB")
    print(f"the kernel holds {mib['held']} MiB, and the memory limit counts {mib['counted']} MiB of its worker")
    end = time.monotonic() + BRIEFLY
    while time.monotonic() < end and any(map(psutil.pid_exists, found["own"])):
        time.sleep(0.1)
    workers_left = sum(map(psutil.pid_exists, found["own"]))
    print(f"{BRIEFLY:.0f} s after the driver's death: {workers_left} of its processes, and", end=" ")
    if psutil.pid_exists(found["kernel"]):
        print("the kernel runs on")
        os.kill(found["kernel"], signal.SIGKILL)
    else:
        print("no kernel")


if __name__ == "__main__":
    if sys.argv[1:2] == ["drive"]:
        drive(*map(int, sys.argv[2:]))
    else:
        typer.run(main)
