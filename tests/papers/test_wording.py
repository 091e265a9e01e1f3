"""How claims are put, read beside each other."""

from __future__ import annotations

from collections import Counter

from kvlab import papers


def test_no_two_claims_begin_alike():
    """A list shows one line of each claim: those that say almost the same have what sets them apart in it."""
    beginnings = Counter(claim.summary[:70] for claim in papers.claims())
    assert not [beginning for beginning, times in beginnings.items() if times > 1]
