"""Notebooks run by plain papermill: what its -p passes, what its help lists, and how a run ends that fails."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import nbformat
import papermill
import pytest
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client import KernelManager
from support.paths import NOTEBOOKS, ROOT
from support.projects import EXPERIMENT, PARAMETERS, blank_store, cell, notebook
from support.refusals import one_sentence
from support.servers import environment
from traitlets.config import Config

from kvlab.errors import KvlabError
from kvlab.workbench import experiments
from kvlab.workbench.experiments import notebooks
from kvlab.workbench.experiments.notebook_parameters import parameters, typed
from kvlab.workbench.jobs import launch
from kvlab.workbench.store import database

WHOLE = "00_quickstart"  # run to its end, too
SMALLEST = {"tokens": 300, "new_tokens": 8, "length": 300}
BY_NAME = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


# ---------------------------------------------------------------- what is read

# A parameters cell's own value, for each type that a parameter may have.
DECLARED = {list[str]: ["one", "another"], list[int]: [64, 128], list[float]: [0.1, 0.25], dict: {"tokens": 24}}


@pytest.mark.parametrize(
    ("kind", "given", "read"),
    [
        (list[str], ["a", "b"], ["a", "b"]),
        (list[str], '["sotu/1962"]', ["sotu/1962"]),
        (list[str], "['a', \"b\"]", ["a", "b"]),
        (list[str], "sotu/1962", ["sotu/1962"]),
        (list[str], "a, b", ["a", "b"]),
        (list[str], "2012,2013", ["2012", "2013"]),
        (list[str], 2012, ["2012"]),
        (list[int], "[64, 128]", [64, 128]),
        (list[int], "64,128", [64, 128]),
        (list[int], 64, [64]),
        (list[float], "0.1,1", [0.1, 1]),
        (list[float], 0.1, [0.1]),
        (list[float], (0, 0.5), [0, 0.5]),
        (dict, '{"snapkv": [128]}', {"snapkv": [128]}),
        (dict, {"a": 1}, {"a": 1}),
    ],
)
def test_a_list_may_be_given_in_every_form(kind, given, read):
    namespace = {"named": given, "other": "a,b"}
    typed(namespace, {"named": DECLARED[kind]})
    assert namespace == {"named": read, "other": "a,b"}
    assert [type(entry) for entry in namespace["named"]] == [type(entry) for entry in read]


@pytest.mark.parametrize(
    ("kind", "given", "wanted"),
    [
        (list[str], '["sotu/1962"', "must be a list of texts, such as ['one', 'another']; got '[\"sotu/1962\"'"),
        (list[str], [1], "a list of texts"),
        (list[str], None, "a list of texts"),
        (list[int], "64,many", "a list of whole numbers, such as [64, 128]; got [64, 'many']"),
        (list[int], 0.5, "a list of whole numbers"),
        (list[float], "all", "a list of numbers"),
        (list[float], True, "a list of numbers"),
        (dict, "[1]", "a mapping"),
        (dict, "snapkv", "a mapping"),
    ],
)
def test_what_is_no_such_list_is_told_what_is_wanted(kind, given, wanted):
    with one_sentence() as caught:
        typed({"named": given}, {"named": DECLARED[kind]})
    assert "parameter 'named'" in str(caught.value) and wanted in str(caught.value)


def test_a_file_with_a_comma_in_its_name_is_one_document(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes, final.txt").write_text("words")
    namespace = {"documents": "notes, final.txt", "others": "notes,final.txt"}
    typed(namespace, {"documents": ["sotu/1962"], "others": ["sotu/1962"]})
    assert namespace == {"documents": [str(tmp_path / "notes, final.txt")], "others": ["notes", "final.txt"]}


# ---------------------------------------------------------------- every notebook


def kinds(path):
    """parameter -> type of those that are lists with entries or mappings, by the notebook's own values."""
    types = {}
    for name, default in notebooks.parameters_of(path).items():
        if isinstance(default, dict):
            types[name] = "dict"
        elif isinstance(default, list) and default:  # an empty one has no entry to give
            entries = {type(entry) for entry in default}
            types[name] = f"list[{'float' if float in entries else entries.pop().__name__}]"
    return types


@BY_NAME
def test_papermills_help_lists_every_parameter(path, caplog):
    listed = papermill.inspect_notebook(path)
    assert {
        name: ast.literal_eval(parameter["default"]) for name, parameter in listed.items()
    } == notebooks.parameters_of(path)
    assert not caplog.records, "a line that papermill cannot read hides its parameter"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A folder that is no project, with a store."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "mlflow.db").write_bytes(blank_store())
    return folder


