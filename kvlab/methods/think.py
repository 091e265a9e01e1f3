"""ThinK (Xu et al., 2024): of the keys those channels go that the queries make least of."""

from functools import cached_property
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator, Field, InstanceOf
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.policy import Policy
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Wrapper
from kvlab.methods.full import Full

CHANNELS, PRUNED = "channels", "pruned"


def _object(scorer: Any) -> Any:
    if isinstance(scorer, str):
        raise ValueError(
            f"scorer={scorer!r} has no budget; give a policy, such as kvlab.policy({scorer!r}, budget=256)"
        )
    return scorer


class ThinK(Wrapper):
    """Drops channels of the prompt's keys, in each KV head those that the last queries weigh least; prefill only.

    ThinK (Xu et al. 2024), section 3.2: a channel's weight is |q_c|^2 x |k_c|^2, over the last `window` queries and all
    keys. The `ratio` of channels with the smallest weights goes. Tokens all stay, or those that a `scorer` keeps;
    generated tokens are kept whole. Cost: two sums of squares; a mask of the channels for each head.

    Choices: squares are averaged over the GQA group, and over all keys of the prompt, as in kvpress. Keys of the last
    `window` tokens stay whole, as in the authors' code. Dropped channels become zeros in the keys. Stored and read
    bytes count them as gone, as with a kernel for thinner keys; allocated bytes do not.

    Parameters:
        ratio: share of the key channels that goes (0.4), rounded down.
        window: latest prompt tokens whose queries weigh, and whose keys stay whole (32).
        scorer: a policy that keeps a part of the prompt and stores all that follows, with its budget; None for all.
    """

    name: ClassVar[str] = "think"
    summary: ClassVar[str] = "drops key channels that the last queries weigh least, alone or around another method"
    family: ClassVar[str] = "drops channels of keys"
    kind: ClassVar[str] = "channels"
    paper: ClassVar[Paper | None] = PAPERS["think"]

    ratio: Annotated[float, Field(ge=0, lt=1)] = 0.4
    window: Annotated[int, Field(ge=1)] = 32
    scorer: Annotated[InstanceOf[Policy] | None, BeforeValidator(_object)] = None

    @cached_property
    def _inner(self) -> Policy:
        inner = self.scorer or Full()
        if inner.needs.acts_while_decoding or inner.needs.surveys or getattr(inner, "sets", "group") == "head":
            raise KvlabError(
                f"{self.name} needs an inner policy that only chooses which prompt tokens each KV head keeps, such as "
                f"'snapkv' or 'keydiff', not {inner.name}"
            )
        return inner

    @classmethod
    def scores_tokens(cls) -> bool:
        # It has no budget for tokens that another method could spend.
        return False

    def fits(self, prompt_length: int) -> bool:
        """Whether there is no key beyond the window, so that none is changed."""
        return prompt_length <= self.window and self._inner.fits(prompt_length)

    @property
    def observes(self) -> int:
        return self.window

    def prefill(self, prompt: Prompt) -> Tensor:
        return self._inner.prefill(prompt)

    def pruned(self, prompt: Prompt) -> Tensor:
        """Which channels go, bool `[rows, kv_heads, head_dim]`."""
        asking = attention.exact(prompt.window(self.window)).square().mean(2)
        weight = asking.unflatten(1, (prompt.kv_heads, -1)).mean(2) * attention.exact(prompt.keys).square().mean(2)
        head_dim = weight.shape[-1]
        kept = ranking.top_positions(weight, head_dim - int(self.ratio * head_dim))
        return torch.ones_like(weight, dtype=torch.bool).scatter(-1, kept, False)

    def rewrite(self, store: LayerStore, prompt: Prompt) -> None:
        if prompt.seen <= self.window:
            return
        pruned, older = self.pruned(prompt), prompt.positions < store.seen - self.window
        store.rewrite_keys(store.keys.masked_fill(pruned[:, :, None] & older[..., None], 0))
        store.memory[CHANNELS], store.numbers[PRUNED] = pruned, store.seen - self.window

    def discount_bytes(self, store: LayerStore) -> int | Tensor:
        if PRUNED not in store.numbers or not store.length:
            return 0
        older = store.occupied & (store.positions < store.numbers[PRUNED])
        numbers = (older.sum(-1) * store.memory[CHANNELS].sum(-1)).sum()
        stored = sum(store.head_counts) * store.head_dim
        if numbers.is_cpu:
            return round(store.key_bytes * int(numbers) / stored)
        # The same in whole numbers, half to even: some GPUs have no float64.
        whole, rest = numbers * store.key_bytes // stored, numbers * store.key_bytes % stored * 2 - stored
        return whole + ((rest > 0) | ((rest == 0) & (whole % 2 == 1)))

    def overhead_bytes(self, store: LayerStore) -> int | Tensor:
        return super().overhead_bytes(store) - self.discount_bytes(store)
