"""Speed and memory of policies against transformers' own full cache: `kvlab bench decode|prefill|memory`.

Both run the same greedy loop: the prompt in one pass, then single-token passes. The first of these ends the prompt, and
the policy compresses. It counts into the time to the first token. The passes after it are the decoding steps. The runs
of one context length are taken in turns, in alternating order, so that a drifting clock speed cancels.

Times are in seconds, memory in bytes. Bytes stored and read are those of the last step.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from rich.console import Console
from torch import Tensor

import kvlab
from kvlab.bench import TASKS, clock, memory, meters
from kvlab.core.hookable import head_dim_of, layers_of
from kvlab.core.storage import AS_IS, Storage, stored_as
from kvlab.errors import KvlabError, nearest
from kvlab.inputs import models
from kvlab.instruments.probes import probe
from kvlab.lib import devices
from kvlab.lib.files import replacing
from kvlab.lib.terminal import titled
from kvlab.live.session import Session, compress
from kvlab.methods import Policy, policy, registry
from kvlab.methods import policies as known_policies

if TYPE_CHECKING:
    import pandas as pd

FULL_CACHE = "transformers"
COLUMNS = (
    "task",
    "policy",
    "budget",
    "storage",
    "context",
    "batch",
    "metric",
    "value",
    "low",
    "high",
    "ratio",
    "ratio_low",
    "ratio_high",
    "against",
    "signature",
)
Samples = dict[str, list[float]]  # metric -> one value for each repetition


@dataclass(frozen=True)
class BenchmarkModel:
    """Which model: a name as for `kvlab.load`, or a published shape with random weights, perhaps cut to `layers`."""

    model: str = models.DEFAULT
    shape: str | None = None
    layers: int | None = None
    device: str = "auto"
    dtype: str = "auto"

    def load(self) -> models.LM:
        if self.shape is not None:
            return models.random_lm(self.shape, self.layers, device=self.device, dtype=self.dtype)
        if self.layers is not None:
            raise KvlabError("layers cuts a model of random weights: give a shape with it (--shape llama-3.1-8b)")
        return models.load(self.model, self.device, self.dtype)


@dataclass(frozen=True)
class Contender:
    """A side of a comparison: transformers' full cache (`policy` None), or a policy, perhaps with probes attached, with
    what it keeps stored in some form.
    """

    policy: Policy | None = None
    probes: tuple[str, ...] = ()
    storage: Storage = AS_IS

    @property
    def name(self) -> str:
        return "+".join([FULL_CACHE if self.policy is None else self.policy.name, *self.probes])

    @property
    def against(self) -> Contender:
        """The contender that its ratios refer to: the same policy without its probes, or the full cache."""
        return replace(self, probes=()) if self.probes else Contender()

    def session(self, lm: models.LM) -> AbstractContextManager[Session | None]:
        if self.policy is None:
            return nullcontext()
        return compress(lm.model, self.policy, self.probes, tokenizer=lm.tokenizer, storage=self.storage)


def contenders(
    policies: Sequence[str],
    budgets: Sequence[float] = (),
    probes: Sequence[str] = (),
    storages: Sequence[str | Storage] = ("as_is",),
) -> list[Contender]:
    """The full cache first, then every policy at every budget ("all": all that there are) in every storage, with and
    without probes.

    Raises:
        KvlabError: an unknown policy, probe or storage, or a budget that a policy cannot work with.
    """
    forms = [stored_as(form) for form in storages]
    if not forms:
        raise KvlabError("name at least one storage, such as 'as_is'")
    for name in probes:
        probe(name)
    if not budgets and policies:
        raise KvlabError("no budget was given; say how many entries each head may keep (512), or which fraction (0.2)")
    chosen = [Contender()]
    for name in known_policies() if "all" in policies else policies:
        if name in registry() and "budget" not in registry()[name].model_fields:
            chosen.append(Contender(policy(name)))
        else:
            chosen += [Contender(policy(name, budget=budget)) for budget in budgets]
    chosen = [chosen[0], *(replace(contender, storage=form) for contender in chosen[1:] for form in forms)]
    chosen = list(dict.fromkeys(chosen))
    with_probes = [replace(contender, probes=tuple(probes)) for contender in chosen[1:]] if probes else []
    return chosen + with_probes


def generate(lm: models.LM, ids: Tensor, steps: int, contender: Contender) -> dict[str, float]:
    """One run: the prompt, the step that ends it, and `steps` decoding steps; every metric that it yields."""
    with torch.inference_mode(), contender.session(lm) as session:
        marks = clock.Marks(lm.device)
        marks.mark()
        out = lm.model(ids, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        for _ in range(1 + steps):
            token = out.logits[:, -1:].argmax(-1)
            marks.mark()
            out = lm.model(token, past_key_values=cache, use_cache=True)
        marks.mark()
        stored = meters.stored(cache, session)
    prefill, first, *decoding = marks.gaps()
    numbers = {"time_to_first_token": prefill + first, "prompt_time": prefill, "first_step": first}
    if decoding:
        numbers |= {
            "tokens_per_second": ids.shape[0] * steps / sum(decoding),
            "time_per_output_token": statistics.median(decoding),
        }
    return numbers | stored


METRICS = {
    "decode": ("tokens_per_second", "time_per_output_token", "time_to_first_token", "first_step", "step_lower_bound"),
    "prefill": ("time_to_first_token", "prompt_time", "first_step", "peak_bytes"),
    "memory": ("kv_bytes", "aux_bytes", "allocated_bytes", "read_bytes", "peak_bytes"),
}


def peak_bytes(lm: models.LM, model: BenchmarkModel, contender: Contender, context: int, batch: int, steps: int) -> int:
    """Peak memory of one run above the loaded model; on a CPU that of a fresh process.

    Raises:
        KvlabError: that process failed, or a policy has no name to hand over.
    """
    if lm.device.type != "cpu":
        return _peak_here(lm, contender, context, batch, steps)
    chosen = None if contender.policy is None else [contender.policy.name, dict(contender.policy)]
    order = json.dumps([asdict(model), chosen, contender.probes, contender.storage.name, context, batch, steps])
    label = f"{contender.name} at {context} tokens"
    return int(memory.in_fresh_process(["-m", "kvlab.bench.timing", order], label))


def _peak_here(lm: models.LM, contender: Contender, context: int, batch: int, steps: int) -> int:
    ids, _ = meters.prompt(lm, context, batch)
    generate(lm, ids[:, :32], 1, contender)  # what torch sets up once is not part of the prompt's memory
    with memory.Peak(lm.device) as peak:
        generate(lm, ids, steps, contender)
    return peak.bytes


def measure(
    task: str,
    model: BenchmarkModel,
    chosen: Sequence[Contender],
    contexts: Sequence[int],
    new_tokens: int = 64,
    repeats: int = 3,
    batch: int = 1,
    advance: Callable[[str, int], None] = lambda *_: None,
) -> pd.DataFrame:
    """Run one task and return a tidy table, with one row for each contender, context and metric.

    `value` is the median of the repetitions, `low` and `high` are their extremes. `ratio` is this median over that of
    the contender `against`; `ratio_low` and `ratio_high` are the extremes of the ratios within one round. A run that
    does not fit into the GPU's memory has nan. The table has no rows of a GPU's peak memory where torch does not count
    it. `attrs` describes the model, the device and the versions.

    Args:
        chosen: as from `contenders`, the full cache among them.
        new_tokens: decoding steps after the one that ends the prompt.
        repeats: rounds of timed runs; bytes are measured once.
        advance: called after each run with a label and the number of prompt tokens that it fed.

    Raises:
        KvlabError: an unknown task, lengths that make no sense, or a context longer than the model's.
    """
    import pandas as pd

    if task not in TASKS:
        raise KvlabError(nearest(task, TASKS, "benchmark"))
    if min([*contexts, new_tokens, repeats, batch], default=0) < 1 or not contexts:
        raise KvlabError("contexts, new tokens, repeats and batch are whole numbers of at least 1")
    lm = model.load()
    steps = 0 if task == "prefill" else new_tokens
    if max(contexts) + steps + 1 > lm.context_length:
        raise KvlabError(
            f"{lm.name} takes {lm.context_length} tokens, and a prompt of {max(contexts)} would need "
            f"{max(contexts) + steps + 1} with its response; use shorter contexts or fewer new tokens"
        )
    for form in dict.fromkeys(one.storage for one in chosen):
        form.check(head_dim_of(lm.model, layers_of(lm.model)[0]), lm.device)
    facts = meters.facts(lm)
    if task == "decode":
        facts["bandwidth"] = meters.bandwidth(lm.device)
    metrics = METRICS[task] + (("uncompressed_bytes",) if task == "memory" and lm.layout.mixed else ())
    rows: list[dict] = []
    for context in contexts:
        ids, source = meters.prompt(lm, context, batch)
        samples: dict[Contender, Samples] = {contender: defaultdict(list) for contender in chosen}
        for contender, numbers in _runs(task, lm, ids, chosen, steps, repeats, advance):
            if task == "decode":
                read = numbers["read_bytes"] + numbers["uncompressed_bytes"]
                numbers["step_lower_bound"] = (facts["weight_bytes"] + read) / facts["bandwidth"]
            for metric in metrics:
                if metric != "peak_bytes":
                    samples[contender][metric].append(numbers[metric])
        if "peak_bytes" in METRICS[task] and devices.counts_peak(lm.device):
            for contender in chosen:
                samples[contender]["peak_bytes"] = [_or_nan(peak_bytes, lm, model, contender, context, batch, steps)]
                advance(f"peak memory of {contender.name}, {context} tokens", ids.numel())
        for contender in chosen:
            system = contender.storage.behind(str(contender.policy or FULL_CACHE))
            signature = f"{lm.signature}|{source}|{system}|seed 0|kvlab {kvlab.__version__}"
            marks = {
                "task": task,
                "policy": contender.name,
                "budget": getattr(contender.policy, "budget", None),
                "storage": str(contender.storage),
                "context": context,
                "batch": batch,
                "signature": signature,
            }
            rows += [marks | row for row in _summary(samples, contender)]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table.attrs.update(facts)
    return table


def _runs(
    task: str,
    lm: models.LM,
    ids: Tensor,
    chosen: Sequence[Contender],
    steps: int,
    repeats: int,
    advance: Callable[[str, int], None],
) -> Iterator[tuple[Contender, dict[str, float]]]:
    """Every contender in every round, in the order of `clock.rounds`."""
    # A GPU chooses its kernels when it first meets a shape.
    warm = ids if lm.device.type != "cpu" and task != "memory" else ids[:, :128]
    for contender in chosen:
        _or_nan(generate, lm, warm, 2, contender)
    for _, contender in clock.rounds(chosen, 1 if task == "memory" else repeats):
        memory.tidy()
        numbers = _or_nan(generate, lm, ids, steps, contender)
        yield contender, numbers if isinstance(numbers, dict) else defaultdict(lambda: math.nan)
        advance(f"{contender.name}, {ids.shape[1]} tokens", ids.numel())


def _or_nan(run: Callable, *arguments: Any) -> Any:
    try:
        return run(*arguments)
    except torch.OutOfMemoryError:
        return math.nan


def _summary(samples: dict[Contender, Samples], contender: Contender) -> Iterator[dict]:
    for metric, values in samples[contender].items():
        reference = samples[contender.against][metric]
        middle, base = statistics.median(values), statistics.median(reference)
        ratios = clock.ratios(values, reference)
        yield {
            "metric": metric,
            "value": middle,
            "low": min(values),
            "high": max(values),
            "ratio": middle / base if base else math.nan,
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "against": contender.against.name,
        }


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write the table, with columns for what it was measured on; the file appears only once it is whole."""
    with replacing(path) as part:
        table.assign(**{str(name): value for name, value in table.attrs.items()}).to_csv(part, index=False)


