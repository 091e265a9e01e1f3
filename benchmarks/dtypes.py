"""Compare bfloat16 with float32 on a CPU: prefill, decoding, and the losses of policies.

\b
python benchmarks/dtypes.py
python benchmarks/dtypes.py --model smollm2-135m --model qwen2.5-coder-0.5b --documents 0
python benchmarks/dtypes.py --verdicts rocketkv_design --verdicts zsmerge_error_curves

With --verdicts the quick profile of each experiment runs here with each type, and nothing else is measured. The table
shows the claims that get another verdict. It also shows how far their numbers move, in widths of their intervals.

Times are CPU time of one thread, on random token ids and transformers' cache. The types take turns, in alternating
order. Each ratio is the median over rounds of the ratio within one round. The losses are measured on presidential
messages: `mass_lost` in a replay and `kl` of `kvlab.fidelity`, each against the full cache of the same type. Both types
are fed the response of float32, since bfloat16's own one may be another text.
"""

from __future__ import annotations

import contextlib
import io
import statistics
from collections.abc import Callable, Mapping
from typing import Annotated, Any
from unittest import mock

import matplotlib.pyplot as plt
import torch
import typer
from common import bar, in_a_sentence, prefill, prompt, run
from rich import box
from rich.console import Console
from rich.table import Table

import kvlab
from kvlab import papers
from kvlab.analyses.dapq.position import ids_of
from kvlab.bench import clock
from kvlab.inputs.corpus import documents_between
from kvlab.inputs.models import LM, load
from kvlab.workbench import experiments
from kvlab.workbench.experiments import notebooks
from kvlab.workbench.store import tracking

TYPES = ("float32", "bfloat16")
POLICIES = ["streamingllm", "snapkv", "h2o", "dapq"]
MODELS = ["smollm2-135m"]


def decoding(lm: LM, ids: torch.Tensor, steps: int) -> list[float]:
    """Seconds of each step after the prompt."""
    cache, token, times = prefill(lm, ids)["past_key_values"], ids[None, -1:], []
    with torch.inference_mode():
        for _ in range(steps):
            start = clock.busy(lm.device)
            lm.model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            times.append(clock.busy(lm.device) - start)
    return times


def times(lms: dict[str, LM], tokens: int, steps: int, repeats: int, console: Console) -> dict[str, dict[str, list]]:
    """Seconds by what is timed, type and round."""
    found = {what: {kind: [] for kind in TYPES} for what in ("prefill", "decoding step")}
    ids = prompt(lms["float32"], tokens)
    with bar(console) as progress:
        task = progress.add_task("timing", total=repeats * len(TYPES))
        for lm in lms.values():
            prefill(lm, ids[:64])
        for _, kind in clock.rounds(TYPES, repeats):
            progress.update(task, description=kind)
            start = clock.busy(lms[kind].device)
            prefill(lms[kind], ids)
            found["prefill"][kind].append(clock.busy(lms[kind].device) - start)
            found["decoding step"][kind].append(statistics.median(decoding(lms[kind], ids, steps)))
            progress.advance(task)
    return found


def losses(lms: dict[str, LM], tokens: int, budget: int, documents: int, new_tokens: int) -> dict[tuple, list[float]]:
    """Values of the documents by policy, measure and type."""
    policies = [kvlab.policy(name, budget=budget) for name in POLICIES]
    found = {(name, what, kind): [] for name in POLICIES for what in ("mass_lost", "kl") for kind in TYPES}
    first = lms["float32"]
    for document in list(documents_between(first, tokens, 8000, limit=documents, seed=0)):
        ids = first.encode(document.window(first, tokens).text)[0]
        response = None
        for kind, lm in lms.items():
            trace = kvlab.capture(lm, ids, new_tokens, policies=policies, response=response, progress=False)
            response = ids_of(trace)[trace.prompt_length :][:new_tokens]
            summary = kvlab.replay(trace, policies, progress=False).summary
            for one, lost in zip(policies, summary["mass_lost"], strict=True):
                found[one.name, "mass_lost", kind].append(lost)
                found[one.name, "kl", kind].append(kvlab.fidelity(lm, one, ids, response=response).summary["kl"])
    return found


