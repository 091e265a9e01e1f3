"""What MorphKV's figures show here, in sentences that follow from their numbers."""

from __future__ import annotations

import math
from typing import Any

from kvlab import papers
from kvlab.analyses.findings import Findings
from kvlab.analyses.morphkv import facts, groups, headlines, responses, sizes
from kvlab.analyses.morphkv import printed as tables
from kvlab.analyses.morphkv import windows as ablation
from kvlab.analyses.telling import beside, listed, number, percent, side

EQUAL = "are not told apart"
GUESSED = math.log(10)
"""Nats of a digit that is guessed."""
METHODS = {
    "snapkv": "SnapKV",
    "snapkv_choosing": "a SnapKV that can choose",
    "snapkv_shared": "SnapKV with a set for each KV head",
    "h2o": "H2O",
    "keyformer": "Keyformer",
    "scissorhands": "Scissorhands",
    "streamingllm": "StreamingLLM",
}


def windows(found: Findings) -> list[str]:
    """Under the measures by window; found: of `windows.window_ablation`."""
    sentences = []
    for row in found.of(ablation.WINDOW_GAIN, measure="mass_lost", fusion="max"):
        keys = row.keys
        verdict = side(
            row, above="loses clearly less than", below="loses clearly more than", undecided="is not told from"
        )
        sentences.append(
            f"At a capacity of {keys['capacity']} a window of {keys['new']} {verdict} one of {keys['old']} "
            f"(gain {percent(row)})."
        )
    sentences.append("The paper finds 200 better than 32 in a capacity of 4K, where 200 is a twentieth of the cache.")
    sentences.append("Next: windows of the paper's shares, after prompts that fit into the cache.")
    return sentences


def along(found: Findings, fusion: str, capacity: int) -> list[str]:
    """Under the steps of a response; found: of `windows.window_ablation`."""
    steps = ablation.along(found, "mass_lost", fusion, capacity).pivot(index="step", columns="window", values="value")
    first, last = steps.iloc[0], steps.iloc[-1]
    best = [steps.loc[step].idxmin() for step in (steps.index[0], steps.index[-1])]
    grown = listed([f"{last[window] - first[window]:+.3f} with {window}" for window in steps.columns])
    same = "stays the best window" if best[0] == best[1] else f"is the best window at first, {best[1]} at last"
    return [
        f"From the first {steps.index[0]:.0f} to the last steps the mass lost changes by {grown}.",
        f"By the mean over documents {best[0]} {same}; the intervals are those of the figure above.",
    ]


def fusions(found: Findings, regimes: Findings, printed: Findings) -> list[str]:
    """Under sum against max; found: of `windows.window_ablation`, regimes: of `windows.two_regimes`, printed: of
    `printed.fusions`.
    """
    told = {"writing": "Along long responses", "answering": "In short answers to long prompts"}
    sentences = []
    for regime, where in told.items():
        row = regimes.row(ablation.REGIME_GAIN, measure="mass_lost", regime=regime)
        verdict = side(
            row, above="the sum is clearly better", below="the maximum is clearly better", undecided="both " + EQUAL
        )
        sentences.append(f"{where} {verdict} (gain of the sum {percent(row)}).")
    by_window = found.of(ablation.FUSION_GAIN, measure="mass_lost")
    better = sum(row.low is not None and row.low > 0 for row in by_window)
    worse = sum(row.high is not None and row.high < 0 for row in by_window)
    sentences.append(
        f"At {len(by_window)} windows the sum is clearly better {better} times, the maximum {worse} times."
    )
    row = printed.row(tables.MAX_OVER_SUM)
    follows = "as its rows do" if row.value > 0 else "while its rows are in favour of the sum"
    (text,) = [claim.paper_value or 0.0 for claim in papers.claims(paper="morphkv") if claim.metric == row.metric]
    sentences.append(
        f"The text of table 4 states {100 * text:.0f} % in favour of the maximum, {follows} ({percent(row)})."
    )
    return sentences


