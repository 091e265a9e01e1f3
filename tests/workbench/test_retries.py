"""What shall be logged outlasts a store that is away; what it refuses is refused at once."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing

import pytest
import requests
from mlflow.exceptions import MlflowException

from kvlab.errors import KvlabError
from kvlab.workbench.store import database, retries


class Sender:
    """Stands in for MlflowClient: fails while the store is away, and counts what it was asked."""

    def __init__(self, health, failures, cause=None):
        self.tracking_uri, self.health, self.failures, self.cause = health.uri, health, failures, cause
        self.calls = 0

    def log_batch(self, run, metrics=()):
        self.calls += 1
        if self.calls <= self.failures:
            raise MlflowException("API request failed") from self.cause
        self.health.code = 200
        return run, metrics


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(retries, "PAUSE", 0.02)
    monkeypatch.setenv("KVLAB_PATIENCE", "20")


def back_after(health, seconds):
    threading.Timer(seconds, lambda: setattr(health, "code", 200)).start()


@pytest.mark.parametrize("code", database.PROXY_WITHOUT_SERVER)
def test_a_call_is_sent_again_when_the_store_is_back(health, capsys, code):
    health.code = code
    sender = Sender(health, failures=1)
    back_after(health, 0.2)
    assert retries.RetryingClient(sender, database.silence).log_batch("run", metrics=[1]) == ("run", [1])
    assert sender.calls == 2
    said = capsys.readouterr().err
    assert "is away" in said and "at most 20 s" in said and "is back" in said


@pytest.mark.parametrize("code", [200, 401, 404])
def test_what_the_store_refuses_is_not_sent_again(health, capsys, code):
    health.code = code
    sender = Sender(health, failures=1)
    with pytest.raises(MlflowException):
        retries.RetryingClient(sender, database.silence).log_batch("run")
    assert sender.calls == 1 and not capsys.readouterr().err


def test_a_server_that_hangs_but_says_it_is_well_is_waited_for(health):
    sender = Sender(health, failures=3, cause=requests.Timeout("read timed out"))
    assert retries.RetryingClient(sender, database.silence).log_batch("run") == ("run", ())
    assert sender.calls == 4


def test_patience_runs_out_once_and_not_for_every_call(health, monkeypatch):
    monkeypatch.setenv("KVLAB_PATIENCE", "0.5")
    health.code = 503
    sender = Sender(health, failures=10)
    client = retries.RetryingClient(sender, database.silence)
    begun = time.monotonic()
    with pytest.raises(KvlabError, match="cannot be reached"):
        client.log_batch("run")
    assert time.monotonic() - begun >= 0.5
    asked = []
    monkeypatch.setattr(client, "_wait", asked.append)
    for _ in range(5):
        with pytest.raises(KvlabError, match="cannot be reached"):
            client.log_batch("run")
    assert not asked
    sender.failures = 0
    client.log_batch("run")
    health.code, sender.failures, sender.calls = 503, 1, 0
    monkeypatch.undo()
    monkeypatch.setattr(retries, "PAUSE", 0.02)
    back_after(health, 0.1)
    assert client.log_batch("run") == ("run", ())


def test_whoever_gives_up_does_not_wait(health):
    health.code = 503
    client = retries.RetryingClient(Sender(health, failures=10), database.silence)
    client.give_up.set()
    with pytest.raises(KvlabError, match="cannot be reached"):
        client.log_batch("run")


def test_a_locked_sqlite_store_is_waited_for(project):
    """Longer than sqlite itself waits (five seconds), as on a slow shared disk."""
    client = database.client()
    with closing(sqlite3.connect(database.database_path(database.store_uri()), check_same_thread=False)) as other:
        other.execute("begin exclusive")
        threading.Timer(7, other.rollback).start()
        assert client.create_experiment("waited")
    assert client.get_experiment_by_name("waited") is not None


@pytest.mark.parametrize("wrong", ["soon", "-1", "inf", "nan"])
def test_patience_is_a_number_of_seconds(monkeypatch, wrong):
    monkeypatch.setenv("KVLAB_PATIENCE", wrong)
    with pytest.raises(KvlabError, match="KVLAB_PATIENCE must be a number of seconds"):
        retries.retry_seconds()
