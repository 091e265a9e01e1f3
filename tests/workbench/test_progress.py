"""What is said while jobs run: which begin first, how long it will take, and a table that fits the screen."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from support.projects import experiment

from kvlab.errors import KvlabError
from kvlab.workbench import experiments
from kvlab.workbench.jobs import launch, progress
from kvlab.workbench.jobs.progress import Progress


def following(seconds: list[float | None], workers: int = 2, height: int = 40, terminal: bool = False) -> Progress:
    """Progress on jobs that are expected to take so long."""
    jobs = [experiments.Job(f"experiment_{n}", "quick", "quick", None, {}, "") for n in range(len(seconds))]
    console = Console(file=io.StringIO(), width=100, height=height, force_terminal=terminal, color_system=None)
    followed = Progress(jobs, workers, console)
    for number, expected in enumerate(seconds):
        followed.expect(number, expected)
    return followed


def said(followed: Progress) -> str:
    followed.console.print(followed._render())
    return followed.console.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "workers", "left"),
    [
        ([60, 60, 60, 60], 2, 120),
        ([100, 10, 10], 2, 100),  # the longest job is a floor
        ([100, None, 50], 1, 225),  # an unknown job takes what the others do
        ([None, None], 2, None),
    ],
)
def test_the_estimate_is_that_of_the_jobs_that_are_left(seconds, workers, left):
    assert following(seconds, workers).remaining() == left


def test_the_estimate_shrinks_with_time_and_with_what_is_done(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    followed = following([60, 60, 60], workers=1)
    followed.set(0, "running")
    now[0] += 45
    assert followed.remaining() == 15 + 60 + 60
    followed.set(0, "finished", seconds=60)
    assert followed.remaining() == 120
    followed.set(1, "done earlier")
    assert followed.remaining() == 60


@pytest.mark.parametrize("factor", [0.02, 0.5, 3])
def test_the_estimate_learns_from_the_jobs_that_are_done(monkeypatch, factor):
    """Another machine, or other load, than when the expected seconds were taken: one job hints at it, many show it."""
    monkeypatch.setattr(progress.time, "monotonic", lambda: 1000.0)
    followed = following([100] * 40, workers=1)
    truth = [100 * factor * left for left in range(39, 19, -1)]
    errors = []
    for number in range(20):
        followed.set(number, "finished", seconds=100 * factor)
        errors.append(abs(followed.remaining() / truth[number] - 1))
    at_first = abs(1 / factor - 1)
    assert 0 < errors[0] < at_first and errors == sorted(errors, reverse=True) and errors[-1] < at_first / 15
    followed.set(20, "running")
    assert followed.remaining() == pytest.approx(20 * 100 * factor, rel=1.1 * errors[-1])


def test_what_took_no_work_says_nothing_about_the_pace():
    followed = following([100] * 4, workers=1)
    for number, state in enumerate(("done earlier", "failed", "killed")):
        followed.set(number, state, seconds=1)
    assert followed.remaining() == 100


def test_a_log_begins_with_what_lies_ahead():
    followed = following([300, 200, 100])
    followed.set(2, "done earlier")
    followed.announce()
    assert "2 jobs, 2 at once, about 5 min 00 s" in followed.console.file.getvalue()


def test_a_table_of_sixteen_jobs_fits_and_says_the_total():
    followed = following([100] * 16, terminal=True)
    followed.rows[0].state, followed.rows[0].seconds = "finished", 100
    followed.rows[1].state, followed.rows[1].begun = "running", progress.time.monotonic() - 30
    text = said(followed)
    assert "1 of 16 jobs, about 12 min" in text and text.count("experiment_") == 16
    assert text.count("~1 min 40 s") == 14 and "not shown" not in text


def test_on_a_low_screen_what_runs_and_what_failed_stays():
    followed = following([100] * 16, height=12, terminal=True)
    for number in range(8):
        followed.rows[number].state = "finished"
    followed.rows[11].state, followed.rows[15].state = "running", "failed"
    text = said(followed)
    assert len(text.splitlines()) <= 12 and "(8 not shown)" in text
    assert "experiment_11 " in text and "experiment_15 " in text and "experiment_12" not in text


def test_long_jobs_begin_first(project, monkeypatch):
    """Expected seconds come from the profile, as long as no run has shown them."""
    for name, seconds in (("a", 10), ("b", None), ("c", 90), ("d", 30)):
        experiment(project, name, profiles={"quick": {"seconds": seconds} if seconds else {}})
    begun = []
    monkeypatch.setattr(launch.Sweep, "_begin", lambda self, number: begun.append(self.queue[number].experiment))
    console = Console(file=io.StringIO(), width=100)
    launch.run(["a", "b", "c", "d"], workers=2, console=console)
    assert begun == ["c", "b", "d", "a"]  # b is taken for the mean of the others
    assert "4 jobs, 2 at once, about 1 min 30 s" in console.file.getvalue()


def test_notebooks_come_in_that_order_too(project):
    (project / "experiments" / "zsmerge_error_curves.yaml").unlink()
    for name, seconds in (("a", 10), ("b", None), ("c", 90), ("d", 30)):
        experiment(
            project,
            name,
            notebook=f"notebooks/{name}.ipynb",
            profiles={"quick": {"seconds": seconds} if seconds else {}},
        )
    assert experiments.longest_first() == [f"notebooks/{name}.ipynb" for name in "cbda"]


@pytest.mark.parametrize("seconds", [0, -3, "long"])
def test_seconds_are_positive(project, seconds):
    experiment(project, "a", profiles={"quick": {"seconds": seconds}})
    with pytest.raises(KvlabError, match=r"profiles\.quick\.seconds"):
        experiments.load("a")