def generating(found: Findings) -> list[str]:
    """Under the wider window after short prompts; found: of `windows.wider_window`."""
    narrow, wide = sorted(found.table["window"].unique())
    capacity = found.table["capacity"].iloc[0]
    mass = found.row(ablation.WIDER_GAIN, measure="mass_lost")
    output = found.row(ablation.WIDER_GAIN, measure="output_error")
    verdicts = [
        side(row, above="clearly less", below="clearly more", undecided="neither clearly more nor less")
        for row in (mass, output)
    ]
    paper = papers.figure("morphkv", "table6").set_index(["model", "window"])["average"].loc["Llama"]
    return [
        f"After a short prompt a window of {wide} instead of {narrow} in {capacity} loses {verdicts[0]} attention "
        f"(gain {percent(mass)}) and moves the output {verdicts[1]} ({percent(output)}).",
        f"Table 6 has a gain of {100 * (max(paper) / min(paper) - 1):.1f} % in accuracy for Llama, which "
        f"has another unit.",
        "Attention along a text need not ask for what stood in the prompt; the next figure does.",
    ]


def early_facts(found: Findings) -> list[str]:
    """Under facts told early and asked late; found: of `facts.early_facts`."""
    nats, stored = found.row(facts.WIDE_AHEAD), found.row(facts.WIDE_STORES_MORE)
    costs = {name: found.row(facts.WORSE, policy=name) for name in (facts.WIDE, facts.NARROW)}
    verdict = side(
        nats,
        above="makes the code clearly likelier",
        below="makes the code clearly less likely",
        undecided="does not clearly change how likely the code is",
    )
    keeps = side(stored, above="clearly more", below="clearly less", undecided="not clearly another share")
    h2o = found.row(facts.BEHIND, policy="h2o")
    lost = min(costs[facts.WIDE].value, costs[facts.NARROW].value)
    full = found.row(facts.FULL)
    knows = side(full, above="does not know", below="knows", undecided="hardly knows", at=GUESSED)
    sentences = [
        f"Under the full cache the model {knows} the code ({number(full, 2)} nats a token; a guessed digit costs "
        f"{GUESSED:.2f}).",
        f"The wider window {verdict}, by {number(nats, 2)} nats a token, and keeps {keeps} of its entries "
        f"({percent(stored)}).",
        f"Against the full cache either loses: {number(costs[facts.WIDE], 2)} nats with the wide and "
        f"{number(costs[facts.NARROW], 2)} with the narrow window."
        if lost > 0
        else "",
        "H2O is "
        + side(h2o, above="clearly worse than", below="clearly better than", undecided="not told apart from")
        + f" the wide window (by {number(h2o, 2)} nats).",
    ]
    return sentences


def section_3_3(found: Findings) -> list[str]:
    """Under the variants of aggregation; found: of `groups.section_3_3`."""
    row = found.row(groups.GAIN, measure="mass_lost", variant=groups.OWN)
    sentences = [
        "A set for each query head loses "
        + side(row, above="clearly less than", below="clearly more than", undecided="neither more nor less than")
        + f" one for each KV head at as many entries each (gain {percent(row)}); the paper says that both perform "
        "equally well."
    ]
    for variant, words in {"llama_code": "for Llama", "other_code": "for other models"}.items():
        row = found.row(groups.GAIN, measure="mass_lost", variant=variant)
        verdict = side(row, above="clearly better", below="clearly worse", undecided="not clearly other")
        sentences.append(f"The authors' code {words} is {verdict} than the paper's sum ({percent(row)}).")
    return sentences


