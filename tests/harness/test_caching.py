"""The harness's own cache of what a model said (`--use_cache`) is of one model, policy, budget, storage and moment."""

from __future__ import annotations

import pytest
from sqlitedict import SqliteDict
from support.harness import ANSWERS, CHOICES, CHOSEN, PASSAGES, ROLLING, SNAPKV, evaluated, written

from kvlab.errors import KvlabError
from kvlab.harness.model import KvlabLM


@pytest.fixture
def choices(tmp_path):
    return written(tmp_path, CHOICES, "choices", CHOSEN[:1])


def test_a_second_run_takes_all_kinds_of_answers_from_the_cache_and_measures_nothing(reader, tmp_path, choices):
    records = [{"prompt": text, "answer": "x"} for text in PASSAGES[:2]]
    tasks = (
        choices,
        written(tmp_path, ANSWERS, "answers", records, new_tokens=4),
        written(tmp_path, ROLLING, "texts", [{"text": PASSAGES[0]}]),
    )
    first, again = (
        evaluated(KvlabLM(reader, rolling_chunk=50, **SNAPKV), *tasks, use_cache=str(tmp_path / "kept"))
        for _ in range(2)
    )
    told = [
        {task: [sample["resps"] for sample in samples] for task, samples in found["samples"].items()}
        for found in (first, again)
    ]
    assert told[0] == told[1] and first["results"] == again["results"]
    counts = {task: means["requests"] for task, means in first["config"]["kvlab"]["tasks"].items()}
    assert counts == {"kvlab_ferry": 3, "kvlab_said": 2, "kvlab_texts": 1}
    assert again["config"]["kvlab"]["tasks"] == {}


@pytest.mark.parametrize(
    "other",
    [
        dict(policy="knorm", budget=40),
        dict(SNAPKV, budget=41),
        dict(SNAPKV, window=4),
        dict(SNAPKV, storage="int8"),
        dict(SNAPKV, compress_at="context"),
        dict(SNAPKV, rolling_chunk=100),
        dict(SNAPKV, max_length=200),
    ],
    ids=str,
)
def test_a_cache_of_another_signature_is_refused(reader, tmp_path, choices, other):
    """Its keys tell the request alone, so the run would have the first one's scores."""
    where = str(tmp_path / "kept")
    evaluated(KvlabLM(reader, **SNAPKV), choices, use_cache=where)
    with pytest.raises(KvlabError, match=r"kept_rank0\.db are of .*snapkv\(budget=40, window=8.*another name") as told:
        evaluated(KvlabLM(reader, **other), choices, use_cache=where)
    assert "\n" not in str(told.value)


def test_what_is_asked_about_the_context_is_part_of_the_signature(reader, tmp_path, choices):
    where = str(tmp_path / "kept")
    for question in ("Question:", "Which"):
        model = KvlabLM(reader, compress_at="context", question=question, **SNAPKV)
        if question == "Question:":
            evaluated(model, choices, use_cache=where)
        else:
            with pytest.raises(KvlabError, match="question='Question:'.*question='Which'"):
                evaluated(model, choices, use_cache=where)


def test_entries_of_nobody_knows_what_are_refused(reader, tmp_path, choices):
    with SqliteDict(str(tmp_path / "kept_rank0.db"), autocommit=True) as kept:
        kept["0" * 64] = (-1.0, False)
    with pytest.raises(KvlabError, match="do not say which model and policy they are of"):
        evaluated(KvlabLM(reader, **SNAPKV), choices, use_cache=str(tmp_path / "kept"))


def test_batches_are_no_part_of_the_signature(reader, tmp_path, choices):
    """They change no score, so a larger one goes on with the cache."""
    where = str(tmp_path / "kept")
    first = evaluated(KvlabLM(reader, **SNAPKV), choices, use_cache=where)
    again = evaluated(KvlabLM(reader, batch_size=4, **SNAPKV), choices, use_cache=where)
    assert again["results"] == first["results"] and again["config"]["kvlab"]["tasks"] == {}