SHOWN = {
    "tokens_per_second": ("tokens/s", 1, 1),
    "time_per_output_token": ("ms per token", 1e3, 2),
    "time_to_first_token": ("s to first token", 1, 3),
    "prompt_time": ("s of prompt", 1, 3),
    "first_step": ("ms of first step", 1e3, 1),
    "step_lower_bound": ("bound, ms", 1e3, 2),
    "peak_bytes": ("peak, MiB", 2**-20, 1),
    "kv_bytes": ("K and V, MiB", 2**-20, 2),
    "aux_bytes": ("beside, MiB", 2**-20, 2),
    "allocated_bytes": ("allocated, MiB", 2**-20, 2),
    "read_bytes": ("read, MiB", 2**-20, 2),
    "uncompressed_bytes": ("other layers, MiB", 2**-20, 2),
}  # heading, factor, decimals


def show(table: pd.DataFrame, console: Console) -> None:
    """Print what `measure` gave: median, extremes, and ratios to the full cache with theirs; then the roofline."""
    facts, task = table.attrs, table["task"].iloc[0]
    title = f"{task}: {facts['model']}, {facts['dtype']}, {facts['device']}\n{facts['versions']}"
    heads = "context", "policy", "budget", "storage"
    grid = titled(*heads, title=title)
    measured = [metric for metric in METRICS[task] if metric in set(table["metric"])]
    for metric in measured:
        grid.add_column(SHOWN[metric][0], justify="right", no_wrap=True)
    for key, rows in table.groupby(list(heads), sort=False, dropna=False):
        context, name, budget, storage = cast("tuple[int, str, float, str]", key)
        cells = {row["metric"]: _cell(row) for row in rows.to_dict("records")}
        grid.add_row(str(context), name, "" if budget != budget else f"{budget:g}", storage, *cells.values())
    console.print(grid, highlight=False)
    if "bandwidth" in facts:
        console.print(
            f"Roofline: {facts['bandwidth'] / 1e9:.1f} GB/s measured; a step reads the cache and "
            f"{facts['weight_bytes'] / 1e6:.1f} MB of weights, which takes the time under 'bound' or more.",
            highlight=False,
        )
    if len(measured) < len(METRICS[task]):
        console.print("Peak memory: torch does not count it on this device.", highlight=False)
    console.print("x: ratio to transformers' full cache; with probes, to the same policy without.", style="dim")


def _cell(row: dict[Any, Any]) -> str:
    """One row of the table as a cell to print: the median and its extremes, and below it the ratio with its own."""
    _, factor, digits = SHOWN[row["metric"]]
    if math.isnan(row["value"]):
        return "out of memory"
    value, low, high = (f"{row[name] * factor:.{digits}f}" for name in ("value", "low", "high"))
    text = value if low == high else f"{value} ({low}-{high})"
    if row["against"] == row["policy"] or math.isnan(row["ratio"]):
        return text
    ratio, low, high = (f"{row[name]:.2f}" for name in ("ratio", "ratio_low", "ratio_high"))
    return f"{text}\n{ratio}x" + ("" if low == high else f" ({low}-{high})")


if __name__ == "__main__":
    fields, named, attached, form, *sizes = json.loads(sys.argv[1])
    rival = Contender(named and policy(named[0], **named[1]), tuple(attached), stored_as(form))
    print(_peak_here(BenchmarkModel(**fields).load(), rival, *sizes))
