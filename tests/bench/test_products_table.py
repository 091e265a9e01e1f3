"""The benchmark of products: both libraries' rows, and that they say the same."""

from __future__ import annotations

import pytest
import torch
from support.benchmarks import cells, imported, invoked

from kvlab.core import onednn


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_each_length_has_its_prefill_and_its_step(monkeypatch):
    monkeypatch.setenv(onednn.SWITCH, "0")  # the benchmark sets it, and this takes that back
    with imported(monkeypatch, "products") as (module,):
        sizes = ["--tokens", "8", "--tokens", "12", "--steps", "2", "--repeats", "2"]
        rows = cells(invoked(module.main, "--model", "random:tiny-llama-gqa", *sizes))[2:]
    parts = ["prefill, s", "prefill in kvlab, s", "a step, ms"]
    assert [row[1] for row in rows] == parts * 2 and [row[0] for row in rows] == ["8", "", "", "12", "", ""]
    for row in rows:
        low, high = map(float, row[5].split("-"))
        assert low <= float(row[4]) <= high
    assert all(float(row[6]) < 1e-3 for row in rows if row[1] != "a step, ms")


def test_the_logits_of_a_last_token_are_timed_for_one_text_and_for_two(monkeypatch):
    with imported(monkeypatch, "last_logits") as (module,):
        rows = cells(invoked(module.main, "--model", "random:tiny-llama-gqa", "--tokens", "4", "--repeats", "2"))[2:]
    assert [row[0] for row in rows] == ["1", "2"]
    for row in rows:
        low, high = map(float, row[4].split("-"))
        assert low <= float(row[3]) <= high


def test_an_unknown_model_is_told_in_a_sentence(monkeypatch):
    monkeypatch.setenv(onednn.SWITCH, "0")
    with imported(monkeypatch, "products") as (module,):
        done = invoked(module.main, "--model", "smollm3")
    assert done.exit_code == 1 and done.stderr.startswith("benchmark: ")
