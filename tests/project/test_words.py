"""Texts are plain English: no file has more long sentences or banned words than words.csv allows it, nor fewer."""

from __future__ import annotations

import pytest
import words
from hypothesis import given
from hypothesis import strategies as st
from support.paths import ROOT

ALLOWED = words.allowed()
ANEW = "python tests/project/words.py --write"


@pytest.mark.parametrize("path", words.files())
def test_a_file_has_the_problems_that_are_listed_and_no_others(path):
    found = words.problems(ROOT / path)
    allowed = dict(zip(("long", "banned"), ALLOWED.get(path, (0, 0))))
    for kind, number in allowed.items():
        lines = [f"{path}:{problem}" for problem in found if problem.kind == kind]
        more = f"{len(lines)} problems, {number} allowed. Rewrite:\n" + "\n".join(lines)
        assert len(lines) <= number, more
        assert len(lines) == number, f"{len(lines)} problems left and {number} allowed in words.csv: run `{ANEW}`"


def test_exceptions_are_of_files_that_are_checked_and_have_problems():
    assert set(ALLOWED) <= set(words.files())
    assert all(sum(numbers) for numbers in ALLOWED.values())


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("kvlab refuses it. kvlab says why! Does it? Yes.", 4),
        (
            "One, e.g. the first (i.e. the oldest), as Li et al. say in Fig. 3, eq. (4) and p. 7: it stays; no more.",
            1,
        ),
        ("SnapKV (Li et al. 2024) needs transformers 5.16.1 or 2.6. It takes 0.5 s.", 2),
        ("Positions 0, 1, ... n stay, with heads, layers etc. in order. They end. etc. Then more.", 4),
        ('It reads *this one.* Then (the second.) Then "the third." Last', 4),
        ("A. Smith wrote kvlab.core and README.md in it.", 1),
        (words.plain("It reads `one`. Then the other."), 2),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text, number):
    assert len(words.sentences(text)) == number
    assert " ".join(words.sentences(text)) == text


SENTENCES = st.lists(
    st.sampled_from(
        ["It stays.", "kvlab 0.1.0 reads 3 files!", "As in Fig. 2, e.g. X: so it is; or not.", "Is it so?", "(It is.)"]
    ),
    min_size=1,
)


@given(SENTENCES)
def test_sentences_are_split_apart_as_they_were_joined(parts):
    assert words.sentences(" ".join(parts)) == parts


@given(st.lists(st.sampled_from(["one", "KV-cache", "1,000", "it's", "2/3", "(L)"])), st.sampled_from(["–", "&", "="]))
def test_marks_between_words_are_no_words(parts, mark):
    assert words.words(f" {mark} ".join(parts)) == len(parts)


def test_links_code_and_formulas_count_as_their_text_or_as_one_word():
    text = "**Read** [the page](docs/a%20b.md) on `kvlab list policies --json`, ``a ` b`` and $x + y = z$ <br> _now_."
    assert words.plain(text) == "Read the page on X, X and X now."
    assert words.plain("a_b * c and 2*3 ![an image](x.png)") == "a_b * c and 2*3"


def test_markdown_leaves_out_code_tables_headings_and_generated_blocks():
    page = """# A heading is no sentence

First paragraph
goes on.

| a | table |
|---|---|

* an item
* another,
  longer

1. a numbered one
   ```python
   a = "no prose. at all"
   ```
   and its end

<!-- generated: counts -->
Not typed.
<!-- end -->
> Quoted.

```
not this
```
:::{grid-item-card} Title
:link: docs/start
A card.
:::
"""
    assert [*words.markdown(page)] == [
        (3, "First paragraph goes on."),
        (9, "an item"),
        (10, "another, longer"),
        (13, "a numbered one"),
        (17, "and its end"),
        (22, "Quoted."),
        (29, "A card."),
    ]


def test_docstrings_leave_out_examples_and_separate_what_they_list():
    text = """Do it.

    Body of
    two lines.

    >>> kvlab.replay(trace)
    an output

    Parameters:
        budget: entries for
            each layer.
        window, kernel: numbers.

    Raises:
        KvlabError: wrong.
    """
    parts = [part for _, part in words.docstring(text, 1)]
    assert parts == [
        *("Do it.", "Body of two lines.", "Parameters:", "budget: entries for each layer."),
        *("window, kernel: numbers.", "Raises:", "KvlabError: wrong."),
    ]


MODULE = '''"""About the module."""
import warnings  # noqa: E402
def private(path):
    """Return the *name* of `path`."""
    if path:
        raise ValueError(f"{path!r} is " + ("small" if path < 3 else f"large: {path.name}") + "; use 3\\nor the other")
    warnings.warn("It does warn.")  # a reason
    raise TypeError(message(path, "key", f"{', '.join(path)} is {word('an own text')}"))
# Two lines
# of one reason.
@app.command(epilog="no prose")
def run(budget: Annotated[int, typer.Option("--budget", help="Entries of `x y`, or more.")] = 3):
    """Run it."""
'''


def test_code_gives_docstrings_comments_and_strings_of_several_words(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(MODULE, encoding="utf-8")
    assert [part for _, part in words.passages(path)] == [
        *(
            "About the module.",
            "Return the name of X.",
            "X is small; use 3",
            "or the other",
            "X is large: X; use 3",
        ),
        *("It does warn.", "X is X", "an own text", "Run it.", "Entries of X, or more."),
        *("a reason", "Two lines of one reason."),
    ]


def test_a_claims_fields_are_read_and_its_keys_are_not(tmp_path):
    path = tmp_path / "paper.yaml"
    path.write_text(
        "a long key:\n  note: >-\n    One\n    long note.\n  tests: [short, It has words.]\nempty:\n", encoding="utf-8"
    )
    assert [*words.passages(path)] == [(2, "One long note."), (5, "It has words.")]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (" ".join(["word"] * 25) + ".", []),
        (" ".join(["word"] * 26) + ".", ["long"]),
        (" ".join(["word"] * 14) + ". " + " ".join(["word"] * 14) + ".", []),
        ("They are told apart beside it.", ["banned", "banned"]),
        ("What it keeps is small.", ["banned"]),
        ("What does it keep?", []),
        ("An operation in place, a text held out, `held beside`, and what was carried out.", []),
        ("It is not unlike that one, not under it.", ["banned"]),
        ("It stays, so that a head, which is one, reads it.", ["banned"]),
    ],
)
def test_long_sentences_and_private_words_are_found(tmp_path, text, kinds):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    assert [problem.kind for problem in words.problems(page)] == kinds


def test_the_list_of_exceptions_shrinks_and_never_grows(tmp_path, monkeypatch, capsys):
    (tmp_path / "page.md").write_text("It is told. It is told.", encoding="utf-8")
    monkeypatch.setattr(words, "ROOT", tmp_path)
    monkeypatch.setattr(words, "ALLOWED", tmp_path / "words.csv")
    monkeypatch.setattr(words, "files", lambda: ["page.md"])
    words.ALLOWED.write_text("file,long,banned\npage.md,0,1\n", encoding="utf-8")
    assert words.main(["--write"]) == 1
    assert words.allowed() == {"page.md": (0, 1)}
    words.ALLOWED.write_text("file,long,banned\npage.md,3,4\ngone.md,1,1\n", encoding="utf-8")
    assert words.main(["--write"]) == 0
    assert words.allowed() == {"page.md": (0, 2)}
    assert words.main(["page.md"]) == 1
    assert capsys.readouterr().out.count("page.md:1: banned word: told") == 2
