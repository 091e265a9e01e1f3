"""The wheel, in an environment of its own and without this checkout: a workspace's example runs end to end.

Nothing but kvlab is installed anew: the environment reads what else is needed from this one's packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pandas
import pytest
from support.paths import ROOT

PAGE = ROOT / "docs" / "workspace.md"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of what git tracks."""
    folder = tmp_path_factory.mktemp("built")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    source = folder / "source"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and (name.startswith("docs/ledger/") or name.split("/")[0] not in ("tests", "docs")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    # With the hatchling of this environment: nothing is fetched.
    built_here = ["--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(source)]
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", *built_here], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("kvlab-*.whl")
    return built


@pytest.fixture(scope="module")
def bin(wheel, tmp_path_factory) -> Path:
    """The programs of an environment with that wheel alone, which finds all other packages where they are."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    # A path in a .pth file is searched, but the .pth files in it are not read: the editable kvlab's is one of them.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # nbconvert looks for its templates below the environment.
    (folder / "share" / "jupyter").mkdir(parents=True)
    (folder / "share" / "jupyter" / "nbconvert").symlink_to(Path(sys.prefix) / "share" / "jupyter" / "nbconvert")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True,
    )
    return folder / "bin"


def shell(bin: Path, folder: Path, line: str) -> str:
    """What a line prints in a shell with that environment, in which nothing points to this checkout."""
    ours = ("PYTHON", "KVLAB_ROOT", "MLFLOW", "PYTEST")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**kept, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"},
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_wheel_holds_what_a_workspace_is_made_of(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    within = "kvlab/workbench/workspace"
    for path in (*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "experiments").glob("*.yaml")):
        assert f"{within}/shipped/{path.relative_to(ROOT).as_posix()}" in names
    for path in (ROOT / "docs" / "ledger").rglob("*.csv"):
        assert f"kvlab/workbench/report/shipped/{path.relative_to(ROOT / 'docs' / 'ledger').as_posix()}" in names
    for path in (ROOT / within / "templates").rglob("*.j2"):
        assert path.relative_to(ROOT).as_posix() in names
    assert not [name for name in names if name.startswith(("tests/", "notebooks/", "docs/"))]


def test_the_kept_ledgers_come_with_the_wheel(bin, tmp_path):
    assert "report/report.html" in shell(bin, tmp_path, "kvlab report --from kept --out report")
    ledger = (tmp_path / "report" / "claims.csv").read_text()
    assert "smollm2-135m" in ledger and "gemma-3-270m" in ledger


def test_a_workspace_asks_for_the_wheel_that_it_was_made_with(bin, wheel, tmp_path):
    """No index has it, so a version alone would not be found; a copy in the workspace goes wherever that goes."""
    shell(bin, tmp_path, "kvlab new lab --with-wheel")
    lab = (tmp_path / "lab").rename(tmp_path / "moved")
    pin = (lab / "requirements.txt").read_text().splitlines()[1]
    assert pin == f"./wheels/{wheel.name}[lab,workspace]"
    asked = [
        "--python",
        str(bin / "python"),
        "install",
        "--dry-run",
        "--no-deps",
        "--no-index",
        "--force-reinstall",
        pin,
    ]
    done = subprocess.run([sys.executable, "-m", "pip", *asked], capture_output=True, text=True, cwd=lab)
    assert "Would install kvlab-" in done.stdout, done.stderr


@pytest.mark.roundtrip
def test_a_workspace_works_without_a_checkout(bin, tmp_path):
    """The commands that docs/workspace.md shows, in its order, then plain papermill and plain pytest."""
    assert "site-packages" in shell(bin, tmp_path, "python -c 'import kvlab; print(kvlab.__file__)'")
    shown = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in shown for line in block.splitlines()]
    done: dict[str, str] = {}
    folder = tmp_path
    for line in filter(None, lines):
        if line.startswith("cd "):
            folder = folder / line.removeprefix("cd ")
        elif not line.startswith("pip "):
            done[line] = shell(bin, folder, line)
    assert {"kvlab new my-lab", "kvlab run first_tokens", "kvlab reproduce", "kvlab report", "make test"} <= done.keys()
    assert "1 job finished" in done["kvlab run first_tokens"]
    assert "0 + 1,024 and 4 + 1,020" in " ".join(done["kvlab reproduce"].split())
    assert re.search(r"\d+ passed", done["make test"]) and "failed" not in done["make test"]
    ledger = (tmp_path / "my-lab" / "report" / "claims.csv").read_text()
    assert ledger.count("streaming.") >= 3 and "dapq." not in ledger and "not measured" not in ledger
    assert (tmp_path / "my-dapq" / "papers" / "dapq.yaml").is_file()
    assert "dapq_position_vs_content" in shell(bin, tmp_path / "my-dapq", "kvlab list experiments")
    # A copied notebook runs as it is, from its copied experiment to the claims of the copied paper.
    path = tmp_path / "my-dapq" / "experiments" / "dapq_position_vs_content.yaml"
    tiny = "{tokens: 300, new_tokens: 4, trials: 1, shorter: 100, longest: 600, parts: 2, documents: [sotu/1962]}"
    path.write_text(path.read_text().replace("{seconds: 145}", f"{{seconds: 145, parameters: {tiny}}}"))
    assert "1 job finished" in shell(bin, tmp_path / "my-dapq", "kvlab run dapq_position_vs_content")
    shell(bin, tmp_path / "my-dapq", "kvlab report")
    ledger = pandas.read_csv(tmp_path / "my-dapq" / "report" / "claims.csv").set_index("id")
    assert ledger.verdict["dapq.table1.dc_sp"] not in ("not measured", "cannot be tested here")
    assert set(ledger.paper) == {"dapq"}
