"""The tables of scores on the page of tasks are the kept files, read by another reader; what it says of them holds."""

from __future__ import annotations

import re

import pandas
import pytest
from support.paths import ROOT

PAGE = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
SMALL, HALF, LARGER = "smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
MOMENTS = ("prompt", "context")
ONCE, OTHER = "document='sotu/1962'", "document='squad/Immune_system'"


def kept(model: str, task: str, settings: str = "", n: int | None = None) -> pandas.DataFrame:
    """The lines over all kinds of examples and all turns, by policy, budget and moment; no budget is an empty one."""
    frame = pandas.read_csv(ROOT / "docs" / "ledger" / "tasks" / f"{model}.csv", dtype={"budget": str})
    mine = frame[(frame["task"] == task) & frame["settings"].str.contains(settings, regex=False)]
    mine = mine[mine["kind"].isna() & mine["turn"].isna() & mine["mode"].isna()]
    if n is not None:
        mine = mine[mine["n"] == n]
    return mine.assign(budget=mine["budget"].fillna("")).set_index(["policy", "budget", "compress_at"])


def at(frame: pandas.DataFrame, policy: str, budget: str, moment: str) -> pandas.Series:
    """The line of a policy, which may take no budget."""
    place = policy, budget, moment
    return frame.loc[place if place in frame.index else (policy, "", moment)]


def rows(heading: str) -> list[tuple[str, list[str]]]:
    """The policy of each row of a section's generated table, and its cells; a note on its tables is left out."""
    table = PAGE.partition(f"\n## {heading}\n")[2].partition("<!-- generated")[2].partition("<!-- end -->")[0]
    lines = re.findall(r"^\| (?!-)(.+?) \|(.+)\|$", table, re.MULTILINE)[1:]
    assert lines, heading
    return [(name_of(name), [cell.strip() for cell in cells.split("|")]) for name, cells in lines]


def name_of(words: str) -> str:
    return "full" if words == "full cache" else words.partition(",")[0]


def percent(line: pandas.Series) -> str:
    return "{:.0f} ({:.0f}-{:.0f})".format(*(100 * line[name] for name in ("score", "low", "high")))


def points(line: pandas.Series) -> list[float]:
    return [-100 * line[name] for name in ("difference", "difference_high", "difference_low")]


def test_needles():
    found = [kept(HALF, "needle", ONCE), kept(HALF, "needle", OTHER), kept(LARGER, "needle", ONCE)]
    columns = [(frame, budget) for frame in found for budget in ("128", "512")]
    compared = 0
    for policy, cells in rows("Needles with all policies"):
        for cell, (frame, budget) in zip(cells, columns, strict=True):
            if cell != "– / –":
                counts = [15 * at(frame, policy, budget, moment)["score"] for moment in MOMENTS]
                assert [int(each) for each in cell.split(" / ")] == pytest.approx(counts, abs=1e-2), (policy, budget)
                compared += 1
    policies = {policy for frame in found for policy, _, _ in frame.index}
    assert policies == {policy for policy, _ in rows("Needles with all policies")}
    assert compared == sum(2 * len({policy for policy, _, _ in frame.index}) for frame in found)


def test_a_grid_of_needles():
    frame = kept(SMALL, "needle")
    for policy, cells in rows("A needle grid"):
        assert cells[:2] == [percent(at(frame, policy, budget, "prompt")) for budget in ("128", "512")]
        if policy != "full":
            less, low, high = points(at(frame, policy, "512", "prompt"))
            numbers = [float(each) for each in re.findall(r"-?\d+\.\d", cells[2])]
            assert numbers == pytest.approx([less, low, high], abs=0.06)
            assert cells[2].startswith("**") is bool(low > 0)


def test_ruler():
    found = [kept(HALF, "ruler"), kept(LARGER, "ruler")]
    columns = [(frame, moment) for frame in found for moment in MOMENTS]
    for policy, cells in rows("RULER with all policies"):
        for cell, (frame, moment) in zip(cells, columns, strict=True):
            assert cell in ("–", percent(at(frame, policy, "0.1", moment))), (policy, moment)
    assert len({policy for policy, _ in rows("RULER with all policies")}) == len({key[0] for key in found[0].index})


