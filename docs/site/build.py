"""Build the documentation's site: `make docs`. A warning of Sphinx fails it.

Readers of the repository find the pages in README.md, docs/ and notebooks/. The build copies them into one folder, so
that their links work. It adds pages made from data: the gallery, the ledger, the reference.
"""

from __future__ import annotations

import base64
import html
import importlib
import inspect
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import nbformat
import typer
import yaml

import kvlab
from kvlab import cli, papers
from kvlab.inputs.models.catalogue import DEFAULT, MODELS
from kvlab.methods import registry
from kvlab.papers.claim import Claim
from kvlab.workbench.report import snapshots, stability
from kvlab.workbench.report.ledger import Entry
from kvlab.workbench.report.ledger_models import subjects
from kvlab.workbench.report.model_agreement import across
from kvlab.workbench.report.paper_summary import quoted

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOORS = ("learn", "do", "look_up", "understand")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
# Arguments and results of the public names, objects that a policy or a task of one's own meets, and other imports.
NAMES = {
    "Arguments and results": [
        *("replays.replay.Replay", "replays.results.Replays", "live.session.Session", "live.fidelity.Fidelity"),
        "live.fidelity.Fidelities",
        *("live.fidelity.Loops", "live.cache.LiveCache", "live.cache.Host", "inputs.corpus.Question"),
        *("render.explorer.explorer.Explorer", "render.explorer.query_view.Spot", "render.explorer.query_view.Look"),
        *("attribution.results.Attribution", "render.explorer.effects.Picture", "replays.gaps.gaps_closed"),
        *("workbench.store.retries.RetryingClient", "methods._base.indexer_reads.IndexerReads"),
        *("core.layout.Layout", "core.storage.Storage", "core.softmax.Softmax", "core.rotation.Rotation"),
    ],
    "Seen by a policy": [
        *(
            "methods._base.prompt.Prompt",
            "core.store.LayerStore",
            "methods._base.clock.Step",
            "methods._base.needs.Needs",
            "methods._base.needs.PseudoTokens",
            "methods._base.needs.Draft",
        ),
        *("methods._base.repeating.Repetition", "methods._base.repeating.Part", "methods._base.prompt.Asks"),
        *("methods._base.policy.Budget", "methods.Paper", "methods.share_out"),
        *("core.ranking.top_positions", "core.ranking.with_last"),
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
    "Texts and intervals": [
        "inputs.corpus.documents_between",
        *(f"lib.intervals.{name}" for name in ("interval", "summarise", "bounded")),
    ],
    "A method to begin from": ["methods.snapkv.SnapKV"],
    "Functions for an analysis": [
        *("analyses.texts.common_traces", "analyses.texts.plain_name", "inputs.token_texts.token_texts"),
        *("analyses.why_it_fails.token_kinds.around", "analyses.why_it_fails.token_kinds.kinds"),
    ],
    "Comparison at equal bytes": [f"analyses.together.equal_bytes.{name}" for name in ("at_equal", "summary")],
    "Papers and their figures": [f"papers.{name}" for name in ("papers", "claims", "quoted", "figures", "figure")],
    "Experiments": [
        *(f"workbench.experiments.{name}" for name in ("names", "longest_first", "load", "jobs")),
        *(f"workbench.experiments.experiment.{name}" for name in ("Experiment", "Profile", "Job")),
    ],
}
# A function returns these; nobody else makes one, so that the page leaves out how.
RETURNED = {"attribution.results.Attribution", "methods._base.indexer_reads.IndexerReads"}
# The notebooks whose findings the start page shows: one of each paper, and one on tasks.
SIX = (
    *("dapq_position_vs_content", "morphkv_long_responses", "rocketkv_budgets", "zsmerge_error_curves"),
    *("compilerkv_budgets", "tasks_at_small_budgets"),
)
LONGEST_TEXT = 20_000  # of a page, for the search's excerpts: characters
LIST = ("| name | |", "|---|---|")
BAR = "\\|"  # within a table of Markdown
OPTIONS = ("kvlab.traces.recording.Options", "kvlab.inputs.models.loading.Placing")
ALIASES = [
    *("kvlab.traces.recording.OnePrompt", "kvlab.traces.recording.SeveralPrompts", "kvlab.replays.run.OneTrace"),
    *("kvlab.replays.run.SeveralTraces", "kvlab.replays.run.SeveralPolicies", "kvlab.replays.run.SeveralStorages"),
]
# Modules that people also use.
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
    (source / "commands.md").write_text(_commands(), encoding="utf-8")
    (source / "gallery.md").write_text(_gallery(source / "gallery"), encoding="utf-8")
    (source / "notebooks.md").write_text(_notebooks(source / "gallery"), encoding="utf-8")
    (source / "ledger.md").write_text(_ledger(), encoding="utf-8")
    _reference(source)
    _doors(source)
    index = (source / "index.md").read_text(encoding="utf-8")
    cards = "\n".join(_card(name, source / "gallery") for name in SIX)
    index = index.replace("<!-- findings -->", f"::::{{grid}} 1 2 2 3\n:gutter: 2\n\n{cards}\n::::")
    index = index.replace("<!-- live -->", _live(source / "static"))
    (source / "index.md").write_text(index, encoding="utf-8")


def _live(static: Path) -> str:
    """A page of the explorer in a frame, for screens wide enough. Empty where the default model has not been pulled."""
    if not MODELS[DEFAULT].folder.is_dir():
        return ""
    lm = kvlab.load(DEFAULT, device="cpu")
    trace = kvlab.capture(lm, kvlab.document("sotu/1962").window(lm, 600), new_tokens=8, policies=["dapq"])
    explorer = kvlab.explore(trace, "snapkv", "dapq", budget=64)
    explorer.save(static / "explorer.html", policies=["snapkv", "dapq", "streamingllm"], budgets=[64])
    return '<iframe class="live" src="_static/explorer.html" title="The explorer, live" loading="lazy"></iframe>'


def _doors(source: Path) -> None:
    """Make the pages in each door's table its navigation. A page without a door joins the last table."""
    named = set()
    for door in DOORS:
        page = source / f"{door}.md"
        text = page.read_text(encoding="utf-8")
        if door == DOORS[-1]:
            for path in sorted((source / "docs").glob("*.md")):
                if path.stem not in named and f"](docs/{path.name})" not in text:
                    title, opening = path.read_text(encoding="utf-8").split("\n\n")[:2]
                    first = " ".join(opening.split()).partition(". ")[0]
                    text += f"| [{title.removeprefix('# ')}](docs/{path.name}) | {first} |\n"
        found = re.findall(r"\[([^\]]+)\]\((\S+)\.md\)", text)
        named |= {Path(name).name for _, name in found}
        entries = "\n".join(f"{title} <{name}>" for title, name in found)
        page.write_text(f"{text}\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n", encoding="utf-8")


def _join(page: Path, names: Iterable[str]) -> None:
    """Put the pages of the folder that has a page's name under it, in the order of `names`."""
    held = "\n".join(f"{page.stem}/{name}" for name in names if (page.with_suffix("") / f"{name}.md").is_file())
    with page.open("a", encoding="utf-8") as file:
        file.write(f"\n```{{toctree}}\n:hidden:\n\n{held}\n```\n")


def _licence_inside(page: Path) -> str:
    """A page whose links to files that are no pages are plain words."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"\A# kvlab\n", "# README: kvlab on one page\n", text)  # the start page has the name alone
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)[^)#]*(?<!\.md)(?<!\.png)(?<!\.svg)\)", r"\1", text)


def _experiment(name: str) -> dict:
    """The experiment of a notebook: that of its name, without the number that some notebooks begin with."""
    stem = re.sub(r"^\d+_", "", name)
    return yaml.safe_load((ROOT / "experiments" / f"{stem}.yaml").read_text(encoding="utf-8"))


@cache
def _findings() -> dict[str, str]:
    """Experiment -> a sentence on its most quoted finding on the default model, as the kept ledger has it."""
    entries = snapshots.read(ROOT / "docs" / "ledger" / f"{DEFAULT}.csv")
    wanted = [name for paper in papers.papers() for name in paper.quoted]
    of_experiment: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.claim.kind == "finding" and entry.claim.experiment:
            of_experiment.setdefault(entry.claim.experiment, []).append(entry)
    found = {}
    for name, mine in of_experiment.items():
        facts = dict.fromkeys(entry.claim.fact[1] for entry in mine)
        order = [fact for fact in wanted if fact in facts] + [fact for fact in facts if fact not in wanted]
        if sentences := quoted(mine, DEFAULT, order):
            found[name] = sentences[0]
    return found


def _notebooks(gallery: Path) -> str:
    """Each notebook with its first figure, its finding by the kept ledger, and how long it runs."""
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    cards = "\n".join(_card(path.stem, gallery) for path in paths)
    names = "\n".join(f"notebooks/{path.stem}" for path in paths)
    return f"""# Notebooks

After this page you know what each notebook finds, and how long it runs.

A card shows a notebook's first figure, its most quoted finding, and the time of its quick profile on two cores.
Findings are of SmolLM2-135M, computed from the kept ledger. A notebook without judged claims names its subject.
`kvlab run NAME` runs one.

::::{{grid}} 1 2 2 3
:gutter: 2

{cards}
::::

```{{toctree}}
:hidden:

{names}
```
"""


def _title(path: Path) -> str:
    """The first heading of a notebook."""
    cells = nbformat.read(path, as_version=4).cells
    return next(found[1] for cell in cells if (found := re.search(r"^#+ (.+)$", cell.source, re.MULTILINE)))


def _card(name: str, gallery: Path) -> str:
    """A notebook as a card: its first figure, its finding or its subject, and its time."""
    experiment = _experiment(name)
    seconds = experiment["profiles"]["quick"]["seconds"]
    title = _title(ROOT / "notebooks" / f"{name}.ipynb")
    figures = sorted(gallery.glob(f"{name}-*.png"), key=lambda path: int(path.stem.rpartition("-")[2]))
    if not figures:
        sys.exit(f"notebooks/{name}.ipynb has no saved figure; run: make notebooks NOTEBOOKS=notebooks/{name}.ipynb")
    first = figures[0]
    words = _findings().get(name) or f"{re.split('[:;.]', experiment['description'])[0].strip()}."
    time = f"runs {seconds} s" if seconds < 100 else f"runs {seconds / 60:.0f} minutes"
    return (
        f":::{{grid-item-card}} {title}\n:img-top: gallery/{first.name}\n:img-alt: First figure of {title}\n"
        f":link: notebooks/{name}\n:link-type: doc\n:footer: {time}\n\n{words}\n:::"
    )


def _commands() -> str:
    """Each command with its arguments, options and examples, from its own help."""
    parts = ["# Commands", "", "After this page you know each command of `kvlab`, with its options and examples.", ""]
    group = typer.main.get_group(cli.app)
    shelves: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        context = command.make_context(name, [], parent=None, resilient_parsing=True)
        rows = [param.get_help_record(context) for param in command.get_params(context) if param.name != "help"]
        table = [f"| `{shown.replace('|', BAR)}` | {_plain(what)} |" for shown, what in filter(None, rows)]
        usage = " ".join(["kvlab", name, *command.collect_usage_pieces(context)])
        mine = [f"### kvlab {name}", "", _plain(inspect.cleandoc(command.help or "")), "", "```text", usage, "```", ""]
        mine += ["| argument or option | meaning |", "|---|---|", *table, ""] if table else []
        if command.epilog:
            mine += ["```text", textwrap.dedent(command.epilog.removeprefix("Examples:").strip("\n")), "```", ""]
        shelves.setdefault(getattr(command, "rich_help_panel", ""), []).extend(mine)
    for shelf, mine in shelves.items():
        parts += [f"## {shelf}", "", *mine]
    return "\n".join(parts)


def _plain(text: str) -> str:
    """Escape a text for Markdown, also in a cell of a table; code between backticks stays."""
    return re.sub(r"(`[^`]*`)|<", lambda found: found[1] or "&lt;", text).replace("|", BAR)


def _gallery(folder: Path) -> str:
    """Make a page with a card for every figure of the notebooks: its heading, and a link to its notebook."""
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
        return f'<td data-head="{html.escape(model)}" data-verdict="{html.escape(entry.state)}">{said}</td>'

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
    turn = (
        '<p class="turn"><button type="button" data-step="-1">Previous</button> <span></span> '
        '<button type="button" data-step="1">Next</button></p>'
    )
    heads = "".join(f"<th>{html.escape(model)}</th>" for model in states)
    return f"""# Ledger

After this page you know the verdict on any claim of the papers, and can link to it.

A row holds the claim, the paper's number, and our number on each model with its 95 % interval and verdict. Open a
verdict to read the comparison. The numbers are the kept runs of `docs/ledger/`. `kvlab reproduce` measures the same on
your machine. [Claims and verdicts](docs/claims.md) has the rules. The address of this page holds your filters. A
claim's id leads to its row.
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
{turn}
<table id="ledger-of-claims"><thead><tr>
<th>It says</th><th>Paper</th>{heads}<th>Notebook</th>
</tr></thead><tbody>
{rows}
</tbody></table>
{turn}
"""


def _default_first(model: str) -> tuple[bool, str]:
    return model != DEFAULT, model


def _notebook_link(experiment: str | None) -> str:
    path = ROOT / "notebooks" / f"{experiment}.ipynb"
    if not experiment or not path.is_file():
        return "none"
    return f'<a href="notebooks/{experiment}.html">{experiment.replace("_", "_<wbr>")}</a>'


def _reference(source: Path) -> None:
    """A page for each public name and for each module that people use whole, and a page that lists them."""
    folder = source / "reference"
    folder.mkdir()
    public = sorted((name for name in kvlab.__all__ if not name.startswith("_")), key=str.lower)
    shelves = {"kvlab": public, **NAMES}
    parts = ["# Python reference", "", "After this page you can find the page of any public name.", ""]
    for title, names in shelves.items():
        parts += [f"## {title}", "", *LIST]
        for name in names:
            parts.append(_listed(f"kvlab.{name}", folder, "\n".join(_explained(f"kvlab.{name}"))))
        parts.append("")
    parts += ["## Types in signatures", "", *LIST]
    for options in OPTIONS:
        members = ["   :members:", "   :undoc-members:", "```"]
        parts.append(_listed(options, folder, "\n".join(["```{eval-rst}", f".. autoclass:: {options}", *members])))
    parts += [_listed(alias, folder, "\n".join(_explained(alias))) for alias in ALIASES]
    parts += ["", "## Modules", "", *LIST]
    for title, modules in MODULES.items():
        for module in modules:
            text = "\n".join(["```{eval-rst}", f".. automodule:: {module}", "   :members:", "```"])
            parts.append(_listed(module, folder, text, title))
    pages = "\n".join(f"reference/{path.stem}" for path in sorted(folder.glob("*.md")))
    parts += ["", "```{toctree}", ":hidden:", "", pages, "```", ""]
    (source / "reference.md").write_text("\n".join(parts), encoding="utf-8")


def _listed(name: str, folder: Path, text: str, what: str = "") -> str:
    """Write the page of a name, and return its row in the list of all."""
    home, _, last = name.rpartition(".")
    # A function may have the name of a folder next to it, and an import of that name would find the folder first.
    made = getattr(importlib.import_module(home), last, None) or importlib.import_module(name)
    # Small letters alone would not tell `Policy` from `policy` on every disk.
    page = f"{name}-class" if isinstance(made, type) else name
    (folder / f"{page}.md").write_text(f"# {name}\n\n{text}\n", encoding="utf-8")
    documented = isinstance(made, type) or inspect.isroutine(made) or inspect.ismodule(made)
    first = (inspect.getdoc(made) or "").partition("\n\n")[0] if documented else ""
    return f"| [{name}](reference/{page}.md) | {what or _plain(' '.join(first.split()))} |"


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


def _excerpts(pages: Path) -> None:
    """Write the text of each page for the search's excerpts. A page opened from a file may not fetch other pages."""
    texts = {}
    for path in pages.rglob("*.html"):
        name = path.relative_to(pages).with_suffix("").as_posix()
        if name.split("/")[0] in ("_static", "_modules") or name in ("genindex", "py-modindex", "search"):
            continue
        article = path.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        body = re.sub(r"<(script|style|svg)\b.*?</\1>", " ", article, flags=re.DOTALL)
        plain = html.unescape(re.sub(r"<[^>]+>", " ", body.partition("</h1>")[2]))
        texts[name] = " ".join(plain.split())[:LONGEST_TEXT]
    said = json.dumps(texts, ensure_ascii=False)
    (pages / "_static" / "excerpts.js").write_text(f"window.kvlabTexts = {said};\n", encoding="utf-8")


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
        _excerpts(out / "html")
        typer.echo(f"the site is in {out / 'html'}; open {out / 'html' / 'index.html'}")
    sys.exit(code)


if __name__ == "__main__":
    typer.run(main)
