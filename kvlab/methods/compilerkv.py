"""CompilerKV: token utility weighted by a table of heads, gated by a table of prompt risks."""

import os
import warnings
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import BeforeValidator, Field, PrivateAttr, model_validator
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.errors import KvlabError
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.lookup import DecisionTables
from kvlab.methods._base.policy import Budget, Kernel, Policy
from kvlab.methods._base.prompt import Prompt

OTHER_MODEL = "learn the tables on this model, or map these by depth (kvlab compile --from FILE --model MODEL)"


class CompilerKV(Policy):
    """Keeps the tokens of largest weighted utility that pass a threshold for the prompt's risk; prefill only.

    CompilerKV, section 4: A_i is the attention of the last `utility_window` queries to token i, averaged over layers
    and heads (eq. 6); times the relative norm of the value (eq. 7) it is the utility of each head (eq. 8). The score of
    a layer's token is the largest over its heads, each weighted by the head table (eq. 10). A token is a candidate if
    its score, relative to the layer's largest, reaches the threshold (eq. 15). The risk table gives it for the layer,
    the entropy of the mean attention over the last `window` queries (eq. 11-12) and the perplexity of their tokens (eq.
    13). All candidates are kept if they fit the budget, else the best of them (eq. 16). One set for each layer, shared
    by its heads; nothing is forced. Every generated token is kept besides. All layers are seen before any is
    compressed. Cost: SnapKV's, and the norms of all values.

    Choices where the paper is silent: the norm is the Euclidean one; a query head's value is that of its KV head. The
    authors' runs differ: scores are average-pooled (`kernel=7`) and sets are filled up to the budget (`pad="budget"`),
    which leaves the thresholds without effect. With SnapKV's kept window besides (`recent=32`) it differs from SnapKV
    in its utility alone. What a threshold's scores are relative to is lost from the text at hand: appendix B.1 says
    that they concentrate around one number, which those relative to the mean do (`scale="mean"`), and the published
    code divides by the largest.

    Parameters:
        budget: entries for each layer and KV head.
        window: last prompt tokens whose attention and perplexity tell the risk (64).
        utility_window: last prompt tokens whose attention makes the utility (32).
        kernel: width of the average pooling of scores, odd (1: none).
        recent: last prompt tokens that always stay, as SnapKV's window does; pooling leaves them out (0: none).
        norms: "relative" weighs attention with the relative norm of the value (eq. 7); "none" leaves it as it is.
        scale: what a threshold's scores are relative to: the "largest" or the "mean" of the layer's.
        pad: "none" keeps the candidates alone; "budget" fills up to the budget with the best of the others.
        tables: JSON file of both tables, as `kvlab compile` writes it, or the name of a model whose tables come with
            kvlab; without tables all heads weigh 1 and every token passes, and a warning says so.
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
    tables: Annotated[str, BeforeValidator(lambda x: os.fspath(x) if isinstance(x, os.PathLike) else x)] | None = None

    _tables: DecisionTables = PrivateAttr(DecisionTables(heads=None, risk=None))

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
        """Attention of the utility window and of the whole window, averaged over heads, `[rows, 2, length]`."""
        if prompt.lossy:
            raise KvlabError(
                "compilerkv averages attention over layers by position, but an earlier turn left different positions "
                "in each layer; store later turns whole (turns='leave')"
            )
        risk, utility = (prompt.window_sums(n).mean(1) for n in (self.window, self.utility_window))
        return torch.stack([utility, risk], 1)

    def plan(self, surveys: Tensor, prompt: Prompt) -> Tensor:
        """The surveys averaged over layers, `[n_layers, batch, 2, length]` (eq. 6 and 11)."""
        if self.tables is None and self._tables.neutral:
            warnings.warn(
                "compilerkv runs with neutral tables: all heads weigh the same and no token is turned away; pass "
                "tables= the name of a model whose tables come with kvlab, or a file of `kvlab compile`",
                stacklevel=2,
            )
        return surveys.mean(0).expand_as(surveys)

    def scores(self, prompt: Prompt) -> Tensor:
        """Weighted utility of each layer's tokens before pooling, the same for all KV heads (eq. 10)."""
        return self._weighted(prompt)[:, None].expand(-1, prompt.kv_heads, -1)

    def _weighted(self, prompt: Prompt) -> Tensor:
        """`[rows, length]`."""
        norms = self._norms(prompt)
        weights = self._head_weights(prompt)
        # The heads of a group share their utility, so the largest weight decides among them.
        best = norms if weights is None else norms * weights.view(*norms.shape[:2], -1).amax(-1, keepdim=True)
        # A prompt within the budget has no plan, and its scores decide nothing.
        attended = 1 if prompt.plan is None else prompt.plan[:, 0]
        return best.amax(1) * attended

    def _norms(self, prompt: Prompt) -> Tensor:
        """What attention to a token is weighed with in each KV head, `[rows, kv_heads, length]`."""
        if self.norms == "none":
            return torch.ones(prompt.keys.shape[:3], dtype=torch.float32, device=prompt.keys.device)
        return prompt.share(("relative value norms",), lambda: _relative_norms(prompt.values))

    def _head_weights(self, prompt: Prompt) -> Tensor | None:
        """Weights of the query heads, `[rows, heads]`."""
        table, heads = self._tables.heads, prompt.heads
        if table is None:
            return None
        if (len(table), len(table[0])) != (prompt.n_layers, heads):
            raise KvlabError(
                f"the head table in {self.tables} is for {len(table)} layers of {len(table[0])} query heads, and this "
                f"model has {prompt.n_layers} of {heads}; {OTHER_MODEL}"
            )
        return torch.tensor([table[layer] for layer in prompt.layers], dtype=torch.float32, device=prompt.keys.device)

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
        kept = self._candidates(scores, prompt).clamp_max(budget) if self.gates else budget
        return ranking.top_positions(scores, kept)[:, None].expand(-1, prompt.kv_heads, -1)


def _relative_norms(values: Tensor) -> Tensor:
    """Norm of each value over its mean along the sequence (eq. 7), `[rows, kv_heads, length]`."""
    norms = torch.stack([row.float().norm(dim=-1) for row in values])
    return norms / norms.mean(-1, keepdim=True)
