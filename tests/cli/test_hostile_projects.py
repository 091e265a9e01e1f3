"""Projects and commands that mean harm: notebooks, YAML, names in messages, and output that cannot be written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from support.commands import call, complaint
from support.paths import ROOT
from support.projects import EXPERIMENT, cell, experiment, notebook
from support.refusals import one_sentence

from kvlab import evaluation
from kvlab.lib import yaml_loader
from kvlab.workbench import experiments
from kvlab.workbench.experiments.notebooks import parameters_of
from kvlab.workbench.report import page
from kvlab.workbench.store import database, tracking

# --- YAML and notebooks ---


@pytest.mark.parametrize(
    "text",
    [
        "a: !!int ''",
        "a: !!bool maybe",
        "a: !!timestamp x",
        "a: 0x" + "f" * 5000,
        'a: "\\ud800"',
        'a: ["x\\ud800"]',
        "a: " + "1" * 600_000,
    ],
)
def test_yaml_that_its_reader_has_other_errors_for(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with one_sentence(r"^a\.yaml"):
        yaml_loader.load(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    "content_",
    [
        b"[" * 200_000,
        b"[]",
        {"cells": 5},
        {"cells": [1]},
        {"cells": [{"metadata": None}]},
        {"cells": [{"metadata": {"tags": 5}}]},
        {"cells": [{"source": [1]}]},
        {
            "cells": [
                {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": "a = " + "-" * 100_000 + "1"}
            ]
        },
    ],
)
def test_a_notebook_that_is_none(content_, tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_bytes(content_ if isinstance(content_, bytes) else json.dumps(content_).encode())
    with one_sentence():
        parameters_of(path)
    with one_sentence("missing"):
        parameters_of(tmp_path)


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ("{things: !!pairs [a: /etc/passwd]}", "leaves the project"),
        ("{things: [{/etc/passwd: 1}]}", "leaves the project"),
        ("{name: texts/passwd}", "leaves the project"),
        ("{things: [{true: 1}]}", "a key is a text"),
        ("{things: !!set {a}}", "does not fit into JSON"),
        ("{name: !!binary aGVsbG8=}", "must be a text|does not fit"),
        ("{scale: .nan}", "no plain number"),
    ],
)
def test_parameters_of_a_yaml_arrive_as_they_are_or_not_at_all(project, parameters, match):
    notebook(project / "notebooks" / "toy.ipynb", cell("things = []\nname = 'x'\nscale = 0.5", "parameters"))
    (project / "texts").symlink_to("/etc")
    (project / "experiments" / f"{EXPERIMENT}.yaml").write_text(
        f"notebook: notebooks/toy.ipynb\ndescription: d\nparameters: {parameters}\n"
    )
    with one_sentence(match):
        experiments.jobs(EXPERIMENT)


def test_a_notebook_that_a_link_leads_to_stays_in_the_project_or_is_refused(project, tmp_path_factory):
    away = tmp_path_factory.mktemp("away") / "toy.ipynb"
    shutil.copy(project / "notebooks" / "toy.ipynb", away)
    (project / "notebooks" / "out.ipynb").symlink_to(away)
    (project / "notebooks" / "in.ipynb").symlink_to("toy.ipynb")
    experiment(project, notebook="notebooks/in.ipynb")
    assert experiments.jobs(EXPERIMENT)
    experiment(project, notebook="notebooks/out.ipynb")
    with one_sentence("leaves the project"):
        experiments.load(EXPERIMENT)


def test_a_grid_of_a_million_jobs_is_refused_at_once(project):
    experiment(project, grid={"seed": list(range(1000)), "reduction": [n / 1000 for n in range(1000)]})
    with one_sentence("1,000,000 jobs"):
        experiments.jobs(EXPERIMENT)


@pytest.mark.parametrize("value", ["9" * 5000, "2001-13-45", "!!bool x", "[" * 3000, "\udcff", "~no-such-user/x"])
def test_odd_texts_from_the_command_line(project, capsys, value):
    said = complaint(capsys, "run", EXPERIMENT, "-p", f"seed={value}")
    assert ("whole number" in said or "half a character" in said) and len(said) < 400
    code, _, err = call(capsys, "eval", "needle", "-p", f"seed={value}", "--model", "random:tiny-llama-gqa")
    assert code in (1, 2) and err.count("\n") == 1 and "KVLAB_DEBUG" not in err


def test_half_a_character_reaches_no_notebook(project):
    with one_sentence("half a character"):
        experiments.jobs(EXPERIMENT, overrides={"names": ["a\udcff"]})


# --- the command ---


def test_a_name_in_a_message_neither_breaks_the_line_nor_moves_the_cursor(capsys):
    code, out, err = call(capsys, "score", "qasper", "a\nb\x1b[2J\u202ec\udcff")
    assert (code, out) == (1, "")
    assert err == "kvlab: cannot read a b\\x1b[2J\\u202ec\\udcff: no such file or directory\n"


def test_brackets_in_names_are_no_markup(project, capsys):
    experiment(project, name="[red]odd[bold]", description="A [/b] and a \\[c].")
    code, out, _ = call(capsys, "list", "experiments")
    assert code == 0 and "[red]odd[bold]" in out and "A [/b] and a \\[c]." in out


def test_output_that_cannot_be_written(tmp_path):
    command = [sys.executable, "-m", "kvlab", "list", "packs"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "kvlab: No space left on device\n")


def test_a_command_whose_output_was_closed_and_whose_folder_is_gone(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    kvlab_ = f"{sys.executable} -m kvlab"
    order = f"cd {gone} && rmdir {gone} && {kvlab_} list packs >&- && {kvlab_} list experiments"
    done = subprocess.run(
        order, shell=True, text=True, capture_output=True, env=os.environ | {"PYTHONPATH": os.fspath(ROOT)}
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("kvlab: the folder that this runs in is gone")


def test_a_damaged_figure_is_named_with_its_run(project, tmp_path):
    run = tracking.create_run(database.client(), EXPERIMENT, {}, {"kvlab.kind": "job", "model": "toy"}, "toy")
    run.log({"reduction/0.20": 0.6})
    (tmp_path / "curve.png").write_bytes(b"\x89PNG\r\n\x1a\nno picture")
    run.client.log_artifact(run.id, str(tmp_path / "curve.png"), "figures")
    run.finish()
    with one_sentence(f"figures/curve.png of run {run.id} is damaged"):
        page.write()
    assert not (project / "report").exists()


def test_answers_are_not_written_over_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "a.jsonl"):
        with one_sentence("is a folder|cannot write"):
            evaluation.run(None, None, path)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
