"""Scores with the question read, and with it held back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.paths import ROOT

from kvlab.workbench.report import page, snapshots, task_scores
from kvlab.workbench.report.question_timing import moments
from kvlab.workbench.report.task_scores import Board, Cell


def cell(score: float, against_full: tuple[float, float] | None = None, full: float | None = None, n: int = 5) -> Cell:
    return Cell(score, score - 10, score + 10, f"{score} %", against_full, full, n)


def board(model: str, moment: str, rows: dict[str, list[Cell | None]], budgets=("8", ""), task="needle") -> Board:
    return Board(model, task, "needle()", "", moment, 5, cell(90), list(budgets), list(rows.items()), [])


READ = board("a", "prompt", {"snapkv": [cell(80, (-20, 5)), None], "think": [None, cell(90, (-5, 5))]})
HELD = board("a", "context", {"snapkv": [cell(20, (-80, -50)), None], "think": [None, cell(90, (-5, 5))]})


def test_both_moments_of_a_board_stand_side_by_side():
    (table,) = moments([READ, HELD])
    assert (table.task, table.budget, table.models) == ("needle", "8", ["a"])
    (first, (think,)), (second, (snapkv,)) = table.rows
    assert (first, second) == ("think", "snapkv"), "what takes no budget is there, and the best comes first"
    assert (snapkv.read.score, snapkv.held.score, snapkv.clear, think.clear) == (80, 20, -1, 0)
    assert table.losing == [(1, 2)]
    assert table.description == "clearly lower if compressed before the question: 1 of 2 policies on a"


@pytest.mark.parametrize(
    ("read", "held", "clear"),
    [((-20, 5), (-40, -20), 0), ((-20, 5), (-40, -21), -1), ((-50, -30), (-29, -10), 1), (None, (-40, -21), 0)],
)
def test_it_costs_clearly_where_the_differences_from_the_full_cache_are_apart(read, held, clear):
    pair = [board("a", moment, {"p": [cell(50, of)]}, ["8"]) for moment, of in (("prompt", read), ("context", held))]
    ((_, (both,)),) = moments(pair)[0].rows
    assert both.clear == clear


def test_models_are_columns_and_gaps_stay_gaps():
    other = [board("b", moment, {"snapkv": [cell(40, (-9, 9))]}, ["8"]) for moment in ("prompt", "context")]
    alone = board("c", "prompt", {"snapkv": [cell(40)]})
    (table,) = moments([READ, HELD, *other, alone])
    assert table.models == ["a", "b"], "a model that has one moment has nothing to compare"
    assert {name: [bool(both) for both in cells] for name, cells in table.rows} == {
        "snapkv": [True, True],
        "think": [True, False],
    }


def test_a_policy_has_one_row_however_many_answers_each_model_has_of_it():
    """And rows follow what is left of the full cache's score, which is another one over other prompts."""
    rows = {"snapkv": [cell(40, full=50)], "think, 2 of 5 answers": [cell(45, full=60, n=2)]}
    few = [
        replace(board("b", moment, rows, ["8"]), fewer={"think, 2 of 5 answers": "think"})
        for moment in ("prompt", "context")
    ]
    (table,) = moments(few)
    assert [(name, cells[0].n) for name, cells in table.rows] == [("snapkv", 5), ("think", 2)]
    (both,) = moments([READ, HELD, *few])
    assert {name: [each.n for each in cells] for name, cells in both.rows} == {"snapkv": [5, 5], "think": [5, 2]}


@pytest.mark.parametrize(("score", "ends"), [(8, 25), (39, 50), (40, 50), (41, 75), (90, 100), (90.000001, 100)])
def test_the_axis_ends_where_all_that_is_drawn_has_room(score, ends):
    pair = [board("a", moment, {"p": [cell(score)]}, ["8"]) for moment in ("prompt", "context")]
    assert moments(pair)[0].ends == ends


def test_tables_come_first_where_most_is_lost():
    level = [board("a", moment, {"p": [cell(50, (-9, 9))]}, ["8"], "icl") for moment in ("prompt", "context")]
    assert [table.task for table in moments([*level, READ, HELD])] == ["needle", "icl"]


def test_the_kept_scores_are_drawn_so():
    folder = ROOT / "docs" / "ledger"
    found = task_scores.boards(folder)
    tables = moments(found)
    needles = next(
        table for table in tables if (table.task, table.budget) == ("needle", "512") and "sotu/1962" in table.prompts
    )
    snapkv = dict(needles.rows)["snapkv"][needles.models.index("qwen2.5-coder-0.5b")]
    assert (round(snapkv.read.score), round(snapkv.held.score), snapkv.clear) == (100, 33, -1), "15 and 5 of fifteen"
    text = page.render(snapshots.kept(folder), scores=found)["report.html"]
    assert "Cost of compressing before the question" in text
    drawn = sum(both is not None for table in tables for _, cells in table.rows for both in cells)
    assert text.count('<svg class="moved') == drawn > 100
    assert 'aria-label="100 % with the question read, 33 % compressed before it"' in text


def test_the_full_cache_is_drawn_where_it_is_on_the_prompts_of_the_row():
    (table,) = [table for table in moments(task_scores.boards(ROOT / "docs" / "ledger")) if table.task == "longbench"]
    on_small = [cells[table.models.index("qwen2.5-coder-0.5b")] for _, cells in table.rows]
    assert all(on_small) and {both.n for both in on_small} == {30, 60}
    of_thirty, of_sixty = ({round(both.read.full, 3) for both in on_small if both.n == n} for n in (30, 60))
    assert len(of_thirty) == len(of_sixty) == 1, "one score of the full cache over each set of prompts"
    assert of_thirty != of_sixty
