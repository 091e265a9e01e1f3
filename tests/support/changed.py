"""`make check`: run the tests that a change since the last commit can reach, but for those that take long.

A changed file of the package brings every test file that imports it, directly or through others; a changed test file
itself; a changed notebook or experiment the tests that read notebooks without running them. Anything else, such as a
page or a template, brings the tests of the project's own files.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.imports import arrows, module, reached, sources, used_by
from support.paths import ROOT

ALWAYS = {"tests/project/test_skeleton.py"}
NOTEBOOKS = "tests/workbench/test_notebooks.py"


def changed() -> list[str]:
    """Files that differ from the last commit, new ones included; those of the last commit itself where none does."""
    for command in (
        ["git", "status", "--porcelain", "--no-renames"],
        ["git", "show", "--name-status", "--format=", "HEAD"],
    ):
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        if lines:
            return [line[3:].strip() if command[1] == "status" else line.split("\t")[-1] for line in lines]
    return []


def tests_of(files: list[str]) -> set[str]:
    """The test files and folders that changed files call for."""
    wanted, modules = set(ALWAYS), set()
    for name in files:
        path = Path(name)
        if path.suffix == ".py" and path.parts[0] == "kvlab":
            modules.add(module(ROOT / path))
        elif path.suffix == ".py" and path.parts[:2] == ("tests", "support"):
            wanted |= {str(test) for test in tests() if f"support.{path.stem}" in (ROOT / test).read_text("utf-8")}
        elif path.parts[0] == "tests" and path.name.startswith("test_") and (ROOT / path).exists():
            wanted.add(name)
        elif path.parts[0] in ("notebooks", "experiments"):
            wanted.add(NOTEBOOKS)
        else:
            wanted.add("tests/project")
    if modules:
        names = {module(path) for path in sources()}
        moved = reached(modules, arrows())
        wanted |= {str(test) for test in tests() if used_by(ROOT / test, names) & moved}
        wanted.add("tests/project")
    return {one for one in wanted if not any(one != other and one.startswith(f"{other}/") for other in wanted)}


def tests() -> list[Path]:
    """All test files, from the project's folder."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))


def main() -> int:
    files = changed()
    wanted = sorted(tests_of(files))
    shown = " ".join(wanted) if len(wanted) <= 8 else f"{' '.join(wanted[:8])} and {len(wanted) - 8} more"
    print(f"{len(files)} changed files: {shown}")
    quick = ["-m", "not models and not long"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", *quick, *wanted], cwd=ROOT
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
