"""The needs of policies: the inputs that they ask for, and what they do.

Callers look at one object and at no method of a class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from kvlab.lib.renamed import Renamed
from kvlab.methods._base.repeating import Repetition


@dataclass(frozen=True)
class PseudoTokens:
    """Tokens that run after a prompt, whose queries a policy looks at.

    Attributes:
        key: the name under which a trace keeps their queries.
        tokens: a function that gives their ids `[m]`. Its arguments are a prompt's ids `[length]`, the number of token
            ids that there are, and a function that gives the ids of a text.
    """

    key: str
    tokens: Callable[[Tensor, int, Callable[[str], Tensor]], Tensor] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Draft:
    """An answer that the model drafts after a prompt of which it sees a part; a policy looks at its queries.

    Attributes:
        key: the name under which a trace keeps the queries.
        tokens: how many it drafts, greedily.
        sees: the positions `[rows, kv_heads, k]` that the draft sees of a `Prompt`, -1 padded.
    """

    key: str
    tokens: int
    sees: Callable[[Any], Tensor] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Needs:
    """The inputs that a policy asks for, each only recorded where somebody does, and what it does.

    Attributes:
        queries: how many of the last prompt queries it looks at (`Prompt.window`); None for all of them.
        accumulated: the attention summed over all prompt queries (`Prompt.accumulated`).
        perplexity: of how many of the last prompt tokens (`Prompt.perplexity`); 0 for none.
        pseudo: pseudo-tokens, or a draft of the answer (`Prompt.pseudo`).
        projection: the output projections of the layers (`Prompt.projection`).
        rotation: how each layer turns queries and keys by their positions (`Prompt.rotation`).
        pre_queries: the queries of the whole prompt before RoPE (`Prompt.pre_queries`).
        hidden: the hidden states that enter each layer's attention (`Prompt.hidden`).
        repetitions: scores of passes in which the model repeats its prompt (`Prompt.repeated`).
        response: the queries of the response (`Prompt.response`), which only a replay knows.
        origin: the prompt's token ids and the model's name (`Prompt.origin`).
        surveys: whether it must see all layers before it compresses any.
        chooses: whether it chooses what stays of a prompt longer than its budget.
        rewrites: whether the entries that it leaves are others than the model made.
        selects: whether it says which entries a step reads.
        biases, amends: whether it changes a step's logits, or its output.
        steps: whether it does anything after a step has attended.
    """

    queries: int | None = 0
    accumulated: bool = False
    perplexity: int = 0
    pseudo: PseudoTokens | Draft | None = None
    projection: bool = False
    rotation: bool = False
    pre_queries: bool = False
    hidden: bool = False
    repetitions: tuple[Repetition, ...] = ()
    response: bool = False
    origin: bool = False
    surveys: bool = False
    chooses: bool = False
    rewrites: bool = False
    selects: bool = False
    biases: bool = False
    amends: bool = False
    steps: bool = False

    places = Renamed("positions")

    def __or__(self, other: Needs) -> Needs:
        """Join two needs: the inputs and the verbs of either."""
        both = {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        joined = {
            "queries": None if None in both.pop("queries") else max(self.queries or 0, other.queries or 0),
            "pseudo": self.pseudo or other.pseudo,
            "repetitions": tuple(dict.fromkeys(self.repetitions + other.repetitions)),
        }
        return Needs(**{name: max(pair) for name, pair in both.items() if name not in joined}, **joined)

    @property
    def inputs(self) -> Needs:
        """The inputs alone: the needs of whoever uses its scores and does something else with them."""
        return replace(self, **dict.fromkeys(VERBS, False))

    def window(self, length: int) -> int:
        """How many queries it looks at of a prompt of `length` tokens."""
        return length if self.queries is None else min(self.queries, length)

    @property
    def every_query(self) -> bool:
        """Whether all queries of the prompt have to be kept."""
        return self.queries is None or self.pre_queries

    @property
    def before_rope(self) -> bool:
        """Whether queries before RoPE have to be seen while the prompt is fed."""
        return self.rotation or self.pre_queries

    @property
    def hidden_in_passes(self) -> bool:
        """Whether what the layers' projections are given has to be seen, in the prompt or in passes on top of it."""
        return self.hidden or any(repetition.plus for repetition in self.repetitions)

    @property
    def positions(self) -> bool:
        """Whether it matters where the prompt's tokens were placed."""
        return self.rotation or bool(self.repetitions) or self.pseudo is not None

    @property
    def acts_while_decoding(self) -> bool:
        """Whether it does anything after the prefill; if not, every generated token stays and is read."""
        return self.selects or self.biases or self.amends or self.steps

    @property
    def attends_plainly(self) -> bool:
        """Whether a step attends to the entries that it reads as the model would."""
        return not (self.rewrites or self.biases or self.amends)


NOTHING = Needs()
VERBS = {
    "surveys": "survey",
    "chooses": "choose",
    "rewrites": "rewrite",
    "selects": "select",
    "biases": "bias",
    "amends": "amend",
    "steps": "step",
}
"""What a policy does, by the verb that it then writes."""