def budgets(small: Findings) -> list[str]:
    """Under small budgets; small: of `responses.small_budgets`."""
    shares = sorted(small.table["share"].unique())
    tightest, widest = shares[0], shares[-1]
    sentences = []
    for share in (tightest, widest):
        for name in ("snapkv", "snapkv_choosing", "snapkv_shared"):
            row = small.row(responses.BEHIND_AT_SHARE, measure="mass_lost", policy=name, share=share)
            verdict = side(row, above="clearly ahead of", below="clearly behind", undecided="not told apart from")
            sentences.append(
                f"At {100 * share:.0f} % MorphKV is {verdict} {METHODS[name]} ({number(row, 2)} of attention)."
            )
    drop = small.row(responses.RECALL_DROP, policy="snapkv", share=tightest)
    paper = papers.figure("morphkv", "figure10").set_index("where").loc["average", "drop"]
    sentences.append(
        f"By recall SnapKV lies {percent(drop)} below at {100 * tightest:.0f} %; {beside(drop, float(paper))}."
    )
    free = {name: small.row(responses.CHOICES, policy=name, share=tightest).value for name in ("snapkv", "morphkv")}
    there = headlines.choices_at_1_percent()
    in_paper = {name: there.row(headlines.CHOICES, method=name).value for name in ("snapkv", "morphkv")}
    sentences.append(
        f"There SnapKV's window leaves {free['snapkv']:.0f} of its entries to choose where MorphKV chooses "
        f"{free['morphkv']:.0f}; by the paper's settings it is {in_paper['snapkv']:.0f} against "
        f"{in_paper['morphkv']:.0f}, so that its figure compares windows as much as choices."
    )
    return sentences


def growth(stored: Findings) -> list[str]:
    """Under what is stored along a response; stored: of `sizes.against_formula`."""
    rows = {row.keys["policy"]: row for row in stored.rows if row.effect == sizes.GROWTH}
    deviation = stored.row(sizes.DEVIATION).value
    right = "is what is stored" if deviation < 1e-6 else f"is off by up to {100 * deviation:.1f} %"
    told = listed(
        [f"{METHODS.get(str(name), 'MorphKV')} {row.value:.2f}" for name, row in rows.items() if name != "full"]
    )
    return [
        f"A decoded token adds, as a multiple of what it adds to the full cache: {told}.",
        f"The formula, with which the next section goes to the paper's models, {right}.",
    ]


def predicted_sizes(predicted: Findings) -> list[str]:
    """Under cache sizes by formula; predicted: of `sizes.printed_sizes`."""
    table = predicted.table.dropna(subset="printed")
    off = (table["predicted"] / table["printed"] - 1).abs()
    worst = table.loc[off.idxmax()]
    stated: Any = (
        papers.figure("morphkv", "headline").query("statement == 'memory_saving'").set_index("against")["value"]
    )
    savings = [
        f"{100 * predicted.row(sizes.SAVING_ON_LONG_RESPONSES, method=method).value:.1f} % over {METHODS[method]} "
        f"(stated {100 * float(stated[method]):.1f} %)"
        for method in ("h2o", "snapkv")
    ]
    return [
        f"The settings give the printed sizes to within {100 * off.median():.0f} % (median); furthest off is "
        f"{METHODS.get(worst['method'], 'MorphKV')} on {worst['benchmark']}, {worst['predicted']:.2f} against "
        f"{worst['printed']:.2f}.",
        f"On long responses MorphKV saves {listed(savings)}.",
        "All of the saving over H2O comes from groups: both hold as many entries.",
    ]


def figure_7(along_response: Findings, inside: Findings) -> list[str]:
    """Under what long responses cost; arguments: of `responses.along_a_response` and `responses.teacher_forced`."""
    times = along_response.row(responses.TIMES, measure="mass_lost", policy="h2o")
    steeper = side(
        times, above="clearly faster than", below="clearly slower than", undecided="about as fast as", at=1.0
    )
    sentences = [f"H2O's loss of attention grows {steeper} MorphKV's ({number(times, 2)} times)."]
    for name in ("h2o", "snapkv"):
        behind = inside.row(responses.BEHIND, measure="kl", policy=name)
        slope = inside.row(responses.STEEPER, measure="kl", policy=name)
        verdict = side(behind, above="further from", below="nearer to", undecided="neither nearer to nor further from")
        drifts = side(
            slope, above="and drifts faster", below="and drifts more slowly", undecided="and drifts about as fast"
        )
        sentences.append(
            f"Inside the model {METHODS[name]} is {verdict} the full cache than MorphKV "
            f"({number(behind, 2)} nats) {drifts}."
        )
    printed = papers.figure("morphkv", "figure7").set_index("method")
    sentences.append(
        f"The paper's judge sees {100 * printed.loc['h2o', 'low']:.0f} % to "
        f"{100 * printed.loc['h2o', 'high']:.0f} % lost where MorphKV "
        f"loses {100 * printed.loc['morphkv', 'low']:.0f} %; only such a judge can test that."
    )
    return sentences


