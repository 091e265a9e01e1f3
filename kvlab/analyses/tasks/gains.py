"""Results of scores on tasks: levels by policy and budget, and the papers' gains, paired by example."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd

from kvlab.analyses.findings import DOCUMENT, Findings, estimates

AT_BUDGET = "{measure}/{task}/{policy}/{budget:g}"
WITHOUT_BUDGET = "{measure}/{task}/{policy}"
GAIN = "gain/{task}/{better}_over_{other}/{budget:g}"
SCORE_GAIN = "score_gain/{task}/{better}_over_{other}/{budget:g}"
WIDENING = "widening/{task}/{better}_over_{other}"
QUESTION_AWARE = "question_aware/{task}/{policy}/{budget:g}"

PAIRS = (
    *(("dapq", other) for other in ("snapkv", "pyramidkv", "h2o", "streamingllm", "snapkv_unpooled")),
    ("dapq_pooled", "snapkv"),
    *(
        (ours, other)
        for ours in ("compilerkv", "compilerkv_filled", "compilerkv_twin")
        for other in ("snapkv", "pyramidkv", "h2o", "streamingllm", "zigzagkv", "dynamickv")
    ),
    *(("rocketkv", other) for other in ("snapkv", "quest", "sparq", "duoattention", "hybrid", "exact_topk")),
    *(("rocketkv", other) for other in ("quest_spending", "sparq_rounded")),
    *(("hybrid", other) for other in ("quest", "sparq")),
    *(("exact_topk", other) for other in ("snapkv", "quest", "sparq", "duoattention")),
    ("zsmerge", "h2o"),
    ("zsmerge", "snapkv"),
    ("zsmerge_question", "h2o"),
    ("morphkv", "snapkv"),
)
"""Pairs of policies that the papers compare; the one that should be better comes first."""

BY = [DOCUMENT, "example"]
"""Index of a cell's answers. Examples of one task may share their id, so a name has task and document before it."""

FULL_PROFILE_TASKS = ("tiny_needle", "single_3")
"""Tasks with prompts or budgets of their own, which are left out where all tasks are taken together."""

CLAIMED = {
    "DapQ, tables 2 to 9": (
        ("qa", "dapq", "snapkv", (64, 128, 256)),
        ("qa", "dapq", "pyramidkv", (64,)),
        ("qa", "dapq", "h2o", (64,)),
        ("ruler", "dapq", "snapkv", (256,)),
        ("ruler", "dapq", "h2o", (256,)),
        ("needle", "dapq", "snapkv", (128, 256)),
        ("needle", "dapq", "pyramidkv", (128,)),
        ("needle", "dapq", "h2o", (128,)),
        ("needle", "dapq", "streamingllm", (128,)),
        ("single_3", "dapq", "snapkv", (80, 160, 320)),
    ),
    "DapQ, with the same pooling": tuple(
        (task, better, other, (budget,))
        for task, budget in (("qa", 64), ("ruler", 256), ("needle", 128), ("needle", 256))
        for better, other in (("dapq", "snapkv_unpooled"), ("dapq_pooled", "snapkv"))
    )
    + tuple(
        ("single_3", better, other, (80, 160, 320))
        for better, other in (("dapq", "snapkv_unpooled"), ("dapq_pooled", "snapkv"))
    ),
    "ZSMerge, table 2": (
        ("qa", "zsmerge_question", "h2o", (256, 128, 64)),
        ("qa", "zsmerge", "h2o", (256, 128, 64)),
    ),
    "RocketKV, figures 1, 4 and 8": (
        *(
            ("needle", "rocketkv", other, (128,))
            for other in ("snapkv", "quest", "sparq", "duoattention", "hybrid", "exact_topk")
        ),
        *(("needle", "hybrid", other, (128,)) for other in ("quest", "sparq")),
        *(
            ("tiny_needle", "rocketkv", other, (128, 64))
            for other in ("snapkv", "quest_spending", "sparq_rounded", "duoattention", "hybrid", "exact_topk")
        ),
    ),
    "MorphKV, figures 10 and 11": (
        ("qa", "morphkv", "snapkv", (64,)),
        ("needle", "morphkv", "snapkv", (128,)),
    ),
    "CompilerKV, table 1 and figure 2": (
        *(("qa", "compilerkv", other, (256,)) for other in ("snapkv", "pyramidkv", "h2o")),
        ("ruler", "compilerkv", "snapkv", (256,)),
        *(("needle", "compilerkv", other, (128,)) for other in ("snapkv", "streamingllm")),
    ),
    "CompilerKV, filled up to its budget": (
        *(("qa", "compilerkv_filled", other, (256,)) for other in ("snapkv", "pyramidkv", "h2o")),
        ("ruler", "compilerkv_filled", "snapkv", (256,)),
        ("needle", "compilerkv_filled", "snapkv", (128,)),
    ),
}
"""The gains that each paper claims: task, better, other, and the budgets."""


