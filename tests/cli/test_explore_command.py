"""`kvlab explore`: a page for each text, a sentence on stdout, and mistakes that are told before the model runs."""

from __future__ import annotations

import json
import re

import pytest
from support.commands import call

import kvlab
from kvlab.render.explorer.page import percent

TEXT = "The ferry left at six. The lamp on the pier was green, and the captain counted forty crates of salt. " * 3


@pytest.fixture
def desk(reader, tmp_path, monkeypatch):
    """A folder with a text, where commands find a tiny model and open no browser but this list."""
    opened = []
    monkeypatch.setattr("kvlab.inputs.models.load", lambda *_, **__: reader)
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ferry.txt").write_text(TEXT)
    return opened


def about(path):
    found = re.search('<script type="application/json" id="about">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_has_what_was_asked_for_and_the_sentence_is_true(desk, reader, tmp_path, capsys):
    policies = ["--policies", "streamingllm,snapkv,full", "--budget", "40,0.7", "--new-tokens", "6"]
    code, out, err = call(capsys, "explore", "ferry.txt", *policies)
    assert code == 0, err
    sentence, written = out.splitlines()
    path = tmp_path / "ferry.html"
    assert written == f"{path.name} ({path.stat().st_size / 1e6:.1f} MB)"
    page = about(path)
    trace = kvlab.capture(reader, kvlab.document("ferry.txt"), 6, policies=["snapkv"])
    assert page["policies"] == ["streamingllm", "snapkv", "full"]
    assert page["budgets"] == [40, int(0.7 * trace.prompt_length)] and page["start"]["budget"] == 40
    assert (page["prompt"], page["steps"]) == (trace.prompt_length, 6) and "".join(page["tokens"]).count("crates") >= 3
    lost = kvlab.replay(trace, kvlab.policy("streamingllm", budget=40)).mass_lost
    start = page["start"]
    assert sentence.startswith(
        f"At step {start['step']}, layer {start['layer']}, head {start['head']}, streamingllm lost "
        f"{percent(float(lost[start['layer'], start['head'], start['step'] - 1]))} of the attention"
    )
    assert desk == [], "nobody watches a pipe"


def test_a_terminal_gets_a_browser_unless_it_says_no(desk, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    short = ["explore", "ferry.txt", "--budget", "40", "--tokens", "60", "--new-tokens", "2", "--out", "why.html"]
    assert call(capsys, *short, "--no-open")[0] == 0 and desk == []
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert call(capsys, *short)[0] == 0 and desk == [(tmp_path / "why.html").as_uri()]


def test_effects_are_of_the_first_policy(desk, tmp_path, capsys):
    short = ["explore", "ferry.txt", "--budget", "40", "--new-tokens", "4", "--policies", "snapkv,random"]
    assert call(capsys, *short)[0] == 0
    assert about(tmp_path / "ferry.html")["effects"] is None
    code, _, err = call(capsys, *short, "--effects")
    assert code == 0, err
    assert about(tmp_path / "ferry.html")["effects"]["policy"] == "snapkv, budget 40"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ferry.txt", "--policies", "snapkv,dap"], "unknown policy 'dap'; did you mean 'dapq'?"),
        (["ferry.txt", "--policies", "snapkv"], "a page shows 2 to 4 different policies, not 1: snapkv"),
        (["ferry.txt", "--budget", "many"], "--budget takes numbers with commas between them, not 'many'"),
        (["ferry.txt", "--budget", "0"], "--budget 0 names no budget"),
        (["ferry.txt", "--budget", "12"], "snapkv: budget 12 is below the 33 entries"),
        (["nowhere.txt"], "there is no document or text file nowhere.txt"),
        ([], "Missing argument 'TEXT'"),
        (["ferry.txt", "--out", "no/such/page.html"], "there is no folder"),
    ],
)
def test_a_mistake_is_told_before_the_model_loads(arguments, said, desk, monkeypatch, capsys):
    monkeypatch.setattr("kvlab.inputs.models.load", lambda *_, **__: pytest.fail("the model was loaded"))
    code, out, err = call(capsys, "explore", *arguments)
    assert code != 0 and out == "" and len(err.splitlines()) == 1
    assert err.startswith(f"kvlab: {said}")


def test_a_budget_that_evicts_nothing_is_told_before_the_model_runs(desk, monkeypatch, capsys):
    monkeypatch.setattr("kvlab.traces.run.capture", lambda *_, **__: pytest.fail("the model ran"))
    code, _, err = call(capsys, "explore", "ferry.txt", "--tokens", "50", "--budget", "40,60")
    assert code == 1
    assert err.startswith("kvlab: a budget of 60 is not below the text's 50 tokens, so nothing is evicted;")
