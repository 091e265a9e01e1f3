"""What README, CONTRIBUTING, docs/ and docstrings show is there: files, commands, options, examples."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import shlex
import textwrap
from datetime import date
from pathlib import Path

import pytest
import torch
import typer
import yaml
from support import recorders
from support.commands import call
from support.paths import ROOT
from support.projects import blank_store
from support.texts import FERRY

import kvlab
from kvlab import cli, papers
from kvlab.inputs import models
from kvlab.inputs.models import loading
from kvlab.workbench import project
from kvlab.workbench.report import snapshots

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Made by `kvlab pages`.
METHODS = sorted((ROOT / "docs" / "policies").glob("*.md"))
DISAGREEMENTS = sorted((ROOT / "docs" / "disagreements").glob("*.md"))
COMMANDS = typer.main.get_command(cli.app).commands


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


# What the first line of an example says that needs the names of the one above it.
GOES_ON = "# goes on from "


def examples(page: Path) -> list[str]:
    """The Python examples of a page, those within lists too, each with those above it that it goes on from."""
    found: list[str] = []
    for block in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        block = textwrap.dedent(block)
        if block.startswith(GOES_ON):
            found[-1] += block
        else:
            found.append(block)
    return found


def lines(page: Path, first: str) -> list[list[str]]:
    """The command lines of a page that begin with a word, in a block or alone between backticks, as lists of words."""
    text = page.read_text(encoding="utf-8")
    shown = [line for block in blocks(page, "") for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", text)
    return [shlex.split(line, comments=True) for line in shown if line.startswith(f"{first} ")]


@pytest.mark.parametrize("page", PAGES + METHODS + DISAGREEMENTS, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (page.parent / target).is_file(), target


def test_the_citation_and_the_pages_name_the_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == kvlab.__version__ == project.version()
    assert date.fromisoformat(cited["date-released"]) <= date.today()
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert {version for text in texts for version in re.findall(r"kvlab-([\d.]+)-py3", text)} == {kvlab.__version__}


def test_disagreements_name_claims_that_there_are():
    """Each paper has its page, which names claims of that paper."""
    known = {claim.id for claim in papers.claims()}
    assert {page.stem for page in DISAGREEMENTS} == {paper.name for paper in papers.papers()}
    for page in DISAGREEMENTS:
        named = re.findall(rf"`({page.stem}\.[\w.]+)`", page.read_text(encoding="utf-8"))
        assert named and set(named) <= known, (page.name, set(named) - known)


def test_readme_and_the_page_of_disagreements_count_and_list_every_paper():
    counts = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    known = papers.papers()
    for page in (ROOT / "README.md", ROOT / "docs" / "disagreements.md"):
        said = {
            found[1] for found in re.finditer(rf"\b({'|'.join(counts)}) papers\b", page.read_text(encoding="utf-8"))
        }
        assert said == {counts[len(known)]}, page
    top = (ROOT / "docs" / "disagreements.md").read_text(encoding="utf-8").partition("`make results`")[0]
    assert set(re.findall(r"\(disagreements/(\w+)\.md\)", top)) == {paper.name for paper in known}


@pytest.mark.parametrize("page", DISAGREEMENTS, ids=lambda page: page.stem)
def test_disagreements_explain_everything_that_fails(page):
    """Each finding, and each claim that is none, on the default model by the most thorough profile; `NAME*` stands for
    all claims that begin so.
    """
    named = re.findall(rf"`({page.stem}\.[\w.]+\*?)`", page.read_text(encoding="utf-8"))
    starts = tuple(name.removesuffix("*") for name in named if name.endswith("*"))
    failing = [
        line.claim
        for line in snapshots.read(ROOT / "docs" / "ledger" / "smollm2-135m.csv")
        if line.claim.paper == page.stem and line.verdict.verdict == "fails"
    ]
    told = {claim.fact for claim in failing if claim.id in named or claim.id.startswith(starts or "?")}
    assert {claim.fact for claim in failing} == told


@pytest.mark.parametrize("page", PAGES + METHODS + DISAGREEMENTS, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page):
    for _, name, *words in lines(page, "kvlab"):
        assert name in COMMANDS, name
        if words and not words[-1].startswith("--"):  # `kvlab compile --from` names an option, and is no command line
            COMMANDS[name].make_context(name, words)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {words[1] for words in lines(page, "make")} <= set(targets)
    for words in lines(page, "python"):
        assert (ROOT / words[1]).is_file(), words


def test_presses_lead_to_policies_that_there_are():
    page = (ROOT / "docs" / "kvpress.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", page, re.MULTILINE)[1:]
    presses = [name for press, _ in rows for name in re.findall(r"`(\w+)`", press)]
    assert len(presses) == len(set(presses)) == int(re.search(r"has (\d+) classes", page)[1])
    named = {name for _, here in rows for name in re.findall(r"`([a-z_]+)`", here)}
    assert named - {"budget"} <= set(kvlab.policies())


def test_policies_and_experiments_are_those_that_there_are():
    table = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[`(\w+)`\]\(policies/\1\.md\) \|", table, re.MULTILINE)
    missing = [name for name in kvlab.policies() if name not in rows]
    assert not missing, f"docs/policies.md has no row for {', '.join(missing)}"
    assert rows == kvlab.policies()
    for page in PAGES:
        for _, name, *words in lines(page, "kvlab"):
            if name == "run" and words and words[0] != "NAME":
                assert (ROOT / "experiments" / f"{words[0]}.yaml").is_file(), words


def test_every_measure_is_worked_out(capsys):
    page = (ROOT / "docs" / "measures.md").read_text(encoding="utf-8")
    _, listed, _ = call(capsys, "list", "measures", "--json")
    named = {each["name"] for each in json.loads(listed)}
    assert "mass_lost" in named and not [name for name in named if f"measures.{name}(" not in page]


@pytest.mark.parametrize("module", ["kvlab.errors", "kvlab.methods"])
def test_examples_in_docstrings_say_what_comes_out(module):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted and not found.failed


def test_the_policy_of_ones_own_works_as_shown():
    example = blocks(ROOT / "docs" / "write_a_policy.md", "python")[0]
    shown: dict = {}
    exec(compile(example, "write_a_policy.md", "exec", dont_inherit=True), shown)
    lm = kvlab.random_lm("tiny-llama-gqa")
    ids = torch.arange(3, 43)
    replayed = kvlab.replay(kvlab.capture(lm, ids, new_tokens=3, pseudo=()), shown["Ends"](budget=10))
    assert replayed.kept(0).tolist() == [[0, 1, 2, 3, 4, 35, 36, 37, 38, 39]] * len(replayed.kept(0))
    with kvlab.compress(lm.model, shown["Ends"](budget=10)) as session:
        lm.model.generate(ids[None], max_new_tokens=2, do_sample=False)
    assert session.kept(0)[0].tolist()[:10] == replayed.kept(0)[0].tolist()


def test_the_policy_that_evicts_while_decoding_keeps_what_plain_loops_keep():
    (example,) = (text for text in examples(ROOT / "docs" / "what_a_policy_sees.md") if "class Fading" in text)
    shown: dict = {}
    exec(compile(example.partition("\nlm = ")[0], "what_a_policy_sees.md", "exec", dont_inherit=True), shown)
    trace = kvlab.capture(kvlab.random_lm("tiny-llama-gqa"), torch.arange(3, 43), new_tokens=6, pseudo=())
    replayed = kvlab.replay(trace, shown["Fading"](budget=10))
    group = trace.heads // trace.kv_heads

    def attention(position: int, kept: list[int], head: int) -> list[float]:
        """Of a token's query of layer 0 on these positions, summed over the group of a KV head."""
        queries = trace.queries[0, head * group : (head + 1) * group, position - trace.length]
        logits = queries @ trace.keys[0, head, kept].T / queries.shape[-1] ** 0.5
        return logits.softmax(-1).sum(0).tolist()

    for head in range(trace.kv_heads):
        prompt = list(range(40))
        scores = dict(zip(prompt, attention(39, prompt, head), strict=True))
        kept = sorted(sorted(prompt, key=lambda position: -scores[position])[:10])
        for step in range(6):
            assert replayed.stored(0, step)[head].tolist() == kept
            kept = [*kept, 40 + step]
            found = dict(zip(kept, attention(40 + step, kept, head), strict=True))
            scores = {position: 0.9 * scores.get(position, 0) + found[position] for position in kept}
            kept.remove(min(kept[:-1], key=lambda position: scores[position]))


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A working directory with what the examples name, and a store of its own."""
    import matplotlib

    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "folder").symlink_to(models.pull(models.DEFAULT), target_is_directory=True)
    (tmp_path / "notes.txt").write_text(FERRY, encoding="utf-8")
    (tmp_path / "mlflow.db").write_bytes(blank_store())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    with matplotlib.rc_context({"backend": "agg"}):
        yield tmp_path


def run(page: Path, example: str) -> dict:
    names: dict = {"__name__": "__main__"}
    exec(compile(example, page.name, "exec", dont_inherit=True), names)
    return names


def test_the_lines_of_the_readme_print_what_stands_below_them(desk, monkeypatch, capsys):
    """On the real model. Numbers of other processors round otherwise."""
    monkeypatch.setenv("COLUMNS", "80")
    page = ROOT / "README.md"
    (example,) = examples(page)
    assert len(example.split("\n\n")[1].splitlines()) < 10
    run(page, example)
    printed = capsys.readouterr().out.splitlines()
    shown = re.search(r"```python\n.*?```\n\n```\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[1]
    for ours, theirs in zip(printed, shown.splitlines(), strict=True):
        for word, expected in zip(ours.split(), theirs.split(), strict=True):
            number = re.fullmatch(r"\d+\.\d+", expected)
            assert float(word) == pytest.approx(float(expected), abs=0.005) if number else word == expected


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_the_examples_of_other_pages_run(page, desk, monkeypatch):
    """Each alone, on a small random model in the place of the named one: what they would find is not looked at."""

    def small(name: str, *_, **__) -> models.LM:
        return kvlab.random_lm(
            "tiny-llama-gqa", tokenizer=name, max_position_embeddings=4096, dtype="float32", device="cpu"
        )

    # The name is kept wherever it was first asked for.
    for holder in (kvlab, models, loading):
        monkeypatch.setattr(holder, "load", small)
    recorders.install(monkeypatch, lambda: small(models.DEFAULT))
    for example in examples(page):
        run(page, example)
