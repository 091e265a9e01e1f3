"""Throughput at equal memory: the arithmetic by hand, and a small run."""

from __future__ import annotations

import pytest
import typer
from support.benchmarks import imported
from typer.testing import CliRunner


@pytest.fixture
def throughput(monkeypatch):
    with imported(monkeypatch, "throughput") as modules:
        yield modules[0]


def test_the_largest_batch_and_its_speed_by_hand(throughput):
    machine = throughput.Machine(memory=100.0, bandwidth=10.0, compute=30.0)
    # 100 bytes less 40 of weights leave room for three sequences of 20.
    assert machine.batch(40, 20) == 3 and machine.batch(40, 61) == 0
    # Reading 40 + 3 x 20 bytes takes 10 s, and 2 x 5 x 3 operations take 1 s.
    assert machine.tokens_per_second(40, 5, 3, 20) == pytest.approx(0.3)
    # 2 x 500 x 3 operations take 100 s.
    assert machine.tokens_per_second(40, 500, 3, 20) == pytest.approx(0.03)


def test_the_batches_of_an_h100_by_hand(throughput):
    found = {}
    for length, policy, _, size, batch, speed, times in throughput.predicted(1024):
        found[length, policy] = *(float(cell.replace(",", "")) for cell in (size, batch, speed)), float(times)
    names = "full", "snapkv", "rocketkv", "quest", "hybrid", "sparq"
    full, evicts, both, quest, hybrid, sparq = (found["131,072", name] for name in names)
    # A token takes 131,072 bytes, an eighth of a MiB, in 32 layers with 8 KV heads of 128. SnapKV holds 1,024 and the
    # new one, RocketKV the root of 131,072 x 1,024, with the extremes of pages of four, which weigh as an entry each.
    # Quest's pages have 256 entries, hybrid's twelve, and SparQ stores the keys twice.
    entries = 131072, 1025, 11585 + 2897, 131072 + 512, 131072 + 10923, 131072 * 1.5
    sizes = [size for size, *_ in (full, evicts, both, quest, hybrid, sparq)]
    assert sizes == [pytest.approx(n / 8, abs=0.51) for n in (*entries[:5], entries[5] + 2)]
    # 8,030,261,248 weights of 2 bytes leave 55.94 of 72 GB.
    assert [found["131,072", name][1] for name in names] == [int(55.94e9 / 131072 // n) for n in entries]
    # Three full sequences: 16.06 GB of weights, all but the embedding's 1.05 are read, and 51.54 GB of cache.
    assert full[2:] == (round(3 / ((16.06 - 1.05 + 51.54) / 3350)), 1)
    # Each of hybrid's three reads 1,024 entries, finding included, to within a few.
    assert hybrid[2] == pytest.approx(3 / ((16.06 - 1.05 + 3 * 1024 * 131072 / 1e9) / 3350), rel=0.01)
    assert evicts[2] > both[2] > quest[2] > full[2] and hybrid[2] > sparq[2]


def test_batches_fill_the_same_bytes(throughput, lm):
    app = typer.Typer()
    app.command()(throughput.main)
    sizes = ["--mib", "8", "--context", "60", "--new-tokens", "2", "--budget", "16", "--repeats", "1"]
    done = CliRunner().invoke(app, [*sizes, "--policies", "streamingllm,exact_topk", "--only", "measured"])
    assert done.exit_code == 0, done.output
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines())
    batches = {name: int(batch) for name, _, batch, *_ in (row for row in cells if len(row) > 4) if batch.isdigit()}
    # An entry takes 46,080 bytes: 63 tokens, or the 16 that StreamingLLM holds.
    assert batches == {"transformers": 2, "streamingllm": 11, "exact_topk": 2}


def test_bytes_that_hold_no_sequence_are_one_sentence(throughput, lm):
    app = typer.Typer()
    app.command()(throughput.main)
    done = CliRunner().invoke(app, ["--mib", "1", "--context", "60", "--new-tokens", "1", "--only", "measured"])
    assert done.exit_code == 1 and done.stderr.strip() == (
        "benchmark: the full cache of one sequence takes 3 MiB: give more --mib"
    )
