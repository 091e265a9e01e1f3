"""How far a compressed cache leads a model astray, where no judge is at hand: against the full model's own
continuation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.core.hookable import layers_of
from kvlab.core.storage import AS_IS, Storage, stored_as
from kvlab.errors import KvlabError, whole
from kvlab.inputs.models import lm_of
from kvlab.lib import progress_bars
from kvlab.lib.intervals import summarise
from kvlab.live.session import compress
from kvlab.methods import Policy, policy
from kvlab.methods._base import contract
from kvlab.methods._base.given_sets import GivenSets
from kvlab.replays.gaps import gaps_closed
from kvlab.replays.run import SeveralPolicies, at_budgets, replay
from kvlab.traces.recording import prompt_ids, several
from kvlab.traces.run import capture

if TYPE_CHECKING:
    import pandas as pd

    from kvlab.inputs.models import LM

MEASURES = ("nll", "nll_full", "kl", "agreement")


@torch.inference_mode()
def _run(
    lm: LM, ids: Tensor, steps: int, around: AbstractContextManager, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Feed a prompt `[length]` and then one token at a time.

    Returns:
        The logits `[steps, vocabulary]` that predict the response, and the response `[steps]`, greedy unless `forced`.
    """
    with around:
        out = lm.model(ids[None].to(lm.device), use_cache=True, logits_to_keep=1)
        logits, tokens = [out.logits[0, -1].float().cpu()], []
        for step in range(steps):
            tokens.append(logits[-1].argmax() if forced is None else forced[step])
            if step + 1 < steps:
                token, past = tokens[-1].view(1, 1).to(lm.device), out.past_key_values
                out = lm.model(token, past_key_values=past, logits_to_keep=1)
                logits.append(out.logits[0, -1].float().cpu())
    return torch.stack(logits), torch.stack(tokens)


