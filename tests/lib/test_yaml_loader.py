"""YAML is read safely, and what is wrong is told with its line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import one_sentence

from kvlab import KvlabError
from kvlab.lib import yaml_loader


def read(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    return yaml_loader.load(path)


def test_values_have_lines(tmp_path):
    data, lines = read(tmp_path, "a: 1\nb:\n  - x\n  - y: 2\n    z: [3,\n        4]\n")
    assert data == {"a": 1, "b": ["x", {"y": 2, "z": [3, 4]}]}
    assert [lines.at(place) for place in (["a"], ["b"], ["b", 0], ["b", 1, "y"], ["b", 1, "z", 1])] == [1, 2, 3, 4, 6]
    assert lines.at(["b", 1, "z", 9, "deeper"]) == 5
    assert lines.at(["c"]) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [1, 2", r"a.yaml is not valid YAML, line 1, column \d+: "),
        ("a: 1\na: 2\n", r"a.yaml, line 2: the key 'a' is there twice"),
        ("a: &x [*x]\n", r"a.yaml, line 1: an alias refers to what contains it"),
        ("a: !!python/object/apply:os.system ['true']\n", r"not valid YAML, line 1.*python/object"),
        ("a: 2001-13-45\n", r"not valid YAML"),
        ("[" * 3000, r"not valid YAML|nested too deeply"),
        ("\t- a", r"not valid YAML"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path, text, sentence):
    with one_sentence(sentence):
        read(tmp_path, text)


def test_a_small_file_cannot_stand_for_a_huge_one(tmp_path):
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
    )
    with pytest.raises(KvlabError, match="more than 200,000 values"):
        read(tmp_path, bomb)


def test_an_empty_file_is_no_data(tmp_path):
    assert read(tmp_path, "# nothing\n")[0] is None


@given(st.binary(max_size=200))
def test_any_bytes_are_data_or_one_sentence(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("yaml") / "a.yaml"
    path.write_bytes(content)
    try:
        yaml_loader.load(path)
    except KvlabError as error:
        assert "\n" not in str(error)
