"""Builds the documentation's site: `make docs`. A warning of Sphinx fails it.

The pages stand where readers of the repository look for them (README.md, docs/, notebooks/). They are copied beside
each other, so that their links lead on, and pages made from data join them: the gallery, the ledger, the reference.
"""

from __future__ import annotations

import base64
import html
import importlib
import inspect
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import nbformat
import typer

import kvlab
from kvlab import papers
from kvlab.inputs.models.catalogue import DEFAULT
from kvlab.methods import registry
from kvlab.papers.claim import Claim
from kvlab.workbench.report import snapshots, stability
from kvlab.workbench.report.ledger import Entry
from kvlab.workbench.report.ledger_models import subjects
from kvlab.workbench.report.model_agreement import across

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
# What the public names take and give, what a policy or a task of one's own meets, and what else people import by name.
NAMES = {
    "What these take and give": [
        *("replays.replay.Replay", "replays.results.Replays", "live.session.Session", "live.fidelity.Fidelity"),
        "live.fidelity.Fidelities",
        *("live.fidelity.Loops", "live.cache.LiveCache", "live.cache.Host", "inputs.corpus.Question"),
        *("render.explorer.explorer.Explorer", "render.explorer.query_view.Spot", "render.explorer.query_view.Look"),
        *("attribution.results.Attribution", "render.explorer.effects.Picture", "replays.gaps.gaps_closed"),
        *("workbench.store.retries.RetryingClient", "methods._base.indexer_reads.IndexerReads"),
        *("core.layout.Layout", "core.storage.Storage", "core.softmax.Softmax", "core.rotation.Rotation"),
    ],
    "What a policy sees": [
        *(
            "methods._base.prompt.Prompt",
            "core.store.LayerStore",
            "methods._base.clock.Step",
            "methods._base.needs.Needs",
            "methods._base.needs.PseudoTokens",
            "methods._base.needs.Draft",
        ),
        *("methods._base.repeating.Repetition", "methods._base.repeating.Part", "methods._base.prompt.Asks"),
        *("methods._base.policy.Budget", "methods.Paper", "core.ranking.top_positions"),
    ],
    "Tasks, and what they are made of": [
        *("tasks.task", "tasks.tasks", "tasks.base.Task", "tasks.base.Example", "tasks.base.Turn"),
    ],
    "Evaluations": [
        *(f"evaluation.{name}" for name in ("plan", "run", "read", "table", "summary", "metrics")),
        *(f"evaluation.{name}" for name in ("answers", "answered", "feed")),
        *("evaluation.planning.Plan", "evaluation.planning.System", "evaluation.planning.CompressAt"),
        *("evaluation.records.Answer", "evaluation.answering.Fed", "evaluation.running.Advance"),
    ],
    "The lm-evaluation-harness": ["harness.model.KvlabLM"],
    "Texts and intervals": ["inputs.corpus.documents_between", "lib.intervals.interval"],
    "Papers and their figures": [f"papers.{name}" for name in ("papers", "claims", "quoted", "figures", "figure")],
    "Experiments": [
        *(f"workbench.experiments.{name}" for name in ("names", "longest_first", "load", "jobs")),
        *(f"workbench.experiments.experiment.{name}" for name in ("Experiment", "Profile", "Job")),
    ],
}
# A function returns these; nobody else makes one, so that the page leaves out how.
RETURNED = {"attribution.results.Attribution", "methods._base.indexer_reads.IndexerReads"}
OPTIONS = "kvlab.traces.recording.Options"
ALIASES = [
    *("kvlab.traces.recording.OnePrompt", "kvlab.traces.recording.SeveralPrompts", "kvlab.replays.run.OneTrace"),
    *("kvlab.replays.run.SeveralTraces", "kvlab.replays.run.SeveralPolicies", "kvlab.replays.run.SeveralStorages"),
]
# What people use besides.
MODULES = {
    "Findings and their words": ["kvlab.analyses.findings", "kvlab.render.sentences", "kvlab.render.phrases"],
    "Figures": ["kvlab.render.figures.plots"],
    "Measures": ["kvlab.instruments.measures"],
    "Attention": ["kvlab.core.attention"],
    "Probes": ["kvlab.instruments.probes", "kvlab.instruments.records"],
    "Claims": [f"kvlab.papers.{name}" for name in ("claim", "number_tests", "tests", "uncertainty", "verdict")],
    "Runs": ["kvlab.workbench.store.tracking"],
}


