"""Plan jobs before anything is loaded: their prompts, memory, and the least time that they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from kvlab.inputs.packs import gigabytes
from kvlab.lib.durations import duration
from kvlab.workbench.experiments import Job, prompt_limits

if TYPE_CHECKING:
    import torch
    from rich.table import Table
    from transformers import PreTrainedConfig

    from kvlab.bench.memory_needed import Need

RATE_SIZE = 1024
"""Rows of the two matrices whose product is timed: a third of a second on a slow core, nothing on a GPU."""


@dataclass(frozen=True)
class Planned:
    """A job, and what it takes on a device.

    Attributes:
        tokens: of its longest sequence, response included; 0 where its parameters name none.
        device: where it would run; None for a GPU that is not here.
        dtype: of the weights, as the job would load them.
        rate: multiplications and additions per second, twice each product, as measured on the device.
    """

    job: Job
    tokens: int
    device: torch.device | None
    dtype: torch.dtype
    rate: float

    @property
    def model(self) -> str:
        return str(self.job.parameters.get("model", ""))

    @property
    def config(self) -> PreTrainedConfig | None:
        return _config(self.model) if self.model else None

    @cached_property
    def need(self) -> Need | None:
        """None where nothing on this machine says what the model is like."""
        from kvlab.bench import memory_needed

        if self.config is None:
            return None
        return memory_needed.of_prompt(self.config, max(self.tokens, 1), self.dtype)

    @property
    def least_seconds(self) -> float | None:
        """The seconds of one prefill of the longest prompt at the device's rate: a job takes longer."""
        from kvlab.bench import memory_needed

        if self.config is None or not self.rate:
            return None
        return memory_needed.prefill_operations(self.config, max(self.tokens, 1)) / self.rate

    def fits(self, free: int | None, workers: int) -> bool | None:
        """Whether so many jobs at once fit into so many bytes; None where that is not known."""
        return None if self.need is None or free is None else workers * self.need.total <= free


@lru_cache(maxsize=32)
def _config(model: str) -> PreTrainedConfig | None:
    from kvlab.inputs.models.configs import config_of

    return config_of(model)


def planned(jobs: Sequence[Job], device: torch.device | None, rate: float = 0.0) -> list[Planned]:
    """The estimate of each job; `device` and `rate` as in `Planned`, and a rate of 0 where no time is asked for."""
    return [Planned(job, tokens_of(job.parameters), device, _dtype(job, device), rate) for job in jobs]


def tokens_of(parameters: Mapping[str, Any]) -> int:
    """The longest sequence that the parameters name, prompt and response; 0 where they name none."""
    return max((tokens + response for _, tokens, response in prompt_limits.prompts(parameters)), default=0)


def _dtype(job: Job, device: torch.device | None) -> torch.dtype:
    """The type in which `kvlab.load` has a model by default."""
    import torch

    if device is not None and device.type == "cpu":
        return torch.float32
    config = _config(str(job.parameters.get("model", "")))
    own = getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.bfloat16


def rate_of(device: torch.device) -> float:
    """Multiplications and additions per second of a large product, the best of three: of float32 on a CPU, and of
    bfloat16 on a GPU.
    """
    import torch

    from kvlab.bench import clock

    on_cpu = device.type == "cpu"
    size = RATE_SIZE if on_cpu else 8 * RATE_SIZE
    matrix = torch.ones(size, size, dtype=torch.float32 if on_cpu else torch.bfloat16, device=device)
    torch.mm(matrix, matrix)
    best = 0.0
    for _ in range(3):
        start = clock.wall(device)
        torch.mm(matrix, matrix)
        best = max(best, 2 * size**3 / (clock.wall(device) - start))
    return best


def table(plan: Sequence[Planned], free: int | None, workers: int) -> Table:
    """One row for each job."""
    from kvlab.lib.terminal import titled

    count = "1 job" if len(plan) == 1 else f"{len(plan)} jobs"
    shown = titled("job", "model", title=f"{plan[0].job.experiment}: {count}, none is run", box=None)
    for heading in ("longest prompt", "weights", "cache", "working", "time"):
        shown.add_column(heading, justify="right")
    shown.add_column("fits")
    for each in plan:
        need, fits = each.need, each.fits(free, workers)
        sizes = [""] * 3 if need is None else map(gigabytes, (need.weights, need.cache, need.working))
        answer = {True: "yes", False: "NO", None: "not known"}[fits]
        tokens = f"{each.tokens:,} tokens" if each.tokens else ""
        shown.add_row(each.job.name, each.model, tokens, *sizes, _time(each), answer)
    return shown


def _time(each: Planned) -> str:
    if each.job.seconds:
        return f"about {duration(each.job.seconds)}"
    return "" if each.least_seconds is None else f"over {duration(each.least_seconds)}"


def explained(plan: Sequence[Planned], free: int | None, workers: int) -> Iterator[str]:
    """Sentences below the table: what its numbers are of, and what does not fit."""
    at_once = f"{workers} jobs run at once, and each loads its model" if workers > 1 else "One job runs at a time"
    yield f"{_place(plan[0])} {_room(free)}. {at_once}."
    yield "The longest prompt counts its response. Memory is an upper bound for it in one piece."
    if any(each.least_seconds for each in plan):
        rate = f"{plan[0].rate / 1e12:.2g} TFLOP/s"
        yield f"`about` is the profile's estimate of a job. `over` is one prefill at the {rate} measured here."
    yield from too_large(plan, free, workers)


def _place(each: Planned) -> str:
    from kvlab.lib import devices

    return "The GPU" if each.device is None else devices.name(each.device) or "The CPU"


def _room(free: int | None) -> str:
    return "does not say how much memory is free" if free is None else f"has {gigabytes(free)} of memory free"


def too_large(plan: Sequence[Planned], free: int | None, workers: int) -> Iterator[str]:
    """Sentences for each model with jobs that do not fit: what they need, and what would fit."""
    from kvlab.bench import memory_needed

    largest: dict[str, Planned] = {}
    for each in plan:
        if each.fits(free, workers) is False and each.tokens >= largest.get(each.model, each).tokens:
            largest[each.model] = each
    for model, each in largest.items():
        assert each.need is not None and each.config is not None and free is not None, "it is known not to fit"
        kind, total = str(each.dtype).removeprefix("torch."), gigabytes(workers * each.need.total)
        together = f" in {workers} jobs at once" if workers > 1 else ""
        yield f"{model} in {kind} needs {total} for {each.tokens:,} tokens{together}. {_place(each)} {_room(free)}."
        most = memory_needed.longest(each.config, each.dtype, free)
        alone = " with --jobs 1" if workers > 1 else ""
        yield f"Prompts of up to {most:,} tokens fit{alone}." if most else "Its weights alone do not fit."
