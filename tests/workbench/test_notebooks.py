"""The notebooks as files: what a notebook must have, that its experiment agrees with it, and that it holds no paper's
figure as a number of its own."""

from __future__ import annotations

import ast
import json
import re

import pytest
from support.paths import NOTEBOOKS, ROOT

from kvlab import papers
from kvlab.workbench import experiments
from kvlab.workbench.experiments import notebooks

EXPERIMENTS = {name: experiments.load(name) for name in experiments.names()}

# A column of a printed table that says where a figure stands, and is no figure itself.
AXES = re.compile(
    r"budget|length|window|context|tokens?|steps?|capacity|batch|ratio|kernel|layers?|heads?|shots?|"
    r"depth|prompt|generated|first|last|sequence|position|size|model|year|n|k|bits?|alpha|beta|gamma|"
    r"parameter|setting"
)
# How large something is drawn is no figure of a paper, whatever number it is.
LAYOUT = {
    "figsize",
    "width_ratios",
    "height_ratios",
    "wspace",
    "hspace",
    "fontsize",
    "linewidth",
    "bbox_to_anchor",
    "dpi",
    "alpha",
    "s",
    "pad",
    "rotation",
}


def digits(value: float) -> int:
    """Significant digits of a number as it is written shortest; zeros at the end of a whole number do not count."""
    text = repr(float(value)).split("e")[0].replace("-", "").removesuffix(".0").replace(".", "").strip("0")
    return len(text)


def literals(source: str) -> list[float]:
    """The numbers that stand in a piece of code, less those that say how something is drawn."""

    def walk(node: ast.AST):
        if isinstance(node, ast.keyword) and node.arg in LAYOUT:
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
            yield node.value
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    return list(walk(ast.parse(re.sub(r"^[%!].*$", "", source, flags=re.M))))


def printed() -> dict[float, str]:
    """Every figure of a paper, as printed and as a percentage or a fraction of that, with where it stands."""
    found = {claim.paper_value: claim.id for claim in papers.claims() if claim.paper_value is not None}
    for name in papers.figures():
        table = papers.figure(*name.split("/", 1))
        for column in table.select_dtypes("number"):
            if not AXES.fullmatch(column):
                found |= dict.fromkeys(table[column].dropna(), f"{name}, {column}")
    scaled = {round(value * factor, 10): where for value, where in found.items() for factor in (0.01, 100)}
    return scaled | found


def test_how_digits_are_counted():
    assert [digits(n) for n in (0.7238, 0.605, 60.5, 512, 4096, 1000, 1200, 0.10, 2.72e-4, -1.5, 0)] == [
        4,
        3,
        3,
        3,
        4,
        1,
        2,
        1,
        3,
        2,
        0,
    ]


def test_the_search_finds_what_it_should():
    known = printed()
    assert {0.7238, 72.38, 0.605, 60.5} <= known.keys()
    code = "ours = {'dc_sp': 0.7238}\nplt.subplots(figsize=(12.5, 0.7238))\n%matplotlib inline\nf(x=-0.605)"
    assert [n for n in literals(code) if digits(n) >= 3 and n in known] == [0.7238, 0.605]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_notebook_holds_a_papers_figure(path):
    """Rule: no numeric literal of three or more significant digits in a code cell equals a figure that a paper prints
    (a claim's paper_value, or an entry of a value column of a table under kvlab/papers/figures), as printed, as a
    percentage or as a fraction. Such numbers come from `papers.figure` and `papers.claims`, where they are checked and
    sourced. In the cell of parameters whole numbers are settings (tokens, budgets), and so are binary fractions (an
    eighth of the bytes); the layout of a figure is one, too.
    """
    known, found = printed(), []
    for cell in notebooks.cells(path):
        if cell["cell_type"] == "code":
            is_setting = "parameters" in cell["metadata"].get("tags", [])
            found += [
                f"{number} ({known[number]})"
                for number in literals(notebooks.source(cell))
                if digits(number) >= 3 and number in known and not (is_setting and float(1024 * number).is_integer())
            ]
    assert not found


def test_every_notebook_is_an_experiment_and_the_reverse():
    named = [experiment.notebook for experiment in EXPERIMENTS.values()]
    assert sorted(named) == [f"notebooks/{path.name}" for path in NOTEBOOKS]
    measured = {claim.experiment for claim in papers.claims() if claim.experiment}
    assert measured <= EXPERIMENTS.keys()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_as_it_stands_a_notebook_is_the_quick_profile(name):
    """The YAML says only what differs from the parameters cell, where each parameter stands once."""
    experiment = EXPERIMENTS[name]
    declared = notebooks.parameters_of(experiment.path)
    (quick,) = experiments.jobs(experiment, "quick")
    assert quick.parameters == declared
    assert not {name for name, value in experiment.parameters.items() if value == declared[name]}
    for profile in set(experiment.profiles) - {"quick"}:
        assert all(job.parameters.keys() == declared.keys() for job in experiments.jobs(experiment, profile))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_quick_profile_says_how_long_it_takes(name):
    """So that the longest begin first, and the first run has an estimate; a notebook takes minutes at most."""
    assert 1 <= EXPERIMENTS[name].profiles["quick"].seconds <= 300


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_notebook_logs_to_its_experiment_and_ends_with_its_claims(name):
    cells = notebooks.code(EXPERIMENTS[name].path)
    named = re.findall(r"tracking\.start\(\s*['\"]([^'\"]+)", "\n".join(cells))
    assert named == [name]
    assert re.search(r"^lm = kvlab\.load\(model\)\n(?:.*\n)?run\.about\(lm\b", "\n".join(cells), re.M), (
        "about which model?"
    )
    last = "\n".join(cells[-2:])
    assert "run.finish()" in last and 'tag("signature"' not in "\n".join(cells), "the run makes its signature"
    assert ("run.claims(" in last) == any(claim.experiment == name for claim in papers.claims())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_its_outputs_and_explains_itself(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    cells = content["cells"]
    assert cells[0]["cell_type"] == "markdown" and notebooks.source(cells[0]).startswith("# ")
    outputs = [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]
    assert outputs and not [output for output in outputs if output["output_type"] == "error"]
    if "run.claims(" in "".join(notebooks.code(path)[-2:]):
        assert "claims" in notebooks.source(cells[-1]) or "verdicts" in notebooks.source(cells[-1])
        assert cells[-1]["outputs"], "the verdicts are the last thing that is seen"
    assert not any(
        re.search(r"/(?:root|home|tmp|work|mnt|Users)/", "".join(map(str, output.get("text", ""))))
        for output in outputs
    )
    parameters = next(cell for cell in cells if "parameters" in cell["metadata"].get("tags", []))
    lines = [line for line in notebooks.source(parameters).splitlines() if re.match(r"(?!seed)\w+ *=", line)]
    bare = [line for line in lines if "#" not in line and not line.rstrip().endswith((",", "("))]
    assert len(bare) <= 1, "a parameter has its comment, unless it shares that of its neighbour"


def test_tables_are_tidy():
    """A comment says where it is from, one line names the columns, and no row stands there twice."""
    for name in papers.figures():
        paper, figure = name.split("/", 1)
        path = ROOT / "kvlab" / "papers" / "figures" / f"{paper}_{figure}.csv"
        assert path.read_text(encoding="utf-8").startswith("# "), name
        table = papers.figure(paper, figure)
        assert len(table) and not [column for column in table if column.startswith("Unnamed")], name
        assert not table.duplicated().any(), name
