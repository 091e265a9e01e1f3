"""Evict or quantise, or both? Policies and storages of what they keep, compared at equal stored bytes.

There are three losses, each zero for the full cache as it is. The first is the error of the attention output (open
loop). The second is the divergence of the next token's distribution along the full model's own response. The third
counts the digits of a needle that are no longer the likeliest. Bytes are those of a server in bfloat16 (`served`), as a
share of the full cache's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, cast

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from kvlab import evaluation
from kvlab.analyses.findings import Findings
from kvlab.analyses.tasks import scores
from kvlab.analyses.tasks.contenders import contenders
from kvlab.analyses.tasks.examples import Item
from kvlab.analyses.together import equal_bytes
from kvlab.analyses.together.served import forms
from kvlab.core import hookable
from kvlab.core.storage import AS_IS, Storage
from kvlab.errors import KvlabError
from kvlab.lib import progress_bars
from kvlab.lib.batches import batches
from kvlab.live.decode_batch import TOGETHER
from kvlab.live.session import compress
from kvlab.live.shared_findings import Memory, Repeated, scores_of
from kvlab.live.shared_prefill import shared_prefill
from kvlab.methods import Policy
from kvlab.methods.full import Full
from kvlab.replays.run import replay
from kvlab.traces.recording import encoder
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

PLAIN = AS_IS.name
MEASURES = {
    "output_error": "relative error of the attention output",
    "kl": "KL of the next token, nats",
    "needles_lost": "digits of needles lost",
}
CURVE = ["policy", "storage"]

WHOLE = "full/{storage}/{measure}"
SIZE = "full/{storage}/share"
EVICT = "evict_or_quantise/{storage}/{policy}/{measure}"
"""A policy as it is at the bytes of the full cache in `storage`, minus that cache: above zero, quantising wins."""
BOTH = "both_or_quantise/{storage}/{policy}/{other}/{measure}"
"""A policy stored as `other` at the bytes of the full cache in `storage`, minus that cache: below zero, both are."""
BOTH_OR_EVICT = "both_or_evict/{share:g}/{policy}/{other}/{measure}"
"""A policy as it is minus the same stored as `other`, both at a share of the full cache: above zero, both win."""
STORED = "stored/{share:g}/{policy}/{storage}/{other}/{measure}"
"""A policy stored in `storage` minus the same stored as `other`, both at a share of the full cache: above zero, `other`
loses less."""


@dataclass(frozen=True)
class System:
    """A policy, and in what form what it keeps is stored.

    Attributes:
        form: the name of the storage that was asked for.
    """

    policy: Policy
    form: str
    storage: Storage

    @property
    def marks(self) -> dict[str, Any]:
        return {"policy": self.policy.name, "budget": getattr(self.policy, "budget", None), "storage": self.form}


def systems(
    lm: LM,
    names: Sequence[str],
    budgets: Sequence[int | float],
    storages: Sequence[str],
    whole: Sequence[str],
    heads: str | None = None,
    tables: str | None = None,
) -> list[System]:
    """The full cache as it is, first; then in each storage of `whole`; then the policies in each of `storages`.

    Raises:
        KvlabError: an unknown policy or storage, or a budget that a policy cannot have.
    """
    head_dim = hookable.head_dim_of(lm.model, hookable.layers_of(lm.model)[0])
    known = forms(list(dict.fromkeys([PLAIN, *whole, *storages])), head_dim)
    full = [(Full(), form) for form in dict.fromkeys([PLAIN, *whole])]
    evicting = [policy for policy in contenders(budgets, heads, tables, names, pad="budget") if policy.name != "full"]
    every = full + [(policy, form) for policy in evicting for form in dict.fromkeys(storages)]
    return [System(policy, form, known[form]) for policy, form in every]


# ---------------------------------------------------------------------------------------------------- measuring


def measure(lm: LM, traces: Sequence[Trace], found: Sequence[System], items: Sequence[Item]) -> pd.DataFrame:
    """Measure the three losses of every system on every document.

    Args:
        found: from `systems`.
        items: a needle in each document.

    Returns:
        One row for each, with columns document, policy, budget, storage, measure, value, stored_bytes, full_bytes.
        budget is missing for the full cache. stored_bytes are of entries and the policy's auxiliary data. full_bytes
        are those that the full cache stores there.
    """
    rows: list[dict[str, Any]] = []
    total = (2 * len(traces) + len(items)) * len(found)
    with progress_bars.counting(total, "storages", "system") as bar, warnings.catch_warnings():
        # compilerkv and duoattention say at every replay that they run without tables or head scores.
        warnings.simplefilter("ignore", UserWarning)
        for trace in traces:
            for document, of_one in (
                (trace.document, _errors(trace, found)),
                (trace.document, _divergences(lm, trace, found)),
            ):
                rows += _counted(document, of_one, bar)
        for item in items:
            rows += _counted(item.document, _digits(lm, item, found), bar)
    return pd.DataFrame(rows)


Measured = Iterator[tuple[System, str, float, float]]
"""A system, a measure, its value, and the bytes stored."""


def _counted(document: str, measured: Measured, bar: Any) -> list[dict[str, Any]]:
    rows = []
    for system, name, value, size in measured:
        rows.append({"document": document, **system.marks, "measure": name, "value": value, "stored_bytes": size})
        bar.update()
    (full,) = (row["stored_bytes"] for row in rows if row["policy"] == "full" and row["storage"] == PLAIN)
    return [row | {"full_bytes": full} for row in rows]


def _errors(trace: Trace, found: Iterable[System]) -> Measured:
    for system in found:
        means = replay(trace, system.policy, storage=system.storage).summary
        yield system, "output_error", means["output_error"], means["stored_bytes"]


def _divergences(lm: LM, trace: Trace, found: Sequence[System]) -> Measured:
    if trace.ids is None:
        raise KvlabError("this trace holds no token ids, so nothing can be fed along its response")
    prompt, response = trace.ids[None, : trace.prompt_length], trace.ids[trace.prompt_length :]
    full = None
    for system, logits, size in logits_of_systems(lm, prompt, response, found, repeated(lm, trace, prompt, found)):
        chances = logits[scores.SCORED_FROM - 1 :].log_softmax(-1)
        full = chances if full is None else full
        yield system, "kl", float(F.kl_div(chances, full, reduction="batchmean", log_target=True)), size


def repeated(lm: LM, trace: Trace, prompt: Tensor, found: Iterable[System]) -> Repeated:
    """Return a trace's scores of passes that repeat its prompt `[1, length]`, as its prefill would have them."""
    encode = encoder(lm) if lm.tokenizer else None
    known: Repeated = {}
    for repetition in {repetition for system in found for repetition in system.policy.needs.repetitions}:
        if repetition.key in trace.repeated:
            scores = trace.repeated[repetition.key].to(lm.device)
            known[scores_of(repetition, prompt, [repetition.parts(prompt[0].cpu(), encode)])] = list(scores[:, None])
    return known