def test_longbench():
    found = {n: kept(HALF, "longbench", n=n) for n in (60, 30)}
    told: dict[int, set[str]] = {60: set(), 30: set()}
    for policy, (n, *cells) in rows("LongBench's tasks, with 512 entries"):
        told[int(n)].add(policy)
        columns = [(frame, moment) for frame in (found[int(n)], kept(LARGER, "longbench")) for moment in MOMENTS]
        for cell, (frame, moment) in zip(cells, columns, strict=True):
            if cell == "–":
                continue
            line = at(frame, policy, "512", moment)
            score, _, less = cell.partition("; ")
            assert float(score) == pytest.approx(100 * line["score"], abs=0.51)
            if policy != "full":
                assert [float(each) for each in re.findall(r"-?\d+\.\d", less)] == pytest.approx(points(line), abs=0.06)
                assert less.startswith("**") is bool(points(line)[1] > 0), (policy, moment)
    for n, frame in found.items():
        assert told[n] | {"full"} == {policy for policy, _, _ in frame.index} | {"full"}


SELECTS = ("exact_topk", "hybrid", "sparq")


def test_what_the_page_says_of_ruler():
    for frame in (kept(HALF, "ruler"), kept(LARGER, "ruler")):
        first = {policy: at(frame, policy, "0.1", "prompt")["score"] for policy, _, _ in frame.index}
        later = {policy: at(frame, policy, "0.1", "context")["score"] for policy in first}
        assert abs(first["exact_topk"] - first["full"]) < 0.05
        evicts = set(first) - {*SELECTS, "full", "think", "quest", "random"}
        assert max(evicts, key=first.__getitem__) == "rocketkv" and later["rocketkv"] < first["rocketkv"] / 2
        assert later["kvzip"] > first["kvzip"]


def test_what_the_page_says_of_needles():
    for frame in (kept(HALF, "needle", ONCE), kept(HALF, "needle", OTHER), kept(LARGER, "needle", ONCE)):

        def found(policy: str, moment: str, frame=frame) -> int:
            return round(15 * at(frame, policy, "512", moment)["score"])

        for policy in ("snapkv", "tova", "rkv", "snapkv_pp", "chunkkv", "adakv"):
            assert found(policy, "prompt") >= 13 and found(policy, "context") <= 9, policy
        for policy in (*SELECTS, "leverage", "keydiff", "lagkv"):
            assert found(policy, "prompt") - found(policy, "context") <= 1, policy
        assert found("snapkv", "context") < found("rocketkv", "context") < found("rocketkv", "prompt")
        assert found("kvzip", "context") >= found("kvzip", "prompt")


def test_what_the_page_says_of_longbench():
    for frame in (kept(HALF, "longbench", n=60), kept(LARGER, "longbench")):
        clear = {
            moment: {policy for policy, _, _ in frame.index if points(at(frame, policy, "512", moment))[1] > 0}
            for moment in MOMENTS
        }
        assert len(clear["prompt"]) < len(clear["context"])
        less = [points(at(frame, "sparq", "512", moment))[0] for moment in MOMENTS]
        assert abs(less[0] - less[1]) < 1


def test_what_the_page_says_of_turns():
    frame = pandas.read_csv(ROOT / "docs" / "ledger" / "tasks" / f"{SMALL}.csv")
    mine = frame[(frame["task"] == "turns") & (frame["mode"] == "requests") & frame["turn"].isna()]
    scores = mine.set_index(["policy", "compress_at"])
    assert scores.loc[("rocketkv", "prompt"), "low"] > scores.loc[("rocketkv", "context"), "high"]
    assert scores.loc[("kvzip", "prompt"), "low"] < scores.loc[("kvzip", "context"), "high"]
    assert scores.loc["snapkv", "score"].max() < 0.1
