"""What the figures of the tasks' notebook show, in sentences that follow from the numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kvlab.analyses.findings import Findings
from kvlab.analyses.tasks import gains
from kvlab.render.phrases import by_side, listed, moved, number, percent, sentence, side, stated


def _levels(findings: Findings, measure: str, task: str) -> pd.DataFrame:
    """The rows of a measure of one task at its smallest budget, the largest value first."""
    levels = findings.frame(gains.AT_BUDGET).query("measure == @measure and task == @task")
    return levels.query("budget == budget.min()").sort_values("value", ascending=False, kind="stable")


def needles(findings: Findings) -> list[str]:
    """Who finds the needle with few entries."""
    hits = _levels(findings, "hits", "needle")
    if hits.empty:
        return ["No policy looked for a needle."]
    best, worst = hits.iloc[0], hits.iloc[-1]
    budget = float(best["budget"])
    rows = [
        findings.row(gains.AT_BUDGET, measure="hits", task="needle", policy=row["policy"], budget=budget)
        for row in (best, worst)
    ]
    full = findings.row(gains.WITHOUT_BUDGET, measure="hits", task="needle", policy="full")
    all_found = sum(value >= full.value for value in hits["value"])
    finds = "finds" if all_found < 2 else "find"
    return [
        f"With {budget:g} entries {best['policy']} finds {percent(rows[0])} of the needle's digits and "
        f"{worst['policy']} {percent(rows[1])}; the full cache finds {percent(full)}.",
        f"Of {len(hits)} policies {all_found or 'none'} {finds} as many as the full cache: one needle parts "
        "those that keep its tokens from those that do not, and says little about what is between.",
        sentence([listed(_printed_needles(findings, budget))]),
        "Next: smaller shares of longer prompts, and the likelihood of answers to questions.",
    ]


def _printed_needles(findings: Findings, budget: float) -> list[str]:
    """What the two papers that print needles have with 256 entries, beside what is found here."""
    printed = {
        "rocketkv": ("RocketKV", "rocketkv.figure4.task_needle_near_full"),
        "dapq": ("DapQ", "dapq.abstract.task_needle"),
    }
    told = []
    for policy, (name, claim) in printed.items():
        row = findings.found(gains.AT_BUDGET, measure="hits", task="needle", policy=policy, budget=budget)
        here = "" if row is None else f" and finds {percent(row)} here"
        told.append(f"{name} prints {100 * stated(claim):.1f} % with 256 tokens of far longer prompts{here}")
    return told


def tiny_needles(findings: Findings) -> list[str]:
    """Who finds the needle where a step reads one token in 32 or 64."""
    hits = _levels(findings, "hits", "tiny_needle")
    if hits.empty:
        return ["Needles at tiny budgets are looked for in the full profile only."]
    full = findings.row(gains.WITHOUT_BUDGET, measure="hits", task="tiny_needle", policy="full")
    found = findings.frame(gains.AT_BUDGET).query("measure == 'hits' and task == 'tiny_needle'")
    told = []
    for budget in sorted(set(found["budget"]), reverse=True):
        rows = findings.of(gains.AT_BUDGET, measure="hits", task="tiny_needle", budget=budget)
        shares = listed([f"{row.keys['policy']} {percent(row)}" for row in rows])
        told.append(f"where it reads {budget:g} tokens, {shares}")
    return [
        f"So many of the needle's digits come out right by what a step reads: {'; '.join(told)}.",
        f"The full cache gets {percent(full)} right; RocketKV's figure 4 has "
        f"{100 * stated('rocketkv.figure4.task_needle_c32'):.0f} % for RocketKV at its smallest budget.",
        "Next: how answers to questions fare as budgets shrink.",
    ]


def single_3(findings: Findings) -> list[str]:
    """Whether DapQ keeps an identifier better than SnapKV does."""
    rows = findings.of(gains.GAIN, task="single_3", better="dapq", other="snapkv")
    if not rows:
        return ["RULER's identifiers are asked for in the full profile only."]
    full = findings.row(gains.WITHOUT_BUDGET, measure="nll", task="single_3", policy="full")
    told = listed([f"{number(row)} at {row.keys['budget']:g}" for row in rows])
    found = by_side(rows)
    ahead, behind = len(found["above"]), len(found["below"])
    return [
        f"A token of the identifier costs the full cache {number(full)} nats; a digit drawn from sixteen costs 2.77.",
        f"DapQ's gain on SnapKV is, in nats a token, {told} entries: it is clearly ahead at {ahead} of {len(rows)} "
        f"budgets and clearly behind at {behind}, where table 5 has it {stated('dapq.table5.single_3'):.1f} points "
        "ahead.",
        "Next: merging against eviction, ZSMerge's table 2.",
    ]


def against_budget(findings: Findings) -> list[str]:
    """Whose answers stay likely as budgets shrink."""
    loss = _levels(findings, "loss", "qa")
    if loss.empty:
        return ["No policy answered questions."]
    worst, best = loss.iloc[0], loss.iloc[-1]
    budget = float(best["budget"])
    of = {
        row["policy"]: findings.row(gains.AT_BUDGET, measure="loss", task="qa", policy=row["policy"], budget=budget)
        for row in (best, worst)
    }
    return [
        f"With {budget:g} entries the right answers to questions lose least with {best['policy']}, "
        f"{number(of[best['policy']])} nats a token, and most with {worst['policy']}, {number(of[worst['policy']])}.",
        "DapQ's tables 2 and 3 have it ahead, most where compression is aggressive, in scores of LongBench; these are "
        "likelihoods of one model of this size on a few questions.",
        "Next: an identifier, on which table 5 has DapQ's largest lead.",
    ]


def zsmerge_table_2(findings: Findings) -> list[str]:
    """ZSMerge against H2O on questions, budget by budget, with first scores from the question as in the claims."""
    ours = "zsmerge_question"
    rows = findings.frame(gains.GAIN).query("task == 'qa' and better == @ours and other == 'h2o'")
    if rows.empty:
        return ["ZSMerge and H2O did not meet on questions."]
    found = [
        (row["budget"], findings.row(gains.GAIN, task="qa", better=ours, other="h2o", budget=row["budget"]))
        for row in rows.sort_values("budget").to_dict("records")
    ]
    told = listed([f"{number(row)} at {budget:g}" for budget, row in found])
    clear = sum(side(row, above="1", below="", undecided="") == "1" for _, row in found)
    return [
        f"ZSMerge's gain on H2O, its first scores from the question, is, in nats a token, {told} entries.",
        f"It is clear at {clear} of {len(found)} budgets; table 2 has ZSMerge ahead at all, and the paper sees the "
        "gain grow as budgets shrink.",
        "Next: all gains that the papers claim, on paired examples.",
    ]


def claimed(findings: Findings) -> list[str]:
    """How many of the gains that papers claim are seen on these tasks."""
    rows = gains.claimed(findings)
    if rows.empty:
        return ["None of the gains that the papers claim was measured."]
    clear, reversed_ = rows.query("low > 0"), rows.query("high < 0")
    open_ = len(rows) - len(clear) - len(reversed_)
    return [
        f"Of {len(rows)} gains that the papers claim, {len(clear)} are clear here, {len(reversed_)} are clearly "
        f"losses, and {open_} cannot be told from none.",
        sentence(
            [
                f"clear are {_named(clear)}" if len(clear) else "",
                f"losses are {_named(reversed_)}" if len(reversed_) else "",
                "more examples would decide more of them" if open_ else "",
            ]
        ),
        "Next: how much rests on the question, which stands in the prompt when the cache is compressed.",
    ]


def _named(rows: pd.DataFrame, most: int = 4) -> str:
    names: Sequence[str] = rows["label"].tolist()
    shown = [*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])]
    return (
        listed(list(shown))
        .replace(", needle", " on needles")
        .replace(", qa", " on questions")
        .replace(", ruler", " on RULER")
        .replace(", tiny_needle", " on needles at tiny budgets")
        .replace(", single_3", " on identifiers")
    )


def question(findings: Findings) -> list[str]:
    """What it costs to compress before the question is read."""
    rows = findings.frame(gains.QUESTION_AWARE).to_dict("records")
    if not rows:
        return ["No policy was asked to compress before the question."]
    told = []
    for keys in rows:
        key = {name: keys[name] for name in ("task", "policy", "budget")}
        row = findings.row(gains.QUESTION_AWARE, **key)
        cost = moved(row, above="costs", below="saves", undecided="changes by no clear amount,")
        told.append(f"with {keys['policy']} at {keys['budget']:g} it {cost} nats a token")
    return [
        f"Compressing before the question has been read: {listed(told)}.",
        "All five papers compress with the question in the prompt; what a method keeps for a question that it knows "
        "says little about a cache that must serve any question.",
        "Next: several questions over one compressed context, in shared_context.",
    ]
