"""The tables of scores on the page of tasks say what is kept."""

from __future__ import annotations

import re

import pytest
from support.paths import ROOT

from kvlab.workbench.report import task_scores

PAGE = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
HALF, LARGER = "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
MOMENTS = ("prompt", "context")
ROW = re.compile(r"^\| (?!-)(.+?) \|(.+)\|$", re.MULTILINE)


def kept(model: str, task: str, settings: str = "", n: str = "") -> dict[tuple[str, str, str], dict[str, str]]:
    """(policy, budget, moment) -> its line over all kinds, of those over so many examples."""
    lines = task_scores.read(ROOT / "docs" / "ledger" / "tasks" / f"{model}.csv")
    mine = [line for line in lines if line["task"] == task and settings in line["settings"] and not line["kind"]]
    mine = [line for line in mine if not line["turn"] and n in ("", line["n"])]
    return {(line["policy"], line["budget"], line["compress_at"]): line for line in mine}


def rows(heading: str) -> list[tuple[list[str], list[str]]]:
    """The policies of each row of a section's first table, and its cells."""
    section = PAGE.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    table = section[section.index("\n| ") :].partition("\n\n")[0]
    found = [(names, [cell.strip() for cell in cells.split("|")]) for names, cells in ROW.findall(table)[1:]]
    assert found, heading
    return [([name_of(each) for each in re.sub(r" \(.*?\)", "", names).split(", ")], cells) for names, cells in found]


def name_of(words: str) -> str:
    return "full" if words == "full cache" else words.split()[0]


def at(lines, policy: str, budget: str, moment: str) -> dict[str, str]:
    """The line of a policy, which may take no budget."""
    return lines.get((policy, budget, moment)) or lines[policy, "", moment]


def percent(line: dict[str, str], *names: str) -> list[str]:
    return [f"{100 * float(line[name]):.0f}" for name in names]


@pytest.mark.parametrize(
    ("heading", "model", "document"),
    [
        ("## Needles with all policies", HALF, "sotu/1962"),
        ("### Needles in another text", HALF, "squad/Immune_system"),
        ("### Needles on Qwen2.5-Coder 1.5B", LARGER, "sotu/1962"),
    ],
)
def test_needles(heading, model, document):
    grid = "lengths=(1000, 2000, 4000), depths=(0.0, 0.25, 0.5, 0.75, 1.0), kinds=('number',), trials=1"
    lines = kept(model, "needle", f"{grid}, document='{document}'")
    columns = [(budget, moment) for budget in ("128", "512") for moment in MOMENTS]
    told = set()
    for policies, cells in rows(heading):
        told |= set(policies)
        for cell, (budget, moment) in zip(cells, columns, strict=True):
            counts = [int(count) for count in cell.split(", ")]
            found = [at(lines, policy, budget, moment) for policy in policies]
            expected = [round(float(line["score"]) * int(line["n"])) for line in found]
            assert (counts * len(expected) if len(counts) == 1 else counts) == expected, (policies, budget, moment)
    assert told == {policy for policy, _, _ in lines}


def test_a_grid_of_needles():
    lines = kept("smollm2-135m", "needle")
    section = PAGE.partition("\n## A needle grid\n")[2]
    for (policy,), cells in rows("## A needle grid"):
        if policy == "full":
            score, low, high = percent(at(lines, "full", "", "prompt"), "score", "low", "high")
            assert cells[0] == f"{score} ({low}-{high})"
            continue
        for cell, budget in zip(cells[1:3], ("128", "512"), strict=True):
            score, low, high = percent(lines[policy, budget, "prompt"], "score", "low", "high")
            assert cell == f"{score} ({low}-{high})", (policy, budget)
        line = lines[policy, "512", "prompt"]
        names = ("difference", "difference_low", "difference_high")
        mean, low, high = (f"{100 * float(line[name]):+.0f}" for name in names)
        assert cells[3] == f"{mean} ({low.lstrip('+')} to {high})", policy
    assert "needle_heatmap.png" in section


@pytest.mark.parametrize(
    ("heading", "model"), [("## RULER with all policies", HALF), ("### RULER on Qwen2.5-Coder 1.5B", LARGER)]
)
def test_ruler(heading, model):
    lines = kept(model, "ruler")
    for (policy,), cells in rows(heading):
        for cell, moment in zip(cells, MOMENTS, strict=True):
            score, low, high = percent(at(lines, policy, "0.1", moment), "score", "low", "high")
            assert cell == f"{score} ({low}-{high})", (policy, moment)


@pytest.mark.parametrize(
    ("heading", "model", "prompts"),
    [
        ("## LongBench's tasks, with 512 entries", HALF, "60"),
        ("### The other policies on LongBench's tasks", HALF, "30"),
        ("### LongBench's tasks on Qwen2.5-Coder 1.5B", LARGER, "30"),
    ],
)
def test_longbench(heading, model, prompts):
    lines = kept(model, "longbench", n=prompts)
    told = set()
    for (policy,), cells in rows(heading):
        told.add(policy)
        for score, behind, moment in zip(cells[::2], cells[1::2], MOMENTS, strict=True):
            line = at(lines, policy, "512", moment)
            assert [score] == percent(line, "score"), (policy, moment)
            less = [-float(line[name]) for name in ("difference", "difference_high", "difference_low")]
            mean, low, high = (f"{100 * value + 0:.1f}" for value in less)
            assert behind.strip("*").replace("-0.0", "0.0") == f"{mean} ({low} to {high})".replace("-0.0", "0.0")
            assert behind.startswith("**") is (less[1] > 0), (policy, moment)
    assert told == {policy for policy, _, _ in lines} - {"full"}


@pytest.mark.parametrize(
    ("page", "words", "task", "policy", "moment"),
    [
        ("dapq", "{less:.1f} points below the full cache ({low:.1f} to {high:.1f})", "longbench", "dapq", "prompt"),
        ("morphkv", "({less:.1f} less, {low:.1f} to {high:.1f})", "longbench", "morphkv", "prompt"),
        ("morphkv", "{less:.1f} points below it where the question comes", "longbench", "morphkv", "context"),
        ("morphkv", "after the compression ({low:.1f} to {high:.1f})", "longbench", "morphkv", "context"),
        ("rocketkv", "it scores {score:.0f} %", "ruler", "rocketkv", "prompt"),
        ("rocketkv", "and then {score:.0f} %", "ruler", "rocketkv", "context"),
        ("zsmerge", "is {less:.1f} points below the full cache", "longbench", "zsmerge", "prompt"),
        ("zsmerge", "and {less:.1f} where the question comes after the compression", "longbench", "zsmerge", "context"),
        ("zsmerge", "({low:.1f} to {high:.1f}); of fifteen", "longbench", "zsmerge", "context"),
    ],
)
def test_the_papers_pages_quote_them(page, words, task, policy, moment):
    line = at(kept(HALF, task), policy, "0.1" if task == "ruler" else "512", moment)
    numbers = {"score": "score", "less": "difference", "low": "difference_high", "high": "difference_low"}
    values = {name: 100 * float(line[column]) * (1 if name == "score" else -1) for name, column in numbers.items()}
    text = " ".join((ROOT / "docs" / "disagreements" / f"{page}.md").read_text(encoding="utf-8").split())
    assert words.format(**values) in text
