"""Retrieval heads, measured: how much each query head looks at a needle while the model answers with it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvlab.core import attention
from kvlab.errors import KvlabError, whole
from kvlab.inputs import corpus
from kvlab.inputs.corpus import Document
from kvlab.inputs.models import lm_of
from kvlab.lib import progress_bars
from kvlab.methods._base.lookup import HeadScores
from kvlab.traces.run import capture
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvlab.inputs.models import LM

NEEDLE = "The words that open the {colour} gate of {town} are {words}."
QUESTION = "Which words open the {colour} gate of {town}? Answer with these words alone."
COLOURS = ("amber", "black", "blue", "brown", "copper", "green", "grey", "red", "silver", "violet", "white", "yellow")
TOWNS = (
    "Aldermoor",
    "Brightwater",
    "Carrow",
    "Dunmere",
    "Eastholm",
    "Fennick",
    "Graywick",
    "Hallowby",
    "Ilverton",
    "Kestrel Bay",
    "Lowmarsh",
    "Northam",
    "Oakhurst",
    "Penrose",
    "Quarrington",
    "Rushford",
)
WORDS = (
    "anchor",
    "apple",
    "basket",
    "bridge",
    "butter",
    "candle",
    "castle",
    "circle",
    "coffee",
    "cotton",
    "desert",
    "engine",
    "feather",
    "finger",
    "forest",
    "garden",
    "hammer",
    "island",
    "jacket",
    "kitchen",
    "ladder",
    "lemon",
    "marble",
    "mirror",
    "needle",
    "orange",
    "paper",
    "pencil",
    "pepper",
    "piano",
    "pocket",
    "rabbit",
    "ribbon",
    "river",
    "saddle",
    "shadow",
    "silver",
    "spider",
    "summer",
    "ticket",
    "tunnel",
    "velvet",
    "violin",
    "window",
)
SAID = 6
SMALLEST = 32


def measure(
    lm: LM,
    context: int = 1000,
    needles: int = 8,
    seed: int = 0,
    hay: Sequence[Document] | None = None,
    progress: bool | None = None,
) -> HeadScores:
    """Score a model's query heads: the share of the answer's attention that falls on the needle, averaged.

    A needle is a sentence that names six words. Each is hidden in a document of its own, at depths that divide the hay
    evenly. A question for the words follows. The right answer is fed, whether or not the model would give it. Heads
    that find the words look at the needle from the answer's tokens (DuoAttention calls them retrieval heads).
    Cost: one prefill of `context` tokens for each needle.

    Args:
        lm: from `kvlab.load`.
        context: tokens of hay in each prompt.
        needles: how many are averaged.
        seed: of words, places and hay.
        hay: documents to hide needles in, used in turn; presidential messages (the pack `sotu`) unless given.
        progress: show a progress bar; by default after five seconds, on a terminal or in a notebook run by hand.

    Raises:
        KvlabError: a model without tokenizer, hay that is too short, or a prompt beyond what the model takes.
    """
    from kvlab import __version__

    lm = lm_of(lm)
    if whole("needles", needles) < 1 or whole("context", context) < SMALLEST:
        raise KvlabError(
            f"heads are measured with at least 1 needle in {SMALLEST} tokens of hay, not {needles} in {context}"
        )
    lm.require_tokenizer("no needle can be written for it")
    if hay is None:
        hay = list(corpus.documents_between(lm, context, 10**9, limit=needles, seed=seed))
    if not hay:
        raise KvlabError("there is no hay to hide needles in; give at least one document")
    rng = random.Random(seed)
    depths = [round((number + 0.5) / needles, 4) for number in range(needles)]
    contexts, shares, documents, kv_heads, layers = [], [], [], 0, None
    for number, depth in enumerate(progress_bars.each(depths, "heads", "needle", progress)):
        straw = hay[number % len(hay)].window(lm, context)
        ids, needle, answer = _example(lm, straw.text, depth, rng)
        trace = capture(lm, ids, len(answer), window=1, pseudo=(), response=answer, progress=progress)
        shares.append(needle_shares(trace, needle))
        kv_heads, layers = trace.kv_heads, list(trace.layers) if trace.layout.mixed else None
        contexts.append(len(ids))
        documents.append(straw.signature)
    scores = torch.stack(shares).mean(0)
    return HeadScores(
        model=lm.name,
        sha256=lm.sha256,
        n_layers=scores.shape[0],
        heads=scores.shape[1],
        kv_heads=kv_heads,
        contexts=contexts,
        depths=depths,
        documents=documents,
        seed=seed,
        kvlab=__version__,
        layers=layers,
        scores=[[round(score, 6) for score in row] for row in scores.tolist()],
    )


def needle_shares(trace: Trace, needle: Tensor) -> Tensor:
    """Share of the response tokens' attention, over all that each of them sees, that falls on the needle's tokens.

    Args:
        trace: whose response is the answer.
        needle: int64 `[n]`, positions of the needle's tokens.

    Returns:
        `[layers, heads]` in [0, 1], averaged over the response.

    Raises:
        KvlabError: no response, or positions outside the prompt.
    """
    if not trace.steps:
        raise KvlabError("a trace without response has no answer tokens; capture it with response=")
    if not len(needle) or int(needle.min()) < 0 or int(needle.max()) >= trace.prompt_length:
        raise KvlabError(f"the needle's positions must lie in the prompt, 0 .. {trace.prompt_length - 1}")
    visible = attention.last_visible(trace.steps, trace.length, trace.keys.device)
    needle = needle.to(trace.keys.device)
    layers = enumerate(zip(trace.response_queries, trace.keys, strict=True))
    rows = [attention.weights(q, k, trace.softmax.row(index), visible) for index, (q, k) in layers]
    shares = [weights[..., needle].sum(-1).mean(-1) for weights in rows]
    return torch.stack(shares).cpu()


def _example(lm: LM, straw: str, depth: float, rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """A prompt's ids, the positions of its needle's tokens, and the ids of the answer, int64 `[tokens]` each."""
    gate = {"colour": rng.choice(COLOURS), "town": rng.choice(TOWNS)}
    words = ", ".join(rng.sample(WORDS, SAID))
    needle, question = NEEDLE.format(**gate, words=words), QUESTION.format(**gate)
    # Between two sentences, so that the needle reads as one of its own.
    ends = re.finditer(r"[.!?]\s", straw[: int(depth * len(straw))])
    cut = max((end.end() for end in ends), default=0)
    text = " ".join(part.strip() for part in (straw[:cut], needle, straw[cut:]) if part.strip())

    tokenizer = cast("PreTrainedTokenizerBase", lm.tokenizer)
    chat = bool(getattr(tokenizer, "chat_template", None))
    if chat:
        message = [{"role": "user", "content": f"{text}\n\n{question}"}]
        text = cast(str, tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
    else:
        text = f"{text}\n\nQuestion: {question}\nAnswer:"
        words = f" {words}"
    encoded = tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=True, verbose=False)
    start = text.index(needle)
    end = start + len(needle)
    spans = enumerate(encoded["offset_mapping"])
    inside = [token for token, (first, last) in spans if start < last and first < end and first < last]
    answer = tokenizer(words, add_special_tokens=False)["input_ids"]
    return torch.tensor(encoded["input_ids"]), torch.tensor(inside), torch.tensor(answer)
