"""Results of an attribution: losses, effects, and the entries put back."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kvlab.attribution.path import Response
from kvlab.core.storage import AS_IS, Storage
from kvlab.errors import KvlabError
from kvlab.inputs.token_texts import token_texts
from kvlab.lib import progress_bars
from kvlab.methods import Policy

if TYPE_CHECKING:
    import pandas as pd

    from kvlab.inputs.models import LM

COUNTS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Entries that the curve of restoring puts back."""
ORDERS = ("effect", "attention", "recency", "random")
SUMS = ("effect", "harmful", "helpful", "attention", "entries")
ROUNDING_SUMS = ("keys", "values", "attention", "entries")
GROUPS = {"token": ["position", "token"], "head": ["layer", "kv_head"], "layer": ["layer"]}


@dataclass
class Found:
    """Numbers of an attribution.

    Attributes:
        effects: `[layers, kv_heads, prompt + steps]`, in nats.
        attention: the full cache's attention summed over steps and the group's heads, of the same shape.
        policy_loss, full_loss: of the response, in nats.
        by_step: `[steps]`, how much the policy costs each token of the response but the first, in nats.
        points: on the line.
        rounding: `[2, layers, kv_heads, prompt + steps]`, effects of rounded keys and of rounded values, in nats.
    """

    effects: Tensor
    attention: Tensor
    policy_loss: float
    full_loss: float
    by_step: Tensor
    points: int
    rounding: Tensor


