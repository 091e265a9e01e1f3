"""MorphKV, section 6.3, figures 7, 10 and 11 and table 1: small budgets, and what a long response does to each method.

The paper's scores are those of 8B models on LongBench and of a 123B judge on LongWriter. Here other measures replace
them: attention mass lost, recall of each step's needs, and error of the attention output. A fourth is how far
predictions of the true continuation drift from those of the full cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.analyses.findings import Findings, estimates
from kvlab.analyses.morphkv.windows import MEASURES, along_steps, slope
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.lib import progress_bars
from kvlab.live import session as live_session
from kvlab.live.shared_prefill import shared_prefill
from kvlab.methods import Policy, policy
from kvlab.replays.replay import Replay
from kvlab.replays.run import replay
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.live.cache import LiveCache
    from kvlab.live.session import Session

    _Step = tuple[Tensor, list[float]]
    _Seen = Callable[[int, Mapping[str, Session]], None]
    _Look = Callable[[range, int, Mapping[str, Session]], None]

PER = 100
"""Slopes are given for this many tokens of the response."""

LEAST = 5
"""StreamingLLM's four sinks and one recent token: no method gets a smaller budget."""

TOGETHER = 8  # documents in one batch: the full cache's distributions of all steps are also in memory
TURN = 128  # tokens that are fed at once where no policy acts at single steps
MEASURED = ("kl", "nll_gap", "kv_bytes")
COUNTED_FROM = 2
"""The first decoding step that counts, for all methods: at the very first step MorphKV reads the whole prompt."""

# At small budgets.
AT_SHARE = "{measure}/{policy}/{share:.2f}"
BEHIND_AT_SHARE = "behind/{measure}/{policy}/{share:.2f}"
RECALL_DROP = "drop/step_recall/{policy}/{share:.2f}"
SHARPER = "sharper/{measure}/{policy}"
CHOICES = "choices/{policy}/{share:.2f}"
# Along a response.
SLOPE = "slope/{measure}/{policy}"
MEAN = "mean/{measure}/{policy}"
STEEPER = "steeper/{measure}/{policy}"
BEHIND = "behind/{measure}/{policy}"
TIMES = "times/{measure}/{policy}"
EARLY = "early/{policy}"
DIVERGES_EARLIER = "earlier/{policy}"


# ---------------------------------------------------------------------------------------------- budgets of 1 to 7 %


