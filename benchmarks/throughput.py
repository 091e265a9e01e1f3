"""Compare tokens per second of the largest batches whose caches fit into given bytes, with the full cache's.

\b
python benchmarks/throughput.py
python benchmarks/throughput.py --mib 512 --context 2000 --budget 256 --policies snapkv,quest
python benchmarks/throughput.py --only arithmetic

Measured: one sequence runs first. The bytes of its cache at the end, auxiliary data included, say how many sequences
fit. Then batches of that many run, in turns. The prompts of a batch are fed together, so that the peak before they are
compressed is larger than the given bytes. Only the bytes during decoding count.

Arithmetic, for Llama-3.1-8B in bfloat16 on an H100: the cache gets 90 % of 80 GB, less the weights. A step takes the
longer of two times. One is the time to read the weights and the batch's part of its cache at 3.35 TB/s. The other is
the time of 2 floating point operations for each weight and sequence at 989 TFLOP/s. kvlab itself counts the bytes that
a sequence stores, auxiliary data included (pages, a copy of the keys). It also counts the bytes that a step reads,
finding included. For this, each policy compresses one KV head of that length, with random numbers in it, and takes a
step. Nothing else is included: no kernels and no prefill.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from common import bar, in_a_sentence, run
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

import kvlab
from kvlab.bench import clock, meters, timing
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.inputs import models, shapes
from kvlab.methods._base.clock import append_and_select
from kvlab.methods._base.prompt import Prompt

SHAPE = "llama-3.1-8b"
LENGTHS = 8192, 32768, 131072
LARGEST = 256  # sequences: on a CPU a batch soon waits for the processor and no longer for the memory


@dataclass(frozen=True)
class Machine:
    """Limits of a decoding step: memory, bandwidth and compute."""

    memory: float  # bytes that weights and cache may take
    bandwidth: float  # bytes per second
    compute: float  # floating point operations per second

    def batch(self, weights: float, stored: float) -> int:
        """The largest batch; `stored` are the bytes of one sequence's cache."""
        return int((self.memory - weights) // stored)

    def tokens_per_second(self, weights: float, parameters: float, batch: int, read: float) -> float:
        """Of a batch, each of whose sequences reads `read` bytes of its cache at every step."""
        return batch / max((weights + batch * read) / self.bandwidth, 2 * parameters * batch / self.compute)


H100 = Machine(memory=0.9 * 80e9, bandwidth=3.35e12, compute=989e12)


SYSTEMS = {
    "full": "full cache",
    "snapkv": "evicts",
    "rocketkv": "evicts, and reads a part",
    "quest": "reads a part",
    "hybrid": "reads a part",
    "sparq": "reads a part",
}
"""Policies of the arithmetic with a word on each; the full cache first."""


@torch.inference_mode()
def bytes_of(policy: kvlab.Policy, config: Any, length: int) -> tuple[float, float]:
    """Return the bytes that a sequence of `length` tokens stores, and the bytes that its last step reads.

    Both are over all layers. The policy's own store counts them for one KV head in bfloat16.
    """
    generator = torch.Generator().manual_seed(0)
    group, d = config.num_attention_heads // config.num_key_value_heads, config.head_dim
    queries, keys, values = (
        torch.randn(1, heads, n, d, generator=generator).bfloat16()
        for heads, n in ((group, (policy.observes or 1) + 1), (1, length), (1, length))
    )
    prompt = queries[:, :, :-1], keys[:, :, :-1], values[:, :, :-1]
    store = LayerStore(*prompt[1:])
    policy.compress(store, Prompt(*prompt, layers=(0,), n_layers=1, max_new_tokens=1))
    slots = append_and_select(policy, store, *(x[:, :, -1:] for x in (queries, keys, values)), scaling=None)
    heads = config.num_hidden_layers * config.num_key_value_heads
    stored, read = store.kv_bytes + store.aux_bytes, store.bytes_of(slots) + int(policy.overhead_bytes(store))
    return heads * stored, heads * read


def predicted(budget: int, machine: Machine = H100) -> list[list[str]]:
    """The rows of the arithmetic."""
    config = shapes.config(SHAPE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights, parameters = meters.weight_bytes(model), model.num_parameters()
    held = sum(weight.nbytes for weight in model.parameters())
    rows = []
    for length in LENGTHS:
        full = 0.0
        for name, does in SYSTEMS.items():
            policy = kvlab.policy(name) if name == "full" else kvlab.policy(name, budget=budget)
            stored, read = bytes_of(policy, config, length)
            batch = machine.batch(held, stored)
            speed = machine.tokens_per_second(weights, parameters, batch, read)
            full = full or speed
            size = f"{stored / 2**20:,.0f}"
            rows.append([f"{length:,}", name, does, size, f"{batch:,}", f"{speed:,.0f}", f"{speed / full:.1f}"])
    return rows


def measured(
    lm: models.LM, mib: float, context: int, new_tokens: int, policies: list[str], budget: float, repeats: int
) -> list[list[str]]:
    """The rows of what was run; the full cache first."""
    chosen, given = timing.contenders(policies, [budget]), mib * 2**20
    one, _ = meters.prompt(lm, context)
    numbers = {each: timing.generate(lm, one, new_tokens, each) for each in chosen}
    sizes = {each: sum(found[name] for name in ("kv_bytes", "aux_bytes")) for each, found in numbers.items()}
    batches = {each: min(int(given // size), LARGEST) for each, size in sizes.items()}
    if not batches[chosen[0]]:
        raise KvlabError(f"the full cache of one sequence takes {sizes[chosen[0]] / 2**20:.0f} MiB: give more --mib")
    decoding: dict[timing.Contender, list[float]] = {each: [] for each in chosen}
    whole: dict[timing.Contender, list[float]] = {each: [] for each in chosen}
    with bar(Console(stderr=True)) as progress:
        task = progress.add_task("batches", total=repeats * len(chosen))
        for _, each in clock.rounds(chosen, repeats):
            ids, _ = meters.prompt(lm, context, batches[each])
            found = timing.generate(lm, ids, new_tokens, each)
            decoding[each].append(found["tokens_per_second"])
            steps = ids.shape[0] * new_tokens / found["tokens_per_second"]
            whole[each].append(ids.shape[0] * (new_tokens + 1) / (found["time_to_first_token"] + steps))
            progress.advance(task)
    rows = []
    for each in chosen:
        ratios = clock.ratios(decoding[each], decoding[chosen[0]])
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        ends = statistics.median(clock.ratios(whole[each], whole[chosen[0]]))
        speed = f"{statistics.median(decoding[each]):.1f}"
        size = f"{sizes[each] / 2**20:.1f}"
        rows.append([each.name, size, str(batches[each]), speed, spread, f"{ends:.2f}"])
    return rows


def show(console: Console, title: str, words: list[str], numbers: list[str], rows: list[list[str]]) -> None:
    """Print a table; `words` and `numbers` are the headings of its columns."""
    grid = Table(title=title, box=box.MARKDOWN)
    for head in words + numbers:
        grid.add_column(head, justify="left" if head in words else "right")
    for row in rows:
        grid.add_row(*row)
    console.print(grid, highlight=False)


def main(
    mib: Annotated[float, typer.Option("--mib", min=1, help="Largest size of a batch's caches, in MiB.")] = 200,
    context: Annotated[int, typer.Option("--context", min=2, help="Tokens of each prompt.")] = 1000,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1)] = 32,
    policies: Annotated[
        str, typer.Option("--policies", help="Their names.")
    ] = "snapkv,streamingllm,morphkv,rocketkv,quest",
    budget: Annotated[float, typer.Option("--budget", help="Entries, or a fraction of the prompt.")] = 128,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 3,
    model: Annotated[str, typer.Option("--model")] = models.DEFAULT,
    only: Annotated[str, typer.Option("--only", help="measured, arithmetic, or both.")] = "both",
) -> None:
    """Measure here, and calculate for a GPU."""
    console = Console(width=120)
    with in_a_sentence():
        if only not in ("measured", "arithmetic", "both"):
            raise KvlabError(f"--only is measured, arithmetic or both, and not {only!r}")
        if only != "arithmetic":
            lm = models.load(model)
            entries = int(budget) if budget >= 1 else budget
            rows = measured(lm, mib, context, new_tokens, policies.split(","), entries, repeats)
            title = f"Measured: {lm.name}, {meters.device_name(lm.device)}; caches of {mib:g} MiB, {context} tokens"
            heads = ["MiB of one", "batch", "tokens/s", "against the full cache", "with the prompts"]
            show(console, title, ["policy"], heads, rows)
        if only != "measured":
            limit = 1024
            title = f"Arithmetic: {SHAPE}, bfloat16, an H100; budget {limit}"
            heads = ["MiB of one", "batch", "tokens/s", "times the full cache"]
            show(console, title, ["tokens", "policy", "what it does"], heads, predicted(limit))


if __name__ == "__main__":
    run(main, __doc__)
