"""Effects of evicted entries: against gates that torch differentiates, and against putting single entries back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.eager import greedy
from support.families import FAMILIES
from support.hybrids import hybrid
from support.latents import SHAPED
from support.live_runs import SMALL, prompt, small
from support.oracles import gates
from support.refusals import refusal

import kvlab
from kvlab.attribution.attribute import attribute, attributions
from kvlab.attribution.gated import LayerReads, Line
from kvlab.core.softmax import Softmax

REFUSED = ("attention_matching", "zsmerge", "merging", "rerotated", "sparq")
"""Methods whose loss has no share for each entry: one merges, the other adds the mean value to its output."""
SINGLE = ("expected_attention", "triattention", "hybrid-gpt-oss", "hybrid-qwen3-next", *SHAPED)
"""Policies and models that compute in float32 alone."""
PLAIN = [name for name in SMALL if name not in REFUSED]


def sharpened(lm: kvlab.LM, name: str) -> kvlab.LM:
    return gates.sharpened(lm, dtype=torch.float32 if name in SINGLE else torch.float64)


def reads(why) -> list[torch.Tensor]:
    """Which entries each head of each layer reads at each step, from the attribution's own record of them."""
    heads = why.lm.model.config.get_text_config().num_attention_heads
    steps = len(why.response) - 1
    return [read.expand(-1, steps, -1).repeat_interleave(heads // len(read), 0) for read in why._reads]


def brute_force(why) -> torch.Tensor:
    """Minus the integral of dL/dg over the line, each gradient torch's own."""
    return gates.integral(
        lambda gate: gates.loss(why.lm, why.prompt, why.response, reads(why), gate),
        why.effects.shape,
        int(why.summary["points"]),
    )


@pytest.mark.parametrize("name", PLAIN)
def test_effects_are_those_of_gates_that_torch_differentiates(tiny, name):
    """Of every policy that leaves entries out: after the prefill, at steps, in what a step reads, for single heads."""
    lm = sharpened(tiny(), name)
    why = attribute(lm, small(name), prompt(48), 8, points=4)
    expected = brute_force(why)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(why.effects.double(), expected, rtol=1e-4, atol=1e-5 if name not in SINGLE else 2e-4)


def test_several_policies_share_a_prefill_and_a_response(tiny):
    lm = gates.sharpened(tiny())
    names = ["snapkv", "h2o", "dapq", "rocketkv"]
    together = attributions(lm, [small(name) for name in names], prompt(48), 8)
    assert [why.policy.name for why in together] == names
    for name, why in zip(names, together, strict=True):
        alone = attribute(lm, small(name), prompt(48), 8)
        assert torch.equal(why.response, alone.response) and torch.equal(why.kept, alone.kept)
        torch.testing.assert_close(why.effects, alone.effects)


@pytest.mark.parametrize("family", [*FAMILIES, *SHAPED, "hybrid-gpt-oss", "hybrid-gemma3", "hybrid-qwen3-next"])
def test_effects_on_every_family(tiny, family):
    lm = sharpened(hybrid(tiny, family) if family.startswith("hybrid") else tiny(family), family)
    why = attribute(lm, small("snapkv"), prompt(48), 6, points=2)
    expected = brute_force(why)
    torch.testing.assert_close(why.effects.double(), expected, rtol=1e-4, atol=1e-5 if family not in SINGLE else 2e-4)


@pytest.mark.parametrize("name", ["snapkv", "h2o", "quest", "duoattention", "snapkv_pp"])
def test_the_losses_are_those_of_a_live_session(tiny, name):
    """The response goes through the model in one piece, and still loses what the policy loses step by step."""
    lm = gates.sharpened(tiny())
    why = attribute(lm, small(name), prompt(48), 8)
    live = kvlab.fidelity(lm, small(name), prompt(48), response=why.response).table
    sums = live.groupby("measure").value.sum()
    assert why.summary["loss_policy"] == pytest.approx(sums["nll"], abs=1e-3)
    assert why.summary["loss_full"] == pytest.approx(sums["nll_full"], abs=1e-3)
    kl = attribute(lm, small(name), prompt(48), response=why.response, loss="kl").summary
    assert kl["loss_policy"] == pytest.approx(sums["kl"], abs=1e-3) and abs(kl["loss_full"]) < 1e-4


@pytest.mark.parametrize("family", SHAPED)
@pytest.mark.parametrize(("name", "storage"), [("snapkv", "as_is"), ("h2o", "as_is"), ("snapkv", "turbo-4")])
def test_the_losses_of_latents_are_those_of_a_live_session(tiny, family, name, storage):
    """With the model's own response, which goes on from a cache of latents."""
    lm = tiny(family)
    why = attribute(lm, small(name), prompt(48), 8, storage=storage)
    assert why.response.tolist() == greedy(lm, prompt(48)[0], 8).tolist()
    sums = kvlab.fidelity(lm, small(name), prompt(48), response=why.response, storage=storage).table
    sums = sums.groupby("measure").value.sum()
    assert why.summary["loss_policy"] == pytest.approx(sums["nll"], abs=1e-3)
    assert why.summary["loss_full"] == pytest.approx(sums["nll_full"], abs=1e-3)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(8, 40),
    steps=st.integers(2, 10),
    name=st.sampled_from(["streamingllm", "h2o", "exact_topk", "random"]),
    loss=st.sampled_from(["nll", "kl"]),
)
def test_effects_add_up_to_the_difference_of_the_losses(tiny, seed, budget, steps, name, loss):
    """Within 5 %, as promised, or 64 points were tried; always within float32's rounding of both losses."""
    why = attribute(gates.sharpened(tiny()), kvlab.policy(name, budget=budget), prompt(40, seed), steps, loss=loss)
    found = why.summary
    assert found["explained"] == pytest.approx(float(why.effects.double().sum()))
    assert found["explained"] == pytest.approx(found["harmful"] + found["helpful"], abs=1e-6)
    enough = abs(found["unexplained"]) <= 0.05 * abs(found["difference"]) + 1e-4
    assert enough or found["points"] == 64


def test_a_small_effect_is_that_of_putting_the_entry_back_alone(tiny):
    """Where attention moves the residual stream little, the line is straight, and each gate can be opened alone."""
    lm = gates.sharpened(tiny())
    with torch.no_grad():
        for layer in lm.model.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e-4)
    why = attribute(lm, kvlab.policy("streamingllm", budget=30), prompt(40), 5)
    closed = torch.zeros(why.effects.shape, dtype=torch.float64)
    alone = closed.clone()
    with torch.no_grad():
        before = gates.loss(lm, why.prompt, why.response, reads(why), closed)
        for at in map(tuple, why.evicted.nonzero().tolist()):
            one = closed.clone()
            one[at] = 1
            alone[at] = before - gates.loss(lm, why.prompt, why.response, reads(why), one)
    # The model's own norms compute in float32.
    torch.testing.assert_close(why.effects, alone, rtol=0.02, atol=1e-3 * float(alone.abs().max()))


