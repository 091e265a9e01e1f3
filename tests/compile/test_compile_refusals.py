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


def test_an_overlap_is_refused_by_name_and_by_content(reader, tmp_path):
    apart = corpus.document("sotu/1962")
    with one_sentence("sotu/1962 overlaps with sotu/1962"):
        compiling.learn(reader, settings(), [*DOCUMENTS, apart])
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
        (dict(contexts=9), "pool of 7"),
        (dict(bins=(0, 4)), "bins"),
        (dict(weights=(0.5, 2.0)), "neutral 1"),
        (dict(thresholds=(0.0,)), "at least two"),
        (dict(neutral=1.0), "neutral"),
        (dict(thresholds=(0.0, 1.5)), "thresholds"),
        (dict(samples=0, risk_samples=0), "neither"),
        (dict(sampels=3), "did you mean 'samples'"),
        (dict(alpha=-1.0), "alpha"),
        (dict(budget="many"), "budget"),
    ],
)
def test_bad_settings_are_one_sentence(changes, said):
    with one_sentence(said):
        settings(**changes)


def test_documents_and_models_that_do_not_fit(reader, tiny):
    with pytest.raises(KvlabError, match="311"):
        compiling.learn(reader, settings(lengths=(300,)), [Document("short", "A short text.")])
    with pytest.raises(KvlabError, match="beyond the"):
        compiling.learn(reader, settings(lengths=(60, 10**6)), DOCUMENTS)


def test_a_damaged_log_is_named_with_its_line(reader, tmp_path):
    journal = tmp_path / "journal.jsonl"
    for line in ("no json", "[1]", '{"kind": "heads"}'):
        journal.write_text(f'{{"key": "1"}}\n{line}\n')
        with pytest.raises(KvlabError, match=r"journal\.jsonl, line 2 is no line"):
            compiling.learn(reader, settings(), DOCUMENTS, journal)
    (tmp_path / "x.parquet").write_text("no table")
    for name, said in (("x.parquet", "no log"), ("y.parquet", "no such file")):
        with pytest.raises(KvlabError, match=said):
            compiling.load(tmp_path / name)


def test_a_log_that_cannot_be_written(reader, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KvlabError, match="cannot write"):
        compiling.learn(reader, settings(), DOCUMENTS, tmp_path / "file" / "journal.jsonl")


def test_two_do_not_write_one_log(reader, tmp_path):
    with FileLock(tmp_path / ".journal.jsonl.lock"), pytest.raises(KvlabError, match="another compilation"):
        compiling.learn(reader, settings(), DOCUMENTS, tmp_path / "journal.jsonl")
