"""Scores on tasks at small budgets, for all papers at once: needles, RULER and questions in LongBench's format.

What a small model says after thousands of tokens is right or wrong by chance too often for a handful of examples to
tell two policies apart by 0/1 scores. So the right answer is fed under every compressed cache (teacher forcing), and
two numbers are taken from the same pass: whether greedy decoding would have said it word for word, and how likely it
was.

Likelihoods start at the second decoded token, for all policies alike. The answer's first token comes from the prefill.
The one after it is decoded while a policy that prunes at its first step (MorphKV) still reads the whole prompt, so that
it says nothing of the cache that is left.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from kvlab import evaluation
from kvlab.analyses.findings import Findings
from kvlab.analyses.tasks.examples import Item
from kvlab.errors import KvlabError
from kvlab.lib.bootstrap import summarise
from kvlab.live.gather import gather
from kvlab.live.session import Session, compress
from kvlab.methods import Policy
from kvlab.methods.full import Full

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

PAIRS = (
    *(("dapq", other) for other in ("snapkv", "pyramidkv", "h2o", "streamingllm", "snapkv_unpooled")),
    ("dapq_pooled", "snapkv"),
    *(
        (one, other)
        for one in ("compilerkv", "compilerkv_filled")
        for other in ("snapkv", "pyramidkv", "h2o", "streamingllm", "zigzagkv", "dynamickv")
    ),
    *(("rocketkv", other) for other in ("snapkv", "quest", "sparq", "duoattention", "hybrid", "exact_topk")),
    *(("hybrid", other) for other in ("quest", "sparq")),
    *(("exact_topk", other) for other in ("snapkv", "quest", "sparq", "duoattention")),
    ("zsmerge", "h2o"),
    ("zsmerge", "snapkv"),
    ("zsmerge_question", "h2o"),
    ("morphkv", "snapkv"),
)
"""Which policies the papers compare: the one that is said to be better comes first."""

SCORED_FROM = 2
"""The first scored token of an answer: 0 is predicted by the prefill, 1 by the first decoding step."""

TOGETHER = 8
"""Caches that are fed in one batch: enough to read the weights once for many, few enough for a laptop's memory."""


# ---------------------------------------------------------------------------------------------------- one pass


@torch.inference_mode()
def follow(
    lm: LM, sessions: Sequence[Session], firsts: Sequence[Tensor], answer: Tensor, at_once: bool
) -> list[tuple[float, float, float]]:
    """Feed the answer under several caches whose prompts have ended, all in one batch.

    Args:
        firsts: for each session, logits `[vocabulary]` of the answer's first token, from the prompt.
        answer: ids `[n]`, n > SCORED_FROM.
        at_once: one forward pass for all tokens, which is the same for policies that do nothing while decoding.

    Returns:
        For each session nll, mean negative log-likelihood in nats of the tokens from SCORED_FROM on; score, 1 where
        every token, the first two too, is the likeliest, so that greedy decoding says this answer; hits, the share of
        the tokens from SCORED_FROM on that are the likeliest given the right ones before.
    """
    fed, target = answer[:-1].to(lm.device).expand(len(sessions), -1), answer[1:].to(lm.device)
    with compress(lm.model, Full(), turns="leave") as together:
        past = together.join(sessions)
        rest = [
            lm.model(some, past_key_values=past, use_cache=True).logits
            for some in fed.split(fed.shape[1] if at_once else 1, dim=1)
        ]
    found, scored = [], slice(SCORED_FROM - 1, None)
    for logits, first in zip(torch.cat(rest, 1).float(), firsts, strict=True):
        right = logits.argmax(-1) == target
        score = bool(right.all()) and int(first.argmax(-1)) == int(answer[0])
        nll, hits = F.cross_entropy(logits[scored], target[scored]), right[scored].float().mean()
        found.append((float(nll), float(score), float(hits)))
    return found


