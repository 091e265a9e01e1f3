"""A store whose address holds a user and a password: they are used, and shown nowhere."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.commands import call

from kvlab import KvlabError
from kvlab.lib.addresses import without_password
from kvlab.workbench.store import database

SECRET = "s3cr3t-word"


@pytest.fixture
def guarded(monkeypatch):
    """The address of a server that answers only to user `ada` with the password SECRET, and what it was asked."""
    asked = []

    class Guard(BaseHTTPRequestHandler):
        def do_GET(self):
            wanted = "Basic " + base64.b64encode(f"ada:{SECRET}".encode()).decode()
            known = self.headers.get("Authorization") == wanted
            asked.append((self.path, known))
            body = json.dumps({"experiments": []} if known else {"error_code": "PERMISSION_DENIED"}).encode()
            self.send_response(200 if known else 401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Guard)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    database._ready.cache_clear()
    monkeypatch.setenv("KVLAB_PATIENCE", "0")
    yield f"127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    database._ready.cache_clear()


def test_a_server_is_asked_with_user_and_password(guarded, monkeypatch):
    host, asked = guarded
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://ada:{SECRET}@{host}")
    assert list(database.client().search_experiments()) == []
    assert asked and all(known for _, known in asked)
    assert database.shown_uri() == f"http://{host}"


def test_what_a_server_refuses_is_told_without_the_password(guarded, monkeypatch):
    host, _ = guarded
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://ada:{SECRET}-no@{host}")
    with pytest.raises(KvlabError, match="refuses the user: set MLFLOW_TRACKING_USERNAME") as caught:
        database.client().search_experiments()
    assert SECRET not in repr(caught.value) + str(caught.value)


@pytest.mark.parametrize("scheme", ["http://ada:{}@127.0.0.1:9", "postgresql://ada:{}@127.0.0.1:9/db", "file:{}"])
@pytest.mark.parametrize("command", [("report",), ("doctor",), ("run", "quickstart"), ("reproduce",)])
def test_a_store_that_cannot_be_reached_is_named_without_its_password(project, command, scheme, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", scheme.format(SECRET if "@" in scheme else "folder"))
    monkeypatch.setenv("KVLAB_PATIENCE", "0")
    database._ready.cache_clear()
    code, out, err = call(capfd, *command)
    assert code != 0 and SECRET not in out + err
    assert "Traceback" not in err
    written = [path for path in project.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not written


def test_a_folder_is_refused_before_a_model_is_loaded(project, monkeypatch, capsys):
    from kvlab.inputs import models

    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    database._ready.cache_clear()
    for uri in ("file:./mlruns", "./mlruns", str(project / "mlruns")):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        code, _, said = call(capsys, "eval", "needle", "--policies", "snapkv", "--limit", "1")
        assert code == 1 and "plain folders" in said and "sqlite:///mlruns/mlflow.db" in said
        with pytest.raises(KvlabError, match="plain folders"):
            database.ensure_store()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://a:b@host:5000/x", "http://host:5000/x"),
        ("https://a:p@ss@host/x and postgresql+psycopg2://u:p@db/y", "https://host/x and postgresql+psycopg2://db/y"),
        ("mail ada@host, http://host/a@b", "mail ada@host, http://host/a@b"),
        ("mysql://h/x?user=a&password=p&ssl=1 away", "mysql://h/x?user=a&password=...&ssl=1 away"),
        ("sqlite:////tmp/a@b/mlflow.db", "sqlite:////tmp/a@b/mlflow.db"),
    ],
)
def test_user_and_password_leave_an_address_and_nothing_else_does(text, shown):
    assert without_password(text) == shown
