"""The sequences of a batch that share a length, in one layer of a live session."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlab.core.store import LayerStore
from kvlab.instruments.probes import Shadow
from kvlab.methods import Policy


@dataclass
class Group:
    """Sequences of a batch that share a length, and their entries in one layer."""

    rows: Tensor | None  # which of the batch; None for all of them
    store: LayerStore
    padded: bool = True  # whether padding may still be stored: until the first prompt has ended
    shadow: Shadow | None = None
    kept: Tensor | None = None  # positions after the prefill
    lossy: bool = False  # whether the store ever lost or merged an entry
    policy: Policy | None = None  # of sequences that were joined from another session; None for the session's own

    def note_loss(self) -> None:
        """To be called where the policy may have changed the store."""
        self.lossy = self.lossy or self.store.length < self.store.seen or self.store.merged

    def of(self, x: Tensor) -> Tensor:
        return x if self.rows is None else x[self.rows.to(x.device)]

    def kv_bytes(self, policy: Policy) -> int:
        """Bytes of what is stored of keys and values; `policy` is the session's."""
        policy = self.policy or policy
        return self.store.kv_bytes - (int(policy.discount_bytes(self.store)) if self.store.compressed else 0)

    def numbers(self, batch: int) -> list[int]:
        return list(range(batch)) if self.rows is None else self.rows.tolist()

    def reorder(self, rows: Tensor) -> None:
        """The sequences `rows` of this group instead of the present ones, with all that is known of them."""
        self.store.reorder(rows.to(self.store.device))
        if self.shadow is not None:
            self.shadow.store.reorder(rows.to(self.shadow.store.device))
        if self.kept is not None:
            self.kept = self.kept[rows.to(self.kept.device)]
