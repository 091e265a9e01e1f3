"""What MorphKV's figures show here, in sentences that follow from their numbers."""

from __future__ import annotations

import math
from typing import Any

from kvlab import papers
from kvlab.analyses.findings import Findings
from kvlab.analyses.morphkv import facts, groups, headlines, responses, sizes
from kvlab.analyses.morphkv import printed as tables
from kvlab.analyses.morphkv import windows as ablation
from kvlab.render.phrases import beside, by_side, grouped, listed, number, percent, side, stated

EQUAL = "are not told apart"
GUESSED = math.log(10)
"""Nats of a digit that is guessed."""
WINDOWS = {facts.WIDE: "wide", facts.NARROW: "narrow"}
METHODS = {
    "snapkv": "SnapKV",
    "snapkv_choosing": "a SnapKV that can choose",
    "snapkv_shared": "SnapKV with a set for each KV head",
    "h2o": "H2O",
    "keyformer": "Keyformer",
    "scissorhands": "Scissorhands",
    "streamingllm": "StreamingLLM",
}


def _table_6() -> str:
    """What table 6 gains by its wider window."""
    paper = papers.figure("morphkv", "table6").set_index(["model", "window"])["average"].loc["Llama"]
    gain = 100 * (paper.max() / paper.min() - 1)
    return (
        f"table 6 has {gain:.1f} % more of LongGenBench's checks right with {paper.idxmax()} than with {paper.idxmin()}"
    )


def windows(found: Findings) -> list[str]:
    """Under the measures by window; found: of `windows.window_ablation`."""
    told: dict[object, list[str]] = {}
    for row in found.of(ablation.WINDOW_GAIN, measure="mass_lost", fusion="max"):
        verdict = side(row, above="loses less than", below="loses more than", undecided="is not told apart from")
        words = f"a window of {row.keys['new']} {verdict} one of {row.keys['old']} ({percent(row)})"
        told.setdefault(row.keys["capacity"], []).append(words)
    by_capacity = "; ".join(f"at a capacity of {capacity} {listed(words)}" for capacity, words in told.items())
    return [
        f"Of the attention of a response, {by_capacity}; in brackets the share of the loss that the wider one saves.",
        f"For Llama {_table_6()}, in a capacity of 4K, of which 200 tokens are a twentieth.",
        "Next: whether a lead lasts along the response, and what windows of the paper's shares do after prompts that "
        "fit into the cache.",
    ]


def along(found: Findings, fusion: str, capacity: int) -> list[str]:
    """Under the steps of a response; found: of `windows.window_ablation`."""
    steps = ablation.along(found, "mass_lost", fusion, capacity).pivot(index="step", columns="window", values="value")
    first, last = steps.iloc[0], steps.iloc[-1]
    best = [steps.loc[step].idxmin() for step in (steps.index[0], steps.index[-1])]
    grown = listed([f"{last[window] - first[window]:+.3f} with {window}" for window in steps.columns])
    same = "stays the best window" if best[0] == best[1] else f"is the best window at first, {best[1]} at last"
    return [
        f"From the first {steps.index[0]:.0f} to the last steps the mass lost changes by {grown}; by the mean over "
        f"documents {best[0]} {same}, with the intervals of the figure above.",
        "Table 6 scores whole responses, and has no curve along them.",
        "Next: table 6 in its own regime, a prompt that fits into the cache and a response that outgrows it.",
    ]


