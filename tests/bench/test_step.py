"""The profile of a decoding step: every operation has one purpose, and the parts add up to the step."""

from __future__ import annotations

import pytest
import torch
from support.benchmarks import cells, imported, invoked
from torch.profiler import ProfilerActivity, profile

from kvlab.core import ranking


@pytest.fixture
def step(monkeypatch):
    with imported(monkeypatch, "step") as modules:
        yield modules[0]


@pytest.mark.parametrize(
    ("operation", "purpose"),
    [
        ("aten::mm", "products with the weights"),
        ("aten::addmm", "products with the weights"),
        ("aten::bmm", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::index_select", "taking entries"),
        ("aten::index", "taking entries"),
        ("aten::topk", "finding entries"),
        ("aten::index_copy_", "copying"),
        ("aten::cat", "copying"),
        ("aten::silu", "norms, rotation, all else"),
        ("aten::mm_of_another_kind", "norms, rotation, all else"),
    ],
)
def test_an_operation_s_purpose(step, operation, purpose):
    assert step.purpose(operation) == purpose


def test_what_numpy_finds_is_finding_and_not_python(step):
    scores = torch.randn(3, 5000)
    with step.recorded(), profile(activities=[ProfilerActivity.CPU]) as found:
        best = ranking.top_positions(scores, 40)
    seen = {event.key: step.purpose(event.key) for event in found.key_averages()}
    assert seen["kvlab::by NumPy"] == step.FINDING
    assert torch.equal(best, ranking.top_positions(scores, 40))


def test_the_parts_add_up_to_a_step(step, lm):
    sizes = ["--context", "60", "--budget", "16", "--steps", "2", "--repeats", "1"]
    header, _, *rows = cells(invoked(step.main, *sizes, "--policies", "full,quest"))
    table = {name: [float(cell) for cell in row] for name, *row in rows}
    assert header[1:] == ["transformers", "full", "quest"]
    whole, parts = table.pop("a step"), [*table.values()]
    assert [*table] == [*step.PURPOSES, step.OTHER, step.PYTHON]
    for column, step_s in enumerate(whole):
        assert sum(part[column] for part in parts) == pytest.approx(step_s, abs=0.05 * (len(parts) + 1))
    finding = table["finding entries"]
    assert finding[2] > finding[1], "quest looks for pages, and the full cache for nothing"
    assert min(table["products with the weights"]) > 0
