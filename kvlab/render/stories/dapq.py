"""What DapQ's figures show, in sentences that follow from the numbers."""

from __future__ import annotations

from typing import Any

from kvlab import papers
from kvlab.analyses.dapq import contexts, control, position, pseudo, recall
from kvlab.analyses.dapq import printed as tables
from kvlab.analyses.dapq.contexts import Contexts
from kvlab.analyses.findings import Findings
from kvlab.render import phrases

SIMILARITY = "similarity"


def _printed(condition: str) -> float:
    """The cosine after RoPE that the paper's table 1 prints."""
    return float(papers.figure("dapq", "table1").set_index("condition").at[condition, "post"])


def table_1(findings: Findings) -> list[str]:
    """Position against content, thousands of tokens off."""
    row = findings.row(position.CONTRAST, rope="post", contrast="position_less_content")
    before = findings.row(position.SIMILARITY, rope="pre", condition="dc_dp")
    return [
        f"The right position with the wrong content less the right content at position 0 is {phrases.number(row)} in "
        "cosine, "
        + phrases.side(
            row,
            above="so that position outweighs content at this distance",
            below="so that content outweighs position even at this distance",
            undecided="so that neither outweighs the other",
        )
        + f"; {phrases.beside(row, _printed('dc_sp') - _printed('sc_dp'))}.",
        f"Before the rotation even the wrong content at the wrong position has {phrases.number(before)}: how much of "
        "that all "
        "queries have in common is asked below.",
    ]


def figure_2a(findings: Findings) -> list[str]:
    """Any content, any span."""
    row = findings.row(position.GAP_RANDOM, rope="post", left="dc_sp", right="sc_dp_m")
    far = findings.row(position.GAP_RANDOM, rope="post", left="dc_dp_m", right="dc_dp_100")
    return [
        f"With random tokens and random spans the right position is {phrases.number(row)} ahead of the right content: "
        + phrases.side(
            row,
            above="as figure 2a draws it.",
            below="the reverse of figure 2a.",
            undecided="undecided, where figure 2a has it ahead.",
        ),
        "Positions from the first hundred serve "
        + phrases.side(
            far,
            above="worse than positions from anywhere",
            below="better than positions from anywhere",
            undecided="neither clearly worse nor better than positions from anywhere",
        )
        + f" ({phrases.number(far)}), so the next question is how the loss grows with the distance.",
    ]


def figure_2b(findings: Findings) -> list[str]:
    """How the similarity falls."""
    decay, longer = findings.row(position.CLAIMED_DECAY), findings.row(position.LONGER_DECAYS_MORE)
    return [
        f"The rank correlation of offset and similarity is {phrases.number(decay)}, where figure 2b falls throughout "
        f"({phrases.stated('dapq.figure2b.monotone'):.0f}); in longer contexts the loss from the right position to "
        "position 0 is "
        + phrases.side(
            longer,
            above="larger, as the paper says.",
            below="smaller, where the paper says larger.",
            undecided="not clearly larger, where the paper says that it is.",
        ),
        "Next: the same at the paper's lengths, and whether SnapKV's window loses by the first tokens of that fall.",
    ]


def over_lengths(findings: Contexts | None) -> list[str]:
    """Figure 2 at several lengths; None where they were not measured."""
    if findings is None:
        return ["Contexts from 2k to 8k tokens are compared in the full profile only."]
    ends = findings.ends
    gap, shortest = (findings.row(contexts.VALUE, measure="gap", context=end) for end in ("longest", "shortest"))
    more = findings.row(contexts.LONGEST_DECAYS_MORE)
    ranks = [row.value for row in findings.of(contexts.VALUE, measure="spearman")]
    texts = len(set(findings.cells["document"]))
    return [
        f"On {texts} texts, random content at the right position is ahead of the true content at random positions by "
        f"{phrases.number(shortest)} at {ends['shortest']} tokens and by {phrases.number(gap)} at {ends['longest']}.",
        f"The mean rank correlation of offset and similarity lies between {min(ranks):.3f} and {max(ranks):.3f} at all "
        f"lengths, and from {ends['shortest']} to {ends['longest']} the loss from the right position to position 0 "
        + phrases.side(
            more,
            above=f"grows, by {phrases.number(more)}, as the paper says.",
            below=f"shrinks, by {phrases.number(more)}, where the paper says that it grows.",
            undecided=f"does not clearly grow ({phrases.number(more)}), where the paper says that it does.",
        ),
        "A fall that is steeper in all says nothing yet of its first 32 tokens, which are SnapKV's; these come next.",
    ]


