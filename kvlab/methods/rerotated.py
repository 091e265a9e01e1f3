"""Positions made contiguous after an eviction, around a score."""

from typing import ClassVar

import torch
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.methods._base.needs import Needs
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import ScorerWrapper


class Rerotated(ScorerWrapper):
    """Keeps the entries that another policy keeps, and turns their keys to positions without gaps; prefill only.

    Not from a paper: StreamingLLM (Xiao et al. 2023) and Finch (Corallo and Papotti 2024) give the kept entries
    consecutive positions. No query is then further from a key than the cache is long. Here any score chooses. A key is
    turned back by its position and turned again to its new one. Every generated token is also kept. Cost: that of the
    scorer, and two rotations of the prompt's keys, once.

    Choices: the entries that stay end right before the first generated token, which keeps its own position. RoPE sees
    distances alone, so that this is the same as counting from 0. Heads that keep fewer entries begin later. Eviction
    while decoding, which would move keys at every step, is left out.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt.
        scorer: a policy that scores tokens, by name or as an object ("snapkv").
    """

    name: ClassVar[str] = "rerotated"
    summary: ClassVar[str] = "another's scores; what stays gets positions without gaps"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(rotation=True)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return self._inner.choose(prompt, budget)

    def rewrite(self, store: LayerStore, prompt: Prompt) -> None:
        if self.fits(prompt.length):
            return
        if prompt.lossy:
            raise KvlabError(
                f"{self.name} has moved the entries of an earlier turn, and cannot move them again; store later turns "
                "whole (turns='leave')"
            )
        # An entry moves on by as many as there are after it that leave.
        gaps = ~ranking.marked(self.prefill(prompt), prompt.length)
        moved = prompt.positions + gaps.flip(-1).cumsum(-1).flip(-1)
        rows = zip(prompt.keys, prompt.positions, moved, prompt.rotation(self), strict=True)
        turned = [
            rotation.turned(rotation.turned_back(attention.exact(keys), before), after)
            for keys, before, after, rotation in rows
        ]
        store.rewrite_keys(torch.stack(turned).to(prompt.keys.dtype))
