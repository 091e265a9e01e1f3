"""The text of each token of a trace, from a tokenizer on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlab.inputs import models
from kvlab.inputs.token_texts import token_texts

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.traces.trace import Trace


def texts(trace: Trace, lm: LM | None = None) -> list[str]:
    """The text of each token of a trace as `token_texts` gives it; numbers in brackets where there is no tokenizer."""
    if trace.ids is None:
        return [f"[{position}] " for position in range(trace.length)]
    # Only a model on this machine: a view must never start a download.
    name = str(trace.meta.get("model", "")).split("@")[0]
    tokenizer: Any = lm.tokenizer if lm is not None else models.tokenizer(name)
    return token_texts(trace.ids.tolist(), tokenizer)
