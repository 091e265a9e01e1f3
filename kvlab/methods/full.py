"""The cache without compression: what every other policy is measured against."""

from typing import ClassVar

from kvlab.methods._base.policy import Policy


class Full(Policy):
    """Keeps every entry and reads all of them at every step.

    Not from a paper: nothing is judged and nothing leaves, so that no attention is lost. It is the reference that every
    method is compared with. Cost: the whole cache, stored and read.
    """

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "the whole cache, no compression"
    family: ClassVar[str] = "reference"
    kind: ClassVar[str] = "reference"
