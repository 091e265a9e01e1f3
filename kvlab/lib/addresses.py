"""Addresses as they may be shown: without the user and the password that they may hold."""

from __future__ import annotations

import re

# A password may hold any sign but those that end an address. The part before the last `@` is the user's.
USERINFO = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^\s/'\"<>]*@", re.IGNORECASE)
# Drivers of databases also take the password after the `?`.
QUERY = re.compile(r"(?P<name>[?&](?:password|passwd|pwd|token)=)[^\s&'\"<>]*", re.IGNORECASE)


def without_password(text: str) -> str:
    """A text, in which every address has lost its user, and its password wherever it stands.

    >>> without_password("no answer from http://ada:secret@tracking:5000/api")
    'no answer from http://tracking:5000/api'
    >>> without_password("mysql://tracking/runs?user=ada&password=secret&ssl=1")
    'mysql://tracking/runs?user=ada&password=...&ssl=1'
    """
    return QUERY.sub(r"\g<name>...", USERINFO.sub(r"\g<scheme>", text))
