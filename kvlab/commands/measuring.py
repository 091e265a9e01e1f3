"""Measurements on a model: attribute, bench, heads, filters, surrogate, pages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlab.commands import options, progress
from kvlab.commands.options import Device, Dtype, Model, Storages
from kvlab.errors import KvlabError, nearest
from kvlab.lib import extras

app = typer.Typer()


LEARNT = "Learn what policies need"
"""Where the help lists commands whose results policies use."""


@app.command(
    epilog="Examples:\n"
    "  kvlab attribute snapkv --budget 64 --document sotu/1962 --tokens 800\n"
    "  kvlab attribute h2o --budget 0.1 --document my.txt --out why\n"
    "  kvlab attribute snapkv --budget 128 --document my.txt --response 'The total is 42.'"
)
def attribute(
    policy: Annotated[str, typer.Argument(help="A policy that evicts or selects: `kvlab list policies`.")],
    budget: Annotated[str, typer.Option("--budget", help="Entries, or a fraction of the prompt (0.2).")] = "64",
    document: Annotated[
        str, typer.Option("--document", help="A document (`kvlab list documents`) or a text file.")
    ] = "sotu/1962",
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", min=1, help="Cut the document to its first tokens.", show_default="all of it"),
    ] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2, help="Length of the greedy response.")] = 32,
    response: Annotated[
        str | None, typer.Option("--response", help="A text that follows instead.", show_default=False)
    ] = None,
    loss: Annotated[
        str, typer.Option("--loss", help="nll, or kl: the divergence from the full cache's predictions.")
    ] = "nll",
    parameters: Annotated[
        list[str] | None, typer.Option("-p", help="A parameter of the policy, key=value.", show_default=False)
    ] = None,
    storage: Annotated[
        str, typer.Option("--storage", help="A name from `kvlab list storages`, or keys/values: turbo-4/kivi-2.")
    ] = "as_is",
    model: Model = "smollm2-135m",
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Annotated[Path, typer.Option("--out", help="The folder for table, figure and page.")] = Path("attribution"),
) -> None:
    """Say which evicted entries cost the response, in nats, and measure what it regains once they are put back.

    Writes effects.csv (one row for each evicted entry), restored.csv, attribution.png and why.html, a page that needs
    nothing else. With --storage also rounding.csv: one row for each entry that is read rounded.
    """
    from kvlab.errors import KvlabError
    from kvlab.lib import policy_names

    extras.need("matplotlib", "seaborn")
    policy_names.check([policy])
    (entries, *more) = options.numbers(budget, "--budget", options.entries) or [0]
    if more:
        raise KvlabError(f"one budget is attributed at a time, and --budget {budget} names several")
    from kvlab.core.storage import stored_as
    from kvlab.methods import has_budget
    from kvlab.methods import policy as made

    form = stored_as(storage)

    given = options.task_parameters(parameters or [])
    tested = made(policy, **({"budget": entries} if has_budget(policy) else {}), **given)
    if out.exists() and not out.is_dir():
        raise KvlabError(f"--out {out} is a file; name a folder")
    from kvlab.attribution.attribute import attribute as attributed
    from kvlab.inputs import corpus, models

    text = corpus.document(document)
    lm = models.load(model, device=device, dtype=dtype)
    text = text if tokens is None else text.window(lm, tokens)
    more_options: dict[str, Any] = {"response": response, "loss": loss, "storage": form}
    why = attributed(lm, tested, text, new_tokens, **more_options)
    from kvlab.workbench.attribution_files import write

    for line in write(why, out):
        typer.echo(line)


@app.command(
    epilog="Examples:\n"
    "  kvlab bench decode\n"
    "  kvlab bench decode --policies all --budget 256,512 --contexts 4000\n"
    "  kvlab bench decode --policies snapkv --probes entropy,bytes\n"
    "  kvlab bench prefill --out prefill.csv\n"
    "  kvlab bench memory --shape llama-3.1-8b --layers 2 --contexts 1000,16000"
)
def bench(
    task: Annotated[str, typer.Argument(help="What to measure: decode, prefill or memory.")],
    model: Model = "smollm2-135m",
    shape: Annotated[
        str | None,
        typer.Option("--shape", help="Random weights of this published shape, instead of --model.", show_default=False),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Cut the shape to this many layers.", show_default=False)
    ] = None,
    policies: Annotated[
        str, typer.Option("--policies", help="Policies with commas between them, or all.")
    ] = "snapkv,streamingllm",
    budget: Annotated[
        str, typer.Option("--budget", help="Budgets: entries, or fractions of the prompt (0.2).")
    ] = "512",
    storage: Storages = "as_is",
    probes: Annotated[str, typer.Option("--probes", help="Time each policy with these probes, too.")] = "",
    contexts: Annotated[str, typer.Option("--contexts", help="Prompt lengths in tokens.")] = "1000,4000",
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Number of timed decoding steps.")] = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Number of timed rounds.")] = 3,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences in a batch.")] = 1,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Annotated[Path | None, typer.Option("--out", help="CSV file for the table.", show_default=False)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the table as JSON, with what it was measured on.")
    ] = False,
) -> None:
    """Measure speed, time to first token and memory of policies, and of transformers' own full cache."""
    from kvlab.bench import TASKS

    if task not in TASKS:
        raise KvlabError(nearest(task, TASKS, "benchmark"))
    lengths, budgets = (
        options.numbers(contexts, "--contexts", int),
        options.numbers(budget, "--budget", options.entries),
    )
    named = options.policies(policies)
    options.check_out(out)
    from rich.console import Console

    from kvlab.bench import timing as benchmark

    chosen = benchmark.contenders(named, budgets, options.names(probes), options.names(storage))
    if shape is not None and "kvzap" not in named:  # "all" of random weights, which have no surrogate
        chosen = [one for one in chosen if one.policy is None or one.policy.name != "kvzap"]
    measured = benchmark.BenchmarkModel(model, shape, layers, device, dtype)
    runs = {"decode": repeats, "prefill": repeats + 1}.get(task, 2) * len(chosen)
    with progress.feeding(runs * sum(lengths) * batch) as advance:
        table = benchmark.measure(task, measured, chosen, lengths, new_tokens, repeats, batch, advance)
    if out is not None:
        benchmark.write_csv(table, out)
    if as_json:
        typer.echo(f'{{"measured_on": {json.dumps(table.attrs)}, "rows": {table.to_json(orient="records")}}}')
    else:
        benchmark.show(table, Console(width=None if sys.stdout.isatty() else 160))


