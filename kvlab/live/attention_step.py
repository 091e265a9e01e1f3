"""The attention of a live session: a chunk of a prompt or of a later turn, and a single-token step.

Both first store the new entries, and then attend over what the policy has left.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kvlab.core import attention, hooks
from kvlab.core.softmax import Softmax
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.live.cache import LiveCache, LiveLayer
from kvlab.live.reports import Reports
from kvlab.live.row_groups import Group
from kvlab.methods import Policy
from kvlab.methods._base.clock import decode

ACCUMULATED = "accumulated"
"""The column of a store that holds, until the prompt ends, the attention summed over its queries."""

Attend = Callable[[LiveCache, Group, hooks.Call, Tensor, Tensor, Tensor], Tensor]


class Attending:
    """Attends for one session, layer by layer."""

    def __init__(self, model: nn.Module, policy: Policy, turns: str, reports: Reports):
        self._policy, self._turns, self._reports = policy, turns, reports
        self._rotations = hooks.Rotations(model)

    def attend(self, cache: LiveCache, call: hooks.Call) -> Tensor:
        """The output of one layer's attention, `[batch, heads, n, head_dim]`, once the call's entries are stored."""
        layer, policy = cache.compressed[call.index], self._policy
        layer.softmax = call.softmax
        if not layer.groups:
            store = layer.begin(call.keys, call.values, call.index)
            self._remember(layer, call)
            return self._accumulated(cache, store, call.queries, call.softmax, call.padding)
        if cache.ended and call.queries.shape[2] == 1:
            if self._turns == "recompress" and policy.needs.queries is not None:
                layer.observed.add(call.queries, policy.needs.queries)
            return self._each(cache, layer, call, self._step)
        if not cache.ended:
            self._remember(layer, call)
        return self._each(cache, layer, call, self._feed)

    def _remember(self, layer: LiveLayer, call: hooks.Call) -> None:
        """Keep of a chunk of the prompt what the policy will want to know of its queries."""
        needs = self._policy.needs
        layer.observed.add(call.queries, needs.queries)
        if needs.pre_queries:
            assert call.pre_rope is not None, "queries before RoPE are asked for"
            layer.before_rope.add(call.pre_rope, None)
        if needs.hidden:
            assert call.hidden is not None, "hidden states are asked for"
            layer.hidden.add(call.hidden[:, None], None)
        if needs.rotation:
            layer.rotation = self._rotations.of(call)

    def _each(self, cache: LiveCache, layer: LiveLayer, call: hooks.Call, attend: Attend) -> Tensor:
        """The outputs of all groups, each attended on its own, in the order of the batch."""
        if len(layer.groups) == 1:
            return attend(cache, layer.groups[0], call, call.queries, call.keys, call.values)
        out = torch.empty_like(call.queries)
        for group in layer.groups:
            queries, keys, values = map(group.of, (call.queries, call.keys, call.values))
            out[group.rows.to(out.device)] = attend(cache, group, call, queries, keys, values)
        return out

    def _feed(
        self, cache: LiveCache, group: Group, call: hooks.Call, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """More of a prompt, or a later turn, on top of what is stored."""
        store, policy = group.store, group.policy or self._policy
        if cache.ended:
            policy.evict_pending(store)
            group.note_loss()
        store.append(keys, values)
        if group.shadow is not None:
            group.shadow.append(keys, values)
        bias = policy.bias(store) if store.compressed else None
        if bias is None and not store.ragged:
            padding = call.padding if group.padded else None
            return self._accumulated(cache, store, queries, call.softmax, padding)
        # Slots of one head lie in order of arrival, but heads may hold different numbers: compare positions instead.
        heads, n = queries.shape[1], queries.shape[2]
        now = torch.arange(store.seen - n, store.seen, device=queries.device)
        positions = attention.to_query_heads(store.positions, heads)[:, :, None]
        visible = (positions <= now[:, None]) & (positions >= 0)
        if bias is not None:
            bias = attention.to_query_heads(bias, heads)[:, :, None]
        weights = attention.weights(queries, store.keys, call.softmax, visible, bias)
        return attention.output(weights, store.values).to(queries.dtype)

    def _accumulated(
        self, cache: LiveCache, store: LayerStore, queries: Tensor, softmax: Softmax, padding: Tensor | None
    ) -> Tensor:
        """The output over all that is stored; what a policy wants of every prompt query's attention is added up in a
        column of the store's.
        """
        if not self._policy.needs.accumulated or cache.ended:
            return attention.attend(queries, store.keys, store.values, softmax, padding)
        if not store.compressed and store.length > queries.shape[2] and not store.has_column(ACCUMULATED):
            raise KvlabError(
                f"{self._policy.name} sums attention over every query of its prompt; feed the whole prompt inside the "
                f"session, not {queries.shape[2]} of {store.length} tokens"
            )
        kv_heads = store.kv_heads
        out, gathered = attention.attend_and_accumulate(queries, store.keys, store.values, softmax, padding)
        gathered = gathered.unflatten(1, (kv_heads, -1)).transpose(2, 3)
        if store.has_column(ACCUMULATED):
            store.column(ACCUMULATED).add_(gathered)
        else:
            store.add_column(ACCUMULATED, gathered)
        return out

    def _step(
        self, cache: LiveCache, group: Group, call: hooks.Call, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """One decoding step of one group: attend, let the probes look, and let the policy update its store."""
        store, policy, reports = group.store, group.policy or self._policy, self._reports
        attended = decode(policy, store, queries, keys, values, call.softmax, weigh=reports.needs_weights)
        store.note_read(attended.slots, policy.overhead_bytes(store))
        if not reports.probes:
            policy.step(store, attended.weights)
            group.note_loss()
            return attended.output
        if group.shadow is not None:
            group.shadow.append(keys, values)
        seen = reports.look(cache, group, call, policy, queries, attended)
        policy.step(store, attended.weights)
        group.note_loss()
        reports.look_after(cache, group, call, seen)
        return attended.output
