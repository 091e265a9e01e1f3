"""Sequences that go on in one batch, each compressed in a session of its own, until each has ended.

A row is what it would be alone, and what it holds is counted in its own session: no padding is stored or read. The
batch reads the weights once for each step, not once for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvlab.core import hookable
from kvlab.live.session import Session, compress
from kvlab.methods.full import Full

if TYPE_CHECKING:
    from kvlab.inputs.models import LM


TOGETHER = 8
"""Sequences that go on in one batch where nobody says how many: enough to share the reading of the weights, few enough
for a laptop's memory.
"""


def batch_size(lm: LM, wanted: int = TOGETHER) -> int:
    """Return how many sequences of a model go on in one batch, `wanted` at most.

    It is one where the model has layers that no policy compresses: their sequences cannot leave a batch one by one.
    """
    return 1 if hookable.layout_of(lm.model).others else wanted


class Row(Protocol):
    """A sequence whose prompt has ended.

    Attributes:
        session: holds its cache.
        next: the token to feed next; None once the sequence has ended.
    """

    session: Session
    next: int | None

    def accept_logits(self, logits: Tensor) -> None:
        """Take the logits `[vocabulary]` behind the token that was fed, and set `next`."""
        ...

    def end(self, running: Session) -> None:
        """Called once, when a sequence that was fed has ended; `running`: the session in which it went on."""
        ...


@torch.inference_mode()
def decode_batch(lm: LM, rows: Sequence[Row]) -> None:
    """Feed all rows, token by token in one batch, until none wants another token."""
    left = [row for row in rows if row.next is not None]
    with compress(lm.model, Full(), turns="leave") as running:
        while left:
            past, whole = running.join([row.session for row in left]), len(left)
            while len(left) == whole:
                ids = torch.tensor([[row.next] for row in left], device=lm.device)
                logits = lm.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1).logits[:, -1]
                for row, of_row in zip(left, logits, strict=True):
                    row.accept_logits(of_row)
                    if row.next is None:
                        row.end(running)
                left = [row for row in left if row.next is not None]
