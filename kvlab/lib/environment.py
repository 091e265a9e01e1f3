"""Environment variables of a process that kvlab owns: a command, a job, the lab, a benchmark. A plain import sets none.

Processes and kernels that such a process starts inherit them.
"""

from __future__ import annotations

import os

SPINS = "2000"
KERNELS = "256"


def configure() -> None:
    """Set what kvlab recommends, where the user has set nothing. Call it before torch and MLflow are imported."""
    # With other work on the machine torch's threads spin while they wait for one that the system has suspended:
    # several times slower on two cores. After a short spin they sleep. The OpenMP library reads this when it is loaded.
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
    # oneDNN, and torch's layer over it, cache a kernel of half a megabyte for each shape, and each prompt length is a
    # new shape. 256 are enough for the blocks of 8k tokens (`core/onednn.py`); for longer prompts making kernels
    # again costs a tenth of the attention. The libraries' own limits of 1024 would fill half a gigabyte.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KERNELS)
    os.environ.setdefault("LRU_CACHE_CAPACITY", KERNELS)
    without_telemetry()


def without_telemetry() -> None:
    """Turn off MLflow's telemetry, unless the user has set it. Call it before MLflow is imported."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