def _divergence(full: Tensor, other: Tensor) -> Tensor:
    """KL(full || other) of each row of logits, in nats."""
    return F.kl_div(other.log_softmax(-1), full.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def _means(table: pd.DataFrame, *by: str) -> pd.Series:
    """The mean of the column `value` over what has the same names in the columns `by`."""
    return cast("pd.Series", table.groupby(list(by))["value"].mean())


@dataclass
class Fidelity:
    """The result of `fidelity` for one policy.

    Attributes:
        table: tidy: document, storage, step, measure, value. `nll` and `nll_full` are negative log-likelihoods of the
            full model's own continuation, under the compressed and the full cache. `kl` is the divergence of the
            next-token distributions; all are in nats. `agreement` is 1 where both would choose the same token.
    """

    policy: Policy
    table: pd.DataFrame
    storage: Storage = AS_IS

    @property
    def summary(self) -> dict[str, float]:
        """Mean of every measure, and `perplexity_ratio`, exp of the mean excess of `nll` over `nll_full`."""
        from kvlab.lib.summaries import Means

        means = {str(name): float(value) for name, value in _means(self.table, "measure").items()}
        excess = means["nll"] - means["nll_full"]
        return Means(means | {"perplexity_ratio": math.exp(excess)})

    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals of the means over documents, by measure."""
        return {name: summarise(values)[1] for name, values in self._by_document().items()}

    def _by_document(self) -> dict[str, list[float]]:
        """The means of each measure, document by document."""
        by_document = _means(self.table, "measure", "document")
        return {name: by_document.loc[name].to_list() for name in MEASURES}


class Fidelities(Sequence[Fidelity]):
    """The results of `fidelity` for several policies or budgets, on the same documents and continuations."""

    def __init__(self, results: Iterable[Fidelity]):
        self.results = list(results)

    def __len__(self) -> int:
        return len(self.results)

    @overload
    def __getitem__(self, key: int) -> Fidelity: ...
    @overload
    def __getitem__(self, key: slice) -> list[Fidelity]: ...
    def __getitem__(self, key: int | slice) -> Fidelity | list[Fidelity]:
        return self.results[key]

    @property
    def summary(self) -> pd.DataFrame:
        """One row for each policy and budget: policy, budget, and the numbers of `Fidelity.summary`.

        With `random` and an oracle of the same budget in the table, nll_gap_closed and kl_gap_closed are added: the
        closed share of the gap between them.
        """
        from kvlab.lib.summaries import Summary

        pairs = [(result.policy, result.summary) for result in self.results]
        table = Summary([{"policy": each.name, "budget": each.asked} | mean for each, mean in pairs])
        for loss in ("nll", "kl"):
            closed = gaps_closed([(each, each.asked, mean[loss]) for each, mean in pairs])
            if not all(map(math.isnan, closed)):
                table[f"{loss}_gap_closed"] = closed
        return table

    @property
    def table(self) -> pd.DataFrame:
        """The tidy tables of all: policy, budget, and the columns of `Fidelity.table`."""
        import pandas as pd

        parts = [each.table.assign(policy=each.policy.name, budget=each.policy.asked) for each in self.results]
        table = pd.concat(parts, ignore_index=True)
        return table.filter(["policy", "budget", *self.results[0].table])

    @property
    def intervals(self) -> pd.DataFrame:
        """Tidy, over the documents: policy, budget, storage, measure, documents, value, low, high.

        `value` is the mean over the documents, `low` and `high` its 95 % interval.
        """
        import pandas as pd

        rows = []
        for each in self.results:
            marks = {"policy": each.policy.name, "budget": each.policy.asked, "storage": str(each.storage)}
            for measure, values in each._by_document().items():
                value, (low, high) = summarise(values)
                rows.append(
                    marks | {"measure": measure, "documents": len(values), "value": value, "low": low, "high": high}
                )
        return pd.DataFrame(rows)


@overload
def fidelity(
    lm: LM,
    policy_or_name: Policy | str,
    documents: Sequence[Any] | Any,
    new_tokens: int = 64,
    chat: str | bool = "auto",
    storage: str | Storage = "as_is",
    *,
    response: Sequence[int] | Tensor | None = None,
    budgets: None = None,
) -> Fidelity: ...
@overload
def fidelity(
    lm: LM,
    policy_or_name: SeveralPolicies,
    documents: Sequence[Any] | Any,
    new_tokens: int = 64,
    chat: str | bool = "auto",
    storage: str | Storage = "as_is",
    *,
    response: Sequence[int] | Tensor | None = None,
    budgets: None = None,
) -> Fidelities: ...
@overload
def fidelity(
    lm: LM,
    policy_or_name: Policy | str | SeveralPolicies,
    documents: Sequence[Any] | Any,
    new_tokens: int = 64,
    chat: str | bool = "auto",
    storage: str | Storage = "as_is",
    *,
    response: Sequence[int] | Tensor | None = None,
    budgets: Sequence[int | float],
) -> Fidelities: ...
def fidelity(
    lm: LM,
    policy_or_name: Policy | str | SeveralPolicies,
    documents: Sequence[Any] | Any,
    new_tokens: int = 64,
    chat: str | bool = "auto",
    storage: str | Storage = "as_is",
    *,
    response: Sequence[int] | Tensor | None = None,
    budgets: Sequence[int | float] | None = None,
) -> Fidelity | Fidelities:
    """Teacher-force the full model's greedy continuation through a compressed cache.

    The first token is predicted by the prefill, before anything is compressed; steps are counted from it.

    Args:
        lm: from `kvlab.load` or `kvlab.random_lm`, or a transformers model (which has no tokenizer: ids only).
        policy_or_name: a policy, or the name of one that needs no parameters, or a list of these. `oracle_attention`
            keeps the gold set of the continuation.
        documents: texts, documents (`kvlab.document`) or token ids, one or a list of them.
        new_tokens: length of the continuation, 2 or more.
        chat: as `kvlab.capture` takes it.
        storage: as `kvlab.compress` takes it.
        response: ids that are fed instead of the full model's own continuation, of one document; `new_tokens` is then
            their number. Compare two models, or two types of one, on the same response: some texts are easier to
            predict than others.
        budgets: every policy that has a budget is run at each of them.

    Returns:
        One `Fidelity` for one policy without budgets, else `Fidelities`; the full model runs once for all of them.

    Raises:
        KvlabError: as `kvlab.capture` and `kvlab.compress`; a response of fewer than two tokens, or for several
            documents.
    """
    import pandas as pd

    lm, form, tested = lm_of(lm), stored_as(storage), at_budgets(policy_or_name, budgets)
    if not tested:
        raise KvlabError("fidelity needs at least one policy, such as kvlab.policy('snapkv', budget=128)")
    for each in tested:
        if each.needs.response and (each.needs.acts_while_decoding or each.needs.rewrites):
            contract.check_runs_live(each)
    given = None if response is None else torch.as_tensor(response).cpu()
    if given is not None:
        if several(documents):
            raise KvlabError("a response goes on from one document; ask for each document with its own")
        new_tokens = given.numel()
    if whole("new_tokens", new_tokens) < 2:
        raise KvlabError(f"new_tokens={new_tokens}: the first token comes before any compression, so two are needed")
    many = [prompt_ids(lm, each, chat) for each in (documents if several(documents) else [documents])]
    total = sum((1 + len(tested)) * progress_bars.work(len(ids), *[1] * (new_tokens - 1)) for ids, _ in many)
    frames: list[list[pd.DataFrame]] = [[] for _ in tested]
    with progress_bars.layers(layers_of(lm.model), total, "fidelity"):
        for ids, name in many:
            full, followed = _run(lm, ids, new_tokens, nullcontext(), forced=given)
            options: dict[str, Any] = dict(tokenizer=lm.tokenizer, max_new_tokens=new_tokens, storage=form)
            for each, found in zip(_running(lm, tested, ids, followed), frames, strict=True):
                session = compress(lm.model, each, **options)
                compressed, _ = _run(lm, ids, new_tokens, session, forced=followed)
                values = {
                    "nll": F.cross_entropy(compressed, followed, reduction="none"),
                    "nll_full": F.cross_entropy(full, followed, reduction="none"),
                    "kl": _divergence(full, compressed),
                    "agreement": (compressed.argmax(-1) == full.argmax(-1)).float(),
                }
                where = {"document": name, "storage": str(form), "step": range(1, new_tokens + 1)}
                found += [pd.DataFrame({**where, "measure": m, "value": v.tolist()}) for m, v in values.items()]
    results = [
        Fidelity(each, pd.concat(found, ignore_index=True), form) for each, found in zip(tested, frames, strict=True)
    ]
    return results[0] if budgets is None and isinstance(policy_or_name, Policy | str) else Fidelities(results)


def _running(lm: LM, tested: Sequence[Policy], ids: Tensor, followed: Tensor) -> list[Policy]:
    """The policies as they run live: one that sees the response as the sets that it keeps in a replay of it."""
    oracles = [each for each in tested if each.needs.response]
    if not oracles:
        return list(tested)
    trace = capture(lm, ids, response=followed[:-1], pseudo=(), policies=oracles, progress=False)
    return [
        GivenSets(budget=each.entries(len(ids)), sets=replay(trace, each).kept_sets, source=each.name, oracle=True)
        if each.needs.response
        else each
        for each in tested
    ]


@dataclass
class Loops:
    """Open loop (a replay on the full cache's trace) against closed loop (the policy inside the model's own
    generation).

    Attributes:
        first_difference: the first step at which another token was generated; None if there is none.
        table: one row for each step: storage, token_full, token_closed, kl, mass_lost_open, mass_lost_closed. kl is of
            the closed loop's logits from the full cache's; masses are means over layers and heads. The token of step t
            is fed at step t, and its query is the t-th decoding query.
    """

    policy: Policy
    first_difference: int | None
    table: pd.DataFrame
    storage: Storage = AS_IS


def closed_against_open(
    lm: LM,
    policy_or_name: Policy | str,
    document: Any,
    new_tokens: int = 64,
    chat: str | bool = "auto",
    storage: str | Storage = "as_is",
) -> Loops:
    """Run a policy both ways on the same prompt, and see where the two part.

    Once another token was generated, the two loops look at different texts; what comes later tells how far they drift.

    Args:
        lm: from `kvlab.load` or `kvlab.random_lm`, or a transformers model (which has no tokenizer: ids only).
        policy_or_name: a policy, or the name of one that needs no parameters.
        document: a text, a `Document` or token ids.
        new_tokens: length of both responses.
        chat: as `kvlab.capture` takes it.
        storage: as `kvlab.compress` takes it.

    Raises:
        KvlabError: as `kvlab.capture` and `kvlab.compress`.
    """
    import pandas as pd

    lm, tested, form = lm_of(lm), policy(policy_or_name), stored_as(storage)
    new_tokens = whole("new_tokens", new_tokens)
    ids, _ = prompt_ids(lm, document, chat)
    with progress_bars.layers(layers_of(lm.model), 3 * progress_bars.work(len(ids), *[1] * new_tokens), "both loops"):
        trace = capture(lm, ids, new_tokens, pseudo=(), policies=[tested], progress=False)
        opened = replay(trace, tested, storage=form)
        full, response = _run(lm, ids, new_tokens + 1, nullcontext())
        options: dict[str, Any] = dict(tokenizer=lm.tokenizer, max_new_tokens=new_tokens, storage=form)
        session = compress(lm.model, tested, probes=["mass_lost"], **options)
        closed, generated = _run(lm, ids, new_tokens + 1, session)
    response, generated = response[:new_tokens], generated[:new_tokens]
    different = (response != generated).nonzero().flatten()
    lost = _means(session.table, "step")
    table = pd.DataFrame(
        {
            "step": range(1, new_tokens + 1),
            "storage": str(form),
            "token_full": response.tolist(),
            "token_closed": generated.tolist(),
            "kl": _divergence(full, closed)[:new_tokens].tolist(),
            "mass_lost_open": opened.mass_lost.mean((0, 1)).tolist(),
            "mass_lost_closed": lost.reindex(range(1, new_tokens + 1)).tolist(),
        }
    )
    return Loops(tested, int(different[0]) + 1 if len(different) else None, table, form)
