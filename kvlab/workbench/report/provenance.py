"""The source of a kept number: the record of a run that is elsewhere or gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow.entities import Run

THOROUGH = ("full", "gpu")
"""The profiles that are shown instead of others, the most thorough one last; the quick one comes after all others."""


def thoroughness(profile: str) -> tuple[int, str]:
    """The order of profiles: the most thorough one first, the quick one last, a project's own between."""
    if profile in THOROUGH:
        return -1 - THOROUGH.index(profile), ""
    return int(profile == "quick"), profile


@dataclass(frozen=True)
class Origin:
    """The record of a run, from itself or from a kept line.

    Attributes:
        profile, signature, commit: as the run's tags had them; commit with `+changes` where files differed from it.
        machine: the hardware, where the run named it; of a claim's line, where any run of the same computer did.
        seconds: how long the run took; None where it has not ended.
        parameters: the number of the model's weights; None where neither the run nor the catalogue has it.
        remarks: the parts that the run went without, as `ledger_models.remarks` names them.
    """

    profile: str = ""
    signature: str = ""
    commit: str = ""
    machine: str = ""
    seconds: int | None = None
    parameters: int | None = None
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: Run) -> Origin:
        """Read the tags of a run of the store; its parameters and remarks are read elsewhere (`ledger_models`)."""
        tags = run.data.tags
        known = (tags.get(tag, "") for tag in ("kvlab.profile", "signature", "kvlab.commit", "hardware"))
        info = run.info
        return cls(*known, seconds=round((info.end_time - info.start_time) / 1000) if info.end_time else None)
