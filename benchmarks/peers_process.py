"""A peer in an environment and a process of its own: made once in the cache, asked in JSON lines."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.inputs.packs import build_once, home
from kvlab.lib.files import brief

PINS = ("kvpress==0.5.5", "transformers==5.2.0", "torch==2.13.0")
"""Packages of the peer's environment, with their requirements; kvpress needs a transformers below 5.3."""
SIDE = Path(__file__).with_name("peers_kvpress.py")
PROJECT = Path(__file__).parents[1]


def environment() -> Path:
    """Where the peer's environment is, or would be: another one for other pins or another Python."""
    marks = f"{PINS}{sys.version_info[:2]}"
    return home() / "peers" / f"kvpress-{hashlib.sha256(marks.encode()).hexdigest()[:8]}"


def python_of(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def build(stage: Path) -> None:
    """Make the environment in the empty folder `stage`. Raises KvlabError where there is no network, say."""
    made = subprocess.run([sys.executable, "-m", "venv", str(stage)], capture_output=True, text=True)
    if made.returncode:
        raise KvlabError(f"an environment for {PINS[0]} could not be made: {last_words(made.stdout + made.stderr)}")
    order = [str(python_of(stage)), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "-q", *PINS]
    done = subprocess.run(order, capture_output=True, text=True)
    if done.returncode:
        said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise KvlabError(
            f"pip could not install {' '.join(PINS)} ({said[-1] if said else last_words(done.stderr)}); is there a "
            "network, or a package index that pip is configured for?"
        )


def python() -> Path:
    """The Python of the peer's environment, which is made when it is first asked for."""
    return python_of(build_once(environment(), build, f"making an environment with {' '.join(PINS)}"))


def last_words(text: str) -> str:
    return text.strip().rpartition("\n")[2] or "it said nothing"


def answer_of(line: str, name: str) -> dict[str, Any]:
    """One line of the peer's as what it says.

    Raises:
        KvlabError: it is no JSON object, or tells of an error.
    """
    try:
        answer = json.loads(line)
    except ValueError:
        raise KvlabError(f"{name} answered with something that is no JSON: {line.strip()[:60]!r}") from None
    if not isinstance(answer, dict):
        raise KvlabError(f"{name} answered with {brief(answer)} instead of an object")
    if "error" in answer:
        raise KvlabError(f"{name} failed: {answer['error']}")
    return answer


class Process:
    """`with Process(command, name) as peer: peer.ask("decode", ids=...)`."""

    def __init__(
        self, command: Sequence[str | Path], name: str = "kvpress", variables: Mapping[str, str] | None = None
    ):
        # The thread settings of this process hold there, too.
        variables = os.environ | {"PYTHONPATH": str(PROJECT), "HF_HUB_OFFLINE": "1", **(variables or {})}
        self.name, self._said = name, tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=variables,
        )

    def ask(self, what: str, **order: Any) -> dict[str, Any]:
        """The answer to one order. Raises KvlabError where the peer says that it failed, or is gone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **order}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            self._said.seek(0)
            why = "it was killed, perhaps for want of memory" if code < 0 else last_words(self._said.read())
            raise KvlabError(f"{self.name}'s process ended: {why}")
        return answer_of(line, self.name)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()


def loaded(folder: Path, variables: Mapping[str, str] | None = None) -> tuple[Process, dict[str, Any]]:
    """Start the peer with a folder's model; return it and its versions. `variables` are added to this environment's."""
    peer = Process([python(), SIDE], variables=variables)
    try:
        return peer, peer.ask("load", folder=str(folder))
    except BaseException:
        peer.__exit__()
        raise