def test_of_a_linear_loss_every_point_knows_the_whole_integral():
    """L = sum of W . out: the effect of an entry is minus the sum over steps and heads of a (v - o) . W."""
    generator = torch.Generator().manual_seed(5)

    def some(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    prompt_keys, prompt_values = some(2, 20, 8), some(2, 20, 8)
    queries, keys, values, wanted = some(1, 4, 6, 8), some(1, 2, 6, 8), some(1, 2, 6, 8), some(1, 4, 6, 8)
    read = torch.rand(4, 6, 26, generator=generator) < 0.4
    read[..., 0] = True
    causal = torch.cat([torch.ones(6, 20, dtype=torch.bool), torch.ones(6, 6, dtype=torch.bool).tril()], 1)
    all_keys, all_values = (
        torch.cat([old, new[0]], 1).repeat_interleave(2, 0)
        for old, new in ((prompt_keys, keys), (prompt_values, values))
    )
    logits = queries[0] @ all_keys.transpose(-1, -2) / 8**0.5
    a = logits.masked_fill(~causal, -torch.inf).softmax(-1)
    o = logits.masked_fill(~(causal & read), -torch.inf).softmax(-1) @ all_values
    shares = a * ((all_values[:, None] - o[:, :, None]) * wanted[0][:, :, None]).sum(-1) * (causal & ~read)
    expected = shares.sum(1).unflatten(0, (2, 2)).sum(1)
    for gate in (0.0, 0.3, 1.0):
        line = Line(LayerReads(prompt_keys, prompt_values, read), torch.tensor([gate]), torch.ones(1), Softmax())
        given = queries.clone().requires_grad_()
        (line.attend(given, keys, values) * wanted).sum().backward()
        torch.testing.assert_close(line.effects.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_gradient_check_of_the_line():
    """Queries, keys and values of the response get the gradients that finite differences have."""
    generator = torch.Generator().manual_seed(6)
    shapes = {"queries": (2, 4, 3, 4), "keys": (2, 2, 3, 4), "values": (2, 2, 3, 4)}
    given = [
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes.values()
    ]
    prompt_keys, prompt_values = torch.randn(2, 2, 7, 4, generator=generator, dtype=torch.float64)
    read = torch.rand(2, 3, 10, generator=generator) < 0.5
    read[..., 0] = True
    softmax = Softmax(0.7, 2.0, torch.randn(4, generator=generator, dtype=torch.float64))

    def attend(*tensors):
        layer = LayerReads(prompt_keys, prompt_values, read)
        return Line(layer, torch.tensor([0.25, 0.75], dtype=torch.float64), torch.ones(2), softmax).attend(*tensors)

    assert torch.autograd.gradcheck(attend, given)


REASONS = {
    "attention_matching": "attention_matching merges entries, or weighs them by more than their attention",
    "zsmerge": "zsmerge merges entries",
    "merging": "merging merges entries",
    "rerotated": "rerotated changes the entries that it keeps",
    "think": "think changes the entries that it keeps",
    "sparq": "sparq changes the attention's output",
}


@pytest.mark.parametrize("name", kvlab.policies())
def test_every_policy_is_attributed_or_refused_with_the_reason(tiny, name):
    lm = sharpened(tiny(), name)
    if name in REASONS:
        sentence = refusal(attribute, lm, small(name), prompt(48), 4)
        assert sentence.startswith(REASONS[name]) and "evicts or selects" in sentence
        return
    for storage in ("as_is", "int8"):
        found = attribute(lm, small(name), prompt(48), 4, storage=storage).summary
        assert abs(found["unexplained"]) <= 0.05 * abs(found["difference"]) + 1e-4 or found["points"] == 64
        assert (found["rounding_values"] != 0) == (storage == "int8")


def test_bad_input_is_one_sentence(tiny):
    policy = small("snapkv")
    assert "two or more" in refusal(attribute, tiny(), policy, prompt(48), 1)
    assert "two or more" in refusal(attribute, tiny(), policy, prompt(48), response=[3])
    assert "neither 'nll' nor 'kl'" in refusal(attribute, tiny(), policy, prompt(48), 4, loss="mse")
    assert "between 1 and 64" in refusal(attribute, tiny(), policy, prompt(48), 4, points=0)
    assert "one prompt" in refusal(attribute, tiny(), policy, [prompt(48), prompt(48)], 4)
    assert "beyond" in refusal(attribute, tiny(), policy, prompt(48), 10**6)
    assert "token ids" in refusal(attribute, tiny(), policy, prompt(48), response="words")


@pytest.mark.parametrize("policy", [kvlab.policy("full"), kvlab.policy("snapkv", budget=2000)])
def test_what_keeps_everything_has_nothing_to_attribute(tiny, policy):
    why = attribute(tiny(), policy, prompt(48), 4)
    assert why.table.empty and list(why.table) == [
        "layer", "kv_head", "position", "token", "effect", "attention", "kept",
    ]  # fmt: skip
    assert why.summary["difference"] == pytest.approx(0, abs=1e-5) and why.restored.empty and why.by("token").empty
