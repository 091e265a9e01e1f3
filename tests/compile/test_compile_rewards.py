"""Rewards, risks and candidates of `kvlab compile`, against plain runs and eager attention."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.compiling import settings, step_by_step
from support.eager import eager
from support.measured_files import table_file

from kvlab.analyses.compilerkv import held_out
from kvlab.compile import trials
from kvlab.methods.compilerkv import CompilerKV


def test_rewards_are_those_of_a_file_of_tables_fed_token_by_token(reader, context, tmp_path):
    """Ten joint actions, so that there are two batches; thresholds leave rows with different numbers of entries."""
    rng, small = np.random.default_rng(0), settings()
    weights, thresholds = rng.choice(small.weights, (10, 2, 2)), rng.choice(small.thresholds, (10, 2))
    with trials.prefilled(reader, context, small) as found:
        ones = [
            trials.with_thresholds(trials.with_weights(small, w, 2), tau)
            for w, tau in zip(weights, thresholds, strict=True)
        ]
        kept = [found.kept(one) for one in ones]
        losses = found.losses(kept)
    sizes = set()
    for number in (0, 4, 9):
        path = table_file(
            tmp_path, heads=weights[number].repeat(2, 1).tolist(), risk=thresholds[number][:, None, None].tolist()
        )
        one = CompilerKV(budget=16, window=16, utility_window=8, tables=path)
        loss, stored = step_by_step(reader, context, one)
        assert losses[number].item() == pytest.approx(loss, abs=2e-5)
        assert all(torch.equal(a, b) for a, b in zip(kept[number], stored, strict=True))
        sizes |= {layer.shape[-1] for layer in stored}
    assert len(sizes) > 1


def test_the_full_loss_is_transformers_own(reader, context):
    ids = torch.cat([context.ids, context.continuation])
    with torch.no_grad():
        logits = reader.model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
    told = logits[len(context.ids) : -1].gather(1, context.continuation[1:, None])
    with trials.prefilled(reader, context, settings()) as found:
        assert found.full_loss() == pytest.approx(-float(told.mean()), abs=1e-5)


def test_risk_is_that_of_eager_attention(reader, context):
    """Equations 11 to 13 from transformers' own attention weights and logits."""
    seen = eager(reader, context.ids)
    mean = torch.stack(seen.weights).double()[:, :, -16:].mean((0, 1, 2))
    nll = -seen.logits.double().log_softmax(-1)[-17:-1].gather(1, context.ids[-16:, None]).mean()
    with trials.prefilled(reader, context, settings()) as found:
        assert found.entropy == pytest.approx(-float((mean * mean.log()).sum()), abs=1e-4)
        assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-4)


def test_candidates_are_what_a_budget_of_everything_keeps(reader, context):
    small = settings()
    with trials.prefilled(reader, context, small) as found:
        counts = trials.candidates(trials.neutral(small), found, small.thresholds)
        almost = trials.neutral(small).replace(budget=len(context.ids) - 1)
        for column, tau in enumerate(small.thresholds):
            kept = found.kept(trials.with_thresholds(almost, [tau, tau]))
            assert [min(n, almost.budget) for n in counts[:, column]] == [layer.shape[-1] for layer in kept]
    assert (counts[:, 0] == len(context.ids)).all() and (np.diff(counts) <= 0).all() and counts[:, -1].min() >= 1


def test_where_a_continuation_looks_is_what_eager_attention_says(reader, context):
    ids = torch.cat([context.ids, context.continuation[:-1]])
    length = len(context.ids)
    expected = torch.stack(eager(reader, ids).weights)[:, :, length:, :length].mean((1, 2))
    with trials.prefilled(reader, context, settings()) as found:
        assert torch.allclose(held_out.continuation_attention(found), expected.double(), atol=1e-5)
