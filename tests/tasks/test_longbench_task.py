"""LongBench as a task: its records become prompts that fit, with the question told apart, and are scored its way."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from support.longbench import record
from support.refusals import one_sentence
from support.texts import FERRY

from kvlab import scores
from kvlab.errors import KvlabError
from kvlab.tasks import longbench
from kvlab.tasks.longbench import LongBench, parts
from kvlab.tasks.longbench_prompts import PROMPTS

MINILONGBENCH = Path(__file__).parents[3] / "shared" / "data" / "minilongbench"
needs_data = pytest.mark.skipif(not MINILONGBENCH.is_dir(), reason="the sample of MiniLongBench is not there")


@pytest.fixture
def folder(tmp_path):
    """folder(records...): a folder with a file for each task."""

    def write(*records: dict) -> str:
        for row in records:
            with (tmp_path / f"{row['dataset']}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return str(tmp_path)

    return write


@pytest.fixture
def small(tiny):
    """A tiny model that reads text, with room for 2,048 tokens."""
    return tiny(tokenizer="smollm2-135m", max_position_embeddings=2048)


def tokens(lm, example) -> int:
    return lm.encode(example.prompt, chat="auto" if example.chat else False).shape[1]


def test_every_task_has_a_prompt_and_a_convention():
    assert list(PROMPTS) == list(scores.LONGBENCH)
    for task, prompt in PROMPTS.items():
        alone = task in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
        assert ("{input}" in prompt.after) != alone, task
    assert all("unanswerable" in part for part in (PROMPTS["qasper"].before, PROMPTS["qasper"].after))
    assert '"Paragraph 1"' in PROMPTS["passage_retrieval_en"].after and "段落1" in PROMPTS["passage_retrieval_zh"].after


@pytest.mark.parametrize("task", PROMPTS)
def test_a_record_becomes_a_prompt_with_its_question_last(folder, small, task):
    (example,) = LongBench(folder=folder(record(task, context=FERRY[:1000] + " {input} {x}"))).examples(small)
    rule = scores.LONGBENCH[task]
    assert example.id == f"{task}/{task}-1" and example.answers == ("Ilse Brandt",)
    assert (example.chat, example.max_new_tokens, example.prefix) == (rule.chat, rule.new_tokens, "")
    assert example.context.endswith(FERRY[:1000] + " {input} {x}")  # braces of a context are its own
    assert ("Who owned the piano?" in example.question) == ("{input}" in PROMPTS[task].after)
    assert example.question and example.marks["kind"] == task and example.marks["tokens"] == tokens(small, example)
    assert example.marks.get("all_classes") == (["Person", "Date"] if task in ("trec", "lsht") else None)


def test_a_ready_prompt_is_told_apart_where_its_question_begins(folder, small):
    ready = {"dataset": "hotpotqa", "answers": ["x"]}
    told = ready | {"id": "a", "prompt": FERRY + "\n\nQuestion: early\n\nmore\n\nQuestion: late?\nAnswer:"}
    untold = ready | {"id": "b", "prompt": FERRY + "\nquestion: who?"}
    whole = ready | {"id": "c", "prompt": "\n\nQuestion: who?" + " and more" * 5}
    first, second, third = LongBench(folder=folder(told, untold, whole)).examples(small)
    assert first.question == "\n\nQuestion: late?\nAnswer:" and first.prompt == told["prompt"]
    assert (second.context, second.question) == (untold["prompt"], "")
    assert (third.context, third.question) == (whole["prompt"], "")


@pytest.mark.parametrize("task", ["qasper", "triviaqa", "dureader"])
@pytest.mark.parametrize("length", [64 + 120, 300, 701])
def test_a_long_prompt_loses_its_middle(folder, small, task, length):
    text = "".join(f" {number}号钢琴" for number in range(1000))
    (example,) = LongBench(folder=folder(record(task, context=text)), length=length).examples(small)
    found = tokens(small, example)
    assert length - 4 <= found <= length and example.marks["tokens"] == found
    before, after = PROMPTS[task].before + text, PROMPTS[task].question("Who owned the piano?")
    assert example.question == after
    cut = next(i for i, (a, b) in enumerate(zip(example.context, before, strict=False)) if a != b)
    assert before.endswith(example.context[cut:]) and "\ufffd" not in example.prompt
    plain = [len(small.encode(part, chat=False)[0]) for part in (example.prompt[:cut], example.prompt[cut:])]
    assert abs(plain[0] - plain[1]) <= 16  # both sides of the cut may begin alike


def test_a_question_longer_than_half_is_cut_too(folder, small):
    question = "Who? " * 500 + "End"
    (example,) = LongBench(folder=folder(record("hotpotqa", context="short", input=question)), length=200).examples(
        small
    )
    assert tokens(small, example) <= 200 and example.question.endswith("End\nAnswer:")
    assert example.context == PROMPTS["hotpotqa"].before + "short" and len(example.question) < len(question) / 2


def test_the_model_s_context_less_the_answer_is_the_limit(folder, small):
    long = record("gov_report", context=FERRY * 10)
    (example,) = LongBench(folder=folder(long)).examples(small)
    assert 2048 - 512 - 4 <= tokens(small, example) <= 2048 - 512
    with pytest.raises(KvlabError, match="every prompt is longer than 2048 tokens"):
        list(LongBench(folder=folder(), longer="skip").examples(small))


def test_skipping_leaves_the_short_ones(folder, small):
    where = folder(record("qasper", _id="long", context=FERRY * 10), record("qasper", _id="short"))
    (example,) = LongBench(folder=where, length=1000, longer="skip").examples(small)
    assert example.id == "qasper/short"


def test_a_limit_is_spread_over_the_tasks(folder, small):
    wanted = ["narrativeqa", "qasper", "hotpotqa", "trec", "lcc"]
    where = folder(*(record(task, _id=str(i)) for task in wanted for i in range(3)))
    kinds = [example.marks["kind"] for example in LongBench(folder=where).examples(small, limit=7)]
    assert kinds == wanted + wanted[:2]
    kinds = [example.marks["kind"] for example in LongBench(folder=where).examples(small, limit=2)]
    assert kinds == ["narrativeqa", "hotpotqa"]
    every = list(LongBench(folder=where).examples(small))
    assert len({example.id for example in every}) == 15
    some = LongBench(folder=where, tasks="trec, lcc")
    assert [e.id for e in some.examples(small)][:2] == ["trec/0", "lcc/0"] and some.tasks == ("trec", "lcc")


def test_equal_ids_are_told_apart(folder, small):
    where = folder(record("qasper", _id="x"), record("qasper", _id="x", input="Another?"))
    assert [example.id for example in LongBench(folder=where).examples(small)] == ["qasper/x", "qasper/x#2"]


def test_answers_are_scored_by_the_task_s_metric(folder, small):
    where = folder(record("qasper"), record("trec", answers=["Person"]))
    asked, typed = LongBench(folder=where).examples(small)
    task = LongBench(folder=where)
    assert task.metric == "score"
    assert task.score(asked, "The Ilse Brandt.") == {"score": 1} and task.score(asked, "") == {"score": 0}
    assert task.score(typed, " Person\nDate") == {"score": 1} and task.score(typed, "Person Date") == {"score": 0.5}


def test_a_path_object_and_a_single_file(folder, small):
    where = Path(folder(record("qasper"), record("lcc")))
    assert [e.id for e in LongBench(folder=where / "lcc.jsonl").examples(small)] == ["lcc/lcc-0"]


def test_mistakes(folder, small, tiny, tmp_path):
    where = folder(record("qasper"))
    for parameters, match in [
        ({}, "folder=... names JSONL"),
        ({"folder": where, "tasks": ["qaspr"]}, "did you mean 'qasper'"),
        ({"folder": where, "tasks": ["trec"]}, "no records of trec, only of qasper"),
        ({"folder": str(tmp_path / "none")}, "no such file"),
    ]:
        with pytest.raises(KvlabError, match=match):
            list(LongBench(**parameters).examples(small))
    for parameters, match in [({"length": 5}, "length: "), ({"longer": "drop"}, "longer: "), ({"foldr": ""}, "folder")]:
        with pytest.raises(KvlabError, match=match):
            LongBench(**parameters)
    with pytest.raises(KvlabError, match="no tokenizer"):
        list(LongBench(folder=where).examples(tiny()))
    with pytest.raises(KvlabError, match="too few for a prompt of qasper"):
        list(LongBench(folder=where).examples(tiny(tokenizer="smollm2-135m", max_position_embeddings=150)))
    (tmp_path / "other.jsonl").write_text('{"prompt": "x", "answers": []}\n')
    with pytest.raises(KvlabError, match="unknown LongBench task 'other'"):
        list(LongBench(folder=where).examples(small))


def test_the_hub_is_asked_once_and_only_when_the_user_wants_it(own_home, tmp_path, small, monkeypatch):
    import huggingface_hub

    archive, asked = tmp_path / "data.zip", []
    with zipfile.ZipFile(archive, "w") as made:
        for task in PROMPTS:
            made.writestr(f"data/{task}.jsonl", json.dumps(record(task)) + "\n")
        made.writestr("data/qasper_e.jsonl", "not ours")
        made.writestr("../outside.jsonl", "nor this")

    def download(*place, **options):
        asked.append((place, options))
        return str(archive)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    for _ in range(2):
        assert len(list(LongBench(hub=True, length=600).examples(small))) == 21
    assert asked == [(longbench.HUB, {"repo_type": "dataset"})]
    assert {p.name for p in own_home.rglob("*.jsonl")} == {f"{task}.jsonl" for task in PROMPTS}


def test_without_a_network_the_hub_is_one_sentence(own_home, small, monkeypatch):
    import huggingface_hub

    def download(*_, **__):
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with one_sentence(r"cannot get data.zip .* \(no route to host\); give folder="):
        list(LongBench(hub=True).examples(small))
    assert not list(own_home.rglob("*.jsonl"))


@needs_data
def test_the_sample_of_all_21_tasks_loads(lm):
    task = LongBench(folder=MINILONGBENCH)
    found = list(task.examples(lm, limit=42))
    assert len(found) == 42 and {example.marks["kind"] for example in found} == set(PROMPTS)
    assert all(example.question and example.context for example in found)
    for example in found:
        assert example.marks["tokens"] + example.max_new_tokens <= lm.context_length
        best = task.score(example, example.answers[0])["score"]
        assert best == pytest.approx(1, abs=1e-7) or example.marks["kind"] in ("trec", "lsht", "lcc", "repobench-p")


@needs_data
def test_ready_prompts_are_left_as_they_are(lm):
    from kvlab.inputs import longbench_records

    for sample in longbench_records.read(MINILONGBENCH):
        context, question = parts(sample)
        assert context + question == sample.prompt and len(question) > 0
    assert list(LongBench(folder=MINILONGBENCH, length=4000, longer="skip", tasks="qasper").examples(lm))
