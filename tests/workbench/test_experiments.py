"""Experiments: what a YAML may say, what a parameter may be, and when a job is the same job."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import ROOT
from support.projects import PARAMETERS, cell, experiment, notebook
from support.refusals import one_sentence

from kvlab.errors import KvlabError
from kvlab.workbench import experiments
from kvlab.workbench.experiments import inputs
from kvlab.workbench.experiments.notebooks import parameters_of

NAME = "zsmerge_error_curves"


def test_own_experiments_parse():
    for path in sorted((ROOT / "experiments").glob("*.yaml")):
        loaded = experiments.load(path.stem)
        assert set(loaded.profiles) >= {"quick", "full", "gpu"} and len(loaded.summary) > 20


def test_grid_makes_jobs_and_profiles_change_them(project):
    experiment(
        project,
        parameters={"seed": 1},
        grid={"reduction": [0.1, 0.2]},
        profiles={"quick": {}, "full": {"grid": {"reduction": [0.1, 0.2, 0.3]}, "parameters": {"seed": 7}}},
    )
    quick, full = experiments.jobs(NAME), experiments.jobs(NAME, "full")
    assert [job.parameters["reduction"] for job in quick] == [0.1, 0.2]
    assert [(job.parameters["seed"], job.name) for job in full] == [(7, f"reduction=0.{n}") for n in (1, 2, 3)]
    assert quick[0].parameters == {"seed": 1, "reduction": 0.1, "boom": False, "names": ["a", "b"], "scale": 0.5}
    assert len({job.key for job in quick + full}) == 5


def test_overrides_from_the_command_line_take_the_notebooks_types(project):
    experiment(project, grid={"reduction": [0.1, 0.2]})
    (job,) = experiments.jobs(NAME, overrides={"seed": "3", "reduction": "1e-2", "names": "x,y", "boom": "true"})
    assert job.parameters == {"seed": 3, "reduction": 0.01, "names": ["x", "y"], "boom": True, "scale": 0.5}
    assert len(experiments.jobs(NAME, overrides={"reduction": [0.1, 0.2, 0.3]})) == 3


def test_files_in_a_list_are_named_from_where_the_command_runs(project, tmp_path, monkeypatch):
    experiment(project)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "notes.txt").write_text("Some notes.")
    monkeypatch.setenv("KVLAB_ROOT", str(project))
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = [
        experiments.jobs(NAME, overrides={"names": text})[0].parameters["names"]
        for text in ("sotu/1962,notes.txt", '["sotu/1962", "notes.txt"]')
    ]
    assert found == [["sotu/1962", str(tmp_path / "elsewhere" / "notes.txt")]] * 2


def test_a_text_may_be_left_out_and_nothing_else(project):
    notebook(project / "notebooks" / "toy.ipynb", cell("heads = 'smollm2-135m'\nseed = 0", "parameters"))
    experiment(project, parameters={"seed": 0}, profiles={"quick": {}, "gpu": {"parameters": {"heads": None}}})
    found = [experiments.jobs(NAME, profile)[0].parameters["heads"] for profile in ("quick", "gpu")]
    assert found == ["smollm2-135m", None]
    with pytest.raises(KvlabError, match="must be a whole number"):
        experiments.jobs(NAME, overrides={"seed": None})


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"sede": 1}, "unknown parameter of zsmerge_error_curves 'sede'; did you mean 'seed'"),
        ({"seed": "many"}, "'seed' of zsmerge_error_curves must be a whole number, such as 0; got 'many'"),
        ({"seed": 1.5}, "whole number"),
        ({"seed": True}, "whole number"),
        ({"boom": "1"}, "true or false"),
        ({"names": 3}, "must be a list"),
        ({"names": [1]}, "must be a list"),
        ({"scale": "wide"}, "must be a number"),
        ({"scale": float("nan")}, "no plain number"),
        ({"scale": object()}, "does not fit into JSON"),
    ],
)
def test_wrong_parameters_teach(project, overrides, match):
    with one_sentence(match):
        experiments.jobs(NAME, overrides=overrides)


def test_values_become_plain_json():
    mixed = {"a": (1, numpy.float32(0.5)), "b": numpy.arange(2), "c": Path("x"), "d": None}
    plain = experiments.plain(mixed)
    assert plain == {"a": [1, 0.5], "b": [0, 1], "c": "x", "d": None}
    assert type(plain["a"][1]) is float and type(plain["b"][0]) is int


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"notebok": "x"}, "unknown key 'notebok'; did you mean 'notebook'"),
        (
            {"profiles": {"quick": {"parameter": {}}}},
            "unknown key in profiles.quick 'parameter'; did you mean 'parameters'",
        ),
        ({"notebook": None}, "the key 'notebook' is missing"),
        ({"grid": {"seed": 3}}, "grid.seed: "),
        ({"grid": {"seed": []}}, "no values for 'seed'"),
        ({"grid": {"sed": [3]}}, "did you mean 'seed'"),
        ({"parameters": {"names": "a"}}, "must be a list"),
        ({"notebook": "notebooks/gone.ipynb"}, "gone.ipynb is missing"),
    ],
)
def test_a_wrong_yaml_is_one_sentence(project, changes, match):
    experiment(project, **changes)
    with one_sentence(match):
        experiments.jobs(NAME)


def test_broken_yaml_unknown_names_and_profiles(project):
    (project / "experiments" / "broken.yaml").write_text("notebook: [")
    with pytest.raises(KvlabError, match=r"broken\.yaml is not valid YAML"):
        experiments.load("broken")
    with pytest.raises(KvlabError, match="did you mean 'zsmerge_error_curves'"):
        experiments.load("zsmerge_error_curve")
    experiment(project, profiles={"quick": {}})
    with pytest.raises(KvlabError, match="unknown profile of zsmerge_error_curves 'full'"):
        experiments.jobs(NAME, "full")


@pytest.mark.parametrize(
    ("sources", "match"),
    [
        ([("x = 1", [])], "one cell tagged `parameters`, and has 0"),
        ([("x = 1", ["parameters"]), ("y = 1", ["parameters"])], "has 2"),
        ([("x = = 1", ["parameters"])], "not Python"),
    ],
)
def test_notebooks_without_proper_parameters(tmp_path, sources, match):
    notebook(tmp_path / "n.ipynb", *(cell(text, *tags) for text, tags in sources))
    with pytest.raises(KvlabError, match=match):
        parameters_of(tmp_path / "n.ipynb")


def test_parameters_of_reads_multiline_and_annotated_literals(tmp_path):
    notebook(
        tmp_path / "n.ipynb",
        cell(
            "a: int = 1\nb = [\n  1,  # one\n  2]\nc = (1.0, 2)\nd = None\ne = len('x')\n"
            "f = dict(x=1, y=[2])\ng = dict(**f)",
            "parameters",
        ),
    )
    assert parameters_of(tmp_path / "n.ipynb") == {
        "a": 1,
        "b": [1, 2],
        "c": [1.0, 2],
        "d": None,
        "e": None,
        "f": {"x": 1, "y": [2]},
        "g": None,
    }


def test_the_key_follows_what_could_change_the_numbers(project, monkeypatch):
    key = experiments.jobs(NAME)[0].key
    assert experiments.jobs(NAME)[0].key == key
    assert experiments.jobs(NAME, overrides={"seed": 1})[0].key != key

    notebook(project / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), cell("changed = True"))
    assert experiments.jobs(NAME)[0].key != key

    text = project / "text.txt"
    named = {"names": [str(text)]}
    text.write_text("one")
    first = experiments.jobs(NAME, overrides=named)[0].key
    text.write_text("two")
    assert experiments.jobs(NAME, overrides=named)[0].key != first

    second = experiments.jobs(NAME)[0].key
    monkeypatch.setattr(experiments.content_key.project, "version", lambda: "99.0.0")
    assert experiments.jobs(NAME)[0].key == second, "a new version of the same code has the same numbers"
    monkeypatch.setattr(experiments.content_key.project, "code_hash", lambda: "other code")
    assert experiments.jobs(NAME)[0].key != second


MEASURES = "from kvlab.analyses import first_look\nfound = first_look.measure(seed)\nrun.log(found.metrics)"


@pytest.mark.parametrize(
    ("other", "moves"),
    [
        ("run.figure('loss', draw.loss(found))\nrun.tell('loss', story.loss(found))", False),
        ("from kvlab.render.figures import plots as p\n# a comment", False),
        ("run.figure('other', draw.loss(found, title='Loss'))", False),
        ("run.record('loss', figure=draw.loss(found), text=story.loss(found))", False),
        ("run.record('loss', found)", True),
        ("found = first_look.measure(seed + 1)", True),
        ("run.log({'x': 1})", True),
        ("run.figure('loss', draw.loss(found := 3))", True),
        ("%time measure()", True),
    ],
)
def test_the_key_leaves_out_what_a_notebook_only_shows(project, other, moves):
    def key(*cells):
        notebook(project / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), *map(cell, cells))
        return experiments.jobs(NAME)[0].key

    assert (key(MEASURES, other) != key(MEASURES)) == moves


def test_the_key_follows_tables_that_come_with_kvlab_for_the_model(tmp_path, monkeypatch):
    """Learnt for a model that ran with neutral ones, they call for another run; those of another model do not."""
    notebook(tmp_path / "one.ipynb", cell("model = 'mine'\ntables = 'auto'", "parameters"))
    content, package = experiments.content_key, tmp_path / "kvlab"
    shipped = package / "methods" / "tables"
    shipped.mkdir(parents=True)
    monkeypatch.setattr(content, "__file__", str(package / "workbench" / "experiments" / "content_key.py"))

    def key(**changes):
        return content.key(tmp_path / "one.ipynb", {"model": "mine", "tables": "auto"} | changes)

    neutral, named = key(), key(model="other", tables="mine")
    (shipped / "mine.json").write_text("{}")
    learnt = key()
    assert learnt != neutral and key(model="other", tables="mine") != named
    (shipped / "other.json").write_text("{}")
    assert key() == learnt and key(tables="") == key(tables="") != learnt
    (shipped / "mine.json").write_text("{} ")
    assert key() != learnt


def test_the_key_follows_the_tables_of_every_budget(tmp_path, monkeypatch):
    """And not those of a model whose name begins alike."""
    notebook(tmp_path / "one.ipynb", cell("model = 'mine'\nalone = 'auto'", "parameters"))
    content, package = experiments.content_key, tmp_path / "kvlab"
    shipped = package / "methods" / "alone"
    shipped.mkdir(parents=True)
    monkeypatch.setattr(content, "__file__", str(package / "workbench" / "experiments" / "content_key.py"))

    def key(alone="auto"):
        return content.key(tmp_path / "one.ipynb", {"model": "mine", "alone": alone})

    none, named = key(), key(["mine-64.json"])
    (shipped / "mine-64.json").write_text("{}")
    one = key()
    (shipped / "mine-coder-64.json").write_text("{}")
    assert key() == one != none and key(["mine-64.json"]) == named
    (shipped / "mine-128.json").write_text("{}")
    assert key() != one


def test_a_yaml_names_files_from_the_projects_root_or_the_notebooks_folder(project):
    """A job runs in the folder of its notebook."""
    notebooks = project / "notebooks"
    for path in (project / "root.txt", project / "both.txt", notebooks / "both.txt"):
        path.write_text("A text of one's own.")
    experiment(project, parameters={"names": ["root.txt", "both.txt", "sotu/1962", "v1.5"]})
    (job,) = experiments.jobs(NAME)
    assert job.parameters["names"] == [str(project / "root.txt"), "both.txt", "sotu/1962", "v1.5"]


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"model": "smollm2-135"}, "smollm2-135m"),
        ({"document": "missing.txt"}, "missing"),
        ({"documents": ["empty.txt"]}, "empty"),
    ],
)
def test_inputs_are_looked_at_before_anything_runs(project, parameters, match):
    (project / "empty.txt").write_text("  \n")
    with one_sentence(match):
        inputs.prepare([{"seed": 0}, parameters])


def test_inputs_that_exist_pass(project):
    (project / "text.txt").write_text("A text of one's own.")
    inputs.prepare([{"document": str(project / "text.txt"), "model": "random:tiny-llama-gqa", "seed": 1}])
    inputs.prepare([{"documents": ["mixed/20", "code/argparse"]}])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"notebook": "../elsewhere/toy.ipynb"}, r"line \d+: '../elsewhere/toy.ipynb' leaves the project; name a file"),
        ({"parameters": {"names": ["a", "/etc/passwd"]}}, r"'/etc/passwd' leaves the project.*-p names="),
        ({"grid": {"names": [["~/secrets"]]}}, r"'~/secrets' leaves the project"),
        ({"profiles": {"quick": {"parameters": {"names": ["texts/../../x"]}}}}, r"leaves the project"),
    ],
)
def test_a_yaml_cannot_lead_out_of_the_project_but_a_person_can(project, changes, match):
    experiment(project, **changes)
    with pytest.raises(KvlabError, match=match):
        experiments.load(NAME)
    experiment(project, description="See ../other and /tmp.")
    (job,) = experiments.jobs(NAME, overrides={"names": ["/etc/passwd"]})
    assert job.parameters["names"] == ["/etc/passwd"]


def test_a_mistake_is_told_with_its_line(project):
    path = project / "experiments" / f"{NAME}.yaml"
    path.write_text(
        "notebook: notebooks/toy.ipynb\ndescription: A toy.\nprofiles:\n  quick:\n    grid:\n      seed: 3\n"
    )
    with pytest.raises(KvlabError, match=rf"{NAME}\.yaml, line 6: profiles\.quick\.grid\.seed: "):
        experiments.load(NAME)


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_a_text_reaches_the_notebook_as_it_is(text):
    """Parameters are data: whatever a text holds, the notebook's cell binds that very text and does nothing else."""
    from papermill.translators import PythonTranslator

    bound = {}
    exec(PythonTranslator.codify({"name": text, "names": [text]}), {}, bound)
    assert bound == {"name": text, "names": [text]}
