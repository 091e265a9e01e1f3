"""What a server of a test needs."""

from __future__ import annotations

import os
import socket


def environment(**changes):
    return {**os.environ, "OMP_NUM_THREADS": "1", **changes}


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
