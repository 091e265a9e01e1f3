"""Names in texts and code lead to what is there: modules that are started or imported by name, and the files that
content keys and code hashes are taken over.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.paths import ROOT

from kvlab import papers
from kvlab.methods._base import lookup
from kvlab.traces import shared
from kvlab.workbench import project
from kvlab.workbench.report import page

PACKAGE = ROOT / "kvlab"


def written() -> list[Path]:
    """The texts in which a module may be named: code, notebooks, documents, and what starts programs."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    found = [ROOT / name for name in done.stdout.splitlines()]
    return [path for path in found if path.suffix in (".py", ".ipynb", ".md", ".toml") or path.name == "Makefile"]


def there(name: str) -> bool:
    """Whether a dotted name is a module, or what can be had from one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            named_object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(named_object, part):
                return False
            named_object = getattr(named_object, part)
        return True
    return False


def test_imports_in_texts_and_in_programs_within_strings_lead_somewhere():
    named = set()
    for path in written():
        text = path.read_text(encoding="utf-8")
        for module, things in re.findall(r"from (kvlab(?:\.[\w.]+)?) import ([\w, ]+)", text):
            own = [imported.split()[0] for imported in things.split(",") if imported.strip()]
            named |= {(f"{module}.{imported}", path.name) for imported in own}
    assert len(named) > 100
    assert not [(name, file) for name, file in sorted(named) if not there(name)]


def test_modules_named_by_strings_are_there():
    """What a test replaces, loaders of templates, modules that a process starts.

    Names with two dots or more are looked at: the tags of runs, such as `kvlab.kind`, have one.
    """
    named = set()
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_name = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_name and re.fullmatch(r"kvlab(\.\w+){2,}", node.value):
                named.add((node.value, path.name))
    assert "kvlab.workbench.jobs.worker" in {name for name, _ in named}
    assert not [(name, file) for name, file in sorted(named) if not there(name)]


def test_commands_start_modules_that_are_there():
    """`python -m MODULE`, in lists of words and in texts; the worker's must also run as a program."""
    started = set()
    for path in written():
        text = path.read_text(encoding="utf-8")
        started |= set(re.findall(r"""-m["'`,\s]+(kvlab[\w.]*)""", text))
    assert {"kvlab", "kvlab.workbench.jobs.worker", "kvlab.workbench.lab", "kvlab.bench.timing"} <= started
    for name in started:
        spec = importlib.util.find_spec(f"{name}.__main__" if name == "kvlab" else name)
        assert spec is not None and spec.origin is not None, name
        assert '__name__ == "__main__"' in Path(spec.origin).read_text() or name == "kvlab", name


def test_files_that_keys_are_taken_over_are_there():
    for name in (*shared.CODE, *project.MEASURING, *project.PRESENTING):
        assert (PACKAGE / name).exists(), name
    assert len(set(shared.CODE)) == len(shared.CODE)
    assert (
        list(lookup.SHIPPED.glob("*.json"))
        and list(lookup.SHIPPED_TABLES.glob("*.json"))
        and lookup.PUBLISHED_TABLES.exists()
    )
    assert (Path(page.__file__).parent / "templates" / "page.html.j2").is_file()
    assert all(paper.claims for paper in papers.papers()) and list((PACKAGE / "papers" / "figures").glob("*.csv"))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package's code in a folder of its own, where it may be changed."""
    folder = tmp_path_factory.mktemp("copy") / "kvlab"
    shutil.copytree(
        PACKAGE,
        folder,
        ignore=lambda _, names: [
            n for n in names if n == "__pycache__" or ("." in n[1:] and not n.endswith((".py", ".yaml")))
        ],
    )
    return folder


def changes(monkeypatch, module, digest, copy, name):
    """Whether another line in a file of the copy changes a digest that a module takes of its own package."""
    own = Path(module.__file__).relative_to(PACKAGE)
    with monkeypatch.context() as patch:
        patch.setattr(module, "__file__", str(copy / own))
        before = digest()
        path = copy / name
        text = path.read_bytes()
        path.write_bytes(text + b"\n# another line\n")
        try:
            return digest() != before
        finally:
            path.write_bytes(text)
            assert digest() == before


@pytest.mark.parametrize("name", shared.CODE)
def test_a_trace_is_captured_again_after_a_change_in_what_makes_it(name, copy, monkeypatch):
    assert changes(monkeypatch, shared, shared._code.__wrapped__, copy, name)


@pytest.mark.parametrize("name", ["methods/snapkv.py", "workbench/report/page.py", "cli.py"])
def test_a_trace_stays_after_other_changes(name, copy, monkeypatch):
    assert not changes(monkeypatch, shared, shared._code.__wrapped__, copy, name)


SHOWING = [
    *project.PRESENTING,
    "cli.py",
    "commands/experiments.py",
    "papers/verdict.py",
    "render/explorer/explorer.py",
    "render/figures/plots.py",
    "render/phrases.py",
    "papers/rocketkv.yaml",
    "render/sentences.py",
    "workbench/jobs/progress.py",
    "workbench/report/page.py",
]


@pytest.mark.parametrize("name", SHOWING)
def test_a_finished_job_stays_after_a_change_in_what_only_shows_results(name, copy, monkeypatch):
    assert not changes(monkeypatch, project, project.code_hash.__wrapped__, copy, name)


def test_nothing_that_shows_results_is_hashed():
    files = {path.relative_to(PACKAGE).as_posix() for path in project.measuring_files(PACKAGE)}
    shown = ("render/", "commands/", "workbench/report/", "workbench/workspace/")
    assert len(files) > 200 and not {name for name in files if name.startswith(shown)}


@pytest.mark.parametrize(
    "name",
    [
        "analyses/first_look.py",
        "core/attention.py",
        "core/store.py",
        "instruments/measures.py",
        "methods/_base/clock.py",
        "methods/snapkv.py",
        "replays/run.py",
        "workbench/jobs/worker.py",
        "workbench/store/tracking.py",
    ],
)
def test_a_finished_job_runs_again_after_a_change_in_what_makes_numbers(name, copy, monkeypatch):
    assert changes(monkeypatch, project, project.code_hash.__wrapped__, copy, name)
