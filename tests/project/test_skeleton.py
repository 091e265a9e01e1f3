"""The project's own files agree with each other: pins, declared dependencies, layers, and no trace of one machine."""

from __future__ import annotations

import graphlib
import importlib.metadata
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from support import changed
from support.imports import arrows, imports, sources
from support.paths import ROOT

import kvlab

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What is imported under another name than that of its distribution.
DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow"}
# Each may import only from those that stand before it, and from its own: the folders and files of the package ...
LAYERS = (
    "version errors lib core inputs methods traces instruments replays live attribution scores tasks evaluation "
    "harness bench compile papers analyses render workbench commands cli __main__"
).split()
# ... and those of `workbench`.
SHELVES = (
    "project figures attribution_files experiments store jobs method_pages report rendering mlflow_app ui workspace "
    "doctor listing lab"
).split()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", name)[0]).lower()


def pins(lines) -> dict[str, str]:
    return {canonical(line): line.partition("==")[2] for line in lines if "==" in line}


CONSTRAINTS = pins(line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = {canonical(name) for name in PROJECT["dependencies"]} | {
    canonical(name) for extra in ("lab", "test", "docs", "lm-eval") for name in EXTRAS[extra]
}


def test_everything_is_pinned_to_one_version():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "a pin is NAME==VERSION without local part"
    assert len(CONSTRAINTS) == len(lines)
    assert CONSTRAINTS.keys() >= DIRECT | {canonical(name) for name in EXTRAS["kernels"]}
    assert CONSTRAINTS["torch"] == "2.13.0"


def test_the_lowest_versions_that_are_tested_are_those_that_are_asked_for():
    lowest = pins((ROOT / "constraints-lowest.txt").read_text().splitlines())
    bounds = {canonical(line): line.partition(">=")[2] for line in PROJECT["dependencies"]}
    tools = {"hypothesis", "pytest", "pytest-timeout", "pytest-xdist"}
    assert lowest.keys() == bounds.keys() | tools
    assert bounds.pop("torch") == "2.6"  # pip has no such build without CUDA on Linux
    assert {name: lowest[name].removesuffix(".0") for name in bounds} == {
        name: bound.removesuffix(".0") for name, bound in bounds.items()
    }

    def parts(version: str) -> list[int]:
        return [int(part) for part in version.split(".")]

    assert not [name for name, version in lowest.items() if parts(version) > parts(CONSTRAINTS[name])]


def test_a_wheel_is_built_with_what_the_environment_holds():
    built_with = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert pins(built_with) == {"hatchling": CONSTRAINTS["hatchling"]} and "hatchling" in EXTRAS["test"]


def test_conda_installs_the_very_same_pins():
    (pip,) = [
        part["pip"]
        for part in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
        if isinstance(part, dict)
    ]
    assert pip[:2] == ["-c constraints.txt", "-e .[lab,test,docs,lm-eval,math]"]
    assert pins(pip[2:]) == {name: CONSTRAINTS[name] for name in DIRECT}


def test_what_is_installed_is_what_is_pinned():
    """Nothing that the project needs, directly or not, is left without a pin (this platform's share of it)."""
    from packaging.requirements import Requirement

    # `make env` leaves Triton out, which takes 0.7 GB and does nothing without a GPU.
    todo, needed = [f"kvlab[{','.join(EXTRAS.keys() - {'kernels'})}]"], set()
    while todo:
        wanted = Requirement(todo.pop())
        if (canonical(wanted.name), frozenset(wanted.extras)) in needed:
            continue
        needed.add((canonical(wanted.name), frozenset(wanted.extras)))
        for line in importlib.metadata.requires(wanted.name) or []:
            part = Requirement(line)
            if part.marker is None or any(part.marker.evaluate({"extra": extra}) for extra in {"", *wanted.extras}):
                todo.append(line)
    names = {name for name, _ in needed} - {"kvlab", "setuptools", "pip"}
    # Torch's builds for graphics cards bring libraries of their own, which differ from machine to machine.
    names = {name for name in names if not name.startswith(("nvidia-", "cuda-", "triton"))}
    installed = {name: importlib.metadata.version(name).partition("+")[0] for name in names}
    assert installed == {name: CONSTRAINTS.get(name) for name in names}


def test_every_import_is_a_declared_dependency():
    extras = [name for extra in ("lab", "cluster", "kernels", "lm-eval", "math") for name in EXTRAS[extra]]
    known = {canonical(name) for name in [*PROJECT["dependencies"], *extras]}
    used = {(name.partition(".")[0], path.name) for path in sources() for name in imports(path)}
    undeclared = {
        (name, file)
        for name, file in used
        if name not in sys.stdlib_module_names
        and name != "kvlab"
        and canonical(DISTRIBUTIONS.get(name, name)) not in known
    }
    assert not undeclared


def test_no_more_is_asked_for_than_is_imported():
    used = {
        canonical(DISTRIBUTIONS.get(top, top)) for p in sources() for name in imports(p) for top in [name.split(".")[0]]
    }
    declared = {canonical(name) for name in [*PROJECT["dependencies"], *EXTRAS["lab"]]}
    assert declared - used == {"jupyterlab", "pyarrow"}  # `make lab` starts the one, pandas imports the other


def test_no_files_import_each_other_in_a_circle():
    try:
        graphlib.TopologicalSorter(arrows()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_a_circle_would_be_seen():
    drawn = {**arrows(), "kvlab.errors": {"kvlab.cli"}}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(drawn).prepare()


def test_layers_import_only_what_stands_above_them():
    def level(name: str) -> tuple[int, int]:
        parts = name.split(".")
        assert parts[1] in LAYERS, f"{name} belongs to no layer"
        if parts[1] != "workbench" or len(parts) == 2:
            return LAYERS.index(parts[1]), -1
        assert parts[2] in SHELVES, f"{name} belongs to no shelf"
        return LAYERS.index(parts[1]), SHELVES.index(parts[2])

    drawn = arrows()
    assert len(drawn) > 100 and "kvlab.methods._base.policy" in drawn["kvlab.methods.snapkv"]
    wrong = [f"{name} imports {other}" for name in drawn for other in drawn[name] if level(other) > level(name)]
    assert not wrong


def test_the_drawn_house_has_the_layers_in_their_order():
    """Floors are drawn from the ground up, and each from left to right."""
    drawn = (ROOT / "docs" / "figures" / "house.svg").read_text(encoding="utf-8")
    rooms = re.findall(r'class="room"[^>]*>(\w+)<', drawn)
    assert rooms == [layer for layer in LAYERS if (ROOT / "kvlab" / layer).is_dir()]


def test_policies_know_neither_transformers_nor_the_model():
    files = list((ROOT / "kvlab" / "methods").glob("*.py"))
    assert len(files) > 20
    for path in files:
        assert not {n for n in imports(path) if n.startswith(("transformers", "kvlab.inputs.models.loading"))}, path


MODULES = [
    module.name
    for module in pkgutil.walk_packages([str(ROOT / "kvlab")], "kvlab.")
    if module.name != "kvlab.__main__"  # importing it runs a command
]


def test_no_name_that_kvlab_hands_on_is_the_name_of_a_module():
    """Else `kvlab.X` would be the function or the module, by what somebody imported before."""
    assert not {f"kvlab.{name}" for name in kvlab.__all__} & set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_what_its_import_gives(name):
    """No package hides one of its modules behind a function of the same name."""
    names = {}
    exec(f"import {name} as given", names)
    assert names["given"] is sys.modules[name] and inspect.ismodule(names["given"])


def test_importing_kvlab_imports_no_policy_and_no_torch():
    told = "import sys, kvlab; print([name for name in sys.modules if name.startswith(('torch', 'kvlab.methods'))])"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def tracked() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_file_knows_one_machine_or_registry():
    alien = re.compile(
        r"/home/\w|/root/|/Users/\w|/work/|/opt/|file:///(?!\{)[a-z]+/|pypi\.org|pythonhosted|"
        r"index-url|huggingface\.co/\S*resolve"
    )
    found = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in {".png", ".pdf", ".parquet"}:
            continue
        # The header of a safetensors file is text, and numbers follow it.
        errors = "replace" if path.suffix == ".safetensors" else "strict"
        for number, line in enumerate(path.read_text(encoding="utf-8", errors=errors).splitlines(), 1):
            if alien.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {alien.search(line)[0]}")
    assert not found


def everywhere() -> list[Path]:
    """The Python files of the package, of its tests and of the benchmarks."""
    return [*sources(), *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]


def test_no_file_is_longer_than_a_few_screens():
    lines = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in everywhere()}
    assert len(lines) > 300 and not {name: count for name, count in lines.items() if count > 600}


def test_no_test_imports_from_a_test():
    """What tests share is in tests/support/ or is a fixture of a conftest.py."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    modules = {path.stem for path in tests if path.stem.startswith("test_")}
    found = {path.name: {name.partition(".")[0] for name in imports(path)} & modules for path in tests}
    assert modules and not {name: shared for name, shared in found.items() if shared}


def test_long_lines_and_pickles_are_not_ours():
    files = everywhere()
    assert not [
        f"{path.name}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120
    ]
    for path in files:
        assert not {n for n in imports(path) if n.partition(".")[0] in {"pickle", "dill", "joblib"}}, path


def test_ci_runs_every_test():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text().splitlines()[-1] == "make test-all"
    asked = ["make", "-n", "test-all", "PYTHON=python3"]
    commands = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for part in ("-m 'not models and not long' tests", "-m 'long and not models' tests", "--nbval-lax", "ruff check"):
        assert part in commands, part


@pytest.mark.parametrize(
    "target",
    ["env", "reproduce", "test", "test-long", "test-lowest", "browser", "docs", "wheel", "lab", "clean", "help"],
)
def test_make_knows_its_targets(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if target in ("reproduce", "test"):
        assert (
            done.stdout.index("-c constraints.txt -e '.[lab,test,docs,lm-eval,math]'") < done.stdout.index("kvlab pull")
            if "pip install" in done.stdout
            else "kvlab pull" in done.stdout
        )


def test_an_old_python_is_told_in_one_sentence(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    old = tmp_path / "oldpython"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(["make", "env", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.startswith("kvlab needs Python 3.11 or newer")
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("asked", ["", "notebooks/quickstart.ipynb"])
def test_make_notebooks_runs_all_of_them_or_those_that_are_named(asked):
    """Looked at with `make -n`, which runs nothing."""
    command = ["make", "-n", "--no-print-directory", "notebooks", *([f"NOTEBOOKS={asked}"] if asked else [])]
    # These tests may themselves run under make, whose flags are not this one's.
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=own)
    assert done.stdout.rstrip().endswith(f"--execute --inplace {asked or 'notebooks/*.ipynb'}")


def test_a_change_brings_the_tests_that_can_see_it():
    brought = changed.tests_of(["kvlab/core/store.py"])
    assert {"tests/core/test_cache.py", "tests/live/test_live.py"} <= brought
    assert any(name.startswith("tests/replays/") for name in brought)
    told = changed.tests_of(["kvlab/render/sentences.py"])
    assert "tests/render/test_sentences.py" in told and not any(name.startswith("tests/core/") for name in told)
    assert changed.tests_of(["tests/core/test_cache.py"]) == {
        "tests/core/test_cache.py",
        "tests/project/test_skeleton.py",
    }
    assert "tests/project" in changed.tests_of(["docs/start.md"])
