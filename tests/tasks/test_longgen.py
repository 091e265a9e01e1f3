"""LongGenBench's checks on responses written by hand, its records, and the short prompts that are made here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import KvlabError
from kvlab.tasks import longgen
from kvlab.tasks.base import Example
from kvlab.tasks.longgen import LongGen, entries, holds
from kvlab.tasks.longgen_prompts import SHORT

LONGGENBENCH = Path(__file__).parents[3] / "shared" / "data" / "longgenbench_short.jsonl"
needs_data = pytest.mark.skipif(not LONGGENBENCH.is_file(), reason="the sample of LongGenBench is not there")

CHECKS = (
    "once 2: my wife birthday",
    "once 5: lobster soup",
    "range 3: holidays at the lake",
    "range 4: holidays at the lake",
    "periodic 1: baking bread",
    "periodic 4: baking bread",
)
DIARY = Example("diary/x", "Write.", "", CHECKS, 500, True, "#*# Week 1:", {"type": "Week", "entries": 5})


@pytest.fixture
def small(tiny):
    """A tiny model that reads text, with room for 4,096 tokens."""
    return tiny(tokenizer="smollm2-135m", max_position_embeddings=4096)


# --- the checks ---


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            " We baked bread.\n#*# Week 2: my wife's birthday.\n#*# Week 3: A holiday at the lake.\n"
            "#*# Week 4: still at the lake, holidays; bread baked.\n#*# Week 5: Soup of lobsters.\n*** finished ***",
            (1, 1, 1, 1, 1, 1),
        ),
        (" We baked bread.\n#*# Week 2: my wife's birthday.", (0.4, 0.5, 0, 0.5, 1 / 3, 1)),
        (" Nothing.\n#*# Week 2: Nothing.", (0.4, 0, 0, 0, 0, 0)),
        ("", (0, 0, 0, 0, 0, 0)),
        ("\n#*# Week 2:\n#*# Week 3 (May):\n#*# Week 4: .", (0, 0, 0, 0, 0, 0)),  # headings alone
        (" a\n#*# Week 1: bake bread\n#*# Week 9: x\n#*# Month 2: birthday wife", (0.2, 0, 0, 0.5, 1 / 6, 1)),
        (" bread, baking\n*** finished ***\n#*# Week 2: my wife's birthday", (0.2, 0, 0, 0.5, 1 / 6, 1)),
        (" baking bread, my wife's birthday, lobster soup, holidays at the lake", (0.2, 0, 0, 0.5, 1 / 6, 1)),
    ],
)
def test_a_response_and_its_scores(answer, expected):
    found = LongGen().score(DIARY, answer)
    assert list(found) == ["completion", "once", "range", "periodic", "accuracy", "accuracy_written"]
    assert list(found.values()) == pytest.approx(expected)


def test_a_kind_that_was_not_asked_for_is_left_out():
    asked = Example("x", "Write.", "", ("once 1: bread",), 5, marks={"type": "Week", "entries": 2})
    assert LongGen().score(asked, "#*# Week 1: bread") == {
        "completion": 0.5,
        "once": 1,
        "accuracy": 1,
        "accuracy_written": 1,
    }
    nothing = Example("x", "Write.", "", (), 5, marks={"type": "Week", "entries": 2})
    assert LongGen().score(nothing, "#*# Week 1: bread")["accuracy"] == 0


def test_entries_are_told_by_unit_and_number():
    text = (
        "before #*# Menu Week 1 (January 1st - January 7th): soup #*#menu week 2\nfish #*# Menu Week 3: old "
        "#*# Menu Week 3: new #*# Menu Week 12: too many #*# Week 4: another unit #*# see Menu Week 5: x"
    )
    assert entries(text, "Menu Week", 11) == {1: "(January 1st - January 7th): soup", 2: "fish", 3: ": new"}
    assert entries("#*# Block 2 (1, 0): a park", "Block", 4) == {2: "(1, 0): a park"}


@pytest.mark.parametrize(
    ("entry", "phrase", "met"),
    [
        ("We explored art galleries and a museum in London", "Exploring the art galleries and museums of London", True),
        ("We went to a gallery", "Exploring the art galleries and museums of London", False),
        ("The birthday of my husband!", "husband (yourself) birthday", True),
        ("the birthday", "husband (yourself) birthday", False),
        ("Child's birthday, we had cake with my child", "my child_1 birthday", True),
        ("a RETAIL store", "retail store", True),
        ("stored details", "retail store", False),
        ("Pasta Wednesdays: spaghetti carbonara", "Pasta Wednesdays featuring Spaghetti Carbonara", True),
        ("pasta: spaghetti with tomatoes", "Pasta Wednesdays featuring Spaghetti Carbonara", False),
        ("", "retail store", False),
        ("anything", "(the)", False),
    ],
)
def test_whether_an_entry_holds_a_phrase(entry, phrase, met):
    assert holds(entry, phrase) is met


def test_the_share_of_words_is_a_parameter():
    assert holds("a gallery in London", "art galleries of London", 0.5)
    assert not holds("a gallery in London", "art galleries of London", 1)
    assert LongGen(share=0.5).score(DIARY, " bread")["periodic"] == 0.5


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="#* Wek12345:\nbread", max_size=200) | st.text(max_size=60))
def test_scores_lie_between_0_and_1(answer):
    assert all(0 <= value <= 1 for value in LongGen().score(DIARY, answer).values())


# --- the prompts that are made ---


def demands(prompt: str) -> dict[str, list[tuple[int, str]]]:
    """What a made prompt plans for which entry, read back from its text."""
    unit = r"(?:Menu Week|Week|Floor|Block)"
    found = {"once": [(int(n), event) for n, event in re.findall(rf"^- {unit} (\d+): (.*)\.$", prompt, re.M)]}
    ((first, last, over),) = re.findall(rf"^- From {unit} (\d+) to {unit} (\d+): (.*)\.$", prompt, re.M)
    found["range"] = [(entry, over) for entry in range(int(first), int(last) + 1)]
    ((period, start, again),) = re.findall(rf"^- Every (\d+) \w+, starting from {unit} (\d+): (.*)\.$", prompt, re.M)
    number = int(re.search(r"Write all (\d+) entries", prompt)[1])
    found["periodic"] = [(entry, again) for entry in range(int(start), number + 1, int(period))]
    return found


@pytest.mark.parametrize("wanted", [6, 7, 8, 11, 20, 60])
def test_what_a_made_prompt_asks_for_is_what_is_checked(small, wanted):
    found = list(LongGen(entries=wanted, seed=3).examples(small))
    assert len(found) == 40 and len({example.id for example in found}) == 40
    assert [example.marks["kind"] for example in found[:4]] == list(SHORT)
    for example in found:
        asked = demands(example.prompt)
        planned = [f"{kind} {entry}: {event}" for kind, those in asked.items() for entry, event in those]
        assert tuple(planned) == example.answers
        numbers = [int(check.split()[1].rstrip(":")) for check in planned]
        assert len(set(numbers)) == len(numbers) and set(numbers) <= set(range(1, wanted + 1))
        assert len(asked["once"]) >= 2 <= len(asked["range"])
        assert example.question == "" and example.chat and example.prefix == f"#*# {example.marks['type']} 1:"


def obedient(example: Example) -> str:
    """The response that does just what was asked for."""
    events = {}
    for check in example.answers:
        _, number, event = re.fullmatch(r"(\w+) (\d+): (.*)", check).groups()
        events[int(number)] = f"{events.get(int(number), '')} {event}"
    said = [
        f"#*# {example.marks['type']} {n}: Today there was {events.get(n, 'nothing')}."
        for n in range(1, example.marks["entries"] + 1)
    ]
    return "\n".join(said).removeprefix(example.prefix) + "\n*** finished ***"


def test_an_obedient_answer_scores_1_and_another_s_does_not(small):
    task = LongGen(number=3)
    found = list(task.examples(small))
    for example in found:
        assert set(task.score(example, obedient(example)).values()) == {1}
    for example, later in zip(found, found[4:], strict=False):
        assert task.score(example, obedient(later))["accuracy"] < 1


def test_the_things_of_a_kind_are_told_apart_by_their_words():
    for short in SHORT.values():
        events = [*short.once, *short.range, *short.periodic]
        assert len(set(events)) == len(events)
        for event in events:
            assert [other for other in events if holds(event, other)] == [event]


def test_the_same_seed_gives_the_same_bytes(small):
    def made(**parameters) -> list[str]:
        return [repr(example) for example in LongGen(**parameters).examples(small)]

    assert made(seed=5) == made(seed=5) != made(seed=6)
    assert made(seed=5, number=2) == made(seed=5)[:8]
    assert [repr(e) for e in LongGen(seed=5).examples(small, limit=6)] == made(seed=5)[:6]


def test_the_answer_fits_what_the_model_takes(small, tiny):
    example = next(LongGen().examples(small))
    prompt = small.encode(example.prompt).shape[1] + len(small.tokenizer(example.prefix)["input_ids"])
    assert example.marks["tokens"] == prompt and example.max_new_tokens == 50 + 8 * (12 + 2 * 20)
    assert next(LongGen(new_tokens=100).examples(small)).max_new_tokens == 100
    cramped = tiny(tokenizer="smollm2-135m", max_position_embeddings=prompt + 100)
    assert next(LongGen().examples(cramped)).max_new_tokens == 100
    with pytest.raises(KvlabError, match="no room for an answer"):
        next(LongGen().examples(tiny(tokenizer="smollm2-135m", max_position_embeddings=64)))
    with pytest.raises(KvlabError, match="no tokenizer"):
        next(LongGen().examples(tiny()))


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"entries": 5}, "entries: "),
        ({"share": 0}, "share: "),
        ({"entrys": 8}, "did you mean 'entries'"),
    ],
)
def test_parameters_are_checked(parameters, match):
    with pytest.raises(KvlabError, match=match):
        LongGen(**parameters)


# --- its file ---

RECORD = {
    "prompt": "Write.\n*** started ***\n#*# Floor 1:",
    "checks_once": {"2": "bank"},
    "checks_range": {},
    "checks_periodic": {"1": "roof terrace"},
    "type": "Floor",
    "prefix": "#*# Floor 1:",
    "number": 4,
}


def test_a_record_s_prefix_begins_the_answer(tmp_path, small):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(RECORD) + "\n\n" + json.dumps(RECORD | {"type": "Room", "prefix": None}) + "\n")
    first, second = LongGen(file=path).examples(small)
    assert (first.prompt, first.prefix) == ("Write.\n*** started ***", "#*# Floor 1:")
    assert first.answers == ("once 2: bank", "periodic 1: roof terrace") and first.id == "skyscraper/own-1"
    assert second.prompt.endswith("#*# Floor 1:") and second.prefix == "" and second.id == "Room/own-3"
    assert not next(LongGen(file=path, chat=False).examples(small)).chat
    scored = LongGen(file=path).score(first, " a terrace on the roof #*# Floor 2: a bar")
    assert scored == {"completion": 0.5, "once": 0, "periodic": 1, "accuracy": 0.5, "accuracy_written": 0.5}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is empty"),
        ("{", "line 1 is no record"),
        ("[]", "line 1 is no record"),
        ("{}", "'type' is missing"),
        (json.dumps(RECORD | {"number": "many"}), "line 1 is no record"),
        (json.dumps(RECORD | {"checks_once": {"x": "y"}}), "line 1 is no record"),
        (json.dumps(RECORD | {"checks_once": ["x"]}), "line 1 is no record"),
        (json.dumps(RECORD | {"prompt": 3}), "line 1 is no record"),
    ],
)
def test_files_that_are_none_of_its(tmp_path, small, text, match):
    path = tmp_path / "own.jsonl"
    path.write_text(text)
    with pytest.raises(KvlabError, match=match):
        list(LongGen(file=str(path)).examples(small))
    with pytest.raises(KvlabError, match="no such file"):
        list(LongGen(file=str(tmp_path / "none.jsonl")).examples(small))


@needs_data
def test_the_sample_of_longgenbench(lm):
    task = LongGen(file=LONGGENBENCH)
    found = list(task.examples(lm))
    assert len(found) == 40
    assert [example.marks["kind"] for example in found[:8]] == 2 * ["diary", "skyscraper", "menu", "city"]
    for example in found:
        assert example.prefix and not example.prompt.endswith(example.prefix)
        assert example.max_new_tokens + example.marks["tokens"] <= lm.context_length
        assert set(task.score(example, obedient(example)).values()) == {1}
    assert longgen.read(LONGGENBENCH)[0].marks == {"kind": "diary", "type": "Week", "entries": 52}
