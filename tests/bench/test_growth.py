"""Growth: exponents by hand, runs that go on where they stopped, and one length for real."""

from __future__ import annotations

import math

import pytest
from support.benchmarks import imported, invoked


@pytest.fixture
def growth(monkeypatch):
    with imported(monkeypatch, "growth") as modules:
        yield modules[0]


def row(part, tokens, seconds=1.0, model="smollm2-135m", **more):
    measured = {"seconds": seconds, "cpu_seconds": seconds, "above_mib": 10.0, "peak_mib": 100.0}
    return {"model": model, "tokens": tokens, "part": part} | measured | more


def command(growth, *arguments):
    return invoked(growth.main, *arguments)


@pytest.fixture
def measured(growth, monkeypatch, lm):
    """What was measured anew, without measuring it; the model is loaded for its length alone."""
    asked = []

    def measure(model, dtype, tokens, part, _folder):
        asked.append((tokens, part))
        more = {"trace_mib": 5.0} if part == "capture" else {}
        return row(part, tokens, tokens**1.5, growth.named(model, dtype), **more)

    monkeypatch.setattr(growth, "measure", measure)
    monkeypatch.setattr(growth.kvlab, "load", lambda *_, **__: lm)
    return asked


def test_an_exponent_is_the_slope_of_the_logarithms(growth):
    rows = [row("live", tokens, 3 * tokens**1.5) for tokens in (10, 20, 80)]
    assert growth.exponent(rows, "seconds") == pytest.approx(1.5)
    assert growth.exponent(rows, "above_mib") == pytest.approx(0)
    assert math.isnan(growth.exponent(rows[:1], "seconds")), "one length has no slope"


def test_what_was_measured_is_not_measured_again(growth, measured, tmp_path):
    out = tmp_path / "rows.csv"
    first = command(growth, "--tokens", "700", "--parts", "prefill,capture", "--out", str(out))
    assert first.exit_code == 0 and measured == [(700, "prefill"), (700, "capture")]
    measured.clear()
    done = command(growth, "--tokens", "700", "--tokens", "1400", "--parts", "prefill,capture", "--out", str(out))
    assert measured == [(1400, "prefill"), (1400, "capture")]
    table = [line.split() for line in done.stdout.splitlines()]
    assert [words[1] for words in table if words[:1] == ["exponent"]] == ["1.50", "1.50"]
    assert [words[1] for words in table if words[:1] == ["capture"]] == ["700", "1,400"]
    kept = growth.kept(out)
    assert len(kept) == 4 and kept[1] == row("capture", 700, 700**1.5, trace_mib=5.0)


def test_another_type_is_measured_beside_the_models_own(growth, measured, tmp_path):
    out = tmp_path / "rows.csv"
    for dtype in ("auto", "bfloat16", "bfloat16"):
        found = command(growth, "--tokens", "700", "--parts", "live", "--dtype", dtype, "--out", str(out))
    assert measured == [(700, "live")] * 2
    assert [row["model"] for row in growth.kept(out)] == ["smollm2-135m", "smollm2-135m in bfloat16"]
    assert "smollm2-135m in bfloat16" in found.stdout


def test_a_replay_needs_its_trace_captured_again(growth, measured, tmp_path):
    out = tmp_path / "rows.csv"
    command(growth, "--tokens", "700", "--parts", "capture", "--out", str(out))
    measured.clear()
    command(growth, "--tokens", "700", "--parts", "prefill,capture,replay", "--out", str(out))
    assert measured == [(700, "prefill"), (700, "capture"), (700, "replay")]
    assert len(growth.kept(out)) == 3, "the second capture takes the first one's place"


def test_the_longest_prompt_leaves_room_for_what_follows(growth, measured, lm):
    command(growth, "--tokens", "9000", "--tokens", str(lm.context_length), "--parts", "prefill")
    assert measured == [(lm.context_length - 32, "prefill")], "once, though two lengths are cut to it"


def test_other_parts_are_refused_in_a_sentence(growth, measured):
    done = command(growth, "--parts", "capture,sleep")
    assert done.exit_code == 1 and not measured
    assert done.stderr.strip() == "benchmark: parts are some of prefill,capture,replay,live, and not 'capture,sleep'"


def test_a_capture_its_replays_and_a_live_run_for_real(growth, lm, tmp_path):
    path = tmp_path / "long"
    with pytest.raises(growth.kvlab.KvlabError, match="ask for capture, too"):
        growth.measured("replay", lm.name, "auto", 640, path)
    found = {part: growth.measured(part, lm.name, "auto", 640, path) for part in ("capture", "replay", "live")}
    for part, numbers in found.items():
        assert 0 < numbers["above_mib"] < numbers["peak_mib"], part
        assert numbers["seconds"] > 0 and numbers["cpu_seconds"] > 0, part
    # float32 keys and values of 656 tokens in 30 layers of 3 KV heads of 64, queries of all tokens in 9 heads.
    assert path.stat().st_size > 656 * 30 * 64 * 4 * (3 + 3)
