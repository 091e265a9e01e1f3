"""Experiments: run, reproduce, report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlab.commands import claims, options
from kvlab.errors import KvlabError
from kvlab.lib import extras

if TYPE_CHECKING:
    from kvlab.workbench.jobs.running_job import Result
    from kvlab.workbench.report.ledger import Entry

PROFILES = "quick: minutes on two cores; full: hours on a CPU; gpu: an 8B model"


Profile = Annotated[str, typer.Option("--profile", help=PROFILES + ".")]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Jobs at once (default: 2).", show_default=False)]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        show_default=False,
        help="As for kvlab.load; several with commas, or repeated.",
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="ADDRESS",
        show_default=False,
        help="Hand the jobs to a Dask scheduler (tcp://HOST:8786), or to Slurm (`slurm`, set up by slurm.yaml).",
    ),
]
Compare = Annotated[
    Path | None,
    typer.Option(
        "--compare",
        metavar="FOLDER",
        show_default=False,
        help="Say where the numbers differ from the ledgers kept in this folder, or from kvlab's own (kept); "
        "exit code 3 if any does.",
    ),
]
MOST = 5  # jobs whose files are named
DIFFERENT = 3  # exit code, after everything has been written
Fresh = Annotated[bool, typer.Option("--fresh", help="Run finished jobs again.")]
app = typer.Typer()


@app.command(
    epilog="Examples:   kvlab run quickstart   |   kvlab run zsmerge_error_curves --profile full --jobs 4   "
    "|   kvlab run morphkv_window_ablation --model qwen2.5-coder-0.5b -p documents=my.txt -p windows=8,32"
)
def run(
    experiment: Annotated[str, typer.Argument(help="Name of the experiment, as in `kvlab list experiments`.")],
    profile: Profile = "quick",
    models: Models = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter", "-p", metavar="KEY=VALUE", help="Set a parameter of the notebook; may be repeated."
        ),
    ] = None,
    jobs: Jobs = None,
    fresh: Fresh = False,
    cluster: Cluster = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list the jobs, with prompts, memory and least time.")
    ] = False,
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory", metavar="GB", min=1, show_default=False, help="With --dry-run: of a GPU that is not here."
        ),
    ] = None,
) -> None:
    """Run one experiment through papermill and log it to MLflow. Finished jobs are not run again."""
    extras.need()
    from kvlab.workbench import ui
    from kvlab.workbench.experiments import TRIAL
    from kvlab.workbench.jobs import launch

    chosen, overrides = options.models(models or []), options.overrides(parameters or [])
    if chosen:
        _refuse_models(experiment, overrides)
    if memory is not None and not dry_run:
        raise KvlabError("--memory plans for a GPU that is not here; give --dry-run with it")
    if dry_run:
        return _say_plan(experiment, profile, overrides, jobs, chosen, memory)
    _say_maker()
    if profile == "gpu" and not cluster:
        _say_what_does_not_fit(experiment, profile, overrides, jobs, chosen)
    results = launch.run(experiment, profile, overrides, jobs, fresh, cluster=cluster, models=chosen)
    try:
        finish(results)
        _render([experiment], profile)
        _made(results)
        if any(result.job.kind == TRIAL for result in results):
            typer.echo(f"a trial: its parameters are not those of the {profile} profile, so the report leaves it out")
    finally:
        typer.echo(f"MLflow UI: {ui.link_text([experiment])}")


def _say_plan(
    experiment: str,
    profile: str,
    overrides: Mapping[str, object],
    workers: int | None,
    models: list[str],
    memory: float | None,
) -> None:
    """Print what each job would need, here or on a GPU of so many GB; nothing is loaded, fetched or run."""
    from rich.console import Console

    from kvlab.lib import devices
    from kvlab.workbench.jobs import dry_run, launch

    queue, workers = launch.planned([experiment], profile, overrides, models), launch.at_once(workers)
    if memory is None:
        device = devices.resolved("auto")
        free, rate = devices.free_memory(device), dry_run.rate_of(device)
    else:
        device, free, rate = None, int(memory * 1e9), 0.0
    plan = dry_run.planned(queue, device, rate)
    # In a file or a pipe no line is folded.
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 0 if console.is_terminal else 160)
    console.print(dry_run.table(plan, free, workers))
    for sentence in dry_run.explained(plan, free, workers):
        console.print(sentence, markup=False)


def _say_what_does_not_fit(
    experiment: str, profile: str, overrides: Mapping[str, object], workers: int | None, models: list[str]
) -> None:
    """Say on stderr which models are too large for the memory that is free, before any is fetched or loaded."""
    from kvlab.lib import devices
    from kvlab.workbench.jobs import dry_run, launch

    device = devices.resolved("auto")
    plan = dry_run.planned(launch.planned([experiment], profile, overrides, models), device)
    for sentence in dry_run.too_large(plan, devices.free_memory(device), launch.at_once(workers)):
        typer.echo(f"note: {sentence}", err=True)


def _say_maker() -> None:
    """Say on stderr where another version of kvlab made the workspace."""
    from kvlab.workbench import project

    if other := project.other_version():
        typer.echo(f"note: {other}; `kvlab doctor` says what changed", err=True)


def _made(results: list[Result]) -> None:
    """Name what each job left: its executed notebook, how many figures, and what it makes of its claims."""
    from kvlab.workbench.store import artifacts, database

    connection = database.client()
    for result in results[:MOST]:
        if lines := artifacts.left(connection, result.run_id):
            typer.echo(f"{result.job.experiment} ({result.job.name}):\n  " + "\n  ".join(lines))
    if len(results) > MOST:
        typer.echo(f"... and {len(results) - MOST} more; the MLflow UI lists them")


def _refuse_models(experiment: str, overrides: Mapping[str, object]) -> None:
    """Raises KvlabError where --model would say nothing, or something else than -p."""
    from kvlab.workbench import experiments
    from kvlab.workbench.experiments import notebooks

    if "model" in overrides:
        raise KvlabError("the model is named twice: with --model and with -p model=...")
    if "model" not in notebooks.parameters_of(experiments.load(experiment).path):
        raise KvlabError(f"the notebook of {experiment!r} has no parameter 'model', so that --model says nothing")


@app.command(
    epilog="Examples:   kvlab reproduce --profile quick --jobs 2   |   "
    "kvlab reproduce --model smollm2-135m,qwen2.5-coder-0.5b   |   kvlab reproduce --compare kept"
)
def reproduce(
    profile: Profile = "quick",
    models: Models = None,
    jobs: Jobs = None,
    fresh: Fresh = False,
    cluster: Cluster = None,
    compare: Compare = None,
) -> None:
    """Run all experiments, write the report and print the claims with their verdicts."""
    extras.need()
    from kvlab.workbench import experiments
    from kvlab.workbench.jobs import launch
    from kvlab.workbench.report import leaderboard, snapshots, stability
    from kvlab.workbench.report import page as report

    names = experiments.names()
    if not names:
        experiments.load("")  # says where experiments would have to be
    chosen = options.models(models or [])
    compare = snapshots.place(compare)
    before = snapshots.every(compare, chosen) if compare else None  # refused before hours of work
    steady = stability.read()
    _say_maker()
    results = launch.run(names, profile, None, jobs, fresh, cluster=cluster, models=chosen)
    _render(names, profile)
    ledger = report.entries()
    page = report.save(ledger, steady=steady, charts=leaderboard.of_store())
    claims.show(ledger)
    _print_pages(page, names)
    finish(results, quiet=True)
    if before is not None:
        _compare(before, report.entries(chosen, profile), page.parent)


@app.command(
    epilog="Examples:   kvlab render   |   kvlab render morphkv_window_ablation   |   "
    "kvlab render --fresh --profile full"
)
def render(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[EXPERIMENT]...", help="Experiments (default: all).", show_default=False),
    ] = None,
    profile: Annotated[str | None, typer.Option("--profile", help="Only runs of this profile.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Also figures that today's code has drawn.")] = False,
) -> None:
    """Draw the figures of finished runs again, and write their sentences again, without measuring.

    Needed after a change in a figure or in claims' phrases. `kvlab run`, `reproduce` and `report` do it by themselves.
    """
    from kvlab.workbench import experiments

    chosen = names or experiments.names()
    for name in chosen:
        experiments.load(name)  # refused before anything is drawn
    made = _render(chosen, profile, fresh)
    typer.echo(f"{made} {'run' if made == 1 else 'runs'} rendered" if made else "all figures are of today's code")


def _render(names: list[str], profile: str | None = None, fresh: bool = False) -> int:
    """Render the runs whose figures older code has drawn; returns how many."""
    from kvlab.lib import progress_bars
    from kvlab.workbench import rendering
    from kvlab.workbench.store import database

    if not database.exists():
        return 0
    found = rendering.stale(names, profile, fresh)
    for run in progress_bars.each(found, "rendering", "run") if found else ():
        rendered = rendering.render(database.client(), run)
        for name, reason in rendered.left.items():
            typer.echo(f"{run.data.tags['kvlab.experiment']}: {name} stays as it was: {reason}", err=True)
    return len(found)


@app.command(
    epilog="Examples:   kvlab report   |   kvlab report --out /tmp/report --model smollm2-135m   "
    "|   kvlab report --from kept   |   kvlab report --from kept --poster claims.pdf"
)
def report(
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write to (default: report).", show_default=False)
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            show_default=False,
            help="Only runs of this model; several with commas, or repeated.",
        ),
    ] = None,
    profile: Annotated[str | None, typer.Option("--profile", help="Only runs of this profile.")] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FOLDER",
            help="Keep the ledger as data, a CSV for each model; what was not measured here stays as FOLDER has it.",
            show_default=False,
        ),
    ] = None,
    origin: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Report the ledgers that are kept in this folder, or kvlab's own (kept), without any run.",
            show_default=False,
        ),
    ] = None,
    poster: Annotated[
        Path | None,
        typer.Option(
            "--poster",
            metavar="FILE",
            help="Draw the forest plot alone, for a slide, into this SVG, PDF or PNG; no report is written.",
            show_default=False,
        ),
    ] = None,
    compare: Compare = None,
) -> None:
    """Write the claims ledger as HTML (report.html, and a page for each of several models) and as data (claims.csv)."""
    extras.need()
    from kvlab.workbench import experiments
    from kvlab.workbench.report import leaderboard, snapshots, stability, stand_ins, task_scores
    from kvlab.workbench.report import page as ledger
    from kvlab.workbench.report import poster as slide
    from kvlab.workbench.report.claim_mistakes import mistakes

    chosen = options.models(models or [])
    if keep is not None and (origin or compare):
        raise typer.BadParameter(
            "--keep writes what runs measured; --from and --compare read what is kept: not at once"
        )
    if keep is not None:
        for one in snapshots.keep(keep, chosen, profile):
            typer.echo(f"{one.path}: from this store {one.replaced}, as kept before {one.stayed}")
            for name in one.dropped:
                typer.echo(f"  dropped {name}: there is no such claim any more")
        for path in stand_ins.keep_store(keep):
            typer.echo(f"{path}: how well stand-ins predict answers")
        for path in leaderboard.keep_store(keep, chosen, profile):
            typer.echo(f"{path}: every policy by bytes, for the leaderboard")
        if out is None:
            return
    origin, compare = snapshots.place(origin), snapshots.place(compare)
    before = snapshots.every(compare, chosen) if compare else None
    ledger.check(out)  # refused before the store is read
    if poster is not None:
        slide.check(poster)
    if not origin:
        _render(experiments.names(), profile)
    entries = snapshots.kept(origin, chosen, profile) if origin else ledger.measured(chosen, profile)
    if poster is not None:
        typer.echo(slide.save(entries, poster))
        return
    if origin:
        charts = leaderboard.read(origin, chosen, profile)
        page = ledger.save(entries, out, stability.read(origin), task_scores.boards(origin), charts)
    else:
        charts = leaderboard.of_store(chosen, profile)
        page = ledger.save(entries, out, stability.read(), charts=charts)
    claims.count(entries)
    typer.echo(f"{page}\n{page.parent / 'claims.csv'}" + (f"\n{page.parent / leaderboard.PAGE}" if charts else ""))
    _say_trials()
    for mistake in mistakes():
        typer.echo(f"note: {mistake}", err=True)
    if before is not None:
        _compare(before, entries, page.parent)


def _say_trials() -> None:
    """Name the trials of the store, which the report leaves out."""
    from kvlab.workbench.report import ledger, runs

    if trials := runs.trials(ledger.measuring()):
        names = ", ".join(f"{run.data.tags.get('kvlab.experiment', '')} ({run.info.run_name})" for run in trials[:3])
        more = f" and {len(trials) - 3} more" if len(trials) > 3 else ""
        typer.echo(f"left out, since their parameters are not those of a profile: {names}{more}")


def _compare(before: list[Entry], now: list[Entry], folder: Path) -> None:
    """Print and write where a ledger differs from the kept one, and leave with DIFFERENT if it does."""
    from kvlab.workbench.report import ledger_diff

    found = ledger_diff.compare(before, now)
    typer.echo(f"\n{found}\n{found.write(folder)}")
    if found.differences:
        raise typer.Exit(DIFFERENT)


def finish(results: list[Result], quiet: bool = False) -> None:
    """Say how the jobs ended; raises KvlabError if one failed."""
    failed = [result for result in results if result.state != "finished" and result.state != "done earlier"]
    if failed:
        causes = [
            f"{result.job.experiment} ({result.job.name}): {result.error}"
            + (f" [executed copy: {result.copy}]" if result.copy else "")
            for result in failed
        ]
        raise KvlabError(f"{len(failed)} of {len(results)} jobs failed: " + "; ".join(causes))
    if not quiet:
        reused = sum(result.state == "done earlier" for result in results)
        executed = len(results) - reused
        typer.echo(
            f"{executed} {'job' if executed == 1 else 'jobs'} finished"
            + (f", {reused} done earlier (--fresh runs them again)" if reused else "")
        )


def _print_pages(page: Path, names: list[str]) -> None:
    from kvlab.workbench import ui
    from kvlab.workbench.store.database import shown_uri

    typer.echo(f"\nReport:       {page}\nMLflow store: {shown_uri()}\nMLflow UI:    {ui.link_text(names)}")
