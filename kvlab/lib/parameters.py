"""Check parameters that a user gives by name: a mistake becomes one sentence."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from kvlab.errors import KvlabError, nearest

PathText = Annotated[str, BeforeValidator(lambda x: os.fspath(x) if isinstance(x, os.PathLike) else x)]
"""The name of a file or folder as text, so that it can stand in a signature; path objects are taken, too."""


class Parameters(BaseModel):
    """Parameters as typed fields, frozen, so that they can be part of a signature.

    Raises:
        KvlabError: an unknown parameter, with the nearest known one, or a value that does not fit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str] = ""
    """Whose parameters they are; every error message begins with it."""
    called: ClassVar[str] = "parameter"
    """The word for a field in these messages."""

    def __init__(self, **given: Any):
        whose = f"{self.name}: " if self.name else ""
        unknown = sorted(set(given) - set(type(self).model_fields))
        if unknown:
            raise KvlabError(whose + nearest(unknown[0], type(self).model_fields, self.called))
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise KvlabError(whose + self._sentence(error.errors()[0])) from None

    def replace(self, **changes: Any) -> Self:
        """The same with other values, checked again (KvlabError for a parameter that does not exist or fit)."""
        return type(self)(**{**dict(self), **changes})

    @classmethod
    def _sentence(cls, problem: Mapping[str, Any]) -> str:
        """The mistake in the value of a field, or in several that do not fit together."""
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            return message
        return f"{problem['loc'][0]} = {problem['input']!r} is not right: {message[0].lower()}{message[1:]}"
