"""`make check`: run the tests of what has changed since the last commit, but for those that take long.

A changed file of `kvlab/FOLDER/` brings the tests of `tests/FOLDER/`, a changed test file itself, a changed notebook or
experiment the tests that read notebooks without running them. Anything else brings the tests of the project's
own files.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


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


def tests_of(path: str) -> str:
    """The test folder or file that a file of the project belongs to."""
    parts = Path(path).parts
    if parts[0] == "tests" and Path(path).name.startswith("test_") and (ROOT / path).exists():
        return path
    folder = parts[1] if parts[0] == "kvlab" and len(parts) > 2 else "project"
    if parts[0] in ("notebooks", "experiments"):
        return "tests/workbench/test_notebooks.py"
    return f"tests/{folder}" if (ROOT / "tests" / folder).is_dir() else "tests/project"


def main() -> int:
    files = changed()
    wanted = sorted({tests_of(path) for path in files} | {"tests/project/test_skeleton.py"})
    wanted = [path for path in wanted if not any(path != other and path.startswith(f"{other}/") for other in wanted)]
    print(f"{len(files)} changed files: {' '.join(wanted)}")
    quick = ["-m", "not models and not long"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", *quick, *wanted], cwd=ROOT
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
