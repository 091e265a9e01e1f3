"""Figures on no screen."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest

from kvlab.render.figures import plots


@pytest.fixture
def headless():
    """The notebooks' style, drawn on no screen; figures are closed at the end."""
    with plt.rc_context():
        plt.switch_backend("agg")
        plots.style()
        yield
        plt.close("all")
