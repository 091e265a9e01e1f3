"""The comparison with a peer: its lines, its sets, the tables; the peer itself only where its environment is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support.benchmarks import imported
from typer.testing import CliRunner

import kvlab
from kvlab.errors import KvlabError
from kvlab.inputs.models import MODELS

FAKE = """
import json, sys
print("a library says something", file=sys.stderr)
for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "die":
        sys.exit("out of paper")
    answers = {"double": {"n": 2 * order.get("n", 0)}, "fail": {"error": "ValueError: no such press"}, "list": [1]}
    print("hello" if order["do"] == "talk" else json.dumps(answers[order["do"]]), flush=True)
"""


@pytest.fixture
def peers(monkeypatch):
    """The modules of benchmarks/ by name, importable for this test."""
    parts = ("answers", "methods", "process", "sets", "tables")
    with imported(monkeypatch, "peers", *(f"peers_{part}" for part in parts)) as (command, *modules):
        yield dict(zip(("command", *parts), (command, *modules), strict=True))


@pytest.fixture
def fake(peers, tmp_path):
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    with peers["process"].Process([sys.executable, script], "the fake") as process:
        yield process


def test_orders_get_answers_in_turn(fake):
    assert [fake.ask("double", n=n)["n"] for n in (1, 5, 3)] == [2, 10, 6]


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("fail", "the fake failed: ValueError: no such press"),
        ("talk", "the fake answered with something that is no JSON: 'hello'"),
        ("list", "the fake answered with [1] instead of an object"),
        ("die", "the fake's process ended: out of paper"),
    ],
)
def test_what_goes_wrong_is_one_sentence(fake, order, said):
    with pytest.raises(KvlabError) as told:
        fake.ask(order)
    assert str(told.value) == said


def test_a_peer_that_has_gone_is_told_of_again(fake):
    for _ in range(2):
        with pytest.raises(KvlabError, match="process ended: out of paper"):
            fake.ask("die")


def test_positions_become_masks(peers):
    layers = [torch.tensor([[0, 2, -1], [1, 2, 3]]), torch.tensor([[3], [0]])]
    mask = peers["sets"].as_mask(layers, 4)
    assert mask.int().tolist() == [[[1, 0, 1, 0], [0, 1, 1, 1]], [[0, 0, 0, 1], [1, 0, 0, 0]]]


def test_agreement_counts_both_sides(peers):
    mine = torch.tensor([[[1, 1, 0, 0], [1, 0, 0, 0]]]).bool()
    other = torch.tensor([[[1, 0, 1, 0], [1, 1, 1, 0]]]).bool()
    found = peers["sets"].compared(mine, other)
    assert (found.ours, found.theirs, found.apart, found.heads) == (1.5, 2.5, 4, 2)
    assert found.same == pytest.approx(2 * 2 / 8)
    assert peers["sets"].compared(mine, mine).same == 1 and peers["sets"].compared(mine, mine).apart == 0


def test_layers_are_even_only_where_all_keep_equally_many(peers):
    mask = torch.zeros(2, 2, 5, dtype=torch.bool)
    mask[0, 0, :2] = mask[1, 1, 3:] = True
    assert peers["sets"].even(mask)
    mask[1, 0, 0] = True
    assert not peers["sets"].even(mask)


def test_every_method_can_be_told_to_both_sides(peers):
    cut = peers["methods"].Cut(length=1000, entries=300, even=True, group=3)
    for name, method in peers["methods"].METHODS.items():
        told = method.told(0.25)
        assert told["press"].endswith("Press") and told["ratio"] == 0.75
        assert isinstance(method.as_it_comes(0.25), kvlab.Policy), name
        assert method.why and (method.alike is None) <= (name in ("random", "think"))
        if method.alike:
            assert method.alike(cut).entries(1000) == 300, name
    assert len(peers["methods"].TWELVE) == 12 and set(peers["methods"].TWELVE) <= set(peers["methods"].METHODS)


def test_adakvs_floor_gives_each_head_what_kvpress_gives(peers):
    """kvpress is sure of int(0.2 x entries), the window among them; kvlab of the window and a share of the rest."""
    for entries in (100, 319, 320, 321, 330, 500, 700, 999):
        policy = peers["methods"].adakv(peers["methods"].Cut(1000, entries, True, 3))
        sure = 64 + int(policy.floor * (entries - 64))
        assert sure == max(64, int(0.2 * entries))


def test_tables_show_the_median_and_the_range(peers):
    tables, sets = peers["tables"], peers["sets"]
    methods = peers["methods"].chosen("snapkv,random")
    rows = [
        dict(method="snapkv", plain=sets.Agreement(10, 9, same, 3, 2), alike=sets.Agreement(9, 9, 1.0, apart, 2))
        for same, apart in ((0.5, 0), (0.9, 2), (0.7, 0))
    ]
    rows.append(dict(method="random", plain=sets.Agreement(10, 10, 0.1, 36, 2), alike=None))
    snapkv, random = tables.sets_table(rows, methods, [0.1], [100]).rows
    assert snapkv[:3] == ("snapkv", "70.0 % (50.0-90.0)", "-1") and snapkv[4:6] == ("100.0 %", "2 of 108")
    assert random[1:3] == ("10.0 %", "+0") and random[4:6] == ("", "")


def test_times_are_compared_within_a_round(peers):
    rows = [
        dict(round=0, method="capture", ours=2.0, theirs=0.0),
        dict(round=0, method="snapkv", ours=1.0, theirs=10.0),
        dict(round=1, method="capture", ours=4.0, theirs=0.0),
        dict(round=1, method="snapkv", ours=2.0, theirs=40.0),
    ]
    table = peers["tables"].times_table(rows, 5, 1000, 32)
    assert table.rows[0] == ("snapkv", "1.50 s", "25.00 s", "15.0 (10.0-20.0)")
    assert table.rows[1][:2] == ("the capture", "3.00 s")
    assert table.rows[2] == ("all 1 x 5", "4.50 s", "25.00 s", "5.0 (3.3-6.7)")


def test_decoding_puts_both_sides_in_one_line(peers):
    def row(turn, side, speed):
        same = dict(context=4000, method="snapkv", time_to_first_token=1.0, kv_bytes=2**20, peak_bytes=2**21)
        return dict(round=turn, side=side, tokens_per_second=speed, **same)

    rows = [row(1, "theirs", 5.0), row(0, "ours", 12.0), row(1, "ours", 15.0), row(0, "theirs", 10.0)]
    ((prompt, method, mine, theirs, ratio, *rest),) = peers["tables"].decode_table(rows, 512, 32).rows
    assert (prompt, method, mine, theirs, ratio) == ("4,000", "snapkv", "13.5", "7.5", "2.10 (1.20-3.00)")
    assert rest[-4:] == ["1", "1", "2", "2"]


def test_answers_are_counted_by_method_and_share(peers):
    answers = peers["answers"]
    pairs = [
        answers.Pair("full cache", 1.0, ("a", 1.0), ("a", 1.0)),
        answers.Pair("snapkv", 0.5, ("a", 1.0), ("b", 0.0), ("b", 0.0)),
        answers.Pair("full cache", 1.0, ("c", 0.0), ("d", 0.0)),
        answers.Pair("snapkv", 0.5, ("e", 1.0), ("e", 1.0), ("f", 1.0)),
        answers.Pair("snapkv", 0.2, ("e", 0.0), ("e", 0.0)),
        answers.Pair("pyramidkv", 0.2, ("e", 1.0), None, ("e", 1.0)),
    ]
    assert answers.answers_table(pairs, [400]).rows == [
        ("full cache", "1", "50 %", "50 %", "1 of 2", "", ""),
        ("snapkv", "0.5", "100 %", "50 %", "1 of 2", "50 %", "1 of 2"),
        ("snapkv", "0.2", "0 %", "0 %", "1 of 1", "", ""),
        ("pyramidkv", "0.2", "100 %", "an error", "", "", ""),
    ]


def test_a_press_that_keeps_less_than_a_window_has_no_counterpart(peers):
    sets, methods = peers["sets"], peers["methods"].METHODS
    mask = torch.zeros(2, 3, 100, dtype=torch.bool)
    mask[..., :80] = True
    assert sets.counterpart(methods["chunkkv"], mask, 100, 3).entries(100) == 80
    mask[..., 40:] = False
    assert sets.counterpart(methods["chunkkv"], mask, 100, 3) is None
    assert sets.counterpart(methods["random"], mask, 100, 3) is None


def test_markdown_is_a_table(peers, tmp_path):
    table = peers["tables"].Table("Things", ("a", "b"), [("1", "2")], "A note.")
    peers["tables"].write([table, table], tmp_path / "out.md")
    one = "### Things\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\nA note.\n"
    assert (tmp_path / "out.md").read_text() == f"{one}\n{one}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--methods", "snapkw"], "snapk"),
        (["--methods", "duoattention"], "duoattention is left out: kvpress fetches"),
        (["--methods", ","], "name at least one method of: streamingllm"),
        (["--parts", "sets,tea"], "'tea' is no part; there are sets, answers, times, decode"),
        (["--ratios", "1.5"], "a ratio is the share that stays, between 0 and 1, and not 1.5"),
        (["--tokens", "400", "--ratios", "0.1"], "0.1 of 400 tokens is less than kvpress's window"),
        (["--model", "no/such"], "no/such is neither a model of the catalogue"),
    ],
)
def test_bad_input_ends_in_a_sentence(peers, given, said):
    import typer

    app = typer.Typer()
    app.command()(peers["command"].main)
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 1 and done.stderr.startswith("benchmark: ") and done.stderr.count("\n") == 1
    assert said in done.stderr


def test_no_network_ends_in_a_sentence_and_leaves_nothing(peers, own_home, monkeypatch, tmp_path):
    stub = tmp_path / "python"
    stub.write_text(
        '#!/bin/sh\n[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && exit 0\n'
        'echo "WARNING: Retrying" >&2; echo "ERROR: No matching distribution found for kvpress==0.5.5" >&2; exit 1\n'
    )
    stub.chmod(0o755)
    monkeypatch.setattr(peers["process"].sys, "executable", str(stub))
    with pytest.raises(KvlabError, match=r"could not install kvpress==0\.5\.5.*No matching distribution.*network"):
        peers["process"].python()
    assert not [path for path in (own_home / "peers").iterdir() if path.is_dir()]


@pytest.fixture
def peer(peers):
    """kvpress with the default model, where an earlier run of the benchmark has made its environment."""
    if not peers["process"].environment().is_dir():
        pytest.skip("kvpress's environment is not there; `python benchmarks/peers.py` makes it")
    process, about = peers["process"].loaded(MODELS["smollm2-135m"].folder)
    with process:
        assert about["versions"]["kvpress"] == "0.5.5"
        yield process


def test_the_peer_keeps_what_kvlab_keeps(peers, peer, lm, tmp_path):
    from safetensors.torch import load_file

    methods = peers["methods"].chosen("snapkv,knorm,adakv")
    ids = torch.arange(500, 900)
    file = Path(tmp_path) / "sets.safetensors"
    told = peer.ask(
        "retain", ids=ids.tolist(), presses=[m.told(0.25, alike=True) for m in methods.values()], into=str(file)
    )
    assert told == {"masks": [2]}  # Ada-KV alone hides entries instead of dropping them
    trace = kvlab.capture(lm, ids, 0, window=64, policies=[m.as_it_comes(0.25) for m in methods.values()])
    for number, method in enumerate(methods.values()):
        theirs = load_file(file)[str(number)].bool()
        mine = peers["sets"].ours(trace, method.alike(peers["methods"].Cut(400, 100, True, 3)))
        assert int(theirs.sum()) == int(mine.sum()) == 30 * 3 * 100
        assert peers["sets"].compared(mine, theirs).same > 0.999


def test_the_peer_answers_word_for_word_where_it_keeps_the_same(peers, peer, lm):
    """Its own pipeline decodes from its own cache: positions, masks and the question's place are all the same."""
    answers = peers["answers"]
    task = answers.Needle(lengths=(400,), depths=(0.5,))
    (example,) = task.examples(lm)
    methods = peers["methods"].chosen("snapkv,knorm,adakv")
    pairs = answers.of_one(lm, peer, methods, task, example, [0.5])
    assert [pair.method for pair in pairs] == ["full cache", *methods]
    assert pairs[0].ours == pairs[0].theirs
    assert [pair.alike for pair in pairs[1:]] == [pair.theirs for pair in pairs[1:]]


def test_the_peer_says_what_it_cannot_do(peer):
    with pytest.raises(KvlabError, match="kvpress failed: AttributeError.*NoPress"):
        peer.ask("prefill", ids=[1] * 80, press=dict(press="NoPress", around=None, ratio=0.5, parameters={}))
