"""The catalogue is what docs/models.md says, and pins everything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvlab.commands.stock import _millions
from kvlab.inputs import models, packs
from kvlab.inputs.models import sources

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def rows() -> dict[str, list[str]]:
    """The cells of the page's first table, by the model's name."""
    table = PAGE.read_text(encoding="utf-8").partition("\n| name | parameters |")[2].partition("\n\n")[0]
    lines = re.findall(r"^\| `([\w.-]+)`[^|]*\|(.*)\|$", table, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in lines}


def test_the_page_has_a_row_for_each_model():
    assert list(rows()) == list(models.MODELS)
    assert models.DEFAULT == next(iter(models.MODELS)) == "smollm2-135m"


@pytest.mark.parametrize("name", models.MODELS)
def test_the_page_says_what_the_catalogue_says(name):
    model, (parameters, context, licence, size, disk, wheels, hub) = models.MODELS[name], rows()[name]
    assert parameters == _millions(model.parameters) and context == f"{model.context // 1024}k"
    assert model.licence.startswith(licence)
    assert (size, disk) == (packs.gigabytes(model.fetched_size), packs.gigabytes(model.disk))
    first, last = model.parts[0].package, model.parts[-1].package
    assert wheels == (f"`{first}`" if first == last else f"`{first}` to `part{len(model.parts)}`")
    assert first == last or last.endswith(f"part{len(model.parts)}")
    assert hub == f"`{model.hub.repository}`"


@pytest.mark.parametrize("name", models.MODELS)
def test_everything_is_pinned(name):
    model = models.MODELS[name]
    hashes = [model.sha256, *(part.sha256 for part in model.parts)]
    assert all(re.fullmatch(r"[0-9a-f]{64}", sha256) for sha256 in hashes) and len(set(hashes)) == len(hashes)
    assert len({part.package for part in model.parts}) == len(model.parts)
    assert all(part.version == model.version for part in model.parts)
    # The sha256 holds for any revision; that of Gemma's repository is on record nowhere.
    assert re.fullmatch(r"[0-9a-f]{40}", model.hub.revision) or name == "gemma-3-270m"
    assert sources.room(model, "hub") == model.size + model.disk
    assert bool(model.terms) == (not model.licence.startswith("Apache-2.0"))


def test_gemmas_terms_are_named_with_their_address():
    assert "ai.google.dev/gemma/terms" in models.MODELS["gemma-3-270m"].terms
    assert "please read them" in models.MODELS["gemma-3-270m"].terms