def figure_3(along_response: Findings) -> list[str]:
    """Under the methods of constant size; along_response: of `responses.along_a_response`."""
    groups_of = {"clearly more": [], "clearly less": [], "about as much": []}
    for name in ("h2o", "keyformer", "scissorhands", "streamingllm"):
        row = along_response.row(responses.BEHIND, measure="mass_lost", policy=name)
        verdict = side(row, above="clearly more", below="clearly less", undecided="about as much")
        groups_of[verdict].append(f"{METHODS[name]} ({number(row, 2)})")
    lost = [
        f"{listed(names)} {'lose' if len(names) > 1 else 'loses'} {verdict} "
        f"{'as' if verdict == 'about as much' else 'than'} MorphKV"
        for verdict, names in groups_of.items()
        if names
    ]
    sentences = [f"Of the attention of a long response {'; '.join(lost)}."]
    for name in ("h2o", "keyformer"):
        row = along_response.row(responses.EARLIER, policy=name)
        verdict = side(row, above="clearly more", below="clearly fewer", undecided="not clearly more")
        sentences.append(
            f"{METHODS[name]} keeps {verdict} early entries than MorphKV ({percent(row)} of what is stored)."
        )
    sentences.append(
        "The paper names this bias as the cause of its gains; whether what is early is also useless is open."
    )
    return sentences


def stated_and_recomputed(found: list[Findings]) -> list[str]:
    """Under the headlines; found: of `headlines.everything`."""
    known = {row.metric: row.value for findings in found for row in findings.rows}
    stated = papers.figure("morphkv", "headline").set_index(["statement", "against"])["value"]
    shares = listed(
        [
            f"{100 * known[f'bars/saving/{method}']:.1f} % over {METHODS[method]} where the text says "
            f"{100 * stated['memory_saving', method]:.1f} %"
            for method in ("h2o", "snapkv")
        ]
    )
    off = max(known["table7/mean_of_six/Phi4"], known["table7/mean_of_six/Qwen"])
    return [
        f"The printed bars give a saving of {shares}.",
        f"With Qwen the settings save at least {100 * known['figure2b/qwen_saving/shortest']:.1f} % of "
        f"SnapKV's memory, and "
        f"figure 2b says {100 * stated['longgenbench_qwen_saving', 'snapkv']:.0f} %.",
        f"{known['table7/totals_that_differ']:.0f} rows of table 7 end in another number than table 1; in two of them "
        f"the mean of six criteria is table 1's to within {off:.2f} points, so that they seem to end in the sixth.",
    ]


def printed_tables(on_responses: Findings, on_contexts: Findings) -> list[str]:
    """Under tables 1 to 3; arguments: of `printed.long_responses` and `printed.long_contexts`."""
    stated: Any = (
        papers.figure("morphkv", "headline").query("statement == 'accuracy_gain'").set_index("against")["value"]
    )
    sentences = []
    for method in ("h2o", "snapkv"):
        row = on_responses.row(tables.GAIN, table="table2", method=method)
        sentences.append(
            f"Table 2 gives a gain of {100 * row.value:.1f} % over {METHODS[method]}, "
            f"the text states {100 * float(stated[method]):.1f} %."
        )
    with_all = on_contexts.row(tables.WITH_OMITTED, what="gain")
    without = on_contexts.row(tables.OVER_LLAMAS_TASKS, what="gain")
    turns = "turn the mean over tasks" if with_all.value * without.value < 0 else "do not turn the mean over tasks"
    sentences.append(
        f"The two tasks that table 3 leaves out {turns}: {number(without, 2)} points without and {number(with_all, 2)} "
        "with them."
    )
    return sentences