def stage(source: Path) -> None:
    """Everything that Sphinx reads, in a folder of its own."""
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    for page in PAGES:
        shutil.copy(ROOT / page, source)
    shutil.copytree(ROOT / "docs", source / "docs", ignore=shutil.ignore_patterns("site", "*.csv"))
    shutil.copytree(ROOT / "notebooks", source / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for file in HERE.glob("*.md"):
        shutil.copy(file, source)
    shutil.copy(HERE / "conf.py", source)
    shutil.copytree(HERE / "static", source / "static")
    (source / "README.md").write_text(_licence_inside(source / "README.md"), encoding="utf-8")
    _join(source / "docs" / "policies.md", registry())
    _join(source / "docs" / "disagreements.md", [paper.name for paper in papers.papers()])
    (source / "notebooks.md").write_text(_notebooks(), encoding="utf-8")
    (source / "gallery.md").write_text(_gallery(source / "gallery"), encoding="utf-8")
    (source / "ledger.md").write_text(_ledger(), encoding="utf-8")
    (source / "reference.md").write_text(_reference(), encoding="utf-8")


def _join(page: Path, names: Iterable[str]) -> None:
    """Put the pages of the folder that has a page's name under it, in the order of `names`."""
    held = "\n".join(f"{page.stem}/{name}" for name in names if (page.with_suffix("") / f"{name}.md").is_file())
    with page.open("a", encoding="utf-8") as file:
        file.write(f"\n```{{toctree}}\n:hidden:\n\n{held}\n```\n")


def _licence_inside(page: Path) -> str:
    """A page whose links to files that are no pages are plain words."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)[^)#]*(?<!\.md)(?<!\.png)(?<!\.svg)\)", r"\1", text)


def _notebooks() -> str:
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    return (
        "# Notebooks\n\n```{toctree}\n:maxdepth: 1\n\n" + "\n".join(f"notebooks/{name}" for name in names) + "\n```\n"
    )


def _gallery(folder: Path) -> str:
    """Every figure of the notebooks as a card that leads to its notebook, under the heading that it stands under."""
    folder.mkdir()
    parts = ["# Gallery", "", "Every figure of the notebooks. A card leads to the notebook that drew it.", ""]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cards, heading, title = [], "", path.stem
        for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "markdown":
                headings = re.findall(r"^#+ (.+)$", cell.source, re.MULTILINE)
                title = headings[0] if headings and not heading else title
                heading = headings[-1] if headings else heading
                continue
            for output in cell.get("outputs", []):
                if image := output.get("data", {}).get("image/png"):
                    name = f"{path.stem}-{number}.png"
                    (folder / name).write_bytes(base64.b64decode(image))
                    cards.append(
                        f":::{{grid-item-card}} {heading}\n:img-top: gallery/{name}\n:img-alt: {heading}\n"
                        f":link: notebooks/{path.stem}\n:link-type: doc\n:::"
                    )
        if cards:
            parts += [f"## {title}", "", "::::{grid} 1 2 2 2", ":gutter: 2", "", *cards, "::::", ""]
    return "\n".join(parts)


def _ledger() -> str:
    """All claims in one table with the verdicts of the kept ledgers, narrowed by paper, verdict, kind and words."""
    claims = papers.claims()
    labels = {paper.name: paper.label for paper in papers.papers()}
    every = snapshots.kept(ROOT / "docs" / "ledger")  # the report's reader: it knows the profile that models share
    sizes = subjects(every)
    models = {size.label: size.name for size in sizes}
    states = {
        model: {entry.claim.id: entry for entry in every if entry.model == models[model]}
        for model in sorted(models, key=_default_first)
    }
    kinds = dict.fromkeys(claim.kind for claim in claims)

    def options(values: list[tuple[str, str]]) -> str:
        return "".join(f'<option value="{html.escape(value)}">{html.escape(shown)}</option>' for value, shown in values)

    steady = stability.read(ROOT / "docs" / "ledger")
    steadiness = stability.of_entries(steady)

    def flips(entry: Entry) -> str:
        one = steadiness(entry)
        return (
            f'<br><em title="{html.escape(one.sentence_of(entry.claim.id))}">flips {one.count}</em>'
            if one and one.flips
            else ""
        )

    def verdicts(number: int, model: str) -> str:
        found = dict.fromkeys(entry.state for entry in states[model].values())
        choices = options([("", "all"), *((state, state) for state in found)])
        return (
            f"<label>Verdict on {html.escape(model)} "
            f'<select data-filter="verdict{number}" name="{html.escape(model)}">{choices}</select></label>'
        )

    def cell(model: str, entry: Entry) -> str:
        verdict = entry.verdict
        ends = "" if verdict.low is None or verdict.high is None else f" ({verdict.low:.3g} to {verdict.high:.3g})"
        value = "" if verdict.value is None else f"<br>{verdict.value:.3g}{ends}"
        many = (
            f'<br><em title="q = {entry.q:.2g} among all directions tested">many claims</em>' if entry.by_chance else ""
        )
        genres = "<br><em>undecided when clustered by genre</em>" if verdict.open_by_genre else ""
        said = f"<b>{html.escape(entry.state)}</b>{value}{flips(entry)}{many}{genres}"
        if verdict.why:
            said = f"<details><summary>{said}</summary><small>{html.escape(verdict.why)}</small></details>"
        return f'<td data-head="{html.escape(model)}">{said}</td>'

    def marks(claim: Claim) -> str:
        found = {f"verdict{number}": states[model][claim.id].state for number, model in enumerate(states)}
        held = {"paper": claim.paper, "kind": claim.kind} | found
        return " ".join(f'data-{name}="{html.escape(value)}"' for name, value in held.items())

    rows = "\n".join(
        f'<tr id="{html.escape(claim.id)}" {marks(claim)}>'
        f"<td>{html.escape(claim.summary)} <small>({html.escape(claim.where)})<br>"
        f'<a href="#{html.escape(claim.id)}"><code>{html.escape(claim.id)}</code></a></small></td>'
        f'<td data-head="paper">{"" if claim.paper_value is None else f"{claim.paper_value:g}"} '
        f"{html.escape(claim.unit)}</td>"
        f"{''.join(cell(model, states[model][claim.id]) for model in states)}"
        f'<td data-head="notebook">{_notebook_link(claim.experiment)}</td></tr>'
        for claim in claims
    )
    flipping = "".join(f"\n{sentence}\n" for sentence in stability.sentences(steady))
    agreement = across(every, sizes)
    turning = "".join(
        f"<details><summary><b>{len(found)}</b> {kind}</summary><ul>"
        f"{''.join(f'<li>{html.escape(str(finding))}</li>' for finding in found)}</ul></details>"
        for kind, found in agreement.items()
    )
    heads = "".join(f"<th>{html.escape(model)}</th>" for model in states)
    return f"""# Ledger

Every claim of the five papers that kvlab knows: what it says, the number that the paper prints, and what was measured
here, with 95 % intervals and the verdict. Open a verdict to read which comparison was made. These are the kept runs
of `docs/ledger/`; `kvlab reproduce` gives each claim its verdict on your machine, and
[Claims and verdicts](docs/claims.md) says by what rules. The address holds what you narrow the table to, and a claim's
id leads to its row: both can be linked.
{flipping}
Of the {sum(map(len, agreement.values()))} findings that several models measured:

{turning}

<div class="filters">
<label>Paper <select data-filter="paper" name="paper">{options([("", "all"), *labels.items()])}</select></label>
{"".join(verdicts(number, model) for number, model in enumerate(states))}
<label>Kind <select data-filter="kind" name="kind">{options([("", "all"), *zip(kinds, kinds)])}</select></label>
<label>Words <input data-filter="words" name="words" type="search" placeholder="snapkv recall"></label>
</div>
<p id="count"></p>
<table id="ledger-of-claims"><thead><tr>
<th>It says</th><th>Paper</th>{heads}<th>Notebook</th>
</tr></thead><tbody>
{rows}
</tbody></table>
"""


def _default_first(model: str) -> tuple[bool, str]:
    return model != DEFAULT, model


def _notebook_link(experiment: str | None) -> str:
    path = ROOT / "notebooks" / f"{experiment}.ipynb"
    if not experiment or not path.is_file():
        return "none"
    return f'<a href="notebooks/{experiment}.html">{experiment.replace("_", "_<wbr>")}</a>'


def _reference() -> str:
    """Every name that `kvlab` hands on, the names that people use besides, then whole modules."""
    public = [name for name in kvlab.__all__ if not name.startswith("_")]
    parts = ["# Reference", "", "## kvlab", ""]
    for name in sorted(public, key=str.lower):
        parts += _explained(f"kvlab.{name}")
    parts += ["```{eval-rst}", f".. autoclass:: {OPTIONS}", "   :members:", "   :undoc-members:", "```", ""]
    for alias in ALIASES:
        parts += _explained(alias)
    for title, names in NAMES.items():
        parts += [f"## {title}", ""]
        for name in names:
            parts += _explained(f"kvlab.{name}")
    for title, modules in MODULES.items():
        parts += [f"## {title}", ""]
        for module in modules:
            parts += ["```{eval-rst}", f".. automodule:: {module}", "   :members:", "", "```", ""]
    return "\n".join(parts)


def _explained(name: str) -> list[str]:
    """A public name, as Sphinx explains what it is from its docstring."""
    home, _, last = name.rpartition(".")
    made = getattr(importlib.import_module(home), last)
    if isinstance(made, type):
        directive, options = ("autoexception", "") if issubclass(made, Exception) else ("autoclass", "   :members:\n")
    elif inspect.isfunction(made):
        directive, options = "autofunction", ""
    else:
        directive, options = "autodata", "   :no-value:\n"
    signature = "()" if name.removeprefix("kvlab.") in RETURNED else ""
    return ["```{eval-rst}", f".. {directive}:: {name}{signature}", options, "```", ""]


def main(out: Path = ROOT / "build" / "docs") -> None:
    """Build the site into OUT/html. A warning is an error.

    python docs/site/build.py
    """
    from sphinx.cmd.build import main as sphinx

    source = out / "source"
    stage(source)
    # -E: every page is read anew. A failed build remembers the pages, and the next would pass their warnings over.
    options = ["-b", "html", "-W", "--keep-going", "-q", "-E", "-d", str(out / "doctrees")]
    code = sphinx([*options, str(source), str(out / "html")])
    if code == 0:
        typer.echo(f"the site is in {out / 'html'}; open {out / 'html' / 'index.html'}")
    sys.exit(code)


if __name__ == "__main__":
    typer.run(main)
