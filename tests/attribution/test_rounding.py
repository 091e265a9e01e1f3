"""Effects of rounded entries: the live run's own rounding, torch's gradients, single entries made exact, and a linear
loss.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.live_runs import prompt, small
from support.oracles import gates, rounded_gates
from support.oracles.rounded_gates import Off

import kvlab
from kvlab.attribution.attribute import attribute
from kvlab.attribution.gated import LayerReads, Line, Rounding
from kvlab.core.entries import Rounded
from kvlab.core.softmax import Softmax
from kvlab.core.storage import Storage, keys_and_values, kivi

STORAGES = {
    "int8": "int8",
    "fp8": "fp8",
    "kivi-2": kivi(2, group=8, residual=16),
    "kivi-4": kivi(4, 8, residual=3),
    "turbo-2": "turbo-2",
    "turbo-4/int8": "turbo-4/int8",
    "as_is/kivi-2": keys_and_values("as_is", kivi(2, group=8, residual=16)),
}
POLICIES = ["full", "snapkv", "h2o", "quest", "duoattention", "compilerkv", "adakv", "morphkv"]


def off_and_reads(why) -> tuple[Off, list[torch.Tensor]]:
    """How far entries are off, from the attribution's own record of the live run, and which are read."""
    heads, steps = why.lm.model.config.num_attention_heads, len(why.response) - 1
    off, reads = Off([], []), []
    for (keys, values), rounding, read in zip(why._made.entries, why._made.rounding, why._reads, strict=True):
        repeats = heads // len(read)
        when = rounding.when.repeat_interleave(repeats, 0)[..., None]
        for found, stored, old, new in (
            (off.keys, rounding.keys, keys, rounding.new_keys),
            (off.values, rounding.values, values, rounding.new_values),
        ):
            exact = torch.cat([old, new], 1).repeat_interleave(heads // len(old), 0)
            found.append(((stored.repeat_interleave(repeats, 0) - exact)[:, None] * when).double())
        reads.append(read.expand(-1, steps, -1).repeat_interleave(repeats, 0))
    return off, reads


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", POLICIES)
def test_the_losses_are_those_of_a_live_session_with_this_storage(tiny, name, storage):
    """Groups, steps, residual windows and what is rounded while decoding are the live run's."""
    lm = gates.sharpened(tiny())
    why = attribute(lm, small(name), prompt(48), 9, storage=STORAGES[storage], points=1)
    live = kvlab.fidelity(lm, small(name), prompt(48), response=why.response, storage=STORAGES[storage]).table
    sums = live.groupby("measure").value.sum()
    assert why.summary["loss_policy"] == pytest.approx(sums["nll"], abs=1e-3)
    assert why.summary["loss_full"] == pytest.approx(sums["nll_full"], abs=1e-3)


@pytest.mark.parametrize("storage", ["int8", "kivi-2", "kivi-4", "turbo-4/int8"])
@pytest.mark.parametrize("name", POLICIES)
def test_effects_are_those_of_gates_that_torch_differentiates(tiny, name, storage):
    lm = gates.sharpened(tiny())
    why = attribute(lm, small(name), prompt(48), 7, points=4, storage=STORAGES[storage])
    off, reads = off_and_reads(why)
    found = torch.stack([why.effects, why.rounding_keys, why.rounding_values]).double()
    expected = gates.integral(
        lambda gate: rounded_gates.loss(lm, why.prompt, why.response, reads, off, gate),
        found.shape,
        int(why.summary["points"]),
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found[1:].abs().amax((1, 2, 3)).min() > 1e-4 or why.rounding.empty


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(8, 40),
    steps=st.integers(2, 10),
    name=st.sampled_from(["streamingllm", "h2o", "exact_topk", "random"]),
    bits=st.sampled_from([2, 4]),
    residual=st.integers(0, 20),
    loss=st.sampled_from(["nll", "kl"]),
)
def test_all_effects_add_up_to_the_difference_of_the_losses(tiny, seed, budget, steps, name, bits, residual, loss):
    """As without rounding: within 5 %, or 64 points were tried."""
    lm, policy = gates.sharpened(tiny()), kvlab.policy(name, budget=budget)
    why = attribute(lm, policy, prompt(40, seed), steps, loss=loss, storage=kivi(bits, 8, residual))
    found = why.summary
    parts = found["harmful"] + found["helpful"] + found["rounding_keys"] + found["rounding_values"]
    assert found["explained"] == pytest.approx(parts, abs=1e-5)
    enough = abs(found["unexplained"]) <= 0.05 * abs(found["difference"]) + 1e-4
    assert enough or found["points"] == 64
    table = why.rounding
    assert table["keys"].sum() == pytest.approx(found["rounding_keys"], abs=1e-4)
    assert table["values"].sum() == pytest.approx(found["rounding_values"], abs=1e-4)


class Fine(Rounded):
    """To multiples of 1/512: far less than any storage that saves bytes."""

    def rounded(self, name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: (x * 512).round() / 512}


def test_a_small_effect_is_that_of_making_the_key_or_the_value_exact_alone(tiny):
    """Where rounding is fine and nothing evicted the line is straight: each key and value can be made exact alone."""
    lm = gates.sharpened(tiny(), attention=3.0)
    why = attribute(lm, "full", prompt(40), 5, storage=Storage("fine", "to 1/512", Fine))
    off, reads = off_and_reads(why)
    group = reads[0].shape[0] // why.effects.shape[1]
    alone = torch.zeros(2, *why.effects.shape, dtype=torch.float64)
    with torch.no_grad():
        before = rounded_gates.loss(lm, why.prompt, why.response, reads, off)
        for which, whole in enumerate((off.keys, off.values)):
            for row in why.rounding.to_dict(orient="records"):
                layer, head, position = row["layer"], row["kv_head"], row["position"]
                part = whole[layer][head * group : (head + 1) * group, :, position]
                kept = part.clone()
                part.zero_()
                alone[which, layer, head, position] = before - rounded_gates.loss(
                    lm, why.prompt, why.response, reads, off
                )
                part.copy_(kept)
    for found, expected in zip((why.rounding_keys, why.rounding_values), alone, strict=True):
        assert (expected.abs() > 1e-5).sum() >= 50
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.01 * float(expected.abs().max()))


