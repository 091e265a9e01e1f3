"""Figures are written as matplotlib's tight box writes them, and laid out once for all files."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

from kvlab.lib.figures import save
from kvlab.render.figures import plots

pytestmark = pytest.mark.usefixtures("headless")


def drawn(**options):
    figure, pair = plt.subplots(1, 2, figsize=(7, 3), **options)
    for ax in pair:
        ax.plot([0, 1, 3], [2, 1, 5], label="a line with a long name")
        ax.set_ylabel("what is up")
        ax.legend(**plots.BELOW)
    figure.colorbar(pair[1].scatter([0, 1], [1, 2], c=[0, 1]), ax=pair[1], label="colour")
    return figure


@pytest.mark.parametrize("layout", ["constrained", "none", None])
def test_a_saved_figure_is_the_one_that_matplotlib_cuts_to_its_tight_box(tmp_path, layout):
    plots.style()
    drawn(layout=layout).savefig(tmp_path / "tight.png", dpi=144, bbox_inches="tight", facecolor="white")
    save(drawn(layout=layout), tmp_path / "ours.svg", tmp_path / "ours.png")
    ours, tight = (np.asarray(Image.open(tmp_path / f"{name}.png")) for name in ("ours", "tight"))
    assert ours.shape == tight.shape and (ours == tight).all()
    written = (tmp_path / "ours.svg").read_text()
    assert written.count("a line with a long name") >= 2 and "colour" in written


def test_a_figure_is_laid_out_once_and_afterwards_as_it_was(tmp_path, monkeypatch):
    plots.style()
    laid, execute = [], ConstrainedLayoutEngine.execute
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda *args: laid.append(1) or execute(*args))
    figure = drawn()
    engine, dpi = figure.get_layout_engine(), figure.dpi
    save(figure, tmp_path / "a.png", tmp_path / "a.svg")
    assert len(laid) == 1 and figure.get_layout_engine() is engine and figure.dpi == dpi
    with pytest.raises(ValueError, match="nothing"):
        save(figure, tmp_path / "a.nothing")
    assert figure.get_layout_engine() is engine and figure.dpi == dpi
