"""Which layers of a model a policy compresses, and what the others look at instead of the whole past."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlab.errors import KvlabError
from kvlab.lib.renamed import Renamed

if TYPE_CHECKING:
    import pandas as pd

WHOLE = "the whole past"


@dataclass(frozen=True)
class Layout:
    """The layers of a model, by what they look at.

    Tensors hold the compressed layers alone, one behind the other; a layer's index among them, from 0, is what a policy
    knows as its layer. Everywhere else a layer has the number that it has in the model.

    Attributes:
        sees: what each layer of the model looks at, in words.
        compressed: the numbers of those that a policy compresses, ascending.
    """

    sees: tuple[str, ...]
    compressed: tuple[int, ...]

    place = Renamed("index")

    @classmethod
    def whole(cls, layers: int) -> Layout:
        """That of a model whose layers all attend to the whole past."""
        return cls((WHOLE,) * layers, tuple(range(layers)))

    @property
    def mixed(self) -> bool:
        """Whether there are layers that no policy touches."""
        return len(self.compressed) < len(self.sees)

    @property
    def valid(self) -> bool:
        """Whether it can be that of a model."""
        numbers = range(len(self.sees))
        return all(isinstance(seen, str) for seen in self.sees) and list(self.compressed) == [
            layer for layer in numbers if layer in self.compressed
        ]

    @property
    def others(self) -> tuple[int, ...]:
        """The numbers of the layers that no policy touches."""
        return tuple(layer for layer in range(len(self.sees)) if layer not in self.compressed)

    def index(self, layer: int) -> int:
        """The index of the model's layer `layer` among the compressed layers.

        Raises:
            KvlabError: it is not compressed, or there is no such layer.
        """
        if not 0 <= layer < len(self.sees):
            raise KvlabError(f"layer {layer} is outside 0 .. {len(self.sees) - 1}")
        if layer not in self.compressed:
            raise KvlabError(
                f"layer {layer} sees {self.sees[layer]} and keeps its own cache, which no policy compresses; "
                f"compressed {'is' if len(self.compressed) == 1 else 'are'} {listed(self.compressed)}"
            )
        return self.compressed.index(layer)

    def table(self) -> pd.DataFrame:
        """One row for each layer of the model: layer, sees (what it looks at), compressed."""
        import pandas as pd

        layers = range(len(self.sees))
        return pd.DataFrame(
            {"layer": layers, "sees": self.sees, "compressed": [layer in self.compressed for layer in layers]}
        )


def listed(layers: Sequence[int]) -> str:
    """ "layer 3", "layers 3 and 7", "layers 2, 5 and 8"."""
    names = list(map(str, layers))
    return f"layer {names[0]}" if len(names) == 1 else f"layers {', '.join(names[:-1])} and {names[-1]}"
