"""CompilerKV: token utility weighted by a table of heads, gated by a table of prompt risks."""

import warnings
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.errors import KvlabError
from kvlab.lib.parameters import PathText
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.lookup import PUBLISHED_TABLES, DecisionTables
from kvlab.methods._base.policy import Budget, Kernel, Policy
from kvlab.methods._base.prompt import Prompt
from kvlab.methods.dynamickv import budgets_by_top_scores

REACH = 10
"""Largest budget of a layer in the authors' runs, as a multiple of the mean."""

OTHER_MODEL = "learn the tables on this model, or map these by depth (kvlab compile --from FILE --model MODEL)"


class CompilerKV(Policy):
    """Keeps the tokens of largest weighted utility that pass a threshold for the prompt's risk; prefill only.

    CompilerKV, section 4: A_i is the attention of the last `utility_window` queries to token i, averaged over layers
    and heads (eq. 6). The utility of a head is A_i times the relative norm of the value (eq. 7-8). The score of a
    layer's token is the largest over its heads, each weighted by the head table (eq. 10). A token is a candidate if its
    score, relative to the layer's largest, reaches the threshold (eq. 15). The risk table gives the threshold by layer,
    entropy and perplexity. The entropy is of the mean attention over the last `window` queries (eq. 11-12), the
    perplexity of their tokens (eq. 13). All candidates are kept if they fit the budget, else the best of them (eq. 16).
    The heads of a layer share one set; nothing is forced. Every generated token is also kept. All layers are seen
    before any is compressed. With the tables that come with kvlab the thresholds leave much of a budget empty, so
    measurements with them understate the method. Cost: SnapKV's, and the norms of all values.

    Choices where the paper is silent: the norm is the Euclidean one; a query head's value is that of its KV head. The
    text at hand does not say what a threshold's scores are divided by. Appendix B.1 says that they concentrate around
    one number: true after division by the mean (`scale="mean"`). The published code divides by the largest.

    The authors' runs differ from the paper (`variant="published"`). Each layer has its own attention, summed over the
    window, average-pooled and weighted for each query head. The mean over the heads selects one set for each layer. The
    window stays, and there are no norms and no thresholds. Layers share the budget as DynamicKV's do, by the pooled
    scores of all query heads. The authors' weights are used on models of 32 layers with 32 query heads; on others heads
    weigh the same, and a warning says so. Their code shares out after every fourth layer; here it is done once.

    Parameters:
        budget: entries for each layer and KV head; their mean over layers with `variant="published"`.
        window: last prompt tokens whose attention and perplexity tell the risk (64).
        utility_window: last prompt tokens whose attention makes the utility (32).
        kernel: width of the average pooling of scores, odd (1: none).
        recent: last prompt tokens that always stay, as SnapKV's window does; pooling leaves them out (0: none).
        norms: "relative" weighs attention with the relative norm of the value (eq. 7); "none" leaves it as it is.
        scale: what a threshold's scores are relative to: the "largest" or the "mean" of the layer's.
        pad: "none" keeps the candidates alone; "budget" fills up to the budget with the best of the others.
        variant: "paper", or "published" for the method of the authors' code, which sets `kernel=7`, `norms="none"`,
            `pad="budget"`, and `utility_window` and `recent` to `window`.
        tables: JSON file of both tables (`kvlab compile`), or a model whose tables come with kvlab; by default equal
            weights and no threshold, with a warning. Those of kvlab come from 40 prompts and separate heads and risks
            no better than chance. Their thresholds leave much of a budget empty; `pad="budget"` fills it.
    """

    name: ClassVar[str] = "compilerkv"
    summary: ClassVar[str] = "weighted utility, gated by the prompt's risk, from tables learnt offline"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "allocation"
    paper: ClassVar[Paper | None] = PAPERS["compilerkv"]

    budget: Budget
    window: Annotated[int, Field(ge=1)] = 64
    utility_window: Annotated[int, Field(ge=1)] = 32
    kernel: Kernel = 1
    recent: Annotated[int, Field(ge=0)] = 0
    norms: Literal["relative", "none"] = "relative"
    scale: Literal["largest", "mean"] = "largest"
    pad: Literal["none", "budget"] = "none"
    variant: Literal["paper", "published"] = "paper"
    tables: PathText | None = None

    _tables: DecisionTables = PrivateAttr(DecisionTables(heads=None, risk=None))

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        fields = cls.model_fields
        if given.get("variant", fields["variant"].default) != "published":
            return given
        window = given.get("window", fields["window"].default)
        runs = {"utility_window": window, "kernel": 7, "recent": window, "norms": "none", "pad": "budget"}
        for name, value in runs.items():
            if given.get(name, value) not in (value, fields[name].default):
                raise ValueError(f"{name}={given[name]!r} is not of variant='published', which has {name}={value!r}")
        return {**given, **runs}

    @model_validator(mode="after")
    def _windows(self) -> Self:
        if self.utility_window > self.window:
            raise ValueError(f"utility_window {self.utility_window} must lie within the window of {self.window}")
        return self

    @model_validator(mode="after")
    def _read(self) -> Self:
        if self.tables is not None:
            self._tables = DecisionTables.load(self.tables)
        return self

    def using(self, tables: DecisionTables) -> Self:
        """The same policy with tables from memory, not from a file."""
        policy = self.replace(tables=None)
        policy._tables = tables
        return policy

    def replace(self, **changes: Any) -> Self:
        """The same with other values; tables from memory stay, unless others are given."""
        if self.variant == "published" and changes.keys() & {"variant", "window"}:
            # The variant and its window set these values, so they go back to their defaults first.
            fields = type(self).model_fields
            follow = ("utility_window", "kernel", "recent", "norms", "pad")
            changes = {name: fields[name].default for name in follow} | changes
        policy = super().replace(**changes)
        if policy.tables is None and "tables" not in changes:
            policy._tables = self._tables
        return policy

    @property
    def tables_in_use(self) -> DecisionTables:
        """The tables, wherever they came from."""
        return self._tables

    @property
    def from_files(self) -> str:
        return "" if self._tables.neutral else self._tables.model_dump_json()

    @property
    def minimum(self) -> int:
        return self.recent + 1

    @property
    def observes(self) -> int:
        return self.window

    @property
    def gates(self) -> bool:
        """Whether a threshold can turn away a token that would fit the budget."""
        return self._tables.gates and self.pad == "none"

    @property
    def reads_perplexity(self) -> int:
        return self.window if self.gates else 0

    def survey(self, prompt: Prompt) -> Tensor:
        """Attention of the utility window and of the whole window, averaged over heads, `[rows, 2, length]`.

        With the authors' variant: the pooled and weighted scores of all query heads, `[rows, heads, older]`.
        """
        if prompt.lossy:
            raise KvlabError(
                "compilerkv compares layers by position, but an earlier turn left different positions in each layer; "
                "store later turns whole (turns='leave')"
            )
        if self.variant == "published":
            return self._by_head(prompt)
        risk, utility = (prompt.window_sums(n).mean(1) for n in (self.window, self.utility_window))
        return torch.stack([utility, risk], 1)

    def plan(self, surveys: Tensor, prompt: Prompt) -> Tensor:
        """The surveys averaged over layers, `[n_layers, batch, 2, length]` (eq. 6 and 11); of the authors' code,
        budgets `[n_layers, batch]`.
        """
        if self.variant == "published":
            if self._weights_for(prompt) is None:
                warnings.warn(
                    "compilerkv runs with neutral tables: the authors' weights are for 32 layers of 32 query heads, "
                    f"not {prompt.n_layers} of {prompt.heads}; pass tables= for your own",
                    stacklevel=2,
                )
            return budgets_by_top_scores(surveys, self.entries(prompt.length), self.window, REACH)
        if self.tables is None and self._tables.neutral:
            warnings.warn(
                "compilerkv runs with neutral tables: equal weights and no threshold; pass tables= a model whose "
                "tables come with kvlab, or a file of `kvlab compile`",
                stacklevel=2,
            )
        return surveys.mean(0).expand_as(surveys)

    def scores(self, prompt: Prompt) -> Tensor:
        """Weighted utility of each layer's tokens before pooling, the same for all KV heads (eq. 10).

        With the authors' variant: the weighted mean of the heads' attention.
        """
        return self._weighted(prompt)[:, None].expand(-1, prompt.kv_heads, -1)

    def _weighted(self, prompt: Prompt) -> Tensor:
        """`[rows, length]`."""
        if self.variant == "published":
            return self._weighted_heads(prompt).mean(1)
        norms = self._norms(prompt)
        weights = self._head_weights(prompt)
        # The heads of a group share their utility, so the largest weight decides among them.
        best = norms if weights is None else norms * weights.view(*norms.shape[:2], -1).amax(-1, keepdim=True)
        # A prompt within the budget has no plan, and its scores decide nothing.
        attended = 1 if prompt.plan is None else prompt.plan[:, 0]
        return best.amax(1) * attended

    def _weighted_heads(self, prompt: Prompt) -> Tensor:
        """Attention of the window times each query head's weight, `[rows, heads, length]`."""
        attended, weights = prompt.window_sums(self.window), self._head_weights(prompt)
        return attended if weights is None else attended * weights[..., None]

    def _by_head(self, prompt: Prompt) -> Tensor:
        """Its pooled scores of the tokens older than the window, `[rows, heads, older]`."""
        older = self._weighted_heads(prompt)[..., : prompt.length - self.window]
        return F.avg_pool1d(older, self.kernel, stride=1, padding=self.kernel // 2)

    def _norms(self, prompt: Prompt) -> Tensor:
        """Return the factors of attention to each token in each KV head, `[rows, kv_heads, length]`."""
        if self.norms == "none":
            return torch.ones(prompt.keys.shape[:3], dtype=torch.float32, device=prompt.keys.device)
        return prompt.share(("relative value norms",), lambda: _relative_norms(prompt.values))

    def _head_weights(self, prompt: Prompt) -> Tensor | None:
        """Weights of the query heads, `[rows, heads]`."""
        table, heads = self._weights_for(prompt), prompt.heads
        if table is None:
            return None
        if (len(table), len(table[0])) != (prompt.n_layers, heads):
            raise KvlabError(
                f"the head table in {self.tables} is for {len(table)} layers of {len(table[0])} query heads, and this "
                f"model has {prompt.n_layers} of {heads}; {OTHER_MODEL}"
            )
        return torch.tensor([table[layer] for layer in prompt.layers], dtype=torch.float32, device=prompt.keys.device)

    def _weights_for(self, prompt: Prompt) -> list[list[float]] | None:
        """The head table: that of `tables`, else the authors' where their code is asked for and the shape is theirs."""
        if self._tables.heads is not None or self.variant == "paper":
            return self._tables.heads
        theirs = DecisionTables.load(PUBLISHED_TABLES).heads
        assert theirs is not None, "the published file has weights"
        return theirs if (len(theirs), len(theirs[0])) == (prompt.n_layers, prompt.heads) else None

    def risk(self, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Entropy of the mean attention in nats (eq. 12) and perplexity (eq. 13) of a planned prompt, `[rows]` each."""
        assert prompt.plan is not None, "attention is averaged over layers before any layer is judged"
        # On the CPU, since not every GPU has float64, which the thresholds are in.
        spread = prompt.plan[:, 1].cpu().double()
        entropy = attention.entropy(spread / spread.sum(-1, keepdim=True))
        return entropy, prompt.perplexity(self).cpu()

    def _thresholds(self, prompt: Prompt) -> Tensor:
        """The threshold of each row, `[rows]` (eq. 15)."""
        risk = self._tables.risk
        assert risk is not None, "only a risk table gates"
        if len(risk) != prompt.n_layers:
            raise KvlabError(
                f"the risk table in {self.tables} is for {len(risk)} layers, and this model has "
                f"{prompt.n_layers}; {OTHER_MODEL}"
            )
        rows = zip(prompt.layers, *self.risk(prompt), strict=True)
        return torch.stack([self._tables.thresholds(*row) for row in rows])

    def _pooled(self, prompt: Prompt) -> Tensor:
        """The scores that are compared, `[rows, length]`: infinite where a token always stays."""
        scores = self._weighted(prompt)[:, : prompt.length - self.recent]
        if self.kernel > 1:
            scores = F.avg_pool1d(scores, self.kernel, stride=1, padding=self.kernel // 2)
        return F.pad(scores, (0, prompt.length - scores.shape[-1]), value=torch.inf)

    def candidates(self, prompt: Prompt) -> Tensor:
        """How many tokens of a planned prompt reach the threshold, whatever the budget, `[rows]` (eq. 15)."""
        return self._candidates(self._pooled(prompt), prompt)

    def _candidates(self, scores: Tensor, prompt: Prompt) -> Tensor:
        if not self.gates:
            return torch.full((prompt.rows,), prompt.length, device=scores.device)
        older = scores[:, : prompt.length - self.recent]
        unit = older.mean(-1, keepdim=True) if self.scale == "mean" else older.amax(-1, keepdim=True)
        relative = (scores / unit).cpu()
        return (relative >= self._thresholds(prompt)[:, None]).sum(-1).to(scores.device)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        scores = self._pooled(prompt)
        if self.variant == "published":
            assert prompt.plan is not None, "its layers share a budget, which is planned first"
            return ranking.top_positions(scores, prompt.plan)[:, None].expand(-1, prompt.kv_heads, -1)
        kept = self._candidates(scores, prompt).clamp_max(budget) if self.gates else budget
        return ranking.top_positions(scores, kept)[:, None].expand(-1, prompt.kv_heads, -1)


def _relative_norms(values: Tensor) -> Tensor:
    """Norm of each value over its mean along the sequence (eq. 7), `[rows, kv_heads, length]`."""
    norms = torch.stack([row.float().norm(dim=-1) for row in values])
    return norms / norms.mean(-1, keepdim=True)
