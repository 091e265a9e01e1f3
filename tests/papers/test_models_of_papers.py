"""The models that a paper's numbers are of: each claim with a number has one, and names are checked."""

from __future__ import annotations

import pytest
from support.refusals import one_sentence

from kvlab import papers

PAPER = """name: x
label: X
title: T
experiment: e
{models}claims:
  - {{id: a, where: w, summary: s, metric: m, paper_value: 1, direction: {test}, size: {test}}}
  - {{id: b, where: w, {more}summary: s, metric: m, paper_value: 1, direction: {test}, size: {test}}}
"""
TEST = "{kind: at_least, value: 0}"
TWO = "models: {LLaMA 7B: 6_738_000_000, OPT: 13}\n"


def loaded(tmp_path, models="", more=""):
    path = tmp_path / "x.yaml"
    path.write_text(PAPER.format(models=models, more=more, test=TEST))
    return papers.load_file(path)


def test_a_claim_has_the_model_that_it_names_else_the_papers_first(tmp_path):
    first, second = loaded(tmp_path, TWO, "model: OPT, ").claims
    assert (first.model.name, first.model.parameters) == ("LLaMA 7B", 6_738_000_000)
    assert (second.model.name, second.model.parameters) == ("OPT", 13)
    assert [claim.model for claim in loaded(tmp_path).claims] == [None, None]


@pytest.mark.parametrize("written", ["8.0e9", "8e9", "8_000_000_000", "8.0e+9"])
def test_a_size_may_be_written_as_people_write_it(tmp_path, written):
    assert loaded(tmp_path, f"models: {{Llama: {written}}}\n").claims[0].model.parameters == 8_000_000_000


@pytest.mark.parametrize(
    ("models", "more", "match"),
    [
        (TWO, "model: LLama 7B, ", "did you mean 'LLaMA 7B'"),
        ("", "model: OPT, ", "unknown model in `models` 'OPT'"),
        (TWO, "model: [OPT], ", "model"),
        ("models: {OPT: large}\n", "", "parameters|models"),
        ("models: {OPT: 0}\n", "", "greater than 0"),
        ("models: OPT\n", "", "models"),
    ],
)
def test_what_is_no_model_of_the_paper_is_refused(tmp_path, models, more, match):
    with one_sentence(match):
        loaded(tmp_path, models, more)


def test_every_claim_with_a_number_has_a_model_of_the_size_that_papers_use():
    for paper in papers.papers():
        assert paper.models, paper.name
        used = {claim.model.name for claim in paper.claims}
        assert used == set(paper.models), paper.name
        for claim in paper.claims:
            assert claim.paper_value is None or 1e8 < claim.model.parameters < 1e12, claim.id


@pytest.mark.parametrize(
    ("claim", "model"),
    [
        ("zsmerge.table4.short", "LLaMA-2 13B"),
        ("zsmerge.figure5.proximity_best", "LLaMA-2 7B"),
        ("dapq.table1.dc_sp", "LLaMA-3 8B"),
        ("morphkv.figure7.h2o", "Mistral 7B"),
        ("morphkv.table6.recall", "Llama-3.1 8B"),
        ("rocketkv.figure1.oracle", "Mistral 7B"),
        ("compilerkv.abstract.task_filled_recovers", "LLaMA-3 8B"),
        ("compilerkv.table1.filled_over_h2o", "mean of four, 7B to 8B"),
    ],
)
def test_numbers_are_of_the_models_that_the_papers_name(claim, model):
    (found,) = [each for each in papers.claims() if each.id == claim]
    assert found.model.name == model


def test_a_mean_over_models_stands_at_the_mean_of_their_sizes():
    sizes = {paper.name: paper.models for paper in papers.papers()}["morphkv"]
    four = [sizes[name] for name in ("Llama-3.1 8B", "Mistral 7B", "Qwen2.5 7B", "Phi-4 14B")]
    for name, count in (("mean of four, 7B to 14B", 4), ("mean of three, 7B to 8B", 3), ("mean of two, 7B and 8B", 2)):
        assert sizes[name] == pytest.approx(sum(four[:count]) / count, rel=1e-3)


def test_every_paper_says_in_a_few_sentences_what_it_claims():
    for paper in papers.papers():
        assert paper.label in paper.says and paper.says.endswith(".") and paper.says.count(". ") < 3
        assert 80 < len(paper.says) < 320
