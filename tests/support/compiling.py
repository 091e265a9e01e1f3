"""What the tests of `kvlab compile` share: a short calibration for a random model."""

from __future__ import annotations

from kvlab.compile import MarginalSettings
from kvlab.inputs.corpus import Document
from support.texts import FERRY

DOCUMENTS = [Document("ferry", FERRY), Document("ferry twice", FERRY[::-1] + "\n" + FERRY)]
SMALL = dict(budgets=(12, 24), lengths=(60, 110), new_tokens=4, window=16, utility_window=8)


def settings(**changes) -> MarginalSettings:
    return MarginalSettings(**SMALL | changes)
