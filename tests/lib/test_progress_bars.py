"""Bars for what takes long, and torch's threads: nothing for what is short or unseen, an estimate for the rest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from support.texts import FERRY

import kvlab
from kvlab.core.hookable import layers_of
from kvlab.lib import progress_bars
from kvlab.traces import retrieval_heads, shared


@pytest.fixture
def terminal(monkeypatch, capsys):
    """terminal(): what was written to stderr, which is taken for a terminal."""
    monkeypatch.setattr(progress_bars, "watched", lambda: True)
    return lambda: capsys.readouterr().err


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(progress_bars, "DELAY", 1e-9)


IDS = torch.arange(3, 43)


def calls(lm, trace):
    """Everything that can take long, by name."""
    return {
        "capture": lambda: kvlab.capture(lm, IDS, new_tokens=3),
        "several": lambda: kvlab.capture(lm, [IDS, IDS + 1], new_tokens=3),
        "replay": lambda: kvlab.replay(trace, ["streamingllm", "full"], budgets=range(5, 15)),
        "fidelity": lambda: kvlab.fidelity(lm, kvlab.policy("streamingllm", budget=8), [IDS, IDS + 1], new_tokens=3),
        "loops": lambda: kvlab.closed_against_open(lm, kvlab.policy("streamingllm", budget=8), IDS, new_tokens=3),
        "shared": lambda: shared.shared(lm, [IDS, IDS + 1], new_tokens=3),
    }


NAMES = ["capture", "several", "replay", "fidelity", "loops", "shared"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_short_shows_nothing(tiny, terminal, own_home, name):
    lm = tiny()
    calls(lm, kvlab.capture(lm, IDS, new_tokens=3))[name]()
    assert terminal() == ""


@pytest.mark.parametrize("name", NAMES)
def test_what_is_long_shows_how_far_it_is_and_takes_it_away(tiny, terminal, at_once, own_home, monkeypatch, name):
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    lm = tiny()
    trace = kvlab.capture(lm, IDS, new_tokens=3, progress=False)
    hooks = [len(module._forward_hooks) for module in layers_of(lm.model)]
    # Every update, however quick.
    monkeypatch.setattr(progress_bars, "_bar", slow_bar(progress_bars._bar))
    calls(lm, trace)[name]()
    said = terminal()
    shares = [int(share) for share in re.findall(r"(\d+)%", said)]
    assert len(set(shares)) > 2 and 0 < max(shares) <= 100, said
    assert re.search(r"about \d\d:\d\d left|<\d\d:\d\d", said)
    assert said.rstrip(" ").endswith("\r"), "the line is empty in the end"
    assert [len(module._forward_hooks) for module in layers_of(lm.model)] == hooks


def slow_bar(make):
    """Bars that draw every update."""
    return lambda *given, **more: make(*given, **more, mininterval=0, miniters=0)


@pytest.mark.parametrize("new_tokens", [0, 5])
def test_a_capture_ends_at_all_of_its_work(tiny, monkeypatch, new_tokens):
    """What is planned is what is run: prefill, pseudo-queries and each step."""
    moved = []
    monkeypatch.setattr(progress_bars, "_bar", lambda what, progress, total, **more: Counter(moved, total))
    lm = tiny()
    kvlab.capture(lm, IDS, new_tokens=new_tokens, pseudo=["dapq"])
    pseudo = len(kvlab.policy("dapq", budget=40).pseudo_tokens(IDS, 256, None))
    assert moved[-1] == pytest.approx(len(IDS) + pseudo + new_tokens + progress_bars.PASS * (2 + new_tokens))


class Counter(SimpleNamespace):
    """A bar that writes its place into a list."""

    def __init__(self, moved, total):
        super().__init__(moved=moved, total=total, n=0.0, disable=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def update(self, by=1):
        self.n += by
        self.moved.append(self.n)


def test_both_loops_and_fidelity_end_at_all_of_their_work(tiny, monkeypatch):
    moved, totals = [], []

    def bar(what, progress, total, **more):
        made = Counter(moved if progress is None else [], total)
        totals.extend([total] if progress is None else [])
        return made

    monkeypatch.setattr(progress_bars, "_bar", bar)
    lm = tiny()
    kvlab.closed_against_open(lm, kvlab.policy("streamingllm", budget=8), IDS, new_tokens=4)
    assert moved[-1] == pytest.approx(totals[-1])
    kvlab.fidelity(lm, kvlab.policy("streamingllm", budget=8), [IDS, IDS[:20]], new_tokens=4)
    assert moved[-1] == pytest.approx(totals[-1])


def test_where_nobody_watches_nothing_is_said(tiny, at_once, capsys):
    lm = tiny()
    trace = kvlab.capture(lm, [IDS, IDS + 1], new_tokens=3)[0]
    kvlab.replay(trace, ["streamingllm"], budgets=range(5, 15))
    assert capsys.readouterr() == ("", "")
    kvlab.replay(trace, ["streamingllm"], budgets=range(5, 15), progress=True)
    assert "replay" in capsys.readouterr().err, "but where it is asked for"


@pytest.mark.parametrize("tty", [True, False])
def test_outside_a_notebook_a_terminal_is_watched(monkeypatch, tty):
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: tty))
    assert progress_bars.watched() is tty


@pytest.mark.parametrize("asks", [True, False])
def test_a_notebook_is_watched_if_its_front_end_can_ask(monkeypatch, asks):
    """papermill and nbconvert cannot, and would save the bar in the notebook."""
    kernel = SimpleNamespace(get_parent=lambda: {"content": {"allow_stdin": asks}})
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=kernel))
    assert progress_bars.watched() is asks


def test_heads_are_counted_by_needles(lm, terminal, at_once, monkeypatch):
    from kvlab.inputs.corpus import Document

    monkeypatch.setattr(progress_bars, "_bar", slow_bar(progress_bars._bar))
    retrieval_heads.measure(lm, context=64, needles=2, hay=[Document("ferry", FERRY)])
    said = terminal()
    assert "heads" in said and "2/2" in said


def test_what_cannot_tell_how_far_it_is_tells_its_time(terminal, at_once):
    with progress_bars.waiting("loading a model"):
        time.sleep(1.2)
    assert "loading a model, 00:01" in terminal()
    with pytest.raises(ZeroDivisionError), progress_bars.waiting("loading a model"):
        raise ZeroDivisionError


# ---------------------------------------------------------------------- torch's threads


@pytest.mark.parametrize(
    ("own", "spins"),
    [
        ({}, "2000"),
        ({"OMP_NUM_THREADS": "1"}, "2000"),
        ({"GOMP_SPINCOUNT": "77"}, "77"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "0"),
    ],
)
def test_threads_wait_with_a_short_spin_unless_the_user_says_otherwise(own, spins):
    """What torch's OpenMP library found when a process of kvlab's own loaded it."""
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    code = "from kvlab.lib import environment as e; e.configure(); import torch; print(torch.get_num_threads())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | own | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch has another OpenMP library here")
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)) == {spins}
    if "OMP_NUM_THREADS" in own:
        assert done.stdout.split() == ["1"]


def test_a_sweep_reads_how_far_a_job_without_a_watcher_is(tmp_path, monkeypatch, capsys):
    note = tmp_path / "progress"
    monkeypatch.setenv(progress_bars.NOTE, str(note))
    monkeypatch.setattr(progress_bars, "watched", lambda: False)
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    seen = []
    for _ in progress_bars.each(["a", "b", "c"], "figure 3", "doc"):
        seen.append(note.read_text())
        now[0] += 2
    assert seen == ["figure 3: doc 0 of 3", "figure 3: doc 1 of 3", "figure 3: doc 2 of 3"]
    assert not note.exists(), "nothing is under way any more"
    with progress_bars.counting(100, "prompt", "it", bar_format=progress_bars.FORM) as bar:
        now[0] += 2
        bar.update(37)
        assert note.read_text() == "prompt: 37%"
    assert capsys.readouterr() == ("", "")


def test_a_note_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(progress_bars.NOTE, str(tmp_path / "on another machine" / "progress"))
    monkeypatch.setattr(progress_bars, "watched", lambda: False)
    assert list(progress_bars.each(range(3), "figure 3", "doc")) == [0, 1, 2]


def test_a_bar_follows_what_arrives_in_a_folder(tmp_path):
    counted = []
    with progress_bars.counting(30, "fetching", "MB", False) as bar:
        bar.update = lambda step: (counted.append(step), setattr(bar, "n", bar.n + step))
        with progress_bars.arriving(bar, tmp_path, 20_400_000, 1_000_000):
            (tmp_path / "pip-part").write_bytes(bytes(5_000_000))
            deadline = time.monotonic() + 20
            while bar.n < 5 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert bar.n == 5
        assert bar.n == 20, "the part is whole, counted in whole megabytes"
