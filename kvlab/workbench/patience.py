"""A store that is away for a while: what shall be logged waits in memory, and is sent when the store is back."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvlab.errors import KvlabError
from kvlab.workbench.progress import duration

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

PATIENCE = 600.0    # seconds
PAUSE = 2.0         # seconds between looks whether it is back


class Patient:
    """An MlflowClient whose calls outlast an absence of the store of up to KVLAB_PATIENCE seconds (600 by default).

    All that kvlab logs may be sent twice without harm (metrics with their time, tags, files), but for a run that was
    created while its answer was lost: it stays empty, and the next sweep marks it KILLED. Once patience has run out,
    nothing waits any more until a call has succeeded, so that a command ends soon.
    """

    def __init__(self, client: MlflowClient) -> None:
        self._client = client
        self._lost = False
        self.give_up = threading.Event()    # set by whoever must not wait any longer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return self._patiently(found) if callable(found) else found

    def _patiently(self, call: Callable[..., Any]) -> Callable[..., Any]:
        from mlflow.exceptions import MlflowException
        from requests import RequestException

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            deadline = None
            while True:
                try:
                    answer = call(*args, **kwargs)
                    break
                except (MlflowException, RequestException) as error:
                    if self._lost or not self._away(error):
                        raise
                    deadline = deadline or self._begin_to_wait()
                    if not self._wait(deadline):
                        self._lost = True
                        raise
            if deadline:
                print("the MLflow store is back", file=sys.stderr)
            self._lost = False
            return answer

        return wrapped

    def _away(self, error: Exception) -> bool:
        """Whether a call failed since the store was away or busy, and not since it refused."""
        from requests import ConnectionError, Timeout

        causes = (error, error.__cause__, error.__context__)
        cut_off = any(isinstance(one, (ConnectionError, Timeout)) for one in causes)
        return cut_off or "database is locked" in str(error) or not self._answers()

    def _answers(self) -> bool:
        from kvlab.workbench import store

        return store.silence(self._client.tracking_uri) is None

    @staticmethod
    def _begin_to_wait() -> float:
        seconds = patience()
        if seconds:
            print(f"the MLflow store is away; what shall be logged waits for it, at most {duration(seconds)}",
                  file=sys.stderr)
        return time.monotonic() + seconds

    def _wait(self, deadline: float) -> bool:
        """Until the store answers; False where patience runs out before."""
        while time.monotonic() < deadline and not self.give_up.wait(PAUSE):
            if self._answers():
                return True
        return False


def patience() -> float:
    """Seconds for which a store may be away (KVLAB_PATIENCE).

    Raises KvlabError where that is not a number from 0 on.
    """
    named = os.environ.get("KVLAB_PATIENCE", "").strip()
    try:
        seconds = float(named or PATIENCE)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise KvlabError(f"KVLAB_PATIENCE must be a number of seconds from 0 on, not {named!r}")
    return seconds