def offsets(findings: Findings) -> list[str]:
    """Where a wrong position has cost as much as a wrong content; what is told with it is `control_cells`."""
    equal, at_window = findings.row(control.EQUAL_AT), findings.row(control.AT_WINDOW)
    return [
        f"A wrong position costs as much as a wrong content only from an offset of {phrases.number(equal)} tokens on; "
        + phrases.side(
            at_window,
            above="SnapKV's window, 32 tokens off, loses more by its position than random content would.",
            below="SnapKV's window, 32 tokens off, loses less by its position than random content would: what it "
            "lacks is not the position.",
            undecided="at SnapKV's 32 tokens position and content cost about the same.",
        ),
    ]


def control_cells(findings: Findings) -> list[str]:
    """The control that decides, in cosines."""
    row = findings.row(control.POSITION_LESS_CONTENT, measure=SIMILARITY)
    mean, over = findings.row(control.MEAN_QUERY), findings.row(control.OVER_MEAN)
    return [
        "At SnapKV's distance of one window "
        + phrases.side(
            row,
            above="random content at the right position still comes closer to the true queries than the true content "
            "before it, as in table 1",
            below="the true content comes closer to the true queries than random content at the right position: the "
            "order of "
            "table 1 is reversed",
            undecided="random content at the right position and the true content before it come equally close, where "
            "table 1 has the position ahead",
        )
        + f" ({phrases.number(row)}).",
        f"The mean of the prompt's queries, with no content at all, has a cosine of {phrases.number(mean)} there; "
        "random "
        "pseudo-tokens are "
        + phrases.side(over, above="closer than that", below="further away than that", undecided="as close as that")
        + f" ({phrases.number(over)}), so that "
        + phrases.side(
            over,
            above="they add something of their own.",
            below="a constant would approximate the true queries better.",
            undecided="a constant would do as well.",
        ),
        "Next: in how many heads the position outweighs the content at this distance.",
    ]


def head_map(findings: Findings) -> list[str]:
    """In how many heads."""
    share = findings.row(control.SHARE_OF_HEADS)
    heads: Any = control.by_head(findings)
    first = heads.assign(gap=heads["position"] - heads["content"]).groupby("layer")["gap"].mean()
    return [
        f"Position outweighs content at SnapKV's distance in {phrases.percent(share)} of the heads, "
        + phrases.side(share, above="most of them.", below="a minority.", undecided="about half of them.", at=0.5),
        f"Position counts most, beside content, in layer {first.idxmax()}, and least in layer {first.idxmin()}; table "
        "1 tells no heads apart.",
        "Next: the premise that neighbouring queries are alike; whether the position decides what is found is asked in "
        "dapq_window_recall.",
    ]


def adjacent(findings: Findings) -> list[str]:
    """The premise."""
    near, gap = (
        findings.row(control.ADJACENT, rope="post", distance=1),
        findings.row(control.NEAR_LESS_FAR, rope="post"),
    )
    before = findings.row(control.NEAR_LESS_FAR, rope="centred")
    return [
        f"Neighbouring decoding queries have a cosine of {phrases.number(near)}, "
        + phrases.side(gap, above="more than distant ones", below="less than distant ones", undecided="as distant ones")
        + f" by {phrases.number(gap)}; section 1 takes from CaliDrop that they are more alike.",
        "Before the rotation and less their mean, where only content is left, neighbours are "
        + phrases.side(
            before,
            above="still more alike: the premise is not position's alone",
            below="less alike",
            undecided="no more alike: what makes them similar is the position",
        )
        + f" ({phrases.number(before)}).",
        "Next: whether the position makes the better window, in dapq_window_recall.",
    ]