def findings(table: pd.DataFrame, pairs: Iterable[tuple[str, str]] = PAIRS) -> Findings:
    """Compute scores by task, policy and budget, and the paired differences that the papers claim.

    Each metric has its 95 % interval over examples, and its mean over each kind of text. The intervals of scores
    respect that scores lie between 0 and 1. Caches are compressed at the prompt unless a metric says otherwise:
    - `score/TASK/POLICY/BUDGET`, `hits/...`, and `nll/...` in nats a token. The full cache has no BUDGET.
    - `loss/TASK/POLICY/BUDGET`: the NLL above the full cache's on the same example.
    - `stored/TASK/POLICY/BUDGET`: bytes of keys and values after the answer, as a share of the full cache's.
    - `retained/TASK/POLICY/BUDGET`: hits as a share of the full cache's, the percentage of full-cache performance.
    - `gain/TASK/A_over_B/BUDGET`: NLL of B less that of A on the same examples, so that more than 0 speaks for A.
    - `score_gain/...`: the scores of A less those of B.
    - `widening/TASK/A_over_B`: the gain at the smallest budget at which both were measured less that at the largest.
    - `question_aware/TASK/POLICY/BUDGET`: NLL where the question came after the compression, less NLL where it came
      before.
    TASK is a task's name or `all`. `all` means all tasks but those of `FULL_PROFILE_TASKS`, for policies that met all
    of these. Each example has the same weight.
    """
    findings = Findings(table)
    at_prompt = table.query("compress_at == 'prompt'")
    at_prompt = at_prompt.assign(example=_names(at_prompt))
    for task in [*at_prompt["task"].unique(), "all"]:
        part = at_prompt.query("task not in @FULL_PROFILE_TASKS" if task == "all" else "task == @task")
        if part.empty:
            continue
        cells = _cells(part)
        _levels(findings, task, cells)
        for better, other in pairs:
            _gains(findings, task, better, other, cells)
    _question_aware(findings, table)
    return findings


def _names(table: pd.DataFrame) -> pd.Series:
    """A unique name for each example: examples of one task over several documents may share an id."""
    return table["task"].str.cat([table["document"], table["example"]], sep=" ")


def _cells(table: pd.DataFrame) -> dict[tuple[str, float | None], pd.DataFrame]:
    """The answers by (policy, budget), each a table by document and example; a policy without a budget has None.

    Policies that did not meet every example of the table are left out.
    """
    cells, examples = {}, set(table["example"])
    for policy, of_policy in table.groupby("policy"):
        known = of_policy.dropna(subset="budget").groupby("budget")
        for budget, cell in [*known, (None, of_policy.query("budget.isna()"))]:
            if set(cell["example"]) == examples:
                cells[policy, budget] = cell.set_index(BY)
    return cells


def _levels(findings: Findings, task: str, cells: Mapping[tuple[str, float | None], pd.DataFrame]) -> None:
    full = cells["full", None]
    for (policy, budget), cell in cells.items():
        values = {name: cell.loc[:, name] for name in ("score", "hits", "nll")}
        ends = {"score": (0.0, 1.0), "hits": (0.0, 1.0)}
        if policy != "full":
            same = full.loc[cell.index]
            values["loss"] = cell["nll"] - same["nll"]
            values["stored"] = cell["kv_bytes"] / same["kv_bytes"]
            if (right := same.loc[:, "hits"].mean()) > 0:
                values["retained"], ends["retained"] = cell["hits"] / right, (0.0, 1.0 / right)
        at = {} if budget is None else {"budget": budget}
        effect = WITHOUT_BUDGET if budget is None else AT_BUDGET
        for measure, of_examples in values.items():
            if measure in ends:
                findings.add_bounded(
                    effect, of_examples, ends[measure], measure=measure, task=task, policy=policy, **at
                )
            else:
                findings.add(effect, of_examples, measure=measure, task=task, policy=policy, **at)


