"""Many directions at once: p from an interval, and q by Benjamini and Hochberg, by hand."""

from __future__ import annotations

import pytest

from kvlab import papers
from kvlab.papers import many_claims

ONE = {"kind": "greater", "than": 1.0}


def claim(kind: str = "finding", direction: object = None) -> papers.Claim:
    return papers.Claim.model_validate(
        {
            "id": "toy.table1.gain",
            "paper": "toy",
            "where": "table 1",
            "summary": "It gains.",
            "metric": "gain",
            "paper_value": None,
            "unit": "points",
            "kind": kind,
            "experiment": "toy",
            "direction": direction or ONE,
            "size": ONE,
        }
    )


def judged(value: float, low: float, high: float, of: papers.Claim | None = None) -> papers.Verdict:
    return papers.judge(of or claim(), {"gain": value}, {"gain": (low, high)})


def test_p_is_that_of_the_distance_to_the_turn_in_standard_errors():
    """An interval of 1.96 errors to either side: p is 0.05 at its end, 0.317 at one error and 0.0027 at three."""
    half = many_claims.REACH
    for errors, p in ((half, 0.05), (1, 0.3173), (3, 0.0027), (0, 1)):
        for side in (1, -1):
            verdict = judged(1 + side * errors, 1 + side * errors - half, 1 + side * errors + half)
            assert many_claims.p_value(claim(), verdict) == pytest.approx(p, abs=5e-5)


def test_of_an_uneven_interval_the_half_towards_the_turn_counts():
    assert many_claims.p_value(claim(), judged(3, 1, 100)) == pytest.approx(0.05, abs=1e-6)
    assert many_claims.p_value(claim(), judged(0, -100, 1)) == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize(
    ("of", "ends"),
    [
        (claim("recomputed"), (1, 3)),
        (claim(direction={"kind": "greater", "than": "other"}), (1, 3)),
        (claim(direction={"kind": "all_of", "tests": [ONE, {"kind": "less", "than": 9.0}]}), (1, 3)),
        (claim(), (2, 2)),
    ],
    ids=["recomputed", "two metrics", "two tests", "no width"],
)
def test_what_has_no_p(of, ends):
    verdict = papers.Verdict(verdict=papers.HOLDS, why="", value=2, low=ends[0], high=ends[1])
    assert many_claims.p_value(of, verdict) is None
    assert many_claims.p_value(claim(), papers.judge(claim(), {})) is None


def test_q_by_hand():
    """Of 0.01, 0.02, 0.04, 0.045: times 4 / rank is 0.04, 0.04, 0.0533, 0.045; the least from each rank on is its q."""
    found = many_claims.q_values([0.045, None, 0.01, 0.04, 0.02])
    assert found[1] is None
    assert [found[at] for at in (2, 4, 3, 0)] == pytest.approx([0.04, 0.04, 0.045, 0.045])
    assert many_claims.q_values([None, None]) == [None, None] and many_claims.q_values([]) == []


def test_a_direction_that_is_decided_alone_may_not_survive():
    """One p of 0.04 among four of 0.5: its q is 0.04 x 5."""
    assert many_claims.q_values([0.04, 0.5, 0.5, 0.5, 0.5])[0] == pytest.approx(0.2)