def test_what_is_not_rounded_yet_has_no_effect(tiny):
    """KIVI's newest tokens stay exact: with a residual of 20 none after prompt + steps - 20 is ever rounded."""
    why = attribute(gates.sharpened(tiny()), "full", prompt(48), 9, storage=kivi(2, 8, residual=20))
    table = why.rounding
    assert set(table.position) == set(range(32)) and why.table.empty and len(table) == 4 * 32
    for effects in (why.rounding_keys, why.rounding_values):
        assert effects[..., :32].abs().min() > 0 and effects[..., 32:].abs().max() == 0
    costs = table["keys"] + table["values"]
    assert costs.is_monotonic_decreasing


def test_exact_storage_has_no_rounding(tiny):
    why = attribute(tiny(), small("snapkv"), prompt(48), 4)
    assert why.rounding.empty and why.summary["rounding_keys"] == why.summary["rounding_values"] == 0
    assert list(why.rounding) == ["layer", "kv_head", "position", "token", "keys", "values", "attention"]


def test_entries_put_back_are_exact(tiny):
    """All evicted entries restored leave the cost of rounding alone, and that is what making them exact regains."""
    lm = gates.sharpened(tiny())
    why = attribute(lm, small("quest"), prompt(48), 6, storage=kivi(2, 8, residual=16))
    off, reads = off_and_reads(why)
    everything = why.loss_with(why.evicted.nonzero())
    with torch.no_grad():
        all_read = [torch.ones_like(read) for read in reads]
        expected = rounded_gates.loss(lm, why.prompt, why.response, all_read, off)
    assert everything == pytest.approx(float(expected), abs=1e-3)


