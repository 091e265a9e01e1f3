"""The text of each token of a trace, from a tokenizer on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlab.inputs import models

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.traces.trace import Trace

CUT = 8  # tokens that one character may be cut into


def texts(trace: Trace, lm: LM | None = None) -> list[str]:
    """The text of each token of a trace; numbers in brackets where there is no tokenizer. If a character is cut into
    several tokens, the first has its text, the others have none.
    """
    if trace.ids is None:
        return [f"[{position}] " for position in range(trace.length)]
    # Only a model on this machine: a view must never start a download.
    name = str(trace.meta.get("model", "")).split("@")[0]
    tokenizer: Any = lm.tokenizer if lm is not None else models.tokenizer(name)
    ids = trace.ids.tolist()
    if tokenizer is None:
        return [f"[{number}] " for number in ids]
    shown, before, at = [], 0, 0
    while at < len(ids):
        ends = range(at + 1, min(at + CUT, len(ids)) + 1)
        pieces = ((end, _piece(tokenizer, ids[before:at], ids[at:end])) for end in ends)
        end, piece = next(
            (candidate for candidate in pieces if not candidate[1].endswith("\ufffd")),
            (at + 1, tokenizer.decode(ids[at : at + 1])),
        )
        shown += [piece, *[""] * (end - at - 1)]
        before, at = at, end
    return shown


def _piece(tokenizer: Any, before: list[int], ids: list[int]) -> str:
    """The text that tokens add to those before them: decoded alone, some tokenizers drop their leading space."""
    context, both = tokenizer.decode(before), tokenizer.decode(before + ids)
    return both[len(context) :] if both.startswith(context) else tokenizer.decode(ids)