def _digits(lm: LM, item: Item, found: Sequence[System]) -> Measured:
    prompt = evaluation.feed(lm, item.example, "prompt").ids
    tokenizer = lm.require_tokenizer("answers cannot be scored")
    answer = torch.tensor(tokenizer(item.answer, add_special_tokens=False)["input_ids"])
    scored = slice(scores.SCORED_FROM, None)
    for system, logits, size in logits_of_systems(lm, prompt, answer, found):
        missed = logits.argmax(-1).cpu()[scores.SCORED_FROM - 1 :] != answer[scored]
        yield system, "needles_lost", float(missed.float().mean()), size


@torch.inference_mode()
def logits_of_systems(
    lm: LM,
    prompt: Tensor,
    continuation: Tensor,
    found: Sequence[System],
    repeated: Repeated | None = None,
) -> Iterator[tuple[System, Tensor, float]]:
    """Feed a continuation under every system, all from one prefill.

    Args:
        prompt: ids `[1, length]`.
        continuation: ids `[n]`. The first token is predicted before anything is compressed. The second is predicted
            while a policy that prunes at its first step still reads the whole prompt (see `scores`).
        repeated: scores of passes that repeat the prompt, as far as they are known.

    Yields:
        Each system, float32 logits `[n - 1, vocabulary]` of the tokens from the second on, and bytes stored at the end.
        Systems that change nothing while they decode come first.

    Raises:
        KvlabError: a continuation without a scored token.
    """
    if len(continuation) <= scores.SCORED_FROM:
        raise KvlabError(
            f"a continuation of {len(continuation)} tokens cannot be scored: {scores.SCORED_FROM + 1} are needed"
        )
    with shared_prefill(lm.model, [system.policy for system in found]):
        prefilled = lm.model(prompt.to(lm.device), use_cache=True, logits_to_keep=1).past_key_values
    prefilled.memory = Memory()
    prefilled.repeated |= repeated or {}
    options: dict[str, Any] = {"turns": "leave", "tokenizer": lm.tokenizer, "max_new_tokens": len(continuation)}
    for batch, at_once in _batches(found):
        sessions = []
        for system in batch:
            with compress(lm.model, system.policy, storage=system.storage, **options) as session:
                session.branch(prefilled)
                session.end_prompt()
            sessions.append(session)
        logits = scores.forced(lm, sessions, continuation, at_once)
        for system, session, own in zip(batch, sessions, logits, strict=True):
            yield system, own, session.kv_bytes + session.aux_bytes


def _batches(found: Sequence[System]) -> Iterator[tuple[list[System], bool]]:
    """Batches of systems, each with whether nothing that they have stored changes while they decode."""
    for static in (True, False):
        alike = [
            system
            for system in found
            if static == (system.form == PLAIN and not system.policy.needs.acts_while_decoding)
        ]
        yield from ((batch, static) for batch in batches(alike, TOGETHER))


