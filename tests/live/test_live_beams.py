"""Sampling and beam search inside a session: what is kept of a sequence moves with it."""

from __future__ import annotations

import pytest
import torch
from support.live_runs import EVERYTHING, ONE_TURN, SMALL, agree, everything, generate, left_padded, prompt, small
from support.tensors import sets

import kvlab


@pytest.mark.parametrize("name", EVERYTHING)
def test_sampling_with_a_seed_draws_the_same(tiny, name):
    model, ids = tiny().model, prompt(40)
    options = dict(do_sample=True, temperature=1.5, num_return_sequences=3)
    torch.manual_seed(7)
    expected = generate(model, ids, **options)
    with kvlab.compress(model, everything(name)):
        torch.manual_seed(7)
        agree(generate(model, ids, **options), expected)


@pytest.mark.parametrize("name", EVERYTHING)
def test_beam_search_finds_the_same_in_a_padded_batch(tiny, name):
    model = tiny().model
    ids, mask = left_padded(*(prompt(n, seed=n)[0] for n in (40, 23, 40)))
    options = dict(attention_mask=mask, num_beams=3, num_return_sequences=2, output_logits=False)
    expected = generate(model, ids, 16, **options)
    with kvlab.compress(model, everything(name), probes=["mass_lost", "output_error"]) as session:
        found = generate(model, ids, 16, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=0)
    # The shadow follows the beams, or it would see another beam's past.
    assert session.table.value.max() < 1e-4


def steps_after(model, name, prompts, orders, again=True):
    """Logits of forced tokens; after every ten steps, rows are taken in another order; `again`: then a second turn."""
    found = []
    with kvlab.compress(model, small(name)) as session, torch.no_grad():
        past, new = model(prompts).past_key_values, prompt(60, seed=4)[0]
        for round_, order in enumerate([*orders, None]):
            fed = new[10 * round_ : 10 * round_ + (1 if order is None else 10)]
            found.extend(model(token.expand(past.batch, 1), past_key_values=past).logits[:, -1] for token in fed)
            if order is not None:
                past.reorder_cache(torch.tensor(order))
        if not again:
            return torch.stack(found), [sets(session.kept(1, row)) for row in range(past.batch)]
        # Shorter than the observation windows, which reach back over the response.
        model(new[None, -3:].expand(past.batch, 3), past_key_values=past)
        found.append(model(new[None, :1].expand(past.batch, 1), past_key_values=past).logits[:, -1])
        kept = [sets(session.kept(1, row)) + sets(session.kept_after_prefill(0, row)) for row in range(past.batch)]
    return torch.stack(found), kept


@pytest.mark.parametrize("name", SMALL)
def test_all_that_is_kept_of_a_beam_moves_with_it(tiny, name):
    model, prompts = tiny().model, torch.cat([prompt(50, seed=seed) for seed in (1, 2, 3)])
    # The prompt of these is that of the first turn, or leaves sequences with different numbers of entries.
    again = name not in (*ONE_TURN, "zigzagkv", "dynamickv")
    moved, kept = steps_after(model, name, prompts, [[2, 2, 0], [1, 2, 0]], again)
    for row, origin in enumerate([2, 0, 2]):
        alone, kept_alone = steps_after(model, name, prompts[origin][None], [[0], [0]], again)
        torch.testing.assert_close(moved[20:, row], alone[20:, 0], atol=1e-4, rtol=0)
        assert kept[row] == kept_alone[0]
