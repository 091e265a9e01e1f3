"""Many-shot classification and symbolic sums: what is asked for follows from the prompt and from nothing else."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from support.example_checks import seeded, sound
from support.refusals import one_sentence

from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.tasks.arithmetic import Arithmetic
from kvlab.tasks.base import Example
from kvlab.tasks.icl import ManyShot

SHOT = re.compile(r"Item: (.+)\nLabel: (.+)\n\n")
TRAITS = r"a (?:\w+, ){0,3}(\w+) (\w+) \w+ from (\w+)"


# --- many shots ---


@pytest.mark.parametrize("classes", [2, 3, 6])
def test_shots_fill_the_length_and_the_labels_take_turns(lm, classes):
    for example in sound(lm, ManyShot(lengths=(512, 2048), trials=2, classes=classes).examples(lm)):
        shots = SHOT.findall(example.context)
        assert "".join(f"Item: {item}\nLabel: {label}\n\n" for item, label in shots) == example.context
        counts = Counter(label for _, label in shots)
        assert set(counts) <= set(example.marks["all_classes"]) and example.answers[0] in counts
        assert len(example.marks["all_classes"]) == (min(3, classes) if example.marks["kind"] == "source" else classes)
        assert max(counts.values()) - min(counts.values()) <= 5
        asked = re.fullmatch(r"Item: (.+)\nLabel:", example.question)[1]
        assert asked not in {item for item, _ in shots} and not example.chat


def test_the_rule_is_decided_by_one_trait(lm):
    for example in ManyShot(kinds=("rule",), lengths=(1024,), trials=6).examples(lm):
        shots = [(re.fullmatch(TRAITS, item).groups(), label) for item, label in SHOT.findall(example.context)]
        asked = re.search(TRAITS, example.question).groups()
        deciding = [
            trait
            for trait in range(3)
            if len({(traits[trait], label) for traits, label in shots}) == len({label for _, label in shots})
        ]
        assert len(deciding) == 1, "one trait decides, and the others do not"
        assert {label for traits, label in shots if traits[deciding[0]] == asked[deciding[0]]} == set(example.answers)


def test_topics_are_the_articles_of_the_sentences(lm):
    for example in ManyShot(kinds=("topic",), lengths=(512,), trials=2).examples(lm):
        for item, label in [*SHOT.findall(example.context), (example.question[6:-7], example.answers[0])]:
            text = corpus.document(f"squad/{label.replace(' ', '_')}").text
            assert item in " ".join(text.split())


@pytest.mark.parametrize(
    ("prediction", "score"),
    [(" dax", 1), ("Dax.\nItem: a pot", 1), ("", 0), ("dax and wug", 0), ("wug\ndax", 0), ("\n\ndax", 1)],
)
def test_only_the_first_line_counts(prediction, score):
    assert ManyShot().score(Example("x", "c", "q", ("dax",), 12), prediction) == {"score": score}


# --- sums ---


def evaluate(text):
    """Every variable's value, in order; an assignment that uses a later one raises."""
    values, uses = {}, {}
    for name, right in re.findall(r"(\w+) = (.+?)\.(?= |\n)", text):
        assert name not in values
        uses[name] = re.findall(r"[a-z]\w*", right)
        values[name] = sum(
            (-1 if sign == "-" else 1) * (values[part] if part in uses and part in values else int(part))
            for sign, part in re.findall(r"(?:^|([+-]) )(\w+)", right)
        )
    return values, uses


def test_sums_can_be_worked_out_and_need_their_difficulty(lm):
    for example in sound(lm, Arithmetic(difficulties=(0, 1, 3, 8), trials=3).examples(lm)):
        values, uses = evaluate(example.context.split("\n\n", 1)[1])
        asked = re.fullmatch(r"What is the value of (\w+)\?", example.question)[1]
        assert example.answers == (str(values[asked]),) and example.prefix == f" The value of {asked} is"
        steps, name = 0, asked
        while uses[name]:
            (name,), steps = uses[name], steps + 1
        assert steps == example.marks["difficulty"]
        assert [name for name, value in values.items() if value == values[asked]] == [asked]
        assert example.context.count(f" {example.answers[0]}.") == (example.marks["difficulty"] == 0)
        assert len(values) > example.marks["length"] / 15


@pytest.mark.parametrize(
    ("prediction", "score"),
    [(" 17.", 1), ("17", 1), (" bak + 4 = 17", 0), ("-17", 0), ("", 0), ("1,700", 0), ("seventeen", 0)],
)
def test_the_first_number_counts(prediction, score):
    assert Arithmetic().score(Example("x", "c", "q", ("17",), 12), prediction) == {"score": score}


# --- both ---


def test_the_same_seed_makes_the_same_bytes(lm):
    seeded(ManyShot, lm, lengths=(512,), trials=2)
    seeded(Arithmetic, lm, lengths=(256,), trials=2)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ManyShot(classes=1), "icl: classes: Input should be greater than or equal to 2"),
        (lambda: ManyShot(kinds=("rules",)), "icl: kinds.0: .*'rule'"),
        (lambda: Arithmetic(difficulties=(-1,)), "arithmetic: difficulties.0"),
        (lambda: Arithmetic(difficulty=2), "did you mean 'difficulties'"),
    ],
)
def test_bad_parameters_are_one_sentence(make, sentence):
    with one_sentence(sentence):
        make()


def test_too_short_for_a_chain(lm):
    with pytest.raises(KvlabError, match="arithmetic of difficulty 30: 128 tokens are too few"):
        next(Arithmetic(difficulties=(30,), lengths=(128,)).examples(lm))
