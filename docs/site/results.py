"""Write the results that README and pages of docs/ show, from the kept ledgers: `make results`.

The text of a part goes between `<!-- generated: NAME -->` and `<!-- end -->`. `claim_tables` and `task_tables` have
marks of their own. All else in a page stays as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import claim_tables
import pandas as pd
import storage_tables
import task_tables

from kvlab import papers
from kvlab.inputs.models import DEFAULT
from kvlab.papers.claim import StandIn
from kvlab.papers.stand_ins import Prediction, Predictions, outcome_of
from kvlab.render.phrases import listed
from kvlab.render.sentences import sentence
from kvlab.workbench.report import model_agreement, model_trends, snapshots, stability, stand_ins
from kvlab.workbench.report.ledger import HOLDING, STATES, Entry, Tally, by_model, by_paper
from kvlab.workbench.report.ledger_models import Subject, subjects
from kvlab.workbench.report.paper_summary import standings, weakest

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "docs" / "ledger"
PAGES = (
    "README.md",
    "docs/results.md",
    "docs/disagreements.md",
    "docs/storage.md",
    "docs/tasks.md",
    *(f"docs/disagreements/{paper.name}.md" for paper in papers.papers()),
)
UNSEEN = "Not measured yet."
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """Each page with its parts as the ledgers have them. Raises KeyError for a part that nothing here makes."""
    made = parts()
    every = snapshots.kept(KEPT)
    order = subjects(every)
    certainty = claim_tables.Certainty(stand_ins.read(KEPT), _flips(stability.read(KEPT)))
    found = {}
    for path in (ROOT / page for page in PAGES):
        text = PART.sub(lambda part: f"{part[1]}\n{made[part[2]]}\n\n{part[3]}", path.read_text(encoding="utf-8"))
        found[path] = task_tables.fill(claim_tables.fill(text, every, order, certainty), KEPT)
    return found


def _flips(measured: Iterable[stability.Stability]) -> set[tuple[str, str]]:
    """The claims whose verdict is another one in another cell, each with its model."""
    return {
        (claim, one.model) for one in measured for claim, cells in one.claims.items() if replace(one, cells=cells).flips
    }


def parts() -> dict[str, str]:
    """Make all parts: name -> the text between its marks."""
    every = snapshots.kept(KEPT)
    order = subjects(every)
    default = snapshots.read(KEPT / f"{DEFAULT}.csv")
    weighed, steady = stand_ins.read(KEPT), stability.read(KEPT)
    of_profile = {
        profile: {entry.claim.id: entry for entry in snapshots.read(KEPT / f"{DEFAULT}.csv", profile) if entry.measured}
        for profile in ("quick", "full")
    }
    both = [
        (entry, of_profile["full"][name]) for name, entry in of_profile["quick"].items() if name in of_profile["full"]
    ]
    return {
        "papers": _papers(every),
        "findings": _by_state("findings", ((label, Tally.of(mine)) for label, mine in by_paper(default).items())),
        "holding": _holding(Tally.of(default)),
        "counts": _counts(default, both),
        "models": _by_state(
            "model", ((f"`{Subject(model).label}`", Tally.of(mine)) for model, mine in by_model(every).items())
        ),
        "quoted": _quoted(default),
        "timings": _timings(default),
        "across": _across(every, order),
        "across_names": claim_tables.across(every, order, weighed),
        "trends": _trends(every, order),
        "nearer": claim_tables.nearer(every, order),
        "quoted_by_model": _quoted_by_model(every, order),
        "flips": "\n\n".join(stability.sentences(steady)),
        "flipping": claim_tables.flipping(steady),
        "profiles": _profiles(both),
        "moved": claim_tables.moved(_by_profile(order)),
        "stand_ins": _stand_ins(weighed, order),
        "weighed": _weighed(every),
        **storage_tables.parts(KEPT, order),
        **task_tables.parts(KEPT),
        "rocketkv_16000": _trial(KEPT / "trials" / "rocketkv_16000.csv"),
    }


def _trial(path: Path) -> str:
    """The kept numbers of a trial, measure by measure, and of which version they are."""
    found = pd.read_csv(path, dtype={"commit": str})
    measures = list(dict.fromkeys(found["measure"]))
    cells: dict[str, dict[str, str]] = {}
    for row in found.itertuples():
        extent = "" if pd.isna(row.low) else f" ({row.low:.2f} to {row.high:.2f})"
        cells.setdefault(row.policy, {})[row.measure] = f"{row.value:.2f}{extent}"
    rows = [[policy, *(mine.get(measure, "") for measure in measures)] for policy, mine in cells.items()]
    (of,) = set(zip(found["model"], found["parameters"], found["version"], found["commit"], strict=True))
    said = "One run on {} with {}, by version {} at commit {}; it was not run again since.".format(*of)
    return _table(["policy", *(measure.replace("_", " ") for measure in measures)], rows) + f"\n\n{said}"


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _by_state(what: str, tallies: Iterable[tuple[str, Tally]]) -> str:
    """How many findings have each state."""
    rows = ([label, *(tally.findings[state] for state in STATES)] for label, tally in tallies)
    return _table([what, *STATES], rows)


def _holding(tally: Tally) -> str:
    """How many of the findings that hold do so by a weak stand-in, and how many in direction only."""
    held = sum(tally.findings[state] for state in HOLDING)
    weak, alone = tally.findings[papers.WEAK], tally.findings[papers.DIRECTION]
    return (
        f"Of {held} findings that hold, {weak} hold *by a weak stand-in*: errors of the attention replace scores, and "
        f"predict answers poorly on this model. {alone} hold *in direction only*: right sign, size missed "
        "or not comparable."
    )


def _counts(default: Sequence[Entry], both: Sequence[tuple[Entry, Entry]]) -> str:
    tally = Tally.of(default)
    measured = Counter(entry.origin.profile for entry in default if entry.measured)
    return _table(
        ["counted", ""],
        [
            ["measured claims, of these by the full profile", f"{measured.total()}, {measured['full']}"],
            ["checks (controls, identities, examples) that hold", tally.met("checks")],
            ["recomputed claims that print as the papers say", tally.met("recomputed")],
            ["claims that are questions of ours", tally.questions.total()],
            [
                "decided directions that do not survive at 5 % among all that were tested",
                f"{sum(entry.by_chance for entry in default)} of {sum(entry.decided for entry in default)}",
            ],
            [
                "claims with another verdict in the full profile than in the quick one",
                f"{sum(quick.state != full.state for quick, full in both)} of {len(both)}",
            ],
        ],
    )


def _quoted(default: Sequence[Entry]) -> str:
    lines = []
    for paper in papers.papers():
        lines.append(f"* **{paper.label}**")
        lines += [f"  * {_said(entry)}" for entry in weakest(default, default[0].model, paper.quoted)]
    return "\n".join(lines)


def _quoted_by_model(every: Sequence[Entry], order: Sequence[Subject]) -> str:
    """The quoted findings with the claims of each, and the verdict of the weakest of them on each model."""
    rows = []
    for paper in papers.papers():
        mine = by_paper(every)[paper.label]
        for name in paper.quoted:
            of_finding = [entry for entry in mine if entry.claim.fact[1] == name]
            claims = ", ".join(dict.fromkeys(f"`{entry.claim.id}`" for entry in of_finding))
            ours = " (a question of ours)" if any(entry.group == "questions" for entry in of_finding) else ""
            found = [weakest(of_finding, subject.name, [name]) for subject in order]
            rows.append(
                [
                    f"{paper.label}: {name}{ours}<br>{claims}",
                    *(one[0].state if one else papers.UNMEASURED for one in found),
                ]
            )
    return _table(["finding, and its claims", *(subject.label for subject in order)], rows)


def _said(entry: Entry) -> str:
    """`**holds** (CLAIM): SENTENCE`, which also says of a question that it is ours."""
    ours = ", a question of ours" if entry.group == "questions" else ""
    return f"**{entry.state}** (`{entry.claim.id}`{ours}): {sentence(entry.claim, entry.verdict, entry.weak)}"


def _papers(every: Sequence[Entry]) -> str:
    """Count the verdicts of each paper's quoted findings over the models; describe the first on the default model."""
    named = {subject.label: subject.name for subject in subjects(every)}
    entries = by_paper(every)
    rows = []
    for paper in papers.papers():
        mine, source = entries[paper.label], paper.source
        found = {name: states for name, states in standings(mine) if name in paper.quoted}
        counted = Counter(state for states in found.values() for state in states.values())
        counted[papers.UNMEASURED] = len(named) * len(found) - counted.total()
        links = f"[{paper.label}](docs/disagreements/{paper.name}.md)"
        if source is not None:
            code = f"[code]({source.code})" if source.code else "no public code"
            links += f" ([arXiv]({source.url}), {code})"
        links += _without_parts(mine, paper.quoted)
        measured = weakest(mine, named[DEFAULT], paper.quoted)
        rows.append([links, *(counted[state] for state in papers.VERDICTS), _said(measured[0]) if measured else UNSEEN])
    return _table(["quoted findings of", *papers.VERDICTS, f"the first of them, on `{DEFAULT}`"], rows)


