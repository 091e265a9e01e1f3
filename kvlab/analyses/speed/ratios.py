"""Results of timings: ratios to the full cache, round by round, and stored bytes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd

from kvlab.analyses.findings import Findings, estimates
from kvlab.analyses.speed.timings import FULL

GAIN = "gain/{policy}/{where}"
GAIN_GROWTH = "gain_growth/{policy}"
BATCH_GAIN = "batch_gain/{policy}"
GAIN_OVER_H2O = "gain_over_h2o/{policy}"
SLOWDOWN = "slowdown/{policy}"
STORED = "stored/{policy}/longest"
MEMORY_SAVING = "memory_saving/{policy}/longest"
BESIDE_WEIGHTS = "cache_beside_weights/longest"
FIRST_TOKEN = "first_token/{policy}"
ANSWER_SAVED = "answer_saved/{policy}"
PSEUDO_SHARE = "pseudo_share/{policy}"
PSEUDO_OVER_GENERATED = "pseudo_over_generated/{policy}"
PEAK_OVER_SNAPKV = "peak_over_snapkv/{policy}"


def speed_findings(decoded: pd.DataFrame) -> Findings:
    """Compute ratios to the full cache, round by round, with intervals over the rounds.

    Args:
        decoded: of `timings.decoding`.

    Returns:
        `decoded` with tokens_per_second and speedup (against the full cache in the same round). Metrics for every
        policy:
        - `gain/POLICY/shortest`, `gain/POLICY/longest`: speedup - 1 after that prompt.
        - `gain_growth/POLICY`: longest minus shortest.
        - `slowdown/POLICY`, `full` included: seconds of a step after the longest prompt over those after the shortest,
          less 1.
        - `gain/POLICY/largest_batch` and `batch_gain/POLICY` (largest batch minus batch 1), where several batch sizes
          were measured.
        - `gain_over_h2o/zsmerge`, at the longest prompt.
        A run that did not fit into memory has no metric.
    """
    table = decoded.assign(tokens_per_second=decoded["batch"] / decoded["seconds_per_step"])
    full = _of_the_full_cache(table, ["length", "batch", "round"], "seconds_per_step")
    table["speedup"] = full / table["seconds_per_step"]
    findings = Findings(table)
    seconds, speedups = (
        dict(table.pivot(index="round", columns=["policy", "length", "batch"], values=value).items())
        for value in ("seconds_per_step", "speedup")
    )
    lengths, largest = table["length"].unique(), max(table["batch"])
    shortest, longest = min(lengths), max(lengths)
    policies = table["policy"].unique()
    for name in policies:
        _add(findings, SLOWDOWN, seconds[name, longest, 1] / seconds[name, shortest, 1] - 1, policy=name)
        if name == FULL:
            continue
        short, long = speedups[name, shortest, 1] - 1, speedups[name, longest, 1] - 1
        _add(findings, GAIN, short, policy=name, where="shortest")
        _add(findings, GAIN, long, policy=name, where="longest")
        _add(findings, GAIN_GROWTH, long - short, policy=name)
        if largest > 1 and (name, shortest, largest) in speedups:
            batched = speedups[name, shortest, largest] - 1
            _add(findings, GAIN, batched, policy=name, where="largest_batch")
            _add(findings, BATCH_GAIN, batched - short, policy=name)
    if {"h2o", "zsmerge"} <= set(policies):
        ratio = seconds["h2o", longest, 1] / seconds["zsmerge", longest, 1]
        _add(findings, GAIN_OVER_H2O, ratio - 1, policy="zsmerge")
    return findings


def _of_the_full_cache(table: pd.DataFrame, keys: list[str], value: str) -> pd.Series:
    """For each row of a table, the full cache's value in the row with the same keys; missing without such a row."""
    full = table.query("policy == @FULL").set_index(keys)[value]
    return pd.Series(full.reindex(pd.MultiIndex.from_frame(table.filter(keys))).to_numpy(), table.index)


def _add(findings: Findings, effect: str, values: pd.Series, **keys: Hashable) -> None:
    """Add the ratios of all rounds, unless a run of them did not fit into memory."""
    if values.notna().all():
        findings.add(effect, values, **keys)


def memory_findings(decoded: pd.DataFrame, weight_bytes: int) -> Findings:
    """Compute the bytes stored while decoding (exact), for each length, batch and policy. Activations are left out.

    Args:
        decoded: of `timings.decoding`.

    Returns:
        Table with columns length, batch, policy and:
        - stored_bytes: keys, values and the policy's auxiliary data.
        - share: of the full cache's bytes.
        - total_bytes: with the weights.
        - saving: 1 - total / the full cache's total.
        Metrics:
        - `stored/POLICY/longest`: the share.
        - `memory_saving/POLICY/longest`: the saving.
        - `cache_beside_weights/longest`: bytes of the full cache for each byte of the weights.
    """
    settings = decoded.groupby(["length", "batch", "policy"], sort=False)
    table = settings.agg({"kv_bytes": "max", "aux_bytes": "max"}).reset_index()
    table["stored_bytes"] = table.pop("kv_bytes") + table.pop("aux_bytes")
    table["total_bytes"] = table["stored_bytes"] + weight_bytes
    table["share"] = table["stored_bytes"] / _of_the_full_cache(table, ["length", "batch"], "stored_bytes")
    table["saving"] = 1 - table["total_bytes"] / _of_the_full_cache(table, ["length", "batch"], "total_bytes")
    findings = Findings(table)
    longest = table.query("length == length.max() and batch == 1").dropna()
    for row in longest.query("policy == @FULL").to_dict("records"):
        findings.set(BESIDE_WEIGHTS, row["stored_bytes"] / weight_bytes)
    for row in longest.query("policy != @FULL").to_dict("records"):
        findings.set(STORED, row["share"], policy=row["policy"])
        findings.set(MEMORY_SAVING, row["saving"], policy=row["policy"])
    return findings