@pytest.fixture(scope="module")
def kernel(elsewhere):
    """One kernel for all notebooks: imports take longest, and papermill runs cells in any kernel it is given."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(
        cwd=str(elsewhere),
        env=environment(MLFLOW_TRACKING_URI=f"sqlite:///{elsewhere / 'mlflow.db'}", PYTHONPATH=str(ROOT)),
    )
    yield manager
    manager.shutdown_kernel(now=True)


def logged(folder, experiment):
    """The only run of an experiment in a folder's store."""
    client = database.client(f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def as_text(kind, default):
    """The first entry of a list, or a mapping, as it is typed behind -p; a list of texts as JSON."""
    return json.dumps(default[:1] if kind == "list[str]" else default) if kind in ("list[str]", "dict") else default[0]


@pytest.mark.roundtrip
@BY_NAME
def test_every_notebook_takes_its_lists_from_papermill(path, kernel, elsewhere):
    """Up to the cell in which it has read its parameters and its documents, and opened its run; one of them whole."""
    content = nbformat.read(path, as_version=4)
    started = next(number for number, cell in enumerate(content.cells) if "tracking.start(" in cell.source)
    if path.stem != WHOLE:
        content.cells = content.cells[: started + 1]
    nbformat.write(content, elsewhere / path.name)
    declared, types = notebooks.parameters_of(path), kinds(path)
    given = {name: as_text(kind, declared[name]) for name, kind in types.items()}
    given |= {name: value for name, value in SMALLEST.items() if name in declared}
    papermill.execute_notebook(
        elsewhere / path.name, elsewhere / f"{path.stem}.out.ipynb", parameters=given, km=kernel, progress_bar=False
    )
    (name,) = [known for known in experiments.names() if experiments.load(known).path.name == path.name]
    run = logged(elsewhere, name)
    assert run.info.status == ("FINISHED" if path.stem == WHOLE else "RUNNING")
    kept = run.data.params
    read = {key: declared[key][:1] if kind.startswith("list") else declared[key] for key, kind in types.items()}
    assert {key: json.loads(kept[key]) for key in types} == read


@pytest.mark.roundtrip
def test_a_whole_notebook_by_the_pages_command(elsewhere):
    """The very command, but for the paths, in a folder of its own."""
    page = (ROOT / "docs" / "batches.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("papermill ")]
    assert line.startswith(
        "papermill notebooks/zsmerge_error_curves.ipynb out.ipynb -p tokens 500 -p documents '[\"sotu/1962\"]'"
    )
    folder = elsewhere / "whole"
    folder.mkdir()
    (folder / "mlflow.db").write_bytes(blank_store())
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(ROOT / "notebooks" / "zsmerge_error_curves.ipynb"),
        "out.ipynb",
        "-p",
        "tokens",
        "500",
        "-p",
        "documents",
        '["sotu/1962"]',
        "--no-progress-bar",
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(MLFLOW_TRACKING_URI=f"sqlite:///{folder / 'mlflow.db'}", PYTHONPATH=str(ROOT)),
    )
    assert done.returncode == 0, done.stderr
    run = logged(folder, "zsmerge_error_curves")
    assert run.info.status == "FINISHED" and run.data.params["tokens"] == "500" and run.data.metrics
    assert (folder / "out.ipynb").exists() and not (folder / "mlruns").exists()


# ---------------------------------------------------------------- how a run ends


@pytest.mark.roundtrip
def test_a_run_that_fails_is_failed_and_the_driver_agrees(project):
    command = [
        sys.executable,
        "-m",
        "papermill",
        "notebooks/toy.ipynb",
        "out.ipynb",
        "-p",
        "boom",
        "True",
        "--no-progress-bar",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(PYTHONPATH=str(ROOT)))
    assert done.returncode != 0 and "the roof is on fire" in done.stderr
    (driven,) = launch.run(EXPERIMENT, overrides={"boom": True})
    client = database.client()
    found = client.search_runs(
        [client.get_experiment_by_name(EXPERIMENT).experiment_id],
        "tags.`kvlab.kind` != 'sweep'",
        order_by=["attributes.start_time ASC"],
    )
    assert [run.data.tags["kvlab.kind"] for run in found] == ["interactive", "trial"]
    assert [run.info.status for run in found] == ["FAILED", "FAILED"] and driven.state == "failed"
    assert found[0].data.tags["kvlab.error"] == "ValueError: the roof is on fire"
    assert found[0].info.end_time


@pytest.fixture
def shell():
    """IPython in this process, as in a notebook's kernel."""
    made = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    yield made
    InteractiveShell.clear_instance()


def test_a_cell_mended_by_hand_leaves_a_finished_run(project, shell, capsys):
    begun = "from kvlab.workbench.store import tracking; run = tracking.start('toy', {'seed': 0})"
    assert shell.run_cell(begun).success
    run = shell.user_ns["run"]

    def state():
        found = run.client.get_run(run.id)
        return found.info.status, found.data.tags.get("kvlab.error")

    shell.run_cell("run.log({'a': 1})")
    assert state() == ("RUNNING", None)
    shell.run_cell("1 / 0")
    assert state() == ("FAILED", "ZeroDivisionError: division by zero")
    shell.run_cell("raise KeyboardInterrupt")
    assert state() == ("KILLED", "KeyboardInterrupt: KeyboardInterrupt")
    shell.run_cell("run.log({'b': 1}); run.finish()")
    assert state() == ("FINISHED", None)
    shell.run_cell("1 / 0")
    assert state() == ("FINISHED", None)


# ---------------------------------------------------------------- which cell is the parameters cell


@pytest.mark.parametrize(
    ("ran", "declared"),
    [
        (["a = 1\nb = [2]", "import os"], {"a": 1, "b": [2]}),
        (["import os", "a = 1", "# Parameters\na = 5"], {"a": 1}),
        (["a = 1", "run = tracking.start('other')", "b = 2", "c = 3"], {"b": 2}),
        (["a = 1", "run = tracking.start('the same again')"], {"a": 1}),
    ],
)
def test_the_parameters_cell_is_the_first_of_plain_values(monkeypatch, ran, declared):
    shell = InteractiveShell()
    shell.user_ns |= {name: [7] if isinstance(value, list) else 7 for name, value in declared.items()}
    shell.user_ns["In"] = ["", *ran, "run = tracking.start('this')"]
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert parameters() == {name: [7] if isinstance(value, list) else 7 for name, value in declared.items()}


def test_without_a_parameters_cell_or_a_notebook_one_sentence_says_so(monkeypatch):
    with pytest.raises(KvlabError, match="the parameters must be given"):
        parameters()
    shell = InteractiveShell()
    shell.user_ns["In"] = ["", "import os", "run = tracking.start('this')"]
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    with pytest.raises(KvlabError, match="run the notebook from its first cell"):
        parameters()


# ---------------------------------------------------------------- a kernel that keeps no history, as under nbval


@pytest.fixture
def forgetful(project, monkeypatch):
    """A kernel in the toy's project whose history is empty, although its parameters cell has run."""
    shell = InteractiveShell()
    exec(PARAMETERS, shell.user_ns)
    shell.user_ns["In"] = [""]
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    return shell


def test_without_history_the_experiments_notebook_says_what_the_parameters_are(forgetful):
    forgetful.user_ns |= {"reduction": 0.7, "names": "c,d", "other": 1}
    found = parameters(EXPERIMENT)
    assert found == {"seed": 0, "reduction": 0.7, "boom": False, "names": ["c", "d"], "scale": 0.5}
    assert forgetful.user_ns["names"] == ["c", "d"]


def test_what_the_kernel_remembers_goes_before_the_file(forgetful):
    forgetful.user_ns |= {"In": ["", "seed = 1", "run = tracking.start('this')"], "seed": 1}
    assert parameters(EXPERIMENT) == {"seed": 1}


@pytest.mark.parametrize("experiment", [None, "of-another-project"])
def test_without_history_and_without_an_experiment_of_the_project_it_is_told_so(forgetful, experiment):
    with pytest.raises(KvlabError, match="run the notebook from its first cell"):
        parameters(experiment)


def test_a_parameters_cell_that_has_not_run_is_not_taken_from_the_file(forgetful):
    del forgetful.user_ns["scale"]
    with pytest.raises(KvlabError, match="run the notebook from its first cell"):
        parameters(EXPERIMENT)


@pytest.mark.roundtrip
def test_nbval_runs_a_notebook_that_reads_its_own_parameters(project):
    started = f'from kvlab.workbench.store import tracking\nrun = tracking.start("{EXPERIMENT}")\nrun.finish()'
    notebook(project / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), cell(started))
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "-p", "no:cacheprovider"]
    own = environment(PYTHONPATH=str(ROOT), MLFLOW_TRACKING_URI=f"sqlite:///{project / 'mlruns' / 'mlflow.db'}")
    done = subprocess.run(
        [*command, "notebooks/toy.ipynb"], cwd=project, capture_output=True, text=True, timeout=300, env=own
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout
    kept = logged(project / "mlruns", EXPERIMENT).data.params
    assert {name: json.loads(value) for name, value in kept.items()} == notebooks.parameters_of(
        project / "notebooks" / "toy.ipynb"
    )
