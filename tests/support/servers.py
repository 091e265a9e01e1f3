"""What a server of a test needs."""

from __future__ import annotations

import os
import socket
import textwrap

from support.projects import BODY, EXPERIMENT, PARAMETERS, cell, experiment, notebook, project  # noqa: F401

WRITER = textwrap.dedent("""
    import multiprocessing
    import sys
    import mlflow
    import pandas
    from kvlab.workbench.store import tracking

    writers, runs, metrics = map(int, sys.argv[1:])

    def write(number):
        for one in range(runs):
            with tracking.start("many", {"number": number, "one": one}) as run:
                for first in range(0, metrics, 10):
                    run.log({f"m{i}": 1000 * number + 100 * one + i for i in range(first, first + 10)})
                run.table("rows", pandas.DataFrame({"number": [number], "one": [one]}))

    # Imports take longest, so they are made once; nothing of the store is touched before the processes part.
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=write, args=(number,)) for number in range(writers)]
    for one in started:
        one.start()
    for one in started:
        one.join(400)
    sys.exit(any(one.exitcode for one in started))
""")


def environment(**changes):
    return {**os.environ, "OMP_NUM_THREADS": "1", **changes}


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
