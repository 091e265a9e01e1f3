"""Compare kvlab and kvpress on one model, in turns: retained sets, answers, times, and decoding.

\b
python benchmarks/peers.py
python benchmarks/peers.py --tokens 1000 --methods snapkv,knorm --rounds 1
python benchmarks/peers.py --parts sets --ratios 0.1 --ratios 0.5 --out peers.md

The first run makes an environment in the cache folder (KVLAB_HOME, 1.5 GB), for kvpress and the transformers that it
needs. Later runs find it there. kvpress runs in a process of its own, on the same weights and token ids.

\b
* sets: the retained sets of every method that both have, as they come and with kvlab's parameters made like kvpress's
* answers: needles whose question comes after the text was compressed, answered from either's cache (12 methods)
* times: kvpress runs the model for each method and ratio; kvlab captures once and replays (the first length)
* decode: tokens per second, cache and peak memory after long prompts, each run in a fresh process

A ratio compares two numbers of one round. Several rounds give a range.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import bar, in_a_sentence, run
from peers_answers import answers_table, asked
from peers_methods import TWELVE, WINDOW, Method, chosen
from peers_process import Process, loaded
from peers_sets import compared, counterpart, ours, retained
from peers_tables import REPORTS, Table, decode_table, sets_table, setting, show, times_table, write
from rich.console import Console
from rich.progress import Progress

import kvlab
from kvlab.analyses.morphkv.sizes import of_model
from kvlab.bench import clock, memory, meters, timing
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.inputs.models import LM, MODELS, pull

CPU = torch.device("cpu")
PARTS = ("sets", "answers", "times", "decode")
RATIOS = [0.1, 0.2, 0.3, 0.5, 0.7]
LENGTHS = [700, 1000, 1200]
LONG = [4000, 8000]
DECODED = ("snapkv", "streamingllm", "adakv")
RESPONSE = 32


def folder_of(model: str) -> Path:
    """The folder of a model of the catalogue, or a folder itself."""
    if model in MODELS:
        return pull(model)
    if (Path(model) / "config.json").is_file():
        return Path(model).absolute()
    raise KvlabError(f"{model} is neither a model of the catalogue ({', '.join(MODELS)}) nor the folder of one")


def prompts(lm: LM, lengths: list[int]) -> list[list[int]]:
    """One real text for each length, as a user's message where the model has a chat template, cut to that length."""
    texts = corpus.SETS["mixed/8"]
    # Half of the texts are of one genre, half of another: one of each in turn.
    found, names = [], iter(sorted(texts, key=lambda name: texts.index(name) % (len(texts) // 2)))
    for length in lengths:
        ids: list[int] = []
        while len(ids) < length:
            name = next(names, None)
            if name is None:
                raise KvlabError(f"there are not enough texts of {length} tokens for {len(lengths)} prompts")
            ids = lm.encode(corpus.document(name).text)[0, :length].tolist()
        found.append(ids)
    return found


# ---------------------------------------------------------------------- retained sets


def sets(
    lm: LM, peer: Process, methods: dict[str, Method], texts: list[list[int]], ratios: list[float], progress: Progress
) -> list[dict]:
    """One row for each prompt, method and ratio: the agreement as they come, and made alike."""
    rows, task = [], progress.add_task("retained sets", total=len(texts) * len(methods) * len(ratios))
    for number, ids in enumerate(texts):
        orders = {
            (name, keep, alike): json.dumps(methods[name].told(keep, alike))
            for name in methods
            for keep in ratios
            for alike in (False, True)
        }
        presses = list(dict.fromkeys(orders.values()))
        masks = dict(zip(presses, retained(peer, ids, [json.loads(told) for told in presses]), strict=True))
        theirs = {key: masks[told] for key, told in orders.items()}
        plain = {(name, keep): methods[name].as_it_comes(keep) for name in methods for keep in ratios}
        alike = {
            (name, keep): counterpart(methods[name], theirs[name, keep, True], len(ids), of_model(lm).group)
            for name, keep in plain
        }
        needed = [*plain.values(), *filter(None, alike.values())]
        trace = kvlab.capture(lm, torch.tensor(ids), 0, window=WINDOW, policies=needed)
        for (name, keep), policy in plain.items():
            found = compared(ours(trace, policy), theirs[name, keep, False])
            row = dict(prompt=number, tokens=len(ids), method=name, keep=keep, plain=found, alike=None)
            if like := alike.get((name, keep)):
                row["alike"] = compared(ours(trace, like), theirs[name, keep, True])
            rows.append(row)
            progress.advance(task)
    return rows


# ---------------------------------------------------------------------- times


def times(
    lm: LM, peer: Process, methods: dict[str, Method], ids: list[int], ratios: list[float], rounds: int, bars: Progress
) -> list[dict]:
    """One row for each round and method: seconds of kvpress's prefills and kvlab's replays; and one for the capture."""
    rows, tokens = [], torch.tensor(ids)
    policies = {name: [method.as_it_comes(keep) for keep in ratios] for name, method in methods.items()}
    task = bars.add_task("times", total=rounds * len(methods))
    warm = [keep for keep in ratios if keep * 256 > 65][:1] or ratios[-1:]
    for method in methods.values():
        peer.ask("prefill", ids=ids[:256], press=method.told(warm[0]))
    kvlab.capture(lm, tokens[:256], 2)
    every = [policy for some in policies.values() for policy in some]
    for turn in range(rounds):
        trace, seconds = timed(kvlab.capture, lm, tokens, RESPONSE, policies=every)
        rows.append(dict(round=turn, method="capture", ours=seconds, theirs=0.0))
        for name in list(methods) if turn % 2 == 0 else list(methods)[::-1]:
            theirs = sum(peer.ask("prefill", ids=ids, press=methods[name].told(keep))["seconds"] for keep in ratios)
            mine = sum(timed(replayed, trace, policy)[1] for policy in policies[name])
            rows.append(dict(round=turn, method=name, ours=mine, theirs=theirs))
            bars.advance(task)
    return rows


def timed(call: Callable[..., Any], *arguments: Any, **more: Any) -> tuple[Any, float]:
    """Return the result of a call and its seconds."""
    found: list[Any] = []
    seconds = clock.seconds(CPU, lambda: found.append(call(*arguments, **more)))
    return found[0], seconds


def replayed(trace: kvlab.Trace, policy: kvlab.Policy) -> dict[str, float]:
    return kvlab.replay(trace, policy).summary


# ---------------------------------------------------------------------- decoding


def decoded(model: str, method: str | None, budget: int, context: int, steps: int) -> dict[str, float]:
    """In this process: kvlab's numbers of one run, with its peak memory."""
    lm = kvlab.load(model, device="cpu", dtype="float32")
    ids, _ = meters.prompt(lm, context)
    contender = timing.Contender(kvlab.policy(method, budget=budget) if method else None)
    timing.generate(lm, ids[:, :128], 1, contender)
    with memory.Peak(CPU) as peak:
        numbers = timing.generate(lm, ids, steps, contender)
    names = "time_to_first_token", "tokens_per_second", "kv_bytes"
    return {name: numbers[name] for name in names} | {"peak_bytes": peak.bytes}


def decoded_by(
    name: str | None,
    side: str,
    model: str,
    folder: Path,
    ids: list[int],
    budget: int,
    steps: int,
    variables: Mapping[str, str],
) -> dict[str, float]:
    """One side's numbers of one run, in a process of its own with these `variables` in its environment."""
    if side == "ours":
        order = json.dumps([model, name, budget, len(ids), steps])
        label = f"{name or 'the full cache'} at {len(ids)} tokens"
        return json.loads(memory.in_fresh_process([__file__, "--decoded", order], label, variables))
    # int(length * share) entries stay in kvpress; the half is safe from rounding.
    press = chosen(name)[name].told((budget + 0.5) / len(ids)) if name else None
    fresh, _ = loaded(folder, variables)
    with fresh:
        return fresh.ask("decode", ids=ids, press=press, steps=steps, peak=True)


def decode(
    model: str,
    folder: Path,
    lm: LM,
    names: list[str],
    contexts: list[int],
    budget: int,
    steps: int,
    rounds: int,
    bars: Progress,
) -> list[dict]:
    """One row for each round, context, method (None for the full cache) and side."""
    rows: list[dict] = []
    runs = [(name, side) for name in (None, *names) for side in ("ours", "theirs")]
    task = bars.add_task("decoding", total=(rounds + 1) * len(contexts) * len(runs))
    for context in contexts:
        if context + steps + 1 > lm.context_length:
            raise KvlabError(f"{lm.name} takes {lm.context_length} tokens, fewer than {context} and {steps + 1} more")
        ids = meters.prompt(lm, context)[0][0].tolist()

        peaks: dict[tuple[str | None, str], float] = {}
        for turn, each in clock.rounds(runs, rounds):
            if each not in peaks:
                # The exact memory meter slows both sides, so memory has a run of its own.
                peaks[each] = decoded_by(*each, model, folder, ids, budget, steps, memory.TIGHT)["peak_bytes"]
                bars.advance(task)
            numbers = decoded_by(*each, model, folder, ids, budget, steps, {}) | {"peak_bytes": peaks[each]}
            rows.append(dict(round=turn, context=context, method=each[0], side=each[1], **numbers))
            bars.advance(task)
    return rows


# ---------------------------------------------------------------------- the command


def measured(
    model: str,
    methods: dict[str, Method],
    parts: list[str],
    lengths: list[int],
    ratios: list[float],
    rounds: int,
    contexts: list[int],
    budget: int,
    steps: int,
    console: Console,
) -> Iterator[Table]:
    """The tables, each as soon as it is measured."""
    folder = folder_of(model)
    lm = kvlab.load(model, device="cpu", dtype="float32")
    texts = prompts(lm, lengths)
    first = {name: method for name, method in methods.items() if name in TWELVE}
    peer, about = loaded(folder)
    with peer, bar(console) as progress:
        yield setting(lm, about)
        if "sets" in parts:
            yield sets_table(sets(lm, peer, methods, texts, ratios, progress), methods, ratios, lengths)
        if "answers" in parts and first:
            yield answers_table(asked(lm, peer, first, lengths, ratios, progress), lengths)
        if "times" in parts and first:
            rows = times(lm, peer, first, texts[0], ratios, rounds, progress)
            yield times_table(rows, len(ratios), lengths[0], RESPONSE)
    if "decode" in parts and contexts:
        with bar(console) as progress:
            names = [name for name in DECODED if name in methods]
            yield decode_table(
                decode(model, folder, lm, names, contexts, budget, steps, rounds, progress), budget, steps
            )
    yield REPORTS


# ---------------------------------------------------------------------- the command


def main(
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=300, help="Length of a prompt; may be given several times.", show_default=str(LENGTHS)),
    ] = None,
    methods: Annotated[str, typer.Option(help="Names between commas, or all.")] = "all",
    ratios: Annotated[list[float], typer.Option(help="Share of the prompt that stays; several times.")] = RATIOS,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of times and decoding.")] = 2,
    contexts: Annotated[
        list[int] | None,
        typer.Option(min=600, help="Prompts to decode after.", show_default=f"{LONG}, none where --tokens is given"),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = RESPONSE,
    budget: Annotated[int, typer.Option(min=66, help="Entries for each head while decoding.")] = 512,
    model: Annotated[str, typer.Option(help="A name of the catalogue, or a model's folder.")] = "smollm2-135m",
    parts: Annotated[str, typer.Option(help="Some of sets,answers,times,decode.")] = ",".join(PARTS),
    out: Annotated[Path | None, typer.Option(help="A Markdown file for the tables.")] = None,
    order: Annotated[str | None, typer.Option("--decoded", hidden=True)] = None,
) -> None:
    if order:
        print(json.dumps(decoded(*json.loads(order))))
        return
    console = Console(highlight=False)
    with in_a_sentence():
        wanted, some = parts.split(","), chosen(methods)
        if unknown := [part for part in wanted if part not in PARTS]:
            raise KvlabError(f"{unknown[0]!r} is no part; there are {', '.join(PARTS)}")
        if bad := [keep for keep in ratios if not 0 < keep < 1]:
            raise KvlabError(f"a ratio is the share that stays, between 0 and 1, and not {bad[0]:g}")
        lengths, long = tokens or LENGTHS, contexts or ([] if tokens else LONG)
        if small := [(keep, n) for keep in ratios for n in lengths if keep * n < 66]:
            raise KvlabError(
                f"{small[0][0]:g} of {small[0][1]} tokens is less than kvpress's window of 64 and a few more; use "
                "longer prompts or larger ratios"
            )
        tables = []
        for table in measured(model, some, wanted, lengths, ratios, rounds, long, budget, new_tokens, console):
            tables.append(table)
            show(table, console)
        if out:
            write(tables, out)


if __name__ == "__main__":
    run(main, __doc__)
