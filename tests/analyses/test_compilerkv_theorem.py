"""CompilerKV's veto and theorem 4.1: identities, bounds, and heads that break them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support.compilerkv import (
    HEADS,
    KV_HEADS,
    LAYERS,
    PROMPT,
    SHARE,
    TRACES,
    WEIGHTS,
    analyses,
    best,
    kept,
    lonely_head,
    tables,
    window_attention,
)
from support.measured_files import table_file
from support.tensors import sets, with_attention

from kvlab.analyses.compilerkv import quality, theorem, veto
from kvlab.methods import policy
from kvlab.traces.trace import Trace


def test_a_lonely_head_has_no_veto_and_breaks_the_bound(tmp_path):
    """What only one of three heads attends to goes, however large its weight, since the utility is the mean of all."""
    lonely = lonely_head()
    lonely.meta["document"] = "made up"
    path = tmp_path / "trusted.json"
    path.write_text(json.dumps({"heads": [[9.0, 1.0, 1.0]], "risk": None}))
    assert sets(quality.replayed(lonely, policy("compilerkv", budget=1, tables=str(path))).kept(0)) == [[2]] * 3
    findings = veto.protected([lonely], str(path), 1 / 12, strongest=1)
    rows = findings.table.set_index("method")["protected"]
    assert rows["compilerkv"] == 0


def test_a_weight_protects_what_its_head_s_values_single_out(tmp_path):
    """Each of two heads attends most to a token of its own, which has the largest of its values."""
    length = 12
    wanted = np.full((2, length, length), 0.0)
    for row in range(length):
        wanted[:, row, : row + 1] = 0.1 / (row + 1)
        wanted[:, row, min(2, row)] += 0.2, 0.7
        wanted[:, row, min(5, row)] += 0.7, 0.2
    both = [with_attention(np.pad(rows, ((0, 1), (0, 1)), constant_values=1 / 13)) for rows in wanted]
    queries, keys = (
        torch.tensor(np.stack([pair[side][0] for pair in both]), dtype=torch.float32)[None] for side in (0, 1)
    )
    values = torch.ones_like(keys)
    values[0, 0, 5], values[0, 1, 2] = 3.0, 4.0
    captured = Trace.from_tensors(queries, keys, values, length)
    captured.meta["document"] = "made up"
    path = tmp_path / "trusted.json"
    path.write_text(json.dumps({"heads": [[9.0, 1.0]], "risk": None}))
    findings = veto.protected([captured], str(path), 1 / 12, strongest=1)
    kept_by = {
        name: sets(quality.replayed(captured, method).kept(0))[0]
        for name, method in {
            "learnt": policy("compilerkv", budget=1, tables=str(path)),
            "equal": policy("compilerkv", budget=1),
        }.items()
    }
    assert kept_by == {"learnt": [5], "equal": [2]}
    assert (findings.metrics["veto/compilerkv"], findings.metrics["veto/equal_weights"]) == (1, 0)
    assert findings.metrics["veto/difference"] == 1


def test_a_veto_is_measured_on_the_head_of_the_largest_weight(tmp_path):
    """Against sets worked out from the attention: the learnt weights' and equal ones', of the same size."""
    path = table_file(tmp_path, heads=WEIGHTS)
    found = veto.protected(TRACES[:1], path, SHARE, strongest=8).table.set_index(["method", "layer"])["protected"]
    attention = window_attention(TRACES[0])
    for name, method in {
        "compilerkv": policy("compilerkv", budget=SHARE, tables=path),
        "equal_weights": policy("compilerkv", budget=SHARE),
    }.items():
        for row, of_layer in enumerate(kept(TRACES[0], method)):
            head = int(WEIGHTS[row].argmax())
            wanted = best(attention[row, head], 8)
            assert found[name, row] == pytest.approx(np.isin(wanted, of_layer[head * KV_HEADS // HEADS]).mean())


def test_the_bound_breaks_for_a_lonely_head():
    lonely = lonely_head()

    plain = theorem.theorem_4_1([lonely], [1])
    assert plain.metrics["theorem41/a2_violated"] == pytest.approx(1 / 3)
    head = plain.table.set_index("head")
    assert head.loc[0, "lost"] > 0.9 > head.loc[0, "bound"] and head.loc[1, "lost"] < head.loc[1, "bound"]


@pytest.mark.parametrize("seed", range(5))
def test_l1_is_exactly_twice_the_lost_mass(seed):
    random = np.random.default_rng(seed)
    rows = random.dirichlet(np.full(40, 0.2), size=7)
    stays = random.random((7, 40)) < 0.5
    stays[:, 0] = True
    l1, squares, lost = (x.numpy() for x in theorem.distances(torch.tensor(rows), torch.tensor(stays)))
    for row, keep, *found in zip(rows, stays, l1, squares, lost, strict=True):
        subset = np.where(keep, row, 0) / row[keep].sum()
        mass = row[~keep].sum()
        assert found == pytest.approx([np.abs(row - subset).sum(), ((row - subset) ** 2).sum(), mass], abs=1e-14)
        assert found[0] == pytest.approx(2 * mass, abs=1e-14)
        assert found[1] <= 2 * mass**2 + 1e-14
        # Neither without renormalising nor with the square is it an equality.
        assert np.abs(row - np.where(keep, row, 0)).sum() == pytest.approx(mass, abs=1e-14) != 2 * mass
        assert abs(found[1] - 2 * mass**2) > 1e-6


def test_the_squared_bound_is_met_by_two_entries():
    l1, squares, lost = theorem.distances(torch.tensor([[0.7, 0.3]]).double(), torch.tensor([[True, False]]))
    assert float(squares) == pytest.approx(2 * 0.3**2) and float(l1) == pytest.approx(0.6) == 2 * float(lost)


def test_the_theorem_on_traces():
    metrics, table = analyses()["theorem"].metrics, analyses()["theorem"].table
    assert metrics["theorem41/largest_gap"] < 1e-13 < metrics["theorem41/mean_ratio"]
    assert metrics["theorem41/largest_ratio"] <= 1
    assert len(table) == 3 * 2 * LAYERS * HEADS
    # What a head discards of the window's attention, again by hand.
    stays = kept(TRACES[0], policy("compilerkv", budget=64, tables=tables()))[1][0]
    gone = np.setdiff1d(np.arange(PROMPT), stays)
    lost = window_attention(TRACES[0])[1, 2, gone].sum() / 32
    row = table.query("document == 'document 1' and budget == 64 and layer == 1 and head == 2")
    assert row["lost"].item() == pytest.approx(lost, abs=1e-6)