def first_token_findings(first: pd.DataFrame) -> Findings:
    """Overhead of the first token against the full cache in the same round.

    Args:
        first: of `timings.first_tokens`.

    Returns:
        `first` with overhead (seconds / the full cache's - 1); metrics at its longest length `first_token/POLICY`.
    """
    full = _of_the_full_cache(first, ["length", "round"], "seconds")
    findings = Findings(first.assign(overhead=first["seconds"] / full - 1))
    _add_longest(findings, FIRST_TOKEN, "overhead")
    return findings


def answer_findings(first: pd.DataFrame, decoded: pd.DataFrame, answer: float = 0.25) -> Findings:
    """Compute the time of a whole answer, against the full cache's in the same round of decoding.

    It is the time to the first token and that of the steps after it. The first is a mean over its rounds. Few are
    enough, since the steps take most of the time.

    Args:
        first: of `timings.first_tokens`.
        decoded: of `timings.decoding`.
        answer: tokens of the answer as a share of the prompt's (CompilerKV, table A1: a quarter).

    Returns:
        One row for each length and policy of both, and each round of decoding. It has first_token, step, answer_seconds
        and answer_saved (1 - answer_seconds / the full cache's). Metrics `answer_saved/POLICY` are at the longest
        length.
    """
    start = first.groupby(["length", "policy"]).agg(first_token=("seconds", "mean")).reset_index()
    steps = decoded.query("batch == 1").rename(columns={"seconds_per_step": "step"})
    table = steps.filter(["length", "policy", "round", "step"]).merge(start, on=["length", "policy"])
    table["answer_seconds"] = table["first_token"] + table["step"] * (answer * table["length"] - 1)
    full = _of_the_full_cache(table, ["length", "round"], "answer_seconds")
    findings = Findings(table.assign(answer_saved=1 - table["answer_seconds"] / full))
    _add_longest(findings, ANSWER_SAVED, "answer_saved")
    return findings


def pseudo_findings(first: pd.DataFrame, decoded: pd.DataFrame, windows: Mapping[str, int]) -> Findings:
    """Compute the cost of pseudo-queries at the longest prompt of `first`, and that of generating as many tokens.

    Args:
        first: of `timings.first_tokens`.
        decoded: of `timings.decoding`.
        windows: pseudo-tokens of each policy that appends some.

    Returns:
        One row for each policy and round, with columns policy, round and:
        - extra: seconds to the first token above the full cache's in that round.
        - generated: seconds of as many steps of the full cache, by the mean over its rounds.
        Metrics:
        - `pseudo_share/POLICY`: pseudo-tokens over the prompt's, which is how much longer DapQ's equation 4 makes it.
        - `pseudo_over_generated/POLICY`: extra / generated; only a prompt length that was decoded has it.
    """
    findings = Findings(pd.DataFrame(columns=["policy", "round", "extra", "generated"]))
    longest = first.query("length == length.max()").pivot(index="round", columns="policy", values="seconds")
    length = max(first["length"])
    steps = decoded.query("policy == @FULL and batch == 1 and length == @length")["seconds_per_step"]
    rows = []
    for name in [name for name in windows if name in longest]:
        extra = longest.loc[:, name] - longest.loc[:, FULL]
        generated = windows[name] * steps.mean()
        findings.set(PSEUDO_SHARE, windows[name] / length, policy=name)
        _add(findings, PSEUDO_OVER_GENERATED, extra / generated, policy=name)
        rows += [
            {"policy": name, "round": turn, "extra": value, "generated": generated} for turn, value in extra.items()
        ]
    findings.table = pd.DataFrame(rows, columns=findings.table.columns)
    return findings


def peak_findings(peaks: pd.DataFrame) -> Findings:
    """Peak memory against SnapKV's in the same round.

    Args:
        peaks: of `timings.peaks`.

    Returns:
        `peaks`; metrics `peak_over_snapkv/POLICY` (peak / SnapKV's - 1). A run that did not fit has no metric.
    """
    findings = Findings(peaks)
    if peaks.empty:
        return findings
    wide = peaks.pivot(index="round", columns="policy", values="peak_bytes")
    for name in (name for name in wide.columns if name not in (FULL, "snapkv")):
        _add(findings, PEAK_OVER_SNAPKV, wide.loc[:, name] / wide.loc[:, "snapkv"] - 1, policy=name)
    return findings


def _add_longest(findings: Findings, effect: str, column: str) -> None:
    """The ratio in `column` at the longest length, policy by policy."""
    longest = findings.table.query("length == length.max() and policy != @FULL")
    for name, rounds in longest.groupby("policy", sort=False):
        _add(findings, effect, rounds.loc[:, column], policy=name)


def points(table: pd.DataFrame, value: str, by: Sequence[str] = ("policy", "length")) -> pd.DataFrame:
    """The mean of `value` with its interval over rounds, as points to draw: the columns of `by`, mean, low, high."""
    groups: Any = table.dropna(subset=[value]).groupby(list(by), sort=False)[value]
    return estimates(groups, by).rename(columns={"value": "mean"})
