"""What is told of RocketKV's figures follows the numbers, in both directions."""

from __future__ import annotations

import pandas
import pytest
from support.stories import findings_of, told

from kvlab.analyses.findings import Findings
from kvlab.analyses.rocketkv import budgets, design, printed
from kvlab.render.stories import rocketkv as story
from kvlab.render.stories import rocketkv_design as story_design

ERROR = "output_error"
AT = {"measure": ERROR}


def made(effects: dict, table: pandas.DataFrame | None = None) -> Findings:
    return findings_of(effects, pandas.DataFrame({"compression": [4, 8, 16]}) if table is None else table)


@pytest.mark.parametrize(
    ("share", "quarter", "words"),
    [
        (
            0.8,
            0.1,
            [
                "it is finding the tokens that fails",
                "the best of the four still loses more than Exact-TopK with one, as in figure 1",
            ],
        ),
        (0.2, -0.1, ["it is reading so few tokens", "With four times the budget the best of the four loses less"]),
        (0.5, 0.0, ["leaves open", "not told apart"]),
    ],
)
def test_figure_1(share, quarter, words):
    lost = {"measure": "mass_lost"}
    findings = made(
        {
            budgets.FINDING: [(share, lost)],
            budgets.AT_A_QUARTER: [(quarter, lost)],
            budgets.AT_TIGHTEST: [(0.08, lost | {"method": "exact_topk"})],
        }
    )
    text = told(story.figure_1(findings))
    assert all(word in text for word in words) and "compression, 16," in text
    assert "Exact-TopK has 31.3 of the full cache's 33.1, and the best of the four 11.7" in text


@pytest.mark.parametrize(
    ("quest", "first", "words"),
    [
        (1.5, 0.1, ["larger than that of an output of zeros", "would pay"]),
        (0.5, -0.1, ["smaller than that of an output of zeros", "need not be left whole"]),
        (1.0, 0.0, ["not told apart from that of an output of zeros", "stays open"]),
    ],
)
def test_figure_4(quest, first, words):
    errors = {"rocketkv": 0.2, "sparq": 0.4, "quest": quest, "duoattention": 0.45}
    levels = [(value, AT | {"method": method}) for method, value in errors.items()]
    levels += [(0.9, {"measure": "mass_lost", "method": "quest"})]
    text = told(story.figure_4(made({budgets.AT_TIGHTEST: levels, budgets.FIRST_LAYERS: [(first, AT)]})))
    assert all(word in text for word in words)
    assert "in the order RocketKV, SparQ, DuoAttention and Quest." in text and "both miss nearly everything" in text


@pytest.mark.parametrize(
    ("gain", "widening", "words"),
    [
        (0.1, 0.1, ["it is ahead", "at 3 of 3", "the lead grows, as section 4.2 says"]),
        (-0.1, -0.1, ["it is behind", "at 0 of 3", "the lead shrinks"]),
        (0.0, 0.0, ["not told apart", "neither clearly grows"]),
    ],
)
def test_gains(gain, widening, words):
    pair = AT | {"better": "rocketkv", "other": "next_best"}
    findings = made(
        {
            budgets.GAIN: [(gain, pair | {"compression": c}) for c in (4, 8, 16)],
            budgets.GAIN_AT_TIGHTEST: [(gain, pair)],
            budgets.WIDENING: [(widening, pair)],
        }
    )
    text = told(story.gains(findings))
    assert all(word in text for word in words)


@pytest.mark.parametrize(
    ("over_sparq", "at_4", "behind", "words"),
    [
        (0.1, 0.1, "", "find more than one does there, in all cases, as section 4.4.3 says"),
        (0.1, -0.1, "a gain, and behind at compressions of 4", "there, not in all cases, where section 4.4.3 says all"),
        (-0.1, -0.1, "a loss, and behind at compressions of 4 and 16", "not better than one in all cases"),
    ],
)
def test_figure_8(over_sparq, at_4, behind, words):
    gains = {"quest": (0.3, 0.3), "sparq": (at_4, over_sparq)}
    pairs = {half: AT | {"better": "hybrid", "other": half} for half in gains}
    findings = made(
        {
            budgets.GAIN_AT_TIGHTEST: [(gains[half][-1], pair) for half, pair in pairs.items()],
            budgets.GAIN: [
                (gain, pair | {"compression": c}) for h, pair in pairs.items() for c, gain in zip((4, 16), gains[h])
            ],
        }
    )
    text = told(story.figure_8(findings))
    assert words in text and behind in text and ("and behind at" in text) is bool(behind)


@pytest.mark.parametrize(
    ("wider", "words"), [(0.1, "It becomes wider with the prompt, as"), (-0.1, "narrower"), (0.0, "left open")]
)
def test_longer(wider, words):
    table = pandas.DataFrame({"end": ["longer", "shorter"], "length": [1150, 287]})
    leads = [(value, AT | {"end": end}) for end, value in (("longer", 0.2), ("shorter", 0.1))]
    text = told(story.longer(made({design.LONGER_LEAD: leads, design.LONGER_LEAD_GROWS: [(wider, AT)]}, table)))
    assert words in text and "prompts of 287 tokens" in text and "prompts of 1150" in text