def figure_3(findings: Findings, window: int = 32, budget: int = 256) -> list[str]:
    """Whose window finds more."""
    rows = {
        name: findings.row(recall.LEAD, measure="window_recall", policy=name, window=window, budget=budget)
        for name in ("snapkv", "streamingllm")
    }
    grows = findings.row(recall.SMALL_BUDGET_LEAD)
    return [
        f"With {budget} entries random pseudo-queries lead SnapKV's window by {phrases.number(rows['snapkv'])} of "
        "recall, which "
        "is "
        + phrases.side(
            rows["snapkv"],
            above="ahead, as in the paper's figure 3",
            below="behind, where the paper's figure 3 has them ahead",
            undecided="neither ahead nor behind",
        )
        + f"; against sinks and recent tokens it is {phrases.number(rows['streamingllm'])}.",
        f"Under the tightest budget the lead over SnapKV less that under the largest is {phrases.number(grows)}: "
        + phrases.side(
            grows,
            above="it grows, as the abstract says.",
            below="it shrinks, where the abstract says that it grows.",
            undecided="it does not clearly grow, where the abstract says that it does.",
        ),
        "Next: whether it is the position that makes the window, with the same tokens in both places.",
    ]


def control_recall(findings: Findings) -> list[str]:
    """The control that decides, in recall."""
    moved = findings.row(control.POSITION, measure="recall", content="last")
    content = findings.row(control.CONTENT, measure="recall", place="right")
    (low, high), (least, most) = phrases.ends(content), phrases.ends(moved)
    if low > most:
        worth = "more than the position is; so the way to a better window leads over better guesses of the response."
    elif high < least:
        worth = "less than the position is."
    else:
        worth = "about as much as the position is, by intervals that overlap."
    return [
        "The same 32 tokens, the prompt's last, "
        + phrases.side(
            moved,
            above="find more of what the response needs at its positions than at SnapKV's, as section 3.3 says",
            below="find less at the response's positions than at SnapKV's, against section 3.3",
            undecided="find as much at the response's positions as at SnapKV's, where section 3.3 has more",
        )
        + f" ({phrases.number(moved)}).",
        f"The true content in place of random tokens is worth {phrases.number(content)} at the right position, {worth}",
        "Next: what is left of this in the sets that are really kept.",
    ]


def retained_sets(findings: Findings, window: int = 32, budget: int = 256) -> list[str]:
    """What is really kept."""
    row = findings.row(recall.LEAD, measure="recall", policy="snapkv", window=window, budget=budget)
    return [
        f"In what is really kept DapQ's lead over SnapKV is {phrases.number(row)} at {budget} entries: "
        + phrases.side(
            row,
            above="ahead, as section 3.3 says.",
            below="behind, where section 3.3 has it ahead.",
            undecided="not told apart, where section 3.3 has it ahead.",
        ),
        "SnapKV pools its scores and keeps its window, and DapQ does neither; the next figure gives both the same.",
    ]


def same_pooling(findings: Findings, window: int = 32, budget: int = 256) -> list[str]:
    """The same pooling on both sides."""
    raw, pooled = (
        findings.row(recall.LEAD, measure="recall", policy=pair, window=window, budget=budget) for pair in recall.SAME
    )
    words: Any = {"above": "ahead", "below": "behind", "undecided": "not told apart"}
    return [
        f"Raw scores against raw ones, DapQ is {phrases.side(raw, **words)} ({phrases.number(raw)}); pooled against "
        "pooled, "
        f"with both windows kept, it is {phrases.side(pooled, **words)} ({phrases.number(pooled)}).",
        "What differs between the two lines is pooling and the kept window, not the pseudo-queries, which section 3.3 "
        "credits.",
        "Next: what the paper's own tables say; whether tasks follow is asked in tasks_at_small_budgets.",
    ]


