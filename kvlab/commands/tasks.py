"""Tasks: eval, lm-eval."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from kvlab.commands import options, progress
from kvlab.commands.options import Device, Dtype, Model, Storages
from kvlab.errors import KvlabError
from kvlab.lib import extras

if TYPE_CHECKING:
    from kvlab.evaluation.planning import CompressAt

app = typer.Typer()


@app.command(
    "eval",
    epilog="Examples:\n"
    "  kvlab eval needle --policies snapkv,streamingllm --budgets 64,256\n"
    "  kvlab eval ruler --limit 13 -p 'lengths=[1000]'\n"
    "  kvlab eval math --data MATH500.jsonl --policies h2o,morphkv --budgets 256\n"
    "  kvlab eval longbench --data FOLDER --policies all --budgets 0.2 --compress-at context",
)
def eval_(
    names: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="Tasks, with commas: needle, ruler, longbench, longgen, icl, arithmetic, turns, math, aime.",
        ),
    ],
    policies: Annotated[
        str,
        typer.Option("--policies", help="Policies with commas between them, or all; the full cache is always added."),
    ] = "streamingllm,snapkv,dapq",
    budgets: Annotated[
        str, typer.Option("--budgets", help="Budgets: entries, or fractions of the prompt (0.2).")
    ] = "64,256",
    model: Model = "smollm2-135m",
    storage: Storages = "as_is",
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Examples of each task (default: all).", show_default=False)
    ] = None,
    compress_at: Annotated[
        str, typer.Option("--compress-at", help="prompt: compress after the question; context: before it.")
    ] = "prompt",
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="KEY=VALUE", help="Set a parameter of the task; may be repeated."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help="The task's file (math, aime, longgen) or folder (longbench).",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The JSONL file of answers (default: eval/TASK.jsonl in the project).", show_default=False
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FOLDER",
            help="Write the mean scores as FOLDER/tasks/MODEL.csv, next to the reference ledgers.",
            show_default=False,
        ),
    ] = None,
    log: Annotated[
        bool | None,
        typer.Option(
            "--log/--no-log", help="Log a run to MLflow (default: yes, where it is installed).", show_default=False
        ),
    ] = None,
) -> None:
    """Run tasks with policies and budgets on a live model. The same command continues a run that was stopped.

    kvlab has measurements of some models: compilerkv's tables and duoattention's head scores. Where it has them for the
    model, it uses them.
    """
    without = extras.missing()
    if without and log:
        raise KvlabError(without)
    from kvlab import tasks
    from kvlab.inputs import corpus

    # Mistakes are refused before torch is imported, which takes seconds.
    chosen, sizes = options.policies(policies), options.numbers(budgets, "--budgets", options.entries)
    given = options.task_parameters(parameters or [])
    chosen_tasks = [tasks.task(name, **given, **_data(name, data)) for name in dict.fromkeys(options.names(names))]
    if not chosen_tasks:
        raise typer.BadParameter("name at least one task")
    for task in chosen_tasks:
        document = getattr(task, "document", None)
        if document and corpus.genre(document) == "file":  # a text of a pack may have to be pulled first
            corpus.document(document)
    from rich.console import Console

    from kvlab import evaluation as evaluate
    from kvlab.analyses import shipped_tables
    from kvlab.bench.meters import device_name
    from kvlab.inputs import models
    from kvlab.methods import policies as known_policies
    from kvlab.render.figures import evaluation
    from kvlab.workbench import project
    from kvlab.workbench.experiments import prompt_limits
    from kvlab.workbench.report import task_means
    from kvlab.workbench.store import database, evaluations

    if policies == "all":
        chosen = [name for name in known_policies() if name not in ("full", "random")]
    point, storages = cast("CompressAt", compress_at), options.names(storage)
    plans = [evaluate.plan(task, chosen, sizes, point, limit, storages) for task in chosen_tasks]
    for wanted in plans:
        prompt_limits.check({"model": model, "lengths": getattr(wanted.task, "lengths", ())}, wanted.task.name)
    log = not without if log is None else log
    if without:
        typer.echo(f"note: no figure is drawn and no run is logged: {without}", err=True)
    if log:
        database.ensure_store()  # refused before the answers are computed
    lm, answers = models.load(model, device, dtype), []
    for each in plans:
        meant = [one for one in each.policies if policies != "all" or shipped_tables.served(lm, one)]
        plan = replace(each, policies=tuple(shipped_tables.with_shipped(lm, policy) for policy in meant))
        path = out or project.root() / "eval" / f"{plan.task.name}.jsonl"
        with progress.counting(plan.task.name) as advance:
            made = evaluate.run(lm, plan, path, advance)
        answers += made
        typer.echo(path, err=True)
        stem = path.name.removesuffix(".jsonl")
        drawn = path.with_name(f"{stem}-{plan.task.name}.png" if out else f"{stem}.png")
        if not without and (figure := evaluation.draw(made, drawn, evaluate.read(path))):
            typer.echo(figure, err=True)
    console = Console(width=None if sys.stdout.isatty() else 140)
    evaluation.show(evaluate.summary(answers), console)
    evaluation.show_parts(answers, console)
    if keep is not None:
        typer.echo(task_means.keep(keep, answers, device_name(lm.device)), err=True)
    if log:
        about = {
            "tasks": names,
            "policies": chosen,
            "budgets": budgets,
            "storage": storage,
            "model": lm.signature,
            "limit": limit,
            "compress_at": compress_at,
            **given,
        }
        typer.echo(f"MLflow run {evaluations.log(answers, about)}", err=True)


def _data(name: str, data: Path | None) -> dict[str, str]:
    """The parameter of a task that takes the path `data`."""
    from kvlab import tasks

    if data is None:
        return {}
    fields = type(tasks.task(name)).model_fields
    taken = [field for field in ("file", "folder") if field in fields]
    if not taken:
        raise KvlabError(f"{name} makes its own examples and reads no --data")
    return {taken[0]: str(data)}


@app.command(
    "lm-eval",
    # Every option is the harness's own, --help among them.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def lm_eval_(context: typer.Context) -> None:
    """Run the lm-evaluation-harness's own command, which then knows the model kvlab (the extra lm-eval)."""
    import importlib

    try:
        importlib.import_module("kvlab.harness")
        harness = importlib.import_module("lm_eval.__main__")
    except ModuleNotFoundError as error:
        raise KvlabError(
            f"the lm-evaluation-harness is not installed (there is no {error.name}): pip install 'kvlab[lm-eval]'"
        ) from None
    argv, sys.argv = sys.argv, ["lm-eval", *context.args]
    try:
        harness.cli_evaluate()
    finally:
        sys.argv = argv
