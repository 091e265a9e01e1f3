"""What a long prompt takes of a GPU's memory: no matrix of length x length, and no more than is said beforehand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import pretend_gpu
from support.both_devices import TINY, on_gpu_like
from support.device_watch import Memory, memory_watched
from support.live_runs import SEES_RESPONSE, prompt, small

import kvlab
from kvlab.bench import memory_needed
from kvlab.inputs import models, shapes

NAMES = sorted(set(kvlab.policies()) - set(SEES_RESPONSE))
SHORT, LONG = 1000, 2000

SQUARE = {
    "attention_matching": "the weights of every query over the prompt are what it fits",
    "kvcompose": "the repeating pass feeds the whole prompt at once, under a mask; CUDA needs none",
}
"""Policies whose largest tensor grows with the square of the prompt, and why. The table may only shrink."""

Run = Callable[[models.LM, torch.Tensor], object]


pytestmark = pytest.mark.filterwarnings("ignore:(duoattention|compilerkv)")


@pytest.fixture(scope="module")
def gpu() -> models.LM:
    made = models.random_lm(device="cpu", **TINY, max_position_embeddings=8192)
    with pretend_gpu.present():
        return on_gpu_like(made)


def live(name: str) -> Run:
    """The prefill of a live session, to the end of the compression."""

    def run(lm: models.LM, ids: torch.Tensor) -> None:
        with kvlab.compress(lm.model, small(name)) as session:
            lm.model(ids, use_cache=True, logits_to_keep=1)
            session.end_prompt()

    return run


def captured(**options) -> Run:
    return lambda lm, ids: kvlab.capture(lm, ids, 2, progress=False, **options)


def watched(lm: models.LM, tokens: int, run: Run) -> Memory:
    """What a prompt takes besides the weights."""
    with pretend_gpu.present(), torch.inference_mode():
        ids = prompt(tokens).to(lm.device)
        weights = {x.inside.untyped_storage()._cdata for x in lm.model.state_dict().values()}
        with memory_watched(besides=weights) as memory:
            run(lm, ids)
    return memory


@pytest.mark.parametrize("name", NAMES)
def test_a_prefill_makes_no_matrix_of_length_x_length(gpu, name):
    short, long = (watched(gpu, tokens, live(name)) for tokens in (SHORT, LONG))
    if name in SQUARE:
        assert long.largest > 2.1 * short.largest, "the table may shrink"
    else:
        assert long.largest <= 2.1 * short.largest and long.peak <= 2.2 * short.peak, long.shape


@pytest.mark.parametrize("options", [{}, {"accumulate": True}, {"queries": "all"}], ids=str)
def test_a_capture_makes_no_matrix_of_length_x_length(gpu, options):
    short, long = (watched(gpu, tokens, captured(**options)) for tokens in (SHORT, LONG))
    assert long.largest <= 2.1 * short.largest and long.peak <= 2.2 * short.peak, long.shape


CHANGES = [
    {},
    dict(intermediate_size=1024),
    dict(num_attention_heads=16, num_key_value_heads=16),
    dict(num_attention_heads=16, num_key_value_heads=2),
    dict(num_hidden_layers=12),
    dict(hidden_size=512, num_hidden_layers=1),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_prompt_takes_as_much_as_is_said_beforehand(changes, dtype):
    """At least what is measured of the hungriest, and not far above it."""
    made = models.random_lm(device="cpu", **TINY | {"dtype": dtype}, **changes)
    with pretend_gpu.present():
        lm = on_gpu_like(made)
    need = memory_needed.of_prompt(lm.model.config, LONG, lm.dtype)
    assert need.weights == sum(weight.numel() * weight.element_size() for weight in made.model.parameters())
    runs = live("full"), live("h2o"), live("snapkv"), captured(), captured(accumulate=True)
    measured = max(watched(lm, LONG, run).peak for run in runs)
    assert measured <= need.cache + need.working <= 1.5 * measured


def test_96k_tokens_of_an_8b_model_fit_beside_it():
    """Llama-3.1-8B in bfloat16 on a GPU of 80 GB."""
    config = shapes.config("llama-3.1-8b")
    need = memory_needed.of_prompt(config, 96_000, torch.bfloat16)
    assert need.weights == 8_030_261_248 * 2
    assert need.cache == 96_000 * 2 * 32 * 8 * 128 * 2
    assert need.total < 80e9
    most = memory_needed.longest(config, torch.bfloat16, 80 * 10**9)
    assert most >= 96_000
    assert memory_needed.of_prompt(config, most, torch.bfloat16).total <= 80e9
    assert memory_needed.of_prompt(config, most + 1, torch.bfloat16).total > 80e9
    assert memory_needed.longest(config, torch.bfloat16, 10 * 10**9) == 0
