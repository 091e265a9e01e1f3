"""RULER's generators against RULER's definitions, read back from the prompts by regular expressions."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from scipy.special import zeta
from support.example_checks import seeded, sound, tokens_before

from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.tasks.base import Example
from kvlab.tasks.ruler import KINDS, Ruler, string_match_all, string_match_part

NUMBER, WORD, UUID = r"\d{7}", r"[a-z]+-[a-z]+", r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NIAH = {  # hay, key, value, keys, values for each key, queries
    "niah_single_1": ("noise", WORD, NUMBER, 1, 1, 1),
    "niah_single_2": ("essay", WORD, NUMBER, 1, 1, 1),
    "niah_single_3": ("essay", WORD, UUID, 1, 1, 1),
    "niah_multikey_1": ("essay", WORD, NUMBER, 4, 1, 1),
    "niah_multikey_2": ("needles", WORD, NUMBER, None, 1, 1),
    "niah_multikey_3": ("needles", UUID, UUID, None, 1, 1),
    "niah_multivalue": ("essay", WORD, NUMBER, 1, 4, 1),
    "niah_multiquery": ("essay", WORD, NUMBER, 4, 1, 4),
}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


@pytest.fixture(scope="module")
def made(lm):
    """Three examples of every kind at 1,024 and 2,048 tokens."""
    examples = sound(lm, Ruler(lengths=(1024, 2048), trials=3).examples(lm))
    assert Counter(example.marks["kind"] for example in examples) == dict.fromkeys(KINDS, 6)
    return examples


def of(made, kind):
    return [example for example in made if example.marks["kind"] == kind]


def test_the_thirteen_tasks_and_their_new_tokens(made):
    assert len(KINDS) == 13
    for example in made:
        assert example.max_new_tokens == NEW_TOKENS[example.marks["kind"].partition("_")[0]]
        assert example.prefix.startswith(" ") and example.prefix == example.prefix.rstrip()


@pytest.mark.parametrize("kind", NIAH)
def test_needles(lm, made, kind):
    hay, key, value, n_keys, n_values, n_queries = NIAH[kind]
    what = "uuids" if value == UUID else "numbers"
    for example in of(made, kind):
        pairs = re.findall(rf"One of the special magic {what} for ({key}) is: ({value})\.", example.context)
        assert len(pairs) == example.context.count("One of the special magic")
        values = [found for _, found in pairs]
        keys = {found for found, _ in pairs}
        assert len(set(values)) == len(values), "a distractor has the value of another needle"
        if hay == "needles":
            assert len(keys) == len(pairs) > 5
        else:
            assert len(keys) == n_keys and len(pairs) == n_keys * n_values
        asked = [found for found in keys if re.search(rf"(?<![\w-]){found}(?![\w-])", example.question)]
        assert len(asked) == n_queries and all(found in example.prefix for found in asked)
        answers = [found for name, found in pairs if name in asked]
        assert sorted(answers) == sorted(example.answers) and len(answers) == n_queries * n_values
        assert all(example.prompt.count(answer) == 1 for answer in answers)
        single = n_queries * n_values == 1
        assert example.prefix.endswith(" mentioned in the provided text is" if single else " in the provided text are")
        assert (f"magic {what.removesuffix('s')} for" in example.prefix) == single
        if hay == "essay":
            assert "The grass is green" not in example.context
        if hay == "noise":
            assert example.context.count(NOISE) > 20
        if single:
            needle = f"One of the special magic {what} for {asked[0]} is: {answers[0]}."
            before, rest = tokens_before(lm, example.context, needle)
            assert abs(before / rest - example.marks["depth"]) < 0.06


def test_essays_come_from_the_text(made):
    text = " ".join(corpus.document("sotu/1962").text.split())
    for example in of(made, "niah_single_2"):
        hay = re.sub(r"One of the special magic .*?: \d+\. ?", "", example.context).split("\n")[1]
        assert sum(sentence in text for sentence in hay.split(". ")) >= len(hay.split(". ")) - 3


def test_variables_form_one_chain_of_four_hops(made):
    for example in of(made, "vt"):
        shown, task = example.context.split("\n\n\n")
        for part, letters in ((shown, 3), (task, 5)):
            (value,) = re.findall(rf"^VAR [A-Z]{{{letters}}} = (\d{{5}})$", part, re.M)
            hops = re.findall(rf"^VAR ([A-Z]{{{letters}}}) = VAR ([A-Z]{{{letters}}})$", part, re.M)
            chain = re.findall(r"^VAR ([A-Z]+) = \d", part, re.M)
            assert len(hops) == 4
            for name, before in hops:
                assert before == chain[-1], "each hop stands after the one that it uses"
                chain.append(name)
            assert len(set(chain)) == 5
            if part is task:
                assert tuple(chain) == example.answers and value in example.question and value in example.prefix
                assert "5 variables" in example.prefix and value not in shown
            else:
                assert part.endswith(" ".join(chain))
        assert not any(name in shown for name in example.answers)
        assert len(shown) < 0.45 * len(example.context)


@pytest.mark.parametrize(("size", "often", "seldom", "shown"), [(1024, 6, 1, (20, 3, 1)), (4096, 30, 3, (40, 10, 3))])
def test_common_words_have_rulers_frequencies(lm, size, often, seldom, shown):
    for example in sound(lm, Ruler(lengths=(size,), kinds=("cwe",), trials=2).examples(lm)):
        worked, task = (
            re.findall(r"(\d+)\. ([a-z]+)", part.partition("Question")[0]) for part in example.context.split("\n\n", 1)
        )
        assert [int(number) for number, _ in task] == list(range(1, len(task) + 1))
        counts = Counter(word for _, word in task)
        assert {word for word, count in counts.items() if count == often} == set(example.answers)
        assert len(example.answers) == 10 and set(counts.values()) == {often, seldom}
        assert sorted(Counter(word for _, word in worked).values()) == sorted(
            [shown[1]] * 10 + [shown[2]] * (shown[0] - 10)
        )
        assert not {word for _, word in worked} & set(counts)


def test_frequent_words_follow_the_zeta_distribution(made):
    for example in of(made, "fwe"):
        coded = re.findall(r"(?<![\w.])(?:[a-z]{6}|\.\.\.)(?= |\n)", example.context.split("comes. ", 1)[1])
        ranked = Counter(coded).most_common()
        assert ranked[0][0] == "..." and tuple(word for word, _ in ranked[1:4]) == example.answers
        words = (ranked[1][1] + 0.5) * 4 * zeta(2)
        for rank, (_, count) in enumerate(ranked[1:8], 2):
            assert abs(count + 0.5 - words / rank**2 / zeta(2)) < 1.1
        assert -3 <= ranked[0][1] - words / zeta(2) <= 20, "and a little noise to fill the length"
        assert len(ranked) <= example.marks["length"] // 50


def test_questions_have_their_paragraphs_and_no_other_with_an_answer(made):
    questions = {q.question.strip() for name in corpus.names("squad") for q in corpus.questions(name)}
    for kind, asked in (("qa_1", 1), ("qa_2", 2)):
        for example in of(made, kind):
            documents = re.split(r"Document \d+:\n", example.context)[1:]
            assert len(documents) == example.marks["documents"] > asked
            groups, first = [], 0
            for count in example.marks["groups"]:
                groups.append(example.answers[first : first + count])
                first += count
            assert first == len(example.answers) and len(groups) == asked
            holding = [
                i
                for i, text in enumerate(documents)
                if any(
                    re.search(rf"(?<!\w){re.escape(answer.lower())}(?!\w)", text.lower()) for answer in example.answers
                )
            ]
            assert 1 <= len(holding) <= asked
            assert all(any(answer in documents[i] for i in holding for answer in group) for group in groups)
            said = example.question.partition("Question: ")[2]
            parts = [said] if asked == 1 else re.fullmatch(r"\(1\) (.+) \(2\) (.+)", said).groups()
            assert len(parts) == asked and questions.issuperset(parts)


def test_the_same_seed_makes_the_same_bytes(lm):
    seeded(Ruler, lm, lengths=(1024,), trials=1)


def test_a_limit_is_spread_over_the_kinds(lm):
    few = list(Ruler(trials=2).examples(lm, 13))
    assert [example.marks["kind"] for example in few] == list(KINDS)


@pytest.mark.parametrize("size", [256, 512])
def test_short_prompts_where_the_kind_has_room(lm, size):
    kinds = tuple(kind for kind in KINDS if kind not in ("cwe", "vt") and (kind != "qa_2" or size > 256))
    sound(lm, Ruler(lengths=(size,), kinds=kinds, trials=3).examples(lm))


def test_mistakes_are_one_sentence(lm):
    with pytest.raises(KvlabError, match=r"ruler: kinds.0: .*'niah_single_1'"):
        Ruler(kinds=("niah",))
    with pytest.raises(KvlabError, match="ruler's cwe: 256 tokens are too few, since the shortest prompt"):
        next(Ruler(kinds=("cwe",), lengths=(256,)).examples(lm))
    with pytest.raises(KvlabError, match="more than the 8192"):
        next(Ruler(kinds=("niah_single_1",), lengths=(8100,)).examples(lm))
    with pytest.raises(KvlabError, match=r"ruler's fwe: .*100 tokens"):
        next(Ruler(kinds=("fwe",), lengths=(100,)).examples(lm))


@pytest.mark.parametrize(
    ("prediction", "references", "share", "any_of"),
    [
        ("1234567 and 7654321", ("1234567", "7654321"), 1.0, 1.0),
        ("1234567.", ("1234567", "7654321"), 0.5, 1.0),
        ("ABCDE FGHIJ", ("abcde", "fghij", "klmno", "pqrst"), 0.5, 1.0),
        ("", ("a",), 0.0, 0.0),
        ("the \x01Rhine\n", ("the\x02rhine", "Rhine"), 0.5, 1.0),
        ("partly", ("art",), 1.0, 1.0),
    ],
)
def test_string_matches(prediction, references, share, any_of):
    assert string_match_all(prediction, references) == share
    assert string_match_part(prediction, references) == any_of


def test_questions_score_by_part_and_two_questions_by_their_mean():
    def example(kind, groups):
        return Example("x", "c", "q", ("the Rhine", "Rhine", "1806"), 32, marks={"kind": kind, "groups": groups})

    assert Ruler().score(example("qa_1", [3]), "Rhine") == {"string_match": 1.0}
    assert Ruler().score(example("qa_2", [2, 1]), "Rhine") == {"string_match": 0.5}
    assert Ruler().score(example("qa_2", [2, 1]), "(1) the Rhine (2) 1806") == {"string_match": 1.0}
    assert Ruler().score(example("niah_multivalue", []), "Rhine") == {"string_match": pytest.approx(1 / 3)}
