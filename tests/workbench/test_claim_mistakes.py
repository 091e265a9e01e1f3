"""Names in a workspace's claims that nothing has: each is told, with the nearest there is."""

from __future__ import annotations

import pytest
from support.commands import call
from support.projects import EXPERIMENT
from support.runs import job

PAPER = """name: mine
label: Mine
title: My paper
claims:
  - id: mine.gain
    where: table 1
    summary: It gains.
    experiment: {experiment}
    metric: {metric}
    figure: {figure}
    paper_value: 0.5
    direction: {{kind: greater, than: 0.0}}
    size: {{kind: within, of: factor, tolerance: 2}}
"""


@pytest.fixture
def claims(project):
    """Write the claims of a workspace's paper: claims(experiment=..., metric=..., figure=...)."""
    (project / "pyproject.toml").write_text("[tool.kvlab]\nworkspace = true\n")
    (project / "papers").mkdir()

    def write(**names):
        usual = {"experiment": EXPERIMENT, "metric": "reduction/0.20", "figure": "error_curves"}
        (project / "papers" / "mine.yaml").write_text(PAPER.format(**usual | names))

    return write


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (
            {"experiment": "zsmerge_error_curve"},
            f"unknown experiment 'zsmerge_error_curve'; did you mean '{EXPERIMENT}'?",
        ),
        (
            {"metric": "reducton/0.20"},
            f"unknown metric of {EXPERIMENT} 'reducton/0.20'; did you mean 'reduction/0.20'?",
        ),
    ],
)
def test_a_claim_that_no_run_can_measure_says_what_it_names_wrongly(claims, capsys, names, sentence):
    claims(**names)
    job(0.6, figure=True)
    code, _, said = call(capsys, "report")
    assert code == 1 and f"mine.gain: {sentence}" in said


def test_a_misspelt_figure_is_a_note(claims, capsys):
    job(0.6, figure=True)
    claims(figure="error_curvs")
    code, _, said = call(capsys, "report")
    assert (
        code == 0
        and f"note: mine.gain: unknown figure of {EXPERIMENT} 'error_curvs'; did you mean 'error_curves'?" in said
    )
    claims()
    code, _, said = call(capsys, "report")
    assert code == 0 and "note:" not in said
