"""What policies ask of a model besides the queries, keys and values of its layers."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Needs:
    """What a policy asks for, each only recorded where somebody does.

    Attributes:
        projection: the output projections of the layers (`Prompt.projection`).
        rotation: how each layer turns queries and keys by their positions (`Prompt.rotation`).
        pre_queries: the queries of the whole prompt before RoPE (`Prompt.pre_queries`).
    """

    projection: bool = False
    rotation: bool = False
    pre_queries: bool = False

    @property
    def before_rope(self) -> bool:
        """Whether queries before RoPE have to be seen while the prompt is fed."""
        return self.rotation or self.pre_queries

    def __or__(self, other: Needs) -> Needs:
        """What either of two asks for."""
        return Needs(*(mine or yours for mine, yours in zip(astuple(self), astuple(other), strict=True)))


NOTHING = Needs()
