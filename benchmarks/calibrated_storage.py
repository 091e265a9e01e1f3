"""Compare calibrated storage with the others on a text that it has not learnt from: bits, distortion, output error.

kvlab calibrate smollm2-135m
python benchmarks/calibrated_storage.py smollm2-135m-kvtc.safetensors
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import kvlab
from kvlab.core.storage import Storage, kivi, kvtc, stored_as
from kvlab.core.store import LayerStore

MODEL, DOCUMENT, TOKENS, NEW_TOKENS = "smollm2-135m", "sotu/1962", 1000, 16


def off(found: Tensor, truth: Tensor) -> float:
    """Squared error over the squares."""
    return float((found - truth).square().sum() / truth.square().sum())


def row(trace: kvlab.Trace, storage: Storage) -> str:
    keys, values = (x[:, :, : trace.prompt_length] for x in (trace.keys, trace.values))
    store = LayerStore(keys, values)
    store.layers = trace.prompt.layers
    store.set_storage(storage)
    bits = 8 * store.kv_bytes / (keys.numel() + values.numel())
    error = float(kvlab.replay(trace, "full", storage=storage).output_error.mean())
    name = storage.name.partition("@")[0]
    return f"| `{name}` | {bits:.2f} | {off(store.keys, keys):.5f} | {off(store.values, values):.5f} | {error:.3f} |"


def main(path: str) -> None:
    lm = kvlab.load(MODEL)
    trace = kvlab.capture(lm, kvlab.document(DOCUMENT).window(lm, TOKENS), new_tokens=NEW_TOKENS)
    print("| storage | bits a number | distortion of keys | of values | output error |\n|---|---|---|---|---|")
    forms = [stored_as(name) for name in ("turbo-4", "turbo-3", "turbo-2")] + [kivi(2, residual=0)]
    with torch.inference_mode():
        for storage in forms + [kvtc(path, bits) for bits in (4, 3, 2, 1.5, 1)]:
            print(row(trace, storage), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
