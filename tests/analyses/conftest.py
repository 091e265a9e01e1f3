"""What the tests of DapQ's analyses share."""

from __future__ import annotations

import pytest
import torch

import kvlab


@pytest.fixture(scope="session")
def small(tiny):
    """A tiny model and traces of three short random prompts, with every query of the prompt; nobody may change them."""
    lm = tiny()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 200, (n,), generator=generator) for n in (300, 310, 420)]
    options = {"window": 64, "queries": "all", "accumulate": True, "pseudo": ()}
    return lm, [kvlab.capture(lm, ids, new_tokens=8, **options) for ids in prompts]
