"""Figures of every policy at equal bytes."""

from __future__ import annotations

import re

import pandas as pd
import pytest
from support import drawing
from support.equal_bytes import FEW, table
from support.spread import students

from kvlab.analyses.findings import Findings
from kvlab.analyses.together import equal_bytes
from kvlab.render import theme
from kvlab.render.figures import together as draw

pytestmark = pytest.mark.usefixtures("headless")

SHARES = {"stored": 0.2, "read": 0.2}


def test_a_front_names_each_policy_and_rings_what_nothing_beats():
    figure = draw.pareto(FEW, "read")
    (ax,) = figure.axes
    assert {"keeps", "selects", "small"} <= set(drawing.texts(ax)) and drawing.titles(figure) == [
        "Error against read bytes"
    ]
    points = equal_bytes.points(FEW, "read", "output_error")
    ringed = sorted(ax.collections[0].get_offsets().tolist())
    best = points.query("front")
    assert ringed == sorted([size / 2**20, value] for size, value in zip(best["bytes"], best["value"], strict=True))
    assert {text.get_text() for text in ax.texts if text.get_fontweight() == "bold"} == set(best["policy"])


def test_the_full_cache_is_a_line_at_its_bytes():
    figure = draw.pareto(table(full={"a": [(50, 40, 0.0)]}, snapkv={"a": [(5, 5, 0.4), (20, 20, 0.2)]}), "stored")
    (ax,) = figure.axes
    assert "full cache" in drawing.texts(ax) and [50, 50] in [list(line.get_xdata()) for line in ax.lines]
    assert theme.look("snapkv").colour in {line.get_color() for line in ax.lines}


LIMIT = table(oracle_attention={"a": [(10, 10, 0.3), (40, 40, 0.1)], "b": [(10, 10, 0.5), (40, 40, 0.3)]})


def test_the_limit_is_a_dotted_line_that_says_that_it_sees_the_response():
    plain = draw.pareto(FEW, "read").axes[0]
    (ax,) = draw.pareto(FEW, "read", LIMIT).axes
    dotted = [line for line in ax.lines if line.get_linestyle() == ":"]
    assert len(ax.lines) == len(plain.lines) + 1 and len(dotted) == 1
    assert dotted[0].get_xydata().ravel() == pytest.approx([10, 0.4, 40, 0.2])
    assert "oracle_attention" in drawing.texts(ax)
    assert "sees the response" in ax.get_legend().get_texts()[-1].get_text()
    assert ax.collections[0].get_offsets().tolist() == plain.collections[0].get_offsets().tolist()


def test_the_limit_at_equal_bytes_stands_where_the_oracle_was_measured():
    figure = draw.at_equal_bytes(FEW, {"stored": 0.2, "read": 0.05}, limit=LIMIT)
    left, right = ([line for line in ax.lines if line.get_linestyle() == ":"] for ax in figure.axes)
    # 20 lies half way between 10 and 40 on a logarithmic axis; 5 is below the oracle's least.
    assert not right and left[0].get_xdata() == pytest.approx([0.3, 0.3])
    assert "sees the response" in figure.legends[0].get_texts()[0].get_text()


def test_rows_at_equal_bytes_stand_best_first_or_say_why_not():
    figure = draw.at_equal_bytes(FEW, SHARES)
    left, right = figure.axes
    assert {"–  stores at least 100 MiB", "–  stores at most 5 MiB", "0.400"} <= set(drawing.texts(left))
    assert drawing.ticks(right, "y") == ["selects", "keeps", "small"]
    assert drawing.titles(figure) == [
        f"equal {side} bytes: 20.0 MiB, 20.0% of the full cache" for side in ("stored", "read")
    ]
    assert left.get_xlabel() == "relative error of the attention output"
    assert draw.at_equal_bytes(FEW, SHARES, "mass_lost").axes[0].get_xlabel() == "attention mass lost"


def test_the_table_for_readers_says_why_not_and_marks_the_best():
    stored = equal_bytes.summary(equal_bytes.at_equal(FEW, "stored", 0.2))
    html = draw.measures_table(stored, caption="At equal stored bytes").to_html()
    low, high = students((0.3, 0.5))
    assert (
        f"0.400 ({low:.3f}–{high:.3f})" in html
        and "stores at least 100 MiB" in html
        and "At equal stored bytes" in html
    )
    assert html.count("–</td>") >= 12  # two policies without any of the six numbers
    read = equal_bytes.summary(equal_bytes.at_equal(FEW, "read", 0.2))
    html = draw.measures_table(read, caption="x").to_html()
    bold = "".join(cells for cells, style in re.findall(r"([^{}]+){([^}]*)}", html) if "font-weight: bold" in style)
    assert re.search(r"row0_col2\b", bold) and not re.search(r"row1_col2\b", bold)  # the smallest output error


def test_of_many_policies_the_papers_and_the_front_are_named_and_the_others_are_grey():
    others = ["adakv", "chunkkv", "keydiff", "knorm", "lagkv", "quest", "rkv", "scissorhands", "tova", "keyformer"]
    curves = {name: {"a": [(10, 10, 0.5)], "b": [(10, 10, 0.7)]} for name in others}
    best = {"a": [(9, 9, 0.1)], "b": [(9, 9, 0.3)]}
    (ax,) = draw.pareto(table(snapkv=curves["adakv"], sparq=best, **curves), "read").axes
    assert {"snapkv", "sparq"} <= set(drawing.texts(ax)) and not set(others) & set(drawing.texts(ax))
    assert "10 other policies" in drawing.legend(ax)
    assert len([line for line in ax.lines if line.get_color() == theme.RULE]) == len(others)
    assert ax.figure.get_supxlabel() == "n = 2 documents; thin bars: 95 % intervals of the mean"


def test_needles_have_a_row_for_each_policy_the_best_first():
    scores = {"h2o": [0.25, 0.5], "full": [1.0, 0.75], "snapkv": [0.5, 0.5]}
    rows = [
        {"policy": policy, "budget": None if policy == "full" else 128, "length": 320, "depth": depth, "score": score}
        for policy, both in scores.items()
        for depth, score in zip((0.1, 0.9), both, strict=True)
    ]
    findings = Findings(pd.DataFrame(rows))
    for policy, both in scores.items():
        findings.add(equal_bytes.NEEDLE, both, policy=policy)
    figure = draw.needles(findings, 128)
    cells, mean, _ = figure.axes
    assert drawing.titles(figure) == ["Needles at a budget of 128 entries"]
    assert drawing.ticks(cells, "y") == ["full", "snapkv", "h2o"] and drawing.ticks(cells) == ["10", "90"]
    assert cells.images[0].get_array().tolist() == [scores[name] for name in ("full", "snapkv", "h2o")]
    assert "320 tokens" in drawing.texts(cells) and drawing.texts(mean) == ["0.88", "0.50", "0.38"]
    assert figure.get_supxlabel().startswith("n = 2 needles for each policy")
