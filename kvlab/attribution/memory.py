"""How much memory an attribution takes, foretold: a refusal before it starts is better than a process that is ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.attribution.path import points_at_once
from kvlab.core import hookable
from kvlab.core.geometry import geometry
from kvlab.core.storage import Storage
from kvlab.errors import KvlabError
from kvlab.lib import devices
from kvlab.methods import Policy

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

COPIES = 3
"""Of the prompt's keys and values: the prefill's, the greedy response's, and one that grows."""
STATES = 24
"""Numbers of a layer and token that a pass with its way back keeps, in hidden sizes."""


def needed(lm: LM, tested: Policy, prompt: int, steps: int, storage: Storage, chunk: int) -> int:
    """Bytes above the loaded model, about: an upper end for plain decoders.

    Args:
        prompt, steps: tokens of the prompt, and of the response that are fed.
        chunk: tokens of the prompt that are fed at once.
    """
    config, shape = hookable.text_config(lm.model), geometry(lm.model.config)
    layers, length, number = len(lm.layout.compressed), prompt + steps, lm.dtype.itemsize
    entries = layers * shape.kv_heads * length
    of_prompt = entries * 2 * shape.head_dim * number
    queries = layers * shape.heads * prompt * shape.head_dim * number if tested.needs.every_query else 0
    hidden = layers * prompt * config.hidden_size * number if tested.needs.hidden else 0
    found = COPIES * of_prompt + (1 + tested.needs.pre_queries) * queries + hidden
    stepwise = tested.needs.acts_while_decoding or not storage.exact
    kept = length if tested.needs.selects or tested.asked is None else min(length, tested.entries(prompt) + steps)
    # A flag for each step and entry, and the positions that the steps read.
    found += entries * (steps if stepwise else 1)
    found += layers * shape.kv_heads * steps * kept * 8 if stepwise else 0
    if not storage.exact:
        found += of_prompt + entries * steps
    found += 6 * 4 * entries  # effects of three kinds, attention, and sums
    points = points_at_once(lm, steps)
    passed = points * steps * 4 * (3 * config.vocab_size + STATES * config.hidden_size * shape.layers)
    fed = chunk * number * (8 * config.hidden_size + 3 * (getattr(config, "intermediate_size", None) or 0))
    return found + max(passed, fed)


def check(lm: LM, tested: Policy, prompt: int, steps: int, storage: Storage, chunk: int) -> None:
    """Raise KvlabError where the attribution would take more memory than there is."""
    wanted = needed(lm, tested, prompt, steps, storage, chunk)
    places = {lm.device, *hookable.devices_of(lm.model)}
    rooms = [room for place in places if (room := devices.free_memory(place)) is not None]
    if len(rooms) == len(places) and wanted > (free := sum(rooms)):
        raise KvlabError(
            f"{prompt} prompt and {steps + 1} response tokens take about {wanted / 2**30:.1f} GiB to attribute, and "
            f"{lm.device.type} has {free / 2**30:.1f} GiB free; shorten the document (Document.window) or the response"
        )