def printed(findings: Findings) -> list[str]:
    """What section 5.2 says of the paper's own tables."""
    shares = {name: findings.row(tables.NOT_BEHIND, benchmark=name) for name in tables.BENCHMARKS}
    labels = {"longbench": "LongBench", "ruler": "RULER", "helmet": "HELMET", "needle": "needles"}
    cells = phrases.listed([f"{phrases.percent(row)} on {labels[name]}" for name, row in shares.items()])
    ahead = [
        f"{row['method']} by {row['value']:.2f} points in {row['cell'].replace('/', ' with ')} entries "
        f"({labels[row['benchmark']]})"
        for row in findings.frame(tables.BEHIND).to_dict("records")
    ]
    return [
        "In the paper's own tables the share of cells in which no baseline is ahead of DapQ is "
        f"{cells}, where section 5.2 has it ahead in all.",
        f"Ahead of it are {phrases.listed(ahead)}." if ahead else "",
        "Next: what the pseudo-queries say and how many there are, in dapq_pseudo_queries.",
    ]


def figure_6a(findings: Findings, budget: int = 128) -> list[str]:
    """Does it matter what the pseudo-queries say?"""
    at = {"measure": "recall", "budget": budget}
    spread, worth = findings.row(pseudo.SPREAD, **at), findings.row(pseudo.POSITION_LESS_SPREAD, **at)
    cv = findings.row(pseudo.VARIATION, **at)
    return [
        f"With {budget} entries the contents' recalls have a coefficient of variation of {phrases.percent(cv)}, "
        f"where figure 6a has about {100 * phrases.stated('dapq.figure6a.variation'):.0f} % of LongBench's scores, and "
        "the best and the worst content of a document differ by "
        f"{phrases.number(spread)}.",
        "What the wrong position costs is "
        + phrases.side(
            worth,
            above="more than that: content is secondary to a position thousands of tokens off, as section 6.1 says",
            below="less than that: what they say counts for more than where they stand, against section 6.1",
            undecided="about as much, where section 6.1 has it secondary",
        )
        + f" ({phrases.number(worth)}).",
        "Next: how many pseudo-queries there should be.",
    ]


def figure_6b(findings: Findings) -> list[str]:
    """Is there a best length?"""
    rise, fall = findings.row(pseudo.RISE, measure="recall"), findings.row(pseudo.FALL, measure="recall")
    return [
        "From one pseudo-query to the best length recall "
        + phrases.side(rise, above="rises", below="falls", undecided="does not clearly change")
        + f" ({phrases.number(rise)}), and from there to the longest it "
        + phrases.side(fall, above="falls again, as in figure 6b", below="rises on", undecided="does not clearly fall")
        + f" ({phrases.number(fall)}); the best length is chosen on the other documents, so that its choice flatters "
        "neither.",
        "Next: whether long windows are worse because pseudo-queries attend to each other, as section 6.2 says.",
    ]


def mutual(findings: Findings) -> list[str]:
    """Do pseudo-queries interfere with each other?"""
    lengths: Any = findings.table["length"]
    longest = lengths.max()
    at, grows = (
        findings.row(pseudo.MUTUAL, measure="recall", length=longest),
        findings.row(pseudo.MUTUAL_GROWS, measure="recall"),
    )
    moved = phrases.moved(at, above="falls by", below="rises by", undecided="changes by no clear amount, a fall of")
    return [
        f"With {longest} pseudo-queries that attend to each other, too, recall {moved} against a softmax over the "
        "prompt alone.",
        "As the window grows, mutual attention costs "
        + phrases.side(
            grows,
            above="more, which agrees with the paper's section 6.2",
            below="less, against the paper's section 6.2",
            undecided="neither clearly more nor less, so that section 6.2's dilution by mutual attention is not shown",
        )
        + f" ({phrases.number(grows)}).",
        "Next: whether tasks follow what is kept, in tasks_at_small_budgets.",
    ]
