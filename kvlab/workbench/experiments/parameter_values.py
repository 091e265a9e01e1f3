"""Values of parameters: read from text of a command line, checked against a notebook's default, as plain JSON."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.lib import yaml_loader
from kvlab.lib.files import expanded, located, writable


def read(text: str, default: Any) -> Any:
    """Read a command line's text as a value for a notebook's default such as `default`.

    A list may be given as JSON, with commas, or as its only entry.
    """
    if isinstance(default, str):
        return text
    if isinstance(default, list) and all(isinstance(entry, str) for entry in default) and _is_file(text):
        return [located(text)]  # one file, whose name may hold a comma
    if isinstance(default, float):
        try:
            return float(text)
        except ValueError:
            pass
    if isinstance(default, list) and not text.lstrip().startswith("["):
        text = f"[{text}]"
    try:
        value = yaml_loader.value(text)
    except ValueError:
        return text
    if isinstance(default, list) and isinstance(value, list) and default and isinstance(default[0], str):
        return [located(str(entry)) for entry in value]
    return value


def _is_file(text: str) -> bool:
    return len(text) < 500 and "\0" not in text and os.path.isfile(expanded(text))


def checked(name: str, value: Any, default: Any, where: str) -> Any:
    """`value` as plain JSON, if it has the type of the notebook's default, or is null for a text; else KvlabError."""
    value = plain(value, f"parameter {name!r} of {where}")
    if default is None or (value is None and isinstance(default, str)):  # a text may be left out
        return value
    if not _fits(value, default):
        raise KvlabError(
            f"parameter {name!r} of {where} must be {_type_name(default)}, such as {default!r}; got {short(value)}"
        )
    return float(value) if isinstance(default, float) and isinstance(value, int | float) else value


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, (int, float)):
        kinds = (int, float) if isinstance(default, float) else int
        right = isinstance(value, kinds) and not isinstance(value, bool)
        return right and (isinstance(default, int) or abs(value) <= sys.float_info.max)
    if isinstance(default, list):
        if not isinstance(value, list):
            return False
        numeric = any(isinstance(entry, float) for entry in default)
        return not default or all(_fits(entry, 0.5 if numeric else default[0]) for entry in value)
    return isinstance(value, type(default))


def _type_name(default: Any) -> str:
    if isinstance(default, list):
        kinds = {"texts": str, "whole numbers": int, "numbers": (int, float)}
        named = next((word for word, kind in kinds.items() if all(isinstance(entry, kind) for entry in default)), "")
        return f"a list of {named}" if default else "a list"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "a mapping"}
    return names.get(type(default), type(default).__name__)


def listed(value: Any) -> list[Any]:
    """The entries of a parameter that may be a list or its only entry."""
    return value if isinstance(value, list) else [value]


def texts(value: Any) -> list[str]:
    """The texts of a parameter that may be a list of them or one."""
    return [text for text in listed(value) if isinstance(text, str)]


def plain(value: Any, label: str = "value") -> Any:
    """`value` in plain JSON types: papermill turns tuples into strings and refuses numpy numbers and paths."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if not writable(value):
            raise KvlabError(f"{label} holds half a character (a lone surrogate), which no file can hold")
        return value
    if isinstance(value, int):
        if value.bit_length() > yaml_loader.BITS:
            raise KvlabError(f"{label} is a number of thousands of digits")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise KvlabError(f"{label} is {value}, which is no plain number")
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise KvlabError(f"{label} has the key {short(key)}, and a key is a text: put it in quotes")
        return {plain(key, label): plain(entry, label) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry, label) for entry in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy and torch, neither of which is imported for this
        return plain(value.tolist(), label)
    raise KvlabError(f"{label} has the type {type(value).__name__}, which does not fit into JSON")


def short(value: Any) -> str:
    """A value for an error message, cut after 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
