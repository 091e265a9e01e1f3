"""Figures of the evicted entries that cost a response."""

from __future__ import annotations

import pandas as pd
import pytest
from support import drawing

from kvlab.analyses.why_it_fails import lost_entries
from kvlab.analyses.why_it_fails.lost_entries import Measured
from kvlab.render.figures import why_it_fails as draw

pytestmark = pytest.mark.usefixtures("headless")

DOCUMENTS, POLICIES = ("a", "b", "c"), ("snapkv", "h2o", "mine")
SHIFT = {"a": -0.01, "b": 0.0, "c": 0.01}


def rows(of_case) -> pd.DataFrame:
    keys = [(document, policy) for document in DOCUMENTS for policy in POLICIES]
    return pd.DataFrame(
        [{"document": d, "policy": p, "budget": 64} | row for d, p in keys for row in of_case(d, POLICIES.index(p))]
    )


@pytest.fixture(scope="module")
def measured() -> Measured:
    cases = rows(
        lambda d, p: [
            {
                "evicted": 1000,
                "half": 4 + p,
                "most": 90,
                "found": 0.2 + 0.1 * p + SHIFT[d],
                "rank": 0.01,
                "difference": 10.0,
                "regained_effect": 9.0,
                "regained_attention": 3.0,
            }
        ]
    )
    curves = rows(
        lambda _, p: [
            {"entries": share, "by_effect": min(1, 0.7 + 0.02 * p + 30 * (share - 0.01)), "by_attention": share}
            for share in lost_entries.GRID
        ]
    )
    shares = {"kind": {"name": (0.3, 0.1), "number": (0.05, 0.1), "other word": (0.65, 0.8)}}
    shares |= {"distance": {"17 to 64": (0.5, 0.5), "last 16": (0.5, 0.5)}, "layer": {"0": (0.1, 0.5), "1": (0.9, 0.5)}}
    shares |= {"heads": {"retrieval": (0.6, 0.25), "other": (0.4, 0.75)}}
    parts = rows(
        lambda d, _: [
            {"group": group, "part": part, "harm": harm + SHIFT[d], "entries": entries}
            for group, each in shares.items()
            for part, (harm, entries) in each.items()
        ]
    )
    keepers = rows(
        lambda d, p: [
            {"keeper": keeper, "kept": 0.0 if q == p else 0.2 * q + SHIFT[d] + 0.05, "chance": 0.1}
            for q, keeper in enumerate(POLICIES)
        ]
    )
    return Measured(cases, curves, parts, keepers)


@pytest.fixture(scope="module")
def found(measured):
    return lost_entries.findings(measured)


def test_concentration_says_what_one_percent_carries(measured, found):
    figure = draw.concentration(measured.curves, found, 64)
    assert drawing.titles(figure) == [
        "1 % of the entries carry 70 to 74 % of the harm",
        "Half lies in 0.4 to 0.6 %, 90 % in 9 %",
    ]
    assert drawing.ticks(figure.axes[1], "y") == ["SnapKV", "H2O", "mine"]
    assert "64 entries a head; means over 3 documents" in drawing.texts(figure.axes[0])


def test_attention_says_what_it_finds_and_what_is_regained(measured, found):
    figure = draw.attention(measured.curves, found, 64)
    assert drawing.titles(figure) == [
        "Attention finds 20 to 40 % of the costly entries",
        "Put back they regain 90 %, by attention 30 %",
    ]
    by_effect, by_attention, at_random = (list(line.get_ydata()) for line in figure.axes[0].lines)
    assert by_attention == pytest.approx(at_random) and by_effect[0] > by_attention[0]


def test_heads_show_layers_and_the_share_of_retrieval_heads(measured):
    figure = draw.heads(measured.parts, 64)
    assert "Retrieval heads hold 60 % of the harm" in drawing.titles(figure)
    assert "Layers 0 and 1 hold 100 % of the harm" in drawing.titles(figure)
    without = draw.heads(measured.parts.query("group != 'heads'"), 64)
    assert "kvlab has no head scores\nof DuoAttention for this model" in drawing.texts(without.axes[1])


def test_tokens_name_what_lies_above_its_share_or_say_that_nothing_does(measured, found):
    figure = draw.tokens(measured.parts, found, 64)
    assert drawing.titles(figure) == ["Above their share: name", "No distance stands out"]
    assert drawing.ticks(figure.axes[0], "y")[0] == "name\n10.0 % of entries"


def test_missed_names_the_policy_that_keeps_most(measured, found):
    figure = draw.missed(measured.keepers, found, 64)
    left, right = figure.axes[:2]
    assert left.get_title(loc="left") == "mine keeps 45 % of what costs the others"
    assert right.get_title(loc="left") == "mine keeps 45 % of what costs SnapKV"
    assert drawing.ticks(right, "y") == ["mine", "H2O"]
