"""A page for each method, in Markdown with a picture: made of its docstring and of what `portraits` measures.

All is measured before the first file is written, and every file appears under its name only once it is whole.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvlab.analyses import portraits
from kvlab.analyses.portraits import COSTS, MEASURES, Portrait, Settings
from kvlab.errors import KvlabError
from kvlab.lib.files import replacing
from kvlab.methods import Paper, Policy, has_budget, policies, registry, unknown
from kvlab.render.phrases import plural
from kvlab.version import __version__

if TYPE_CHECKING:
    import pandas as pd

    from kvlab.inputs.models import LM

FIGURES = "figures"
SENTENCES = 3
# A sentence ends at a full stop between a letter and a capital, a bracket or code.
_END = re.compile(r"(?<=[^.\s][.!?])\s+(?=[A-Z(`\"])")
# The text before the first colon; the title of a paper is quoted, and may have a colon.
_PAPER = re.compile(r'((?:"[^"]*"|[^":])*): ')
_MIB = 2**20


@dataclass(frozen=True)
class PolicyDocstring:
    """The parts of a policy's docstring.

    Attributes:
        paper: the reference, or that there is none.
        idea: the method in three sentences or more.
        cost: the cost in addition to the attention.
        parameters: names with commas between them -> what they mean.
    """

    paper: str
    idea: str
    cost: str
    parameters: dict[str, str]

    @classmethod
    def of(cls, method: type[Policy]) -> PolicyDocstring:
        """Read a docstring: a sentence; a paragraph "PAPER: how it works. Cost: what it costs."; "Parameters:".

        Raises:
            KvlabError: it has another form, so that a page cannot be made of it.
        """
        first, *others = (inspect.getdoc(method) or "").split("\n\n")
        body, _, cost = " ".join(others[0].split() if others else ()).partition(" Cost: ")
        paper = _PAPER.match(body)
        sentences = [_plain(first), *_END.split(body[paper.end() :] if paper else body)]
        if paper is None or not cost or len(sentences) < SENTENCES:
            raise KvlabError(
                f"the docstring of {method.name} must name the paper, give the idea in three sentences, and the cost: "
                "'Keeps something.\\n\\nPAPER: how it works. A consequence. Cost: time and memory.'"
            )
        idea = " ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences)
        listed = next((part for part in others if part.startswith("Parameters:\n")), "")
        entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
        return cls(paper[1], idea, cost, {names: _plain(meaning) for names, meaning in entries})


def _plain(text: str) -> str:
    return " ".join(text.split())


def defaults(method: type[Policy], names: str) -> str:
    """The defaults of these parameters, with commas between them; a dash for one that must be given."""
    fields = [method.model_fields[name.strip()] for name in names.split(",")]
    return ", ".join("–" if field.is_required() else f"`{field.default!r}`" for field in fields)


@dataclass(frozen=True, eq=False)
class Found:
    """The measurements for all pages.

    Attributes:
        model: its signature.
        settings: what was measured.
        portraits: by policy.
        qualities, costs: tables, as `analyses.portraits` gives them.
    """

    model: str
    settings: Settings
    portraits: dict[str, Portrait]
    qualities: pd.DataFrame
    costs: pd.DataFrame


def page(name: str, found: Found) -> str:
    """The page of a policy, in Markdown."""
    method, docstring = registry()[name], PolicyDocstring.of(registry()[name])
    settings = found.settings
    parameters = [
        f"| {', '.join(f'`{each.strip()}`' for each in names.split(','))} | {defaults(method, names)} | {meaning} |"
        for names, meaning in docstring.parameters.items()
    ]
    budget = f" --budget {settings.budget:g}" if has_budget(name) else ""
    documents = ", ".join(f"`{document}`" for document in settings.documents)
    others = _others(found.portraits[name].policy)
    rounds = "" if settings.repeats == Settings().repeats else f" --repeats {settings.repeats}"
    parts = [
        f"# {name}",
        f"Paper: {docstring.paper}." if docstring.paper != "Not from a paper" else f"{docstring.paper}.",
        *sources(method.paper),
        docstring.idea,
        _table("| parameter | default | |", parameters) if parameters else "It has no parameters.",
        *([f"Here it is measured with {others}."] if others else []),
        "## What it keeps",
        f"![What {name} keeps of one text, by layer and position]({FIGURES}/{name}.png)",
        _caption(found.portraits[name], settings),
        "## Cost",
        f"{docstring.cost[:1].upper()}{docstring.cost[1:]}",
        *_times(name, found, budget, others),
        f"## On {found.model.partition('@')[0]}",
        _table(
            "| budget | policy | recall | mass lost | output error | stored, MiB | read at a step, MiB |",
            _quality_rows(name, found),
        ),
        f"Means over {len(settings.documents)} documents ({documents}), of {settings.tokens:,} tokens with "
        f"{settings.new_tokens} greedy ones each, with 95 % intervals over documents. A budget is a share of "
        f"the prompt; bytes are means over steps.{_of_selection(method)}",
        f"Made by `kvlab pages --only {name}{rounds}` with {found.model} and kvlab {__version__}.",
    ]
    return "\n\n".join(parts) + "\n"


def sources(paper: Paper | None) -> list[str]:
    """The paragraph that links a paper and its authors' code; none without a paper."""
    if paper is None:
        return []
    title = paper.title if paper.url is None else f"[{paper.title}]({paper.url}) (arXiv {paper.arxiv})"
    return [f"{title}; [the authors' code]({paper.code})." if paper.code else f"{title}."]


