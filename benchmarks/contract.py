"""Time the checks of a policy's methods: live runs of kvlab's own policy and of a checked subclass.

python -m benchmarks.contract
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch

import kvlab
from kvlab.methods.tova import TOVA


class Checked(TOVA):
    """The same method, written outside kvlab, so that its verbs are checked."""

    scores, step = TOVA.scores, TOVA.step


def main(prompt: int = 1000, steps: int = 64, repeats: int = 5) -> None:
    lm, ids = kvlab.load("smollm2-135m"), torch.arange(prompt)[None] + 100
    generate: Callable[..., torch.Tensor] = cast(Any, lm.model).generate
    seconds: dict[type[TOVA], list[float]] = {TOVA: [], Checked: []}
    for _ in range(repeats):
        for cls, found in seconds.items():
            with kvlab.compress(lm.model, cls(budget=256)):
                begin = time.perf_counter()
                generate(ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
                found.append(time.perf_counter() - begin)
    own, checked = (statistics.median(found) for found in seconds.values())
    print(f"own {own:.2f} s, checked {checked:.2f} s, ratio {checked / own:.3f}")


if __name__ == "__main__":
    main()
