"""DapQ's figure 2 over context lengths, on a tiny model: the same texts at several lengths, counted again by hand."""

from __future__ import annotations

import pytest
from support.spread import students
from support.texts import FERRY

from kvlab import papers
from kvlab.analyses.dapq import contexts, position
from kvlab.errors import KvlabError

LENGTHS, TRIALS, N = (120, 200, 290), 2, 8


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, text in {"ferry": FERRY, "back": FERRY[len(FERRY) // 3 :]}.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return [str(folder / "ferry.txt"), str(folder / "back.txt")]


@pytest.fixture(scope="module")
def found(reader, texts):
    return contexts.over_lengths(reader, texts, LENGTHS, trials=TRIALS, parts=4, n=N, seed=3)


def test_every_text_has_a_curve_at_every_length(found):
    curves = found.table.groupby(["document", "context"], sort=False)["offset"]
    assert len(curves) == 2 * len(LENGTHS)
    assert set(found.table["context"]) == {"100", "200", "300"}
    for (_, context), offsets in curves:
        assert offsets.min() == 0 and abs(offsets.max() - {"100": 120, "200": 200, "300": 290}[context]) < 24


def test_a_curve_is_figure_2bs_of_that_prompt(reader, texts, found):
    (trace,) = position.of_length(reader, texts[:1], 200, N)
    alone = position.figure_2b(reader, [trace], 4, N).table
    curve = found.table.query("context == '200' and document == @position.plain_name(@trace)")
    assert curve["similarity"].tolist() == pytest.approx(alone["similarity"].tolist(), abs=1e-5)
    random = position.figure_2a(reader, [trace], TRIALS, N, seed=3 + 1).metrics
    gaps = found.cells.query("context == '200' and document == @position.plain_name(@trace)")["gap"]
    assert gaps.tolist() == pytest.approx([random["gap_random/post/dc_sp_less_sc_dp_m"]], abs=1e-5)


def test_lengths_are_compared_text_by_text(found):
    ends = found.table.sort_values("offset").groupby(["context", "document"])["similarity"].agg(["first", "last"])
    drops = (ends["first"] - ends["last"]).unstack("context")
    more = drops["300"] - drops["100"]
    assert found.metrics["contexts/longest_decays_more"] == pytest.approx(more.mean(), abs=1e-6)
    assert found.intervals["contexts/longest_decays_more"] == pytest.approx(students(more), rel=1e-3, abs=1e-5)
    for end, name in (("shortest", "100"), ("longest", "300")):
        assert found.metrics[f"contexts/drop/{end}"] == found.metrics[f"contexts/drop/{name}"]
        assert found.metrics[f"contexts/gap/{end}"] == found.metrics[f"contexts/gap/{name}"]
    assert found.metrics["contexts/drop/200"] == pytest.approx(drops["200"].mean(), abs=1e-6)


def test_one_length_has_nothing_to_compare(reader, texts):
    with pytest.raises(KvlabError, match="two context lengths at least"):
        contexts.over_lengths(reader, texts, [120], trials=1, parts=2, n=N)


def test_the_claims_read_what_is_measured(found):
    names = set(found.metrics) | {f"{name}/{end}" for name in found.intervals for end in ("low", "high")}
    read = {m for claim in papers.claims(paper="dapq") for m in claim.metrics if m.startswith("contexts/")}
    # The middle length has the paper's name.
    assert read and {m.replace("4k", "200") for m in read} <= names
    assert all(c.profile == "full" for c in papers.claims(paper="dapq") if c.metric.startswith("contexts/"))