@app.command(
    rich_help_panel=LEARNT,
    epilog="Examples:   kvlab heads   |   kvlab heads smollm2-135m --context 2000 --needles 16   |   "
    "kvlab heads ./my-model --out my-heads.json",
)
def heads(
    model: Annotated[str, typer.Argument(help="Name, folder, GGUF file or Hugging Face id.")] = "smollm2-135m",
    out: Annotated[
        Path | None, typer.Option("--out", help="The JSON file (default: MODEL-heads.json here).", show_default=False)
    ] = None,
    context: Annotated[int, typer.Option("--context", min=32, help="Tokens of hay in each prompt.")] = 1000,
    needles: Annotated[int, typer.Option("--needles", min=1, help="Number of needles, each at another depth.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the needles and their hay.")] = 0,
) -> None:
    """Measure which attention heads look at a needle while the model answers; duoattention uses the result."""
    options.check_out(out)
    from kvlab.inputs import models
    from kvlab.traces.retrieval_heads import measure

    lm = models.load(model)
    scores = measure(lm, context, needles, seed)
    path = scores.save(out or options.named_after(lm.name, "-heads.json"))
    for layer, head, score in scores.best(5):
        typer.echo(f"layer {layer:2}, head {head:2}: {score:.1%} of the answer's attention on the needle")
    typer.echo(path)


