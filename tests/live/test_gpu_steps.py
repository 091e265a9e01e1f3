"""What a decoding step asks of a GPU: it waits for no answer, and asks for as much of many heads as of few."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from support import pretend_gpu
from support.both_devices import TINY, on_gpu_like
from support.device_watch import Seen, watched
from support.live_runs import SEES_RESPONSE, generate, left_padded, prompt, small

import kvlab
from kvlab.inputs import models

NAMES = sorted(set(kvlab.policies()) - set(SEES_RESPONSE))
STEPS = 10

WAITS = {"threshold": 6}
"""Waits of a model of two layers in its busiest step, where there are any. The table may only shrink. `threshold` asks
how many entries of each head stay: nobody can know it beforehand. It asks once in `interval` steps."""

BY_HEAD = {
    "adakv": "one product for each run of heads that hold equally many entries",
    "criticaladakv": "as adakv",
    "duoattention": "streaming heads close their gaps one by one",
    "kvzip": "as adakv",
    "threshold": "every head is scored by itself, once in `interval` steps",
}
"""Policies that ask for more operators where there are more heads, and why. The table may only shrink."""


pytestmark = pytest.mark.filterwarnings("ignore:(duoattention|compilerkv)")


@pytest.fixture(scope="module")
def lms():
    """A function that gives a model with `n` KV heads, and twice as many query heads, on the pretended GPU."""

    @functools.cache
    def make(n: int, head_dim: int = 16) -> models.LM:
        heads = dict(num_attention_heads=2 * n, num_key_value_heads=n, head_dim=head_dim)
        with pretend_gpu.present():
            return on_gpu_like(models.random_lm(device="cpu", **TINY, **heads))

    return make


def steps(lm: models.LM, name: str, length: int = 60, storage: str = "as_is") -> list[Seen]:
    """What was seen of each decoding step that did not have to make room; the first step compresses the prompt."""
    seen = []
    with pretend_gpu.present(), torch.inference_mode():
        ids = prompt(length).to(lm.device)
        with kvlab.compress(lm.model, small(name), max_new_tokens=STEPS + 1, storage=storage) as session:
            past = lm.model(ids, use_cache=True).past_key_values
            for step in range(STEPS + 1):
                room = session.allocated_bytes - session.aux_bytes
                with watched() as of_step:
                    lm.model(ids[:, step : step + 1], past_key_values=past)
                if step and session.allocated_bytes - session.aux_bytes <= room:
                    seen.append(of_step)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_a_step_waits_for_no_answer(lms, name):
    found = [of_step.waits for of_step in steps(lms(2), name)]
    assert len(found) >= STEPS - 3
    assert max(waits.total() for waits in found) <= WAITS.get(name, 0), sum(found, Counter()).most_common()
    if name in WAITS:
        assert any(waits.total() == WAITS[name] for waits in found), "the table may shrink"


@pytest.mark.parametrize("form", ["int8", "fp8", "kivi-4", "turbo-4", "turbo-3", "nvfp4", "int8/turbo-2"])
def test_a_step_of_another_storage_waits_for_no_answer(lms, form):
    found = [of_step.waits for of_step in steps(lms(2, head_dim=32), "snapkv", storage=form)]
    assert len(found) >= STEPS - 3 and not sum(found, Counter())


@pytest.mark.parametrize("name", NAMES)
def test_a_step_asks_for_as_many_operators_of_more_heads_and_of_more_entries(lms, name):
    def most(heads: int, length: int) -> int:
        return max(of_step.operators.total() for of_step in steps(lms(heads), name, length))

    few = most(2, 120)
    # The steps in which `threshold` judges all entries are others at another length.
    assert name == "threshold" or most(2, 480) <= few
    assert (most(8, 120) > few) == (name in BY_HEAD)


@pytest.mark.parametrize("name", ["snapkv", "quest", "h2o"])
def test_generate_waits_as_it_does_alone_and_once_more_with_padding(lms, name):
    """transformers asks at every step whether all sequences have ended; a batch with padding is asked for its mask."""
    lm = lms(2)

    def waits(ids: torch.Tensor, mask: torch.Tensor, n: int) -> int:
        with kvlab.compress(lm.model, small(name), max_new_tokens=STEPS), watched() as seen:
            generate(lm.model, ids, n, attention_mask=mask)
        return seen.waits.total()

    with pretend_gpu.present():
        ids, mask = (x.to(lm.device) for x in left_padded(prompt(60)[0], prompt(44, 1)[0]))
        assert waits(ids[:1], mask[:1], 8) - waits(ids[:1], mask[:1], 4) == 4
        assert waits(ids, mask, 8) - waits(ids, mask, 4) == 8


def test_what_is_watched():
    """The counter counts: every way in which a program waits for a GPU, and none of those in which it does not."""
    with pretend_gpu.present() as device:
        numbers = torch.arange(6, device=device)
        few, rows = numbers > 3, torch.tensor([1, 2], device=device)
        waiting = {
            "item": lambda: numbers[2].item(),
            "bool": lambda: bool(few.any()),
            "cpu": lambda: numbers.cpu(),
            "tolist": lambda: numbers.tolist(),
            "device": lambda: torch.tensor([1], device=device),
            "nonzero": lambda: few.nonzero(),
            "mask": lambda: numbers[few],
            "indices of the CPU": lambda: numbers[torch.tensor([1, 2])],
            "rows": lambda: numbers.unique(),
            "repeats": lambda: numbers.repeat_interleave(numbers),
            "equal": lambda: torch.equal(numbers, numbers),
        }
        going_on = {
            "index": lambda: numbers[rows],
            "slice": lambda: numbers[1:3],
            "masked": lambda: numbers.masked_fill(few, 0),
            "written": lambda: numbers.__setitem__(few, 0),
            "sort": lambda: numbers.sort(),
            "made": lambda: torch.zeros(3, device=device),
            "type": lambda: numbers.to(torch.float32),
            "number": lambda: numbers + torch.tensor(2),
        }
        for name, program in (waiting | going_on).items():
            with watched() as seen:
                program()
            assert bool(seen.waits) == (name in waiting), name
