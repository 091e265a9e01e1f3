"""Figures of scores on tasks, drawn from answers that are made up, beside what the papers' tables say."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from support import drawing

from kvlab import papers
from kvlab.analyses.tasks import gains
from kvlab.render import theme
from kvlab.render.figures import plots
from kvlab.render.figures import tasks as draw

pytestmark = pytest.mark.usefixtures("headless")

MET = {
    "needle": {"dapq": [128, 256], "snapkv": [128, 256], "h2o": [128], "quest": [128]},
    "ruler": {"dapq": [128, 256], "snapkv": [128, 256], "compilerkv": [256]},
    "tiny_needle": {"rocketkv": [64, 32], "sparq": [64, 32], "snapkv": [64]},
    "single_3": {"dapq": [80, 160], "snapkv": [80, 160], "snapkv_unpooled": [80, 160]},
    "qa": {"zsmerge": [64, 128], "zsmerge_question": [64], "h2o": [64, 128], "dapq": [64], "snapkv": [64]},
}


@pytest.fixture(scope="module")
def found():
    rng = np.random.default_rng(0)
    rows = [
        {
            "task": task,
            "document": f"d{number}",
            "example": "id",
            "policy": policy,
            "budget": budget,
            "compress_at": place,
            "nll": rng.uniform(0, 3),
            "score": 1.0,
            "hits": rng.uniform(),
            "kv_bytes": 1_000 * (budget or 4_096),
        }
        for task, policies in MET.items()
        for policy, budgets in {"full": [None], **policies}.items()
        for budget in budgets
        for place in (("prompt", "context") if (task, policy, budget) == ("needle", "snapkv", 128) else ("prompt",))
        for number in range(3)
    ]
    return gains.findings(pd.DataFrame(rows))


def test_every_policys_needle_stands_beside_the_papers(found):
    left, middle, right = draw.needles(found).axes
    order = sorted(MET["needle"], key=lambda policy: found.metrics[f"nll/needle/{policy}/128"])
    assert drawing.ticks(left, "y") == drawing.ticks(middle, "y") == order
    assert drawing.texts(left)[-1] == "full cache"
    hits = [f"{found.metrics[f'hits/needle/{policy}/128']:.2f}" for policy in order]
    assert drawing.texts(middle) == hits
    dapq = papers.figure("dapq", "table9").query("model == 'Llama3.1-8B-Instruct' and budget == 64")
    names = drawing.ticks(right, "y")
    assert {f"{method.lower()} (DapQ)" for method in dapq["method"]} <= set(names)
    assert any(name.endswith("(RocketKV)") for name in names)
    values = [float(text) for text in drawing.texts(right)]
    assert values == sorted(values, reverse=True) and len(values) == len(names)
    best = dapq.set_index("method")["accuracy"]["DapQ"] / 100
    assert values[names.index("dapq (DapQ)")] == pytest.approx(best, abs=0.005)


def test_losses_by_budget_stand_above_dapqs_tables(found):
    figure = draw.against_budget(found)
    qa, ruler, table_3, table_5 = figure.axes
    assert drawing.legend(figure) == ["DapQ", "SnapKV", "H2O", "CompilerKV", "as the paper prints it"]
    assert "n = 3 documents; bars: 95 % intervals" in figure.get_supxlabel()
    assert ruler.containers[1].lines[0].get_marker() == theme.look("snapkv").marker
    assert [curve.get_label() for curve in ruler.containers] == ["DapQ", "SnapKV", "CompilerKV"]
    assert list(ruler.containers[0].lines[0].get_ydata()) == pytest.approx(
        [found.metrics[f"loss/ruler/dapq/{budget}"] for budget in (128, 256)]
    )
    assert [curve.get_label() for curve in qa.containers] == ["DapQ", "SnapKV", "H2O"]
    for ax, name, column, top in ((table_3, "table3", "average", 256), (table_5, "table5", "niah_multikey_1", 512)):
        printed = papers.figure("dapq", name).query("model == 'Llama3-8B-Instruct' and method == 'DapQ'")
        printed = printed[printed["budget"].between(64, top)].sort_values("budget")
        assert drawing.curves(ax)["DapQ"] == (printed["budget"].tolist(), printed[column].tolist())
        assert "full cache" in drawing.texts(ax) and drawing.ticks(ax)[0] == "64"
        assert list(drawing.curves(ax)) == ["DapQ", "SnapKV", "PyramidKV", "H2O"] and ax.get_legend() is None


def test_each_tiny_budget_has_a_panel(found):
    for ax, budget, policies in zip(
        draw.tiny_needles(found).axes, (64, 32), (["rocketkv", "sparq", "snapkv"], ["rocketkv", "sparq"]), strict=True
    ):
        hits = {policy: found.metrics[f"hits/tiny_needle/{policy}/{budget}"] for policy in policies}
        assert drawing.ticks(ax, "y") == sorted(policies, key=hits.get, reverse=True)
        assert drawing.texts(ax) == [*(f"{value:.2f}" for value in sorted(hits.values(), reverse=True)), "full cache"]
        assert ax.get_title(loc="left") == f"{budget} tokens read"


def test_identifiers_stand_beside_dapqs_table_5(found):
    left, right = draw.single_3(found).axes
    assert drawing.legend(left) == ["DapQ", "SnapKV", "SnapKV, unpooled"]
    assert list(left.containers[0].lines[0].get_ydata()) == pytest.approx(
        [found.metrics[f"loss/single_3/dapq/{budget}"] for budget in (80, 160)]
    )
    printed = papers.figure("dapq", "table5").query("model == 'Llama3-8B-Instruct' and method == 'DapQ'")
    printed = printed[printed["budget"].between(256, 2048)].sort_values("budget")
    assert drawing.curves(right)["DapQ"] == (printed["budget"].tolist(), printed["niah_single_3"].tolist())


def test_zsmerges_gains_stand_beside_its_table_2(found):
    left, right = draw.zsmerge_table_2(found).axes
    ours = [found.metrics[f"gain/qa/zsmerge_over_h2o/{budget}"] for budget in (128, 64)]
    assert drawing.bars(left, plots.COLOURS[1]) == pytest.approx(ours)
    assert drawing.bars(left, plots.COLOURS[0]) == pytest.approx(
        [found.metrics["gain/qa/zsmerge_question_over_h2o/64"]]
    )
    assert drawing.ticks(left) == drawing.ticks(right) == ["20%", "10%", "5%"]
    centres = [bar.get_x() + bar.get_width() / 2 for bar in left.patches if to_hex(bar.get_facecolor()) == "#d55e00"]
    assert centres == pytest.approx([2.18, 1.18]), "64 entries are 5 %, 128 are 10 %"
    printed = papers.figure("zsmerge", "table2").set_index(["model", "budget", "method"])["rougeL"]
    expected = [
        printed[model, share, "zsmerge"] - printed[model, share, "h2o"]
        for share in (0.2, 0.1, 0.05)
        for model in drawing.legend(right)
    ]
    assert drawing.bars(right) == pytest.approx(expected) and len(expected) == 6


def test_claimed_gains_that_were_measured_have_a_row_each(found):
    (ax,) = draw.gains(found).axes
    rows = gains.claimed(found)
    assert drawing.ticks(ax, "y") == rows["label"].tolist() and set(rows["paper"]) == set(drawing.texts(ax))
    values = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o"]
    assert values == pytest.approx(rows["value"].tolist())


def test_what_the_question_is_worth_has_two_rows(found):
    (ax,) = draw.question(found).axes
    assert drawing.ticks(ax, "y") == ["snapkv at 128, question read", "snapkv at 128, question held back"]
    read, held_back = (float(text) for text in drawing.texts(ax)[:2])
    assert held_back - read == pytest.approx(found.metrics["question_aware/needle/snapkv/128"], abs=0.011)
    assert {label.get_color() for label in ax.get_yticklabels()} == {theme.look("snapkv").colour}
