"""What an attribution takes: memory is foretold, long prompts go in in parts, and files draw their figure once."""

from __future__ import annotations

import pytest
import torch
from support.live_runs import prompt, small
from support.oracles import gates
from support.refusals import refusal

import kvlab
from kvlab.attribution import attribute as module
from kvlab.attribution import memory
from kvlab.attribution.attribute import attribute, pieces
from kvlab.core.storage import AS_IS, STORAGES
from kvlab.lib import devices
from kvlab.workbench.attribution_files import write


def test_more_memory_than_there_is_is_refused_before_anything_runs(tiny, monkeypatch):
    lm, policy = tiny(), small("snapkv")
    needed = memory.needed(lm, policy, 48, 5, AS_IS, 48)
    monkeypatch.setattr(devices, "free_memory", lambda place: needed - 1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "run_policy", lambda *_: pytest.fail("it ran"))
        assert "48 prompt and 6 response tokens" in refusal(attribute, lm, policy, prompt(48), 6)
    monkeypatch.setattr(devices, "free_memory", lambda place: needed)
    assert attribute(lm, policy, prompt(48), 6).summary["points"] >= 8
    monkeypatch.setattr(devices, "free_memory", lambda place: None)
    assert attribute(lm, policy, prompt(48), 6).summary["points"] >= 8


def test_the_foretold_memory_grows_with_what_is_stored(tiny):
    lm = tiny()

    def needed(name: str, length: int, storage: str = "as_is") -> int:
        return memory.needed(lm, small(name), length, 8, STORAGES[storage], 64)

    assert needed("snapkv", 4000) < needed("h2o", 4000) < needed("quest", 4000)
    assert needed("snapkv", 4000, "int8") > needed("snapkv", 4000)
    growth = [needed("snapkv", length) - needed("snapkv", length // 2) for length in (4000, 8000)]
    assert growth[1] == pytest.approx(2 * growth[0], rel=1e-3)


@pytest.mark.parametrize(("length", "parts"), [(48, [20, 20, 8]), (41, [20, 21]), (20, [20]), (1, [1])])
def test_no_last_part_of_a_prompt_looks_like_a_step(length, parts):
    ids = torch.arange(length)
    found = pieces(ids, 20)
    assert [len(piece) for piece in found] == parts and torch.equal(torch.cat(found), ids)


@pytest.mark.parametrize("name", ["snapkv", "h2o", "rocketkv", "compilerkv", "expected_attention", "kvzip", "dapq"])
def test_a_prompt_in_parts_has_the_effects_of_the_whole(tiny, monkeypatch, name):
    lm, ids = gates.sharpened(tiny(), dtype=torch.float32), prompt(41)
    whole = attribute(lm, small(name), ids, 5, points=2)
    monkeypatch.setattr(module, "chunk_for", lambda model, length: 10)
    parts = attribute(lm, small(name), ids, 5, points=2)
    assert torch.equal(parts.response, whole.response) and torch.equal(parts.kept, whole.kept)
    torch.testing.assert_close(parts.effects, whole.effects, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("storage", ["as_is", "int8"])
def test_files_draw_their_figure_once(tiny, tmp_path, monkeypatch, storage):
    from kvlab.render.figures import attribution

    drawn, draw = [], attribution.attribution
    monkeypatch.setattr(attribution, "attribution", lambda why: drawn.append(why) or draw(why))
    why = attribute(tiny(), small("snapkv"), prompt(48), 5, storage=storage)
    lines = list(write(why, tmp_path))
    names = {"effects.csv", "restored.csv", "attribution.png", "why.html"} | (
        {"rounding.csv"} if storage == "int8" else set()
    )
    assert len(drawn) == 1 and {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "attribution.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "why.html").read_text()
    assert "data:image/svg+xml" in page and ("Rounded keys cost" in page) == (storage == "int8")
    assert any("by their values" in line for line in lines) == (storage == "int8")


def test_a_trace_is_attributed_with_its_own_response_and_explored_with_the_effects(tiny):
    lm, policy = tiny(), small("snapkv")
    trace = kvlab.capture(lm, prompt(48), new_tokens=6, pseudo=())
    why = attribute(lm, policy, trace)
    assert trace.ids is not None and torch.equal(why.response, trace.ids[48:]) and why.document == trace.document
    alone = attribute(lm, policy, prompt(48), response=trace.ids[48:])
    assert torch.equal(why.effects, alone.effects)
    view = kvlab.explore(trace, policy, small("streamingllm"), budgets=[14], effects=why)
    assert "tokens whose loss costs the most" in view.html()
    assert "tokens whose loss costs the most" not in kvlab.explore(trace, policy, "knorm", budgets=[14]).html()


def test_effects_or_traces_that_do_not_fit_are_refused(tiny):
    lm, policy = tiny(), small("snapkv")
    trace = kvlab.capture(lm, prompt(48), new_tokens=6, pseudo=())
    other = attribute(lm, policy, prompt(48, seed=1), 4)
    assert "another prompt" in refusal(kvlab.explore, trace, policy, "knorm", budgets=[14], effects=other)
    assert "load the trace's model" in refusal(attribute, tiny("tiny-qwen2"), policy, trace)
    without = kvlab.Trace.from_tensors(trace.queries, trace.keys, trace.values, 48)
    assert "no token ids" in refusal(attribute, lm, policy, without)


def test_the_curve_is_held_against_all_that_the_policy_costs(tiny):
    from kvlab.render.figures import attribution

    why = attribute(gates.sharpened(tiny(), dtype=torch.float32), small("snapkv"), prompt(48), 6)
    cost, table = why.summary["loss_policy"] - why.summary["loss_full"], why.restored
    ax = attribution.restored(why)
    (label,) = ax.texts
    assert label.get_text() == "all that the policy costs" and label.xy[1] == pytest.approx(cost)
    share = float(table[(table.order == "effect") & (table.entries == 50)].share.iloc[0])
    for change, said in ((0.0, "Loss regained by entries put back"), (0.44, "44%"), (1.2, "all")):
        why.summary["difference"] = cost if change else 0.0
        why.restored = table.assign(share=table.share * change / share)
        title = attribution.title(why)
        assert title == (f"50 entries regain {said} of what the policy costs" if change else said)
