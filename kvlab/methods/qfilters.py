"""Q-Filters (Godey et al., 2025): one direction for each head, measured once, says which keys will be attended to."""

from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from kvlab.core import attention
from kvlab.errors import KvlabError
from kvlab.lib.parameters import PathText
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.lookup import QueryFilters
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Scorer


class QFilters(Scorer):
    """Keeps the tokens whose keys lie farthest along the main direction of the queries; prefill only.

    "Q-Filters: Leveraging Query-Key Geometry for Efficient Key-Value Cache Compression" (Godey et al. 2025): each query
    head has a filter. It is the first right singular vector of the head's queries after RoPE on calibration texts. Most
    queries have a positive product with it. Filters are averaged over a GQA group; a token's score is the product of
    its key with the filter. Every generated token is also kept. Cost: one product for each entry; the filters are
    measured once for a model.

    Choices: filters come with kvlab for some models, and `kvlab filters` measures others. Without them the prompt's
    last `window` queries stand in for calibration texts.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt.
        filters: JSON file of measured filters, or the name of a model whose filters come with kvlab ("smollm2-135m").
        window: last prompt queries that filters are made of where none are given (32).
    """

    name: ClassVar[str] = "qfilters"
    summary: ClassVar[str] = "keys along the main direction of the queries"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["qfilters"]

    filters: PathText | None = None
    window: Annotated[int, Field(ge=1)] = 32

    _measured: QueryFilters | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _read(self) -> Self:
        if self.filters is not None:
            self._measured = QueryFilters.load(self.filters)
        return self

    @property
    def from_files(self) -> str:
        return "" if self._measured is None else self._measured.model_dump_json(exclude_none=True)

    @property
    def observes(self) -> int:
        return self.window if self._measured is None else 0

    def scores(self, prompt: Prompt) -> Tensor:
        return prompt.share(("qfilters", self.from_files, self.window), lambda: self._along(prompt))

    def _along(self, prompt: Prompt) -> Tensor:
        keys = attention.exact(prompt.keys)
        if self._measured is None:
            filters = torch.stack([directions(queries, prompt.kv_heads) for queries in prompt.window(self.window)])
        else:
            filters = self._of_model(prompt)[list(prompt.layers)]
        return (keys @ filters.to(keys)[..., None])[..., 0]

    def _of_model(self, prompt: Prompt) -> Tensor:
        """The measured filters, `[n_layers, kv_heads, head_dim]`."""
        assert self._measured is not None, "filters were given"
        found, wanted = self._measured.tensor(), (prompt.n_layers, prompt.kv_heads, prompt.keys.shape[-1])
        if tuple(found.shape) != wanted:
            raise KvlabError(
                f"the filters of {self.filters!r} are of {self._measured.model}, with layers, KV heads and channels "
                f"{tuple(found.shape)}; this model has {wanted}. Measure it with `kvlab filters`; pass keep() its "
                "layer= and n_layers="
            )
        return found


def directions(queries: Tensor, kv_heads: int) -> Tensor:
    """The main direction of the queries of each KV head's group, `[kv_heads, head_dim]`.

    Args:
        queries: after RoPE, `[heads, n, head_dim]`.
        kv_heads: a group's directions are averaged.
    """
    # On the CPU, since not every GPU has this decomposition.
    queries = attention.exact(queries).cpu()
    first = torch.linalg.svd(queries, full_matrices=False).Vh[:, 0]
    along = (queries @ first[..., None])[..., 0]
    sign = torch.where((along > 0).float().mean(-1, keepdim=True) > 0.5, 1.0, -1.0)
    return (sign * first).unflatten(0, (kv_heads, -1)).mean(1)