@app.command(
    rich_help_panel=LEARNT,
    epilog="Examples:   kvlab filters   |   kvlab filters gemma-3-270m   |   "
    "kvlab filters ./my-model --out my-filters.json",
)
def filters(
    model: Annotated[str, typer.Argument(help="Name, folder, GGUF file or Hugging Face id.")] = "smollm2-135m",
    out: Annotated[
        Path | None, typer.Option("--out", help="The JSON file (default: MODEL-filters.json here).", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each text.")] = 2048,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Number of texts.")] = 20,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Queries of each head, of all texts.")] = 3000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the texts and queries.")] = 0,
) -> None:
    """Measure the main direction of each head's queries; qfilters uses the result."""
    options.check_out(out)
    from kvlab.inputs import models
    from kvlab.traces.query_filters import measure

    lm = models.load(model)
    found = measure(lm, tokens, documents, samples, seed)
    typer.echo(found.save(out or options.named_after(lm.name, "-filters.json")))


@app.command(
    rich_help_panel=LEARNT,
    epilog="Examples:   kvlab calibrate   |   kvlab calibrate ./my-model --out my.safetensors   |   "
    "kvlab eval needle --storage kvtc-2:smollm2-135m-kvtc.safetensors",
)
def calibrate(
    model: Annotated[str, typer.Argument(help="Name, folder, GGUF file or Hugging Face id.")] = "smollm2-135m",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The file (default: MODEL-kvtc.safetensors here).", show_default=False),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=16, help="Tokens of each text.")] = 1000,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Number of texts.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the texts.")] = 0,
) -> None:
    """Learn the principal components of each head's keys and values; the storage kvtc-2:FILE uses the result."""
    options.check_out(out)
    from kvlab.inputs import models
    from kvlab.traces.calibrating import measure

    lm = models.load(model)
    found = measure(lm, tokens, documents, seed)
    typer.echo(found.save(out or options.named_after(lm.name, "-kvtc.safetensors")))


@app.command(
    rich_help_panel=LEARNT,
    epilog="Examples:   kvlab surrogate   |   kvlab surrogate gemma-3-270m   |   "
    "kvlab surrogate ./my-model --out my-model.safetensors",
)
def surrogate(
    model: Annotated[str, typer.Argument(help="Name, folder, GGUF file or Hugging Face id.")] = "smollm2-135m",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The safetensors file (default: MODEL-surrogate.safetensors here).", show_default=False
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each text.")] = 1000,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Number of texts.")] = 20,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the choice of texts.")] = 0,
    ridge: Annotated[float, typer.Option("--ridge", min=0, help="Penalty of the squared weights.")] = 1.0,
    held_out: Annotated[
        str, typer.Option("--held-out", help="Documents to measure R^2 on, with commas between them.")
    ] = "sotu/1962,squad/Oxygen",
) -> None:
    """Train a linear map from hidden states to log KVzip+ scores, layer by layer; kvzap uses the result."""
    options.check_out(out)
    from kvlab.inputs import corpus, models
    from kvlab.traces.surrogate_training import train

    judged = corpus.documents(options.names(held_out)) if held_out else []
    lm = models.load(model)
    found = train(lm, tokens, documents, seed, ridge, held_out=judged)
    for document, r2 in found.about.r2.items():
        typer.echo(f"R^2 on {document}, mean over layers and KV heads: {r2:.3f}")
    typer.echo(found.save(out or options.named_after(lm.name, "-surrogate.safetensors")))


@app.command(epilog="Examples:   kvlab pages   |   kvlab pages --only snapkv,h2o --out my-pages")
def pages(
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the pages; pictures go into its folder figures.")
    ] = Path("docs/policies"),
    only: Annotated[str, typer.Option("--only", help="Policies with commas between them (default: all).")] = "",
    repeats: Annotated[int, typer.Option("--repeats", min=0, help="Rounds of timed runs; 0 leaves the times out.")] = 3,
) -> None:
    """Write a page of each policy: its idea, what it keeps of one text, its cost, and how it does on the default model.

    All is measured in this run (about eight minutes on two quiet cores); on a busy machine the costs mean little.
    """
    extras.need("matplotlib", "seaborn", "PIL")
    chosen = options.policies(only)
    from kvlab.analyses import portraits
    from kvlab.inputs import models
    from kvlab.workbench import method_pages

    names, settings = method_pages.named(chosen), portraits.Settings(repeats=repeats)
    method_pages.check_folder(out)
    with progress.feeding(portraits.work(names, settings)) as advance:
        written = method_pages.write(models.load(models.DEFAULT), names, out, settings, advance)
    for path in written:
        typer.echo(path)
