"""Numbers that are measured once for a model and then looked up by policies: small JSON files, checked when read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from torch import Tensor

from kvlab.errors import KvlabError, nearest
from kvlab.lib.files import expanded, parsed, replacing, why

SHIPPED = Path(__file__).parents[1] / "heads"
"""Head scores that come with kvlab, one file for each model, found by the model's name."""
SHIPPED_FILTERS = Path(__file__).parents[1] / "filters"
"""Q-Filters that come with kvlab, in the same way."""
SHIPPED_TABLES = Path(__file__).parents[1] / "tables"
"""CompilerKV's tables that come with kvlab, in the same way."""
PUBLISHED_TABLES = SHIPPED_TABLES / "published" / "compilerkv.json"
"""The tables in the authors' repository of CompilerKV, for models of 32 layers with 32 query heads."""
SHIPPED_ALONE = Path(__file__).parents[1] / "alone"
"""Tables learnt one head at a time, a file `MODEL-BUDGET.json` for each budget."""


class Measured(BaseModel):
    """The content of a file; a subclass gives its `title` in messages and the `folder` of its shipped files."""

    title: ClassVar[str]
    folder: ClassVar[Path]

    @property
    def measured_on(self) -> tuple[str, str, int, int]:
        """Hash of the model's weights, its name, its layers and query heads; "" or 0 where the file does not say."""
        raise NotImplementedError

    def _write(self, path: str | Path, field: str, rows: Sequence[str]) -> Path:
        """Write the JSON file with a line for each row of one field; under its name only once it is whole."""
        others = self.model_dump(exclude={field}, exclude_none=True)
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in others.items()]
        lines.append(f' "{field}": [\n' + ",\n".join(f"  {row}" for row in rows) + "\n ]")
        with replacing(path) as temporary:
            temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return Path(path)

    @classmethod
    def shipped_for(cls, model: str, sha256: str, n_layers: int, heads: int) -> str | None:
        """Name of the file that comes with kvlab for a model; None without one.

        The hash of the weights decides. If no file has it (a later version may convert the same model differently), the
        name and the shape decide together.
        """
        found = cls.shipped_in(cls.folder, model, sha256, n_layers, heads)
        return found[0].stem if found else None

    @classmethod
    def shipped_in(cls, folder: Path, model: str, sha256: str, n_layers: int, heads: int) -> list[Path]:
        """The files of a folder that are a model's, by the hash of its weights or else by its name and shape."""
        known = {path: read(path, cls).measured_on for path in sorted(folder.glob("*.json"))}
        same = [path for path, (of_weights, *_) in known.items() if of_weights == sha256]
        return same or [path for path, (_, *about) in known.items() if about == [model, n_layers, heads]]


T = TypeVar("T", bound=Measured)


def read(path: str | Path, kind: type[T]) -> T:
    """The file at `path` as an object of `kind`; read again only when it has changed.

    Raises:
        KvlabError: there is no such file, or its content is not right; the message says where.
    """
    path = expanded(path)
    try:
        stamp = path.stat()
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise KvlabError(f"cannot read {path}: {why(error).lower()}") from None
    return _read(path, kind, stamp.st_mtime_ns, stamp.st_size)