class Attribution:
    """The cost of each evicted entry's loss for a response.

    Attributes:
        policy: that was attributed.
        document: the prompt's name with a hash.
        loss: "nll" or "kl".
        prompt: token ids of the prompt, int64 `[prompt]`.
        response: token ids of the response, int64 `[tokens]`.
        effects: `[layers, kv_heads, prompt + tokens - 1]`, nats; 0 for what every step reads. Layers are those that a
            policy compresses.
        attention: of the response over the full cache, summed over steps and query heads, of the same shape.
        by_step: `[tokens - 1]`, what the policy costs each token of the response but the first, in nats.
        storage: in what form the policy stored what it kept.
        rounding_keys, rounding_values: cost of rounding the entry's key or value, nats, shaped like `effects`; 0 for
            entries evicted or exact at every step.
    """

    def __init__(
        self,
        lm: LM,
        policy: Policy,
        document: str,
        ids: Tensor,
        made: Response,
        reads: list[Tensor],
        found: Found,
        loss: str,
        storage: Storage = AS_IS,
    ):
        self.lm, self.policy, self.document, self.loss = lm, policy, document, loss
        self.prompt, self.response = ids, made.ids
        self.effects, self.attention, self.by_step = found.effects.cpu(), found.attention.cpu(), found.by_step.cpu()
        self.storage = storage
        self.rounding_keys, self.rounding_values = found.rounding.cpu()
        self._made, self._reads, self._found = made, reads, found

    @cached_property
    def summary(self) -> dict[str, float]:
        """Numbers of the whole response, in nats.

        `loss_policy`, `loss_full` and their `difference`. `explained` is the sum of all effects, `unexplained` the
        rest. `harmful` sums the effects of entries whose loss cost the response, `helpful` of those whose loss helped
        it. `rounding_keys` and `rounding_values` sum the costs of rounding. `evicted` counts the entries (layer, KV
        head, position) that some step does not read. `points` is the number of points on the line.
        """
        effects, keys, values = (each.double() for each in (self.effects, self.rounding_keys, self.rounding_values))
        explained = float(effects.sum() + keys.sum() + values.sum())
        difference = self._found.policy_loss - self._found.full_loss
        return {
            "loss_policy": self._found.policy_loss,
            "loss_full": self._found.full_loss,
            "difference": difference,
            "explained": explained,
            "unexplained": difference - explained,
            "harmful": float(effects.clamp_min(0).sum()),
            "helpful": float(effects.clamp_max(0).sum()),
            "rounding_keys": float(keys.sum()),
            "rounding_values": float(values.sum()),
            "evicted": float(self.evicted.sum()),
            "points": float(self._found.points),
        }

    @cached_property
    def kept(self) -> Tensor:
        """Share of the (query head set, step) pairs that read the entry, of those that come after it, `[layers,
        kv_heads, prompt + steps]`: 1 for what is always read.
        """
        steps, prompt = self._made.steps, self._made.prompt
        kv_heads = self.effects.shape[1]
        after = torch.ones(steps, prompt + steps, dtype=torch.bool)
        after[:, prompt:] = torch.ones(steps, steps, dtype=torch.bool).tril()
        found = []
        for read in self._reads:
            shared = read.cpu().unflatten(0, (kv_heads, -1)).expand(-1, -1, steps, -1)
            found.append((shared & after).sum((1, 2)) / (after.sum(0) * shared.shape[1]))
        return torch.stack(found)

    @property
    def name(self) -> str:
        """The policy, and its storage where that is not the plain one."""
        return self.storage.behind(str(self.policy))

    def is_of(self, prompt: Tensor) -> bool:
        """Whether these are the token ids of the prompt."""
        return torch.equal(self.prompt, prompt.cpu())

    @property
    def costs(self) -> Tensor:
        """Effects of evictions and of rounding together, nats, `[layers, kv_heads, prompt + steps]`."""
        return self.effects + self.rounding_keys + self.rounding_values

    @property
    def evicted(self) -> Tensor:
        """Which entries some step does not read, bool `[layers, kv_heads, prompt + steps]`."""
        return self.kept < 1

    @cached_property
    def tokens(self) -> list[str]:
        """The text of each token of prompt and response; its id in brackets where there is no tokenizer."""
        return token_texts(torch.cat([self.prompt, self.response]).tolist(), self.lm.tokenizer)

    @cached_property
    def table(self) -> pd.DataFrame:
        """Tidy, one row for each entry that some step does not read, from the costliest on.

        Columns: layer (in the model), kv_head, position, token, effect, attention, kept. effect is in nats, positive
        where losing the entry cost the response. attention is the full cache's, summed over the response and the
        group's heads. kept is the share of the steps that read the entry.
        """
        import pandas as pd

        layers, heads, positions = self.evicted.nonzero(as_tuple=True)
        numbers = torch.tensor(self.lm.layout.compressed)
        at = layers, heads, positions
        frame = pd.DataFrame(
            {
                "layer": numbers[layers].numpy(),
                "kv_head": heads.numpy(),
                "position": positions.numpy(),
                "token": [self.tokens[place] for place in positions.tolist()],
                "effect": self.effects[at].numpy(),
                "attention": self.attention[at].numpy(),
                "kept": self.kept[at].numpy(),
            }
        )
        return _from_costliest(frame, ["effect"])

    @cached_property
    def rounding(self) -> pd.DataFrame:
        """Tidy, one row for each entry that some step reads rounded, from the costliest on.

        Columns: layer (in the model), kv_head, position, token, keys, values, attention (as in `table`). keys and
        values are in nats, positive where rounding them cost the response. Empty where everything is stored exactly.
        """
        import pandas as pd

        found = torch.zeros(self.effects.shape, dtype=torch.bool)
        for layer, rounding in zip(found, self._made.rounding or (), strict=False):
            layer |= rounding.when.any(1).unflatten(0, (len(layer), -1)).any(1).cpu()
        layers, heads, positions = at = found.nonzero(as_tuple=True)
        frame = pd.DataFrame(
            {
                "layer": torch.tensor(self.lm.layout.compressed)[layers].numpy(),
                "kv_head": heads.numpy(),
                "position": positions.numpy(),
                "token": [self.tokens[place] for place in positions.tolist()],
                "keys": self.rounding_keys[at].numpy(),
                "values": self.rounding_values[at].numpy(),
                "attention": self.attention[at].numpy(),
            }
        )
        return _from_costliest(frame, ["keys", "values"])

    def by(
        self, what: Literal["token", "head", "layer"], of: Literal["evictions", "rounding"] = "evictions"
    ) -> pd.DataFrame:
        """Sums over the entries of each token (position), head or layer, from the costliest on.

        Columns: effect, harmful and helpful (the sums of its parts above and below 0), attention, and the number of
        entries. For rounded entries (`of="rounding"`): keys and values in nats, attention and entries.
        """
        if what not in GROUPS:
            raise KvlabError(f"by={what!r} is none of {', '.join(map(repr, GROUPS))}")
        if of == "evictions":
            table = self.table.assign(
                harmful=self.table.effect.clip(lower=0), helpful=self.table.effect.clip(upper=0), entries=1
            )
            columns, cost = SUMS, ["effect"]
        elif of == "rounding":
            table, columns, cost = self.rounding.assign(entries=1), ROUNDING_SUMS, ["keys", "values"]
        else:
            raise KvlabError(f"of={of!r} is neither 'evictions' nor 'rounding'")
        sums = table.groupby(GROUPS[what], sort=False, as_index=False).agg(dict.fromkeys(columns, "sum"))
        return _from_costliest(sums, cost)

    @cached_property
    def restored(self) -> pd.DataFrame:
        """Entries put back, and the loss regained: order (effect, attention, recency, random), entries, regained
        (nats) and share (of the difference). Every row is measured by running the model with these entries read too.
        """
        return self.restore()

    def restore(self, counts: Sequence[int] = COUNTS, orders: Sequence[str] = ORDERS, seed: int = 0) -> pd.DataFrame:
        """As `restored`, for other numbers of entries.

        Args:
            counts: how many entries are put back; those beyond what was evicted are left out.
            orders: "effect" from the largest effect on; "harmful" the same, at most all with a positive effect.
                "attention" from the most attended on, "recency" from the newest on, "random".
            seed: of the random order.
        """
        import pandas as pd

        evicted = self.evicted.flatten().nonzero()[:, 0]
        difference = self._found.policy_loss - self._found.full_loss
        ranked = {order: self._ranked(order, evicted, seed) for order in orders}
        plan = [(order, n) for order in orders for n in counts if n <= len(evicted)]
        rows = []
        for order, n in progress_bars.each(plan, "restore", "run"):
            regained = self._found.policy_loss - self._loss_with(ranked[order][:n])
            share = regained / difference if difference else float("nan")
            rows.append({"order": order, "entries": n, "regained": regained, "share": share})
        return pd.DataFrame(rows, columns=["order", "entries", "regained", "share"])

    def loss_with(self, entries: Tensor) -> float:
        """The loss, in nats, where the policy reads these entries too, at every step.

        Args:
            entries: int64 `[n, 3]`: layer (in the model), KV head and position of each.
        """
        place = {layer: i for i, layer in enumerate(self.lm.layout.compressed)}
        _, kv_heads, length = self.effects.shape
        flat = [(place[layer] * kv_heads + head) * length + position for layer, head, position in entries.tolist()]
        return self._loss_with(torch.tensor(flat, dtype=torch.int64))

    def _loss_with(self, flat: Tensor) -> float:
        more = torch.zeros(self.effects.numel(), dtype=torch.bool)
        more[flat] = True
        more = more.view(self.effects.shape).to(self._reads[0].device)
        reads = []
        for read, extra in zip(self._reads, more, strict=True):
            sets = len(read) // len(extra)
            reads.append(read | extra.repeat_interleave(sets, 0)[:, None])
        return float(self._made.forward(reads, torch.zeros(1, device=self.lm.device)).values[0])

    def _ranked(self, order: str, evicted: Tensor, seed: int) -> Tensor:
        """The evicted entries, flat, in the order in which they are put back."""
        if order == "random":
            return evicted[torch.randperm(len(evicted), generator=torch.Generator().manual_seed(seed))]
        if order == "recency":
            key = evicted % self.effects.shape[2]
        elif order in ("effect", "harmful"):
            key = self.effects.flatten()[evicted]
        elif order == "attention":
            key = self.attention.flatten()[evicted]
        else:
            raise KvlabError(f"order {order!r} is none of effect, harmful, attention, recency, random")
        if order == "harmful":
            evicted, key = evicted[key > 0], key[key > 0]
        return evicted[key.argsort(descending=True, stable=True)]

    def show(self) -> Any:
        """The text coloured by each token's cost, a map of layers and heads, and the curve of restoring.

        A picture for a notebook, with `save("why.html")`.
        """
        # Pictures are made above: the way there leads through the package's public names.
        return importlib.import_module("kvlab").explore(self)

    def __repr__(self) -> str:
        found = self.summary
        return (
            f"Attribution({self.name}, {self.document}: {found['loss_full']:.4g} -> {found['loss_policy']:.4g} nats, "
            f"{found['evicted']:.0f} entries, {found['unexplained']:.2g} unexplained)"
        )


def _from_costliest(table: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """The rows by the sum of these columns, the largest first."""
    order = (-table[columns].sum(axis=1)).argsort(kind="stable")
    return table.iloc[order].reset_index(drop=True)
