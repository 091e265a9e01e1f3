"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from kvlab.errors import KvlabError
from kvlab.lib.files import expanded, located

Number = TypeVar("Number")
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps, xpu.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16, float16.")]
Model = Annotated[str, typer.Option("--model", help="Name, folder, GGUF file or Hugging Face id.")]
Storages = Annotated[
    str,
    typer.Option("--storage", help="Names from `kvlab list storages`, or pairs for keys/values: int8,turbo-4/kivi-2."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON list of objects.")]


def names(text: str) -> list[str]:
    """The parts of a text between its commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def policies(text: str) -> list[str]:
    """The policies of an option, among which may be "all". Raises KvlabError for an unknown one."""
    from kvlab.lib import policy_names

    wanted = names(text)
    policy_names.check(name for name in wanted if name != "all")
    return wanted


def models(choices: Iterable[str]) -> list[str]:
    """The models of an option that takes several, each once; a folder or a file is named from the root of the disk."""
    named = [name for text in choices for name in ([text] if os.path.exists(expanded(text)) else names(text) or [""])]
    if "" in named:
        raise KvlabError("--model names no model; `kvlab list models` says which there are")
    return list(dict.fromkeys(located(name) for name in named))


def entries(text: str) -> int | float:
    """A budget: whole numbers are entries, numbers with a point are fractions of the prompt."""
    return float(text) if "." in text else int(text)


def numbers(text: str, option: str, kind: Callable[[str], Number]) -> list[Number]:
    """The numbers between the commas of an option's text, each read by `kind`."""
    try:
        return [kind(part) for part in names(text)]
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers with commas between them, not {text!r}") from None


def overrides(pairs: Iterable[str]) -> dict[str, str]:
    """Texts like KEY=VALUE as a mapping; a value that names a file becomes its absolute path."""
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"a parameter is given as key=value, not {pair!r}")
        values[key.strip()] = located(value)
    return values


def task_parameters(pairs: Iterable[str]) -> dict[str, Any]:
    """KEY=VALUE as a mapping, with the values read as YAML: numbers, tuples, true and false, or texts."""
    from kvlab.lib import yaml_loader

    parameters = {}
    for key, value in overrides(pairs).items():
        try:
            parameters[key] = yaml_loader.value(value)
        except ValueError:
            raise typer.BadParameter(f"the value of {key} is no YAML: {value[:80]!r}") from None
    return {key: tuple(value) if isinstance(value, list) else value for key, value in parameters.items()}


def named_after(model: str, suffix: str) -> Path:
    """The file here for what was learnt of a model, where `--out` names none: MODEL-heads.json."""
    return Path(re.sub(r"[^\w.-]+", "-", model) + suffix)


def check_out(out: Path | None) -> None:
    """Raise KvlabError if `--out` is not a file that could be written: a command calls this before its work."""
    if out is not None and out.is_dir():
        raise KvlabError(f"--out {out} is a folder; name a file in it")
    if out is not None and not out.absolute().parent.is_dir():
        raise KvlabError(f"there is no folder {out.absolute().parent} to write {out.name} into")
