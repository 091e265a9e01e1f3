"""YAML files that people write: the safe loader reads them, and every error names its line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kvlab.errors import KvlabError
from kvlab.lib.files import read_text, writable

# With aliases a small file can stand for huge data. No file of kvlab comes near this many values or characters.
LARGEST = 200_000
LONGEST = 500_000
BITS = 8192


class Lines:
    """Where each value of a YAML file stands: the line of a key or of an entry, from 1."""

    def __init__(self) -> None:
        self._found: dict[tuple[str | int, ...], int] = {}

    def note(self, place: tuple[str | int, ...], line: int) -> None:
        self._found.setdefault(place, line)

    def at(self, place: Sequence[str | int]) -> int | None:
        """The line of the value at a path of keys and indices, or of the nearest that contains it."""
        # A checker may add steps of its own to a path, such as the branch of a union.
        for end in range(len(place), 0, -1):
            if tuple(place[:end]) in self._found:
                return self._found[tuple(place[:end])]
        return None

    def shown(self, place: Sequence[str | int]) -> str:
        """ ", line 7" for a place that is known, else "": to follow a file's name in a message."""
        line = self.at(place)
        return f", line {line}" if line else ""


def value(text: str) -> Any:
    """The value that a text stands for on a command line. Raises ValueError where it is no YAML."""
    try:
        return yaml.safe_load(text)
    # PyYAML raises these for a date that does not exist and for deep nesting.
    except (yaml.YAMLError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def load(path: Path) -> tuple[Any, Lines]:
    """The plain data of a YAML file, and the lines of its values.

    Raises:
        KvlabError: it cannot be read, is not valid YAML, has a key twice, refers to itself or is too large.
    """
    text = read_text(path)
    if len(text) > LONGEST:
        raise KvlabError(f"{path.name} has more than {LONGEST:,} characters; no file of kvlab is that large")
    lines = Lines()
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _walk(node, (), lines, path.name, [], {})
        # From the same nodes that were checked.
        data = loader.construct_document(node)
        _writable(data, lines, path.name)
        return data, lines
    except yaml.YAMLError as error:
        raise KvlabError(f"{path.name} is not valid YAML{_where(error)}: {_problem(error)}") from None
    except RecursionError:
        raise KvlabError(f"{path.name} is nested too deeply to be one of kvlab's files") from None
    # A date or a number that Python cannot hold, or a value that does not fit its tag.
    except (ValueError, OverflowError, LookupError, AttributeError) as error:
        raise KvlabError(f"{path.name} is not valid YAML: {error}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _walk(node: yaml.Node, place: tuple, lines: Lines, name: str, within: list[int], sizes: dict[int, int]) -> int:
    """Note the lines of the values below a node, and count these values with all aliases written out."""
    if id(node) in within:
        raise KvlabError(f"{name}, line {node.start_mark.line + 1}: an alias refers to what contains it")
    if id(node) in sizes:
        return sizes[id(node)]
    within.append(id(node))
    size = 1
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            word = key.value if isinstance(key, yaml.ScalarNode) else None
            if word in seen and word is not None:
                raise KvlabError(f"{name}, line {line}: the key '{word}' is there twice")
            seen.add(word)
            # No file of kvlab has a key that is not a scalar; the check of the data refuses such a file.
            below = (*place, "" if word is None else word)
            lines.note(below, line)
            size += _walk(value, below, lines, name, within, sizes)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            lines.note((*place, number), value.start_mark.line + 1)
            size += _walk(value, (*place, number), lines, name, within, sizes)
    if size > LARGEST:
        raise KvlabError(f"{name} stands for more than {LARGEST:,} values; no file of kvlab is that large")
    within.pop()
    sizes[id(node)] = size
    return size


def _writable(value: Any, lines: Lines, name: str, place: tuple = ()) -> None:
    """Raise KvlabError for a text or a number that could not be written down again."""
    if isinstance(value, dict):
        for key, entry in value.items():
            _writable(key, lines, name, (*place, str(key)))
            _writable(entry, lines, name, (*place, str(key)))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            _writable(entry, lines, name, (*place, number))
    elif isinstance(value, str) and not writable(value):
        raise KvlabError(f"{name}{lines.shown(place)}: half a character (a lone surrogate)")
    elif isinstance(value, int) and value.bit_length() > BITS:
        raise KvlabError(f"{name}{lines.shown(place)}: a number of thousands of digits")


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _problem(error: yaml.YAMLError) -> str:
    said = getattr(error, "problem", None) or str(error)
    return " ".join(str(said).split())