@torch.inference_mode()
def passes(lm: LM, item: Item, wanted: Sequence[tuple[Policy, str]]) -> Iterator[dict[str, Any]]:
    """The right answer to one example under every policy, all from one prefill.

    Args:
        wanted: policies, each with where it compresses: "prompt" (the question has been read) or "context".

    Yields:
        nll, score and hits (see `follow`), scored_tokens, prompt_tokens, and the stored bytes of keys and values at the
        end.

    Raises:
        KvlabError: an answer without a scored token.
    """
    at_context = any(at == "context" for _, at in wanted)
    fed = evaluation.feed(lm, item.example, "context" if at_context else "prompt")
    answer = torch.tensor(lm.tokenizer(item.answer, add_special_tokens=False)["input_ids"])
    if len(answer) <= SCORED_FROM:
        raise KvlabError(
            f"{item.example.id}: the answer {item.answer!r} has {len(answer)} of the {SCORED_FROM + 1} tokens that it "
            "takes to score one that a compressed cache alone has predicted"
        )
    results: dict[tuple[Policy, str], dict[str, Any]] = {}
    gathered = gather(lm.model, [one for one, _ in wanted])
    with gathered:
        out = lm.model(fed.ids[:, : fed.context], use_cache=True, logits_to_keep=1)
    rest = fed.ids[:, fed.context :]
    prefilled = out.past_key_values
    for at in ("context", "prompt"):
        if at == "prompt" and rest.shape[1]:
            with gathered:
                out = lm.model(rest, past_key_values=prefilled, use_cache=True, logits_to_keep=1)
        here = [one for one, where in wanted if where == at]
        for some, at_once in _batches(here):
            sessions, firsts = [], []
            for one in some:
                with compress(
                    lm.model, one, turns="leave", tokenizer=lm.tokenizer, max_new_tokens=item.example.max_new_tokens
                ) as session:
                    past, first = session.branch(prefilled), out.logits[0, -1]
                    session.end_prompt()
                    if at == "context":
                        first = lm.model(rest, past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1]
                sessions.append(session)
                firsts.append(first)
            followed = follow(lm, sessions, firsts, answer, at_once)
            for one, session, (nll, score, hits) in zip(some, sessions, followed, strict=True):
                results[one, at] = {
                    "nll": nll,
                    "score": score,
                    "hits": hits,
                    "scored_tokens": len(answer) - SCORED_FROM,
                    "prompt_tokens": fed.ids.shape[1],
                    "kv_bytes": session.kv_bytes,
                }
    for key in wanted:
        yield results[key]


def _batches(policies: Sequence[Policy]) -> Iterator[tuple[list[Policy], bool]]:
    """Policies that are followed in one batch, and whether they do nothing while decoding."""
    for resting in (True, False):
        alike = [one for one in policies if one.acts_while_decoding != resting]
        yield from ((alike[start : start + TOGETHER], resting) for start in range(0, len(alike), TOGETHER))


# ---------------------------------------------------------------------------------------------------- a whole run


def measure(
    lm: LM,
    plan: Sequence[tuple[Sequence[Item], Sequence[tuple[Policy, str]]]],
    path: str | Path | None = None,
) -> pd.DataFrame:
    """Every example of a plan under every policy it names, and under the full cache.

    Args:
        plan: items, and the policies they meet with where each compresses ("prompt" or "context").
        path: a JSONL file that keeps what is measured; a run that was cut off goes on behind it.

    Returns:
        One row for each example, policy and place: task, document, example, policy, budget, compress_at, nll, score,
        hits, scored_tokens, prompt_tokens, kv_bytes.
    """
    known = _read(path)
    rows = []
    total = sum(len(items) for items, _ in plan)
    with (
        tqdm(total=total, desc="tasks", unit="example", leave=False) as bar,
        nullcontext() if path is None else Path(path).open("a", encoding="utf-8") as file,
        warnings.catch_warnings(),
    ):
        # compilerkv and duoattention say at every prompt that they run without tables or head scores.
        warnings.simplefilter("ignore", UserWarning)
        for items, policies in plan:
            wanted = list(dict.fromkeys([(Full(), "prompt"), *policies]))
            for item in items:
                keys = {each: _key(lm, item, *each) for each in wanted}
                missing = [each for each in wanted if keys[each] not in known]
                for each, found in zip(missing, passes(lm, item, missing) if missing else (), strict=True):
                    known[keys[each]] = found
                    if file is not None:
                        file.write(json.dumps({"key": keys[each], **found}) + "\n")
                        file.flush()
                rows += [_row(item, *each, known[keys[each]]) for each in wanted]
                bar.update()
    return pd.DataFrame(rows)


def _row(item: Item, one: Policy, at: str, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": item.task,
        "document": item.document,
        "example": item.example.id,
        "policy": one.name,
        "budget": getattr(one, "budget", None),
        "compress_at": at,
        **item.example.marks,
        **found,
    }


def _key(lm: LM, item: Item, one: Policy, at: str) -> str:
    about = [
        lm.signature,
        str(lm.dtype),
        item.example.prompt,
        item.example.prefix,
        item.answer,
        item.example.max_new_tokens,
        str(one),
        at,
        f"scored from {SCORED_FROM}",
    ]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]


def _read(path: str | Path | None) -> dict[str, dict[str, Any]]:
    """What is in the file already; a half line at its end, which a run left that was cut off, is taken out."""
    if path is None or not Path(path).exists():
        return {}
    content = Path(path).read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        Path(path).write_bytes(whole)
    lines = [json.loads(line) for line in whole.decode("utf-8").splitlines()]
    return {line.pop("key"): line for line in lines}


# ---------------------------------------------------------------------------------------------------- what came out


