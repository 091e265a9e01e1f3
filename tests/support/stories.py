"""What tests of told figures share: made-up findings, and the checks of what is told."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

import pandas

from kvlab.analyses.findings import Findings


def around(value, width=0.01):
    """A value, and an interval that reaches `width` to either side."""
    return value, (value - width, value + width)


def findings_of(effects: dict, table: pandas.DataFrame) -> Findings:
    """Findings of made-up values: by effect, a list of (value, keys); each interval reaches 0.02 to either side."""
    findings = Findings(table)
    for effect, rows in effects.items():
        for value, keys in rows:
            findings.set(effect, *around(value, 0.02), **keys)
    return findings


def counted(sentences: list[str]) -> list[str]:
    """The sentences that a reader counts, however they were put into the list; each begins and ends as one does."""
    text = " ".join(sentence for sentence in sentences if sentence)
    # An equation's number goes on after its full stop.
    found = re.split(r"(?<=[.?]) (?=\S)(?<!\beq\. )", text)
    assert all(re.fullmatch(r"\S.*\.", sentence) and "  " not in sentence for sentence in found), found
    return found


def told(sentences: list[str]) -> str:
    """As one paragraph, which has the length of a story: two to four sentences."""
    assert 2 <= len(counted(sentences)) <= 4, sentences
    return " ".join(sentence for sentence in sentences if sentence)


def unmeasured(sentences: list[str]) -> str:
    """The one sentence of a figure whose numbers were not measured."""
    (sentence,) = counted(sentences)
    return sentence


def called(trees: Iterable[ast.AST], through: str) -> set[str]:
    """The functions of modules, in full, that are called within the arguments of calls of `through`.

    Args:
        trees: of files, each with its own imports.
        through: the name of a function or a method; of `record` only the argument `text` counts.
    """
    found = set()
    for tree in trees:
        nodes = list(ast.walk(tree))
        modules = {
            name.asname or name.name: f"{node.module}.{name.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        given = [
            argument
            for node in nodes
            if isinstance(node, ast.Call) and through in ast.unparse(node.func).split(".")
            for argument in (
                [each.value for each in node.keywords if each.arg == "text"] if through == "record" else node.args
            )
        ]
        while given:
            node = given.pop()
            call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            module = modules.get(ast.unparse(node.func.value), "") if call else ""
            if module.startswith(("kvlab.analyses", "kvlab.render.stories")):
                found.add(f"{module}.{node.func.attr}")  # what it is given tells nothing itself
            else:
                given += ast.iter_child_nodes(node)
    return found