def _gains(
    findings: Findings,
    task: str,
    better: str,
    other: str,
    cells: Mapping[tuple[str, float | None], pd.DataFrame],
) -> None:
    pair = {"task": task, "better": better, "other": other}
    budgets = sorted(budget for policy, budget in cells if policy == better and budget is not None)
    gains = {}
    for budget in budgets:
        if (other, budget) in cells:
            left, right = cells[better, budget], cells[other, budget]
            gains[budget] = right["nll"] - left["nll"]
            findings.add(GAIN, gains[budget], budget=budget, **pair)
            findings.add_bounded(SCORE_GAIN, left["score"] - right["score"], (-1.0, 1.0), budget=budget, **pair)
    if len(gains) > 1:
        findings.add_difference(WIDENING, gains[min(gains)], gains[max(gains)], **pair)


def _question_aware(findings: Findings, table: pd.DataFrame) -> None:
    for (task, policy, budget), sides in _read_and_unread(table).items():
        read, unread = (side.assign(example=_names(side)).set_index(BY).loc[:, "nll"] for side in sides)
        findings.add_difference(QUESTION_AWARE, unread, read, task=task, policy=policy, budget=budget)


def _read_and_unread(table: pd.DataFrame) -> dict[tuple[str, str, float], tuple[pd.DataFrame, pd.DataFrame]]:
    """The answers compressed both after the prompt and before its question, by (task, policy, budget)."""
    both = {}
    settings = table.dropna(subset="budget").drop_duplicates(["task", "policy", "budget"])
    for task, policy, budget in zip(settings["task"], settings["policy"], settings["budget"], strict=True):
        cell = table.query("task == @task and policy == @policy and budget == @budget")
        sides = cell.query("compress_at == 'prompt'"), cell.query("compress_at == 'context'")
        if not any(side.empty for side in sides):
            both[task, policy, budget] = sides
    return both


def question_read_or_not(table: pd.DataFrame) -> pd.DataFrame:
    """Average the NLL of answers compressed after the prompt, and before its question: policy, place, value, low, high.

    `policy` names both, such as "snapkv at 128, question read".
    """
    groups = [
        ((f"{policy} at {budget:g}, question {words}", compress_at), side["nll"])
        for (_, policy, budget), sides in _read_and_unread(table).items()
        for side, compress_at, words in zip(sides, ("prompt", "context"), ("read", "held back"), strict=True)
    ]
    return estimates(groups, ["policy", "place"])


def claimed(findings: Findings) -> pd.DataFrame:
    """The gains of `CLAIMED` that were measured, in its order: paper, label, value, low, high."""
    gains = findings.frame(GAIN).set_index(["task", "better", "other", "budget"])[["value", "low", "high"]]
    rows = [
        {
            "paper": paper,
            "label": f"{better} over {other}, {task}, {budget:g}",
            **gains.loc[task, better, other, budget],
        }
        for paper, comparisons in CLAIMED.items()
        for task, better, other, budgets in comparisons
        for budget in budgets
        if (task, better, other, budget) in gains.index
    ]
    return pd.DataFrame(rows, columns=["paper", "label", "value", "low", "high"])


def in_words(findings: Findings) -> str:
    """How many answers were scored, and how likely the full cache finds the right ones, task by task."""
    prefills = len(findings.table.drop_duplicates(["task", "document"]))
    levels = findings.frame(WITHOUT_BUDGET).query("measure == 'nll' and policy == 'full' and task != 'all'")
    full = ", ".join(f"{row['task']} {row['value']:.2f}" for row in levels.to_dict("records"))
    return f"{len(findings.table)} answers from {prefills} prefills; NLL under the full cache: {full}"