def at_budget(trace: Trace, share: float, window: int) -> dict[str, Policy]:
    """Make the methods that figures 10 and 11 compare, and two more, at a budget that is a share of the prompt.

    `snapkv` is the paper's: every query head stores its own entries, and so gets only its part of the group's budget.
    It also gets a smaller window, if a large group leaves it less than `window`. `snapkv_shared` stores one set for
    each KV head, with as many entries as MorphKV. `snapkv_choosing` is the paper's with a smaller window, whose share
    of its entries is at most that of MorphKV's window. At the smallest budgets the paper's own window leaves one entry
    to choose. The SnapKVs keep the response on top of these entries. MorphKV stores these entries and no others.
    """
    entries = max(round(share * trace.prompt_length), window + 1, LEAST)
    of_head = max(entries * trace.kv_heads // trace.heads, 2)
    return {
        "morphkv": policy("morphkv", budget=entries, window=window),
        "snapkv": policy("snapkv", budget=of_head, window=min(window, of_head - 1), sets="head"),
        "snapkv_choosing": policy("snapkv", budget=of_head, window=max(1, window * of_head // entries), sets="head"),
        "snapkv_shared": policy("snapkv", budget=entries, window=window),
        "h2o": policy("h2o", budget=entries),
        "streamingllm": policy("streamingllm", budget=entries),
    }


def small_budgets(traces: Iterable[Trace], shares: Sequence[float] = (0.01, 0.03, 0.07), window: int = 5) -> Findings:
    """Measure figures 10 and 11 by attention: budgets that are small shares of a long prompt, along its response.

    Args:
        traces: one for each document, used one after another.
        shares: budgets in keys and values, as shares of the prompt's full cache.
        window: R of MorphKV and SnapKV's observation window.

    Returns:
        Table with columns document, share, policy, step, measure, value (mean over layers and heads). Metrics over the
        steps from COUNTED_FROM on, with intervals over documents:
        - `mass_lost/morphkv/0.01` and so on.
        - `behind/mass_lost/snapkv/0.01`: that policy's value less MorphKV's, paired.
        - `drop/step_recall/snapkv/0.01`: the share of MorphKV's recall that the policy misses.
        - `sharper/mass_lost/snapkv`: its additional loss from the largest share to the smallest, less MorphKV's.
        `choices/snapkv/0.01` is the number of entries that a method's window leaves it to choose. It is of MorphKV and
        the three SnapKVs, in the last document.
    """
    frames, choices = [], {}
    for trace in progress_bars.each(traces, "small budgets", "doc"):
        for share in shares:
            methods = at_budget(trace, share, window)
            # The paper's SnapKV keeps fewer entries for each head: its recall is of the same top.
            k = methods["morphkv"].entries(trace.prompt_length)
            for name, method in methods.items():
                window_of = dict(method).get("window")
                if isinstance(window_of, int):
                    choices[name, share] = method.entries(trace.prompt_length) - window_of
                setting = {"document": trace.document, "share": share, "policy": name}
                frames += [frame.assign(**setting) for frame in along_steps(replay(trace, method, k=k))]
    findings = Findings(pd.concat(frames, ignore_index=True))
    means = _counted(findings.table).groupby(["measure", "policy", "share", "document"]).value.mean()
    names = list(findings.table["policy"].unique())
    for measure in MEASURES:
        for share in shares:
            ours = means[measure, "morphkv", share]
            for name in names:
                rival = means[measure, name, share]
                findings.add(AT_SHARE, rival, measure=measure, policy=name, share=share)
                if name != "morphkv":
                    findings.add_difference(BEHIND_AT_SHARE, rival, ours, measure=measure, policy=name, share=share)
                    if measure == "step_recall":
                        findings.add(RECALL_DROP, 1 - rival / ours, policy=name, share=share)
        worse = {name: means[measure, name, min(shares)] - means[measure, name, max(shares)] for name in names}
        for name in names[1:]:
            findings.add_difference(SHARPER, worse[name], worse["morphkv"], measure=measure, policy=name)
    for (name, share), free in choices.items():
        findings.set(CHOICES, free, policy=name, share=share)
    return findings


def _counted(table: pd.DataFrame) -> pd.DataFrame:
    return table.loc[table["step"] >= COUNTED_FROM]


# ---------------------------------------------------------------------------------------------- along long responses


def writing(budget: int, window: int) -> dict[str, Policy]:
    """The methods of figures 2a, 6 and 7 at one capacity: SnapKV with a set for each query head, as the paper runs it.

    H2O shares one set over each GQA group here; the paper's stores one for each query head.
    """
    return {
        "full": policy("full"),
        "snapkv": policy("snapkv", budget=budget, window=window, sets="head"),
        "h2o": policy("h2o", budget=budget),
        "morphkv": policy("morphkv", budget=budget, window=window),
    }


def rivals(budget: int, prompt_tokens: int) -> dict[str, Policy]:
    """The other methods of figure 3 that hold a cache of constant size, at one capacity, and a reference of ours.

    Each follows its own paper; figure 3 draws Scissorhands as a window of recent tokens alone. `random_response` keeps
    the prompt, and evicts the response at random; it is left out where the capacity has no room for the prompt.
    """
    named = {name: policy(name, budget=budget) for name in ("keyformer", "scissorhands", "streamingllm")}
    if prompt_tokens >= budget:
        return named
    return named | {"random_response": policy("random", budget=budget, region="response")}


def early_share(result: Replay) -> float:
    """Return the share of the entries stored at the end that are in the text's first quarter; mean over KV heads."""
    trace = result.trace
    stored = torch.stack([result.stored(layer, trace.steps) for layer in trace.layers])
    early = ((stored >= 0) & (stored < trace.length // 4)).sum(-1)
    return float((early / (stored >= 0).sum(-1)).mean())


def along_a_response(traces: Iterable[Trace], budget: int, window: int) -> Findings:
    """Measure figures 2a, 6 and 7 by replays: each method's stored bytes and losses at every step of a long response.

    Args:
        traces: with the attention accumulated over their prompts (for H2O).

    Returns:
        Table with columns document, policy, prompt, step, measure, value. mass_lost, output_error and step_recall are
        means over layers and heads. stored_bytes are of all layers, auxiliary data included. The metrics are those of
        `fading`, and:
        - `times/mass_lost/h2o`: that policy's slope over MorphKV's.
        - `early/h2o`: `early_share`.
        - `earlier/h2o`: that policy's less MorphKV's.
    """
    frames, early = [], []
    for trace in progress_bars.each(traces, "long responses", "doc"):
        for name, method in (writing(budget, window) | rivals(budget, trace.prompt_length)).items():
            result = replay(trace, method)
            early.append({"document": trace.document, "policy": name, "share": early_share(result)})
            stored = {"step": range(1, trace.steps + 1), "measure": "stored_bytes"}
            parts = [*along_steps(result), pd.DataFrame(stored | {"value": result.stored_bytes.tolist()})]
            setting = {"document": trace.document, "policy": name, "prompt": trace.prompt_length}
            frames += [part.assign(**setting) for part in parts]
    findings = fading(pd.concat(frames, ignore_index=True), ("mass_lost", "output_error"))
    for measure in ("mass_lost", "output_error"):
        slopes = _slopes(findings.table, measure)
        for name in ("snapkv", "h2o"):
            findings.add(TIMES, slopes[name] / slopes["morphkv"], measure=measure, policy=name)
    by_policy = pd.DataFrame(early).groupby("policy")
    shares: dict[Any, Any] = {name: part.set_index("document")["share"] for name, part in by_policy}
    for name in shares:
        findings.add(EARLY, shares[name], policy=name)
        if name != "morphkv":
            findings.add_difference(DIVERGES_EARLIER, shares[name], shares["morphkv"], policy=name)
    return findings


def fading(table: pd.DataFrame, measures: Sequence[str]) -> Findings:
    """Measure how measures change along a response, as in figure 7.

    Args:
        table: tidy, with columns document, policy, step, measure, value.

    Returns:
        The table. Metrics, with intervals over documents:
        - `slope/mass_lost/morphkv`: least squares, the change for each 100 tokens of the response.
        - `steeper/mass_lost/h2o`: that policy's slope less MorphKV's, paired.
        - `mean/mass_lost/morphkv`, and `behind/mass_lost/h2o`: that policy's mean less MorphKV's, paired.
    """
    findings = Findings(table)
    for measure in measures:
        slopes = _slopes(table, measure)
        means = table.loc[table["measure"] == measure].groupby(["policy", "document"])["value"].mean()
        for name in table["policy"].unique():
            at = {"measure": measure, "policy": name}
            findings.add(SLOPE, slopes[name], **at)
            findings.add(MEAN, means[name], **at)
            if name != "morphkv":
                findings.add_difference(
                    STEEPER, cast(pd.Series, slopes[name]), cast(pd.Series, slopes["morphkv"]), **at
                )
                findings.add_difference(BEHIND, means[name], means["morphkv"], **at)
    return findings


def _slopes(table: pd.DataFrame, measure: str) -> pd.Series:
    """Change for each 100 tokens, by policy and document."""
    rows = table.loc[table["measure"] == measure].groupby(["policy", "document"])
    return rows.apply(lambda part: PER * slope(part, "value"), include_groups=False)


def binned(table: pd.DataFrame, measure: str, over: int = 16) -> pd.DataFrame:
    """One measure by policy, averaged over `over` neighbouring steps and over documents, with intervals over documents.

    Returns:
        Columns policy, step (the middle of the bin), value, low, high.
    """
    chosen = table.loc[table["measure"] == measure]
    bins = ((chosen["step"] - 1) // over * over + over / 2).rename("step")
    means = chosen.groupby(["policy", bins, "document"], sort=False)["value"].mean()
    return estimates(means.groupby(level=["policy", "step"], sort=False), ["policy", "step"])


# ---------------------------------------------------------------------------------------------- inside the model


def starts(lm: LM, documents: Sequence[str], tokens: int) -> Tensor:
    """The first `tokens` tokens of documents, int64 `[documents, tokens]`. Raises KvlabError where one is shorter."""
    rows = []
    for document in corpus.documents(documents):
        ids = lm.encode(document.text, chat=False)[0]
        if len(ids) < tokens:
            raise KvlabError(f"{document.name} has {len(ids)} tokens, and {tokens} are asked for")
        rows.append(ids[:tokens])
    return torch.stack(rows)


def inside_the_model(
    lm: LM, documents: Sequence[str], tokens: int, new_tokens: int, window: int, capacity: int
) -> Findings:
    """`teacher_forced` on the starts of documents, under the methods of `writing`.

    Args:
        tokens, new_tokens: of the prompt, and of what follows it in the document.
    """
    ids = starts(lm, documents, tokens + new_tokens + 1)
    policies = {name: method for name, method in writing(capacity, window).items() if name != "full"}
    return teacher_forced(lm, ids, tokens, policies)


@torch.inference_mode()
def teacher_forced(
    lm: LM, ids: Tensor, prompt: int, policies: dict[str, Policy], look: _Look | None = None
) -> Findings:
    """Feed a text under compressed caches (figure 7 and table 1 inside the model); each step's error enters the next.

    Args:
        ids: int64 `[documents, prompt + response]`; some documents run as one batch.
        prompt: tokens that are prefilled.
        policies: by name, "morphkv" among them.
        look: called after every step with the documents of the batch (their rows), the step, and sessions by name. The
            sessions are those of the policies that act while decoding.

    Returns:
        Table with columns document (its row), policy, step, measure, value. The measures are:
        - `kl`: the divergence of the next-token distribution from the full cache's, in nats.
        - `nll_gap`: the excess of the next token's negative log-likelihood, in nats.
        - `kv_bytes`: keys and values stored for one document.
        The metrics are those of `fading` over the steps from COUNTED_FROM on. The first step is the first token that
        was fed after the prompt was compressed.

    Raises:
        KvlabError: nothing follows the prompt.
    """
    if not 0 < prompt < ids.shape[1] - 1:
        raise KvlabError(f"a prompt of {prompt} tokens and a response of two at least do not fit into {ids.shape[1]}")
    every = range(len(ids))
    batches = [every[start : start + TOGETHER] for start in every[::TOGETHER]]
    table = pd.concat([_under_each(lm, ids, prompt, policies, batch, look) for batch in batches], ignore_index=True)
    return replace(fading(_counted(table), ("kl", "nll_gap")), table=table)


def _under_each(
    lm: LM, ids: Tensor, prompt: int, policies: dict[str, Policy], documents: range, look: _Look | None
) -> pd.DataFrame:
    """The table of `teacher_forced` for these documents, as one batch."""
    ids = ids[documents.start : documents.stop].to(lm.device)
    fed, nexts = ids[:, prompt:-1], ids[:, prompt + 1 :]
    with shared_prefill(lm.model, list(policies.values())):
        prefilled = lm.model(ids[:, :prompt], use_cache=True, logits_to_keep=1).past_key_values
    whole = _decoded(lm, fed, {"full": policy("full")}, prefilled)
    # These are most of the memory of an analysis, so there is never a second copy.
    first = next(whole)[0][0].float().log_softmax(-1)
    full = first.new_empty(len(first), fed.shape[1], first.shape[-1])
    full[:, 0] = first
    for step, (logits, _) in enumerate(whole, 1):
        full[:, step] = logits[0].float().log_softmax(-1)
    known = _nll(full, nexts)
    # Filled in place: a small object kept of a step would lie in memory between that step's large distributions. The
    # next step could then not use their memory again.
    every = [list(policies), documents, MEASURED, range(1, fed.shape[1] + 1)]
    values = torch.empty([len(labels) for labels in every], dtype=torch.float64)
    index_of = {name: index for index, name in enumerate(policies)}
    # Policies that act at every step take their steps together; the others need no single steps.
    acting = [name for name, method in policies.items() if method.needs.acts_while_decoding]
    parts = [[name] for name in policies if name not in acting] + ([acting] if acting else [])
    for names in progress_bars.each(parts, "inside the model", "part"):
        decoded = _decoded(
            lm, fed, {name: policies[name] for name in names}, prefilled, look and partial(look, documents)
        )
        for step, (logits, stored) in enumerate(decoded, 1):
            rows = logits.float().log_softmax(-1)
            for name, row, size in zip(names, rows, stored, strict=True):
                of_step = values[index_of[name], :, :, step - 1]
                of_step[:, 0] = F.kl_div(row, full[:, step - 1], reduction="none", log_target=True).sum(-1)
                of_step[:, 1] = _nll(row, nexts[:, step - 1]) - known[:, step - 1]
                of_step[:, 2] = size
    labels = pd.MultiIndex.from_product(every, names=["policy", "document", "measure", "step"])
    return pd.Series(values.flatten(), labels, name="value").reset_index()


def _nll(log_probabilities: Tensor, tokens: Tensor) -> Tensor:
    return -log_probabilities.gather(-1, tokens[..., None])[..., 0]


def _decoded(
    lm: LM, ids: Tensor, together: Mapping[str, Policy], prefilled: LiveCache, look: _Seen | None = None
) -> Iterator[_Step]:
    """Several policies in one batch, step by step: logits `[policies, documents, vocabulary]`, and for each policy the
    bytes of keys and values of one document.
    """
    sessions = []
    for method in together.values():
        with live_session.compress(lm.model, method, turns="leave") as session:
            session.branch(prefilled)
            session.end_prompt()
        sessions.append(session)
    by_name = dict(zip(together, sessions, strict=True))
    fed, shape = ids.repeat(len(together), 1), (len(together), len(ids))
    with live_session.compress(lm.model, "full", turns="leave") as joint:
        past = joint.join(sessions)
        if not any(method.needs.acts_while_decoding for method in together.values()):
            # A policy that does nothing after the prefill is fed many tokens at once, as turns that are stored whole.
            for turn in fed.split(TURN, 1):
                before = [session.kv_bytes for session in sessions]
                logits = lm.model(turn, past_key_values=past).logits.unflatten(0, shape)
                steps = turn.shape[1]
                growth = [(session.kv_bytes - size) / steps for session, size in zip(sessions, before, strict=True)]
                for step in range(steps):
                    sizes = zip(before, growth, strict=True)
                    yield logits[:, :, step], [(size + more * (step + 1)) / len(ids) for size, more in sizes]
            return
        for step, token in enumerate(progress_bars.each(fed.unbind(1), "inside the model", "token"), 1):
            logits = lm.model(token[:, None], past_key_values=past, logits_to_keep=1).logits[:, -1]
            if look is not None:
                look(step, by_name)
            yield logits.unflatten(0, shape), [session.kv_bytes / len(ids) for session in sessions]