# ---------------------------------------------------------------------------------------------------- at equal bytes


def read_off(measured: pd.DataFrame, policy: str, storage: str, name: str, at: pd.Series) -> pd.Series | None:
    """A system's loss at given bytes, document by document: its curve over its budgets, read off between two of them.

    Args:
        measured: from `measure`.
        name: the measure.
        at: bytes, by document.

    Returns:
        Values by document; None where one of them lies beyond what was measured there.
    """
    curve = measured.query("policy == @policy and storage == @storage and measure == @name")
    values: dict[str, float | None] = {}
    for document, part in curve.sort_values("budget").groupby("document", sort=False):
        sizes, size = part["stored_bytes"].tolist(), float(at.to_dict()[document])
        values[str(document)] = equal_bytes.interpolate(sizes, part["value"].tolist(), size).value
    found = pd.Series(values, dtype=float)
    return None if found.isna().any() or not len(found) else found


def findings(measured: pd.DataFrame, shares: Sequence[float]) -> Findings:
    """The full cache in each storage, and who loses less at equal bytes, as paired differences over documents.

    Args:
        measured: from `measure`.
        shares: of the full cache's bytes, at which policies as they are meet the same in another storage.

    Returns:
        Rows of WHOLE, SIZE, EVICT, BOTH, BOTH_OR_EVICT and STORED that exist, with intervals over documents.
    """
    found = Findings(measured)
    full = measured.query("policy == 'full'")
    policies = [str(name) for name in measured["policy"].unique() if name != "full"]
    forms = [str(name) for name in measured["storage"].unique()]
    for name in MEASURES:
        wholes = full.query("measure == @name").set_index("document")
        for storage, part in wholes.groupby("storage", sort=False):
            losses, size = _column(part, "value"), _column(part, "stored_bytes")
            found.add(WHOLE, losses, storage=storage, measure=name)
            found.add(SIZE, size / _column(part, "full_bytes"), storage=storage)
            if storage == PLAIN:
                continue
            for policy in policies:
                for other in forms:
                    own = read_off(measured, policy, other, name, size)
                    if own is None:
                        continue
                    keys = {"storage": storage, "policy": policy, "measure": name}
                    if other == PLAIN:
                        found.add_difference(EVICT, own, losses, **keys)
                    else:
                        found.add_difference(BOTH, own, losses, other=other, **keys)
        everything = _column(wholes.query("storage == @PLAIN"), "full_bytes")
        for share in shares:
            for policy in policies:
                evicted = read_off(measured, policy, PLAIN, name, share * everything)
                for other in forms:
                    both = read_off(measured, policy, other, name, share * everything)
                    if other != PLAIN and evicted is not None and both is not None:
                        found.add_difference(
                            BOTH_OR_EVICT, evicted, both, share=share, policy=policy, other=other, measure=name
                        )
                for storage, other in combinations([form for form in forms if form != PLAIN], 2):
                    pair = [read_off(measured, policy, form, name, share * everything) for form in (storage, other)]
                    if pair[0] is not None and pair[1] is not None:
                        keys = {"share": share, "policy": policy, "storage": storage, "other": other, "measure": name}
                        found.add_difference(STORED, pair[0], pair[1], **keys)
    return found


def _column(table: pd.DataFrame, name: str) -> pd.Series:
    return cast("pd.Series", table[name])


def points(measured: pd.DataFrame, name: str, slack: float = 0.02) -> pd.DataFrame:
    """The points of a measure's figure: policy, storage, budget, share, value (means over documents), front.

    The front is that of all systems but the full cache as it is, in which every curve ends (see `equal_bytes.front`).
    """
    part = measured.query("measure == @name").copy()
    part["share"] = part["stored_bytes"] / part["full_bytes"]
    keys = [*CURVE, "budget"]
    means = part.groupby(keys, sort=False, dropna=False).agg({"share": "mean", "value": "mean"}).reset_index()
    reference = (means["policy"] == "full") & (means["storage"] == PLAIN)
    means["front"] = False
    others = means.loc[~reference]
    means.loc[~reference, "front"] = equal_bytes.front(others["share"].tolist(), others["value"].tolist(), slack)
    return means


# ---------------------------------------------------------------------------------------------------- in words


def in_words(measured: pd.DataFrame) -> str:
    """The extent of what `measure` measured, as text."""
    whole = measured.query("policy == 'full' and storage == @PLAIN and measure == 'kl'")["full_bytes"].to_numpy().mean()
    count = measured.drop_duplicates([*CURVE, "budget"]).shape[0]
    documents = measured.query("measure == 'kl'")["document"].nunique()
    return f"{count} systems, {documents} documents; the full cache in bfloat16: {equal_bytes.mebibytes(whole, '.1f')}"
