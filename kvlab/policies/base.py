"""What a policy sees and may do. One object serves a replay and a live run alike.

A policy may set budgets for each layer, ask for pseudo-tokens, score the prompt, evict or merge once after the prefill,
and then at every decoding step select what is read, bias the logits, update its scores, and evict or merge. Most
override one or two of these; whatever is not overridden does nothing.

Rows are the sequences of a batch in a live run and the layers of a model in a replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from torch import Tensor

from kvlab import attention, measures
from kvlab.cache import LayerStore
from kvlab.errors import KvlabError, nearest


def _budget(value: int | float, info: ValidationInfo) -> int | float:
    if isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"budget must be a number of entries or a fraction of the prompt, not {value!r}")
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(f"budget {value} is neither an integer (entries) nor a fraction in (0, 1]")
    if isinstance(value, int) and value < 1:
        raise ValueError(f"budget {value} keeps nothing; it must be at least 1 entry, or a fraction in (0, 1]")
    return value


Budget = Annotated[int | float, AfterValidator(_budget)]
"""Entries kept for each layer and KV head, everything included; a float in (0, 1] is a fraction of the prompt."""


class Prompt:
    """The end of a prefill, as a policy sees it.

    Args:
        queries: `[rows, heads, n, head_dim]`, post-RoPE, of the LAST n prompt positions.
        keys, values: `[rows, kv_heads, length, head_dim]`.
        layers: the layer of each row.
        n_layers: how many layers the model has.
        pseudo: `[rows, heads, m, head_dim]` pseudo-queries, or a function that finds them for a policy.
        accumulated: `[rows, heads, length]`, attention summed over every prompt query.
        max_new_tokens: what the response may grow to.
        scaling: factor of the logits, 1 / sqrt(head_dim) unless given.
    """

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layers: tuple[int, ...],
        n_layers: int,
        pseudo: Tensor | Callable[[Policy], Tensor] | None = None,
        accumulated: Tensor | None = None,
        max_new_tokens: int = 0,
        scaling: float | None = None,
    ):
        self.queries, self.keys, self.values = queries, keys, values
        self.layers, self.n_layers = layers, n_layers
        self._pseudo, self._accumulated = pseudo, accumulated
        self.max_new_tokens, self.scaling = max_new_tokens, scaling
        self._shared: dict[tuple, Tensor] = {}

    @property
    def rows(self) -> int:
        return self.keys.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def share(self, key: tuple, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` gives, computed once for all policies that look at this prompt."""
        if key not in self._shared:
            self._shared[key] = compute()
        return self._shared[key]

    def window(self, n: int) -> Tensor:
        """Queries of the last `n` prompt tokens (fewer if the prompt is shorter), `[rows, heads, n, head_dim]`."""
        n = min(n, self.length)
        if self.queries.shape[2] < n:
            raise KvlabError(
                f"the last {n} prompt queries are needed and {self.queries.shape[2]} are at hand; capture with "
                f"window={n}"
            )
        return self.queries[:, :, self.queries.shape[2] - n :]

    def window_attention(self, n: int, weigh: Callable[[Tensor], Tensor]) -> Tensor:
        """`weigh` of each row's attention `[heads, n, length]` of the last `n` queries over the prompt, stacked.

        One row at a time, so that memory stays linear in the length whatever the number of layers.
        """
        queries = self.window(n)
        return torch.stack(
            [
                weigh(measures.attention_over_prompt(q, k, self.scaling, inside=True))
                for q, k in zip(queries, self.keys, strict=True)
            ]
        )

    def window_scores(self, n: int) -> Tensor:
        """Attention of the last `n` queries, summed over the window and the GQA group: `[rows, kv_heads, length]`."""
        return self.share(
            ("window", n),
            lambda: attention.sum_over_group(self.window_attention(n, lambda rows: rows.sum(-2)), self.kv_heads),
        )

    def pseudo(self, policy: Policy) -> Tensor:
        """The pseudo-queries that `policy` asks for, `[rows, heads, m, head_dim]`."""
        found = self._pseudo(policy) if callable(self._pseudo) else self._pseudo
        if found is None:
            raise KvlabError(
                f"{policy.name} needs pseudo-queries: pass pseudo= to keep(), or capture the trace with "
                f"pseudo=[{policy}]"
            )
        return found

    def accumulated(self, policy: Policy) -> Tensor:
        """Attention accumulated over all prompt queries, `[rows, heads, length]`."""
        if self._accumulated is None:
            raise KvlabError(
                f"{policy.name} needs the attention accumulated over all prompt queries; capture with accumulate=True"
            )
        return self._accumulated


