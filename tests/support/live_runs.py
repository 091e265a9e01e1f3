"""Plain and compressed generation side by side; shared by the tests of live runs."""

from __future__ import annotations

import functools

import torch

import kvlab
from kvlab.instruments.probes import Probe

# Small budgets at which every policy really evicts, merges or selects from prompts of 40 tokens and more.
SMALL = {
    "random": dict(budget=12),
    "streamingllm": dict(budget=12),
    "scissorhands": dict(budget=16),
    "h2o": dict(budget=12),
    "keyformer": dict(budget=12),
    "snapkv": dict(budget=14, window=6, kernel=3),
    "pyramidkv": dict(budget=14, window=6, kernel=3),
    "zigzagkv": dict(budget=14, window=6, kernel=3),
    "dynamickv": dict(budget=14, window=6, kernel=3),
    "cake": dict(budget=14, window=6, kernel=3),
    "compactor": dict(budget=16, chunk=11),
    "curdkv": dict(budget=12),
    "lacache": dict(budget=14),
    "duoattention": dict(budget=30, sinks=4, recent=8),
    "morphkv": dict(budget=14, window=6),
    "zsmerge": dict(budget=16, window=4),
    "dapq": dict(budget=12, window=6),
    "quest": dict(budget=20, page=2),
    "sparq": dict(budget=12),
    "hybrid": dict(budget=16),
    "exact_topk": dict(budget=8),
    "snapkv_pp": dict(budget=14, window=6, kernel=3),
    "rocketkv": dict(budget=12, window=6, kernel=3),
    "compilerkv": dict(budget=12, window=8, utility_window=4),
    "knorm": dict(budget=12),
    "keydiff": dict(budget=12),
    "lagkv": dict(budget=20, lag=8),
    "tova": dict(budget=12),
    "rkv": dict(budget=16, window=4, interval=4, kernel=3),
    "adakv": dict(budget=36),
    "chunkkv": dict(budget=36, chunk=5),
    "criticaladakv": dict(budget=36),
    "criticalkv": dict(budget=36),
    "decoding": dict(budget=14, interval=4, scorer=kvlab.policy("snapkv", budget=14, window=6, kernel=3)),
    "attention_matching": dict(budget=12),
    "merging": dict(budget=36),
    "rerotated": dict(budget=36),
    "chain": dict(budget=12, first=kvlab.policy("snapkv", budget=30, window=6, kernel=3)),
    "expected_attention": dict(budget=12, future=64),
    "kvcompose": dict(budget=12),
    "layered": dict(budget=36, shares=(3.0, 1.0)),
    "kvzap": dict(budget=12, window=4, sinks=2),
    "kvzip": dict(budget=12, chunk=25),
    "laq": dict(budget=14, window=4, kernel=3, answer=5, draft=20, draft_window=6),
    "leverage": dict(budget=12),
    "qfilters": dict(budget=12),
    "simlayerkv": dict(budget=24, sinks=2, recent=6),
    "triattention": dict(budget=16, interval=4),
}
ONE_TURN = (
    "adakv",
    "attention_matching",
    "compactor",
    "compilerkv",
    "criticaladakv",
    "expected_attention",
    "keyformer",
    "kvcompose",
    "kvzap",
    "kvzip",
    "rerotated",
    "triattention",
)
"""Those that cannot compress a later turn again."""
SEES_RESPONSE = {"oracle_attention": dict(budget=12)}
WITHOUT_BUDGET = {"full": {}, "think": dict(window=8), "threshold": dict(at=0.3, window=32, interval=4)}
EVERYTHING = {name: dict(parameters, budget=2000) for name, parameters in SMALL.items()} | {"full": {}}


def small(name):
    """The policy at a budget at which it acts."""
    return kvlab.policy(name, **(SMALL | SEES_RESPONSE | WITHOUT_BUDGET)[name])


def everything(name):
    """The policy at a budget beyond every prompt of the tests."""
    return kvlab.policy(name, **EVERYTHING[name])


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


def continued(model, past, ids, n=12, **options):
    """A response to `ids`, of which `past` holds the beginning."""
    return generate(model, ids, n, past_key_values=past, **options)


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
        own = (seen.store.counts - 1)[:, :, None, None]
        key, value = (
            x.gather(2, own.expand(*own.shape[:3], x.shape[-1]))[:, :, 0] for x in (seen.store.keys, seen.store.values)
        )
        self.steps[where["layer"], where["step"]] = dict(
            queries=seen.queries[:, :, 0].clone(),
            key=key,
            value=value,
            read=seen.read.clone(),
            output=seen.step.output[:, :, 0].clone(),
        )

    def look_after(self, seen, records, where):
        self.steps[where["layer"], where["step"]]["stored"] = seen.store.positions.clone()


@functools.cache
def plain_runs(lm_of):
    """Plain generation of a family's model, alone and as a left-padded batch of three, once for each family."""

    @functools.cache
    def make(family):
        model = lm_of(family).model
        ids, mask = left_padded(*(prompt(n, seed=n)[0] for n in (40, 23, 31)))
        return ids, mask, generate(model, ids[:1]), generate(model, ids, attention_mask=mask)

    return make


def changes_nothing(lm, plain, one):
    """Assert that a policy with room for everything generates what `plain` of `plain_runs` did, and keeps all of it."""
    ids, mask, alone, batch = plain
    with kvlab.compress(lm.model, one) as session:
        agree(generate(lm.model, ids[:1]), alone)
        agree(generate(lm.model, ids, attention_mask=mask), batch)
    for layer in lm.layout.compressed:
        assert [session.kept(layer, row).tolist()[0] for row in range(3)] == [list(range(n + 11)) for n in (40, 23, 31)]


def witnessed(lm_of, name, length=60, steps=200):
    """A live run of the small budget on a tiny model: session, witness, and a trace of the same prompt alone."""
    lm = lm_of("tiny-llama-gqa")
    ids, policy = prompt(length, seed=3), small(name)
    witness = Witness()
    with kvlab.compress(lm.model, policy, probes=[witness], max_new_tokens=steps) as session:
        out = generate(lm.model, ids, steps + 1)
    trace = kvlab.capture(lm, ids, new_tokens=0, queries="all", pseudo=[policy] if name == "dapq" else ())
    return session, witness, trace, out
