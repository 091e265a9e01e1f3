"""What the tests of `kvlab compile` share: a short calibration on a random model."""

from kvlab.compile import Settings
from kvlab.inputs.corpus import Document
from support.texts import FERRY

DOCUMENTS = [Document("ferry", FERRY), Document("ferry twice", FERRY[::-1] + "\n" + FERRY)]
SMALL = dict(
    budget=16,
    lengths=(60, 110),
    pool=7,
    contexts=4,
    samples=8,
    risk_samples=6,
    continuation=10,
    window=16,
    utility_window=8,
    thresholds=(0.0, 0.2, 0.4),
    bins=(6, 3),
    entropy=(3.9, 4.4),
    seed=1,
)


def settings(**changes) -> Settings:
    return Settings(**SMALL | changes)
