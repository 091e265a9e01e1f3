"""What a kept number comes from: the run is elsewhere or gone, and this is what was written down of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

THOROUGH = ("full", "gpu")


def thoroughness(profile: str) -> tuple[int, str]:
    """The order of profiles: the most thorough one first, the quick one last, a project's own between."""
    if profile in THOROUGH:
        return -1 - THOROUGH.index(profile), ""
    return int(profile == "quick"), profile


@dataclass(frozen=True)
class Origin:
    """What a kept line says of its run.

    Attributes:
        profile, signature, commit: as the run's tags had them; commit with `+changes` where files differed from it.
        machine: the hardware, where any run of the same computer named it.
        seconds: how long the run took.
        parameters: the number of the model's weights; None where neither the run nor the catalogue told.
        remarks: what the run went without, as `subjects.remarks` says it.
        file: the kept ledger that says so.
    """

    profile: str = ""
    signature: str = ""
    commit: str = ""
    machine: str = ""
    seconds: int | None = None
    parameters: int | None = None
    remarks: tuple[str, ...] = ()
    file: Path | None = None