def findings(table: pd.DataFrame, pairs: Iterable[tuple[str, str]] = PAIRS) -> Findings:
    """Scores by task, policy and budget, and the paired differences that the papers claim.

    Metrics, each with its bootstrap interval over examples (compressed at the prompt unless they say otherwise):
    - `score/TASK/POLICY/BUDGET`, `hits/...`, `nll/...` (nats a token) and `loss/...`, the NLL above the full cache's on
      the same example; the full cache has no BUDGET;
    - `retained/TASK/POLICY/BUDGET`: hits as a share of the full cache's, the percentage of full-cache performance;
    - `gain/TASK/A_over_B/BUDGET`: NLL of B less that of A on the same examples, so that more than 0 speaks for A;
    - `score_gain/...`, the scores of A less those of B;
    - `widening/TASK/A_over_B`: the gain at the smallest budget at which both were measured less that at the largest;
    - `question_aware/TASK/POLICY/BUDGET`: NLL with the question held back less that with the question in the prompt.
    TASK is a task's name or `all`: every task, each example counting alike, of the policies that met all tasks there.
    """
    result = Findings(table)
    at_prompt = table[table["compress_at"] == "prompt"].assign(example=_names)
    full = at_prompt[at_prompt["policy"] == "full"].set_index("example")
    for name, part in [*at_prompt.groupby("task", sort=False), ("all", at_prompt)]:
        cells = {key: cell.set_index("example") for key, cell in part.groupby(["policy", "budget"], dropna=False)}
        wanted = set(part["example"])
        for (one, budget), cell in cells.items():
            if set(cell.index) != wanted:
                continue
            label = f"{name}/{one}" + ("" if pd.isna(budget) else f"/{budget:g}")
            for measure_name in ("score", "hits", "nll"):
                result.add(f"{measure_name}/{label}", cell[measure_name])
            if one != "full":
                result.add_difference(f"loss/{label}", cell["nll"], full.loc[cell.index, "nll"])
                if (right := full.loc[cell.index, "hits"].mean()) > 0:
                    result.add(f"retained/{label}", cell["hits"] / right)
        for left, right in pairs:
            by_budget = {}
            for budget in sorted({budget for one, budget in cells if one == left and not pd.isna(budget)}):
                a, b = cells.get((left, budget)), cells.get((right, budget))
                if b is None or set(a.index) != set(b.index) or set(a.index) != wanted:
                    continue
                label = f"{name}/{left}_over_{right}/{budget:g}"
                by_budget[budget] = b["nll"] - a["nll"]
                result.add(f"gain/{label}", by_budget[budget])
                result.add_difference(f"score_gain/{label}", a["score"], b["score"])
            if len(by_budget) > 1:
                result.add_difference(
                    f"widening/{name}/{left}_over_{right}", by_budget[min(by_budget)], by_budget[max(by_budget)]
                )
    _question_aware(result, table)
    return result


def _names(table: pd.DataFrame) -> pd.Series:
    """A name for each example that no other has: those of one task over several documents may share an id."""
    return table["task"] + " " + table["document"] + " " + table["example"]


def _question_aware(result: Findings, table: pd.DataFrame) -> None:
    for (name, one, budget), part in table.groupby(["task", "policy", "budget"], sort=False):
        sides = {at: side.set_index(_names(side))["nll"] for at, side in part.groupby("compress_at")}
        if len(sides) == 2:
            result.add_difference(f"question_aware/{name}/{one}/{budget:g}", sides["context"], sides["prompt"])


def curves(found: Findings, measure_name: str, name: str) -> pd.DataFrame:
    """The metrics `MEASURE/TASK/POLICY/BUDGET` of one measure and task as points: policy, budget, value, low, high."""
    rows = []
    for metric, value in found.metrics.items():
        parts = metric.split("/")
        if len(parts) == 4 and parts[:2] == [measure_name, name]:
            low, high = found.intervals[metric]
            rows.append({"policy": parts[2], "budget": float(parts[3]), "value": value, "low": low, "high": high})
    return pd.DataFrame(rows, columns=["policy", "budget", "value", "low", "high"])


def differences(found: Findings, wanted: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Gains to draw below one another: paper, label, value, low, high.

    wanted: a paper's name and `TASK/A_over_B/BUDGET`; what was not measured is left out.
    """
    rows = []
    for paper, name in wanted:
        metric = f"gain/{name}"
        if metric in found.metrics:
            of, pair, budget = name.split("/")
            low, high = found.intervals[metric]
            rows.append(
                {
                    "paper": paper,
                    "label": f"{pair.replace('_over_', ' over ')}, {of}, {budget}",
                    "value": found.metrics[metric],
                    "low": low,
                    "high": high,
                }
            )
    return pd.DataFrame(rows, columns=["paper", "label", "value", "low", "high"])


def question_read_or_not(table: pd.DataFrame) -> pd.DataFrame:
    """The NLL of what was compressed both after the prompt and before its question: policy, place, value, low, high.

    `policy` tells both apart: "snapkv at 128, question read" and "snapkv at 128, question held back".
    """
    rows = []
    for (_, one, budget), part in table.groupby(["task", "policy", "budget"], sort=False):
        if part["compress_at"].nunique() == 2:
            for at, side in sorted(part.groupby("compress_at"), reverse=True):
                value, (low, high) = summarise(side["nll"])
                name = f"{one} at {budget:g}, question {'read' if at == 'prompt' else 'held back'}"
                rows.append({"policy": name, "place": at, "value": value, "low": low, "high": high})
    return pd.DataFrame(rows, columns=["policy", "place", "value", "low", "high"])
