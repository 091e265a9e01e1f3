"""The end of a prefill, as a policy sees it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvlab.core import attention
from kvlab.core.rotation import Rotation
from kvlab.core.softmax import Scaling, Softmax
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.lib.renamed import Renamed
from kvlab.methods._base.needs import Needs
from kvlab.methods._base.repeating import Repetition


class Asks(Protocol):
    """The attributes that a prompt must know of a policy that asks for something: its name and its needs."""

    name: ClassVar[str]

    @property
    def needs(self) -> Needs: ...


class Prompt:
    """The end of a prefill, as a policy sees it.

    Args:
        queries: `[rows, heads, n, head_dim]`, post-RoPE, of the LAST n prompt positions.
        keys, values: `[rows, kv_heads, length, head_dim]`.
        layers: the layer of each row: its place among those that a policy compresses.
        n_layers: how many layers these are.
        pseudo: `[rows, heads, m, head_dim]` pseudo-queries, or a function that finds them for a policy.
        accumulated: `[rows, heads, length]`, attention summed over every prompt query.
        max_new_tokens: length that the response may reach; 0 if unknown.
        scaling: factor of the logits, 1 / sqrt(head_dim) unless given; a `Softmax` of a model that caps its logits or
            has sinks.
        perplexity: `[rows]`, or a function that gives it for the last n tokens.
        projections: the output projection of each row's layer, `[hidden, heads x head_dim]`, wherever they lie.
        rotations: how each row's layer turns queries and keys; None of one that turns in a way unknown to kvlab.
        pre_queries: `[rows, heads, n, head_dim]`, of the last n prompt positions, before RoPE.
        hidden: `[rows, n, width]`, hidden states of the last n prompt positions, as each row's attention is given them.
        repeated: `[rows, kv_heads, length]`, scores of passes that repeat the prompt, by the key of each repetition.
        response: `[rows, heads, steps, head_dim]`, post-RoPE queries of the response; None where there is none yet.
        origin: gives the token ids `[rows or 1, length]`, None where they are unknown, and the model's name.
        shared: what `share` keeps, where the same prompt is shown to others too.
        positions: original ones of the slots, `[rows, kv_heads, length]`; 0 .. length - 1 unless given.
        seen: tokens of the sequence so far, the same in all layers; more than `length` if `lossy`.
        lossy: whether an earlier turn of a chat evicted entries. Then these are the entries that it left and those that
            came since, and slots are not positions.

    Attributes:
        plan: these rows' share of what the policy planned over all layers, `[rows, ...]`; None before, and for
            policies that plan nothing.
    """

    answers = Renamed("check_inputs")

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layers: tuple[int, ...],
        n_layers: int,
        *,
        pseudo: Tensor | Callable[[Asks], Tensor | None] | None = None,
        accumulated: Tensor | None = None,
        max_new_tokens: int = 0,
        scaling: Scaling = None,
        perplexity: Tensor | Callable[[int], Tensor | None] | None = None,
        projections: Sequence[Tensor] | None = None,
        rotations: Sequence[Rotation | None] | None = None,
        pre_queries: Tensor | None = None,
        hidden: Tensor | None = None,
        repeated: Mapping[str, Tensor] | None = None,
        response: Tensor | None = None,
        origin: Callable[[], tuple[Tensor | None, str]] | None = None,
        shared: dict[tuple, Tensor] | None = None,
        positions: Tensor | None = None,
        seen: int | None = None,
        lossy: bool = False,
    ):
        self._queries, self.keys, self.values = queries, keys, values
        self._policy: Asks | None = None
        self.layers, self.n_layers = layers, n_layers
        self._pseudo, self._accumulated, self._perplexity = pseudo, accumulated, perplexity
        self._projections, self._rotations, self._pre_queries = projections, rotations, pre_queries
        self._hidden, self._repeated, self._response, self._origin = hidden, repeated or {}, response, origin
        self.max_new_tokens, self.scaling = max_new_tokens, Softmax.of(scaling).scaling
        self.plan: Tensor | None = None
        every = torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
        self.positions = every if positions is None else positions
        self.seen, self.lossy = keys.shape[2] if seen is None else seen, lossy
        self._shared: dict[tuple, Tensor] = {} if shared is None else shared

    def softmax(self, row: int) -> Softmax:
        """The model's softmax over the products of one row."""
        return Softmax.of(self.scaling).row(row)

    @property
    def rows(self) -> int:
        return self.keys.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def heads(self) -> int:
        return self._queries.shape[1]

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    @property
    def queries(self) -> Tensor:
        """Post-RoPE queries of the last tokens, `[rows, heads, n, head_dim]`: as many as the policy `observes`."""
        if self._policy is None:
            return self._queries
        return self.window(self._policy.needs.window(self.length))

    def seen_by(self, policy: Asks) -> Prompt:
        """The same prompt, with its shared results, as a policy sees it.

        It refuses inputs that the policy has not declared, in a replay as in a live run.
        """
        seen = copy.copy(self)
        seen._policy = policy
        return seen

    def _declared(self, declared: bool, what: str, line: str) -> None:
        """Raise KvlabError where a policy asks for what its class does not say that it needs."""
        if self._policy is not None and not declared:
            name = self._policy.name or type(self._policy).__name__
            raise KvlabError(f"{name} reads {what} and does not say so; write `{line}` in its class")

    def _needed(self, name: str, what: str) -> None:
        self._declared(self._policy is None or getattr(self._policy.needs, name), what, f"needs = Needs({name}=True)")

    def _observed(self, n: int) -> int:
        """`n`, or the prompt's length where that is less; KvlabError where the policy observes fewer."""
        observes = None if self._policy is None else self._policy.needs.queries
        line = f"observes = {n or 32}"
        self._declared(observes is None or 0 < min(n, self.length) <= observes, "the prompt's last queries", line)
        return min(n, self.length)

    def with_plan(self, plan: Tensor) -> Prompt:
        """The same prompt, with its shared results and with a policy's plan `[rows, ...]`."""
        planned = copy.copy(self)
        planned.plan = plan
        return planned

    def reduced_to(self, store: LayerStore) -> Prompt:
        """The same prompt as the next policy sees it once another has left it as `store`."""
        reduced = copy.copy(self)
        reduced.keys, reduced.values, reduced.positions = store.keys, store.values, store.positions
        reduced.lossy = self.lossy or store.length < store.seen
        reduced._policy, reduced.plan, reduced._shared = None, None, {}
        return reduced

    def share(self, key: tuple, compute: Callable[[], Tensor]) -> Tensor:
        """The result of `compute`, computed once for all policies that look at this prompt."""
        if key not in self._shared:
            self._shared[key] = compute()
        return self._shared[key]

    def window(self, n: int) -> Tensor:
        """Queries of the last `n` prompt tokens (fewer if the prompt is shorter), `[rows, heads, n, head_dim]`."""
        n, known = self._observed(n), self._queries.shape[2]
        if known < n:
            raise KvlabError(
                f"the last {n} prompt queries are needed and {known} are at hand; capture with window={n}, or feed the "
                "end of the prompt inside the session"
            )
        return self._queries[:, :, known - n :]

    def window_attention(self, n: int, weigh: Callable[[Tensor], Tensor]) -> Tensor:
        """`weigh` of each row's attention `[heads, n, length]` of the last `n` queries over the prompt, stacked.

        One row at a time, so that memory stays linear in the length whatever the number of layers.
        """
        queries = self.window(n)
        return torch.stack(
            [weigh(self._rows_of_window(row, q, k)) for row, (q, k) in enumerate(zip(queries, self.keys, strict=True))]
        )

    def _rows_of_window(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """The attention `[heads, n, length]` of one row's last queries; zeros where one sees nothing that stayed."""
        if not self.lossy:
            return attention.attention_over_prompt(queries, keys, self.softmax(row), inside=True)
        # Some of the last tokens may be gone, so that slots do not tell what came before a query.
        own = torch.arange(self.seen - queries.shape[1], self.seen, device=keys.device)
        visible = self.positions[row][:, None] <= own[:, None]
        visible = visible.repeat_interleave(len(queries) // len(keys), dim=0)
        return attention.weights(queries, keys, self.softmax(row), visible).nan_to_num()

    def window_sums(self, n: int) -> Tensor:
        """Attention of the last `n` queries, summed over the window: `[rows, heads, length]`."""
        self._observed(n)
        return self.share(("window by head", n), lambda: self.window_attention(n, lambda rows: rows.sum(-2)))

    def window_scores(self, n: int) -> Tensor:
        """Attention of the last `n` queries, summed over the window and the GQA group: `[rows, kv_heads, length]`."""
        self._observed(n)
        return self.share(("window", n), lambda: attention.sum_over_group(self.window_sums(n), self.kv_heads))

    def pseudo(self, policy: Asks) -> Tensor:
        """The pseudo-queries that `policy` asks for, `[rows, heads, m, head_dim]`."""
        asks = self._policy is None or self._policy.needs.pseudo is not None
        self._declared(asks, "pseudo-queries", "pseudo_key = 'mine'")
        queries = self._pseudo(policy) if callable(self._pseudo) else self._pseudo
        if queries is None:
            raise KvlabError(
                f"{policy.name} needs pseudo-queries: pass pseudo= to keep(), or capture the trace with "
                f"pseudo=[{policy}]"
            )
        return queries

    def accumulated(self, policy: Asks) -> Tensor:
        """Attention accumulated over all prompt queries, `[rows, heads, length]`."""
        asks = self._policy is None or self._policy.needs.accumulated
        self._declared(asks, "the accumulated attention", "accumulates = True")
        if self._accumulated is None:
            raise KvlabError(
                f"{policy.name} needs the attention accumulated over all prompt queries; capture with accumulate=True, "
                "or give Trace.from_tensors accumulated="
            )
        return self._accumulated

    def projection(self, policy: Asks) -> list[Tensor]:
        """The output projection W_o of each row's layer, `[hidden, heads x head_dim]`."""
        self._needed("projection", "the output projections")
        if self._projections is None:
            raise KvlabError(
                f"{policy.name} needs the output projection of its layer: capture with policies=[{policy.name!r}], or "
                "pass projection= to keep()"
            )
        return [weight.to(self.keys.device) for weight in self._projections]

    def rotation(self, policy: Asks) -> list[Rotation]:
        """How each row's layer turns queries and keys by their positions."""
        self._needed("rotation", "the model's rotations")
        if self._rotations is None:
            raise KvlabError(
                f"{policy.name} turns vectors as the model does, and how is not known here: capture the trace anew, or "
                "pass rotation= to keep()"
            )
        known = [rotation for rotation in self._rotations if rotation is not None]
        if len(known) < len(self._rotations):
            raise KvlabError(
                f"{policy.name} rotates vectors by their positions as the model does, and kvlab does not know this "
                "model's rotation; choose another policy"
            )
        return known

    def pre_queries(self, policy: Asks) -> Tensor:
        """The queries of all prompt tokens before RoPE, `[rows, heads, length, head_dim]`."""
        self._needed("pre_queries", "queries before RoPE")
        if self._pre_queries is None or self._pre_queries.shape[2] < self.length:
            raise KvlabError(
                f"{policy.name} needs the queries of the whole prompt before RoPE: capture with queries='all', or pass "
                "pre_queries= to keep()"
            )
        return self._pre_queries

    def hidden(self, policy: Asks) -> Tensor:
        """The hidden states of all prompt tokens that enter each row's attention, `[rows, length, width]`."""
        self._needed("hidden", "hidden states")
        if self._hidden is None or self._hidden.shape[1] < self.length:
            raise KvlabError(
                f"{policy.name} needs the hidden states of the whole prompt: capture with policies=[{policy.name!r}], "
                "or pass hidden= to keep()"
            )
        return self._hidden

    def repeated(self, policy: Asks, repetition: Repetition) -> Tensor:
        """Scores of the pass that repeats the prompt, `[rows, kv_heads, length]`."""
        asks = self._policy is None or repetition in self._policy.needs.repetitions
        self._declared(asks, "scores of a repeating pass", "needs = Needs(repetitions=(...,))")
        if repetition.key not in self._repeated:
            raise KvlabError(
                f"{policy.name} needs the scores of a pass that repeats the prompt ({repetition.key}): capture with "
                f"policies=[{policy}]"
            )
        return self._repeated[repetition.key]

    def response(self, policy: Asks) -> Tensor:
        """Queries of the whole response after RoPE, `[rows, heads, steps, head_dim]`, for references that see it."""
        asks = self._policy is None or self._policy.needs.response
        self._declared(asks, "the response", "sees_response = True")
        if self._response is None:
            raise KvlabError(
                f"{policy.name} sees the response, and there is none here: replay it on a trace that was captured with "
                "new_tokens=32"
            )
        return self._response

    def origin(self, policy: Asks) -> tuple[Tensor, str]:
        """The token ids of the sequences, `[rows or 1, length]`, and the model's name, empty where it has none."""
        self._needed("origin", "the prompt's token ids")
        ids, model = (None, "") if self._origin is None else self._origin()
        if ids is None:
            raise KvlabError(
                f"{policy.name} needs the prompt's token ids: feed the model ids, capture the trace with "
                "kvlab.capture, or pass ids= to Trace.from_tensors"
            )
        return ids, model

    def model(self, policy: Asks) -> str:
        """The model's name, empty where it has none."""
        self._needed("origin", "the model's name")
        return "" if self._origin is None else self._origin()[1]

    def check_inputs(self, policy: Asks) -> None:
        """Raise KvlabError where something is missing that `policy` needs of the model or of the response."""
        needs = policy.needs
        wanted = needs.projection, needs.rotation, needs.pre_queries, needs.hidden, needs.response
        looks = self.projection, self.rotation, self.pre_queries, self.hidden, self.response
        for asked, look in zip(wanted, looks, strict=True):
            if asked:
                look(policy)
        for repetition in needs.repetitions:
            self.repeated(policy, repetition)

    def perplexity(self, policy: Asks) -> Tensor:
        """Perplexity of the prompt's last tokens, as many as `policy` reads: exp of their mean NLL, `[rows]`."""
        asks = self._policy is None or self._policy.needs.perplexity > 0
        self._declared(asks, "the perplexity", "reads_perplexity = 32")
        perplexity = self._perplexity
        perplexity = perplexity(policy.needs.perplexity) if callable(perplexity) else perplexity
        if perplexity is None:
            raise KvlabError(
                f"{policy.name} needs the perplexity of the prompt's last {policy.needs.perplexity} tokens, which is "
                "not known here; a captured trace and a live run have it"
            )
        return perplexity
