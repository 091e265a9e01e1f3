"""`kvlab doctor` finds what is wrong, names the mend, and never breaks."""

import json
import sqlite3

import pytest
from support.commands import call
from typer.testing import CliRunner

import kvlab
from kvlab.cli import app
from kvlab.workbench import doctor


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "experiments").mkdir()
    monkeypatch.setenv("KVLAB_ROOT", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def test_every_check_has_an_end_and_what_is_bad_has_a_mend_or_a_reason(project, monkeypatch):
    monkeypatch.setenv("KVLAB_HOME", str(project / "home"))
    found = {finding.what: finding for finding in doctor.findings()}
    assert list(found) == [
        "python",
        "packages",
        "project",
        "model",
        "models",
        "texts",
        "store",
        "disk",
        "machine",
        "gpu",
        "jupyter",
    ]
    assert found["project"].state == "remark" and "no experiments in" in found["project"].found
    assert "KVLAB_ROOT" in found["project"].mend
    assert found["model"].mend == "kvlab pull smollm2-135m"
    assert found["texts"].mend.startswith("kvlab pull sotu")
    assert not (project / "home").exists(), "a look changes nothing"
    assert not (project / "mlruns").exists()


def test_another_version_than_the_pinned_one_is_told(project):
    (project / "constraints.txt").write_text("pydantic==0.0.1\nno-such-package==1.0\n")
    versions = doctor.versions()
    assert versions.state == "remark"
    assert (
        "pydantic" in versions.found and "pinned: 0.0.1" in versions.found and "no-such-package" not in versions.found
    )
    assert "constraints.txt" in versions.mend


def test_a_store_that_is_no_store(project):
    (project / "mlruns").mkdir()
    with sqlite3.connect(project / "mlruns" / "mlflow.db") as connection:
        connection.execute("create table something (x)")
    found = {finding.what: finding for finding in doctor.findings()}
    assert found["store"].state == "bad" and "not MLflow's" in found["store"].found


def test_little_room_and_little_memory_are_bad(project, monkeypatch):
    monkeypatch.setattr(doctor, "DISK_GB", 10**9)
    monkeypatch.setattr(doctor, "MEMORY_GB", 10**9)
    assert doctor.disk().state == "bad" and "KVLAB_HOME" in doctor.disk().mend
    assert doctor.machine().state == "bad" and "--jobs 1" in doctor.machine().found + doctor.machine().mend


def test_a_check_that_breaks_is_a_finding(monkeypatch):
    def gpu():
        raise RuntimeError("driver gone\nand much more")

    monkeypatch.setattr(doctor, "gpu", gpu)
    found = {finding.what: finding for finding in doctor.findings()}
    assert found["gpu"].state == "bad" and found["gpu"].found == "RuntimeError: driver gone"


def test_the_command_says_by_its_exit_code_whether_all_is_well(project, monkeypatch):
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert {"what", "state", "found", "mend"} == set(json.loads(result.stdout)[0])
    monkeypatch.setattr(doctor, "DISK_GB", 10**9)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "mend:" in result.stdout


def test_the_disk_of_a_store_elsewhere_is_looked_at_too(project, monkeypatch, tmp_path_factory):
    far = tmp_path_factory.mktemp("far")
    assert str(far) not in doctor.disk().found
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{far / 'mlflow.db'}")
    assert f"GB free for the store ({far})" in doctor.disk().found


def test_a_workspace_of_another_version_names_both_and_the_files_that_differ(made, capsys):
    assert doctor.experiments().state == "ok" and doctor.versions().state == "ok"
    mark = made / "pyproject.toml"
    mark.write_text(mark.read_text().replace(kvlab.__version__, "0.0.9"))
    (made / "conftest.py").unlink()
    (made / "Makefile").write_text("old:\n")
    found = doctor.experiments()
    assert found.state == "remark" and "kvlab 0.0.9 made" in found.found and kvlab.__version__ in found.found
    assert "Makefile, conftest.py" in found.found and "test_project" not in found.found
    _, _, said = call(capsys, "run", "first_tokens", "-p", "tokens=-1")
    assert "kvlab 0.0.9 made" in said and "kvlab doctor" in said


def test_a_workspaces_pins_are_those_of_its_requirements(made):
    (made / "requirements.txt").write_text("kvlab[lab,workspace]==0.0.9\n")
    found = doctor.versions()
    assert "kvlab" in found.found and "pinned: 0.0.9" in found.found and "requirements.txt" in found.mend
