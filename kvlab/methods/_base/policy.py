"""The class of all policies: what a policy sees and may do. One object serves a replay and a live run alike.

Before the first decoding step a policy may set budgets for each layer, ask for pseudo-tokens, and score the prompt.
After the prefill it may evict or merge once. At every decoding step it may select the entries that are read, bias the
logits, update its scores, and evict or merge. Most override one or two of these; whatever is not overridden does
nothing.

Rows are the sequences of a batch in a live run and the layers of a model in a replay.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, model_validator
from torch import Tensor

from kvlab.core import ranking
from kvlab.core.rotation import Rotation
from kvlab.core.softmax import Scaling
from kvlab.core.store import EMPTY, LayerStore
from kvlab.errors import KvlabError
from kvlab.lib import references
from kvlab.lib.parameters import Parameters
from kvlab.methods._base import contract
from kvlab.methods._base.declaring import Declaring, number_meant
from kvlab.methods._base.needs import NOTHING, VERBS, Needs, PseudoTokens
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.tensors import check_shapes


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


def _odd(kernel: int, info: ValidationInfo) -> int:
    if kernel % 2 == 0:
        raise ValueError(f"{info.field_name} {kernel} is even; pooling that keeps the length needs an odd kernel")
    return kernel


Kernel = Annotated[int, Field(ge=1), AfterValidator(_odd)]
"""Width of a pooling that keeps the length."""


KINDS = ("score at prefill", "allocation", "decoding", "merging", "selection", "channels", "reference", "other")
SCORERS = "take one that does, such as 'snapkv', 'keydiff' or 'h2o'"


class Policy(Parameters, metaclass=Declaring):
    """A KV-cache compression method with its parameters.

    Subclass it, give it a `name`, fields for parameters, and override what the method does. Objects of a subclass are
    taken wherever a name is; to give it a name, register the class in the entry-point group `kvlab.policies`.
    """

    model_config = ConfigDict(strict=True)

    summary: ClassVar[str] = ""
    family: ClassVar[str] = "other"
    """What kind of method it is, in a few words: policies of one family share a colour in figures."""
    kind: ClassVar[str] = "other"
    """What it decides, one of `KINDS`: lists put policies of one kind together."""
    paper: ClassVar[references.Paper | None] = None
    """The paper that proposes the method. A subclass with a `name` of its own does not inherit it. None for `full` and
    `random`, which no paper proposes, and for `exact_topk`, a bound that several papers compare with.
    """
    by_position: ClassVar[bool] = False
    """Whether it keeps tokens by where they stand alone, so that its scores say nothing of what they hold."""
    sees_response: ClassVar[bool] = False
    """Whether it looks at the response (`Prompt.response`): a reference, which `policies` leaves out."""
    weighs: ClassVar[bool] = True
    """Whether `step` looks at the attention weights; without them a live run can use a fused kernel."""
    takes_ragged: ClassVar[bool] = False
    """Whether `compress` can deal with a store whose heads hold different numbers of entries (a later turn)."""

    def __init__(self, **parameters):
        """A policy with these parameters; KvlabError for one that there is not, or a value that does not fit."""
        # A sweep over numpy's arange is as good as one over a list.
        parameters = {
            key: value.item() if isinstance(value, np.generic) else value for key, value in parameters.items()
        }
        super().__init__(**parameters)

    @classmethod
    def _sentence(cls, problem: Mapping[str, Any]) -> str:
        message = problem["msg"].removeprefix("Value error, ")
        field = problem["loc"][0] if problem["loc"] else None
        if field is None or problem["type"] == "value_error":
            return message
        if problem["type"] == "missing":
            return f"parameter {field!r} is missing"
        wrong_kind = problem["type"] in ("int_type", "float_type", "int_parsing")
        meant = number_meant(problem["input"]) if wrong_kind else None
        hint = "" if meant is None else f"; did you mean {field}={meant!r}?"
        if field == "budget":
            message = "It is a number of entries, such as 128, or a share of the prompt, such as 0.2"
        return f"parameter {field!r} = {problem['input']!r} is not right: {message[0].lower()}{message[1:]}{hint}"

    @model_validator(mode="after")
    def _enough_budget(self) -> Policy:
        budget = self.asked
        if isinstance(budget, int) and budget < self.minimum:
            raise ValueError(f"budget {budget} is below the {self.minimum} entries that these parameters need")
        return self

    def __str__(self) -> str:
        text = f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self)})"
        # A file can change and keep its name, so the signature also holds a hash of its content.
        return f"{text}@{hashlib.sha256(self.from_files.encode()).hexdigest()[:8]}" if self.from_files else text

    @property
    def from_files(self) -> str:
        """The content of the files that the policy's parameters name; empty if they name none."""
        return ""

    __repr__ = __str__

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
    def renews(self) -> bool:
        """Whether it loses nothing for good and chooses anew in each turn, once the turn's question has been read."""
        return False

    @property
    def accumulates(self) -> bool:
        """Whether it needs the attention summed over all prompt queries (`Prompt.accumulated`)."""
        return False

    @property
    def reads_perplexity(self) -> int:
        """The number of last prompt tokens whose perplexity it needs (`Prompt.perplexity`); 0 for none."""
        return 0

    @property
    def needs(self) -> Needs:
        """The inputs that it asks for, and what it does.

        A class lists here only further needs of the model. The rest follows from its other attributes and from the
        verbs that it writes.
        """
        return NOTHING

    @property
    def stated_needs(self) -> Needs:
        """The needs that follow from the other attributes and the verbs."""
        own, key = type(self), self.pseudo_key
        does: dict[str, Any] = {need: getattr(own, verb) is not getattr(Policy, verb) for need, verb in VERBS.items()}
        does["steps"] = self.steps
        return Needs(
            queries=self.observes,
            accumulated=self.accumulates,
            perplexity=self.reads_perplexity,
            pseudo=None if key is None else PseudoTokens(key, self.pseudo_tokens),
            response=self.sees_response,
            **does,
        )

    @property
    def pseudo_key(self) -> str | None:
        """The name under which a trace keeps this policy's pseudo-queries; None if it asks for none."""
        return None

    def pseudo_tokens(self, prompt: Tensor, vocabulary: int, encode: Callable[[str], Tensor]) -> Tensor:
        """Token ids `[m]` to run after the prompt `[length]` at the positions of the first m generated tokens.

        Args:
            prompt: ids `[length]`.
            vocabulary: how many token ids there are.
            encode: text -> ids, without special tokens.
        """
        raise NotImplementedError(f"{self.name} asks for no pseudo-tokens")

    @property
    def asked(self) -> int | float | None:
        """The budget as the user gave it: entries, or a fraction of the prompt; None for a policy without one."""
        return getattr(self, "budget", None)

    def entries(self, prompt_length: int) -> int:
        """The budget in entries: fractions are floor(f x prompt), raised to `minimum`."""
        budget = self.asked
        if budget is None:
            return prompt_length
        return max(math.floor(budget * prompt_length), self.minimum) if isinstance(budget, float) else budget

    def fits(self, prompt_length: int) -> bool:
        """Whether a prompt is within the budget, so that all of it is kept and nothing needs to be judged."""
        return prompt_length <= self.entries(prompt_length)

    def raised(self, prompt_length: int) -> bool:
        """Whether a fraction had to be raised to `minimum`."""
        budget = self.asked
        return isinstance(budget, float) and math.floor(budget * prompt_length) < self.minimum

    # ------------------------------------------------------------------ before the layers are compressed

    def survey(self, prompt: Prompt) -> Tensor:
        """The report of each layer, `[rows, ...]`, for a method that shares its budget out among all layers."""
        raise NotImplementedError(f"{self.name} decides for each layer by itself")

    def plan(self, surveys: Tensor, prompt: Prompt) -> Tensor:
        """The plan, `[n_layers, batch, ...]`, that follows from the surveys of all layers, `[n_layers, batch, ...]`.

        Args:
            prompt: that of any layer; its length and its head counts are those of all.
        """
        raise NotImplementedError(f"{self.name} decides for each layer by itself")

    # ------------------------------------------------------------------ the prefill

    def scores(self, prompt: Prompt) -> Tensor:
        """Raw scores of the prompt's tokens, nothing forced and nothing pooled, `[rows, kv_heads, length]`.

        Equal scores where the method does not score.
        """
        return torch.zeros(prompt.keys.shape[:3], dtype=torch.float32, device=prompt.keys.device)

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        """The values by which the prompt's tokens compete for the budget, `[rows, sets, length]`.

        They are `scores`, pooled where the method pools, and infinity for tokens that it always keeps. Methods around
        another's scores ask for it.

        Raises:
            KvlabError: the method does not score tokens.
        """
        if not self.scores_tokens():
            raise KvlabError(f"{self.name} does not score tokens; {SCORERS}")
        return self.scores(prompt)

    @classmethod
    def scores_tokens(cls) -> bool:
        """Whether its scores tell tokens apart by more than where they stand."""
        return not cls.by_position and cls.scores is not Policy.scores

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        """Positions to keep of a prompt longer than `budget`: int64 `[rows, kv_heads, kept]`, ascending, -1 padded.

        All of them, unless overridden.
        """
        return everything(prompt)

    def prefill(self, prompt: Prompt) -> Tensor:
        """Positions kept after the prefill; a prompt within the budget is kept whole, unless the plan says less."""
        if prompt.plan is None and self.fits(prompt.length):
            return everything(prompt)
        return self.choose(prompt, self.entries(prompt.length))

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        """Bring the store, which holds the whole prompt, down to what the prefill stage keeps."""
        store.budget = self.entries(prompt.length)
        kept = self.prefill(prompt)
        self.rewrite(store, prompt)
        # One row may keep the whole prompt while others keep less.
        if kept.shape[2] < prompt.length or bool((kept == EMPTY).any()):
            store.evict(kept)

    def rewrite(self, store: LayerStore, prompt: Prompt) -> None:
        """Change what is stored of the prompt's entries, before some of them leave."""

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
        projection: Tensor | None = None,
        rotation: Rotation | None = None,
        pre_queries: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """The prefill decision of one layer.

        Args:
            queries: `[batch, heads, n, head_dim]`, post-RoPE queries of the LAST n prompt positions.
            keys, values: `[batch, kv_heads, length, head_dim]`.
            layer, n_layers: for layer-wise budgets: a place, from 0, among that many compressed layers.
            pseudo: `[batch, heads, m, head_dim]`, post-RoPE pseudo-queries.
            accumulated: `[batch, heads, length]`, attention summed over all prompt queries.
            max_new_tokens: length that the response may reach.
            projection: `[hidden, heads x head_dim]`, the layer's output projection W_o (the weight of its o_proj).
            rotation: how the layer turns queries and keys by their positions.
            pre_queries: `[batch, heads, length, head_dim]`, the queries of the whole prompt before RoPE.
            hidden: `[batch, length, width]`, the hidden states that the layer's attention is given.

        Returns:
            int64 `[batch, kv_heads, kept]`, original positions in ascending order, -1 at the end where a head keeps
            fewer. A policy that keeps a set for each query head returns `[batch, heads, kept]`. A decode-time or
            selection policy returns what its prefill stage keeps.

        Raises:
            KvlabError: an input that the policy needs is missing, shapes do not fit together, or values are not finite.
                Or the policy must see all layers first.
        """
        if self.needs.surveys:
            raise KvlabError(
                f"{self.name} shares its budget out among all layers, so one layer alone decides nothing; use "
                "kvlab.replay(trace, policy) and result.kept(layer)"
            )
        if not 0 <= layer < n_layers:
            raise KvlabError(
                f"layer {layer} is outside 0 .. n_layers - 1 = {n_layers - 1}; give the number of layers as n_layers="
            )
        check_shapes(queries, keys, values, pseudo, accumulated, projection, pre_queries, hidden)
        need = self.needs.window(keys.shape[2])
        if queries.shape[2] < need:
            raise KvlabError(f"{self.name} looks at the last {need} prompt queries and got {queries.shape[2]}")
        rows = keys.shape[0]
        prompt = Prompt(
            queries,
            keys,
            values,
            (layer,) * rows,
            n_layers,
            pseudo=pseudo,
            accumulated=accumulated,
            max_new_tokens=max_new_tokens,
            projections=None if projection is None else [projection] * rows,
            rotations=None if rotation is None else [rotation] * rows,
            pre_queries=pre_queries,
            hidden=hidden,
        )
        kept = self.prefill(prompt.seen_by(self)).contiguous()
        if self.needs.chooses and n_layers == 1 and kept.shape[2] < prompt.length:
            paid = kept.shape[0] * kept.shape[1] * [self.entries(prompt.length)]
            contract.check_budget(self, (kept != EMPTY).sum(-1).flatten().tolist(), paid)
        return kept

    # ------------------------------------------------------------------ a decoding step, in this order

    def select(self, store: LayerStore, queries: Tensor, scaling: Scaling) -> Tensor | None:
        """Slots that this step reads, int64 `[rows, kv_heads, n]`, -1 padded; None reads everything stored.

        Args:
            queries: `[rows, heads, 1, head_dim]`; the step's own entry is already the store's last.
            scaling: factor of the logits, 1 / sqrt(head_dim) if None; a `Softmax` of a model that caps its logits or
                has sinks. `attention.weights` takes each of them.
        """
        return None

    def bias(self, store: LayerStore) -> Tensor | None:
        """The addition to the logits of stored entries, `[rows, kv_heads, slots]`; None for nothing."""
        return None

    def amend(self, store: LayerStore, output: Tensor) -> Tensor:
        """The output of the step, given its attention output `[rows, heads, 1, head_dim]`."""
        return output

    def overhead_bytes(self, store: LayerStore) -> int | Tensor:
        """Bytes that the step loads in addition to the entries it reads: all other stored data, unless overridden.

        A number, or one on the store's device, which is read only when somebody asks.
        """
        return store.aux_bytes

    def discount_bytes(self, store: LayerStore) -> int | Tensor:
        """Bytes of the stored entries that it need not store, since it has dropped a part of each; as above."""
        return 0

    def evict_pending(self, store: LayerStore) -> None:
        """Before several tokens are fed to a prompt that has ended: evict now what only the next step would evict.

        Most policies have evicted when the prompt ended. One that waits for its first step would let a question that
        comes after the compression be read with everything still there.
        """

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        """After a step has attended: update scores, then evict or merge down to the budget.

        Args:
            weights: the attention `[rows, heads, slots]` over the entries then stored, bias included, own entry last;
                None where the policy does not need it (`weighs` is False).
        """

    @property
    def steps(self) -> bool:
        """Whether it does anything after a step has attended."""
        return type(self).step is not Policy.step


def everything(prompt: Prompt) -> Tensor:
    """All positions of a prompt, int64 `[rows, kv_heads, length]`."""
    return torch.arange(prompt.length, device=prompt.keys.device).expand(prompt.rows, prompt.kv_heads, prompt.length)


def top_and_last(scores: Tensor, top: int, last: int) -> Tensor:
    """The `top` best of the older positions and all of the `last`: `[..., length]` -> ascending `[..., top + last]`."""
    older = scores.shape[-1] - last
    window = torch.arange(older, scores.shape[-1], device=scores.device).expand(*scores.shape[:-1], last)
    return torch.cat([ranking.top_positions(scores[..., :older], top), window], dim=-1)
