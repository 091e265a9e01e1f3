"""Record the prompt entries that a press of kvpress keeps, for kvlab's policy "recorded".

Copy this file next to your code.

    from record_sets import record
    record(model, ids, press, "sets.safetensors")        # ids: int64 [1, tokens] or [tokens]

It needs what kvpress needs: torch, transformers, safetensors. Other code calls `write` with its own positions.
"""

import contextlib
import hashlib

import torch
from safetensors.torch import save_file
from transformers import DynamicCache


def write(path, kept, ids, model="", source="", steps=None):
    """`kept`: [layers, kv_heads, n], ascending, -1 padded; `steps`: [steps, layers, kv_heads, n], stored after each."""
    ids = torch.as_tensor(ids).reshape(-1).long().cpu().contiguous()
    about = {"format": "kvlab-sets-1", "model": model, "source": source, "prompt_tokens": str(len(ids))}
    about["prompt_sha256"] = hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()
    tensors = {"kept": kept} if steps is None else {"kept": kept, "steps": steps}
    save_file({name: sets.to(torch.int32).cpu().contiguous() for name, sets in tensors.items()}, path, metadata=about)


def record(model, ids, press, path):
    """Prefill twice, without the press and with it, and write which positions it has kept."""
    ids = torch.as_tensor(ids, device=model.device).reshape(1, -1)
    before, _ = prefilled(model, ids, contextlib.nullcontext())
    after, masked = prefilled(model, ids, press(model))
    marks = [visible(*layer) for layer in zip(before, after, masked, strict=True)]
    write(path, positions(torch.stack(marks)), ids, model.config.name_or_path, type(press).__name__)


@torch.inference_mode()
def prefilled(model, ids, around):
    """Keys of each layer `[kv_heads, n, head_dim]` after a prefill, and what a press that masks has masked."""
    attentions = [layer.self_attn for layer in model.model.layers]
    for module in attentions:
        module.masked_key_indices = None
    cache = DynamicCache()
    with around:
        model.model(input_ids=ids, past_key_values=cache)
    masked = [getattr(module, "masked_key_indices", None) for module in attentions]
    for module in attentions:
        module.masked_key_indices = None
    return [layer.keys[0] for layer in cache.layers], masked  # pyright: ignore


def visible(before, after, masked):
    """Which keys `[kv_heads, n, head_dim]` of one layer are still there, bool `[kv_heads, n]`: found by their bits."""
    heads, length = before.shape[:2]
    stays = torch.zeros(heads, length, dtype=torch.bool)
    for head in range(heads):
        where = {bits(key): place for place, key in enumerate(before[head])}
        places = [where.get(bits(key)) for key in after[head]]
        if len(where) < length or None in places:
            raise ValueError("keys were changed or are equal, so the ones that stayed cannot be found")
        stays[head, places] = True
    if masked is not None:
        stays[masked[1].cpu(), masked[2].cpu()] = False
    return stays


def bits(key):
    return key.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def positions(marks):
    """Bool `[layers, kv_heads, n]` as positions `[layers, kv_heads, most]`, ascending, -1 padded."""
    most = int(marks.sum(-1).max())
    every = torch.where(marks, torch.arange(marks.shape[-1]), marks.shape[-1]).sort(-1).values[..., :most]
    return every.masked_fill(every == marks.shape[-1], -1)
