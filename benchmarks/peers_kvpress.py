"""Run kvpress, the peer of peers.py, in an environment of its own; orders and answers are JSON lines.

It is no command: peers.py starts it with the peer's Python. Orders come on standard input, one object a line. Each gets
one line back: `{"error": ...}` where something went wrong. The clock and the memory meter are kvlab's own, so that both
sides are measured alike. Nothing else of kvlab is used here.

A press is given as `{"press": class, "around": class or null, "ratio": share that goes, "parameters": {...}}`. The
parameters are those of the inner press if there is one. kvpress names no positions. So docs/record_sets.py finds the
retained sets from the keys that are in the cache afterwards.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import kvpress  # pyright: ignore[reportMissingImports]
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvlab.bench import clock, memory

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from record_sets import visible  # pyright: ignore[reportMissingImports]  # the file that docs hand out

CPU = torch.device("cpu")
EAGER, OWN_PASSES = "ObservedAttentionPress", "KVzipPress"


def made(told: dict[str, Any]) -> Any:
    """Make the press that an order describes."""
    kind, parameters = getattr(kvpress, told["press"]), told["parameters"]
    if told["around"]:
        return kind(getattr(kvpress, told["around"])(compression_ratio=told["ratio"], **parameters))
    share = "key_channel_compression_ratio" if told["press"] == "ThinKPress" else "compression_ratio"
    return kind(**{share: told["ratio"]}, **parameters)


def pruned(before: Tensor, after: Tensor) -> Tensor | None:
    """Which channels of the keys `[heads, n, head_dim]` went, bool `[heads, head_dim]`; None where none was changed."""
    changed = after.shape == before.shape and not torch.equal(after, before)
    return (after == 0).all(1) if changed else None


def masked_by(module: Any) -> Any:
    """Return the entries that a masking press has masked, and clear them; None for a press that does not mask."""
    masked = getattr(module, "masked_key_indices", None)
    module.masked_key_indices = None
    return masked


class Peer:
    def __init__(self, folder: str):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        self.folder = folder
        self.layers = [layer.self_attn for layer in self.model.model.layers]

    def versions(self) -> dict[str, Any]:
        names = {name: importlib.metadata.version(name) for name in ("kvpress", "transformers", "torch")}
        return {"versions": names, "threads": torch.get_num_threads()}

    def attention(self, name: str) -> None:
        self.model.set_attn_implementation("eager" if name == EAGER else "sdpa")

    # ------------------------------------------------------------------ retained sets

    def retain(self, ids: list[int], presses: list[dict[str, Any]], into: str) -> dict[str, Any]:
        """Write the retained sets of many presses to the file `into`, from as few prefills as possible.

        A press looks at a layer when its attention is done, and changes nothing that the next layer receives. The
        safetensors file has a set, bool `[layers, heads, n]`, under the number of each press.
        """
        tokens, sets = torch.tensor([ids]), {}
        masks = []
        groups: dict[str, list[int]] = {}
        for number, told in enumerate(presses):
            special = told["press"] if told["press"] in (EAGER, OWN_PASSES) else ""
            groups.setdefault(special, []).append(number)
        for special, numbers in groups.items():
            self.attention(special)
            some = [presses[number] for number in numbers]
            kept, masking = (self.repeated if special == OWN_PASSES else self.together)(tokens, some)
            sets |= {str(number): rows for number, rows in zip(numbers, kept, strict=True)}
            masks += [number for number, mask in zip(numbers, masking, strict=True) if mask]
        save_file({name: rows.to(torch.uint8) for name, rows in sets.items()}, into)
        return {"masks": sorted(masks)}

    def together(self, tokens: Tensor, told: list[dict[str, Any]]) -> tuple[list[Tensor], list[bool]]:
        presses, cache = [made(one) for one in told], DynamicCache()
        kept: list[list[Tensor]] = [[] for _ in presses]
        masking = [False] * len(presses)

        def look(module: Any, _: Any, given: dict[str, Any], output: Any) -> None:
            layer = cache.layers[module.layer_idx]
            for number, press in enumerate(presses):
                keys, _values = press.compress(
                    module, given["hidden_states"], layer.keys.clone(), layer.values.clone(), output[1], given
                )
                masked = masked_by(module)
                masking[number] |= masked is not None
                channels = pruned(layer.keys[0], keys[0])
                kept[number].append(visible(layer.keys[0], keys[0], masked) if channels is None else channels)

        hooks = []
        for module in self.layers:
            module.rotary_emb = self.model.model.rotary_emb  # as a press does when it is entered
            hooks.append(module.register_forward_hook(look, with_kwargs=True))
        try:
            for press in presses:
                press.post_init_from_model(self.model)
            self.model.model(input_ids=tokens, past_key_values=cache)
        finally:
            for hook in hooks:
                hook.remove()
        return [torch.stack(rows) for rows in kept], masking

    def repeated(self, tokens: Tensor, told: list[dict[str, Any]]) -> tuple[list[Tensor], list[bool]]:
        """KVzip scores in passes of its own, once for all ratios."""
        press, kept = made(told[0]), []
        cut = press.compress_post

        def every(model: Any) -> None:
            for one in told:
                press.compression_ratio = one["ratio"]
                cut(model)
                layers = [cache.layers[module.layer_idx].keys[0] for module in self.layers]
                rows = zip(layers, layers, map(masked_by, self.layers), strict=True)
                kept.append(torch.stack([visible(*row) for row in rows]))

        press.compress_post = every
        cache = DynamicCache()
        with press(self.model):
            self.model.model(input_ids=tokens, past_key_values=cache)
        return kept, [True] * len(told)

    # ------------------------------------------------------------------ answers

    @cached_property
    def pipeline(self) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        return kvpress.KVPressTextGenerationPipeline(model=self.model, tokenizer=tokenizer)

    def answers(
        self, context: list[int], question: list[int], presses: list[dict[str, Any] | None], new_tokens: int
    ) -> dict[str, Any]:
        """Answer by kvpress's own pipeline after each press has compressed the context.

        A press of None is the full cache. An answer of None means that the pipeline ended in an error. The pipeline's
        first step, which makes tokens of texts, is left out.
        """
        given = {"context_ids": torch.tensor([context]), "questions_ids": [torch.tensor([question])]}
        said = []
        for told in presses:
            self.attention(told["press"] if told else "")
            press = made(told) if told else None
            try:
                said += self.pipeline._forward(given, max_new_tokens=new_tokens, press=press)
            except RuntimeError as error:
                # Where layers keep differently many, a mask made for the first one does not fit the others.
                print(f"{told}: {error}", file=sys.stderr)
                said.append(None)
        return {"answers": said}

    # ------------------------------------------------------------------ times

    def prefill(self, ids: list[int], press: dict[str, Any]) -> dict[str, Any]:
        """Seconds of one prompt with one press, as its users run it."""
        self.attention(press["press"])
        tokens = torch.tensor([ids])

        def run() -> None:
            with made(press)(self.model):
                self.model.model(input_ids=tokens, past_key_values=DynamicCache())

        return {"seconds": clock.seconds(CPU, run)}

    def decode(self, ids: list[int], press: dict[str, Any] | None, steps: int, peak: bool) -> dict[str, Any]:
        """A prompt with or without a press, a step, and then `steps` that are timed; with `peak` the memory too."""
        self.attention("")
        self._generate(torch.tensor([ids[:128]]), None, 1)
        if not peak:
            return self._generate(torch.tensor([ids]), press, steps)
        with memory.Peak(CPU) as most:
            numbers = self._generate(torch.tensor([ids]), press, steps)
        return numbers | {"peak_bytes": most.bytes}

    def _generate(self, tokens: Tensor, press: dict[str, Any] | None, steps: int) -> dict[str, Any]:
        # Checked with kvlab's transformers, whose layers may be of other kinds.
        cache: Any = DynamicCache()
        place = tokens.shape[1]
        times = [clock.wall(CPU)]
        with made(press)(self.model) if press else nullcontext():
            out = self.model(input_ids=tokens, past_key_values=cache, logits_to_keep=1)
        for step in range(1 + steps):
            token = out.logits[:, -1:].argmax(-1)
            times.append(clock.wall(CPU))
            where = torch.tensor([[place + step]])
            out = self.model(input_ids=token, past_key_values=cache, position_ids=where)
        times.append(clock.wall(CPU))
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cast("list[Any]", cache.layers))
        return {
            "time_to_first_token": times[2] - times[0],
            "tokens_per_second": steps / (times[-1] - times[2]),
            "kv_bytes": held,
        }


def main() -> None:
    # Output that libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = None
    for line in sys.stdin:
        order = json.loads(line)
        what = order.pop("do")
        try:
            with torch.inference_mode():
                if what == "load":
                    peer = Peer(**order)
                    answer = peer.versions()
                else:
                    answer = getattr(peer, what)(**order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
