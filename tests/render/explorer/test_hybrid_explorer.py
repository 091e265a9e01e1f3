"""Exploring a hybrid model by hand: the layers have the numbers that they have in the model."""

from __future__ import annotations

import re

import pytest
import torch

import kvlab
from kvlab.analyses import exploring, first_look
from kvlab.errors import KvlabError
from kvlab.render.explorer import drawings
from kvlab.render.explorer.html_medium import LIVE
from kvlab.render.explorer.query_view import Look


@pytest.fixture(scope="module")
def trace(tiny):
    """Of a model of 5 layers, of which 2 and 4 are compressed."""
    ids = torch.randint(3, 256, (60,), generator=torch.Generator().manual_seed(1))
    return kvlab.capture(tiny("hybrid-gemma3"), ids, 6)


@pytest.fixture
def explorer(trace):
    made = kvlab.explore(trace, "snapkv", "streamingllm", budgets=[40, 50])
    yield made
    made.close()


def test_the_slider_has_the_layers_that_there_are(explorer):
    explorer.panel  # noqa: B018
    control = explorer._controls["layer"]
    assert list(control.options) == [2, 4] and control.value == explorer.spot.layer
    for layer in (2, 4, 2):
        control.value = layer
        shown = "".join(part.value for part in explorer._parts.values())
        assert explorer.spot.layer == layer and f"layer {layer}, query head" in shown


def test_what_is_shown_is_that_layers(explorer, trace):
    for place, layer in enumerate((2, 4)):
        explorer.show(layer=layer, head=3, step=2)
        result = explorer.replay("snapkv", explorer.budget)
        look = Look(result, explorer.spot)
        assert look.row == place and look.mass_lost == pytest.approx(float(result.mass_lost[place, 3, 1]))
        numbers = re.findall(r'text-anchor="end">(\d+)</text>', drawings.maps(look, LIVE))
        assert numbers[:2] == ["2", "4"]


@pytest.mark.parametrize(
    ("layer", "message"), [(3, "layers 2 and 4 of the model are in this trace, and layer 3"), (5, "2 .. 4")]
)
def test_a_layer_that_is_not_compressed_cannot_be_read_skeleton(explorer, layer, message):
    with pytest.raises(KvlabError, match=message):
        explorer.show(layer=layer)


def test_analyses_name_the_models_layers(trace):
    result = kvlab.replay(trace, kvlab.policy("snapkv", budget=40))
    assert sorted(exploring.lost_by_layer([result]).table.layer) == [2, 4]
    assert first_look.lost_by_head(result).index.tolist() == [2, 4]
    assert first_look.worst(result).layer in (2, 4)
