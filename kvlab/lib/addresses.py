"""Addresses as they may be shown: without the user and the password that they may hold."""

from __future__ import annotations

import re

# A password may hold any sign but those that end an address; what stands before the last `@` is the user's.
USERINFO = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^\s/'\"<>]*@", re.IGNORECASE)


def without_password(text: str) -> str:
    """A text, in which every address has lost its user and password.

    >>> without_password("no answer from http://ada:secret@tracking:5000/api")
    'no answer from http://tracking:5000/api'
    """
    return USERINFO.sub(r"\g<scheme>", text)
