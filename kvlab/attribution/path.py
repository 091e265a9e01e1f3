"""A model that reads a response again, its attention somewhere between a policy's and the full cache's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from kvlab.attribution.gated import LayerReads, Line, Rounding
from kvlab.core import adapter, hookable, hooks, onednn
from kvlab.core.attention import exact
from kvlab.core.store import LayerStore
from kvlab.inputs.models import LM

LOGITS_AT_ONCE, POINTS_AT_ONCE = 1 << 26, 8
"""Points on the line run together, so many, as long as they have no more logits than this."""


def points_at_once(lm: LM, steps: int) -> int:
    """How many points on the line run together, for a response of which so many tokens are fed."""
    return min(max(1, LOGITS_AT_ONCE // (steps * hookable.text_config(lm.model).vocab_size)), POINTS_AT_ONCE)


class _NewAlone(adapter.StoreLayer):
    """Says how long the prompt in its store is, and hands on what is new alone; nothing is stored."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def _differentiable(layer: Any) -> Any:
    """A layer of transformers' cache for one pass alone, whose states are not written into: a gradient needs them."""
    if hasattr(layer, "update_recurrent_state"):
        layer.update_recurrent_state = lambda states, *_args, **_more: states
        layer.record_past = True  # convolutions then go on in a tensor of their own
    return layer


@dataclass
class Loss:
    """Losses of some points on the line, and what the passes found on their way.

    Attributes:
        values: `[points]`, in nats: summed over the response.
        by_token: `[points, steps]`, of each token of the response but the first, which the prefill predicts.
        lines: of the compressed layers.
        log_probabilities: `[points, steps, vocabulary]`, where they were asked for.
    """

    values: Tensor
    by_token: Tensor
    lines: list[Line]
    log_probabilities: Tensor | None = None


@dataclass
class Response:
    """A prompt's end in a model, and the response that follows it.

    Attributes:
        ids: int64 `[tokens]` of the response, of which all but the last are fed.
        prompt: tokens of the prompt.
        entries: keys and values of the prompt, `[kv_heads, prompt, head_dim]` each, of the compressed layers.
        others: what transformers' cache holds for the layers left alone when the prompt has ended, by their number.
        first: the negative log-likelihood of the response's first token, which no policy changes.
        target: `[steps, vocabulary]` log-probabilities of the full cache, for the loss "kl"; None for "nll".
        rounding: of the compressed layers, where the policy stores entries rounded.
    """

    lm: LM
    ids: Tensor
    prompt: int
    entries: list[tuple[Tensor, Tensor]]
    others: dict[int, Any]
    first: float
    target: Tensor | None = None
    rounding: list[Rounding] | None = None

    @property
    def steps(self) -> int:
        """Tokens that are fed: each step's attention predicts the next token."""
        return len(self.ids) - 1

    @property
    def points_at_once(self) -> int:
        return points_at_once(self.lm, self.steps)

    def forward(
        self, reads: Sequence[Tensor], gates: Tensor, weights: Tensor | None = None, log_probabilities: bool = False
    ) -> Loss:
        """Run the response through the model, at several points on the line at once.

        Args:
            reads: of each compressed layer, as `LayerReads.read`.
            gates: `[points]`, 0 for the policy to 1 for the full cache.
            weights: `[points]`; with them a backward pass follows, and the lines hold the integral of dL/dg.
            log_probabilities: whether the result keeps them.
        """
        model, lm = self.lm.model, self.lm
        points, device = len(gates), lm.device
        counts = torch.zeros_like(gates) if weights is None else weights
        lines: list[Line] = []

        def attend(call: hooks.Call) -> Tensor:
            rounding = None if self.rounding is None else self.rounding[call.index]
            layer = LayerReads(*self.entries[call.index], reads[call.index].to(call.queries.device), rounding)
            lines.append(Line(layer, gates, counts, call.softmax))
            return lines[-1].attend(call.queries, call.keys, call.values)

        ids = self.ids[:-1].to(device).expand(points, -1)
        places = torch.arange(self.prompt, self.prompt + self.steps, device=device).expand(points, -1)
        embedded: list[Tensor] = []

        def differentiable(module: torch.nn.Module, given: Any, out: Tensor) -> Tensor:
            embedded.append(out.detach().requires_grad_())
            return embedded[-1]

        with torch.inference_mode(False), torch.set_grad_enabled(weights is not None), onednn.input_gradients(model):
            embedding = model.get_input_embeddings()
            hook = embedding.register_forward_hook(differentiable) if weights is not None else None
            try:
                with hooks.hooked(model, attend, pre_rope=False):
                    logits = model(
                        ids.clone(), position_ids=places, past_key_values=self._cache(points), use_cache=True
                    ).logits
            finally:
                if hook is not None:
                    hook.remove()
            known = exact(logits).log_softmax(-1)
            by_token = self._by_token(known)
            if weights is not None:
                torch.autograd.grad(by_token.sum(), embedded)
        values = by_token.detach().sum(-1)
        if self.target is None:
            values = values + self.first
        return Loss(values, by_token.detach(), lines, known.detach() if log_probabilities else None)

    def _by_token(self, known: Tensor) -> Tensor:
        if self.target is not None:
            divergences = F.kl_div(known, self.target.expand_as(known), reduction="none", log_target=True)
            return divergences.sum(-1)
        # A capture makes ids in inference mode, and a gradient needs others.
        following = self.ids[1:].clone().to(known.device).expand(len(known), -1)
        return -known.gather(-1, following[..., None])[..., 0]

    def _cache(self, points: int) -> Cache:
        mine = [_NewAlone(LayerStore(keys[None], values[None])) for keys, values in self.entries]
        layers = adapter.arrange_layers(self.lm.model, hookable.layout_of(self.lm.model), mine)
        rows = torch.zeros(points, dtype=torch.int64, device=self.lm.device)
        for number, layer in self.others.items():
            layers[number] = _differentiable(adapter.copy_rows(layer, rows))
        return Cache(layers=layers)
