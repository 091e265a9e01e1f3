"""Whether a device computes what the CPU computes: the part "right" of `gpu.py`."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import common
import torch
from gpu_journal import Item, Row, sentence
from torch import Tensor

import kvlab
from kvlab.bench import meters
from kvlab.core.storage import storages
from kvlab.errors import KvlabError
from kvlab.inputs import models
from kvlab.inputs.models.cached import cached_models
from kvlab.inputs.models.catalogue import MODELS
from kvlab.methods import has_budget

TOKENS, NEW_TOKENS, BUDGET = 256, 8, 64
TOLERANCE = 1e-3
TIES = 1 / 200
"""Share of the retained entries that may differ: rounding decides between entries with equal scores."""
STAND_IN = "tiny-llama-gqa"
FIDELITY = ("streamingllm", "snapkv", "zsmerge", "quest", "rocketkv")
ROUNDED = ("streamingllm", "snapkv", "h2o", "quest", "rocketkv")
REPLAYED, LIVE = "replay {}", "live {}"


def subject(name: str) -> str:
    """How the results name a model: with a stand-in where it is not there.

    Raises:
        KvlabError: a model that kvlab does not know, or a path without a file.
    """
    if name in MODELS:
        ready = any(model.name == name and model.folder.is_dir() for model in cached_models())
        return name if ready else f"{STAND_IN}, random weights ({name} is not there)"
    if name.startswith("random:") or Path(name).expanduser().exists():
        return name
    raise KvlabError(f"{name} is no file and no model of kvlab's: give one of {', '.join(MODELS)}, or a .gguf file")


class Refused(Exception):
    """Nothing that a device could do wrong: the CPU refuses, too, or there is nothing to compare."""


Result = TypeVar("Result")


def expected_of(run: Callable[[], Result]) -> Result:
    """Return the CPU's result. Raises Refused where kvlab cannot do it with this model."""
    try:
        return run()
    except KvlabError as error:
        raise Refused(f"the CPU refuses it, too: {sentence(error)}") from error


@dataclass
class Pair:
    """One model on the CPU and on the device, with the same weights in float32."""

    name: str
    device: torch.device

    @cached_property
    def cpu(self) -> kvlab.LM:
        if self.name.startswith(STAND_IN):
            return models.random_lm(STAND_IN, dtype="float32", device="cpu", onednn=False)
        return models.load(self.name, "cpu", "float32", onednn=False)

    @cached_property
    def there(self) -> kvlab.LM:
        return self.moved(torch.float32)

    def moved(self, dtype: torch.dtype) -> kvlab.LM:
        model = copy.deepcopy(self.cpu.model)
        cast(torch.nn.Module, model).to(self.device, dtype)
        return replace(self.cpu, model=model)

    @cached_property
    def ids(self) -> Tensor:
        """Token ids `[1, TOKENS]` of a text, or random ones without a tokenizer or the texts."""
        try:
            return meters.prompt(self.cpu, TOKENS)[0]
        except (KvlabError, OSError):
            return common.prompt(self.cpu, TOKENS)[None]

    @cached_property
    def here_trace(self) -> kvlab.Trace:
        return self.captured(self.cpu)

    @cached_property
    def there_trace(self) -> kvlab.Trace:
        return self.captured(self.there)

    @cached_property
    def response(self) -> list[int]:
        """The CPU's greedy response, which every run is fed."""
        ids = kvlab.capture(self.cpu, self.ids, NEW_TOKENS, progress=False).ids
        assert ids is not None, "captured from a model"
        return ids.flatten()[TOKENS:][:NEW_TOKENS].tolist()

    def captured(self, lm: kvlab.LM) -> kvlab.Trace:
        needed = [chosen(name) for name in kvlab.policies()]
        options: dict[str, Any] = {"queries": "all", "accumulate": True, "pseudo": [chosen("dapq")], "policies": needed}
        return kvlab.capture(lm, self.ids, len(self.response), response=self.response, progress=False, **options)


