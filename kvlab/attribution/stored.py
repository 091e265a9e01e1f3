"""The entries that a live run stored rounded: which, since which step, and with which values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvlab.attribution.gated import Rounding
from kvlab.instruments.probes import Probe, Seen
from kvlab.instruments.records import Records


class StoredEntries(Probe):
    """Keeps the rounded form of every entry of one sequence. A storage rounds an entry once.

    Args:
        layers: the compressed layers' numbers in the model.
        prompt, steps: tokens of the prompt, and of the response that are fed.
    """

    name, summary = "stored_entries", "the rounded form of every entry"

    def __init__(self, layers: Sequence[int], prompt: int, steps: int):
        self._layers, self._prompt, self._steps = layers, prompt, steps
        self._found: dict[int, Rounding] = {}

    def look(self, seen: Seen, records: Records, where: dict[str, Any]) -> None:
        assert seen.new is not None, "a live run shows each step's own entry"
        layer, step = where["layer"], where["step"] - 1
        store, (new_keys, new_values) = seen.store, seen.new
        if layer not in self._found:
            self._found[layer] = self._nothing(store.keys[0], new_keys[0])
        found = self._found[layer]
        found.new_keys[:, step], found.new_values[:, step] = new_keys[0, :, 0], new_values[0, :, 0]
        rounded = store.rounded_slots[0] & store.occupied[0]
        before = found.when[:, : step + 1].any(1)
        sets, slots = rounded.nonzero(as_tuple=True)
        positions = store.positions[0][sets, slots].long()
        found.when[sets, step, positions] = True
        first_time = ~before[sets, positions]
        if bool(first_time.any()):
            sets, slots, positions = sets[first_time], slots[first_time], positions[first_time]
            found.keys[sets, positions] = store.keys[0][sets, slots]
            found.values[sets, positions] = store.values[0][sets, slots]

    def _nothing(self, stored: Tensor, new: Tensor) -> Rounding:
        sets, _, head_dim = stored.shape
        length = self._prompt + self._steps
        keys, values = stored.new_zeros(2, sets, length, head_dim)
        new_keys, new_values = new.new_zeros(2, len(new), self._steps, head_dim)
        when = torch.zeros(sets, self._steps, length, dtype=torch.bool, device=stored.device)
        return Rounding(keys, values, new_keys, new_values, when)

    def layers(self, reads: Sequence[Tensor]) -> list[Rounding]:
        """Return the rounding of each compressed layer, once the run has ended.

        Here a step finds an entry rounded only if it reads the entry. An entry that a step does not read is exact where
        it is put back.

        Args:
            reads: for each layer, which entries each step reads.
        """
        found = (self._found[layer] for layer in self._layers)
        pairs = zip(found, reads, strict=True)
        return [replace(each, when=each.when & read.to(each.when.device)) for each, read in pairs]
