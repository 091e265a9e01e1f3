"""Retained sets that any other code has recorded in a file, as a policy (docs/record_sets.py writes such files)."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

from pydantic import model_validator
from torch import Tensor

from kvlab.core import ranking
from kvlab.core.slots import EMPTY, described, fault
from kvlab.core.storage import alike
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.methods._base import tensor_files
from kvlab.methods._base.needs import Needs
from kvlab.methods._base.policy import Policy
from kvlab.methods._base.prompt import Prompt

FORMAT = "kvlab-sets-1"


@dataclass(frozen=True)
class Sets:
    """The content of a file of retained sets.

    Attributes:
        kept: int64 `[layers, kv_heads, n]`, positions that stay of the prompt, ascending, -1 padded.
        steps: int64 `[steps, layers, kv_heads, n]`, positions stored after each decoding step; None where all stay.
        tokens, sha256: how many tokens the prompt has, and the hash of their ids.
        model, source: names of the model, and of what chose the sets.
        content: the hash of the file.
    """

    kept: Tensor
    steps: Tensor | None
    tokens: int
    sha256: str
    model: str
    source: str
    content: str

    @property
    def mean(self) -> float:
        """Entries for each layer and KV head after the prefill."""
        return float((self.kept != EMPTY).sum(-1).double().mean())


class Recorded(Policy):
    """Keeps the sets of a file, which any other code has recorded for one prompt of one model.

    Not from a paper. The safetensors file holds `kept`, integers `[layers, kv_heads, n]`: positions of the prompt in
    ascending order, -1 padded. Optionally it holds `steps`, `[steps, layers, kv_heads, n]`: the positions stored after
    each decoding step, of prompt and response. Its metadata are `format` ("kvlab-sets-1"), `prompt_tokens`,
    `prompt_sha256` (of the ids as little-endian int64), `model` and `source`. Without `steps`, and after the last of
    them, every generated token is also kept. `docs/record_sets.py` writes such files for any press of kvpress. The
    budget is the file's own: entries for each layer and KV head on average. Cost: none.

    Parameters:
        sets: the file.
        any_model: take the sets also for a model of another name; its layers and KV heads must still fit.
    """

    name: ClassVar[str] = "recorded"
    summary: ClassVar[str] = "sets of a file, which any other code has recorded"
    family: ClassVar[str] = "reference"
    kind: ClassVar[str] = "reference"
    weighs: ClassVar[bool] = False

    sets: str
    any_model: bool = False

    @model_validator(mode="after")
    def _readable(self) -> Self:
        _ = self._found
        return self

    def __str__(self) -> str:
        found = self._found
        return f"{found.source or self.name}(budget={self.asked}, sets={Path(self.sets).name!r})@{found.content[:8]}"

    __repr__ = __str__

    @cached_property
    def _found(self) -> Sets:
        return read(self.sets)

    @property
    def needs(self) -> Needs:
        return Needs(origin=True)

    @property
    def asked(self) -> int:
        return math.ceil(self._found.mean)

    def fits(self, prompt_length: int) -> bool:
        """Never: a short prompt, too, may be another than the file's."""
        return False

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        self._check(prompt)
        return self._found.kept[list(prompt.layers)].to(prompt.keys.device)

    @property
    def steps(self) -> bool:
        return self._found.steps is not None

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        found = self._found
        number = store.seen - found.tokens
        if found.steps is None or number > len(found.steps):
            return
        wanted = found.steps[number - 1, list(store.layers)].to(store.device)
        positions = store.positions
        stays = ranking.marked(wanted, store.seen).gather(2, positions.clamp_min(0)) & (positions != EMPTY)
        if int(stays.sum()) < int((wanted != EMPTY).sum()):
            raise KvlabError(f"{self.sets} wants an entry after step {number} that an earlier step has evicted")
        if int(stays.sum()) < int(store.counts.sum()):
            store.evict(ranking.positions_of(stays))

    def _check(self, prompt: Prompt) -> None:
        """Raise KvlabError where the sets are of another prompt or another model."""
        found = self._found
        layers, heads = found.kept.shape[:2]
        if (layers, heads) != (prompt.n_layers, prompt.kv_heads):
            raise KvlabError(
                f"{self.sets} has sets for {layers} layers of {heads} KV heads, and this model has "
                f"{prompt.n_layers} of {prompt.kv_heads}; record them with this model"
            )
        ids, model = prompt.origin(self)
        if any(sha256_of(row) != found.sha256 for row in ids):
            raise KvlabError(
                f"{self.sets} has sets of another prompt, of {found.tokens} tokens (this one has {ids.shape[-1]}); "
                "feed the very ids that were recorded, chat template included"
            )
        if not (self.any_model or alike(found.model, model)):
            raise KvlabError(
                f"{self.sets} was recorded with {found.model}, and this model is {model}; if they have the same "
                "weights, say any_model=True"
            )


def sha256_of(ids: Tensor) -> str:
    """The hash of one prompt's ids `[tokens]`, as little-endian int64."""
    return hashlib.sha256(ids.cpu().long().contiguous().numpy().astype("<i8").tobytes()).hexdigest()


def read(path: str | Path) -> Sets:
    """The sets of a file.

    Raises:
        KvlabError: there is no such file, or its content is not right.
    """
    tensors, about, content = tensor_files.read(path, "retained sets; docs/record_sets.py writes one")
    wrong = _fault(tensors, about)
    if wrong:
        raise KvlabError(f"{path} is no file of retained sets: {wrong}")
    kept, steps = tensors["kept"].long(), tensors.get("steps")
    return Sets(
        kept=kept,
        steps=None if steps is None else steps.long(),
        tokens=int(about["prompt_tokens"]),
        sha256=about["prompt_sha256"],
        model=about.get("model", ""),
        source=about.get("source", ""),
        content=content,
    )


def _fault(tensors: dict[str, Tensor], about: dict[str, str]) -> str:
    """Describe the fault in the content of a file; empty if there is none."""
    if about.get("format") != FORMAT:
        return f"its format is {about.get('format')!r} and not {FORMAT!r}"
    if not about.get("prompt_tokens", "").isdigit() or not about.get("prompt_sha256"):
        return "its metadata lack prompt_tokens or prompt_sha256"
    kept, steps, tokens = tensors.get("kept"), tensors.get("steps"), int(about["prompt_tokens"])
    if kept is None or kept.dim() != 3 or kept.is_floating_point() or not kept.numel():
        return f"`kept` is whole numbers [layers, kv_heads, n], and not {described(kept)}"
    if not bool((kept != EMPTY).any(-1).all()):
        return "a head keeps nothing; each keeps one entry at least"
    if wrong := fault(kept.long(), tokens):
        return f"`kept` holds {wrong}"
    if steps is None:
        return ""
    if steps.dim() != 4 or steps.is_floating_point() or steps.shape[1:3] != kept.shape[:2]:
        return f"`steps` is whole numbers [steps, {kept.shape[0]}, {kept.shape[1]}, n], and not {described(steps)}"
    for number, sets in enumerate(steps.long(), 1):
        if wrong := fault(sets, tokens + number):
            return f"`steps` holds {wrong} after step {number}"
    return ""