def test_costs():
    stored = [
        (v, {"measure": "stored", "method": m, "compression": 16.0}) for m, v in (("rocketkv", 0.37), ("sparq", 1.5))
    ]
    assert "RocketKV stores 37 % of the full cache and SparQ 150 %" in told(story.costs(made({budgets.VALUE: stored})))


def test_printed():
    findings = made({printed.BEHIND: [(2.3, {"benchmark": "ruler", "method": "quest", "cell": "LongChat/16000/4096"})]})
    for benchmark, share in (("longbench", 0.8), ("ruler", 0.9), ("needle", 1.0)):
        findings.set(printed.NOT_BEHIND, share, benchmark=benchmark, method="rocketkv", others="rivals")
    findings.set(printed.WIDER, 1 / 3)
    text = told(story.printed(findings))
    assert "80 % on LongBench" in text and "Quest in LongChat/16000/4096, 2.3 points" in text and "33 %" in text


# --- the design ---


def gain(better: str, other: str, value: float, under: str = "") -> dict:
    return {under + budgets.GAIN_AT_TIGHTEST: [(value, AT | {"better": better, "other": other})]}


@pytest.mark.parametrize(
    ("value", "words"), [(0.1, "agrees with the paper's"), (-0.1, "which is a loss"), (0.0, "from no change")]
)
def test_figure_6(value, words):
    effects = {budgets.GAIN_AT_TIGHTEST: [], design.OVER_CHANCE_AT_TIGHTEST: [(0.2, {})]}
    for better, other in (("snapkv_gqa", "snapkv"), ("snapkv_pp", "snapkv_gqa")):
        effects[budgets.GAIN_AT_TIGHTEST] += gain(better, other, value)[budgets.GAIN_AT_TIGHTEST]
    text = told(story_design.figure_6(made(effects)))
    assert words in text and "20 %" in text


@pytest.mark.parametrize(("value", "words"), [(0.1, "serves better"), (-0.1, "serves worse"), (0.0, "not told apart")])
def test_first_stage(value, words):
    assert words in told(story_design.first_stage(made(gain("snapkv_pp", "snapkv_gqa", value, design.FIRST_STAGE))))


@pytest.mark.parametrize(
    ("best", "growth", "words"),
    [
        (63.0, 2.0, ["wider than SnapKV's 7", "as figure 7 has it; figure 7's grows by 3.02"]),
        (5.0, -1.0, ["narrower than", "which is no growth"]),
    ],
)
def test_figure_7(best, growth, words):
    effects = {design.BEST_KERNEL_SIZE: [(best, {"end": "longest"})], design.BEST_KERNEL_GROWTH: [(growth, {})]}
    text = told(story_design.figure_7(made(effects, pandas.DataFrame({"length": [290, 1150]}))))
    assert all(word in text for word in words) and "prompts of 1150 tokens" in text


def test_table_1():
    table = pandas.DataFrame(
        {"method": ["rocketkv", "sparq"], "compression": 16, "storage_measured": [0.37, 1.5], "storage_paper": [0.5, 2]}
    )
    text = told(story_design.table_1(made({}, table)))
    assert (
        "stores 0.370 of the full cache, 0.74 of what" in text and "1.50 of the full cache where table 1 has 2" in text
    )


@pytest.mark.parametrize(
    ("value", "words"), [(0.1, "each stage adds to the other"), (-0.1, "do not clearly beat both")]
)
def test_splits(value, words):
    findings = made(
        {
            budgets.GAIN_AT_TIGHTEST: [
                row
                for other in ("split0", "split1")
                for row in gain("split0.5", other, value)[budgets.GAIN_AT_TIGHTEST]
            ],
            budgets.AT_TIGHTEST: [(0.7, {"measure": "survived", "method": "split0.5"})],
            budgets.VALUE: [
                (error, AT | {"method": method, "compression": 16})
                for method, error in (("split0.5", 0.3), ("splitpublished", 0.2))
            ],
        }
    )
    text = told(story_design.splits(findings))
    assert (
        words in text
        and "a majority, as section 3.2 says" in text
        and "the published code's rule has the smallest" in text
    )


@pytest.mark.parametrize(
    ("value", "words"), [(0.1, "beats dimensions and beats pages"), (-0.1, "loses to dimensions and loses to pages")]
)
def test_pages(value, words):
    findings = made(
        {
            budgets.GAIN: [
                (value, AT | {"better": "pages0.5", "other": f"pages{e}", "compression": 16}) for e in ("0", "1")
            ],
            budgets.VALUE: [
                (error, AT | {"method": f"pages{e}", "compression": 16}) for e, error in (("0", 0.3), ("0.25", 0.2))
            ],
        }
    )
    text = told(story_design.pages(findings))
    assert words in text and "at the exponent 0.25" in text
