"""The drawings: a map of layers and heads, and the steps of a head."""

from __future__ import annotations

import re

import numpy as np
from support.exploring import (
    PLACE,
    channels,
)
from support.replaying import HEADS, KV_HEADS

import kvlab
from kvlab.render.explorer import drawings
from kvlab.render.explorer.html_medium import LIVE
from kvlab.render.explorer.query_view import Look


def test_a_map_shades_every_cell_and_frames_the_chosen_one(trace):
    look = Look(kvlab.replay(trace, kvlab.policy("streamingllm", budget=10)), PLACE)
    lost, recall = re.findall("<svg.*?</svg>", drawings.maps(look, LIVE))
    for drawing, values, column in (
        (lost, look.result.mass_lost[:, :, PLACE.step - 1], PLACE.head),
        (recall, look.result.recall, PLACE.head * KV_HEADS // HEADS),
    ):
        shades = np.full(values.shape, np.nan)
        for path, colour in re.findall(r'<path d="((?:M\d+ \d+h\d+)+)" stroke="(#\w+)"/>', drawing):
            for x, y, run in re.findall(r"M(\d+) (\d+)h(\d+)", path):
                assert np.isnan(shades[int(y), int(x) : int(x) + int(run)]).all(), "a cell is painted once"
                shades[int(y), int(x) : int(x) + int(run)] = sum(channels(f"background:{colour}"))
        order = np.argsort(values.flatten().numpy(), kind="stable")
        assert (np.diff(shades.flatten()[order]) <= 0).all() and shades.min() < shades.max(), "more is darker"
        x, y = map(float, re.search(r'class="kvlab-chosen" d="M([\d.]+) ([\d.]+)', drawing).groups())
        width = float(re.search(r"scale\(([\d.]+)", drawing).group(1))
        assert (round((x - drawings.MARGIN) / width), y / drawings.CELL) == (column, PLACE.layer)
    assert ">query head<" in lost and ">KV head<" in recall
    assert f"here {look.mass_lost:.1%}" in lost


def test_the_steps_of_a_head_are_drawn_with_the_chosen_one_framed(trace):
    look = Look(kvlab.replay(trace, kvlab.policy("streamingllm", budget=10)), PLACE)
    drawing = re.search("<svg.*?</svg>", drawings.steps(look, LIVE, 102)).group()
    path, width = re.search(r'd="M0 102([^"]*)V102z" transform="scale\(([\d.]+)', drawing).groups()
    heights, height = [], 0
    for verb, number in re.findall(r"([hv])(-?\d+)", path):
        height -= int(number) if verb == "v" else 0
        heights += [height] * int(number) if verb == "h" else []
    assert heights == [round(100 * value) for value in look.result.mass_lost[PLACE.layer, PLACE.head].tolist()]
    left = float(re.search(r'class="kvlab-chosen" d="M([\d.]+)', drawing).group(1))
    assert round(left / float(width)) == PLACE.step - 1
