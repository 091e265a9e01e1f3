"""Through a pipe, progress is plain lines now and then."""

import re

from kvlab.commands import progress


def test_a_pipe_gets_lines_with_the_share_and_the_time_left(capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with progress.feeding(100) as advance:
        for _ in range(4):
            advance("snapkv, 1000 tokens", 25)
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert not said.out and len(lines) == 4
    assert [re.search(r"(\d+) %", line)[1] for line in lines] == ["25", "50", "75", "100"]
    assert lines[2].startswith("snapkv, 1000 tokens (75 %), about ") and lines[2].endswith(" left")


def test_the_share_of_answers_is_no_score_of_a_policy(capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with progress.counting("needle") as advance:
        advance("needle-number-600-0.5-0, full", 9, 20)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("needle, 9 of 20 (45 %): needle-number-600-0.5-0, full")


def test_short_work_says_nothing_through_a_pipe(capsys):
    with progress.feeding(100) as advance:
        advance("snapkv", 100)
    assert not capsys.readouterr().err