def _without_parts(of_paper: Sequence[Entry], quoted: Container[str]) -> str:
    """Say on which models the quoted findings ran without parts of the method that were never measured there."""
    models: dict[str, list[str]] = {}
    for entry in of_paper:
        if entry.claim.finding in quoted:
            chance = ["weights no better than chance"] if claim_tables.weighed_by_chance(entry) else []
            for remark in [*entry.origin.remarks, *chance]:
                models.setdefault(remark, []).append(entry.model)
    return "".join(f"; {remark} on {listed(list(dict.fromkeys(of)))}" for remark, of in models.items())


def _timings(default: Sequence[Entry]) -> str:
    lines = [
        f"* {sentence(entry.claim, entry.verdict)}"
        for entry in default
        if entry.group == "timings" and entry.state != papers.UNMEASURED
    ]
    return "\n".join(lines)


def _across(every: Sequence[Entry], order: Sequence[Subject]) -> str:
    found = model_agreement.across(every, order)
    rows = [(kind, len(found.get(kind, ()))) for kind in model_agreement.KINDS]
    return _table(["findings that several models measured", sum(map(len, found.values()))], rows)


def _trends(every: Sequence[Entry], order: Sequence[Subject]) -> str:
    found = model_trends.trends(model_trends.rows(every, order))
    rows = [(model_trends.SAID[way][1], found[way]) for way in model_trends.TRENDS]
    return _table(["findings with a printed number, as models grow", found.total()], rows)


