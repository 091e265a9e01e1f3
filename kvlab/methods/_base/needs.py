"""What policies ask of a model besides the queries, keys and values of its layers."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.methods._base.repeating import Repetition


@dataclass(frozen=True)
class Needs:
    """What a policy asks for, each only recorded where somebody does.

    Attributes:
        projection: the output projections of the layers (`Prompt.projection`).
        rotation: how each layer turns queries and keys by their positions (`Prompt.rotation`).
        pre_queries: the queries of the whole prompt before RoPE (`Prompt.pre_queries`).
        repetitions: scores of passes in which the model repeats its prompt (`Prompt.repeated`).
    """

    projection: bool = False
    rotation: bool = False
    pre_queries: bool = False
    repetitions: tuple[Repetition, ...] = ()

    def __or__(self, other: Needs) -> Needs:
        """What either of two asks for."""
        return Needs(
            self.projection or other.projection,
            self.rotation or other.rotation,
            self.pre_queries or other.pre_queries,
            tuple(dict.fromkeys(self.repetitions + other.repetitions)),
        )

    @property
    def before_rope(self) -> bool:
        """Whether queries before RoPE have to be seen while the prompt is fed."""
        return self.rotation or self.pre_queries

    @property
    def hidden(self) -> bool:
        """Whether what the layers' projections are given has to be seen in passes on top of the prompt."""
        return any(repetition.plus for repetition in self.repetitions)


NOTHING = Needs()