def _others(method: Policy) -> str:
    """The parameters other than the budget that are not the defaults."""
    fields = type(method).model_fields
    changed = [(key, value) for key, value in method if key != "budget" and value != fields[key].default]
    return ", ".join(f"`{key}={value!r}`" for key, value in changed)


def _table(heading: str, rows: Sequence[str]) -> str:
    rule = "|" + "---|" * (heading.count("|") - 1)
    return "\n".join([heading, rule, *rows])


def _caption(portrait: Portrait, settings: Settings) -> str:
    """Describe the picture in words."""
    parts = [
        f"The start of `{portrait.document}` with a request to summarise it, {portrait.prompt:,} tokens.",
        "Above each map of tokens: its mean over layers. At its side: the mean number of tokens of a KV head, with a "
        "thin line from the smallest to the largest.",
    ]
    if portrait.read is not None:
        parts.append(f"Reads are means over {settings.new_tokens} decoding steps.")
    if portrait.merged is not None:
        parts.append("A merged entry is at the position of its first token.")
    return f"*{' '.join(parts)}*"


def _of_selection(method: type[Policy]) -> str:
    """The remark on a table in which a method's recall says little."""
    if method.kind != "selection":
        return ""
    return " Recall counts the entries stored at the end of the prompt; the mass lost counts what a selection misses."


def _times(name: str, found: Found, budget: str, others: str) -> list[str]:
    """The parts about time: what was measured, if anything was, and the command that measures it."""
    settings = found.settings
    bench = (
        f"`kvlab bench decode --policies {name}{budget} --contexts {settings.tokens} "
        f"--new-tokens {settings.new_tokens} --repeats {settings.repeats or Settings().repeats}` measures this method "
        f"alone{', with its defaults' if others else ''}."
    )
    if not settings.repeats:
        return [f"Times depend on the machine, and were not measured here. {bench}"]
    return [
        _table("| | against transformers' full cache | range |", _cost_rows(name, found)),
        f"Medians and extremes of {settings.repeats} {plural(settings.repeats, 'round')}, in turns with transformers' "
        f"own full cache. Prompt: {settings.tokens:,} tokens; decoding steps: {settings.new_tokens}"
        f"{f'; budget: {settings.budget:g}' if budget else ''}. The first token includes the prompt and its "
        f"compression. {bench}",
    ]


def _cost_rows(name: str, found: Found) -> list[str]:
    """A row for each of `COSTS`: the ratio and its range."""
    rows = found.costs[found.costs["policy"] == name].set_index("metric").to_dict("index")
    return [
        f"| {heading} | {rows[metric]['ratio']:.2f} | {rows[metric]['low']:.2f}-{rows[metric]['high']:.2f} |"
        for metric, heading in COSTS.items()
    ]