def fusions(found: Findings, regimes: Findings, printed: Findings) -> list[str]:
    """Under sum against max; found: of `windows.window_ablation`, regimes: of `windows.two_regimes`, printed: of
    `printed.fusions`.
    """
    told = {"writing": "along long responses", "answering": "in short answers to long prompts"}
    ours = []
    for regime, where in told.items():
        row = regimes.row(ablation.REGIME_GAIN, measure="mass_lost", regime=regime)
        verdict = side(row, above="the sum is better", below="the maximum is better", undecided="both " + EQUAL)
        ours.append(f"{where} {verdict} ({percent(row)})")
    sides = by_side(found.of(ablation.FUSION_GAIN, measure="mass_lost"))
    row = printed.row(tables.MAX_OVER_SUM)
    follows = "as its rows do" if row.value > 0 else "while its rows are in favour of the sum"
    table_4, table_5 = stated("morphkv.table4.text_and_rows"), stated("morphkv.table5.sum_keeps_more")
    return [
        f"By what the sum saves of the attention lost, {listed(ours)}; of {sum(map(len, sides.values()))} windows the "
        f"sum is clearly better at {len(sides['above'])}, the maximum at {len(sides['below'])}.",
        f"The paper's table 5 has the sum {100 * table_5:.1f} % ahead on long responses; the text of table 4 states "
        f"{100 * table_4:.0f} % in favour of the maximum on long contexts, {follows} ({percent(row)}).",
        "Next: what a bounded cache costs at budgets of a few per cent, in morphkv_long_responses.",
    ]


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
    agrees = side(mass, above="the same direction", below="the other direction", undecided="a direction left open here")
    return [
        f"After a short prompt a window of {wide} instead of {narrow} in {capacity} loses {verdicts[0]} attention "
        f"(gain {percent(mass)}) and moves the output {verdicts[1]} ({percent(output)}).",
        f"For Llama {_table_6()} at these shares of the capacity: {agrees}, in another unit.",
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
    full = found.row(facts.FULL)
    knows = side(full, above="does not know", below="knows", undecided="hardly knows", at=GUESSED)
    lost = " and ".join(f"{number(costs[name], 2)} with the {words}" for name, words in WINDOWS.items())
    behind = side(
        h2o,
        above="clearly worse than the wide window",
        below="clearly better than the wide window",
        undecided="not told apart from the wide window",
    )
    return [
        f"Under the full cache the model {knows} the code ({number(full, 2)} nats a token; a guessed digit costs "
        f"{GUESSED:.2f}), and MorphKV adds {lost} window.",
        f"The wider window {verdict} ({number(nats, 2)} nats), and keeps {keeps} of its entries ({percent(stored)}); "
        f"H2O is {behind} (by {number(h2o, 2)} nats).",
        "Sections 5.1.1 and 6.2 speak of responses that go through what the prompt told; this text does not touch the "
        "code.",
        "Next: whether a set for each query head would keep more.",
    ]


def section_3_3(found: Findings) -> list[str]:
    """Under the variants of aggregation; found: of `groups.section_3_3`."""
    row = found.row(groups.GAIN, measure="mass_lost", variant=groups.OWN)
    verdict = side(
        row,
        above="loses clearly less than",
        below="loses clearly more than",
        undecided="loses neither clearly more nor less than",
    )
    codes = []
    for variant, words in {"llama_code": "for Llama", "other_code": "for other models"}.items():
        code = found.row(groups.GAIN, measure="mass_lost", variant=variant)
        better = side(code, above="clearly better", below="clearly worse", undecided="not clearly other")
        codes.append(f"{words} is {better} than the paper's sum ({percent(code)})")
    return [
        f"A set for each query head {verdict} one for each KV head at as many entries each (gain {percent(row)}); "
        "section 3.3 says that both perform equally well.",
        f"The authors' code {listed(codes)}.",
        "Next: the other choice within a set, sum or maximum over the window.",
    ]


def budgets(small: Findings) -> list[str]:
    """Under small budgets; small: of `responses.small_budgets`."""
    shares = sorted(small.table["share"].unique())
    tightest, told = shares[0], []
    for share in (tightest, shares[-1]):
        names = ("snapkv", "snapkv_choosing", "snapkv_shared")
        rows = [small.row(responses.BEHIND_AT_SHARE, measure="mass_lost", policy=name, share=share) for name in names]
        sides = grouped(
            [(row, f"{METHODS[name]} ({number(row, 2)})") for row, name in zip(rows, names, strict=True)],
            above="ahead of",
            below="behind",
            undecided="not told apart from",
        )
        told.append(f"at {100 * share:.0f} % MorphKV is {sides}")
    drop = small.row(responses.RECALL_DROP, policy="snapkv", share=tightest)
    paper = papers.figure("morphkv", "figure10").set_index("where").loc["average", "drop"]
    free = {name: small.row(responses.CHOICES, policy=name, share=tightest).value for name in ("snapkv", "morphkv")}
    there = headlines.choices_at_1_percent()
    in_paper = {name: there.row(headlines.CHOICES, method=name).value for name in ("snapkv", "morphkv")}
    return [
        f"By the share of attention kept, {'; '.join(told)}.",
        f"By recall SnapKV lies {percent(drop)} below at {100 * tightest:.0f} %; {beside(drop, float(paper))} "
        "(figure 10, by scores).",
        f"There SnapKV's window leaves {free['snapkv']:.0f} of its entries to choose where MorphKV chooses "
        f"{free['morphkv']:.0f}; by the paper's settings it is {in_paper['snapkv']:.0f} against "
        f"{in_paper['morphkv']:.0f}, so that its figure compares windows as much as choices.",
        "Next: what each stores as a response grows; whether answers follow is asked in tasks_at_small_budgets.",
    ]


def growth(stored: Findings) -> list[str]:
    """Under what is stored along a response; stored: of `sizes.against_formula`."""
    rows = {row.keys["policy"]: row for row in stored.rows if row.effect == sizes.GROWTH}
    deviation = stored.row(sizes.DEVIATION).value
    right = "is what is stored" if deviation < 1e-6 else f"is off by up to {100 * deviation:.1f} %"
    told = listed(
        [f"{METHODS.get(str(name), 'MorphKV')} {row.value:.2f}" for name, row in rows.items() if name != "full"]
    )
    constant = abs(rows["morphkv"].value) < 0.005
    grows = rows["snapkv"].value > 1
    follows = "as here" if constant and grows else "other than here"
    return [
        f"A decoded token adds, as a multiple of what it adds to the full cache: {told}; these are bytes counted, "
        "without scatter.",
        f"In figure 2a SnapKV's memory grows faster than the full cache's and MorphKV's stays, {follows}.",
        f"The formula, with which the next section goes to the paper's models, {right}.",
    ]


def predicted_sizes(predicted: Findings) -> list[str]:
    """Under cache sizes by formula; predicted: of `sizes.printed_sizes`."""
    table = predicted.table.dropna(subset="printed")
    off = (table["predicted"] / table["printed"] - 1).abs()
    worst = table.loc[off.idxmax()]
    paper: Any = (
        papers.figure("morphkv", "headline").query("statement == 'memory_saving'").set_index("against")["value"]
    )
    savings = []
    for method in ("h2o", "snapkv"):
        saved = predicted.row(sizes.SAVING, benchmark=sizes.HEADLINE, method=method).value
        savings.append(f"{100 * saved:.1f} % over {METHODS[method]} (stated {100 * float(paper[method]):.1f} %)")
    return [
        f"The paper's settings give the sizes of figures 6, 8 and 9 to within {100 * off.median():.0f} % (median); "
        f"furthest off is {METHODS.get(worst['method'], 'MorphKV')} on {worst['benchmark']}, {worst['predicted']:.2f} "
        f"against {worst['printed']:.2f}.",
        f"On LongGenBench MorphKV saves {listed(savings)}; all of the saving over H2O comes from groups, for both "
        "hold as many entries.",
        "Next: what so small a cache costs as a response grows.",
    ]


def figure_7(along_response: Findings, inside: Findings) -> list[str]:
    """Under what long responses cost; arguments: of `responses.along_a_response` and `responses.teacher_forced`."""
    times = along_response.row(responses.TIMES, measure="mass_lost", policy="h2o")
    steeper = side(
        times, above="clearly faster than", below="clearly slower than", undecided="about as fast as", at=1.0
    )
    told = []
    for name in ("h2o", "snapkv"):
        behind = inside.row(responses.BEHIND, measure="kl", policy=name)
        slope = inside.row(responses.STEEPER, measure="kl", policy=name)
        verdict = side(behind, above="further from", below="nearer to", undecided="neither nearer to nor further from")
        drifts = side(
            slope, above="and drifts faster", below="and drifts more slowly", undecided="and drifts about as fast"
        )
        told.append(f"{METHODS[name]} is {verdict} the full cache than MorphKV ({number(behind, 2)} nats) {drifts}")
    printed = papers.figure("morphkv", "figure7").set_index("method")
    return [
        f"H2O's loss of attention grows {steeper} MorphKV's ({number(times, 2)} times).",
        f"Inside the model {'; '.join(told)}.",
        f"The judge of figure 7 sees {100 * printed.loc['h2o', 'low']:.0f} % to "
        f"{100 * printed.loc['h2o', 'high']:.0f} % lost where MorphKV loses "
        f"{100 * printed.loc['morphkv', 'low']:.0f} %, which only such a judge can test.",
        "Next: whether other methods of constant size are behind, and keep more early tokens.",
    ]


def figure_3(along_response: Findings) -> list[str]:
    """Under the methods of constant size; along_response: of `responses.along_a_response`."""
    names = ("h2o", "keyformer", "scissorhands", "streamingllm")
    rows = [along_response.row(responses.BEHIND, measure="mass_lost", policy=name) for name in names]
    sides = grouped(
        [(row, f"{METHODS[name]} ({number(row, 2)})") for row, name in zip(rows, names, strict=True)],
        above="less than",
        below="more than",
        undecided="about as much as",
    )
    early = []
    for name in ("h2o", "keyformer"):
        row = along_response.row(responses.DIVERGES_EARLIER, policy=name)
        verdict = side(row, above="clearly more", below="clearly fewer", undecided="not clearly more")
        early.append(f"{METHODS[name]} keeps {verdict} early entries ({percent(row)} of what is stored)")
    return [
        f"Of the attention of a long response MorphKV loses {sides}, in brackets the other's loss less its own; "
        "figure 3 and section 1 have it ahead of all.",
        f"Beside MorphKV {listed(early)}, the bias that section 1 names as the cause of its gains.",
        "Whether what is early is also useless is open; next, what the paper's own tables add up to.",
    ]


def stated_and_recomputed(found: list[Findings]) -> list[str]:
    """Under the headlines; found: of `headlines.everything`."""
    known = {row.metric: row.value for findings in found for row in findings.rows}
    paper = papers.figure("morphkv", "headline").set_index(["statement", "against"])["value"]
    shares = listed(
        [
            f"{100 * known[f'bars/saving/{method}/{sizes.HEADLINE}']:.1f} % over {METHODS[method]} where the text says "
            f"{100 * paper['memory_saving', method]:.1f} %"
            for method in ("h2o", "snapkv")
        ]
    )
    off = max(known["table7/mean_of_six/Phi4"], known["table7/mean_of_six/Qwen"])
    return [
        f"The bars of LongGenBench, means over three models, give a saving of {shares}; with Qwen the settings "
        f"save at least {100 * known['figure2b/qwen_saving/shortest']:.1f} % of SnapKV's memory, and figure 2b says "
        f"{100 * paper['longgenbench_qwen_saving', 'snapkv']:.0f} %.",
        f"In table 7, {known['table7/totals_that_differ']:.0f} rows end in another number than table 1; in two of them "
        f"the mean of six criteria is table 1's to within {off:.2f} points, so that they seem to end in the sixth.",
        "No model ran for this; whether table 3's scores follow from the authors' predictions is asked next.",
    ]


def printed_tables(on_responses: Findings, on_contexts: Findings) -> list[str]:
    """Under tables 1 to 3; arguments: of `printed.long_responses` and `printed.long_contexts`."""
    paper: Any = (
        papers.figure("morphkv", "headline").query("statement == 'accuracy_gain'").set_index("against")["value"]
    )
    gains = []
    for method in ("h2o", "snapkv"):
        row = on_responses.row(tables.GAIN, table="table2", method=method)
        gains.append(
            f"{100 * row.value:.1f} % over {METHODS[method]} (the text states {100 * float(paper[method]):.1f} %)"
        )
    with_all = on_contexts.row(tables.WITH_OMITTED, what="gain")
    without = on_contexts.row(tables.OVER_LLAMAS_TASKS, what="gain")
    turns = "turn the mean over tasks" if with_all.value * without.value < 0 else "do not turn the mean over tasks"
    return [
        f"The rows of table 2 give a gain of {listed(gains)}.",
        f"The two tasks that table 3 leaves out {turns}: {number(without, 2)} points without and {number(with_all, 2)} "
        "with them.",
        "Next: whether the headlines on memory follow from the paper's own figures.",
    ]
