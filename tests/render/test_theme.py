"""The colours and markers of policies."""

import colorsys
import itertools
import re

import pytest
from support.paths import ROOT

from kvlab.methods import registry
from kvlab.render import theme
from kvlab.render.figures import compilerkv, dapq, morphkv, plots, rocketkv, tasks

DRAWN_TOGETHER = [
    [name for name in morphkv.NAMES if "_" not in name],
    list(rocketkv.COLOURS),
    list(dapq.POLICIES),
    list(tasks.COMPARED),
    [name for name in compilerkv.SHOWN if name in registry()],
]


def lightness(colour: str) -> float:
    """As a printer without colours shows it: 0 (black) to 1 (white)."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


@pytest.mark.parametrize("names", DRAWN_TOGETHER, ids=" ".join)
def test_policies_that_a_figure_draws_together_differ_in_colour_and_in_marker(names):
    looks = [theme.look(name) for name in names]
    for one, other in itertools.combinations(looks, 2):
        assert one.colour != other.colour
        assert one.marker != other.marker or abs(lightness(one.colour) - lightness(other.colour)) > 0.1


def test_a_policy_is_of_its_familys_hue_or_a_reference():
    for name, look in theme.POLICIES.items():
        family = registry()[name].family
        if family == "reference":
            continue
        hues = [
            colorsys.rgb_to_hls(*(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)))[0]
            for colour in (look.colour, theme.FAMILIES[family])
        ]
        apart = abs(hues[0] - hues[1])
        assert min(apart, 1 - apart) < 0.16, name


def test_every_policy_and_one_of_ones_own_has_a_colour():
    assert {theme.look(name).colour for name in registry()} <= {
        *theme.FAMILIES.values(),
        *(look.colour for look in theme.POLICIES.values()),
    }
    assert theme.look("snapkv, kivi-4") == theme.look("snapkv 256") == theme.look("snapkv")
    assert theme.look("mine").colour == theme.OTHER


def test_a_curve_of_a_policy_looks_the_same_whatever_stands_before_it():
    import pandas as pd

    frame = pd.DataFrame({"x": [1, 1, 1], "y": [1, 2, 3], "policy": ["h2o", "snapkv", "something else"]})
    drawn = {}
    for order in (["h2o", "snapkv", "something else"], ["something else", "snapkv", "h2o"]):
        rows = frame.set_index("policy").loc[order].reset_index()
        ax = plots.lines(rows, x="x", y="y", hue="policy", xlabel="", ylabel="")
        for line in ax.lines[:3]:
            drawn.setdefault(line.get_label(), set()).add((line.get_color(), line.get_marker()))
        plots.plt.close(ax.figure)
    assert drawn["snapkv"] == {tuple(theme.look("snapkv"))} and drawn["h2o"] == {tuple(theme.look("h2o"))}


def test_two_variants_of_a_policy_have_two_colours_on_a_page():
    sheet = theme.screen(["snapkv", "snapkv(window=8)", "dapq", "mine"])
    light, dark = (re.findall(r"--p\d:(#\w+)", part) for part in sheet.split("@media"))
    assert len(set(light)) == len(set(dark)) == 4 and light[0] == theme.look("snapkv").colour
    assert all(lightness(one) < lightness(other) for one, other in zip(light, dark, strict=True))


def test_colours_of_figures_and_of_the_explorer_are_in_two_files():
    homes = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "kvlab").rglob("*.py")
        if re.search(r"\"#[0-9a-fA-F]{6}\"", path.read_text(encoding="utf-8"))
    }
    assert homes <= {"kvlab/render/theme.py", "kvlab/render/explorer/html_medium.py"}