class Policy(BaseModel):
    """A KV-cache compression method with its parameters.

    Subclass it, give it a `name`, fields for parameters, and override what the method does. Objects of a subclass are
    taken wherever a name is; to give it a name, register the class in the entry-point group `kvlab.policies`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    weighs: ClassVar[bool] = True
    """Whether `step` looks at the attention weights; without them a live run can use a fused kernel."""

    def __init__(self, **parameters):
        # A sweep over numpy's arange is as good as one over a list.
        parameters = {
            key: value.item() if isinstance(value, np.generic) else value for key, value in parameters.items()
        }
        unknown = sorted(set(parameters) - set(type(self).model_fields))
        if unknown:
            raise KvlabError(f"{self.name}: {nearest(unknown[0], type(self).model_fields, 'parameter')}")
        try:
            super().__init__(**parameters)
        except ValidationError as error:
            raise KvlabError(f"{self.name}: {_first_problem(error)}") from None

    @model_validator(mode="after")
    def _enough_budget(self) -> Policy:
        budget = getattr(self, "budget", None)
        if isinstance(budget, int) and budget < self.minimum:
            raise ValueError(f"budget {budget} is below the {self.minimum} entries that these parameters need")
        return self

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self)})"

    __repr__ = __str__

    def replace(self, **parameters) -> Policy:
        """The same policy with other parameters, checked again."""
        return type(self)(**{**dict(self), **parameters})

    # ------------------------------------------------------------------ what it needs

    @property
    def minimum(self) -> int:
        """The smallest budget that the method's parameters allow (sinks + window + 1, say)."""
        return 1

    @property
    def observes(self) -> int | None:
        """How many of the last prompt queries it looks at; None for all of them."""
        return 0

    @property
    def pseudo_key(self) -> str | None:
        """Under which name a trace keeps the pseudo-queries that this policy asks for; None if it asks for none."""
        return None

    def pseudo_tokens(self, prompt: Tensor, vocabulary: int, encode: Callable[[str], Tensor]) -> Tensor:
        """Token ids `[m]` to run after the prompt `[length]` at the positions of the first m generated tokens.

        Args:
            prompt: ids `[length]`.
            vocabulary: how many token ids there are.
            encode: text -> ids, without special tokens.
        """
        raise NotImplementedError(f"{self.name} asks for no pseudo-tokens")

    def entries(self, prompt_length: int) -> int:
        """The budget in entries: fractions are floor(f x prompt), raised to `minimum`."""
        budget = getattr(self, "budget", None)
        if budget is None:
            return prompt_length
        return max(math.floor(budget * prompt_length), self.minimum) if isinstance(budget, float) else budget

    def raised(self, prompt_length: int) -> bool:
        """Whether a fraction had to be raised to `minimum`."""
        budget = getattr(self, "budget", None)
        return isinstance(budget, float) and math.floor(budget * prompt_length) < self.minimum

    # ------------------------------------------------------------------ the prefill

    def scores(self, prompt: Prompt) -> Tensor:
        """Raw scores of the prompt's tokens, nothing forced and nothing pooled, `[rows, kv_heads, length]`.

        Equal scores where the method does not score.
        """
        return torch.zeros(prompt.rows, prompt.kv_heads, prompt.length, device=prompt.keys.device)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        """Positions to keep of a prompt longer than `budget`: int64 `[rows, kv_heads, kept]`, ascending, -1 padded.

        All of them, unless overridden.
        """
        return _everything(prompt)

    def prefill(self, prompt: Prompt) -> Tensor:
        """Positions kept after the prefill; a prompt within the budget is kept whole."""
        budget = self.entries(prompt.length)
        return self.choose(prompt, budget) if prompt.length > budget else _everything(prompt)

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        """Bring the store, which holds the whole prompt, down to what the prefill stage keeps."""
        store.budget = self.entries(prompt.length)
        kept = self.prefill(prompt)
        if kept.shape[2] < prompt.length:
            store.evict(kept)

    def keep(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        layer: int = 0,
        n_layers: int = 1,
        pseudo: Tensor | None = None,
        accumulated: Tensor | None = None,
        max_new_tokens: int = 0,
    ) -> Tensor:
        """The prefill decision of one layer.

        Args:
            queries: `[batch, heads, n, head_dim]`, post-RoPE queries of the LAST n prompt positions.
            keys, values: `[batch, kv_heads, length, head_dim]`.
            layer, n_layers: for layer-wise budgets.
            pseudo: `[batch, heads, m, head_dim]`, post-RoPE pseudo-queries.
            accumulated: `[batch, heads, length]`, attention summed over all prompt queries.
            max_new_tokens: length that the response may reach.

        Returns:
            int64 `[batch, kv_heads, kept]`, original positions in ascending order, -1 at the end where a head keeps
            fewer.

        Raises:
            KvlabError: something that the policy needs was not given.
        """
        need = keys.shape[2] if self.observes is None else min(self.observes, keys.shape[2])
        if queries.shape[2] < need:
            raise KvlabError(f"{self.name} looks at the last {need} prompt queries and got {queries.shape[2]}")
        layers = (layer,) * keys.shape[0]
        return self.prefill(
            Prompt(queries, keys, values, layers, n_layers, pseudo, accumulated, max_new_tokens)
        ).contiguous()

    # ------------------------------------------------------------------ a decoding step, in this order

    def select(self, store: LayerStore, queries: Tensor, scaling: float | None) -> Tensor | None:
        """Slots that this step reads, int64 `[rows, kv_heads, n]`, -1 padded; None reads everything stored.

        Args:
            queries: `[rows, heads, 1, head_dim]`; the step's own entry is already the store's last.
            scaling: factor of the logits, 1 / sqrt(head_dim) if None.
        """
        return None

    def bias(self, store: LayerStore) -> Tensor | None:
        """What is added to the logits of stored entries, `[rows, kv_heads, slots]`; None for nothing."""
        return None

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        """After a step has attended: update scores, then evict or merge down to the budget.

        Args:
            weights: the attention `[rows, heads, slots]` over the entries then stored, bias included, own entry last;
                None where the policy says that it does not look at it (`weighs`).
        """

    @property
    def steps(self) -> bool:
        """Whether it does anything after a step has attended."""
        return type(self).step is not Policy.step

    @property
    def acts_while_decoding(self) -> bool:
        """Whether anything after the prefill is overridden; if not, every generated token stays and is read."""
        return self.steps or any(getattr(type(self), verb) is not getattr(Policy, verb) for verb in ("select", "bias"))


def _everything(prompt: Prompt) -> Tensor:
    return torch.arange(prompt.length, device=prompt.keys.device).expand(prompt.rows, prompt.kv_heads, prompt.length)


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    message = problem["msg"].removeprefix("Value error, ")
    field = problem["loc"][0] if problem["loc"] else None
    if field is None or problem["type"] == "value_error":
        return message
    if problem["type"] == "missing":
        return f"parameter {field!r} is missing"
    return f"parameter {field!r} = {problem['input']!r} is not right: {message[0].lower()}{message[1:]}"


def top_and_last(scores: Tensor, top: int, last: int) -> Tensor:
    """The `top` best of the older positions and all of the `last`: `[..., length]` -> ascending `[..., top + last]`."""
    older = scores.shape[-1] - last
    window = torch.arange(older, scores.shape[-1], device=scores.device).expand(*scores.shape[:-1], last)
    return torch.cat([measures.top_positions(scores[..., :older], top), window], dim=-1)