def chosen(name: str) -> kvlab.Policy:
    """A policy at the budget of this comparison, if it has one."""
    return kvlab.policy(name, budget=BUDGET) if has_budget(name) else kvlab.policy(name)


def furthest(found: Mapping[str, float], expected: Mapping[str, float]) -> tuple[float, str]:
    """The largest difference of measures, relative to those above 1, and the measure's name."""
    gaps = {}
    for name, value in expected.items():
        gap = abs(found[name] - value) / max(1, abs(value))
        both_undefined = math.isnan(value) and math.isnan(found[name])
        gaps[name] = 0.0 if both_undefined else math.inf if math.isnan(gap) else float(gap)
    worst = max(gaps, key=lambda name: gaps[name])
    return gaps[worst], worst


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest number of the second."""
    here, there = expected.double(), found.cpu().double()
    return float((there - here).abs().max() / here.abs().max().clamp_min(1e-12))


def entries_apart(pairs: Iterator[tuple[Tensor, Tensor]]) -> tuple[int, int]:
    """How many entries only the second set of a pair of `[kv_heads, n]` positions has, and how many it has in all."""
    other, total = 0, 0
    for found, expected in pairs:
        for mine, theirs in zip(found.tolist(), expected.tolist(), strict=True):
            kept = set(theirs) - {-1}
            other, total = other + len(kept - set(mine)), total + len(kept)
    return other, total


def verdict(name: str, gap: float, worst: str = "", entries: tuple[int, int] = (0, 0), judged: bool = True) -> Row:
    row: Row = {"policy": name}
    if entries[1]:
        row |= {"entries": entries[1], "other entries": entries[0]}
    row |= {"largest difference": gap, "of": worst}
    right = gap <= TOLERANCE and entries[0] <= TIES * entries[1]
    return row | ({"right": right} if judged else {})


def capture(pair: Pair, rows: list[Row]) -> None:
    here, there = pair.here_trace, pair.there_trace
    names = "queries", "keys", "values"
    rows += [verdict("", apart(getattr(there, name), getattr(here, name)), name) for name in names]


def replays(pair: Pair, name: str, rows: list[Row]) -> None:
    rows.append(replayed(pair.here_trace, pair.there_trace, name))


def replayed(here: kvlab.Trace, there: kvlab.Trace, name: str, judged: bool = True) -> Row:
    expected = expected_of(lambda: kvlab.replay(here, chosen(name), progress=False))
    found = kvlab.replay(there, chosen(name), progress=False)
    places = [(layer, step) for layer in range(here.n_layers) for step in (0, here.steps)]
    entries = entries_apart((found.kept(*place), expected.kept(*place)) for place in places)
    # Entries of another type take other bytes.
    measures = {name: value for name, value in expected.summary.items() if judged or not name.endswith("_bytes")}
    return verdict(name, *furthest(found.summary, measures), entries, judged)


def live(pair: Pair, name: str, rows: list[Row]) -> None:
    """Logits of every step, relative to the largest, and the entries stored at the end."""

    def run(lm: kvlab.LM) -> tuple[Tensor, list[Tensor]]:
        ids, tokens = pair.ids.to(lm.device), torch.tensor(pair.response, device=lm.device)
        session = kvlab.compress(lm.model, chosen(name), tokenizer=lm.tokenizer, max_new_tokens=len(tokens))
        with torch.inference_mode(), session:
            out = lm.model(ids, use_cache=True, logits_to_keep=1)
            steps = [lm.model(token[None, None], past_key_values=out.past_key_values).logits for token in tokens]
        return torch.cat([out.logits, *steps], 1).cpu(), [session.kept(layer) for layer in lm.layout.compressed]

    expected, kept = expected_of(lambda: run(pair.cpu))
    found, others = run(pair.there)
    rows.append(verdict(name, apart(found, expected), "logits", entries_apart(zip(others, kept, strict=True))))


def fidelity(pair: Pair, name: str, form: str, rows: list[Row]) -> None:
    def run(lm: kvlab.LM) -> dict[str, float]:
        return kvlab.fidelity(lm, chosen(name), pair.ids, storage=form, response=pair.response).summary

    expected = expected_of(lambda: run(pair.cpu))
    rows.append(verdict(name, *furthest(run(pair.there), expected)))


def attribution(pair: Pair, rows: list[Row]) -> None:
    policy = chosen("snapkv")
    here, there = (
        kvlab.attribute(lm, policy, pair.ids, response=pair.response, progress=False) for lm in (pair.cpu, pair.there)
    )
    rows.append(verdict("snapkv", *furthest(there.summary, here.summary)))
    rows.append(verdict("snapkv", apart(there.effects, here.effects), "effects"))


def rounded(pair: Pair, rows: list[Row]) -> None:
    """bfloat16 on the device against float32 on the CPU: how far they are apart, without a judgement."""
    trace = pair.captured(pair.moved(torch.bfloat16))
    rows.append(verdict("", apart(trace.keys, pair.here_trace.keys), "keys", judged=False))
    rows += [replayed(pair.here_trace, trace, name, judged=False) for name in ROUNDED]


def waits(pair: Pair, rows: list[Row]) -> None:
    """How often a decoding step waits for the device, as CUDA counts it; shown, not judged."""
    if pair.device.type != "cuda":
        raise Refused("only CUDA counts how often it is waited for")
    lm, ids = pair.there, pair.ids.to(pair.there.device)
    tokens = torch.tensor(pair.response, device=lm.device)[:, None, None]
    for name in sorted(kvlab.policies()):
        with contextlib.suppress(KvlabError), torch.inference_mode():
            with kvlab.compress(lm.model, chosen(name), tokenizer=lm.tokenizer, max_new_tokens=len(tokens)):
                past = lm.model(ids, use_cache=True, logits_to_keep=1).past_key_values
                # The first compresses the prompt.
                lm.model(tokens[0], past_key_values=past)
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    torch.cuda.set_sync_debug_mode("warn")
                    try:
                        for token in tokens[1:]:
                            lm.model(token, past_key_values=past)
                    finally:
                        torch.cuda.set_sync_debug_mode("default")
            asked = sum("synchroniz" in str(each.message) for each in said)
            rows.append({"policy": name, "waits a step": asked / (len(tokens) - 1)})


def unless_refused(run: Callable[[list[Row]], None], rows: list[Row]) -> None:
    try:
        run(rows)
    except Refused as error:
        rows.append({"policy": "", "note": str(error)})


def items(name: str, device: torch.device) -> list[Item]:
    label = subject(name)
    pair = Pair(label, device)
    todo: dict[str, Callable[[list[Row]], None]] = {"capture": partial(capture, pair)}
    todo |= {REPLAYED.format(each): partial(replays, pair, each) for each in sorted(kvlab.policies())}
    todo |= {f"fidelity {each}": partial(fidelity, pair, each, "as_is") for each in FIDELITY}
    todo["attribution snapkv"] = partial(attribution, pair)
    todo |= {f"storage {form}": partial(fidelity, pair, "snapkv", form) for form in storages() if form != "as_is"}
    todo |= {LIVE.format(each): partial(live, pair, each) for each in sorted(kvlab.policies())}
    todo["bfloat16"] = partial(rounded, pair)
    todo["waits"] = partial(waits, pair)
    # The first item loads the model.
    heavy = {"capture": 20, "bfloat16": 5, "waits": 5, "attribution snapkv": 5} | {
        what: 3 for what in todo if what.startswith(("fidelity", "storage"))
    }
    return [Item("right", label, what, partial(unless_refused, run), heavy.get(what, 1)) for what, run in todo.items()]
