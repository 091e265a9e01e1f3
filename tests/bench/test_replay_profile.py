"""The profile of a replay: shares of the time on the clock that add up to all of it."""

from __future__ import annotations

import pytest
from support.benchmarks import cells, imported, invoked


@pytest.fixture
def profiling(monkeypatch):
    with imported(monkeypatch, "replay_profile") as modules:
        yield modules[0]


def command(profiling, steps, *arguments):
    sizes = ["--tokens", "200", "--new-tokens", str(steps), "--budget", "64"]
    return invoked(profiling.main, *sizes, *arguments)


def printed(done):
    """The rows by their names, in numbers."""
    return {name: [float(cell.replace(",", "")) for cell in row] for name, *row in cells(done)[2:]}


def test_shares_add_up_and_merging_works_at_every_step(profiling, lm):
    few, more = (printed(command(profiling, steps, "--policies", "snapkv,zsmerge")) for steps in (4, 20))
    shares = [numbers for name, numbers in few.items() if name.endswith("%")]
    assert len(shares) == len(profiling.SHOWN) + 1
    for column in range(2):
        assert sum(numbers[column] for numbers in shares) == pytest.approx(100, abs=0.5 * len(shares))
    (snapkv, zsmerge), (later_snapkv, later_zsmerge) = few["operations"], more["operations"]
    assert later_snapkv == snapkv, "it decides once"
    assert later_zsmerge > 2 * zsmerge, "it decides at five times as many steps"
    assert max(few["attention, %"] + more["attention, %"]) > 0


def test_a_policy_that_is_unknown_is_told_in_a_sentence(profiling, lm):
    done = command(profiling, 4, "--policies", "snapkw")
    assert done.exit_code == 1 and done.stderr.startswith("benchmark: ") and "snapkv" in done.stderr
