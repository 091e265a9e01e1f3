"""Describe in one sentence why a file does not fit its model; an unknown key comes first."""

from __future__ import annotations

import typing
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from kvlab.errors import nearest


def first_problem(error: ValidationError) -> Any:
    """The problem to tell: an unknown key rather than the one that is missing for it."""
    problems = error.errors()
    return next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])


def unknown_key(root: type[BaseModel], place: Sequence[str | int], hidden: Collection[str] = ()) -> str:
    """The sentence for a key that is none, with the nearest of those that there are, less the `hidden` ones.

    >>> class Point(BaseModel):
    ...     height: float
    >>> unknown_key(Point, ["heigt"])
    "unknown key 'heigt'; did you mean 'height'?"
    """
    *above, key = place
    models = [root]
    for part in above:
        within = [each for model in models if part in model.model_fields for each in _below(model, str(part))]
        tagged = [model for model in models if part in _tags(model)]
        models = within or tagged or models
    keys = {field.alias or name for model in models for name, field in model.model_fields.items()}.difference(hidden)
    where = ".".join(str(part) for part in above if isinstance(part, str))
    return nearest(str(key), keys, f"key in {where}" if where else "key")


def _below(model: type[BaseModel], field: str) -> list[type[BaseModel]]:
    return list(dict.fromkeys(_models(model.model_fields[field].annotation)))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type, whatever they are wrapped in."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def _tags(model: type[BaseModel]) -> set[Any]:
    """The values by which a union tells a model from others."""
    return {tag for field in model.model_fields.values() for tag in typing.get_args(field.annotation)}