def _profiles(both: Sequence[tuple[Entry, Entry]]) -> str:
    changed = Counter((quick.state, full.state) for quick, full in both if quick.state != full.state)
    rows = sorted(changed.items(), key=lambda pair: (STATES.index(pair[0][0]), STATES.index(pair[0][1])))
    return _table(["quick profile", "full profile", "claims"], [(*states, count) for states, count in rows])


def _by_profile(order: Sequence[Subject]) -> dict[str, dict[str, dict[str, Entry]]]:
    """Model -> profile -> claim -> its entry, of the models that have lines of both profiles."""
    found: dict[str, dict[str, dict[str, Entry]]] = {}
    for subject in order:
        every = {
            profile: {
                entry.claim.id: entry
                for entry in snapshots.kept(KEPT, subject.name, profile)
                if entry.measured and entry.origin.profile == profile
            }
            for profile in ("quick", "full")
            if any(line.origin.profile == profile for line in snapshots.every(KEPT, subject.name))
        }
        if len(every) == 2:
            found[subject.label] = every
    return found


def _stand_ins(of_models: Mapping[str, Predictions], order: Sequence[Subject]) -> str:
    """How well the stand-ins of claims predict answers, on the models where that was measured."""
    labels = [subject.label for subject in order if subject.label in of_models]
    rows = [
        [f"`{name}`", *(_cell(of_models[label].get((name, outcome_of(name)))) for label in labels)]
        for name in get_args(StandIn)
    ]
    return _table(["stand-in", *(f"`{label}`" for label in labels)], rows)


def _cell(found: Prediction | None) -> str:
    if found is None:
        return "–"
    shown = f"{found.rho:.2f} ({found.low:.2f} to {found.high:.2f}), n = {found.documents}"
    return f"{shown}, weak" if found.weak else shown


def _weighed(every: Sequence[Entry]) -> str:
    """How many verdicts on findings a weak stand-in changes."""
    changed = Counter(
        (Subject(entry.model).label, entry.verdict.verdict, entry.state)
        for entry in every
        if entry.group == "findings" and entry.measured and entry.state != entry.verdict.verdict
    )
    rows = [(f"`{model}`", before, after, count) for (model, before, after), count in sorted(changed.items())]
    return _table(["model", "by the two tests", "with the stand-in's worth", "claims on findings"], rows)


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
