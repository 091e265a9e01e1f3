"""Phrases follow from numbers and their intervals."""

import pytest

from kvlab.analyses.findings import Row
from kvlab.errors import KvlabError
from kvlab.render import phrases


def row(value, low=None, high=None):
    return Row("effect", {}, value, low, high)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (row(0.0351, 0.0229, 0.0473), "0.0351 (0.0229 to 0.0473)"),
        (row(-12.5, -13, -12), "-12.5 (-13.0 to -12.0)"),
        (row(1234.5), "1234"),
        (row(0.0), "0"),
        (row(-0.0), "0"),
    ],
)
def test_a_number_is_shown_with_its_interval(given, text):
    assert phrases.number(given) == text


def test_a_share_is_shown_in_percent():
    assert phrases.percent(row(0.413, 0.381, 0.442)) == "41 % (38 to 44)"
    assert phrases.percent(row(0.07)) == "7.0 %"


@pytest.mark.parametrize(
    ("given", "phrase"),
    [
        (row(0.2, 0.1, 0.3), "more"),
        (row(-0.2, -0.3, -0.1), "less"),
        (row(0.2, -0.1, 0.5), "either"),
        (row(0.2), "more"),
        (row(-0.2), "less"),
        (row(0.0), "either"),
    ],
)
def test_a_side_is_named_only_where_the_whole_interval_lies_on_it(given, phrase):
    assert phrases.side(given, "more", "less", "either") == phrase


def test_a_side_may_be_that_of_another_number_than_zero():
    assert phrases.side(row(0.9, 0.8, 0.95), "longer", "shorter", at=1.0) == "shorter"


@pytest.mark.parametrize(
    ("given", "paper", "text"),
    [
        (row(0.246, 0.2, 0.3), 0.3971, "the paper's 0.3971 lies outside this interval: ours is 0.62 of it"),
        (row(0.246, 0.2, 0.4), 0.3971, "the paper's 0.3971 lies inside this interval"),
        (row(63.0, 63 * (1 - 1e-15), 63 * (1 - 1e-15)), 63, "the paper's 63.00 lies inside this interval"),
        (row(-0.1, -0.2, -0.05), 0.4, "the paper's 0.4000 lies outside this interval: ours has the other sign"),
        (row(0.2), 0.4, "the paper has 0.4000: ours is 0.50 of it"),
        (row(0.2, 0.1, 0.3), 0, "the paper's 0 lies outside this interval"),
    ],
)
def test_a_number_is_set_beside_the_papers(given, paper, text):
    assert phrases.beside(given, paper) == text


@pytest.mark.parametrize(
    ("words", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (list("abc"), "a, b and c")]
)
def test_words_are_listed(words, text):
    assert phrases.listed(words) == text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (row(0.2, 0.1, 0.3), "costs 0.200 (0.100 to 0.300)"),
        (row(-0.455, -0.781, -0.129), "saves 0.455 (0.129 to 0.781)"),
        (row(-0.455), "saves 0.455"),
        (row(-0.1, -0.3, 0.1), "changes by -0.100 (-0.300 to 0.100)"),
        (row(0.0), "changes by 0"),
    ],
)
def test_an_amount_has_no_sign_where_its_phrase_tells_the_side(given, text):
    assert phrases.moved(given, above="costs", below="saves", undecided="changes by") == text


def test_a_share_moves_in_percent():
    assert (
        phrases.moved(row(-0.2, -0.3, -0.1), "grows by", "falls by", shown=phrases.percent)
        == "falls by 20 % (10 to 30)"
    )


def test_a_papers_number_is_found_by_its_claim():
    assert phrases.stated("dapq.table1.position_outweighs_content") == 0.3971
    for claim in ("dapq.section3_3.retained_set", "dapq.no_such_claim"):
        with pytest.raises(KvlabError, match=f"states no number for the claim '{claim}'"):
            phrases.stated(claim)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (row(0.2, 0.1, 0.3), "a gain"),
        (row(-0.2, -0.3, -0.1), "a loss"),
        (row(0.2, -0.1, 0.5), "not told apart from none"),
    ],
)
def test_a_gain_is_one_by_its_interval(given, text):
    assert phrases.verdict(given) == text


def test_names_are_grouped_by_the_side_of_their_rows():
    rows = [(row(0.2, 0.1, 0.3), "a"), (row(-0.2, -0.3, -0.1), "b"), (row(0.3, 0.1, 0.5), "c"), (row(0.0), "d")]
    words = {"above": "ahead of", "below": "behind", "undecided": "level with"}
    assert phrases.grouped(rows, **words) == "ahead of a and c, behind b and level with d"
    assert phrases.grouped(rows[:1], **words) == "ahead of a"


@pytest.mark.parametrize(
    ("parts", "text"), [([], ""), (["", ""], ""), (["of 2 one", "", "At 3"], "Of 2 one; At 3."), (["a"], "A.")]
)
def test_clauses_become_one_sentence(parts, text):
    assert phrases.sentence(parts) == text
