"""Answers as tidy tables, and mean scores with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from kvlab.core.storage import AS_IS
from kvlab.errors import KvlabError
from kvlab.evaluation.planning import FULL
from kvlab.lib.intervals import bounded

if TYPE_CHECKING:
    import pandas as pd

    from kvlab.evaluation.records import Answer


def table(answers: Sequence[Answer]) -> pd.DataFrame:
    """Tidy: one row for each answer, with its marks and its score."""
    import pandas as pd

    mixed = any(answer.uncompressed_bytes for answer in answers)
    return pd.DataFrame(
        {
            "task": answer.task,
            "example": answer.example,
            "policy": answer.policy,
            "budget": answer.budget,
            "storage": answer.storage,
            "compress_at": answer.compress_at,
            "score": answer.scores[answer.metric],
            "prediction": answer.prediction,
            "prompt_tokens": answer.prompt_tokens,
            "generated_tokens": answer.generated_tokens,
            "seconds": answer.seconds,
            "kv_bytes": answer.kv_bytes,
            "aux_bytes": answer.aux_bytes,
            **({"uncompressed_bytes": answer.uncompressed_bytes} if mixed else {}),
            **answer.marks,
        }
        for answer in answers
    )


def metrics(answers: Sequence[Answer]) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Compute numbers by name, as `kvlab eval` logs them and claims name them, and their intervals.

    The names are TASK/POLICY/BUDGET/score, /difference from the full cache, /kv_bytes and /seconds. The first two have
    intervals. A storage other than the plain one follows the budget in the name.

    Raises:
        KvlabError: two settings of a policy, or of what they are measured on, that would have one name.
    """
    values: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    named: dict[str, str] = {}
    for row in summary(answers).to_dict("records"):
        budget = "" if row["budget"] != row["budget"] or row["budget"] is None else f"{row['budget']:g}"
        parts = row["task"], row["policy"], budget, "" if row["storage"] == AS_IS.name else row["storage"]
        name = "/".join(part for part in parts if part)
        measured = f"{row['parameters'] or row['policy']} compressed at the {row['compress_at']}'s end"
        if name in named:
            raise KvlabError(
                f"{name}/score would be the name of two numbers, of {named[name]} and of {measured}; ask for metrics "
                "of each, or name one setting by a subclass"
            )
        named[name] = measured
        values |= {f"{name}/{measure}": row[measure] for measure in ("score", "kv_bytes", "seconds")}
        intervals[f"{name}/score"] = row["low"], row["high"]
        if row["difference"] == row["difference"]:
            values[f"{name}/difference"] = row["difference"]
            intervals[f"{name}/difference"] = row["difference_low"], row["difference_high"]
    return values, intervals


def summary(answers: Sequence[Answer], by: str | None = None) -> pd.DataFrame:
    """Build a table with one row for each task, policy, budget and storage.

    It has the mean score, its paired difference from the full cache (as it is) on the same examples, and seconds. Bytes
    are those of keys and values, and those of the policy's own data (aux_bytes).
    The 95 % intervals of both are over examples. Examples that share a mark `context` count as one, since questions
    over one text are not independent.

    Args:
        by: a mark ("kind", "length", "depth") whose values get rows of their own.
    """
    import pandas as pd

    groups: dict[tuple, list[Answer]] = {}
    for answer in answers:
        value = answer.marks.get(by) if by else None
        system = answer.policy, answer.budget, answer.storage
        kind = answer.task, value, *system, answer.compress_at, answer.signature
        groups.setdefault(kind, []).append(answer)
    plain = [answer for answer in answers if _whole(answer)]
    whole = {(a.task, a.compress_at, a.example): a.scores[a.metric] for a in plain}
    rows = []
    mixed = any(answer.uncompressed_bytes for answer in answers)
    for (task, value, name, budget, storage, at, signature), members in groups.items():
        scores = [(a, a.scores[a.metric]) for a in members]
        score, (low, high) = bounded(_by_context(scores), 0.0, 1.0)
        pairs = [(a, s - whole[task, at, a.example]) for a, s in scores if (task, at, a.example) in whole]
        parameters = signature.split("|")[2] if signature.count("|") > 2 else ""
        difference, (least, most) = float("nan"), (float("nan"),) * 2
        if (name, storage) == (FULL, AS_IS.name):
            difference, (least, most) = 0.0, (0.0, 0.0)
        elif pairs:
            difference, (least, most) = bounded(_by_context(pairs), -1.0, 1.0)
        rows.append(
            {
                "task": task,
                **({by: value} if by else {}),
                "policy": name,
                "budget": budget,
                "storage": storage,
                "parameters": parameters.removesuffix(f"+{storage}"),
                "compress_at": at,
                "n": len(members),
                "score": score,
                "low": low,
                "high": high,
                "difference": difference,
                "difference_low": least,
                "difference_high": most,
                "kv_bytes": sum(a.kv_bytes for a in members) / len(members),
                "aux_bytes": sum(a.aux_bytes for a in members) / len(members),
                **({"uncompressed_bytes": sum(a.uncompressed_bytes for a in members) / len(members)} if mixed else {}),
                "seconds": sum(a.seconds for a in members) / len(members),
                "prefill_seconds": sum(a.prefill_seconds for a in members) / len(members),
            }
        )
    return pd.DataFrame(rows)