def _table(title: str, caption: str) -> Table:
    return Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def shown_times(found: dict[str, dict[str, list]], title: str, about: str) -> Table:
    table = _table(title, about)
    for name in ("", *TYPES, "ratio", "range"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for what, by_type in found.items():
        ratios = clock.ratios(by_type["bfloat16"], by_type["float32"])
        seconds = [f"{1000 * statistics.median(by_type[kind]):.0f} ms" for kind in TYPES]
        table.add_row(what, *seconds, f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}")
    return table


def shown_losses(found: dict[tuple, list[float]], title: str) -> Table:
    table = _table(title, "largest: the shift of the document that moves most")
    for name in ("policy", "measure", *TYPES, "shift", "largest"):
        table.add_column(name, justify="left" if name in ("policy", "measure") else "right", no_wrap=True)
    for name, what in dict.fromkeys(key[:2] for key in found):
        one, other = (found[name, what, kind] for kind in TYPES)
        shifts = [b - a for a, b in zip(one, other, strict=True)]
        means = [statistics.mean(values) for values in (one, other, shifts)]
        table.add_row(name, what, *map("{:.4f}".format, means[:2]), f"{means[2]:+.4f}", f"{max(shifts, key=abs):+.4f}")
    return table


class Log:
    """Metrics and intervals that a notebook logs. It replaces `tracking.Run`, and ignores all other calls."""

    def __init__(self):
        self.metrics: dict[str, float] = {}
        self.intervals: dict[str, tuple[float, float]] = {}

    def log(self, metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]] | None = None) -> None:
        self.metrics |= metrics
        self.intervals |= intervals or {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def logged(experiment: str, lm: LM) -> Log:
    """Run the cells of an experiment's notebook by the quick profile on a loaded model, and return their log."""
    (job,) = experiments.jobs(experiment)
    log, names = Log(), {"display": lambda *_: None}
    with (
        mock.patch.object(tracking, "start", lambda *_, **__: log),
        mock.patch.object(kvlab, "load", lambda *_: lm),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        for cell in notebooks.cells(job.notebook):
            if cell["cell_type"] == "code":
                exec(compile(notebooks.source(cell), f"<{experiment}>", "exec"), names)
                plt.close("all")
    return log


def verdicts(lms: dict[str, LM], experiment: str) -> list[dict[str, Any]]:
    """Of each claim that samples decide: the verdict by type, and the shift of its number in widths of its interval."""
    logs = {kind: logged(experiment, lm) for kind, lm in lms.items()}
    rows = []
    for claim in papers.claims(experiment):
        judged = {kind: papers.judge(claim, log.metrics, log.intervals) for kind, log in logs.items()}
        one, other = judged["float32"], judged["bfloat16"]
        if claim.kind != "finding" or one.value is None or other.value is None:
            continue
        width = one.high - one.low if one.high is not None and one.low is not None else 0.0
        shift = abs(other.value - one.value) / width if width else None
        rows.append({"claim": claim.id, **{kind: verdict.verdict for kind, verdict in judged.items()}, "shift": shift})
    return rows


def shown_verdicts(rows: list[dict[str, Any]], title: str) -> Table:
    """The claims whose verdict is another one; the caption counts them all."""
    flipped = [row for row in rows if row["float32"] != row["bfloat16"]]
    shifts = [row["shift"] for row in rows if row["shift"] is not None]
    moved = f"; median shift {statistics.median(shifts):.2f} of the interval's width" if shifts else ""
    table = _table(title, f"{len(flipped)} of {len(rows)} verdicts differ{moved}")
    for name in ("claim", *TYPES, "shift"):
        table.add_column(name)
    for row in flipped:
        table.add_row(
            row["claim"], *(row[kind] for kind in TYPES), "" if row["shift"] is None else f"{row['shift']:.2f}"
        )
    return table


def main(
    model: Annotated[list[str], typer.Option(help="As for kvlab.load; may be given several times.")] = MODELS,
    tokens: Annotated[int, typer.Option(min=100, help="Length of a prompt.")] = 600,
    steps: Annotated[int, typer.Option(min=1, help="Decoding steps; the median is taken in each round.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the median is shown.")] = 5,
    documents: Annotated[int, typer.Option(min=0, help="Texts on which losses are measured; 0 leaves them out.")] = 2,
    budget: Annotated[int, typer.Option(min=33, help="Entries for each layer and KV head.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="Length of the responses.")] = 16,
    verdicts_of: Annotated[
        list[str] | None, typer.Option("--verdicts", help="Judge the claims of this experiment with each type instead.")
    ] = None,
) -> None:
    console = Console(highlight=False)
    native = [kind for kind in ("avx512_bf16", "amx_bf16") if torch.cpu.get_capabilities().get(kind)]
    about = f"one thread, {' and '.join(native) or 'no bfloat16 instructions'}"
    with in_a_sentence():
        for name in model:
            lms = {kind: load(name, "cpu", kind) for kind in TYPES}
            for experiment in verdicts_of or ():
                console.print(shown_verdicts(verdicts(lms, experiment), f"{name}, {experiment} (quick)"))
            if verdicts_of:
                continue
            with clock.one_thread(lms["float32"].device):
                timed = times(lms, tokens, steps, repeats, console)
            console.print(shown_times(timed, f"{name}, {tokens} tokens, median of {repeats}", about))
            if documents:
                lost = losses(lms, tokens, budget, documents, new_tokens)
                title = f"{name}, budget {budget}, {documents} documents of {tokens} tokens, {new_tokens} steps"
                console.print(shown_losses(lost, title))


if __name__ == "__main__":
    run(main, __doc__)
