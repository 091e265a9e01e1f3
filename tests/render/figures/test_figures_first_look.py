"""The first notebooks' figures show the replays that they are given."""

from __future__ import annotations

import pytest
from support import drawing

import kvlab
from kvlab.analyses import exploring
from kvlab.render.figures import first_look

pytestmark = pytest.mark.usefixtures("headless")


@pytest.fixture(scope="module")
def results(random_traces):
    return kvlab.replay(random_traces[0], ["streamingllm", "h2o"], budgets=[24])


def test_heads_on_the_left_and_steps_on_the_right(results):
    (_, h2o) = results
    figure = first_look.where_and_when(h2o, results, 24)
    heads, steps, bar = figure.axes
    assert drawing.title(heads) == "h2o, budget 24" and bar.get_ylabel() == "attention mass lost"
    cells = heads.collections[0].get_array()
    assert cells.shape == (2, 4) and cells[1, 3] == pytest.approx(float(h2o.mass_lost[1, 3].mean()))
    curves = drawing.curves(steps)
    assert list(curves) == ["streamingllm", "h2o"] == drawing.legend(steps)
    assert curves["h2o"].y == pytest.approx(h2o.mass_lost.mean((0, 1)).tolist())
    figure.canvas.draw()


def test_a_curve_over_the_layers_for_each_policy(results):
    findings = exploring.lost_by_layer(list(results))
    (ax,) = first_look.lost_by_layer(findings, 24).axes
    assert drawing.title(ax) == "Attention lost by layer, budget 24"
    curves = drawing.curves(ax)
    assert list(curves) == ["streamingllm", "h2o"]
    assert sum(curves["h2o"].y) / 2 == pytest.approx(findings.metrics["mass_lost/h2o"])