def lengths(answers: Sequence[Answer]) -> pd.DataFrame:
    """Average the length of answers: one row for each task, policy, budget and storage.

    `tokens` is the mean length of an answer. `longer` is its mean excess over the full cache's answer to the same
    example. `unboxed` is the share of answers without a box. `repetition` is how far answers repeat themselves.

    answers: of tasks that score `repetition` and `answered`.
    """
    import pandas as pd

    whole = {(a.task, a.compress_at, a.example): a.generated_tokens for a in answers if _whole(a)}
    groups: dict[tuple, list[Answer]] = {}
    for answer in answers:
        groups.setdefault((answer.task, answer.policy, answer.budget, answer.storage), []).append(answer)
    rows = []
    for (task, policy, budget, storage), members in groups.items():
        keys = [((a.task, a.compress_at, a.example), a.generated_tokens) for a in members]
        longer = [tokens - whole[key] for key, tokens in keys if key in whole and not _whole(members[0])]
        rows.append(
            {
                "task": task,
                "policy": policy,
                "budget": budget,
                "storage": storage,
                "tokens": fmean(a.generated_tokens for a in members),
                "longer": fmean(longer) if longer else float("nan"),
                "unboxed": 1 - fmean(a.scores["answered"] for a in members),
                "repetition": fmean(a.scores["repetition"] for a in members),
            }
        )
    return pd.DataFrame(rows)


def _whole(answer: Answer) -> bool:
    return answer.policy == FULL and answer.storage == AS_IS.name


def by_turn(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """The answers that have a turn, by their mark `mode`; by "" where the task knows no modes."""
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        if "turn" in answer.marks:
            found.setdefault(str(answer.marks.get("mode", "")), []).append(answer)
    return found


def decline(answers: Sequence[Answer]) -> pd.DataFrame:
    """Compare later turns with the first one: one row for each policy, budget, storage and `compress_at`.

    `decline` is the mean score of the later turns less that of the first turn; below 0, the score declines. `low` and
    `high` are its 95 % interval over contexts, each of which pairs the two.

    answers: of one mode, with the mark `turn` (see `by_turn`).
    """
    import pandas as pd

    systems: dict[tuple, dict[str, tuple[list[float], list[float]]]] = {}
    for answer in answers:
        contexts = systems.setdefault((answer.policy, answer.budget, answer.storage, answer.compress_at), {})
        context = answer.marks.get("context", answer.example.rpartition("-")[0])
        first, later = contexts.setdefault(context, ([], []))
        (first if answer.marks["turn"] == 1 else later).append(answer.scores[answer.metric])
    rows = []
    for (policy, budget, storage, compress_at), contexts in systems.items():
        differences = [fmean(later) - fmean(first) for first, later in contexts.values() if first and later]
        mean, (low, high) = bounded(differences, -1.0, 1.0) if differences else (float("nan"), (float("nan"),) * 2)
        about = {"policy": policy, "budget": budget, "storage": storage, "compress_at": compress_at}
        rows.append({**about, "contexts": len(differences), "decline": mean, "low": low, "high": high})
    return pd.DataFrame(rows)


def _by_context(values: Iterable[tuple[Answer, float]]) -> list[float]:
    """One mean for each context; an example without the mark is its own."""
    found: dict[str, list[float]] = {}
    for answer, value in values:
        found.setdefault(answer.marks.get("context", answer.example), []).append(value)
    return [sum(mine) / len(mine) for mine in found.values()]
