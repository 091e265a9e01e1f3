"""A store that is away for a while: calls wait, and are sent again when the store is back.

MLflow's and urllib3's own retries do not replace this module. They retry HTTP alone and no locked sqlite file, MLflow
refuses more than 10 retries, and no signal ends their waiting.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvlab.errors import KvlabError
from kvlab.lib.addresses import without_password
from kvlab.lib.durations import duration

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

RETRY_SECONDS = 600.0  # seconds
PAUSE = 2.0  # seconds between attempts to reach the store
SLICE = 0.05  # seconds until a flag that was set is noticed


class Flag:
    """Like threading.Event, but a signal's handler may set it while the same thread waits for it.

    An Event could hang there: the waiting thread may hold its lock when the handler wants it.
    """

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, seconds: float) -> bool:
        """Wait until it is set, or the seconds are over; returns whether it is set."""
        deadline = time.monotonic() + seconds
        while not self._set and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, SLICE))
        return self._set


class RetryingClient:
    """An MlflowClient whose calls outlast an absence of the store of up to KVLAB_PATIENCE seconds (600 by default).

    A call that fails because the store is away is sent again. Almost nothing that kvlab logs is harmed by being sent
    twice (metrics carry their time; tags and files replace themselves). Only a run may be created twice, if the answer
    to the first call was lost. The first one stays empty, and the next sweep marks it KILLED.

    Once a call has waited in vain, later calls raise KvlabError at once, until one succeeds: so a command ends soon.

    silence: why the store at an address does not answer, None where it does (`database.silence`).
    """

    def __init__(self, client: MlflowClient, silence: Callable[[str], str | None]) -> None:
        self._client, self._silence = client, silence
        self._lost = False
        self.give_up = Flag()  # once it is set, no call waits any longer

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._client, name)
        return self.with_retries(attribute) if callable(attribute) else attribute

    def with_retries(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which asks the same store, sent again while the store is away."""
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
                    if not self._away(error):
                        _hide_password(error)
                        if _is_forbidden(error):
                            raise KvlabError(
                                f"the MLflow store at {without_password(self._client.tracking_uri)} refuses the user: "
                                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
                            ) from error
                        raise
                    if not self._lost:
                        deadline = deadline or self._begin_to_wait()
                        self._lost = not self._wait(deadline)
                    if self._lost:
                        place = without_password(self._client.tracking_uri)
                        raise KvlabError(f"the MLflow store at {place} cannot be reached") from error
            if deadline:
                _tell("the MLflow store is back")
            self._lost = False
            return answer

        return wrapped

    def _away(self, error: Exception) -> bool:
        """Whether a call failed because the store was away or busy, and not because the store refused it."""
        from requests import ConnectionError, Timeout

        causes = (error, error.__cause__, error.__context__)
        cut_off = any(isinstance(cause, (ConnectionError, Timeout)) for cause in causes)
        return cut_off or "database is locked" in str(error) or not self._answers()

    def _answers(self) -> bool:
        return self._silence(self._client.tracking_uri) is None

    @staticmethod
    def _begin_to_wait() -> float:
        seconds = retry_seconds()
        if seconds:
            _tell(f"the MLflow store is away; logging waits for it, at most {duration(seconds)}")
        return time.monotonic() + seconds

    def _wait(self, deadline: float) -> bool:
        """Wait until the store answers; False where it has not by the deadline."""
        while time.monotonic() < deadline and not self.give_up.wait(PAUSE):
            if self._answers():
                return True
        return False


def _is_forbidden(error: Exception) -> bool:
    from mlflow.exceptions import MlflowException

    refusals = ("PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED")
    return isinstance(error, MlflowException) and (
        error.error_code in refusals or "failed with error code 401" in error.message
    )


def _hide_password(error: Exception) -> None:
    """Take the store's user and password out of what an error says, which may end in a notebook or a run's tag."""
    error.args = tuple(without_password(arg) if isinstance(arg, str) else arg for arg in error.args)
    if isinstance(message := getattr(error, "message", None), str):
        vars(error)["message"] = without_password(message)


def _tell(text: str) -> None:
    # The terminal may be closed by now. That must not break the call that waits.
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr)


def retry_seconds() -> float:
    """Seconds for which a store may be away (KVLAB_PATIENCE).

    Raises KvlabError where that is not a number from 0 on.
    """
    named = os.environ.get("KVLAB_PATIENCE", "").strip()
    try:
        seconds = float(named or RETRY_SECONDS)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise KvlabError(f"KVLAB_PATIENCE must be a number of seconds from 0 on, not {named!r}")
    return seconds
