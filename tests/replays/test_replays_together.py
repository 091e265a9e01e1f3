"""What replays share, and what they measure afterwards: the same numbers and positions as one by one, step by step."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from support.both_devices import TINY
from support.live_runs import prompt, small

import kvlab
from kvlab.inputs import models
from kvlab.methods import registry
from kvlab.replays.replay import Replay
from kvlab.replays.step_reads import similar_runs

NAMES = sorted(set(registry()) - {"recorded"})  # which needs a file
BUDGETS = (34, 47, 59, 64)
MEASURES = ("mass_lost", "output_error", "step_recall", "recall", "window_recall", "stored_bytes", "read_bytes")


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(duoattention|compilerkv)")
        yield


def at_budgets(name: str) -> list[kvlab.Policy]:
    """The policy at budgets below and above the prompt's 60 tokens; one without a budget alone."""
    method = small(name)
    return [method.replace(budget=n) for n in BUDGETS] if method.asked is not None else [method]


@pytest.fixture(scope="module")
def trace() -> kvlab.Trace:
    lm = models.random_lm(device="cpu", **TINY)
    needed = [small(name) for name in NAMES]
    return kvlab.capture(lm, prompt(60), 8, queries="all", accumulate=True, policies=needed, pseudo=[small("dapq")])


def same_sets(found: Replay, expected: Replay) -> None:
    for layer in range(expected.trace.n_layers):
        for step in range(expected.trace.steps + 1):
            assert found.kept(layer, step).tolist() == expected.kept(layer, step).tolist(), f"read at step {step}"
            assert found.stored(layer, step).tolist() == expected.stored(layer, step).tolist(), f"stored after {step}"


@pytest.fixture(scope="module")
def together(trace) -> list[Replay]:
    """All policies at all budgets, one behind the other on one trace: what they share, they share."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(duoattention|compilerkv)")
        return list(kvlab.replay([trace], [policy for name in NAMES for policy in at_budgets(name)], progress=False))


@pytest.mark.parametrize("name", NAMES)
def test_budgets_and_policies_together_are_what_each_is_alone(trace, together, name):
    shared = [result for result in together if result.policy.name == name]
    assert [str(result.policy) for result in shared] == [str(policy) for policy in at_budgets(name)]
    for result in shared:
        # A copy of the trace shares nothing that was computed before.
        alone = kvlab.replay(replace(trace), result.policy)
        same_sets(result, alone)
        for measure in MEASURES:
            found, expected = getattr(result, measure), getattr(alone, measure)
            assert torch.equal(found, expected), f"{measure} of {result.policy}"


@pytest.mark.parametrize("name", NAMES)
def test_measured_afterwards_is_what_every_step_attended_to(trace, together, name):
    """Whoever watches each step makes it attend over what is stored then; without, all steps are measured at once."""
    for result in (result for result in together if result.policy.name == name):
        watched = kvlab.replay(trace, result.policy, probes=["entropy"])
        same_sets(result, watched)
        for measure in MEASURES:
            found, expected = getattr(result, measure), getattr(watched, measure)
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-6, msg=f"{measure} of {result.policy}")


def test_a_trace_is_the_same_after_its_replays(trace, together):
    """Stores borrow it: nothing that a policy does to its entries may reach it."""
    again = kvlab.capture(
        models.random_lm(device="cpu", **TINY), prompt(60), 8, queries="all", accumulate=True, pseudo=[small("dapq")]
    )
    assert together and torch.equal(trace.keys, again.keys) and torch.equal(trace.values, again.values)


@pytest.mark.parametrize(
    "steps, sizes, runs",
    [
        ([0, 1, 2, 3], [10, 10, 11, 12], [(0, 4)]),
        ([0, 1, 2, 3], [60, 9, 9, 9], [(0, 1), (1, 4)]),  # MorphKV reads the whole prompt at its first step
        ([0, 1, 3], [9, 9, 9, 9], [(0, 2), (3, 4)]),
        ([], [], []),
    ],
)
def test_steps_that_read_as_much_are_measured_together(steps, sizes, runs):
    assert [(run.start, run.stop) for run in similar_runs(steps, sizes)] == runs
