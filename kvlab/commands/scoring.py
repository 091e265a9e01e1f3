"""Scores of answers that anybody's model gave: score."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvlab.scores.answer_sets import Answers, Compared, Scored

app = typer.Typer()


@app.command(
    "score",
    epilog="Examples:   kvlab score qasper predictions/qasper.jsonl   |   kvlab score predictions   |   "
    "kvlab score phi4__morphkv.jsonl.gz --against phi4__snapkv.jsonl.gz",
)
def score_(
    what: Annotated[
        str,
        typer.Argument(
            metavar="TASK|ANSWERS",
            help="A LongBench task such as qasper, with FILE; or a folder of answers (files TASK.jsonl or "
            "NAME__TASK.jsonl), or a file whose lines name their 'task'. Files may end in .gz.",
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Argument(help='JSONL with {"pred", "answers", "all_classes"} on each line, of TASK.', show_default=False),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="ANSWERS",
            help="Compare with these answers prompt by prompt: matched by 'index', or by order where lines have none.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (with TASK FILE it always is).")] = False,
) -> None:
    """Score LongBench answers of any model with LongBench's metrics, in percent, or compare two sets of answers.

    Intervals are 95 %: Student's for a task, a bootstrap over prompts for means over tasks and for differences.
    """
    if file is None:
        _sets(what, against, as_json)
    elif against is not None:
        raise typer.BadParameter("--against compares ANSWERS with ANSWERS: leave out the name of the task")
    else:
        _one_task(what, file)


def _one_task(task: str, file: Path) -> None:
    from kvlab import scores

    rule = scores.convention(task)
    points = scores.score_each(task, scores.read_predictions(file))
    from kvlab import __version__
    from kvlab.lib.intervals import interval

    # Of a few answers the interval reaches further than scores do.
    low, high = (round(100 * min(max(end, 0), 1), 2) for end in interval(points))
    typer.echo(
        json.dumps(
            {
                "task": task,
                "score": scores.percent(points),
                "n": len(points),
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


def _sets(what: str, against: Path | None, as_json: bool) -> None:
    from kvlab import scores

    if what in scores.LONGBENCH and not Path(what).exists():
        raise typer.BadParameter(f"name the file of answers to {what}")
    from kvlab.scores import answer_sets

    if against is not None:
        (name, first), (other, second) = (answer_sets.read_set(each) for each in (what, against))
        with _counting(first, second) as advance:
            rows = answer_sets.compare(first, second, advance)
        _show_compared(name, other, rows, as_json)
        return
    sets = answer_sets.read_sets(what)
    scored: dict[str, list[answer_sets.Scored]] = {}
    with _counting(*sets.values()) as advance:
        for name, answers in sets.items():
            scored[name] = answer_sets.summary(answer_sets.score_set(answers, advance))
    if as_json:
        _print([{"answers": name, **asdict(row)} for name, rows in scored.items() for row in rows])
        return
    for name, rows in scored.items():
        typer.echo(f"{name}\n  {'task':20} {'n':>5} {'score':>7}  95 % interval")
        for row in rows:
            label, n = _label(row)
            typer.echo(f"  {label:20} {n:>5} {row.score:7.2f}  {row.low:.2f} to {row.high:.2f}")


def _show_compared(name: str, other: str, rows: list[Compared], as_json: bool) -> None:
    if as_json:
        _print([{"answers": name, "against": other, **asdict(row), "verdict": row.verdict} for row in rows])
        return
    typer.echo(f"A: {name}\nB: {other}")
    typer.echo(f"{'task':20} {'n':>4} {'A':>6} {'B':>6} {'A - B':>6}  {'95 % interval':16}  A is")
    for row in rows:
        ends = f"{row.low:.2f} to {row.high:.2f}"
        numbers = f"{row.first:6.2f} {row.second:6.2f} {row.difference:6.2f}"
        label, n = _label(row)
        typer.echo(f"{label:20} {n:>4} {numbers}  {ends:16}  {row.verdict}")
    found = [row.verdict for row in rows[:-1]]
    typer.echo(
        f"A is ahead on {found.count('ahead')} of {len(found)} tasks and behind on {found.count('behind')}; "
        f"{found.count('open')} stay open."
    )


def _label(row: Scored | Compared) -> tuple[str, str]:
    """The name of a row, and its number of answers; the mean counts tasks."""
    from kvlab.scores.answer_sets import MEAN

    if row.task == MEAN:
        return f"mean of {row.n} task{'s' * (row.n != 1)}", ""
    return row.task, str(row.n)


def _print(rows: list[dict[str, Any]]) -> None:
    numbers = [{key: round(at, 4) if isinstance(at, float) else at for key, at in row.items()} for row in rows]
    typer.echo(json.dumps(numbers, ensure_ascii=False, indent=1))


@contextmanager
def _counting(*sets: Answers) -> Iterator[Callable[[str], None]]:
    """A bar of answers, after five seconds; yields the function that moves it."""
    from kvlab.lib import progress_bars

    total = sum(len(predictions) for answers in sets for predictions in answers.values())
    with progress_bars.counting(total, "scores", "answer") as bar:

        def advance(task: str) -> None:
            bar.set_description(task, refresh=False)
            bar.update()

        yield advance
