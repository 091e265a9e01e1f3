"""How a sweep is asked to stop: by Ctrl-C, by the signal of `kill`, or by a terminal that is closed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from kvlab.workbench.store.retries import Flag

ASKING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Flag]:
    """A flag that these signals set while the block runs; the sweep looks at it between its steps.

    The handlers only set the flag. If they raised an exception, Python would raise it wherever it happens to be, and
    lose it if that is in an object's `__del__`. A second Ctrl-C does raise KeyboardInterrupt, for a user who is in
    a hurry.
    """
    asked = Flag()

    def ask(number: int, _: object) -> None:
        # Only a second Ctrl-C: a terminal that is closed sends SIGHUP twice by itself.
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked  # Python hands signals to the main thread only, so nothing can be set up here
        return
    # A signal that is ignored stays ignored: `nohup` wants that.
    before = {number: signal.signal(number, ask) for number in ASKING if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
