"""What `kvlab compile` does not take: texts that overlap, settings that do not fit, and damaged logs."""

from __future__ import annotations

import pytest
from filelock import FileLock
from support.compiling import DOCUMENTS, settings
from support.refusals import one_sentence

from kvlab import compile as compiling
from kvlab.analyses import texts
from kvlab.compile.contexts import HELD_APART, checked
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.inputs.corpus import Document

# --- what is refused ---


def test_the_texts_of_the_analyses_are_held_apart():
    assert set(texts.DOCUMENTS) <= set(HELD_APART) and not set(HELD_APART) & set(compiling.DOCUMENTS)


def test_an_overlap_is_refused_by_name_and_by_content(reader):
    apart = corpus.document("sotu/1962")
    with one_sentence("sotu/1962 overlaps with sotu/1962"):
        compiling.measure(reader, settings(), [*DOCUMENTS, apart])
    paragraph = max(apart.text.splitlines(), key=len)
    with pytest.raises(KvlabError, match="my own overlaps with sotu/1962"):
        checked([Document("my own", "Something else.\n" + "  ".join(paragraph.split(" ")) + "\nThe end.")])
    assert checked(DOCUMENTS) == DOCUMENTS
    with pytest.raises(KvlabError, match="nothing to learn from"):
        checked([])


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(lengths=(60, 16)), "fits the budget"),
        (dict(weights=(0.5, 2.0)), "neutral 1"),
        (dict(weights=(1.0,)), "at least two"),
        (dict(level=1.0), "level"),
        (dict(budgts=3), "did you mean 'budgets'"),
        (dict(budgets="many"), "budgets"),
    ],
)
def test_bad_settings_are_one_sentence(changes, said):
    with one_sentence(said):
        settings(**changes)


def test_a_damaged_log_is_named_with_its_line(reader, tmp_path):
    journal = tmp_path / "journal.jsonl"
    for line in ("no json", "[1]", '{"kind": "heads"}'):
        journal.write_text(f'{{"key": "1"}}\n{line}\n')
        with pytest.raises(KvlabError, match=r"journal\.jsonl, line 2 is no line"):
            compiling.measure(reader, settings(), DOCUMENTS, journal)


def test_half_a_line_is_cut_off_and_somebody_elses_file_is_left(reader, tmp_path):
    journal = tmp_path / "journal.jsonl"
    compiling.measure(reader, settings(), DOCUMENTS[:1], journal)
    whole = journal.read_text()
    journal.write_text(whole + '{"key": "1234", "kind": "al')
    compiling.measure(reader, settings(), DOCUMENTS[:1], journal)
    assert journal.read_text() == whole
    journal.write_text("a letter without an end")
    with pytest.raises(KvlabError, match="is no log"):
        compiling.measure(reader, settings(), DOCUMENTS[:1], journal)
    assert journal.read_text() == "a letter without an end"


def test_a_log_that_cannot_be_written(reader, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KvlabError, match="cannot write"):
        compiling.measure(reader, settings(), DOCUMENTS, tmp_path / "file" / "journal.jsonl")


def test_two_do_not_write_one_log(reader, tmp_path):
    with FileLock(tmp_path / ".journal.jsonl.lock"), pytest.raises(KvlabError, match="another compilation"):
        compiling.measure(reader, settings(), DOCUMENTS, tmp_path / "journal.jsonl")
