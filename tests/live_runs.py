"""Plain and compressed generation side by side; shared by the tests of live runs."""

from __future__ import annotations

import functools

import torch

import kvlab
from kvlab.probes import Probe

# Small budgets at which every policy really evicts, merges or selects from prompts of 40 tokens and more.
SMALL = {
    "random": dict(budget=12),
    "streamingllm": dict(budget=12),
    "snapkv": dict(budget=14, window=6, kernel=3),
    "dapq": dict(budget=12, window=6),
    "zsmerge": dict(budget=16, window=4),
    "morphkv": dict(budget=14, window=6),
    "exact_topk": dict(budget=8),
}
EVERYTHING = {name: dict(parameters, budget=2000) for name, parameters in SMALL.items()} | {"full": {}}


def prompt(length, seed=0, rows=1):
    """Token ids `[rows, length]` of the tiny vocabulary, none of them special."""
    return torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(*rows):
    """Ids and mask `[rows, longest]` of prompts `[length]` of different lengths."""
    longest = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row in rows])
    lengths = torch.tensor([[len(row)] for row in rows])
    return ids, (torch.arange(longest) >= longest - lengths).long()


def generate(model, ids, n=12, **options):
    """Exactly `n` new tokens with their logits, greedy unless the options say otherwise."""
    fixed = dict(max_new_tokens=n, min_new_tokens=n, output_logits=True, return_dict_in_generate=True)
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids, attention_mask=mask, **fixed | dict(do_sample=False, pad_token_id=0) | options)


def agree(found, expected, atol=1e-4):
    assert found.sequences.tolist() == expected.sequences.tolist()
    for step, (a, b) in enumerate(zip(found.logits, expected.logits, strict=True)):
        torch.testing.assert_close(a, b, atol=atol, rtol=0, msg=lambda m, step=step: f"step {step}: {m}")


class Witness(Probe):
    """Writes down what every layer of every step was given and did, without help of the package's own probes."""

    name = "witness"

    def __init__(self):
        self.steps = {}

    def look(self, seen, records, where):
        self.steps[where["layer"], where["step"]] = dict(
            queries=seen.queries[:, :, 0].clone(), key=seen.store.keys[:, :, -1].clone(),
            value=seen.store.values[:, :, -1].clone(), read=seen.read.clone(), output=seen.step.output[:, :, 0].clone())

    def look_after(self, seen, records, where):
        self.steps[where["layer"], where["step"]]["stored"] = seen.store.positions.clone()


@functools.cache
def witnessed(lm_of, name, length=60, steps=200):
    """A live run of the small budget on a tiny model: session, witness, and a trace of the same prompt alone."""
    lm = lm_of("tiny-llama-gqa")
    ids, policy = prompt(length, seed=3), kvlab.policy(name, **SMALL[name])
    witness = Witness()
    with kvlab.compress(lm.model, policy, probes=[witness]) as session:
        out = generate(lm.model, ids, steps + 1)
    trace = kvlab.capture(lm, ids, new_tokens=0, window=32, pseudo=[policy] if name == "dapq" else ())
    return session, witness, trace, out