def _quality_rows(name: str, found: Found) -> list[str]:
    """At each budget a row for the policy, in bold, and for those to compare with; last those without a budget."""
    rows = []
    shown = list(dict.fromkeys([name, *portraits.REFERENCES]))
    by_budget: dict[tuple[str, float | None], pd.DataFrame] = {}
    for key, part in found.qualities.groupby(["policy", "budget"], dropna=False):
        policy, budget = cast("tuple[str, float]", key)
        by_budget[policy, None if budget != budget else budget] = part.set_index("measure")
    for budget in (*found.settings.budgets, None):
        for number, policy in enumerate(each for each in shown if (each, budget) in by_budget):
            part = by_budget[policy, budget]
            cells = [_cell(measure, part.loc[measure]) for measure in MEASURES]
            budget_text = "" if number else "none" if budget is None else f"{budget:g}"
            rows.append(f"| {budget_text} | {f'**{policy}**' if policy == name else policy} | {' | '.join(cells)} |")
    return rows


def _cell(measure: str, row: pd.Series) -> str:
    if measure.endswith("bytes"):
        return f"{row['value'] / _MIB:.1f}"
    return f"{row['value']:.3f} ({row['low']:.3f}-{row['high']:.3f})"


def named(names: Sequence[str]) -> list[str]:
    """The policies of these names, all of them if there are none. Raises KvlabError for one that does not exist."""
    for name in names:
        if name not in registry():
            raise KvlabError(unknown(name))
    return list(dict.fromkeys(names)) or policies()


def check_folder(out: Path) -> None:
    """Raise KvlabError if pages could not be written into `out`: a command calls this before its work."""
    if out.exists() and not out.is_dir():
        raise KvlabError(f"--out {out} is a file; name a folder for the pages")


def write(
    lm: LM,
    names: Sequence[str],
    out: Path,
    settings: Settings | None = None,
    advance: Callable[[str, int], None] = lambda *_: None,
) -> list[Path]:
    """Measure the policies and write a page and a picture of each; a page that was there is replaced.

    Args:
        names: policies, none for all.
        out: folder of the pages, made if it is not there; pictures lie in its folder `figures`.
        advance: called with the current work, and how much was done since (`portraits.work`).

    Returns:
        The pages.

    Raises:
        KvlabError: a policy that does not exist, an incomplete docstring, or a folder that cannot be written; no file
            has been changed then.
    """
    settings, names = settings or Settings(), named(names)
    check_folder(out)
    for name in names:
        PolicyDocstring.of(registry()[name])
    traces, shown = portraits.traces(lm, names, settings, advance), {}
    for name in names:
        shown[name] = portraits.portrait(
            traces[0], portraits.default_policy(lm, name, settings.budget), settings.documents[0]
        )
        advance(f"replaying {name}", portraits.REPLAY_WORK)
    qualities = portraits.qualities(lm, names, traces, settings, advance)
    costs = portraits.costs(lm, names, settings, advance)
    found = Found(lm.signature, settings, shown, qualities, costs)
    pages = {name: page(name, found) for name in names}
    pictures = _pictures(shown, advance)
    for name in names:
        with replacing(out / FIGURES / f"{name}.png") as part:
            part.write_bytes(pictures[name])
        with replacing(out / f"{name}.md") as part:
            part.write_text(pages[name], encoding="utf-8")
    return [out / f"{name}.md" for name in names]


def _pictures(shown: dict[str, Portrait], advance: Callable[[str, int], None]) -> dict[str, bytes]:
    """The pictures as PNG, by policy."""
    import matplotlib

    from kvlab.render.figures import plots
    from kvlab.render.figures import portraits as figures

    pictures = {}
    with matplotlib.rc_context():
        plots.style()
        for name, portrait in shown.items():
            pictures[name] = figures.png(figures.figure(portrait))
            advance(f"drawing {name}", portraits.DRAWING_WORK)
    return pictures