def some_layer(seed: int, softmax: Softmax):
    """Queries, keys and values of a response, and a layer of which three in ten entries are rounded."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys, values = some(2, 20, 8), some(2, 20, 8)
    given = some(1, 4, 6, 8), some(1, 2, 6, 8), some(1, 2, 6, 8)
    read = torch.rand(4, 6, 26, generator=generator) < 0.6
    read[..., 0] = True
    when = torch.rand(4, 6, 26, generator=generator) < 0.3
    rounding = Rounding(some(4, 26, 8), some(4, 26, 8), given[1][0], given[2][0], when)
    return LayerReads(keys, values, read, rounding), given, some(1, 4, 6, 8)


@pytest.mark.parametrize("softmax", [Softmax(), Softmax(0.5, 2.0, torch.tensor([0.5, -1.0, 2.0, 0.0]))])
def test_of_a_linear_loss_every_point_knows_the_whole_integral(softmax):
    """L = sum of W . out: evictions cost W . (f - o), keys W . (o' - o~) and values W . (o - o'), whatever the gate."""
    layer, (queries, keys, values), wanted = some_layer(5, softmax)
    rounding = layer.rounding
    assert rounding is not None
    causal = torch.cat([torch.ones(6, 20, dtype=torch.bool), torch.ones(6, 6, dtype=torch.bool).tril()], 1)
    k, v = (
        torch.cat([old, new[0]], 1).repeat_interleave(2, 0) for old, new in ((layer.keys, keys), (layer.values, values))
    )
    when = rounding.when[..., None]
    stored_k, stored_v = (
        torch.where(when, s[:, None], x[:, None]) for s, x in ((rounding.keys, k), (rounding.values, v))
    )

    def weights(logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return softmax.shares(softmax.capped(logits * softmax.scale(8)).masked_fill(~seen, -torch.inf))

    logits = torch.einsum("htd,hed->hte", queries[0], k)
    p, a = weights(logits, causal & layer.read), weights(logits, causal.expand_as(layer.read))
    stored = weights(torch.einsum("htd,hted->hte", queries[0], stored_k), causal & layer.read)
    full, exact = a @ v, p @ v
    policy, between = (torch.einsum("hte,hted->htd", each, stored_v) for each in (stored, p))

    def of(difference: torch.Tensor) -> torch.Tensor:
        return (difference * wanted[0]).sum((1, 2)).view(2, 2).sum(1).float()

    of_values = (p * ((v[:, None] - stored_v) * wanted[0][:, :, None]).sum(-1)).sum(1).view(2, 2, 26).sum(1)
    for gate in (0.0, 0.3, 1.0):
        line = Line(layer, torch.tensor([gate]), torch.ones(1), softmax)
        given = queries.clone().requires_grad_()
        out = line.attend(given, keys, values)
        torch.testing.assert_close(out[0], torch.lerp(policy, full, gate))
        (out * wanted).sum().backward()
        sums = line.effects.sum(-1), *line.rounding.sum(-1)
        for found, expected in zip(sums, (full - exact, between - policy, exact - between), strict=True):
            torch.testing.assert_close(found.float(), of(expected), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(line.rounding[1].double(), of_values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softmax", [Softmax(), Softmax(0.5, 2.0, torch.tensor([0.5, -1.0, 2.0, 0.0]).double())])
def test_a_gradient_check_of_the_line(softmax):
    """How far entries are off is fixed: only then are the gradients those of finite differences."""
    layer, given, _ = some_layer(6, softmax)
    given = [each.repeat(2, 1, 1, 1).requires_grad_() for each in given]

    def attend(*tensors):
        return Line(layer, torch.tensor([0.25, 0.75], dtype=torch.float64), torch.ones(2), softmax).attend(*tensors)

    assert torch.autograd.gradcheck(attend, given)


def test_halves_that_round_at_different_times_are_refused(tiny):
    with pytest.raises(
        kvlab.KvlabError, match="turbo-4/kivi-2 rounds an entry's key and value at different times.*use"
    ):
        attribute(tiny(), small("full"), prompt(48), 6, storage="turbo-4/kivi-2")
    with pytest.raises(kvlab.KvlabError, match="at different times"):
        attribute(tiny(), small("full"), prompt(48), 6, storage=keys_and_values(kivi(4, 8, 16), kivi(2, 8, 24)))
