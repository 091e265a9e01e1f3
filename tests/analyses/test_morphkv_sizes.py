"""MorphKV's cache sizes: the formula against counting, tensors, measurement and print."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.live_runs import prompt

import kvlab
from kvlab.analyses.morphkv import responses, sizes, windows
from kvlab.analyses.morphkv.sizes import entries, stored_bytes
from kvlab.core.geometry import Geometry
from kvlab.errors import KvlabError


def counted(method: str, prompt_tokens: int, response: int, budget: int) -> int:
    """What one KV head holds, token by token, as section 5 describes the methods."""
    held = list(range(prompt_tokens))
    if method == "snapkv":
        held = held[:budget]
    for token in range(prompt_tokens, prompt_tokens + response):
        held.append(token)
        while method in ("h2o", "morphkv") and len(held) > budget:
            held.pop(0)
    return len(held)


@pytest.mark.parametrize("method", sizes.METHODS)
def test_entries_are_what_counting_gives(method):
    for given in ((5, 3, 10), (5, 30, 10), (40, 1, 10), (40, 30, 10), (10, 1, 10)):
        assert entries(method, *given) == counted(method, *given)
        assert entries(method, *given, sets=4) == 4 * counted(method, *given) or method in ("full", "morphkv")


def test_an_unknown_method_has_no_size():
    with pytest.raises(KvlabError, match="'quest' is none of full, snapkv, h2o, morphkv"):
        entries("quest", 1, 1, 1)


@pytest.mark.parametrize("shape", ["tiny-llama-gqa", "tiny-llama-mqa", "tiny-phi3", "hybrid-gemma3"])
@torch.inference_mode()
def test_predicted_bytes_are_those_of_tensors(tiny, shape):
    """A live run on a tiny model, step by step: what its stores hold is what the formula says."""
    lm, ids, (budget, window) = tiny(shape), prompt(50), (16, 4)
    model = sizes.of_model(lm)
    for name, method in responses.writing(budget, window).items():
        sets = model.group if name == "snapkv" else 1
        with kvlab.compress(lm.model, method) as session:
            past = lm.model(ids[:, :30], use_cache=True).past_key_values
            for step, token in enumerate(ids[0, 30:], 1):
                lm.model(token.view(1, 1), past_key_values=past)
                given = (model, name, 30, step, budget, window, sets)
                assert session.kv_bytes == stored_bytes(*given, score_bytes=0)
                assert session.kv_bytes + session.aux_bytes == stored_bytes(*given)


@pytest.mark.parametrize(("name", "kib"), [("Llama", 128), ("Mistral", 128), ("Phi4", 200), ("Qwen", 56)])
def test_a_token_of_the_papers_models_takes_what_is_known(name, kib):
    model = sizes.paper_models()[name]
    assert stored_bytes(model, "full", 0, 1, 0, element=2) == kib * 1024


def test_measured_bytes_meet_the_formula(random_traces):
    cuts = [windows.continuation(t, 30, 90, accumulate=True) for t in random_traces]
    found = responses.along_a_response(cuts, 24, 4)
    checked = sizes.against_formula(found.table, Geometry(2, 4, 2, 16), 24, 4)
    assert checked.metrics["sizes/deviation"] < 1e-6
    growth = {name: checked.metrics[f"growth/{name}"] for name in ("full", "snapkv", "h2o", "morphkv")}
    assert growth == pytest.approx({"full": 1, "snapkv": 2, "h2o": 0, "morphkv": 0}, abs=1e-6)
    wrong = sizes.against_formula(found.table, Geometry(2, 4, 2, 16), 24, 5)
    assert wrong.metrics["sizes/deviation"] > 0.01, "a window of another size would be seen"


def test_printed_sizes_by_hand():
    found = sizes.printed_sizes()
    assert sizes.implied_length("longwriter") == 600 / 0.25
    assert found.metrics["relative_size/longwriter/h2o"] == pytest.approx(0.25 * (4 + 4 + 4 + 7) / 4)
    assert found.metrics["relative_size/longgenbench/snapkv"] == pytest.approx((4 + 4 + 7) / 3)
    assert found.metrics["relative_size/longgenbench/h2o"] == pytest.approx(0.55 * (4 + 4 + 7) / 3, rel=1e-4)
    rows = 200 / (2 * 128)  # weights for each entry, beside the numbers of its key and value
    assert found.metrics["relative_size/longgenbench/morphkv_with_rows"] == pytest.approx(0.55 * (1 + rows), rel=1e-4)
    answer = (3 * 512 + 4 * 128 + 2 * 64 + 6 * 32) / 15  # the longest answers of table 3's tasks
    snapkv = 4 * (1024 + answer) / (2000 / 0.15)
    assert found.metrics["relative_size/longbench/snapkv"] == pytest.approx(snapkv, rel=1e-3)
    assert found.metrics["saving/longgenbench/h2o"] == pytest.approx(np.mean([1 - 1 / g for g in (4, 4, 7)]))


def test_sizes_over_lengths():
    table = sizes.over_lengths("Qwen", 2, [100, 1000]).set_index(["method", "tokens"])["gigabytes"]
    token = 2 * 56 * 1024 / 1e9
    assert table["full", 1000] == pytest.approx(1000 * token) and table["snapkv", 1000] == pytest.approx(7000 * token)
    assert table["h2o", 100] == pytest.approx(700 * token) and table["h2o", 1000] == pytest.approx(4200 * token)
    assert table["morphkv", 1000] == pytest.approx(600 * token)