@lru_cache(maxsize=16)
def _read(path: Path, kind: type[T], _changed: int, _size: int) -> T:
    try:
        return kind.model_validate(parsed(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        problem = error.errors()[0]
        message = problem["msg"].removeprefix("Value error, ")
        where = ".".join(map(str, problem["loc"]))
        raise KvlabError(f"{path} is no file of {kind.title}: {f'{where}: ' if where else ''}{message}") from None
    except json.JSONDecodeError as error:
        problem = f"not valid JSON, line {error.lineno}: {error.msg}"
        raise KvlabError(f"{path} is no file of {kind.title}: {problem}") from None
    except UnicodeDecodeError:
        raise KvlabError(f"{path} is no file of {kind.title}: not UTF-8 text") from None
    except OSError as error:
        raise KvlabError(f"cannot read {path}: {why(error).lower()}") from None


class HeadScores(Measured):
    """How much each query head attends to a needle while the model answers with it: retrieval heads stand out.

    Made by `kvlab.traces.retrieval_heads.measure` or `kvlab heads`, used by `duoattention`.

    Attributes:
        model: its name.
        sha256: of its weights.
        n_layers, heads, kv_heads: its shape.
        contexts: prompt tokens of each needle.
        depths: where in its prompt each needle stood, from 0 (start) to 1.
        documents: what each needle was hidden in, as `name@sha`.
        seed: of the needles and of the choice of documents.
        kvlab: the version that measured.
        layers: the numbers of these layers in the model; None where it has no others.
        scores: `[layer][head]`, mean share of the answer tokens' attention that fell on the needle's tokens, in [0, 1].
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    title: ClassVar[str] = "head scores (kvlab heads makes one)"
    folder: ClassVar[Path] = SHIPPED

    format: Literal["kvlab-heads-1"] = "kvlab-heads-1"
    model: str
    sha256: str
    n_layers: Annotated[int, Field(ge=1)]
    heads: Annotated[int, Field(ge=1)]
    kv_heads: Annotated[int, Field(ge=1)]
    contexts: list[int]
    depths: list[FiniteFloat]
    documents: list[str] = []
    seed: int
    kvlab: str
    layers: list[Annotated[int, Field(ge=0)]] | None = None
    scores: list[list[Annotated[FiniteFloat, Field(ge=0, le=1)]]]

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")
        _check_grid("scores", self.scores, self.n_layers, self.heads)
        if self.layers is not None and len(self.layers) != self.n_layers:
            raise ValueError(f"layers names {len(self.layers)} layers, and there are scores of {self.n_layers}")
        return self

    @property
    def measured_on(self) -> tuple[str, str, int, int]:
        return self.sha256, self.model, self.n_layers, self.heads

    def per_kv_head(self) -> Tensor:
        """The best score of each GQA group, float64 `[n_layers, kv_heads]`."""
        scores = torch.tensor(self.scores, dtype=torch.float64)
        return scores.view(self.n_layers, self.kv_heads, -1).amax(-1)

    def best(self, n: int) -> list[tuple[int, int, float]]:
        """The `n` best (layer, query head, score), best first; layers by their numbers in the model."""
        rows = zip(range(self.n_layers) if self.layers is None else self.layers, self.scores, strict=True)
        scored = [(layer, head, score) for layer, row in rows for head, score in enumerate(row)]
        return sorted(scored, key=lambda entry: -entry[2])[:n]

    def save(self, path: str | Path) -> Path:
        """Write the JSON file; under its name only once it is whole."""
        return self._write(path, "scores", [json.dumps([round(score, 6) for score in row]) for row in self.scores])

    @classmethod
    def load(cls, path_or_name: str | Path) -> HeadScores:
        """Read a file, or the scores that come with kvlab for a model of that name.

        Raises:
            KvlabError: there is no such file or name, or the file is not right.
        """
        return _load(path_or_name, cls, "model with head scores", "kvlab heads")


class QueryFilters(Measured):
    """The main direction of the queries of each KV head: keys that lie along it are attended to.

    Made by `kvlab.traces.query_filters.measure` or `kvlab filters`, used by `qfilters`.

    Attributes:
        model: its name.
        sha256: of its weights.
        heads: its query heads.
        tokens: of each calibration text.
        samples: queries of each head that the direction is of.
        documents: the texts, as `name@sha`.
        seed: of the choice of texts and queries.
        kvlab: the version that measured.
        layers: the numbers of these layers in the model; None where it has no others.
        filters: `[layer][kv_head][channel]`, the mean over a group of unit vectors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    title: ClassVar[str] = "Q-Filters (kvlab filters makes one)"
    folder: ClassVar[Path] = SHIPPED_FILTERS

    format: Literal["kvlab-filters-1"] = "kvlab-filters-1"
    model: str
    sha256: str
    heads: Annotated[int, Field(ge=1)]
    tokens: int
    samples: int
    documents: list[str] = []
    seed: int
    kvlab: str
    layers: list[Annotated[int, Field(ge=0)]] | None = None
    filters: list[list[list[FiniteFloat]]]

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        if not self.filters or not self.filters[0] or not self.filters[0][0]:
            raise ValueError("filters holds no vectors")
        for layer, grid in enumerate(self.filters):
            _check_grid(f"filters, layer {layer}", grid, len(self.filters[0]), len(self.filters[0][0]))
        if self.heads % len(self.filters[0]):
            raise ValueError(f"{self.heads} query heads cannot share {len(self.filters[0])} KV heads evenly")
        if self.layers is not None and len(self.layers) != len(self.filters):
            raise ValueError(f"layers names {len(self.layers)} layers, and there are filters of {len(self.filters)}")
        return self

    @property
    def measured_on(self) -> tuple[str, str, int, int]:
        return self.sha256, self.model, len(self.filters), self.heads

    def tensor(self) -> Tensor:
        """float32 `[n_layers, kv_heads, head_dim]`."""
        return torch.tensor(self.filters, dtype=torch.float32)

    def save(self, path: str | Path) -> Path:
        """Write the JSON file; under its name only once it is whole."""
        return self._write(path, "filters", [json.dumps(layer, separators=(",", ":")) for layer in self.filters])

    @classmethod
    def load(cls, path_or_name: str | Path) -> QueryFilters:
        """Read a file, or the filters that come with kvlab for a model of that name.

        Raises:
            KvlabError: there is no such file or name, or the file is not right.
        """
        return _load(path_or_name, cls, "model with Q-Filters", "kvlab filters")


class DecisionTables(Measured):
    """CompilerKV's two tables: weights of the query heads (eq. 9) and thresholds by risk (section 4.4).

    Attributes:
        model: whose they are.
        heads: `[layer][head]`, the weights W, not negative; None weighs all heads alike.
        risk: `[layer][entropy bin][perplexity bin]`, the thresholds tau in [0, 1]; None lets every token through.
        entropy: range of the attention's entropy in nats that the bins divide evenly.
        perplexity: range of the perplexity that the bins divide evenly in its logarithm.
        entropy_edges, perplexity_edges: where the bins meet, ascending, one fewer than bins; None divides evenly.

    Further fields (how the tables were learnt) are let through.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    title: ClassVar[str] = "CompilerKV tables"
    folder: ClassVar[Path] = SHIPPED_TABLES

    model: str = ""
    heads: list[list[Annotated[FiniteFloat, Field(ge=0)]]] | None
    risk: list[list[list[Annotated[FiniteFloat, Field(ge=0, le=1)]]]] | None
    entropy: tuple[FiniteFloat, FiniteFloat] = (2.0, 10.0)
    perplexity: tuple[Annotated[FiniteFloat, Field(gt=0)], FiniteFloat] = (1.0, 100.0)
    entropy_edges: list[FiniteFloat] | None = None
    perplexity_edges: list[FiniteFloat] | None = None

    @model_serializer(mode="wrap")
    def _without_absent_edges(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Files and signatures of tables with even bins stay what they were before there were edges.
        return {key: value for key, value in handler(self).items() if value is not None or not key.endswith("_edges")}

    @model_validator(mode="after")
    def _edges(self) -> Self:
        for name, bins in (("entropy_edges", 0), ("perplexity_edges", 1)):
            edges = getattr(self, name)
            if edges is None:
                continue
            if self.risk is None or edges != sorted(edges) or len(edges) + 1 != np.shape(self.risk)[1 + bins]:
                raise ValueError(f"{name} must ascend, and be one fewer than the risk table's bins")
        return self

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        for name in ("entropy", "perplexity"):
            low, high = getattr(self, name)
            if low >= high:
                raise ValueError(f"{name} [{low:g}, {high:g}] is not a range: its end must lie above its start")
        layers = len(self.heads or self.risk or [])
        if self.heads is not None:
            if not self.heads or not self.heads[0]:
                raise ValueError("heads holds no weights")
            _check_grid("heads", self.heads, layers, len(self.heads[0]))
            if not all(any(row) for row in self.heads):
                raise ValueError("heads holds a layer whose weights are all 0; at least one head must count")
        if self.risk is not None:
            if not self.risk or not self.risk[0] or not self.risk[0][0]:
                raise ValueError("risk holds no thresholds")
            if len(self.risk) != layers:
                raise ValueError(f"risk has {len(self.risk)} layers and heads {layers}; they must be of one model")
            for layer, grid in enumerate(self.risk):
                _check_grid(f"risk, layer {layer}", grid, len(self.risk[0]), len(self.risk[0][0]))
        return self

    @classmethod
    def load(cls, path_or_name: str | Path) -> DecisionTables:
        """Read a file, or the tables that come with kvlab for a model of that name.

        Raises:
            KvlabError: there is no such file or name, or the file is not right.
        """
        return _load(path_or_name, cls, "model with CompilerKV tables", "kvlab compile")

    @property
    def neutral(self) -> bool:
        """Whether both tables are missing."""
        return self.heads is None and self.risk is None

    @cached_property
    def gates(self) -> bool:
        """Whether any threshold can reject a token."""
        return self.risk is not None and any(tau > 0 for grid in self.risk for row in grid for tau in row)

    @property
    def n_layers(self) -> int:
        """Layers of the model that they are for; 0 where there is neither table."""
        return len(self.heads or self.risk or [])

    @property
    def measured_on(self) -> tuple[str, str, int, int]:
        sha256 = str((self.model_extra or {}).get("sha256", ""))
        return sha256, self.model, self.n_layers, len(self.heads[0]) if self.heads else 0

    def mapped(self, n_layers: int, heads: int) -> DecisionTables:
        """The same tables for a model of another shape, by relative depth (CompilerKV, appendix B.1).

        Weights and thresholds are interpolated linearly between the two layers around the same relative depth. So a
        rise or fall with depth stays. Heads have no counterparts in another model. Where their number differs, each
        takes the weight of the head at the same relative place in its layer.

        Raises:
            KvlabError: fewer than one layer or head, or nothing to map.
        """
        if n_layers < 1 or heads < 1:
            raise KvlabError(f"tables are mapped to at least 1 layer of 1 head, not to {n_layers} of {heads}")
        if self.neutral:
            raise KvlabError("there is neither a head table nor a risk table to map")
        weights = risk = None
        if self.heads is not None:
            table = torch.tensor(self.heads, dtype=torch.float64)
            columns = ((torch.arange(heads, dtype=torch.float64) + 0.5) / heads * table.shape[1]).long()
            weights = _at_depths(table, n_layers)[:, columns].tolist()
        if self.risk is not None:
            risk = _at_depths(torch.tensor(self.risk, dtype=torch.float64), n_layers).tolist()
        return self.model_copy(update={"heads": weights, "risk": risk})

    def thresholds(self, layer: int, entropy: Tensor, perplexity: Tensor) -> Tensor:
        """Tau of one layer for each prompt's entropy and perplexity `[...]`, float64 `[...]`."""
        if self.risk is None:
            raise KvlabError("there is no risk table to take thresholds from")
        return torch.tensor(self.risk[layer], dtype=torch.float64, device=entropy.device)[
            self.cell(entropy, perplexity)
        ]

    def cell(self, entropy: Tensor, perplexity: Tensor) -> tuple[Tensor, Tensor]:
        """The cell of the risk table that prompts fall into, by entropy and perplexity: int64 `[...]` each."""
        if self.risk is None:
            raise KvlabError("there is no risk table to take thresholds from")
        shape = len(self.risk[0]), len(self.risk[0][0])
        row, column = bins(entropy, perplexity, shape, self.entropy, self.perplexity)
        if self.entropy_edges is not None:
            row = torch.bucketize(entropy.double(), entropy.new_tensor(self.entropy_edges, dtype=torch.float64))
        if self.perplexity_edges is not None:
            edges = perplexity.new_tensor(self.perplexity_edges, dtype=torch.float64)
            column = torch.bucketize(perplexity.double(), edges)
        return row, column


def _load(path_or_name: str | Path, kind: type[T], noun: str, command: str) -> T:
    """A file, or the shipped file that is named like a model."""
    shipped = {file.stem: file for file in kind.folder.glob("*.json")}
    name = str(path_or_name)
    if name in shipped:
        return read(shipped[name], kind)
    # A model's name may contain a dot, so a suffix alone does not make a path.
    if Path(name).suffix not in (".json", ".txt") and os.sep not in name and not os.path.exists(expanded(name)):
        raise KvlabError(f"{nearest(name, shipped, noun)}; or give the file of `{command}`")
    return read(name, kind)


def _check_grid(name: str, grid: list[list[float]], rows: int, columns: int) -> None:
    if len(grid) != rows or any(len(row) != columns for row in grid):
        widths = sorted({len(row) for row in grid})
        raise ValueError(f"{name} must be {rows} rows of {columns} numbers, and is {len(grid)} of {widths}")


def bins(
    entropy: Tensor,
    perplexity: Tensor,
    shape: tuple[int, int],
    entropies: tuple[float, float],
    perplexities: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """The cell of a risk table of `shape` that prompts fall into, by entropy and perplexity: int64 `[...]` each.

    Entropy is divided evenly, perplexity evenly in its logarithm; what lies outside is in the first or the last bin.
    """
    low, high = map(math.log, perplexities)
    return _bin(entropy, *entropies, shape[0]), _bin(perplexity.double().log(), low, high, shape[1])


def _at_depths(layers: Tensor, n: int) -> Tensor:
    """Layers `[m, ...]` read off at `n` depths from the first to the last, `[n, ...]`; one alone lies in the middle."""
    last = layers.shape[0] - 1
    depth = torch.linspace(0, last, n, dtype=torch.float64) if n > 1 else torch.tensor([last / 2], dtype=torch.float64)
    below = depth.floor().long().clamp_max(last)
    share = (depth - below).view(-1, *[1] * (layers.dim() - 1))
    return torch.lerp(layers[below], layers[(below + 1).clamp_max(last)], share)


def _bin(value: Tensor, low: float, high: float, bins: int) -> Tensor:
    """Which of `bins` equal parts of low .. high holds a value; what lies outside is in the first or the last."""
    return ((value.double() - low) / (high - low) * bins).floor().clamp(0, bins - 1).long()
