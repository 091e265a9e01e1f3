"""What tests of sweeps and of servers that come and go share."""

from __future__ import annotations

import io
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console
from sqlalchemy import Engine, event
from support.headless import headless  # noqa: F401 - a fixture


@pytest.fixture(autouse=True, scope="session")
def _quick_commits():
    """sqlite does not wait for the disk: no test cuts the power, and a killed process loses nothing."""

    def connected(connection, _):
        if isinstance(connection, sqlite3.Connection):
            connection.execute("pragma synchronous = off")

    event.listen(Engine, "connect", connected)
    yield
    event.remove(Engine, "connect", connected)


@pytest.fixture
def console():
    """No terminal: plain lines, to be read back."""
    return Console(file=io.StringIO(), width=200)


class Health(BaseHTTPRequestHandler):
    code = 200

    def do_GET(self):
        self.send_response(self.code)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def health():
    """A server that answers with the code it is told to."""
    handler = type("Told", (Health,), {})
    with HTTPServer(("127.0.0.1", 0), handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        handler.uri = f"http://127.0.0.1:{made.server_port}"
        yield handler
        made.shutdown()
