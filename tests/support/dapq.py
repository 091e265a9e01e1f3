"""What the tests of DapQ's analyses share: short random prompts on a tiny model."""

import torch

import kvlab


def random_traces(tiny):
    """A tiny model and traces of three random prompts, with every query of the prompt."""
    lm = tiny()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 200, (n,), generator=generator) for n in (300, 310, 420)]
    options = {"window": 64, "queries": "all", "accumulate": True, "pseudo": ()}
    return lm, [kvlab.capture(lm, ids, new_tokens=8, **options) for ids in prompts]
