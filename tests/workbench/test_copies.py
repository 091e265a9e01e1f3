"""Copies of the notebooks for `make lab`: a checkout stays as it is, and nobody's changes are lost."""

from __future__ import annotations

import subprocess

import pytest
from support.paths import ROOT

from kvlab.workbench import lab


@pytest.fixture
def folders(tmp_path):
    source, target = tmp_path / "notebooks", tmp_path / "lab"
    source.mkdir()
    for name in "ab":
        (source / f"{name}.ipynb").write_text(f"{name} 1")
    return source, target


def read(folder):
    return {path.name: path.read_text() for path in sorted(folder.glob("*.ipynb"))}


def test_every_notebook_is_copied(folders):
    source, target = folders
    assert lab.copies(source, target) == []
    assert read(target) == read(source) == {"a.ipynb": "a 1", "b.ipynb": "b 1"}


def test_a_copy_follows_its_original_until_it_is_changed(folders):
    source, target = folders
    lab.copies(source, target)
    (target / "a.ipynb").write_text("mine")
    (target / "own.ipynb").write_text("own")
    assert lab.copies(source, target) == []  # the original is as it was
    for name in "ab":
        (source / f"{name}.ipynb").write_text(f"{name} 2")
    for _ in range(2):
        assert lab.copies(source, target) == [target / "a.ipynb"]
        assert read(target) == {"a.ipynb": "mine", "b.ipynb": "b 2", "own.ipynb": "own"}
    (target / "a.ipynb").unlink()
    assert lab.copies(source, target) == []
    assert read(target)["a.ipynb"] == "a 2"


@pytest.mark.parametrize("note", [None, "", "[1]", "no JSON"])
def test_without_its_note_every_copy_that_differs_counts_as_changed(folders, note):
    source, target = folders
    lab.copies(source, target)
    (target / lab.MADE).unlink() if note is None else (target / lab.MADE).write_text(note)
    (source / "a.ipynb").write_text("a 2")
    assert lab.copies(source, target) == [target / "a.ipynb"]
    assert read(target) == {"a.ipynb": "a 1", "b.ipynb": "b 1"}


def test_git_does_not_see_them():
    done = subprocess.run(["git", "check-ignore", "lab/a.ipynb"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    assert done.returncode == 0
