"""Policies, tasks and claims of a workspace are found by their folder; what is wrong with them is one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from support.labs import policy
from support.refusals import refusal

import kvlab
from kvlab import papers, tasks
from kvlab.lib import workspace
from kvlab.workbench.experiments import content_key


def keep(name: str, budget: int) -> list[int]:
    layer = torch.randn(3, 1, 1, 8, 4, generator=torch.Generator().manual_seed(0))
    return kvlab.policy(name, budget=budget).keep(*layer)[0, 0].tolist()


def test_a_policy_is_found_by_its_file_from_any_folder_of_the_workspace(bare, monkeypatch):
    shipped = kvlab.policies()
    policy(bare, "mine.py", "mine")
    (bare / "notebooks").mkdir()
    monkeypatch.chdir(bare / "notebooks")
    assert kvlab.policies() == [*shipped, "mine"]
    assert keep("mine", 3) == [0, 1, 2] and kvlab.policy("mine", budget=0.5).entries(8) == 4
    monkeypatch.chdir(bare.parent)
    assert kvlab.policies() == shipped
    monkeypatch.setenv("KVLAB_ROOT", str(bare))
    assert "mine" in kvlab.policies()


@pytest.mark.parametrize(
    "text", ["", "[tool.kvlab]\n", "[tool.kvlab]\nworkspace = 'true'\n", "[tool]\nkvlab = true\n", "tool = 3\n"]
)
def test_code_of_a_folder_that_is_no_workspace_is_never_run(text, bare):
    (bare / "pyproject.toml").write_text(text)
    for part in workspace.CODE:
        (bare / part).mkdir()
        (bare / part / "bomb.py").write_text("import pathlib\npathlib.Path('boom').touch()\n")
    assert "mine" not in kvlab.policies() and tasks.tasks() and papers.papers() == papers.of_project()
    assert not (bare / "boom").exists()


def test_a_project_file_that_is_no_toml_is_named(bare):
    (bare / "pyproject.toml").write_text("[tool.kvlab\n")
    assert str(bare / "pyproject.toml") in refusal(kvlab.policies)


def test_a_changed_file_is_read_again(bare):
    path = policy(bare, "mine.py", "mine")
    before = kvlab.policy("mine", budget=2)
    assert keep("mine", 2) == [0, 1] and type(kvlab.policy("mine", budget=2)) is type(before)
    path.write_text(path.read_text().replace("torch.arange(budget)", "(torch.arange(budget) + 1)"))
    assert keep("mine", 2) == [1, 2]
    path.unlink()
    assert "mine" not in kvlab.policies()


def test_files_share_code_through_the_workspace_package(bare):
    policy(bare, "_base.py", "hidden", cls="Base")
    (bare / "policies" / "mine.py").write_text(
        "from typing import ClassVar\nfrom kvlab_workspace.policies._base import Base\n"
        "class Mine(Base):\n    name: ClassVar[str] = 'mine'\n"
    )
    assert "hidden" not in kvlab.policies() and keep("mine", 2) == [0, 1]
    assert type(kvlab.policy("mine", budget=1)).__module__ == f"{workspace.PACKAGE}.policies.mine" in sys.modules


def test_a_test_or_notebook_imports_shared_code_before_it_asks_for_a_policy(bare):
    """In a process of its own, in which nothing has looked for policies yet; and without a workspace."""
    policy(bare, "_shared.py", "hidden", cls="Shared")
    code = "from kvlab_workspace.policies._shared import Shared; print(Shared.name)"

    def run(folder):
        environment = {name: value for name, value in os.environ.items() if name != "KVLAB_ROOT"}
        return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)

    assert run(bare).stdout == "hidden\n"
    assert "is no workspace; change into one" in run(bare.parent).stderr


def test_a_policy_that_builds_on_kvlabs_own_may_ask_for_it_as_it_is_read(bare):
    path = policy(bare, "mine.py", "mine")
    path.write_text("import kvlab\nBASE = kvlab.policy('snapkv', budget=64)\n" + path.read_text())
    assert keep("mine", 2) == [0, 1]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import torch\nclass :\n", ", line 2 cannot be read: SyntaxError"),
        ("x = 1\ny = nowhere\n", ", line 2 cannot be read: NameError: name 'nowhere' is not defined"),
        ("import sys\nsys.exit(3)\n", ", line 2 cannot be read: SystemExit: 3"),
        ("import not_there_at_all\n", "No module named 'not_there_at_all'"),
    ],
)
def test_a_broken_file_is_named_with_its_line(code, words, bare):
    (bare / "policies").mkdir()
    (bare / "policies" / "broken.py").write_text(code)
    said = refusal(kvlab.policies)
    assert str(bare / "policies" / "broken.py") in said and words in said
    assert tasks.tasks(), "a broken policy breaks no task"


def test_a_file_that_cannot_be_a_module_is_told_to_be_renamed(bare):
    policy(bare, "my-policy.py", "mine")
    assert "my-policy.py" in refusal(kvlab.policies)


def test_a_name_that_is_taken_is_refusal(bare):
    path = policy(bare, "mine.py", "snapkv")
    said = refusal(kvlab.policy, "full")
    assert str(path) in said and "'snapkv' is taken by kvlab's own" in said
    policy(bare, "mine.py", "mine")
    policy(bare, "other.py", "mine")
    assert "'mine' is taken by another of this workspace" in refusal(kvlab.policies)


def test_a_task_is_found_and_one_with_a_taken_name_is_refusal(bare):
    (bare / "tasks").mkdir()
    code = (
        "from typing import ClassVar\nfrom kvlab.tasks import Task\n"
        "class Mine(Task):\n    name: ClassVar[str] = '{}'\n    trials: int = 5\n"
    )
    (bare / "tasks" / "mine.py").write_text(code.format("mine"))
    assert tasks.tasks()[-1] == "mine" and str(tasks.task("mine", trials=2)) == "mine(seed=0, trials=2)"
    (bare / "tasks" / "other.py").write_text(code.format("needle"))
    assert "the task name 'needle' is taken by kvlab's own" in refusal(tasks.tasks)


def test_a_job_is_run_again_once_the_code_of_the_workspace_has_changed(bare):
    (bare / "toy.ipynb").write_text('{"cells": []}')
    keys = [content_key.key(bare / "toy.ipynb", {})]
    path = policy(bare, "mine.py", "mine")
    keys.append(content_key.key(bare / "toy.ipynb", {}))
    path.write_text(path.read_text() + "\n# another line\n")
    keys.append(content_key.key(bare / "toy.ipynb", {}))
    assert len(set(keys)) == 3 and keys[2] == content_key.key(bare / "toy.ipynb", {})


@pytest.mark.parametrize(
    "source, policy_text, parameters, again",
    [
        ("import kvlab", "", {"seed": 0}, False),
        ("from kvlab import tasks", "", {}, True),
        ("import kvlab", "from kvlab_workspace import other", {}, True),
        ("import kvlab", "", {"names": ["my_task"]}, True),
    ],
    ids=["no task in reach", "notebook", "policy", "parameter"],
)
def test_a_new_task_runs_only_jobs_again_that_can_reach_it(bare, source, policy_text, parameters, again):
    cell = {"cell_type": "code", "source": source}
    (bare / "toy.ipynb").write_text(json.dumps({"cells": [cell]}))
    path = policy(bare, "mine.py", "mine")
    path.write_text(f"{path.read_text()}\n# {policy_text}\n")
    before = content_key.key(bare / "toy.ipynb", parameters)
    (bare / "tasks").mkdir()
    (bare / "tasks" / "riddles.py").write_text("# a task\n")
    assert (content_key.key(bare / "toy.ipynb", parameters) != before) is again


def test_without_a_working_directory_kvlabs_own_are_still_there(tmp_path, monkeypatch):
    monkeypatch.delenv("KVLAB_ROOT", raising=False)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    assert "snapkv" in kvlab.policies()
