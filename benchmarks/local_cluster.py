"""Measure Dask's own LocalCluster as the host of a sweep: its start, its processes and its memory limit.

\b
python benchmarks/local_cluster.py
python benchmarks/local_cluster.py --workers 4 --megabytes 2000

A job of kvlab is a kernel, a process of its own. Here a worker of a LocalCluster starts such a process, which allocates
some memory. Does the worker's memory limit see it?
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Annotated

import psutil
import typer

BODY = "import sys, time; block = b'x' * (int(sys.argv[1]) << 20); print(flush=True); time.sleep(600)"


def begin_kernel(megabytes: int) -> int:
    """On a worker: a process like a kernel; its pid, once it holds its memory."""
    kernel = subprocess.Popen([sys.executable, "-c", BODY, str(megabytes)], stdout=subprocess.PIPE)
    assert kernel.stdout is not None, "it was asked for"
    kernel.stdout.readline()
    return kernel.pid


def main(
    workers: Annotated[int, typer.Option("--workers", min=1)] = 2,
    megabytes: Annotated[int, typer.Option("--megabytes", min=1, help="Memory of the kernel, in MiB.")] = 700,
) -> None:
    """Start a LocalCluster, and look at what it counts."""
    begun = time.perf_counter()
    from distributed import Client, LocalCluster

    cluster = LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address="127.0.0.1:0"
    )
    with cluster, Client(cluster) as client:
        client.submit(os.getpid, pure=False).result()
        print(f"from import to the first answer of a worker: {time.perf_counter() - begun:.1f} s")
        kernel = psutil.Process(client.submit(begin_kernel, megabytes, pure=False).result())
        try:
            time.sleep(2)  # workers measure their memory twice a second
            known = client.scheduler_info(n_workers=-1)["workers"].values()
            own = [process for process in psutil.Process().children(recursive=True) if process != kernel]
            beside = sum(process.memory_info().rss for process in own)
            print(f"its processes: {beside / 2**20:.0f} MiB")
            held, counted = kernel.memory_info().rss, max(worker["metrics"]["memory"] for worker in known)
            print(f"the kernel holds {held / 2**20:.0f} MiB", end=", ")
            print(f"and the memory limit counts {counted / 2**20:.0f} MiB of its worker")
        finally:
            kernel.kill()


if __name__ == "__main__":
    typer.run(main)
